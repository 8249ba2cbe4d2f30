"""Login by user name and password: SCRAM (RFC 5802) over TLS, both ends, without I/O.

    client                                              broker
    AUTHENTICATE(mechanism, client-first)  ─────────>   a salt: the user's, or one made up for an unknown name
                                           <─────────   server-first
    client-final, with its proof           ─────────>   checks the proof
                                           <─────────   server-final, with the proof that it knows the user

The password is never sent, and a broker stores only a verifier of it. Only mechanisms with channel binding are offered:
the proof covers the certificate that the client saw, so a server in the middle cannot use the login at the broker. Each
login has new random numbers from both ends, so a recorded login cannot be replayed. A login with an unknown name takes
the same steps and the same time, and fails at the end like a wrong password.

A client with a certificate needs no login: TLS has proved its identity. Login by token is in metamq.security.bearer.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metamq.errors import AuthenticationFailed, ConfigError

if TYPE_CHECKING:
    from metamq.security.bearer import TokenVerifier

BINDING = "tls-server-end-point"
MECHANISMS = ("SCRAM-SHA-512-PLUS", "SCRAM-SHA-256-PLUS")
"""The mechanisms, the preferred one first."""
MESSAGE_BYTES_MAX = 512
"""The most bytes of one message of a client. The library prepares names and messages before it checks their lengths."""
ITERATIONS = 4096
"""Iterations make guesses with a stolen verifier slow. They take a client 2 ms. The number is PostgreSQL's."""
PASSWORD_CHARS_MAX = 1024
SALT_BYTES = 16
TOKEN_PREFIX = "token:"
"""The prefix of the user name in a login by token (metamq.security.delegation). A principal has no colon."""
_WRONG = "the user name or the password is wrong"
_ENDED = "the token has ended, or its secret is wrong"
_LONGER = "Queries of Spark: run it again, with a longer `tokenLifetime`."


class Verifier(NamedTuple):
    """The data that verifies a password by one mechanism. It does not contain the password."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


Verifiers = Mapping[str, Verifier]
"""By mechanism."""


class ServerIdentity(NamedTuple):
    """The broker's data for its end of a login."""

    binding: bytes
    """The data that binds a login to the broker's certificate."""
    secret: bytes
    """Known to all brokers and to no client: it makes the salts of unknown users."""
    name: str
    """The name in the certificate."""


def _scramp() -> Any:
    try:
        import scramp
    except ImportError as error:
        raise ConfigError(
            f"a login by password needs the package scramp: {error}", hint="pip install 'metamq[security]'"
        ) from error
    return scramp


def make_verifiers(password: str, salt: bytes | None = None) -> dict[str, Verifier]:
    """Returns the verifiers of a password, for all mechanisms. Raises ConfigError if it cannot be one.

    If `salt` is None, it is random, which the passwords of people need.
    """
    scramp, made = _scramp(), {}
    prepared = len(password)
    if prepared <= PASSWORD_CHARS_MAX:
        with contextlib.suppress(scramp.ScramException):  # make_auth_info() raises it again
            prepared = len(scramp.utils.saslprep(password))  # without characters that the login ignores
    if not 8 <= prepared <= PASSWORD_CHARS_MAX:
        raise ConfigError(
            f"a password has 8 to {PASSWORD_CHARS_MAX:,} characters, not {prepared:,}",
            hint="`metamq user add NAME --generate` makes one.",
        )
    for name in MECHANISMS:
        try:
            mechanism, own_salt = scramp.ScramMechanism(name), salt or secrets.token_bytes(SALT_BYTES)
            made[name] = Verifier(*mechanism.make_auth_info(password, iteration_count=ITERATIONS, salt=own_salt))
        except scramp.ScramException:
            raise ConfigError("the password has characters that no password can have", hint="Use others.") from None
    return made


def check_library() -> None:
    """Raises ConfigError if the library for logins is missing."""
    _scramp()


def server_identity(certificate: Path, key: Path) -> ServerIdentity:
    """Returns the identity of a broker, from its files. Raises ConfigError, OSError."""
    check_library()
    from asn1crypto import pem
    from asn1crypto.x509 import Certificate

    try:
        found: Any = pem.unarmor(certificate.read_bytes(), multiple=True)
        der: bytes = next(iter(found))[2]
        parsed = Certificate.load(der)
        algorithm, name = parsed.hash_algo, parsed.subject.native.get("common_name")
    except ValueError as error:
        raise ConfigError(
            f"the certificate {certificate} cannot be used for logins: {error}",
            hint="Its signature must be one with a hash, by RSA or ECDSA.",
        ) from error
    digest = hashlib.new("sha256" if algorithm in ("md5", "sha1") else algorithm, der).digest()
    return ServerIdentity(digest, hashlib.sha256(key.read_bytes()).digest(), str(name))


def read_secret(path: str, what: str) -> str:
    """Returns the first line of a file. `what` is "password" or "token", for errors. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the {what} file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"the {what} file {path} is not UTF-8 text") from None
    if not lines or not lines[0]:
        raise ConfigError(f"the {what} file {path} is empty", hint=f"Its first line is the {what}.")
    return lines[0]


class ClientLogin:
    """The client's end of one login."""

    def __init__(self, address: str, user: str, password: str, tls: ssl.SSLObject | ssl.SSLSocket) -> None:
        self._address = address
        self._user = user
        self._password = password
        self._tls = tls
        self._client: Any = None
        self._is_answered = False

    def __repr__(self) -> str:
        return f"<login of {self._user} at {self._address}>"

    def first(self, offered: Sequence[str]) -> tuple[str, bytes]:
        """Returns the mechanism and the first message. Raises AuthenticationFailed, ConfigError."""
        known = [name for name in MECHANISMS if name in offered]
        if not known:
            raise AuthenticationFailed(self._address, f"it offers {', '.join(offered)}, not {', '.join(MECHANISMS)}")
        with self._refusing():
            binding = BINDING, self._tls
            self._client = _scramp().ScramClient(known[:1], self._user, self._password, channel_binding=binding)
            return known[0], self._client.get_client_first().encode()

    def next(self, data: bytes) -> bytes:
        """Returns the next message; empty: the login is done. Raises AuthenticationFailed."""
        with self._refusing():
            if not self._is_answered:
                self._is_answered = True
                self._client.set_server_first(data.decode())
                return bytes(self._client.get_client_final().encode())
            self._client.set_server_final(data.decode())
            return b""

    def _refusing(self) -> _Refusing:
        return _Refusing(self._address, "it does not prove that it has the user's verifier")


class BrokerLogin:
    """The broker's end of one login."""

    def __init__(
        self,
        peer: str,
        find: Callable[[str], Verifiers | None],
        identity: ServerIdentity,
        tokens: TokenVerifier | None = None,
    ) -> None:
        """`find` returns the verifiers of a user. `tokens` verifies tokens; if None, tokens are not accepted."""
        self._peer = peer
        self._tokens = tokens
        self._find = find
        self._identity = identity
        self._server: Any = None
        self._mechanism = ""
        self.user = ""
        """The name that the client gave. It is verified when next() says that the login is done."""
        self.expires_s = 0.0
        """The end of its token, in seconds since 1970; 0: it has no token."""

    def next(self, mechanism: str, data: bytes) -> tuple[bytes, bool]:
        """Returns the answer to a message, and True if the login is done. Raises AuthenticationFailed."""
        is_token = self.user.startswith(TOKEN_PREFIX)
        with _Refusing(self._peer, _ENDED if is_token else _WRONG, _LONGER if is_token else None):
            if self._tokens is not None and mechanism == self._tokens.mechanism and self._server is None:
                self.user, self.expires_s = self._tokens.verify(data, self._peer)
                return b"", True
            if len(data) > MESSAGE_BYTES_MAX:
                raise AuthenticationFailed(self._peer, f"a message of a login has more than {MESSAGE_BYTES_MAX} bytes")
            if self._server is None:
                if mechanism not in MECHANISMS:
                    raise AuthenticationFailed(self._peer, f"{mechanism[:40]!r} is not one of {', '.join(MECHANISMS)}")
                self._mechanism = mechanism
                made = _scramp().ScramMechanism(mechanism)
                self._server = made.make_server(self._verifier, channel_binding=(BINDING, self._identity.binding))
                self._server.set_client_first(data.decode())
                return self._server.get_server_first().encode(), False
            self._server.set_client_final(data.decode())
            return self._server.get_server_final().encode(), True

    def _verifier(self, user: str) -> Verifier:
        self.user = user
        found = (self._find(user) or {}).get(self._mechanism)
        made_up = _made_up(user, self._mechanism, self._identity.secret)  # in both cases: the time must be the same
        return found if found is not None else made_up


def _made_up(user: str, mechanism: str, secret: bytes) -> Verifier:
    """Returns a verifier that no password matches. Each broker returns the same one for a name."""
    digest = hashlib.sha512 if "512" in mechanism else hashlib.sha256
    salt, stored, server = (
        hmac.new(secret, f"{part} {user}".encode("utf-8", "replace"), digest).digest() for part in range(3)
    )
    return Verifier(salt[:SALT_BYTES], stored, server, ITERATIONS)


class _Refusing:
    """Turns the library's errors into AuthenticationFailed, without their text, which could help an attacker."""

    def __init__(self, who: str, reason: str, hint: str | None = None) -> None:
        self._who = who
        self._reason = reason
        self._hint = hint

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, AuthenticationFailed | ConfigError) or not isinstance(error, Exception):
            return
        raise AuthenticationFailed(self._who, self._reason, hint=self._hint) from None
