"""Reading all that is there, with an `idle_timeout_s` that costs little: on a slow machine it may end a loop early.

A loop that has ended goes on with the next one where it was left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from metamq import Consumer, Message, aio
from metamq.client.consumer.receivers import Wait

LIMIT_S = 60.0


class IdleTime:
    """Sets the idle time of a consumer, also of the wait that goes on."""

    def __init__(self, consumer: Consumer[bytes]) -> None:
        self._receiver, self._waits = consumer._receiver, list[Wait]()
        self._new_wait = self._receiver.new_wait
        self._receiver.new_wait = self._noted  # type: ignore[method-assign]

    def _noted(self) -> Wait:
        self._waits.append(self._new_wait())
        return self._waits[-1]

    def set(self, idle_s: float) -> None:
        self._receiver.idle_timeout_s = self._waits[-1]._idle_timeout_s = idle_s
        self._receiver.poke()


def all_of(consumer: Consumer[Any], count: int) -> list[Message[Any]]:
    """So many messages, and what comes with them, until nothing comes any more."""
    messages: list[Message[Any]] = []
    deadline = time.monotonic() + LIMIT_S
    while True:
        messages += consumer
        if len(messages) >= count:
            return messages
        assert time.monotonic() < deadline, f"{len(messages)} of {count} messages came"


async def all_of_aio(consumer: aio.Consumer[Any], count: int) -> list[Message[Any]]:
    """The same of the other face."""
    messages: list[Message[Any]] = []
    deadline = time.monotonic() + LIMIT_S
    while True:
        messages += [message async for message in consumer]
        if len(messages) >= count:
            return messages
        assert time.monotonic() < deadline, f"{len(messages)} of {count} messages came"


def run_until(
    condition: Callable[[], object],
    consumer: Consumer[Any],
    listener: Callable[[Message[Any]], object],
    **settings: Any,
) -> None:
    """`consumer.run(listener)`, again if it was idle before the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        consumer.run(listener, **settings)
        if condition():
            return
        assert time.monotonic() < deadline, "there was nothing more to do"
