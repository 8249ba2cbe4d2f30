"""The TLS of a ZooKeeper server: its settings, and its certificate in the form that it reads.

ZooKeeper reads a certificate with its key from one file. The file is made again when they change; ZooKeeper watches it.
The server accepts clients without a certificate, as brokers do. Servers of an ensemble need one among each other.
"""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

from metamq.errors import ConfigError
from metamq.private_files import OWNER_MODE, replace_file
from metamq.security.config import ZOOKEEPER, SecurityConfig
from metamq.security.tls import FreshContext, client_context

PEM = "server.pem"
_FACTORY = "org.apache.zookeeper.server.NettyServerCnxnFactory"


def client_port(port: int, host: str, *, is_secure: bool) -> dict[str, object]:
    """Returns the settings of the port for clients. With TLS there is no other port."""
    name = "secureClientPort" if is_secure else "clientPort"
    return {name: port, f"{name}Address": host}


class ServerTls:
    """The TLS of one server. For the thread that starts the server."""

    def __init__(self, security: SecurityConfig) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._files = security.files() if security.certificate else security.files(ZOOKEEPER)
        if not self._files.certificate:
            raise ConfigError(
                "security is on, and ZooKeeper has no certificate",
                hint="Set METAMQ_SECURITY_DIR to the folder of `metamq security init`.",
            )
        self._context = FreshContext(self._files, client_context)
        self._written: ssl.SSLContext | None = None

    def write(self, folder: Path) -> None:
        """Writes the certificate and its key for the server, if they have changed since the last call."""
        context = self._context.current()
        if context is self._written:
            return
        pem = Path(self._files.key).read_bytes() + Path(self._files.certificate).read_bytes()
        replace_file(folder / PEM, pem, OWNER_MODE)
        self._written = context

    def settings(self, folder: Path, *, with_quorum: bool) -> dict[str, object]:
        """Returns the settings for zoo.cfg."""
        found: dict[str, object] = {"serverCnxnFactory": _FACTORY, "client.certReload": "true"}
        found |= self._of("ssl", folder, "want")
        if with_quorum:
            found |= {
                "sslQuorum": "true",
                "sslQuorumReloadCertFiles": "true",
                "ssl.quorum.clientHostnameVerification": "false",
                **self._of("ssl.quorum", folder, "need"),
            }
        return found

    def _of(self, prefix: str, folder: Path, client_auth: str) -> dict[str, object]:
        return {
            f"{prefix}.keyStore.location": folder / PEM,
            f"{prefix}.keyStore.type": "PEM",
            f"{prefix}.trustStore.location": os.path.abspath(self._files.ca),
            f"{prefix}.trustStore.type": "PEM",
            f"{prefix}.protocol": "TLSv1.3",
            f"{prefix}.enabledProtocols": "TLSv1.3",
            f"{prefix}.clientAuth": client_auth,
        }

    def wrapped(self, connection: socket.socket) -> ssl.SSLSocket:
        """Begins TLS on a connection to the server itself. Raises OSError, and closes the connection.

        The certificate is not verified: it may be for other names than the address that the server listens on.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            return context.wrap_socket(connection)
        except OSError:
            connection.close()
            raise
