"""Topics that cannot be written now. Their due messages wait at a level, so they do not hold up those of others."""

from __future__ import annotations

from collections.abc import Collection

FIRST_S, LONGEST_S = 1.0, 60.0
ALONE_S = 0.1
"""The pause of the other topics while one is tried."""


class Holds:
    """A transaction that fails does not show which of its topics is at fault. So all of them are held at first.

    Then one at a time is tried again, alone: the other topics wait for a moment. Times are of time.monotonic().
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, float]] = {}
        """Topic -> the time at which it is tried again, and the pause before it in seconds."""
        self._tried = ""

    def try_next(self, now_s: float, due: Collection[str]) -> None:
        """Chooses the held topic that the next transaction writes, of those that have `due` messages."""
        ended = [topic for topic, (until_s, _pause_s) in self._held.items() if until_s <= now_s and topic in due]
        self._tried = min(ended, key=lambda topic: self._held[topic][0], default="")

    def pause_s(self, topic: str, now_s: float) -> float:
        """Returns the seconds for which messages of a topic wait; 0 if it may be written."""
        if topic == self._tried:
            return 0.0
        if topic in self._held:
            return max(self._held[topic][0] - now_s, FIRST_S)
        return ALONE_S if self._tried else 0.0

    def failed(self, topics: Collection[str], now_s: float) -> None:
        """Notes that a transaction with these topics failed."""
        if self._tried in topics:
            self._tried = ""
        for topic in topics:
            before_s = self._held[topic][1] if topic in self._held and len(topics) == 1 else FIRST_S / 2
            pause_s = min(2 * before_s, LONGEST_S)
            self._held[topic] = now_s + pause_s, pause_s

    def worked(self, topics: Collection[str]) -> None:
        """Notes that a transaction with these topics was committed."""
        for topic in topics:
            self._held.pop(topic, None)
