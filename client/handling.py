"""The message that a listener of `run()` works on now, in its thread or task, and in tasks that its code starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from metamq.client import telemetry

if TYPE_CHECKING:
    from metamq.client.model import Message
    from metamq.client.telemetry import Processing

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
