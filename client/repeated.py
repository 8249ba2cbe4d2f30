"""Small periodic work of a consumer: an idle consumer has a timer for it, and no task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

Work = Coroutine[Any, Any, None]


class Repeated:
    """Calls `begin` again and again, after a pause each time, until stop(). Use it in the loop.

    If there is more to do, `begin` returns a coroutine. `spawn` runs it as a task, and the next pause begins when the
    task has ended. An error of `begin` ends the repetition, and `failed` gets it. An error of the task ends it, too.
    """

    def __init__(
        self,
        begin: Callable[[], Work | None],
        pause_s: Callable[[], float],
        spawn: Callable[[Work], asyncio.Task[None]],
        failed: Callable[[Exception], None],
    ) -> None:
        self._begin = begin
        self._pause_s = pause_s
        self._spawn = spawn
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._context = Context()  # no part of the trace of the code that opened the consumer
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._pause_s(), self._go, context=self._context)

    def _go(self) -> None:
        try:
            rest = self._begin()
        except Exception as error:
            self._failed(error)
            return
        if rest is None:
            self._wait()
        else:
            self._spawn(rest).add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        if self._timer is not None and not task.cancelled() and task.exception() is None:
            self._wait()

    def stop(self) -> None:
        """Ends the repetition. The task that runs now, if one does, belongs to the caller of `spawn`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
