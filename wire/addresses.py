"""Whether the two ends of a connection are on one machine, by their IP addresses."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any


def is_own_address(peer: str, here: str) -> bool:
    """Whether a peer with an IP address is on this machine, to which it is connected at another or the same."""
    return peer == here or (ip_address(peer).is_loopback and ip_address(here).is_loopback)


def are_near(peer: Any, here: Any) -> bool:
    """The same for socket names of any kind: of sockets without an address, nobody knows."""
    is_known = isinstance(peer, tuple) and isinstance(here, tuple)
    return is_known and is_own_address(peer[0], here[0])
