"""Messages without a cluster, and calls of handlers as `run()` makes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from metamq import GiveUp, RetryLater, Rollback, attempt
from metamq.errors import WrongType
from metamq.testing.messages import Handled, aio_handle, handle, message


class Handler:
    """Raises these errors, one in each call, then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, _message: object) -> None:
        if self.errors:
            raise self.errors.pop(0)

    async def later(self, message: object) -> None:
        await asyncio.sleep(0)
        self(message)


def test_the_handler_knows_its_attempt() -> None:
    attempts: list[int] = []

    def handler(_message: object) -> None:
        attempts.append(attempt())
        raise OSError if len(attempts) == 2 else ValueError

    handle(handler, message(b"1"), max_attempts=3, retry_on=OSError)
    assert attempts == [1, 2, 2, 3]
    assert attempt() == 1


def by_both(*errors: Exception, **run: Any) -> Handled:
    """What both kinds of calls find."""
    one = message(b"17", key=b"k", headers={"own": b"1"}, topic="orders", offset=7)
    found = handle(Handler(*errors), one, **run)
    other = asyncio.run(aio_handle(Handler(*errors).later, one, **run))
    assert (found.outcome, found.calls, found.pauses_s) == (other.outcome, other.calls, other.pauses_s)
    assert found.letter_headers.keys() == other.letter_headers.keys()
    return found


def test_a_message_has_the_given_fields_and_the_present_time() -> None:
    made = message({"id": 17}, key=b"k", headers={"a": b"1"}, topic="orders", partition="1-2", offset=3)
    assert made[:6] == ("orders", "1-2", 3, b"k", {"id": 17}, {"a": b"1"})
    assert made.time.year >= 2026
    assert message(b"", timestamp=1_700_000_000_000_000).timestamp == 1_700_000_000_000_000


def test_attempts_pauses_and_the_dead_letter_are_those_of_run() -> None:
    assert by_both().outcome == "done"
    assert by_both(ValueError("a"), ValueError("b")).pauses_s == (0.1, 0.2)
    given_up = by_both(*[ValueError("bad")] * 3, max_attempts=3)
    assert (given_up.outcome, given_up.calls, str(given_up.error)) == ("dead letter", 3, "bad")
    headers = given_up.letter_headers
    assert (headers["metamq-error"], headers["metamq-attempts"], headers["own"]) == (b"ValueError: bad", b"3", b"1")
    assert (headers["metamq-topic"], headers["metamq-offset"]) == (b"orders", b"7")


def test_errors_without_a_further_attempt_and_those_without_an_end() -> None:
    assert by_both(GiveUp("no")).calls == 1
    assert by_both(KeyError("id"), give_up_on=KeyError).outcome == "dead letter"
    assert by_both(*[OSError()] * 6, retry_on=OSError, max_attempts=1).outcome == "done"
    waiting = by_both(*[Rollback()] * 20, calls_max=4)
    assert (waiting.outcome, waiting.calls) == ("waiting", 4)


def test_a_message_that_comes_later() -> None:
    later = by_both(ValueError("a"), retry_later_s=60)
    assert (later.outcome, later.calls, later.pauses_s) == ("later", 1, (60,))
    assert by_both(RetryLater(5)).pauses_s == (5,)


def test_a_message_of_a_retry_topic_has_the_attempts_of_its_header() -> None:
    headers = {"metamq-attempts": b"3", "metamq-origin-topic": b"orders", "metamq-origin-offset": b"7"}
    one = message(b"17", headers=headers, topic="billing.retry", offset=1)
    given_up = handle(Handler(*[ValueError("bad")] * 9), one, max_attempts=5)
    assert (given_up.outcome, given_up.calls) == ("dead letter", 2)
    letter = given_up.letter_headers
    assert (letter["metamq-attempts"], letter["metamq-topic"], letter["metamq-offset"]) == (b"5", b"orders", b"7")
    assert handle(Handler(ValueError("bad")), one, retry_later_s=60).pauses_s == (480,)
    assert handle(Handler(*[ValueError("bad")] * 9), message(b"", headers=headers), max_attempts=5).calls == 5


def test_the_pauses_have_the_limit_and_the_jitter_of_run() -> None:
    errors = [ValueError("bad")] * 3
    assert by_both(*errors, retry_delay_s=1, retry_delay_max_s=2).pauses_s == (1, 2, 2)
    (pause_s,) = handle(Handler(ValueError("bad")), message(b""), retry_delay_s=8, jitter=0.5).pauses_s
    assert 4 <= pause_s <= 8


def test_functions_that_run_would_refuse_are_refused() -> None:
    with pytest.raises(WrongType, match="await"):
        handle(Handler().later, message(b""))
    with pytest.raises(WrongType):
        handle(lambda one: Handler().later(one), message(b""))
