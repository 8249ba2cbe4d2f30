"""Limits on connections: in all, from one address, and of one principal. Some are kept for slaves and for operators.

    connections                       the broker
    up to `connections_max`           serves them
    SLOTS_KEPT more                   greets them. They may join as a slave, promote, and read figures. It answers any
                                      other request with Busy and closes; it also closes if no request comes soon
    LINGERING_MAX more                answers Busy and closes
    any further                       closes at once

So a broker that is full of clients keeps its slaves, can be promoted, and can be inspected. One principal has at most
half of the connections, so the others can connect. This limit does not apply to brokers and the administrator.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from metamq.errors import ProtocolError
from metamq.security.config import RESERVED
from metamq.words import count

SLOTS_KEPT = 16
LINGERING_MAX = 16
"""Refused connections that are open at a time. Each holds a descriptor until its client has read the refusal."""


class ConnectionFate(Enum):
    """The admission of a connection."""

    SERVED = "served"
    KEPT = "kept"
    REFUSED = "refused"
    CLOSED = "closed"


class Admission:
    """The open connections of one broker. Used by its loop only."""

    def __init__(self, connections_max: int, per_address_max: int = 0, per_principal_max: int = 0) -> None:
        """`connections_max` follows from the setting and the limit on open files. `per_address_max` 0 is no limit,
        `per_principal_max` 0 is half of `connections_max`."""
        self.connections_max = connections_max
        self.per_address_max = per_address_max
        self.per_principal_max = per_principal_max or (connections_max + 1) // 2
        self._count = 0
        self._by_address: Counter[str] = Counter()
        self._by_principal: Counter[str] = Counter()

    def enter(self, address: str) -> ConnectionFate:
        """Counts a new connection and returns its treatment. One leave() must follow."""
        self._count += 1
        self._by_address[address] += 1
        over = self._count - self.connections_max
        if over > SLOTS_KEPT:
            return ConnectionFate.REFUSED if over <= SLOTS_KEPT + LINGERING_MAX else ConnectionFate.CLOSED
        if self.per_address_max and self._by_address[address] > self.per_address_max:
            return ConnectionFate.REFUSED
        return ConnectionFate.KEPT if over > 0 else ConnectionFate.SERVED

    def identify(self, principal: str) -> ProtocolError | None:
        """Counts a connection whose principal is known now; returns the reason why it is not served, or None."""
        if not principal or principal in RESERVED:
            return None
        self._by_principal[principal] += 1
        if self._by_principal[principal] <= self.per_principal_max:
            return None
        limit, setting = self.per_principal_max, "connections_per_principal_max"
        return _busy(f"{principal!r} has {count(limit, 'connection')} already, the limit for one principal", setting)

    def leave(self, address: str, identified: str = "") -> None:
        """Removes a closed connection from the count. `identified`: the principal that identify() has counted."""
        self._count -= 1
        _count_down(self._by_address, address)
        if identified and identified not in RESERVED:
            _count_down(self._by_principal, identified)

    def refusal(self, address: str) -> ProtocolError:
        """Returns the reason why a connection is not served."""
        if self.per_address_max and self._by_address[address] > self.per_address_max:
            limit, setting = self.per_address_max, "connections_per_address_max"
            return _busy(f"{address} has {count(limit, 'connection')} already, the limit for one address", setting)
        limit, setting = self.connections_max, "connections_max"
        return _busy(f"the broker has {count(limit, 'connection')} already, its limit", setting)


def _busy(reason: str, setting: str) -> ProtocolError:
    hint = f"Close some, or raise the broker's {setting} and its limit on open files."
    return ProtocolError(f"busy: {reason}", hint=hint)


def _count_down(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
