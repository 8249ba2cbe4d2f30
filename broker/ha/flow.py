"""FlowMonitor: how fast a link may send, in bytes per second, and how fast it does. Pure: time is an argument.

A token bucket that may be overdrawn. Frames are whole batches and never cut, so a frame is sent whenever the balance
is not negative, and the next one waits until its bytes are paid for. Over any stretch of time a link sends no more
than the limit allows, a tenth of a second's worth, and one frame. Heartbeats and answers wait for nothing: they
are few, and paid for by what comes after them.
"""

from __future__ import annotations

BURST_S = 0.1
WINDOW_S = 1.0


class FlowMonitor:
    """The limit and the figures of one link. `limit_bytes_s` 0 is no limit; times are seconds that never go back."""

    def __init__(self, limit_bytes_s: float, now: float) -> None:
        self._limit = limit_bytes_s
        self._balance = limit_bytes_s * BURST_S
        self._balance_at = now
        self._window_from = now
        self._window_bytes = 0
        self._last_window_bytes = 0

    def pause_s(self, now: float) -> float:
        """How long to wait before the next frame; 0: it may go now."""
        if not self._limit:
            return 0.0
        self._earn(now)
        return max(0.0, -self._balance / self._limit)

    def sent(self, count: int, now: float) -> None:
        """A frame of `count` bytes goes, header and body."""
        self._roll(now)
        self._window_bytes += count
        if self._limit:
            self._earn(now)
            self._balance -= count

    def bytes_s(self, now: float) -> float:
        """What was sent in the last whole second."""
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
