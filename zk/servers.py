"""The address of a ZooKeeper ensemble: "zk1:2181,zk2:2181/chroot"."""

from __future__ import annotations

import re

from metamq.errors import ConfigError
from metamq.zk.names import check_path

DEFAULT_PORT = 2181

_SERVER = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")


def parse_servers(servers: str) -> tuple[list[tuple[str, int]], str]:
    """The (host, port) pairs, and the chroot or "".

    Raises ConfigError, which names the wrong part.
    """
    if "://" in servers:
        raise ConfigError(
            f"the ZooKeeper address {servers!r} is a URL",
            hint='Write host and port, as in "zk1:2181,zk2:2181" or "zk1:2181/chroot".',
        )
    addresses, slash, chroot = servers.strip().partition("/")
    chroot = chroot.rstrip("/")
    if slash and chroot:
        check_path(f"/{chroot}", "the chroot of the ZooKeeper address")
    hosts = [_parse_server(part.strip(), servers) for part in addresses.split(",")]
    return hosts, f"/{chroot}" if chroot else ""


def _parse_server(part: str, servers: str) -> tuple[str, int]:
    match = _SERVER.fullmatch(part)
    port = int(match.group(3) or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65_536:
        raise ConfigError(
            f"{part!r} in the ZooKeeper address {servers!r} is not a host and a port",
            hint='Write it like "zk1:2181,zk2:2181" or "zk1:2181/chroot".',
        )
    return match.group(1) or match.group(2), port
