"""`await consumer.run(listener)`: like metamq.client.consumer.listener, with tasks of one loop instead of threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from metamq.client.checks import check_listener
from metamq.client.consumer.retrying import POLL_S, Listener, ListenerRun, RetryPolicy

if TYPE_CHECKING:
    from metamq.client.consumer.dead_letters import DeadLetters
    from metamq.client.consumer.receivers import TaskReceiver
    from metamq.client.fetch.inbox import InFlightBatch
    from metamq.client.model import Message


class ListenerTasks(ListenerRun):
    """The tasks of one `run()`. A listener that is a plain function blocks the loop while it runs."""

    _awaits = True

    def __init__(
        self,
        receiver: TaskReceiver,
        listener: Listener[Any],
        filter: Callable[[Message[Any]], bool] | None,
        dead_letters: DeadLetters | None,
        policy: RetryPolicy,
        concurrency: int,
    ) -> None:
        super().__init__(listener, filter, dead_letters, policy, concurrency)
        check_listener(listener)
        self._receiver = receiver
        self._busy: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until the consumer is closed or idle, or an error of a listener ends it."""
        try:
            while (in_flight := await self._take()) is not None:
                self._busy.add(asyncio.ensure_future(self._handle(in_flight)))
            for task in self._busy:
                await task
        finally:
            for task in self._busy:
                task.cancel()
            await asyncio.gather(*self._busy, return_exceptions=True)
            if self._dead_letters is not None:
                await self._dead_letters.close()

    async def _take(self) -> InFlightBatch | None:
        """Returns a batch as soon as one of the handlers is free. Raises the error of a failed handler."""
        taking = asyncio.ensure_future(self._receiver.take())
        try:
            while True:
                is_full = len(self._busy) >= self._concurrency
                waiting = set(self._busy) if is_full else {*self._busy, taking}
                done, _pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done & self._busy:
                    self._busy.discard(task)
                    task.result()
                if taking.done() and len(self._busy) < self._concurrency:
                    in_flight = taking.result()
                    if in_flight is not None or not self._busy or self._receiver.closed:
                        return in_flight
                    taking = asyncio.ensure_future(self._receiver.take())
        except BaseException:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            if not taking.cancelled() and taking.exception() is None and (in_flight := taking.result()) is not None:
                self._receiver.release(in_flight, last_done=False)
            raise

    async def _handle(self, in_flight: InFlightBatch) -> None:
        done = False
        try:
            done = await self._handle_all(in_flight)
        finally:
            self._receiver.release(in_flight, last_done=done)

    async def _give_up(
        self, letters: DeadLetters, message: Message[Any], value: bytes, error: Exception, attempts: int
    ) -> None:
        await letters.send(message, value, error, attempts)

    async def _pause(self, in_flight: InFlightBatch, pause_s: float) -> bool:
        while pause_s > 0 and not in_flight.taken_back:
            await asyncio.sleep(min(pause_s, POLL_S))
            pause_s -= POLL_S
        return not in_flight.taken_back
