"""The message that a listener of `run()` works on now, in its thread or task, and in tasks that its code starts."""

from __future__ import annotations

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
