"""Reading all that is there, with an `idle_timeout_s` that costs little: on a slow machine it may end a loop early.

A loop that has ended goes on with the next one where it was left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from metamq import Consumer, Message, aio

LIMIT_S = 60.0


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
