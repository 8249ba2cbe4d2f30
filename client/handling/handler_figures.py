"""The figures of the handlers that `run()` calls, by topic: the time of each call, failed attempts, dead letters.

A handler's thread or task keeps the times of a batch in a list of its own, which becomes part of the totals with the
end of the batch. So handlers do not wait for one another, and a call costs a quarter of a microsecond.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from metamq.client.telemetry import Processing

HANDLER_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of HandlerHealth.calls, in seconds."""


@dataclass(frozen=True, slots=True)
class HandlerHealth:
    """The handlers of one topic, since the start. `run()` counts them, and dead_letter() its letters."""

    calls: tuple[int, ...]
    """The calls that have ended, by their time: up to each of HANDLER_BOUNDS_S, and longer ones."""
    seconds: float
    """The sum of their times."""
    failed_attempts: int
    """Calls that raised, except for Rollback; and messages that `decode=` rejected."""
    given_up: int
    """Messages that were sent to the dead-letter topic."""


@dataclass(slots=True)
class _Totals:
    calls: list[int] = field(default_factory=lambda: [0] * (len(HANDLER_BOUNDS_S) + 1))
    seconds: float = 0.0
    failed_attempts: int = 0
    given_up: int = 0

    def add(self, took_s: list[float]) -> None:
        """Adds calls that took so many seconds."""
        self.seconds += sum(took_s)
        slow = [one for one in took_s if one > HANDLER_BOUNDS_S[0]]
        self.calls[0] += len(took_s) - len(slow)
        for one in slow:
            self.calls[bisect_left(HANDLER_BOUNDS_S, one)] += 1


class HandlerFigures:
    """The totals of one consumer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call health() in a thread that has it
        self._totals: dict[str, _Totals] = {}
        self._running: dict[HandlerTimes, None] = {}

    def _of(self, topic: str) -> _Totals:
        return self._totals.setdefault(topic, _Totals())

    def failed(self, topic: str) -> None:
        """Counts a failed attempt."""
        with self._lock:
            self._of(topic).failed_attempts += 1

    def given_up(self, topic: str) -> None:
        """Counts a message that was sent to the dead-letter topic."""
        with self._lock:
            self._of(topic).given_up += 1

    def begin(self, times: HandlerTimes) -> None:
        """Counts the calls in `times` from now on."""
        with self._lock:
            self._running[times] = None

    def end(self, times: HandlerTimes) -> None:
        """Adds the calls in `times` to the totals."""
        with self._lock:
            del self._running[times]
            self._of(times.topic).add(times.took_s)

    def health(self) -> dict[str, HandlerHealth]:
        """Returns the figures of each topic."""
        with self._lock:
            found = {topic: replace(one, calls=[*one.calls]) for topic, one in self._totals.items()}
            for times in self._running:
                found.setdefault(times.topic, _Totals()).add([*times.took_s])
        return {
            topic: HandlerHealth(tuple(one.calls), one.seconds, one.failed_attempts, one.given_up)
            for topic, one in sorted(found.items())
        }


class HandlerTimes:
    """The times of the calls for one batch, or for one message. For one thread or task; others read `took_s`."""

    def __init__(self, figures: HandlerFigures, topic: str, processing: Processing | None) -> None:
        self.topic = topic
        self.took_s: list[float] = []
        self._figures = figures
        self._processing = processing

    def __enter__(self) -> Self:
        self._figures.begin(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._figures.end(self)

    def ended(self, began_s: float, error: Exception | None = None) -> None:
        """Counts a call that began at that monotonic time, and ends now."""
        took_s = time.monotonic() - began_s
        self.took_s.append(took_s)
        if self._processing is not None:
            self._processing.handled(took_s, error)
