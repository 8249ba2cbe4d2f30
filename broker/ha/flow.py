"""FlowMonitor limits and measures the bytes per second of a link; CopyPace delays copies. Pure: time is an argument.

It is a token bucket that may be overdrawn. Frames are whole batches and never cut. So a frame is sent when the balance
is not negative, and the next one waits until the balance has recovered. In any period a link sends no more than the
limit, plus a tenth of a second's worth, plus one frame. Heartbeats and answers do not wait: they are few, and reduce
the balance for later frames.

A slave that catches up takes what the master's machine gives: processor, disk, network. Others notice that as a delay
of the master's loop. So each turn of the loop is timed while chunks are copied. After a late turn the pause between two
chunks doubles, and is at least the delay; after a punctual one it halves. The longest pause leaves 20 MB/s.
"""

from __future__ import annotations

BURST_S = 0.1
WINDOW_S = 1.0
LATE_S = 0.004
"""A turn of the loop that takes longer is late."""
PAUSE_S_MIN = 0.001
PAUSE_S_MAX = 0.05


class FlowMonitor:
    """The limit and the figures of one link. `limit_bytes_s` 0 is no limit. Times are seconds of a monotonic clock."""

    def __init__(self, limit_bytes_s: float, now: float) -> None:
        self._limit = limit_bytes_s
        self._balance = limit_bytes_s * BURST_S
        self._balance_at = now
        self._window_from = now
        self._window_bytes = 0
        self._last_window_bytes = 0

    def pause_s(self, now: float) -> float:
        """Returns the seconds to wait before the next frame."""
        if not self._limit:
            return 0.0
        self._earn(now)
        return max(0.0, -self._balance / self._limit)

    def sent(self, count: int, now: float) -> None:
        """Counts a frame of `count` bytes, header and body."""
        self._roll(now)
        self._window_bytes += count
        if self._limit:
            self._earn(now)
            self._balance -= count

    def bytes_s(self, now: float) -> float:
        """Returns the bytes sent in the last whole second."""
        self._roll(now)
        return self._last_window_bytes / WINDOW_S

    def _earn(self, now: float) -> None:
        earned = (now - self._balance_at) * self._limit
        self._balance = min(self._balance + earned, self._limit * BURST_S)
        self._balance_at = now

    def _roll(self, now: float) -> None:
        windows = int((now - self._window_from) / WINDOW_S)
        if windows > 0:
            self._last_window_bytes = self._window_bytes if windows == 1 else 0
            self._window_bytes = 0
            self._window_from += windows * WINDOW_S


class CopyPace:
    """The pauses between the copied chunks of one link. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        """The present pause between two chunks."""
        self._due = 0.0

    def turned(self, took_s: float) -> None:
        """Notes the time of a turn of the loop."""
        if took_s > LATE_S:
            self.pause_s = min(max(2 * self.pause_s, took_s), PAUSE_S_MAX)
        else:
            self.pause_s = self.pause_s / 2 if self.pause_s > PAUSE_S_MIN else 0.0

    def sent(self, now: float) -> None:
        """Notes a chunk."""
        self._due = now + self.pause_s

    def wait_s(self, now: float) -> float:
        """Returns the seconds to wait before the next chunk."""
        return max(0.0, self._due - now)
