"""The rules of retries: the number of attempts per message, and the pauses between them."""

from __future__ import annotations

import random
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metamq.client.checks import check_seconds, check_whole, is_number, wrong_type
from metamq.client.delayed import DELAY_MAX_S
from metamq.client.handling.current import current
from metamq.errors import ConfigError
from metamq.zk.names import RETRY_SUFFIX

if TYPE_CHECKING:
    from metamq.client.model import Message

RETRY_DELAY_MAX_S = 30.0
DOUBLINGS_MAX = 1000
"""The most doublings of the delay: 2.0 ** 1024 raises OverflowError."""
ROLLBACK_DELAY_S = 0.1
RETRY_LATER_MAX_S = 3600.0
"""The most seconds to which `retry_later_s` is doubled."""

Errors = type[Exception] | tuple[type[Exception], ...]
"""A class of exceptions, or several."""

present_attempt: ContextVar[int] = ContextVar("metamq_attempt", default=0)
"""The number of a further attempt; 0 during the first call."""


def attempt() -> int:
    """Returns the number of the attempt at the message, for the listener that run() calls: 1 is the first one.

    Rollback and an error of `retry_on` are no attempt. A new owner of the partition begins at 1. A message of a retry
    topic continues with the attempts before. Outside of a listener
    it is 1; a thread that the listener starts needs a copy of its context, as asyncio.to_thread() makes it.
    """
    message = current.get()
    return present_attempt.get() or (1 if message is None else 1 + attempts_before(message))


def attempts_before(message: Message[Any]) -> int:
    """Returns the failed attempts of a message from a retry topic; 0 for others."""
    counted = message.headers.get("metamq-attempts", b"") if message.topic.endswith(RETRY_SUFFIX) else b""
    return int(counted) if counted.isdigit() else 0


class Rollback(Exception):
    """Raised by a listener to receive the message again after `delay_s` seconds, without counting an attempt."""

    def __init__(self, delay_s: float = ROLLBACK_DELAY_S) -> None:
        check_seconds("delay_s", delay_s, optional=False)
        super().__init__(f"rolled back, delivered again in {delay_s:g} s")
        self.delay_s = delay_s


class RetryLater(Exception):
    """Raised by a listener to receive the message again after `delay_s` seconds, from the group's retry topic: the
    messages behind it go on meanwhile. It counts as an attempt. Needs Consumer(retry_topic=True)."""

    def __init__(self, delay_s: float, reason: str = "the listener wants it later") -> None:
        check_seconds("delay_s", delay_s, optional=False)
        if delay_s > DELAY_MAX_S:
            raise ConfigError("RetryLater: `delay_s` is more than 366 days")
        super().__init__(reason)
        self.delay_s = delay_s


class GiveUp(Exception):
    """Raised by a listener to send the message to the dead letters at once, with this reason."""

    def __init__(self, reason: str = "the listener gave it up") -> None:
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts per message, their time limit, and the pauses between them. An error of `retry_on` is no
    attempt; after one of `give_up_on`, and GiveUp, there is no further one."""

    max_attempts: int
    retry_delay_s: float
    retry_on: Errors = ()
    give_up_on: Errors = ()
    handler_timeout_s: float | None = None
    retry_delay_max_s: float = RETRY_DELAY_MAX_S
    jitter: float = 0.0
    retry_later_s: float | None = None
    """The seconds after which a failed message comes again from the retry topic, doubled each time; None keeps its
    place."""

    def __post_init__(self) -> None:
        for name, given in (("retry_on", self.retry_on), ("give_up_on", self.give_up_on)):
            kinds = given if isinstance(given, tuple) else (given,)
            if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
                raise wrong_type(f"`{name}`", "a class of exceptions, or a tuple of them", given)
        check_whole("max_attempts", self.max_attempts, 1)
        check_seconds("retry_delay_s", self.retry_delay_s, optional=False)
        check_seconds("retry_delay_max_s", self.retry_delay_max_s, optional=False)
        if not is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise ConfigError(f"`jitter` must be a number from 0 to 1, not {self.jitter!r}")
        check_seconds("handler_timeout_s", self.handler_timeout_s)
        check_seconds("retry_later_s", self.retry_later_s)
        if self.handler_timeout_s == 0:
            raise ConfigError("run: `handler_timeout_s` is 0", hint="Give seconds, or None for no limit.")

    def is_final(self, error: Exception) -> bool:
        """Returns True if a further attempt would not help. An error that is also of `retry_on` is final, too; a
        Rollback or a RetryLater never is."""
        return isinstance(error, (GiveUp, self.give_up_on)) and not isinstance(error, (Rollback, RetryLater))

    def counts(self, error: Exception) -> bool:
        """Returns True if the error is a failed attempt: not a Rollback, and not of `retry_on`."""
        if isinstance(error, RetryLater):
            return True
        return self.is_final(error) or not isinstance(error, (Rollback, self.retry_on))

    def is_later(self, error: Exception) -> bool:
        """Returns True if the next attempt, if there is one, begins in the retry topic."""
        return isinstance(error, RetryLater) or (self.retry_later_s is not None and self.counts(error))

    def pause_after(self, error: Exception, failed_attempts: int, outages: int = 0) -> float | None:
        """Returns the seconds until the next attempt, or None to give up.

        `failed_attempts` includes this one if it counts. `outages`: the errors of `retry_on` in a row, with this one.
        """
        if self.is_final(error):
            return None
        if isinstance(error, Rollback):
            return error.delay_s
        if not self.counts(error):
            return self._pause(outages)
        if failed_attempts >= self.max_attempts:
            return None
        if isinstance(error, RetryLater):
            return error.delay_s
        if (first_s := self.retry_later_s) is not None:
            return self._shortened(_doubled(first_s, failed_attempts, max(first_s, RETRY_LATER_MAX_S)))
        return self._pause(failed_attempts)

    def _pause(self, errors: int) -> float:
        return self._shortened(_doubled(self.retry_delay_s, errors, self.retry_delay_max_s))

    def _shortened(self, pause_s: float) -> float:
        return pause_s * (1 - self.jitter * random.random())


def _doubled(first_s: float, errors: int, most_s: float) -> float:
    return min(first_s * 2.0 ** min(errors - 1, DOUBLINGS_MAX), most_s)
