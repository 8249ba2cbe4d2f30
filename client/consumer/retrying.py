"""The retries of a message whose listener fails: another attempt after a pause, then the dead-letter topic.

The blocking Consumer calls the listener in threads, the asyncio Consumer in tasks. Both use the same coroutines. In a
thread these coroutines never wait for a loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from metamq.client.checks import awaitable_listener, check_whole, wrong_type
from metamq.client.handling.current import HandlerOutage, current
from metamq.client.handling.handler_figures import HandlerTimes
from metamq.client.handling.retry_policy import RetryPolicy, Rollback, attempts_before, present_attempt
from metamq.client.model import Message, message_of
from metamq.client.offsets.offsets_database import DatabaseOffsets
from metamq.errors import ConfigError, DecodeError, HandlerTimeout, MessageTooLarge

if TYPE_CHECKING:
    from metamq.client.consumer.receivers import TaskReceiver, ThreadReceiver
    from metamq.client.fetch.consumer_options import ConsumerPlan
    from metamq.client.fetch.inbox import InFlightBatch
    from metamq.client.handling.dead_letters import DeadLetters

log = logging.getLogger("metamq.client")

T = TypeVar("T")

Listener = Callable[[Message[T]], object]
"""Called with each message. It returns when the message is done, and raises if it failed."""

Order = Literal["partition", "key"]
"""The messages that run() processes one after another: those of a partition, or only those of a key."""

POLL_S = 0.5
"""Seconds between two checks if a message, which waits for its next attempt, still belongs to this consumer."""


def check_run(order: Order, dead_letter: bool, retry_later_s: float | None, plan: ConsumerPlan) -> Order:
    """Returns the order. Raises ConfigError, WrongType."""
    if order not in ("partition", "key"):
        raise ConfigError(f"run: `order` is {order!r}", hint="Choose 'partition' or 'key'.")
    if not isinstance(dead_letter, bool):
        raise wrong_type("`dead_letter`", "True or False", dead_letter)
    if retry_later_s is not None and not (dead_letter and plan.retry_topic is not None):
        raise ConfigError(
            "run: `retry_later_s` needs the retry topic of the group, and dead letters",
            hint="Give Consumer(retry_topic=True), and leave dead_letter=True.",
        )
    if not dead_letter and plan.retry_topic is not None:
        raise ConfigError(
            "run: `dead_letter=False`, and the consumer reads the retry topic: its messages may be given up",
            hint="Leave dead_letter=True, or retry_topic=True out.",
        )
    if order == "key" and not plan.auto_commit and isinstance(plan.offsets, DatabaseOffsets):
        raise ConfigError(
            "run: in the order of keys a message cannot be committed in a transaction of the database: messages before "
            "it may be unfinished",
            hint="Use order='partition', or auto_commit=True.",
        )
    return order


def check_no_time_limit(handler_timeout_s: object) -> None:
    """Raises ConfigError if the blocking run() gets a time limit for its handlers."""
    if handler_timeout_s is not None:
        raise ConfigError(
            "run: `handler_timeout_s` is only for asyncio: Python cannot stop a function that runs in a thread",
            hint="Use metamq.aio.Consumer, whose run() cancels the handler. Or watch `running` in consumer.health(), "
            "the metric metamq_consumer_oldest_running_seconds.",
        )


@dataclass(eq=False)
class ListenerRun(ABC):
    """The common part of both kinds of `run()`. Without `dead_letters` a given-up message ends `run()`."""

    listener: Listener[Any]
    filter: Callable[[Message[Any]], bool] | None
    dead_letters: DeadLetters | None
    policy: RetryPolicy
    concurrency: int
    receiver: ThreadReceiver | TaskReceiver
    _awaits: ClassVar[bool]
    """True if the result of the listener is awaited."""

    def __post_init__(self) -> None:
        check_whole("concurrency", self.concurrency, 1)
        self.receiver.commits.run_begins()
        self._outage = HandlerOutage()

    @abstractmethod
    async def _give_up(self, storing: Coroutine[Any, Any, None]) -> None:
        """Runs the storing of a message in the consumer's loop."""

    @abstractmethod
    async def _pause(self, in_flight: InFlightBatch, pause_s: float) -> bool:
        """Waits for the next attempt. Returns False if this consumer must not try the message any more."""

    def _is_stopped(self) -> bool:
        """Returns True if no further message may be delivered."""
        return False

    def _times(self, in_flight: InFlightBatch, offset: int) -> HandlerTimes:
        return HandlerTimes(self.receiver.handlers, in_flight.batch.topic, in_flight.processing_of(offset))

    async def _within_limit(self, outcome: Awaitable[object], message: Message[Any]) -> None:
        """Awaits the handler, and cancels it at its time limit. Raises HandlerTimeout, also if the handler catches the
        cancellation and ends without an error."""
        limit_s = self.policy.handler_timeout_s
        cause: TimeoutError | None = None
        try:
            async with asyncio.timeout(limit_s) as limit:
                await outcome
        except TimeoutError as error:
            if not limit.expired():
                raise
            cause = error
        if limit_s is not None and limit.expired():
            raise HandlerTimeout(*message[:3], limit_s) from cause

    async def _handle_all(self, in_flight: InFlightBatch) -> bool:
        """Calls the listener with each message. Returns False if the last delivered message is not done."""
        with self._times(in_flight, in_flight.batch.offset) as times:
            return await self._handle_each(in_flight, times)

    async def _handle_each(self, in_flight: InFlightBatch, times: HandlerTimes) -> bool:
        outcome: object
        failure: Exception | None
        is_limited, now_s, state = self.policy.handler_timeout_s is not None, time.monotonic, in_flight.state
        while True:
            try:
                for fields in in_flight.iterate():
                    message: Message[Any] = message_of(fields)
                    current.set(message)
                    if self.filter is not None and not self.filter(message):
                        continue
                    began_s, outcome, failure = now_s(), None, None
                    in_flight.calling = began_s, message
                    try:  # a coroutine for each message would cost a fifth of the rate
                        outcome = self.listener(message)
                        if self._awaits and outcome is not None and inspect.isawaitable(outcome):
                            await (self._within_limit(outcome, message) if is_limited else outcome)
                    except Exception as error:
                        failure = error
                    times.ended(began_s, failure)
                    if failure is not None:  # outside of `except`: it would be the context of each further error
                        if not await self._try_again(in_flight, message, failure):
                            return False
                    else:
                        if outcome is not None and not self._awaits:
                            self._check_done(outcome)
                        state.handled_offset = message.offset + 1
                    if self._is_stopped():
                        break  # the rest of the batch is delivered again, to the next reader
                return True
            except DecodeError as error:
                if error is not in_flight.rejected:  # the listener raised it
                    raise
                rejected = error
            undecoded = in_flight.batch.undecoded(rejected.offset)
            if not await self._try_again(in_flight, undecoded, rejected, is_rejected=True):
                return False
            in_flight.rejected = None

    async def _handle_one(self, in_flight: InFlightBatch, message: Message[Any]) -> bool:
        """Calls the listener with a message, whose value is as it is stored. Returns False if it is not done."""
        failure: Exception | None
        outcome, failure = None, None
        current.set(message)
        if in_flight.batch.decodes:
            try:
                message = in_flight.batch.decoded_message(message.offset)
            except DecodeError as error:
                failure = error
        is_rejected = failure is not None
        if failure is None:
            if self.filter is not None and not self.filter(message):
                return True
            try:
                outcome = await self._call(in_flight, message)
            except Exception as error:
                failure = error
        if failure is not None:
            return await self._try_again(in_flight, message, failure, is_rejected=is_rejected)
        if not self._awaits:
            self._check_done(outcome)
        return True

    async def _call(self, in_flight: InFlightBatch, message: Message[Any]) -> object:
        """Calls the listener once, and awaits its result. Raises its error."""
        with self._times(in_flight, message.offset) as times:
            began_s = time.monotonic()
            current.set(message)
            try:
                outcome = self.listener(message)
                if self._awaits and inspect.isawaitable(outcome):
                    await self._within_limit(outcome, message)
            except Exception as error:
                times.ended(began_s, error)
                raise
            times.ended(began_s)
            return outcome

    async def _try_again(
        self, in_flight: InFlightBatch, message: Message[Any], error: Exception, *, is_rejected: bool = False
    ) -> bool:
        """Calls the listener until the message, which failed once, is done or given up. Returns False if it is neither.

        `is_rejected`: the error is that of `decode=`, so the message is decoded again first.
        """
        place, is_over = message[:3], False
        current.set(message)  # it may be one that `decode` rejected
        first = present_attempt.set(0)
        try:
            is_over = await self._try_until_over(in_flight, message, error, is_rejected=is_rejected)
            return is_over
        finally:
            present_attempt.reset(first)
            in_flight.retrying.pop(place[2], None)
            self._outage.ended(place, done=is_over)

    async def _try_until_over(
        self, in_flight: InFlightBatch, message: Message[Any], error: Exception, *, is_rejected: bool
    ) -> bool:
        letters, outages = self.dead_letters, 0
        failed = attempts_before(message)
        figures = self.receiver.handlers
        while True:
            if isinstance(error, ConfigError) and error.ends_run:
                raise error
            if not isinstance(error, Rollback):
                figures.failed(message.topic)
            counts = self.policy.counts(error)
            failed += counts
            outages = 0 if counts else outages + 1
            if outages and not isinstance(error, Rollback):
                self._outage.failed(message, error)
            pause_s = self.policy.pause_after(error, failed, outages)
            in_flight.retrying[message.offset] = f"{type(error).__name__}: {error}"
            if (processing := in_flight.processing_of(message.offset)) is not None:
                processing.failed(message.offset, error, is_final=pause_s is None)
            if pause_s is None:
                if letters is None:
                    raise error
                await self._give_up(self._store(letters, in_flight, message, error, failed))
                return True
            if self.policy.is_later(error):
                if letters is None:
                    raise error
                await self._give_up(self._store(letters, in_flight, message, error, failed, pause_s))
                return True
            fields = {"topic": message.topic, "partition": message.partition, "offset": message.offset}
            log.info("%s/%s offset %d failed: %r; next attempt in %.3g s", *message[:3], error, pause_s, extra=fields)
            if not await self._pause(in_flight, pause_s):
                return False
            try:
                if is_rejected:
                    message, is_rejected = in_flight.batch.decoded_message(message.offset), False
                    if self.filter is not None and not self.filter(message):
                        return True
                present_attempt.set(failed + 1)
                outcome = await self._call(in_flight, message)
            except Exception as failure:
                error = failure
            else:
                if not self._awaits:
                    self._check_done(outcome)
                in_flight.state.handled_offset = message.offset + 1
                return True

    async def _store(
        self,
        letters: DeadLetters,
        in_flight: InFlightBatch,
        message: Message[Any],
        error: Exception,
        attempts: int,
        delay_s: float | None = None,
    ) -> None:
        """Stores a dead letter, or with a delay a message in the retry topic; one that is too large for it becomes a
        dead letter. Without auto_commit the message is committed here."""
        value = in_flight.batch.plain_value(message.offset)
        if delay_s is not None:
            try:
                await letters.send_later(message, value, error, attempts, delay_s)
            except MessageTooLarge as too_large:  # with its further headers
                too_large.__cause__ = error
                error, delay_s = too_large, None
        if delay_s is None:
            await letters.send(message, value, error, attempts)
            self.receiver.handlers.given_up(message.topic)
        await self.receiver.commits.stored_elsewhere(in_flight, message.offset)

    def _check_done(self, outcome: object) -> None:
        """Ends run() if the listener returned an awaitable: nothing was done, and another attempt would not help."""
        if inspect.isawaitable(outcome):
            if inspect.iscoroutine(outcome):
                outcome.close()  # avoids a warning of Python in addition to the error
            raise awaitable_listener(self.listener)
