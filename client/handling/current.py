"""The message that a listener of `run()` works on now, in its thread or task, and in tasks that its code starts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from metamq.client import telemetry
from metamq.words import count

if TYPE_CHECKING:
    from metamq.client.model import Message
    from metamq.client.telemetry import Processing

log = logging.getLogger("metamq.client")

WARN_AFTER_S = 3.0

current: ContextVar[Message[Any] | None] = ContextVar("metamq_message", default=None)


@contextmanager
def handling(processing: Processing | None) -> Iterator[None]:
    """Surrounds the calls of a listener. An error that ends run() gets a note with the place of its message."""
    try:
        with telemetry.active(processing):
            yield
    except BaseException as error:
        if (message := current.get()) is not None:
            error.add_note(f"{message.topic}/{message.partition} offset {message.offset}")
        raise
    finally:
        current.set(None)


class HandlerOutage:
    """The messages of one `run()` that wait because of errors of `retry_on`. It is one outage while any of them waits:
    a warning after WARN_AFTER_S, and a line at the end. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[tuple[str, str, int]] = set()
        self._since = 0.0
        self._warned = False

    def failed(self, message: Message[Any], error: Exception) -> None:
        """Notes an attempt that ended with an error of `retry_on`."""
        with self._lock:
            now_s = time.monotonic()
            if not self._waiting:
                self._since, self._warned = now_s, False
            self._waiting.add(message[:3])
            if self._warned or now_s - self._since < WARN_AFTER_S:
                return
            self._warned = True
            waiting = len(self._waiting)
        text = "handlers have failed for %.0f s; %s, and those behind: %r"
        log.warning(text, now_s - self._since, f"{count(waiting, 'message')} waiting", error)

    def ended(self, place: tuple[str, str, int], *, done: bool) -> None:
        """Notes that a message does not wait any more. `done`: it is done or given up, and not another member's."""
        with self._lock:
            was_waiting = place in self._waiting
            self._waiting.discard(place)
            if not was_waiting or self._waiting or not self._warned or not done:
                return
            lasted_s = time.monotonic() - self._since
        log.info("handlers do not fail any more, after %.1f s", lasted_s)


class LogFilter(logging.Filter):
    """Adds fields to the log records of a listener that `run()` calls: `topic`, `partition` and `offset` of its
    message, and with metamq.otel the `trace_id` of the current trace, 32 hexadecimal digits. Thread-safe.

        logging.getLogger().handlers[0].addFilter(metamq.LogFilter())

    Add it to a handler of logging: the filter of a logger does not see the records of other loggers. Tasks and threads
    that the listener starts with a copy of its context, as asyncio.to_thread() does, have the fields, too. A record
    that has a `topic` already keeps its own fields.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the fields, and returns True."""
        message, fields = current.get(), record.__dict__
        if message is not None:
            if "topic" not in fields:
                fields |= {"topic": message.topic, "partition": message.partition, "offset": message.offset}
            if (reports := telemetry.current) is not None and (trace_id := reports.trace_id()):
                fields["trace_id"] = trace_id
        return True
