"""Messages for tests without a cluster, and calls of a handler as `run()` makes them: attempts, and the dead letter."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from metamq.client.background import at_once
from metamq.client.checks import awaitable_listener, check_listener, check_plain_listener, check_whole
from metamq.client.handling.current import current
from metamq.client.handling.dead_letters import dead_letter_headers
from metamq.client.handling.retry_policy import RETRY_DELAY_MAX_S, Errors, RetryPolicy, attempts_before, present_attempt
from metamq.client.model import Message
from metamq.errors import ConfigError
from metamq.zk.names import RETRY_SUFFIX

T = TypeVar("T")

CALLS_MAX = 10


def message(
    value: T,
    *,
    key: bytes | None = None,
    headers: Mapping[str, bytes] | None = None,
    topic: str = "topic",
    partition: str = "0-0",
    offset: int = 0,
    timestamp: int | None = None,
) -> Message[T]:
    """Returns a message as a handler receives it, without a cluster.

    `value` is what `decode=` would return. `timestamp` is in microseconds since 1970; None is now.
    """
    at_us = time.time_ns() // 1000 if timestamp is None else timestamp
    return Message(topic, partition, offset, key, value, dict(headers or {}), at_us)


@dataclass(frozen=True, slots=True)
class Handled:
    """The result of the calls of a handler with one message."""

    outcome: Literal["done", "dead letter", "later", "waiting"]
    """"later": the message goes to the retry topic, for the last of `pauses_s`. "waiting": each call raised Rollback or
    an error of `retry_on`, and run() would go on."""
    calls: int
    """The calls of the handler."""
    pauses_s: tuple[float, ...]
    """The seconds that run() waits after each call that failed, except for the last one."""
    error: Exception | None
    """The error of the last call; None if the message is done."""
    letter_headers: Mapping[str, bytes]
    """The headers of the dead letter, which has the key and the stored value of the message; else empty."""


def handle(
    handler: Callable[[Message[T]], object],
    message: Message[T],
    *,
    max_attempts: int = 5,
    retry_delay_s: float = 0.1,
    retry_delay_max_s: float = RETRY_DELAY_MAX_S,
    jitter: float = 0.0,
    retry_on: Errors = (),
    give_up_on: Errors = (),
    retry_later_s: float | None = None,
    calls_max: int = CALLS_MAX,
) -> Handled:
    """Calls a handler with a message, as Consumer.run() with these arguments does, but without a cluster and pauses.

    The topic of the message may be a retry topic, as "billing.retry": the header `metamq-attempts` counts then.

    After `calls_max` calls it returns, even if run() would call the handler again. Raises WrongType for a coroutine
    function.
    """
    check_plain_listener(handler)
    policy = RetryPolicy(
        max_attempts, retry_delay_s, retry_on, give_up_on,
        retry_delay_max_s=retry_delay_max_s, jitter=jitter, retry_later_s=retry_later_s,
    )  # fmt: skip
    return at_once(_handle(handler, message, policy, calls_max, awaits=False))


async def aio_handle(
    handler: Callable[[Message[T]], object],
    message: Message[T],
    *,
    max_attempts: int = 5,
    retry_delay_s: float = 0.1,
    retry_delay_max_s: float = RETRY_DELAY_MAX_S,
    jitter: float = 0.0,
    retry_on: Errors = (),
    give_up_on: Errors = (),
    retry_later_s: float | None = None,
    calls_max: int = CALLS_MAX,
) -> Handled:
    """Calls a handler as metamq.aio.Consumer.run() does, and awaits its result; see handle()."""
    check_listener(handler)
    policy = RetryPolicy(
        max_attempts, retry_delay_s, retry_on, give_up_on,
        retry_delay_max_s=retry_delay_max_s, jitter=jitter, retry_later_s=retry_later_s,
    )  # fmt: skip
    return await _handle(handler, message, policy, calls_max, awaits=True)


async def _handle(
    handler: Callable[[Message[Any]], object],
    message: Message[Any],
    policy: RetryPolicy,
    calls_max: int,
    *,
    awaits: bool,
) -> Handled:
    check_whole("calls_max", calls_max, 1)
    has_origin = message.topic.endswith(RETRY_SUFFIX)
    calls = outages = 0
    failed = attempts_before(message)
    pauses_s: list[float] = []
    while True:
        calls += 1
        error = await _call(handler, message, failed + 1, awaits=awaits)
        if error is None:
            return Handled("done", calls, tuple(pauses_s), None, {})
        counts = policy.counts(error)
        failed += counts
        outages = 0 if counts else outages + 1
        pause_s = policy.pause_after(error, failed, outages)
        if pause_s is None:
            letter = dead_letter_headers(message, error, failed, has_origin=has_origin)
            return Handled("dead letter", calls, tuple(pauses_s), error, letter)
        if policy.is_later(error):
            return Handled("later", calls, (*pauses_s, pause_s), error, {})
        if calls >= calls_max:
            return Handled("waiting", calls, tuple(pauses_s), error, {})
        pauses_s.append(pause_s)


async def _call(
    handler: Callable[[Message[Any]], object], message: Message[Any], attempt: int, *, awaits: bool
) -> Exception | None:
    """Calls the handler once. Returns its error. Raises WrongType for an awaitable result that run() does not await."""
    token, attempt_token = current.set(message), present_attempt.set(attempt)
    try:
        outcome = handler(message)
        if awaits and inspect.isawaitable(outcome):
            await outcome
    except Exception as error:
        if isinstance(error, ConfigError) and error.ends_run:
            raise
        return error
    finally:
        current.reset(token)
        present_attempt.reset(attempt_token)
    if not awaits and inspect.isawaitable(outcome):
        if inspect.iscoroutine(outcome):
            outcome.close()
        raise awaitable_listener(handler)
    return None
