"""Limits on connections: in all, and from one address. Some are kept for slaves and for operators.

    connections                       the broker
    up to `connections_max`           serves them
    SLOTS_KEPT more                   greets them. They may join as a slave, promote, and read figures. It answers any
                                      other request with Busy and closes; it also closes if no request comes soon
    LINGERING_MAX more                answers Busy and closes
    any further                       closes at once

So a broker that is full of clients keeps its slaves, can be promoted, and can be inspected.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from metamq.errors import ProtocolError
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

    def __init__(self, connections_max: int, per_address_max: int = 0) -> None:
        """`connections_max` follows from the setting and the limit on open files. `per_address_max` 0 is no limit."""
        self.connections_max = connections_max
        self.per_address_max = per_address_max
        self._count = 0
        self._by_address: Counter[str] = Counter()

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

    def leave(self, address: str) -> None:
        """Removes a closed connection from the count."""
        self._count -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def refusal(self, address: str) -> ProtocolError:
        """Returns the reason why a connection is not served."""
        if self.per_address_max and self._by_address[address] > self.per_address_max:
            limit, setting = self.per_address_max, "connections_per_address_max"
            problem = f"busy: {address} has {count(limit, 'connection')} already, the limit for one address"
        else:
            limit, setting = self.connections_max, "connections_max"
            problem = f"busy: the broker has {count(limit, 'connection')} already, its limit"
        return ProtocolError(problem, hint=f"Close some, or raise the broker's {setting} and its limit on open files.")
