"""TLS contexts from files, which may be replaced while the process runs.

Only TLS 1.3 is used, so a downgrade is not possible. Both ends verify certificates against the one authority of the
cluster. A client also checks the host name that it connects to. A broker takes the name in a client's certificate as
the client's identity.

New connections use the present files. So certificates are renewed and revoked without a restart. Unusable files, such
as a half-copied one, are reported once, and the last good files stay in use.

Brokers give no session tickets: a resumed session would outlive the revocation of its certificate. Also, without
tickets, unread bytes on an idle connection mean that the broker has closed it.
"""

from __future__ import annotations

import functools
import logging
import os
import ssl
import tempfile
import threading
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from metamq.errors import ConfigError
from metamq.security.bearer import TokenLogin, TokenVerifier
from metamq.security.config import BROKERS, RESERVED, DelegatedConfig, PasswordConfig
from metamq.security.login import TOKEN_PREFIX, ClientLogin, ServerIdentity, check_library, read_secret, server_identity
from metamq.security.names import check_name

if TYPE_CHECKING:
    from metamq.security.config import SecurityConfig, TlsFiles

log = logging.getLogger("metamq.security")

HANDSHAKE_S = 10.0
TLS_RECORD = b"\x16"
"""The first byte of a TLS connection."""
_State = tuple[tuple[int, int, int], ...]


class FreshContext:
    """A TLS context that follows its files. For any thread."""

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles], ssl.SSLContext]) -> None:
        """`make` is client_context or server_context. Raises ConfigError if a file cannot be used."""
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._state = _state_of(files)
        self._context = make(files)
        self._failed: _State | None = None

    def current(self) -> ssl.SSLContext:
        """Returns the context of the present files, or the last usable context."""
        state = _state_of(self._files)
        if state in (self._state, self._failed):
            return self._context
        with self._lock:
            if state in (self._state, self._failed):  # another thread was first
                return self._context
            try:
                self._context = self._make(self._files)
                self._state, self._failed = state, None
                log.info("new connections use the new certificates of %s", self._files.certificate or self._files.ca)
            except ConfigError as error:
                self._failed = state
                log.error("new connections still use the former certificates: %s", error)
        return self._context


class TlsSource(Protocol):
    """Gives the TLS context of each new connection."""

    def current(self) -> ssl.SSLContext:
        """Returns the context."""
        ...


class FixedContext(NamedTuple):
    """A TLS context that follows no files."""

    context: ssl.SSLContext

    def current(self) -> ssl.SSLContext:
        """Returns the context."""
        return self.context


class ClientSecurity(NamedTuple):
    """The settings with which a client connects to brokers: TLS, and a user if it has no certificate."""

    tls: TlsSource
    user: str
    password_file: str
    token_file: str = ""
    delegated: DelegatedConfig | None = None
    typed: PasswordConfig | None = None

    def login(self, address: str, tls: ssl.SSLObject | ssl.SSLSocket) -> ClientLogin | TokenLogin | None:
        """Returns a login on this connection, or None without a user. Each login reads the file again.

        Raises ConfigError.
        """
        if self.delegated is not None:
            return ClientLogin(address, TOKEN_PREFIX + self.delegated.token_id, self.delegated.secret, tls)
        if self.token_file:
            return TokenLogin(address, read_secret(self.token_file, "token"))
        if not self.user:
            return None
        password = self.typed.password if self.typed is not None else read_secret(self.password_file, "password")
        return ClientLogin(address, self.user, password, tls)


class Security(NamedTuple):
    """The security of a process as a client of brokers and of ZooKeeper; None: off."""

    brokers: ClientSecurity | None = None
    zookeeper: TlsSource | None = None
    has_certificate: bool = False
    """True if ZooKeeper knows this process by a certificate. The process then owns the groups that it makes."""


OFF = Security()


@functools.lru_cache(maxsize=1000)
def client_security(config: SecurityConfig) -> Security:
    """Returns the security of this process's connections. Raises ConfigError."""
    if isinstance(config, DelegatedConfig):
        check_library()
        fixed = FixedContext(delegated_context(config))
        brokers = ClientSecurity(fixed, "", "", delegated=config)
        return Security(brokers, fixed if config.zookeeper_tls else None)
    if not config.is_on:
        return OFF
    typed = config if isinstance(config, PasswordConfig) else None
    user = typed.name if typed is not None else config.user
    if user:
        check_library()
    files = config.files()
    tls = FreshContext(files, client_context)
    brokers = ClientSecurity(tls, user, config.password_file, config.token_file, typed=typed)
    return Security(brokers, tls if config.zookeeper_tls else None, bool(files.certificate))


class BrokerSecurity(NamedTuple):
    """The TLS of a broker for connections that it accepts, and its security as a client of other brokers."""

    server: FreshContext
    client: Security
    tokens: TokenVerifier | None
    """None: tokens are not accepted."""


def broker_security(config: SecurityConfig) -> BrokerSecurity | None:
    """Returns the security of a broker, or None if it is off. Raises ConfigError, also without a certificate."""
    if not config.is_on:
        return None
    files = config.files() if config.certificate else config.files(BROKERS)
    if not files.certificate:
        raise ConfigError(
            "security is on, but the broker has no certificate",
            hint="Set `dir` in [security], or METAMQ_SECURITY_DIR, to the folder of `metamq security init`; or set "
            "`certificate` and `key`.",
        )
    client = FreshContext(files, client_context)
    as_client = Security(ClientSecurity(client, "", ""), client if config.zookeeper_tls else None)
    tokens = token_verifier(config) if config.jwks else None
    return BrokerSecurity(FreshContext(files, server_context), as_client, tokens)


def token_verifier(config: SecurityConfig) -> TokenVerifier:
    """Returns the verifier of tokens. Raises ConfigError."""

    def check_user(name: str) -> None:
        if name in RESERVED:
            raise ConfigError(f"{name!r} is the name of one of the cluster's own certificates")
        check_name(name)

    return TokenVerifier(config, check_user)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Returns the context of a client. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, files)
    return context


def delegated_context(config: DelegatedConfig) -> ssl.SSLContext:
    """Returns the context of a client that has a token."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=config.authority)
    if config.revocations:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:  # OpenSSL reads such a list only from a file
            file.write(config.revocations)
            file.flush()
            context.load_verify_locations(file.name)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    return context


class ServerContext(ssl.SSLContext):
    """The context of a broker."""

    identity: ServerIdentity


def server_context(files: TlsFiles) -> ServerContext:
    """Returns the context of a broker, which also accepts clients without a certificate. Raises ConfigError."""
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files)
    try:
        context.identity = server_identity(Path(files.certificate), Path(files.key))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    if context.identity.name != BROKERS:
        raise ConfigError(
            f"the certificate {files.certificate} is of {context.identity.name!r}, not of {BROKERS!r}: "
            "this replica could not join the others",
            hint=f"`metamq security issue {BROKERS}` makes one.",
        )
    context.verify_mode = ssl.CERT_OPTIONAL
    context.num_tickets = 0
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _read(files.ca, "the certificate of the authority", context.load_verify_locations)
    if files.certificate:
        _read(files.certificate, "the certificate and its key", lambda path: context.load_cert_chain(path, files.key))
    if files.revoked:
        _read(files.revoked, "the list of revoked certificates", context.load_verify_locations)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def _read(path: str, what: str, load: Callable[[str], object]) -> None:
    try:
        load(path)
    except ssl.SSLError as error:
        reason = error.reason or error.strerror or str(error)
        raise ConfigError(
            f"{what}, {path}, cannot be used: {reason.replace('_', ' ').lower()}",
            hint="It must be a PEM file. `metamq security init` makes all of them.",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{what}, {path}, cannot be read: {error.strerror}",
            hint="`metamq security init` makes all files. Each process must be able to read its own files.",
        ) from error


def _state_of(files: TlsFiles) -> _State:
    """Returns a value that changes when the file changes."""
    found = []
    for path in astuple(files):
        try:
            stat = os.stat(path)
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def principal_of(tls: ssl.SSLObject | ssl.SSLSocket | None) -> str:
    """Returns the name in the client's verified certificate; empty if it has no certificate."""
    certificate: dict[str, Any] = (tls.getpeercert() if tls is not None else None) or {}
    names = [str(value) for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if names else ""
