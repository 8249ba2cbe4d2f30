"""Says when other machines can reach a server while security is off."""

from __future__ import annotations

import ipaddress

EXPOSED_HINT = (
    "Turn security on (`metamq security init`, docs/security.md), or keep the port inside a network that you trust."
)


def is_exposed(host: str) -> bool:
    """True if other machines may connect to a server that listens at `host`; names other than localhost count as
    such."""
    if host.lower().rstrip(".") == "localhost":
        return False
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return not (mapped or address).is_loopback


def exposure(host: str, port: int) -> str:
    """Returns the problem of a server without security, as a part of a sentence."""
    return f"security is off: any client that reaches {host}:{port} may read and change everything"
