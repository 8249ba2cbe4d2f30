"""`consumer.run(listener)`: threads or tasks that take batches and call the listener, message by message.

Only one of them at a time has a batch of a partition, so the partition's messages are processed in order. While a
message waits for its next attempt, its partition waits and other partitions continue. The wait ends when the message is
done or given up, or the partition is revoked. In the last case the next owner receives the message.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metamq.client.background import at_once
from metamq.client.checks import check_listener, check_plain_listener
from metamq.client.consumer.retrying import POLL_S, ListenerRun
from metamq.client.handling.current import handling

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from metamq.client.background import BackgroundLoop
    from metamq.client.consumer.receivers import TaskReceiver, ThreadReceiver
    from metamq.client.fetch.inbox import InFlightBatch

INTERRUPT_PATIENCE_S = 0.1


@dataclass(eq=False)
class ListenerPool(ListenerRun):
    """The threads of one `run()`. The listener must not be a coroutine function."""

    receiver: ThreadReceiver
    background: BackgroundLoop
    _awaits = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_plain_listener(self.listener)
        self._stop = threading.Event()
        self._ended = threading.Semaphore(0)
        self._busy = 0
        self._busy_lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"metamq-listener-{number}", daemon=True)
            for number in range(self.concurrency)
        ]

    def run(self) -> None:
        """Runs until the consumer is closed or idle, or an error of a listener ends it."""
        try:
            for thread in self._threads:
                thread.start()
            for _ in self._threads:
                while not self._ended.acquire(timeout=POLL_S):
                    pass  # here a signal is noticed that the system has given to another thread
        except BaseException:
            self._end()
            for thread in self._threads:
                thread.join(INTERRUPT_PATIENCE_S / len(self._threads))
            raise
        finally:
            if self.dead_letters is not None:
                self.background.run(self.dead_letters.close())
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        self._stop.set()
        self.receiver.poke()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                in_flight = self.receiver.take(self._stop)
                if in_flight is not None:
                    self._handle(in_flight)
                elif self._busy == 0 or self.receiver.closed:
                    return
        except BaseException as error:
            self._error = self._error or error
            self._end()
        finally:
            self._ended.release()

    def _handle(self, in_flight: InFlightBatch) -> None:
        with self._busy_lock:
            self._busy += 1
        done = False
        try:
            with handling(in_flight.processing):
                done = at_once(self._handle_all(in_flight))
        finally:
            with self._busy_lock:
                self._busy -= 1
            self.receiver.release(in_flight, last_done=done)

    async def _give_up(self, storing: Coroutine[Any, Any, None]) -> None:
        self.background.run(storing)

    async def _pause(self, in_flight: InFlightBatch, pause_s: float) -> bool:
        while pause_s > 0 and not in_flight.taken_back and not self._stop.wait(min(pause_s, POLL_S)):
            pause_s -= POLL_S
        return not in_flight.taken_back and not self._stop.is_set()

    def _is_stopped(self) -> bool:
        return self._stop.is_set()


@dataclass(eq=False)
class ListenerTasks(ListenerRun):
    """The tasks of one `run()`. A listener that is a plain function blocks the loop while it runs."""

    receiver: TaskReceiver
    _awaits = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_listener(self.listener)
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
            if self.dead_letters is not None:
                await self.dead_letters.close()

    async def _take(self) -> InFlightBatch | None:
        """Returns a batch as soon as one of the handlers is free. Raises the error of a failed handler."""
        taking = asyncio.ensure_future(self.receiver.take())
        try:
            while True:
                is_full = len(self._busy) >= self.concurrency
                waiting = set(self._busy) if is_full else {*self._busy, taking}
                done, _pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done & self._busy:
                    self._busy.discard(task)
                    task.result()
                if taking.done() and len(self._busy) < self.concurrency:
                    in_flight = taking.result()
                    if in_flight is not None or not self._busy or self.receiver.closed:
                        return in_flight
                    taking = asyncio.ensure_future(self.receiver.take())
        except BaseException:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            if not taking.cancelled() and taking.exception() is None and (in_flight := taking.result()) is not None:
                self.receiver.release(in_flight, last_done=False)
            raise

    async def _handle(self, in_flight: InFlightBatch) -> None:
        done = False
        try:
            with handling(in_flight.processing):
                done = await self._handle_all(in_flight)
        finally:
            self.receiver.release(in_flight, last_done=done)

    async def _give_up(self, storing: Coroutine[Any, Any, None]) -> None:
        await storing

    async def _pause(self, in_flight: InFlightBatch, pause_s: float) -> bool:
        while pause_s > 0 and not in_flight.taken_back:
            await asyncio.sleep(min(pause_s, POLL_S))
            pause_s -= POLL_S
        return not in_flight.taken_back
