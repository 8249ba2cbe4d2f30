"""Arguments of a wrong type or value: the error names the argument, and what it must be."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from metamq import DatabaseOffsets, FileOffsets, Producer, Rollback
from metamq.errors import ConfigError, MessageTooLarge, TopicNotFound

if TYPE_CHECKING:
    from tests.client.conftest import Shop


def test_wrong_arguments_are_named(shop: Shop) -> None:
    for settings, word in (
        ({"topics": []}, "needs a topic"),
        ({"topics": ["a/b"]}, "a/b"),
        ({"topics": [""]}, "topic"),
        ({"topics": "t", "group": ""}, "group"),
        ({"topics": "t", "group": "a b"}, "a b"),
        ({"topics": "t", "start": "first"}, "first"),
        ({"topics": "t", "start": datetime(2020, 1, 1)}, "start"),
        ({"topics": "t", "on_data_loss": "ignore"}, "ignore"),
        ({"topics": "t", "group": "g", "strategy": "random"}, "random"),
        ({"topics": "t", "fetch_wait_ms": -1}, "fetch_wait_ms"),
        ({"topics": "t", "fetch_wait": 1}, "Did you mean"),
        ({"topics": "t", "broadcast": True}, "broadcast"),
        ({"topics": 5}, "`topics` must be a name or a list of names, not 5"),
        ({"topics": "t", "strategy": 5}, "strategy 5"),
        ({"topics": "t", "idle_timeout_s": "5"}, "`idle_timeout_s` must be a number of seconds, not '5'"),
        ({"topics": "t", "idle_timeout_s": -1}, "`idle_timeout_s` must be a number of seconds, 0 or more, not -1"),
        ({"topics": "t", "idle_timeout_s": float("inf")}, "0 or more, not inf"),
        (
            {"topics": "t", "session_timeout_ms": "5"},
            "`session_timeout_ms` must be a whole number of milliseconds",
        ),
        ({"topics": "t", "filter": 5}, "`filter` must be a callable"),
        ({"topics": "t", "on_assigned": []}, "`on_assigned` must be a callable"),
        ({"topics": "t", "auto_commit": "no"}, "`auto_commit` must be True or False, not 'no'"),
        ({"topics": "t", "group": "g", "offsets": "x.json"}, "`offsets` must be a DatabaseOffsets"),
    ):
        with pytest.raises(ConfigError, match=word):
            shop.cluster.consumer(**settings)
    with pytest.raises(TopicNotFound, match="no-such-topic"):
        shop.consumer("no-such-topic", "g")
    with pytest.raises(TopicNotFound, match="no-such-topic"):
        shop.consumer("no-such-topic")


def test_wrong_arguments_of_calls_are_named(shop: Shop, group: str) -> None:
    topic = shop.topic()
    pair = r"a partition must be a TopicPartition or a pair like \('orders', '0-3'\), not "
    wrong: Any = "x"
    number: Any = 5
    with shop.consumer(topic, group) as opened:
        consumer: Any = opened
        shop.until(lambda: consumer.assignment)
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: consumer.seek(topic, 0), pair + f"'{topic}'"),
            (lambda: consumer.seek((topic, 0), 0), pair),
            (lambda: consumer.pause(topic), pair),
            (lambda: consumer.resume([(topic, "0-0")]), pair),
            (lambda: consumer.commit({topic: 5}), pair),
            (
                lambda: consumer.commit(5),
                "`position` must be a message, a batch or {TopicPartition: offset}, not 5",
            ),
            (lambda: consumer.run(5), "`listener` must be a callable"),
            (
                lambda: consumer.run(print, concurrency="4"),
                "`concurrency` must be a whole number, 1 or more, not",
            ),
            (
                lambda: consumer.run(print, retry_delay_s="1"),
                "`retry_delay_s` must be a number of seconds",
            ),
            (lambda: Rollback(wrong), "`delay_s` must be a number of seconds, not 'x'"),
            (lambda: DatabaseOffsets(wrong), "`connect` must be a callable, not 'x'"),
            (lambda: FileOffsets(number), "`path` must be a path, not 5"),
        ]
        for call, said in calls:
            with pytest.raises(ConfigError, match=said):
                call()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: p.send("t", "text"), r"a message's value must be bytes, not str\. Encode it, or give Producer"),
        (lambda p: p.send("t", 5), "a message's value must be bytes, not int"),
        (lambda p: p.send("t", None), "a message's value must be bytes, not NoneType"),
        (lambda p: p.send("t", b"x", 5), "a message's key must be str or bytes, not int"),
        (
            lambda p: p.send("t", b"x", None, {"h": "text"}),
            "`headers` must be a mapping of str to bytes, not {'h'",
        ),
        (lambda p: p.send("t", b"x", None, {b"h": b"x"}), "`headers` must be a mapping of str to bytes"),
        (lambda p: p.send_many("t", b"text"), "`values` must be a list of values, not b'text'"),
        (lambda p: p.send_many("t", 5), "`values` must be a list of values, not 5"),
        (lambda p: p.send_many("t", [b"x", "y"]), "a message's value must be bytes, not str"),
        (lambda p: p.send_many("t", [b"x"], [5]), "a message's key must be str or bytes, not int"),
        (lambda p: p.send_many("t", [b"x"], 5), "`keys` must be a list with a key, or None, for each value, not 5"),
        (lambda p: p.send("t", b"x", timestamp=1.5), "`timestamp` must be an aware datetime or microseconds"),
        (lambda p: p.send("t", b"x", headers=[("h", b"x")]), "`headers` must be a mapping"),
        (lambda p: p.send("t", b"x", partition=3), 'partition must be a string, not 3. Write it like "0-3"'),
        (lambda p: p.flush("5"), "`timeout` must be a number of seconds, not '5'"),
        (lambda p: p.close("5"), "`timeout` must be a number of seconds, not '5'"),
    ],
)
def test_wrong_types_are_refused_at_the_call(shop: Shop, call: Callable[[Producer[Any]], object], said: str) -> None:
    with shop.cluster.producer() as producer:
        with pytest.raises(TypeError, match=said) as caught:
            call(producer)
        assert isinstance(caught.value, ConfigError)


def test_a_time_limit_of_a_wrong_type_is_named_whether_it_is_needed_or_not(shop: Shop) -> None:
    topic = shop.topic()
    with shop.cluster.producer() as producer:
        for delivery in (producer.send(topic, b"x"), producer.send_many(topic, [b"x"])):
            for _ in range(2):
                with pytest.raises(TypeError, match="`timeout` must be a number of seconds, not '5'"):
                    delivery.result(timeout="5")  # type: ignore[arg-type]
                assert delivery.exception() is None


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda p: p.send("no/topic", b"x"), ConfigError, "topic 'no/topic' has '/' at character 3"),
        (lambda p: p.send(5, b"x"), ConfigError, "topic is 5, not a string"),
        (lambda p: p.send("t", b"x", timestamp=datetime(2013, 1, 1)), ConfigError, "has no time zone"),
        (lambda p: p.send("t", b"x", timestamp=1_700_000_000), ConfigError, "is microseconds since 1970"),
        (lambda p: p.send("t", b"x", timestamp=1_700_000_000_000), ConfigError, "is microseconds since 1970"),
        (lambda p: p.send("t", b"x", timestamp=-1), ConfigError, "is microseconds since 1970"),
        (lambda p: pickle.dumps(p), ConfigError, "Producer cannot be pickled.*Make it in the process"),
        (lambda p: p.send("t", b"x", timestamp=1 << 63), ConfigError, "after the year 9999.*Divide nanoseconds"),
        (lambda p: p.send("t", b"x", timestamp=253_402_300_800_000_000), ConfigError, "after the year 9999"),
        (lambda p: p.send("t", b"x", timestamp=datetime(1969, 12, 31, tzinfo=UTC)), ConfigError, "is before 1970"),
        (lambda p: p.send_many("t", [b"x"], [b"k", b"l"]), ConfigError, "got 2 keys for 1 value"),
        (lambda p: p.send("t", b"x" * (4 << 20)), MessageTooLarge, "the limit is 4,194,304"),
        (lambda p: p.flush(float("inf")), ConfigError, "`timeout` must be .*, or None to wait without limit, not inf"),
        (lambda p: Rollback(delay_s=-1), ConfigError, "`delay_s` must be a number of seconds, 0 or more, not -1"),
        (lambda p: p.send("t", b"x", None, {"\ud800": b"x"}), UnicodeEncodeError, "surrogates not allowed"),
    ],
)
def test_wrong_values_are_refused_at_the_call(
    shop: Shop, call: Callable[[Producer[Any]], object], kind: type[Exception], said: str
) -> None:
    with shop.cluster.producer() as producer, pytest.raises(kind, match=said):
        call(producer)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"linger_s": 1}, r"unknown setting 'linger_s' in the arguments\. Did you mean 'linger_ms'\?"),
        ({"linger_ms": -1}, "producer's `linger_ms` must be a number of milliseconds from 0 to 60,000, not -1"),
        (
            {"buffer_bytes": 2**50},
            "`buffer_bytes` must be a whole number of bytes from 1 KiB to 1 TiB",
        ),
        ({"linger_ms": "5"}, "`linger_ms` must be a number of milliseconds, not '5'"),
        ({"buffer_bytes": 1e6}, r"`buffer_bytes` must be a whole number of bytes, not 1000000\.0"),
        ({"delivery_timeout_s": True}, "`delivery_timeout_s` must be a number of seconds, not True"),
        ({"full_timeout_s": -1}, "`full_timeout_s` must be a number of seconds, 0 or more, not -1"),
        ({"full_timeout_s": float("nan")}, "`full_timeout_s` must be a number of seconds, 0 or more, not nan"),
        ({"delivery_timeout_s": float("nan")}, r"`delivery_timeout_s` must be a number of seconds from 0\.001"),
        ({"full_timeout_s": "5"}, "`full_timeout_s` must be a number of seconds, not '5'"),
        ({"encode": 5}, "`encode` must be a callable, not 5"),
        ({"compression": 5}, "`compression` must be a string, not 5"),
        ({"config": 5}, "`config` must be a path, not 5"),
        ({"root": 5}, "`root` must be a string like '/meta', not 5"),
        ({"compression": "gzip"}, "gzip"),
        ({"partitioner": "random"}, "unknown partitioner 'random'"),
        ({"on_full": "wait"}, "`on_full` is 'wait'"),
    ],
)
def test_wrong_settings(shop: Shop, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shop.cluster.producer(**settings)
