"""`consumer.run(listener)`: threads that take batches and call the listener, message by message.

A partition is in one thread's hand at a time, so its messages are handled in order; others go on meanwhile. While a
message waits for its next attempt its partition waits with it, until it is done, given up, or the partition is
revoked: then the next owner gets it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from metamq.client.checks import awaitable_listener, check_plain_listener, check_whole
from metamq.client.consumer.hands import ThreadHands
from metamq.client.fetch.inbox import Hand
from metamq.client.model import Message, message_of
from metamq.client.net.retrying import RetryPolicy, Rollback, dead_letter_headers, dead_letter_topic
from metamq.errors import DecodeError, TopicExists
from metamq.wire.limits import MESSAGE_BYTES_MAX
from metamq.words import count

if TYPE_CHECKING:
    from metamq.client.producer.producer import BaseProducer

log = logging.getLogger("metamq.client")

T = TypeVar("T")

Listener = Callable[[Message[T]], object]
"""Called with each message; returns when the message is done, raises when it failed. No coroutine function."""

INTERRUPT_PATIENCE_S = 0.1
POLL_S = 0.5


class DeadLetters:
    """Sends given-up messages to the group's dead-letter topic, which is made when the first one comes."""

    def __init__(self, zookeeper: str, root: str, group: str | None) -> None:
        self.topic = dead_letter_topic(group)
        self._zookeeper = zookeeper
        self._root = root
        self._producer: BaseProducer[bytes] | None = None
        self._lock = threading.Lock()

    def send(self, message: Message[Any], value: bytes, error: Exception, attempts: int) -> None:
        """Returns when it is stored. Raises what a delivery can fail with."""
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
    """The threads of one `run()`. Without `dead_letters` a message that is given up ends it."""

    def __init__(
        self,
        hands: ThreadHands,
        listener: Listener[Any],
        filter: Callable[[Message[Any]], bool] | None,
        dead_letters: DeadLetters | None,
        policy: RetryPolicy,
        concurrency: int,
    ) -> None:
        check_whole("concurrency", concurrency, 1)
        check_plain_listener(listener)
        self._hands = hands
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
        """Until the consumer is closed, idle, or a listener's error is not to be survived."""
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
        self._hands.poke()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                hand = self._hands.take(self._stop)
                if hand is not None:
                    self._handle_busy(hand)
                elif self._busy == 0 or self._hands.closed:
                    return
        except BaseException as error:
            self._error = self._error or error
            self._end()
        finally:
            self._ended.release()

    def _handle_busy(self, hand: Hand) -> None:
        with self._busy_lock:
            self._busy += 1
        done = False
        try:
            done = self._handle(hand)
        finally:
            with self._busy_lock:
                self._busy -= 1
            self._hands.release(hand, in_hand=done)

    def _handle(self, hand: Hand) -> bool:
        """Calls the listener with each message; False when the last one handed out is not done."""
        while True:
            try:
                for fields in hand.iterate():
                    message: Message[Any] = message_of(fields)
                    if self._filter is not None and not self._filter(message):
                        continue
                    if not self._deliver(hand, message):
                        return False
                    if self._stop.is_set():
                        break  # the rest of the batch comes again, to whoever asks next
                return True
            except DecodeError as error:
                if error is not hand.rejected:  # but of the listener's
                    raise
                rejected = error
            if not self._deliver(hand, hand.batch.undecoded(rejected.offset), rejected):
                return False
            hand.rejected = None

    def _deliver(self, hand: Hand, message: Message[Any], rejected: DecodeError | None = None) -> bool:
        """Until it is done or given up. `rejected`: its first attempt ended in `decode=`."""
        failed = 0
        while True:
            try:
                if rejected is not None:
                    if not failed:
                        raise rejected
                    message, rejected = hand.batch.decoded_message(message.offset), None
                    if self._filter is not None and not self._filter(message):
                        return True
                outcome = self._listener(message)
            except Exception as error:
                failed += not isinstance(error, Rollback)
                pause_s = self._policy.pause_after(error, failed)
                if pause_s is None:
                    if self._dead_letters is None:
                        raise
                    self._dead_letters.send(message, hand.batch.plain_value(message.offset), error, failed)
                    return True
                log.info("%s/%s offset %d failed: %r; again in %g s", *message[:3], error, pause_s)
            else:
                self._check_done(outcome)
                return True
            if not self._pause(hand, pause_s):
                return False

    def _check_done(self, outcome: object) -> None:
        """Ends run() where the work is still to be awaited: trying again would not help, and nothing was done."""
        if inspect.isawaitable(outcome):
            if inspect.iscoroutine(outcome):
                outcome.close()  # without a warning of Python's beside the error
            raise awaitable_listener(self._listener)

    def _pause(self, hand: Hand, pause_s: float) -> bool:
        """Waits for the next attempt; False when the message is not ours to try any more."""
        while pause_s > 0 and not hand.taken_back and not self._stop.wait(min(pause_s, POLL_S)):
            pause_s -= POLL_S
        return not hand.taken_back and not self._stop.is_set()
