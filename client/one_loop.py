"""One loop over a consumer at a time: a message is done when the loop asks for the next one.

A loop may move from thread to thread, or end and start again. A second loop, in another thread or task while the first
one runs, would mark the first one's message as done while that message is still being processed. It raises ConfigError.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from metamq.errors import ConfigError

Worker = threading.Thread | asyncio.Task[Any] | None


class OneLoop:
    """The current loop over one consumer, and the thread or task that runs the loop."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loop: object = None
        self._worker: Worker = None

    @contextmanager
    def begun(self, worker: Callable[[], Worker]) -> Iterator[Callable[[], None]]:
        """Starts a loop, which ends with the block. The caller must call the yielded function before each step.

        The function raises ConfigError while the loop of another worker runs. `worker` returns the current thread or
        task.
        """
        loop = object()
        try:
            yield lambda: self._enter(loop, worker())
        finally:
            self._leave(loop)

    def has_item(self, worker: Worker) -> None:
        """Notes that the worker asks for one item without a loop. Raises ConfigError while another worker has one, or
        a loop."""
        self._enter(worker, worker)

    def has_none(self, worker: Worker) -> None:
        """Notes that the worker got no further item."""
        self._leave(worker)

    def _enter(self, loop: object, worker: Worker) -> None:
        if self._loop is loop and self._worker is worker:
            return
        with self._lock:
            other = self._worker
            if self._loop is not None and self._loop is not loop and other is not worker and _is_at_work(other):
                kind, name = ("thread", other.name) if isinstance(other, threading.Thread) else ("task", _name(other))
                raise ConfigError(
                    f"{kind} {name!r} iterates this consumer already",
                    hint=f"Make a Consumer of the same group for each {kind}, or use run(listener, concurrency=...).",
                )
            self._loop, self._worker = loop, worker

    def _leave(self, loop: object) -> None:
        with self._lock:
            if self._loop is loop:
                self._loop = self._worker = None


def _is_at_work(worker: Worker) -> bool:
    if isinstance(worker, threading.Thread):
        return worker.is_alive()
    return worker is not None and not worker.done()


def _name(worker: Worker) -> str:
    return worker.get_name() if isinstance(worker, asyncio.Task) else ""
