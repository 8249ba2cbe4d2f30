"""`consumer.run(listener)`: threads that take batches and call the listener, message by message.

One thread at a time has a batch of a partition, so the partition's messages are processed in order; other partitions
continue meanwhile. While a message waits for its next attempt, its partition waits, until the message is done or given
up, or the partition is revoked: then the next owner receives the message.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from metamq.client.checks import awaitable_listener, check_plain_listener, check_whole
from metamq.client.model import Message, message_of
from metamq.client.net.retrying import RetryPolicy, Rollback, dead_letter_headers, dead_letter_topic
from metamq.errors import DecodeError, TopicExists
from metamq.wire.limits import MESSAGE_BYTES_MAX
from metamq.words import count

if TYPE_CHECKING:
    from metamq.client.consumer.receivers import ThreadReceiver
    from metamq.client.fetch.inbox import InFlightBatch
    from metamq.client.producer.producer import BaseProducer

log = logging.getLogger("metamq.client")

T = TypeVar("T")

Listener = Callable[[Message[T]], object]
"""Called with each message. It returns when the message is done, and raises if it failed. Not a coroutine function."""

INTERRUPT_PATIENCE_S = 0.1
POLL_S = 0.5


class DeadLetters:
    """Sends given-up messages to the group's dead-letter topic, which is created when the first message comes."""

    def __init__(self, zookeeper: str, root: str, group: str | None) -> None:
        self.topic = dead_letter_topic(group)
        self._zookeeper = zookeeper
        self._root = root
        self._producer: BaseProducer[bytes] | None = None
        self._lock = threading.Lock()

    def send(self, message: Message[Any], value: bytes, error: Exception, attempts: int) -> None:
        """Sends a message and returns when it is stored. Raises the errors of a delivery."""
        times = count(attempts, "attempt")
        log.warning("given up after %s, to %s: %r", times, self.topic, message[:3], exc_info=error)
        headers = dead_letter_headers(message, error, attempts)
        self._open().send(self.topic, value, message.key, headers).result()

    def _open(self) -> BaseProducer[bytes]:
        from metamq.client.admin.admin import Admin
        from metamq.client.producer.producer import BaseProducer

        with self._lock:
            if self._producer is None:
                with Admin(self._zookeeper, root=self._root) as admin, contextlib.suppress(TopicExists):
                    admin.create_topic(self.topic, partitions=1, max_message_bytes=MESSAGE_BYTES_MAX)
                self._producer = BaseProducer(self._zookeeper, root=self._root)
            return self._producer

    def close(self) -> None:
        """Closes the producer."""
        if self._producer is not None:
            self._producer.close()


class ListenerPool:
    """The threads of one `run()`. Without `dead_letters` a given-up message ends `run()`."""

    def __init__(
        self,
        receiver: ThreadReceiver,
        listener: Listener[Any],
        filter: Callable[[Message[Any]], bool] | None,
        dead_letters: DeadLetters | None,
        policy: RetryPolicy,
        concurrency: int,
    ) -> None:
        check_whole("concurrency", concurrency, 1)
        check_plain_listener(listener)
        self._receiver = receiver
        self._listener = listener
        self._filter = filter
        self._dead_letters = dead_letters
        self._policy = policy
        self._stop = threading.Event()
        self._ended = threading.Semaphore(0)
        self._busy = 0
        self._busy_lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"metamq-listener-{number}", daemon=True)
            for number in range(concurrency)
        ]

    def run(self) -> None:
        """Runs until the consumer is closed or idle, or an error of a listener ends it."""
        try:
            for thread in self._threads:
                thread.start()
            for _ in self._threads:
                self._ended.acquire()
        except BaseException:
            self._end()
            for thread in self._threads:
                thread.join(INTERRUPT_PATIENCE_S / len(self._threads))
            raise
        finally:
            if self._dead_letters is not None:
                self._dead_letters.close()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        self._stop.set()
        self._receiver.poke()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                in_flight = self._receiver.take(self._stop)
                if in_flight is not None:
                    self._handle_busy(in_flight)
                elif self._busy == 0 or self._receiver.closed:
                    return
        except BaseException as error:
            self._error = self._error or error
            self._end()
        finally:
            self._ended.release()

    def _handle_busy(self, in_flight: InFlightBatch) -> None:
        with self._busy_lock:
            self._busy += 1
        done = False
        try:
            done = self._handle(in_flight)
        finally:
            with self._busy_lock:
                self._busy -= 1
            self._receiver.release(in_flight, last_done=done)

    def _handle(self, in_flight: InFlightBatch) -> bool:
        """Calls the listener with each message. Returns False if the last delivered message is not done."""
        while True:
            try:
                for fields in in_flight.iterate():
                    message: Message[Any] = message_of(fields)
                    if self._filter is not None and not self._filter(message):
                        continue
                    if not self._deliver(in_flight, message):
                        return False
                    if self._stop.is_set():
                        break  # the rest of the batch is delivered again, to the next reader
                return True
            except DecodeError as error:
                if error is not in_flight.rejected:  # the listener raised it
                    raise
                rejected = error
            if not self._deliver(in_flight, in_flight.batch.undecoded(rejected.offset), rejected):
                return False
            in_flight.rejected = None

    def _deliver(self, in_flight: InFlightBatch, message: Message[Any], rejected: DecodeError | None = None) -> bool:
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
            except Exception as error:
                failed += not isinstance(error, Rollback)
                pause_s = self._policy.pause_after(error, failed)
                if pause_s is None:
                    if self._dead_letters is None:
                        raise
                    self._dead_letters.send(message, in_flight.batch.plain_value(message.offset), error, failed)
                    return True
                log.info("%s/%s offset %d failed: %r; next attempt in %g s", *message[:3], error, pause_s)
            else:
                self._check_done(outcome)
                return True
            if not self._pause(in_flight, pause_s):
                return False

    def _check_done(self, outcome: object) -> None:
        """Ends run() if the listener returned an awaitable: nothing was done, and another attempt would not help."""
        if inspect.isawaitable(outcome):
            if inspect.iscoroutine(outcome):
                outcome.close()  # avoids a warning of Python in addition to the error
            raise awaitable_listener(self._listener)

    def _pause(self, in_flight: InFlightBatch, pause_s: float) -> bool:
        """Waits for the next attempt. Returns False if this consumer must not try the message any more."""
        while pause_s > 0 and not in_flight.taken_back and not self._stop.wait(min(pause_s, POLL_S)):
            pause_s -= POLL_S
        return not in_flight.taken_back and not self._stop.is_set()
