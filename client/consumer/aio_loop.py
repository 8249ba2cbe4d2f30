"""The loops of the asyncio Consumer. A cancelled step ends no loop and loses no message: the next step continues.

An asynchronous generator would be over after a cancelled step, for example after a time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from metamq.errors import ConfigError

if TYPE_CHECKING:
    from metamq.client.consumer.receivers import Wait
    from metamq.client.one_loop import OneLoop

R = TypeVar("R")

Step = Callable[["Wait", Callable[[], None]], Awaitable[R | None]]
"""Waits for the next item; None is the end. It gets the wait, which a cancelled step leaves to the next one, and the
check that no other task iterates."""


class ConsumerLoop(AsyncIterator[R], Generic[R]):
    """One loop over the messages or the batches of an asyncio consumer.

    A step that a time-out cancels loses no message, and the loop goes on with the next step.
    """

    # `step` returns the next item; `ready` those that are there already, which saves a coroutine for each.
    def __init__(
        self,
        one_loop: OneLoop,
        new_wait: Callable[[], Wait],
        step: Step[R],
        ready: Callable[[], Iterator[R]] = lambda: iter(()),
    ) -> None:
        self._begun = one_loop.begun(asyncio.current_task)
        self._check_loop = self._begun.__enter__()
        self._new_wait = new_wait
        self._wait: Wait | None = None
        self._step = step
        self._ready = ready
        self._has_begun = self._is_over = self._is_waiting = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        """Returns the next item. The end of the data, and an error other than a cancellation, ends the loop."""
        if self._is_over:
            raise StopAsyncIteration
        if self._is_waiting:
            hint = "Use run(listener, concurrency=...), which shares messages among tasks."
            raise ConfigError("another task waits for the next item of this loop", hint=hint)
        self._is_waiting = True
        try:
            if self._has_begun:
                for item in self._ready():
                    return item
            self._wait = self._wait or self._new_wait()
            last = await self._step(self._wait, self._check_loop)
        except asyncio.CancelledError:
            raise
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._is_waiting = False
        self._wait, self._has_begun = None, True
        if last is None:
            await self.aclose()
            raise StopAsyncIteration
        return last

    async def aclose(self) -> None:
        """Ends the loop: another task may begin one. The end of the last reference to the loop does the same."""
        if not self._is_over:
            self._is_over = True
            self._begun.__exit__(None, None, None)
