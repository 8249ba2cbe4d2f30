"""Who may connect: how many there are in all, and from one address, and what is kept for those who run the cluster.

    connections                       are
    up to `connections_max`           served
    SLOTS_KEPT more                   greeted; they may join as a slave, promote, and ask for figures. Who asks for
                                      anything else, or for nothing within a moment, is told Busy and closed
    LINGERING_MAX more                told Busy and closed
    further ones                      closed

So a broker that clients have filled still has its slaves, can be promoted and can be looked at.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from metamq.errors import ProtocolError
from metamq.words import count

SLOTS_KEPT = 16
LINGERING_MAX = 16
"""Connections that are told why they are not served, at a time: each holds a descriptor for a moment."""


class ConnectionFate(Enum):
    """What becomes of a connection."""

    SERVED = "served"
    KEPT = "kept"
    TOLD = "told"
    CLOSED = "closed"


class Admission:
    """Counts the connections of one broker. Used by its loop only."""

    def __init__(self, connections_max: int, per_address_max: int = 0) -> None:
        """`connections_max` is what the setting and the limit on open files allow; 0 a address is no limit."""
        self.connections_max = connections_max
        self.per_address_max = per_address_max
        self._count = 0
        self._by_address: Counter[str] = Counter()

    def enter(self, address: str) -> ConnectionFate:
        """One more connection, to be followed by one leave()."""
        self._count += 1
        self._by_address[address] += 1
        over = self._count - self.connections_max
        if over > SLOTS_KEPT:
            return ConnectionFate.TOLD if over <= SLOTS_KEPT + LINGERING_MAX else ConnectionFate.CLOSED
        if self.per_address_max and self._by_address[address] > self.per_address_max:
            return ConnectionFate.TOLD
        return ConnectionFate.KEPT if over > 0 else ConnectionFate.SERVED

    def leave(self, address: str) -> None:
        """A connection is gone."""
        self._count -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def refusal(self, address: str) -> ProtocolError:
        """Why a connection is not served."""
        if self.per_address_max and self._by_address[address] > self.per_address_max:
            limit, setting = self.per_address_max, "connections_per_address_max"
            problem = f"busy: {address} has {count(limit, 'connection')} already, the limit for one address"
        else:
            limit, setting = self.connections_max, "connections_max"
            problem = f"busy: the broker has {count(limit, 'connection')} already, its limit"
        return ProtocolError(problem, hint=f"Close some, or raise the broker's {setting} and its limit on open files.")
