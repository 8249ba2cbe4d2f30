"""Checks if the two ends of a connection are on one machine, by their IP addresses."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any


def is_own_address(peer: str, here: str) -> bool:
    """True if a peer's IP address belongs to this machine, whose end of the connection is `here`."""
    return peer == here or (ip_address(peer).is_loopback and ip_address(here).is_loopback)


def are_near(peer: Any, here: Any) -> bool:
    """True if both socket names are on one machine; False for sockets without an IP address."""
    is_known = isinstance(peer, tuple) and isinstance(here, tuple)
    return is_known and is_own_address(peer[0], here[0])
