"""Makes the authority of a cluster, its certificates, and its list of revoked certificates.

The authority is one key pair in a folder of its owner. It signs one certificate for all brokers (the name `brokers`),
one for ZooKeeper, one for the administrator, and more for clients. The name in a certificate, its CN, is the principal.
Keys are ECDSA on P-256: a handshake costs a broker a twentieth of one with RSA.

Needs `cryptography`: pip install 'metamq[security]'.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from metamq.errors import ConfigError
from metamq.private_files import FILE_MODE, OWNER_MODE, replace_file
from metamq.security.config import ADMIN, BROKERS, CA, REVOKED, ZOOKEEPER
from metamq.security.names import check_name

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    problem = f"certificates need the package cryptography: {error}"
    raise ConfigError(problem, hint="pip install 'metamq[security]'") from error

CA_KEY = "ca.key"
ISSUED = "issued"
"""The folder with all certificates that were issued, by serial number."""
CA_DAYS = 3650
DAYS = 365
CRL_DAYS = 3650
"""A long validity is safe: processes read the list of revoked certificates from a file."""
FOLDER_MODE = 0o700
BACKDATED = timedelta(minutes=5)
"""The clocks of other machines may be slow by this time."""


@dataclass(frozen=True, slots=True)
class CertificateInfo:
    """The fields of a certificate for display."""

    name: str
    hosts: tuple[str, ...]
    serial: int
    not_before: datetime
    not_after: datetime
    is_revoked: bool

    def days_left(self, now: datetime) -> int:
        """Returns the whole days until it expires; negative: it has expired."""
        return (self.not_after - now).days


class Authority:
    """The certificate authority in a folder. Only one process at a time may use it."""

    def __init__(self, folder: Path) -> None:
        """Opens an authority. Raises ConfigError if there is none, or a file is damaged."""
        self.folder = folder
        try:
            self._certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
            key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError(f"{CA_KEY} is not an elliptic curve key")
            self._key = key
        except FileNotFoundError as error:
            raise ConfigError(
                f"the folder {folder} has no authority: {error.filename} is missing",
                hint=f"`metamq security init --dir {folder}` makes one.",
            ) from error
        except (TypeError, ValueError) as error:  # TypeError: the key has a passphrase
            raise ConfigError(
                f"the authority in {folder} is damaged: {error}", hint="Restore it from a copy."
            ) from error

    @classmethod
    def make(cls, folder: Path) -> Authority:
        """Makes the authority and its folder. Raises ConfigError if there is one: an authority is never replaced."""
        if (folder / CA).exists() or (folder / CA_KEY).exists():
            raise ConfigError(
                f"the folder {folder} has an authority already",
                hint="All certificates depend on it. To make more certificates, use `metamq security issue`.",
            )
        if not folder.exists():
            folder.mkdir(FOLDER_MODE, parents=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"metamq authority {os.urandom(4).hex()}")
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(now + timedelta(days=CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        replace_file(folder / CA_KEY, _pem_of(key), OWNER_MODE)
        replace_file(folder / CA, made.public_bytes(serialization.Encoding.PEM), FILE_MODE)
        authority = cls(folder)
        authority._write_revoked([])
        return authority

    def issue(
        self, name: str, hosts: Sequence[str] = (), *, days: int = DAYS, now: datetime | None = None
    ) -> CertificateInfo:
        """Makes the key pair `name`.key and the certificate `name`.crt; a later call replaces both.

        With `hosts` it is a certificate for servers, valid also for clients. Raises ConfigError.
        """
        check_name(name)
        now = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(min(now + timedelta(days=days), self._certificate.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(one) for one in hosts]), critical=False)
        made = builder.sign(self._key, hashes.SHA256())
        # The key first: a process that reads in between sees a pair that does not fit, and keeps its former one.
        replace_file(self.folder / f"{name}.key", _pem_of(key), OWNER_MODE)
        pem = made.public_bytes(serialization.Encoding.PEM)
        (self.folder / ISSUED).mkdir(FOLDER_MODE, exist_ok=True)
        replace_file(self.folder / ISSUED / f"{made.serial_number:x}.crt", pem, FILE_MODE)
        replace_file(self.folder / f"{name}.crt", pem, FILE_MODE)
        return self._info(made, set())

    def certificates(self) -> list[CertificateInfo]:
        """Returns the certificates in the folder by name, except the authority's own."""
        return self._infos(self.folder)

    def _infos(self, folder: Path) -> list[CertificateInfo]:
        revoked = {one.serial_number for one in self._revoked()}
        paths = (path for path in sorted(folder.glob("*.crt")) if path.name != CA)
        try:
            return [self._info(x509.load_pem_x509_certificate(path.read_bytes()), revoked) for path in paths]
        except ValueError as error:
            raise ConfigError(f"a certificate in {folder} is damaged: {error}", hint="Issue it again.") from error

    def revoke(self, name: str) -> list[CertificateInfo]:
        """Revokes all certificates `name`, including those before a renewal, and returns them.

        Raises ConfigError if there is none.
        """
        found = [one for one in self._infos(self.folder / ISSUED) if one.name == name]
        if not found:
            raise ConfigError(
                f"the folder {self.folder} has no certificate {name!r}", hint="`metamq security list` shows them."
            )
        serials = {one.serial for one in found}
        entries = [one for one in self._revoked() if one.serial_number not in serials]
        builder, now = x509.RevokedCertificateBuilder(), datetime.now(UTC)
        entries += [builder.serial_number(serial).revocation_date(now).build() for serial in sorted(serials)]
        self._write_revoked(entries)
        return [one for one in self._infos(self.folder / ISSUED) if one.name == name]

    def _revoked(self) -> list[x509.RevokedCertificate]:
        return list(x509.load_pem_x509_crl((self.folder / REVOKED).read_bytes()))

    def _write_revoked(self, entries: Sequence[x509.RevokedCertificate]) -> None:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now - BACKDATED)
            .next_update(now + timedelta(days=CRL_DAYS))
        )
        for one in entries:
            builder = builder.add_revoked_certificate(one)
        made = builder.sign(self._key, hashes.SHA256())
        replace_file(self.folder / REVOKED, made.public_bytes(serialization.Encoding.PEM), FILE_MODE)

    def _info(self, certificate: x509.Certificate, revoked: set[int]) -> CertificateInfo:
        names: tuple[str, ...] = ()
        try:
            alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            names = tuple(str(one.value) for one in alternative.value)
        except x509.ExtensionNotFound:
            pass
        return CertificateInfo(
            str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value),
            names,
            certificate.serial_number,
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
            certificate.serial_number in revoked,
        )


def make_all(folder: Path, hosts: Sequence[str], *, days: int = DAYS) -> list[CertificateInfo]:
    """Makes an authority, and the certificates of brokers, ZooKeeper and an administrator. Raises ConfigError."""
    authority = Authority.make(folder)
    servers = [authority.issue(name, hosts, days=days) for name in (BROKERS, ZOOKEEPER)]
    return [*servers, authority.issue(ADMIN, days=days)]


def end_of(path: str) -> float:
    """Returns the end of the certificate in a file, in seconds since 1970. Raises ConfigError."""
    try:
        return x509.load_pem_x509_certificate(Path(path).read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the certificate {path}: {error}") from error


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"{host!r} is not a host: {error}", hint="Write it in ASCII, as in DNS.") from error


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign, key_cert_sign=sign, crl_sign=sign, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
