"""`await consumer.run(listener)`: like metamq.client.consumer.listener, with tasks of one loop instead of threads."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from metamq.client.admin.aio_admin import Admin
from metamq.client.checks import check_listener, check_whole
from metamq.client.model import Message, message_of
from metamq.client.net.retrying import RetryPolicy, Rollback, dead_letter_headers, dead_letter_topic
from metamq.client.producer.aio_producer import BaseProducer
from metamq.errors import DecodeError, TopicExists
from metamq.wire.limits import MESSAGE_BYTES_MAX
from metamq.words import count

if TYPE_CHECKING:
    from metamq.client.consumer.receivers import TaskReceiver
    from metamq.client.fetch.inbox import InFlightBatch

log = logging.getLogger("metamq.client")

POLL_S = 0.5
"""Seconds between two checks that a message that waits for its next attempt still belongs to this consumer."""

Listener = Callable[[Message[Any]], object]
"""Called with each message. An awaitable result is awaited. A plain function blocks the loop while it runs."""


class DeadLetters:
    """Sends given-up messages to the group's dead-letter topic, which is created when the first message comes."""

    def __init__(self, zookeeper: str, root: str, group: str | None) -> None:
        self.topic = dead_letter_topic(group)
        self._zookeeper = zookeeper
        self._root = root
        self._producer: BaseProducer[bytes] | None = None
        self._opening = asyncio.Lock()

    async def send(self, message: Message[Any], value: bytes, error: Exception, attempts: int) -> None:
        """Sends a message and returns when it is stored. Raises the errors of a delivery."""
        times = count(attempts, "attempt")
        log.warning("given up after %s, to %s: %r", times, self.topic, message[:3], exc_info=error)
        producer = await self._open()
        await producer.send(self.topic, value, message.key, dead_letter_headers(message, error, attempts))

    async def _open(self) -> BaseProducer[bytes]:
        async with self._opening:
            if self._producer is None:
                async with Admin(self._zookeeper, root=self._root) as admin:
                    with contextlib.suppress(TopicExists):
                        await admin.create_topic(self.topic, partitions=1, max_message_bytes=MESSAGE_BYTES_MAX)
                self._producer = await BaseProducer[bytes](self._zookeeper, root=self._root).open()
            return self._producer

    async def close(self) -> None:
        """Closes the producer."""
        if self._producer is not None:
            await self._producer.close()


class ListenerTasks:
    """The tasks of one `run()`. Without `dead_letters` a given-up message ends `run()`."""

    def __init__(
        self,
        receiver: TaskReceiver,
        listener: Listener,
        filter: Callable[[Message[Any]], bool] | None,
        dead_letters: DeadLetters | None,
        policy: RetryPolicy,
        concurrency: int,
    ) -> None:
        check_whole("concurrency", concurrency, 1)
        check_listener(listener)
        self._receiver = receiver
        self._listener = listener
        self._filter = filter
        self._dead_letters = dead_letters
        self._policy = policy
        self._concurrency = concurrency
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

    async def _handle_all(self, in_flight: InFlightBatch) -> bool:
        """Calls the listener with each message. Returns False if the last delivered message is not done."""
        while True:
            try:
                for fields in in_flight.iterate():
                    message = message_of(fields)
                    is_left_out = self._filter is not None and not self._filter(message)
                    if not is_left_out and not await self._deliver(in_flight, message):
                        return False
                return True
            except DecodeError as error:
                if error is not in_flight.rejected:  # the listener raised it
                    raise
                rejected = error
            if not await self._deliver(in_flight, in_flight.batch.undecoded(rejected.offset), rejected):
                return False
            in_flight.rejected = None

    async def _deliver(
        self, in_flight: InFlightBatch, message: Message[Any], rejected: DecodeError | None = None
    ) -> bool:
        """Calls the listener until the message is done or given up. `rejected`: `decode=` failed in attempt 1."""
        failed = 0
        while True:
            try:
                if rejected is not None:
                    if not failed:
                        raise rejected
                    message, rejected = in_flight.batch.decoded_message(message.offset), None
                    if self._filter is not None and not self._filter(message):
                        return True
                outcome = self._listener(message)
                if inspect.isawaitable(outcome):
                    await outcome
                return True
            except Exception as error:
                failed += not isinstance(error, Rollback)
                pause_s = self._policy.pause_after(error, failed)
                if pause_s is None:
                    if self._dead_letters is None:
                        raise
                    await self._dead_letters.send(message, in_flight.batch.plain_value(message.offset), error, failed)
                    return True
                log.info("%s/%s offset %d failed: %r; next attempt in %g s", *message[:3], error, pause_s)
            while pause_s > 0 and not in_flight.taken_back:
                await asyncio.sleep(min(pause_s, POLL_S))
                pause_s -= POLL_S
            if in_flight.taken_back:
                return False
