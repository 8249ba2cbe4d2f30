"""Messages that `decode=` rejects: named, never skipped in silence, treated as those that their handler rejects."""

from __future__ import annotations

import asyncio
import json
import pickle
from contextlib import aclosing
from typing import Any

import pytest

from metamq import Consumer, Message, MessageBatch, aio
from metamq.client.fetch.inbox import InFlightBatch, PartitionState
from metamq.errors import DecodeError
from tests.client.conftest import Shop
from tests.client.inbox_parts import TP, batch

VALUES = [b"0", b"1", b"not json", b"3", b"4"]
BAD = 2


@pytest.fixture
def topic(shop: Shop) -> str:
    name = shop.topic()
    shop.send(name, VALUES, "0-0")
    return name


def check(error: DecodeError, topic: str) -> None:
    assert (error.topic, error.partition, error.offset, error.key, error.value) == (
        topic,
        "0-0",
        BAD,
        None,
        b"not json",
    )
    assert isinstance(error.__cause__, json.JSONDecodeError)
    assert f"rejects offset 2 of {topic}/0-0: JSONDecodeError" in str(error)
    assert pickle.loads(pickle.dumps(error)).value == b"not json"


def read_until_rejected(consumer: Consumer[Any]) -> tuple[list[int], DecodeError]:
    read: list[int] = []
    with pytest.raises(DecodeError) as raised:
        read.extend(message.value for message in consumer)
    return read, raised.value


def test_a_loop_raises_it_with_its_place_again_and_again_and_a_seek_leads_past_it(
    shop: Shop, topic: str, group: str
) -> None:
    with shop.consumer(topic, group, decode=json.loads, idle_timeout_s=0.3) as consumer:
        read, error = read_until_rejected(consumer)
        assert read == [0, 1]
        check(error, topic)
        for _ in range(3):
            read, error = read_until_rejected(consumer)
            assert read == []
            check(error, topic)
        consumer.seek((error.topic, error.partition), error.offset + 1)
        assert [message.value for message in consumer] == [3, 4]


@pytest.mark.parametrize("caught_inside", [True, False])
def test_what_is_before_it_is_committed_and_it_is_not(shop: Shop, topic: str, group: str, caught_inside: bool) -> None:
    def read_it() -> None:
        with shop.consumer(topic, group, decode=json.loads, idle_timeout_s=0.3) as consumer:
            if caught_inside:
                read_until_rejected(consumer)
            else:
                list(consumer)

    if caught_inside:
        read_it()
    else:
        with pytest.raises(DecodeError):
            read_it()
    assert set(shop.committed(group).values()) == {BAD}
    with shop.consumer(topic, group, decode=json.loads, idle_timeout_s=0.3) as consumer:
        assert read_until_rejected(consumer)[0] == []


def test_asyncio_does_the_same(shop: Shop, topic: str, group: str) -> None:
    async def scenario() -> None:
        async with aio.Consumer(
            shop.cluster.zookeeper, topics=topic, group=group, decode=json.loads, idle_timeout_s=1
        ) as consumer:
            for expected in ([0, 1], [], []):
                read: list[int] = []
                try:
                    async for message in consumer:
                        read.append(message.value)  # noqa: PERF401, what came before the error counts
                    raise AssertionError("the loop ended")
                except DecodeError as error:
                    check(error, topic)
                assert read == expected
            await consumer.seek((topic, "0-0"), BAD + 1)
            assert [message.value async for message in consumer] == [3, 4]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_batch_raises_it_and_comes_again(shop: Shop, group: str) -> None:
    topic = shop.topic()
    with shop.cluster.producer() as producer:
        producer.send_many(topic, VALUES).result(60)
    with shop.consumer(topic, group, decode=json.loads, idle_timeout_s=0.3) as consumer:
        for _ in range(3):
            with pytest.raises(DecodeError) as raised:
                [batch.values for batch in consumer.batches()]
            check(raised.value, topic)
        caught = []
        for one in consumer.batches():  # who handles it in the loop goes on
            try:
                list(one.values)
            except DecodeError as error:
                caught.append(error.offset)
        assert caught == [BAD]
    assert set(shop.committed(group).values()) == {len(VALUES)}


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
@pytest.mark.parametrize("left_for", ["the end", "a loop over messages"])
def test_a_batch_whose_loop_was_left_for_it_is_not_skipped(shop: Shop, group: str, face: str, left_for: str) -> None:
    topic = shop.topic()
    with shop.cluster.producer() as producer:
        producer.send_many(topic, VALUES).result(60)

    def is_rejected(batch: MessageBatch[Any]) -> bool:
        try:
            return not batch.values
        except DecodeError:
            return True

    def blocking() -> None:
        with shop.consumer(topic, group, decode=json.loads, idle_timeout_s=0.3) as consumer:
            for one in consumer.batches():
                if is_rejected(one):
                    break
            if left_for != "the end":
                assert read_until_rejected(consumer)[0] == [0, 1]

    async def asynchronous() -> None:
        async with aio.Consumer(
            shop.cluster.zookeeper, topics=topic, group=group, decode=json.loads, idle_timeout_s=1
        ) as consumer:
            async with aclosing(consumer.batches()) as batches:
                async for one in batches:
                    if is_rejected(one):
                        break
            if left_for != "the end":
                with pytest.raises(DecodeError):
                    async for _message in consumer:
                        pass

    if face == "blocking":
        blocking()
    else:
        asyncio.run(asynchronous())
    with shop.consumer(topic, group, decode=json.loads, idle_timeout_s=0.3) as consumer:
        assert read_until_rejected(consumer)[1].offset == BAD


def dead_letters(shop: Shop, group: str) -> list[Message[bytes]]:
    with shop.consumer(f"{group}.dead-letter", idle_timeout_s=0.3) as consumer:
        return list(consumer)


def check_dead_letter(letter: Message[bytes], topic: str, attempts: int) -> None:
    assert letter.value == b"not json"
    assert letter.headers["metamq-topic"] == topic.encode()
    assert letter.headers["metamq-offset"] == b"2"
    assert letter.headers["metamq-attempts"] == b"%d" % attempts
    assert b"JSONDecodeError" in letter.headers["metamq-error"]


@pytest.mark.slow
def test_run_tries_again_and_sends_it_to_the_dead_letters_as_it_is_stored(shop: Shop, topic: str, group: str) -> None:
    tried: list[bytes] = []
    read: list[int] = []

    def decode(value: bytes) -> Any:
        tried.append(value)
        return json.loads(value)

    with shop.consumer(topic, group, decode=decode, idle_timeout_s=0.3) as consumer:
        consumer.run(lambda message: read.append(message.value), max_attempts=3, retry_delay_s=0.01)
    assert read == [0, 1, 3, 4]
    assert tried.count(b"not json") >= 3
    (letter,) = dead_letters(shop, group)
    check_dead_letter(letter, topic, 3)
    assert set(shop.committed(group).values()) == {len(VALUES)}


@pytest.mark.slow
def test_run_of_asyncio_does_the_same(shop: Shop, topic: str, group: str) -> None:
    read: list[int] = []

    async def scenario() -> None:
        async with aio.Consumer(
            shop.cluster.zookeeper, topics=topic, group=group, decode=json.loads, idle_timeout_s=1
        ) as consumer:
            await consumer.run(lambda message: read.append(message.value), max_attempts=2, retry_delay_s=0.01)

    asyncio.run(scenario())
    assert read == [0, 1, 3, 4]
    (letter,) = dead_letters(shop, group)
    check_dead_letter(letter, topic, 2)


def test_run_without_dead_letters_stops_at_it_each_time(shop: Shop, topic: str, group: str) -> None:
    read: list[int] = []
    for _ in range(2):
        with shop.consumer(topic, group, decode=json.loads, idle_timeout_s=0.3) as consumer:
            for _ in range(2):
                with pytest.raises(DecodeError) as raised:
                    consumer.run(
                        lambda message: read.append(message.value),
                        max_attempts=2, retry_delay_s=0.01, dead_letter=False,
                    )  # fmt: skip
                check(raised.value, topic)
    assert read == [0, 1]
    assert set(shop.committed(group).values()) == {BAD}


def test_what_decode_takes_at_a_later_attempt_reaches_filter_and_listener(shop: Shop, topic: str, group: str) -> None:
    failures = iter([ValueError("not yet"), ValueError("not yet")])
    read: list[Any] = []

    def decode(value: bytes) -> Any:
        if value == b"not json":
            for failure in failures:
                raise failure
            return "at last"
        return json.loads(value)

    with shop.consumer(
        topic, group, decode=decode, filter=lambda message: message.value != 3, idle_timeout_s=1
    ) as consumer:
        consumer.run(lambda message: read.append(message.value), max_attempts=5, retry_delay_s=0.01)
    assert read == [0, 1, "at last", 4]


@pytest.mark.parametrize("count", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("bad", [0, 1, 254, 255, 256, 299, 699])
def test_at_each_place_of_a_batch_it_is_the_one_in_hand(count: int, bad: int) -> None:
    def decode(value: bytes) -> int:
        if int(value) == 1000 + bad:
            raise StopIteration if bad == 1 else ValueError
        return int(value)

    one = batch(TP, 1000, count)
    one._decode = decode
    hand = InFlightBatch(PartitionState(TP, None, 1000), one, lambda: True, whole=False)
    read: list[int] = []
    if bad >= count:
        read.extend(fields[4] for fields in hand.iterate())
        assert read == list(range(1000, 1000 + count)) == list(one.values) == [message.value for message in one]
        return
    with pytest.raises(DecodeError) as raised:
        read.extend(fields[4] for fields in hand.iterate())
    assert raised.value is hand.rejected
    assert raised.value.offset == 1000 + bad
    assert read == list(range(1000, 1000 + bad))
    for last_done in (True, False):
        assert hand.done_offset(last_done=last_done) == 1000 + bad, "not done, whoever asks"
    hand.rejected = None
    assert hand.done_offset(last_done=True) == 1000 + bad + 1
    assert [fields[2] for fields in hand.iterate()] == list(range(1000 + bad + 1, 1000 + count))
    with pytest.raises(DecodeError):
        one.values  # noqa: B018
    iterated = []
    with pytest.raises(DecodeError):
        iterated.extend(message.offset for message in one)
    assert iterated == list(range(1000, 1000 + bad))
