"""The security settings of a process: the `[security]` section of the TOML file, METAMQ_SECURITY_… variables.

Settings name files, so no secret is on a command line, in the environment, or in the `repr` of an object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from metamq.errors import ConfigError

CA, REVOKED = "ca.crt", "revoked.crl"
"""Files in the folder of `metamq security init`."""
BROKERS, ZOOKEEPER, ADMIN = "brokers", "zookeeper", "admin"
"""The principals for which it makes certificates."""
RESERVED = (ADMIN, BROKERS, ZOOKEEPER)
"""Names that no user may have."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts for which each server's certificate is valid."""
WARN_DAYS = 30
"""A certificate that expires sooner must be renewed."""


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """The files with the identity of this process, and those that verify brokers. If all are empty, TLS is off.

    Construction checks that the settings fit together: ConfigError names the missing one.
    """

    dir: str = ""
    """The folder of `metamq security init`: it has all files that a broker needs. With `role` also for clients."""
    role: str = ""
    """The name of the certificate in `dir` that this client uses, as `admin`; empty: none."""
    ca: str = ""
    """File with the certificate of the authority that signs the brokers' certificates."""
    revoked: str = ""
    """File with the authority's list of revoked certificates."""
    certificate: str = ""
    """File with the certificate of this process, for an identity by certificate."""
    key: str = ""
    """File with the private key of that certificate."""
    user: str = ""
    """The name of the user that this client logs in as, if it has no certificate."""
    password_file: str = ""
    """File whose first line is the user's password. Only its owner should be able to read it."""
    token_file: str = ""
    """File with a token (JWT) of an OAuth authority. This client logs in with it instead of a password."""
    jwks: str = ""
    """At brokers: file with the public keys of that authority, as JSON (JWKS). If empty, tokens are not accepted."""
    audience: str = ""
    """At brokers: the audience (`aud`) that a token must have."""
    issuer: str = ""
    """At brokers: the issuer (`iss`) that a token must have. If empty, the issuer is not checked."""
    user_claim: str = "sub"
    """At brokers: the claim with the name of the token's user."""
    zookeeper_tls: bool = True
    """False: connections to ZooKeeper have no TLS. A process that reads their traffic sees the cluster's nodes."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            missing = "key" if self.certificate else "certificate"
            raise ConfigError(
                f"the security setting `{missing}` is missing", hint="`certificate` and `key` belong together."
            )
        if bool(self.user) != bool(self.password_file):
            missing = "password_file" if self.user else "user"
            raise ConfigError(
                f"the security setting `{missing}` is missing", hint="`user` and `password_file` belong together."
            )
        if bool(self.jwks) != bool(self.audience):
            missing = "audience" if self.jwks else "jwks"
            raise ConfigError(
                f"the security setting `{missing}` is missing", hint="`jwks` and `audience` belong together."
            )
        if self.token_file and self.user:
            raise ConfigError("the security settings name a user and a token", hint="Remove one of them.")
        if (self.certificate or self.user or self.token_file) and not self.is_on:
            raise ConfigError(
                "a user, a token or a certificate is given without the authority of the brokers",
                hint="Set `ca`, or METAMQ_SECURITY_CA.",
            )
        if self.role and self.certificate:
            raise ConfigError(
                "the security settings name two certificates: by `role`, and by `certificate`",
                hint="Remove one of them.",
            )
        if self.revoked and not self.is_on:
            raise ConfigError("the security setting `revoked` needs `ca`", hint="Set METAMQ_SECURITY_CA, too.")
        if self.role and not self.dir:
            raise ConfigError("the security setting `role` needs `dir`", hint="Set METAMQ_SECURITY_DIR, too.")

    @property
    def is_on(self) -> bool:
        """True if connections use TLS."""
        return bool(self.dir or self.ca)

    def files(self, role: str = "") -> TlsFiles:
        """Returns the files for `role`, the name of a certificate in `dir`. Empty: those of a client."""
        folder, role = Path(self.dir), role or self.role
        own = (folder / f"{role}.crt", folder / f"{role}.key") if role and self.dir else (self.certificate, self.key)
        ca = self.ca or str(folder / CA)
        revoked = self.revoked or (str(folder / REVOKED) if self.dir else "")
        return TlsFiles(ca, str(own[0]), str(own[1]), revoked)


@dataclass(frozen=True, slots=True)
class DelegatedConfig(SecurityConfig):
    """The security settings of a process that has a token (metamq.security.delegation). It needs no file."""

    token_id: str = ""
    secret: str = field(default="", repr=False)
    authority: str = field(default="", repr=False)
    """The certificate of the authority that signs the brokers' certificates, as PEM."""
    revocations: str = field(default="", repr=False)
    """The list of revoked certificates, as PEM; empty: none is checked."""

    @property
    def is_on(self) -> bool:
        """True: connections use TLS."""
        return True


@dataclass(frozen=True, slots=True)
class PasswordConfig(SecurityConfig):
    """The security settings of a client whose password is in no file, because a person has typed it."""

    name: str = ""
    """The user; `user` is for a password in a file."""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; empty: none."""

    ca: str
    certificate: str
    key: str
    revoked: str
