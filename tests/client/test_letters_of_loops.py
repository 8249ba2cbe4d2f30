"""`dead_letter()`: a loop, a batch or poll() stores a message in the dead-letter topic."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from metamq import DeadLetter, DeadLetterQueue, Message, TopicPartition
from metamq.errors import ConfigError, DecodeError, OwnershipLost, WrongType
from tests.client.idle import run_until

if TYPE_CHECKING:
    from tests.client.conftest import Shop


def tp(topic: str) -> TopicPartition:
    return TopicPartition(topic, "0-0")


def letters(shop: Shop, group: str) -> list[DeadLetter]:
    with DeadLetterQueue(group, shop.cluster.zookeeper) as queue:
        return list(queue.letters())


def test_a_message_of_a_loop(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.producer.send(topic, b"0", key=b"k", headers={"own": b"x"}).result(60)
    shop.numbers(topic, 2, start=1)
    with shop.consumer(topic, group, decode=int) as consumer:
        for message in consumer:
            if message.value == 0:
                try:
                    raise ValueError("not this one")
                except ValueError as error:
                    consumer.dead_letter(message, error, attempts=3)
                [letter] = letters(shop, group)  # before the message is done
                assert consumer.health().partitions[tp(topic)].done_offset == 0
            if message.value == 2:
                break
        assert consumer.health().handlers[topic].given_up == 1
    assert (letter.topic, letter.offset, letter.key, letter.value) == (topic, 0, b"k", b"0")
    assert (letter.error, letter.attempts, letter.headers) == ("ValueError: not this one", 3, {"own": b"x"})
    assert "in test_a_message_of_a_loop" in letter.traceback
    assert shop.committed(group)[tp(topic)] == 3
    with DeadLetterQueue(group, shop.cluster.zookeeper) as queue:
        assert queue.resend() == 1


def test_messages_that_wait_in_a_list(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 4)
    with shop.consumer(topic, group, auto_commit=False) as consumer:
        some = [consumer.poll(60) for _ in range(3)]
        assert some[0] is not None
        consumer.dead_letter(some[0], ValueError())
        batch = next(consumer.batches())
        consumer.dead_letter(next(iter(batch)), ValueError())
        for lost in (some[0]._replace(offset=100), some[0]._replace(partition="0-7")):
            with pytest.raises(OwnershipLost, match="another owner came after the delivery of offset"):
                consumer.dead_letter(lost, ValueError())
    assert [letter.offset for letter in letters(shop, group)] == [0, batch.offset]
    with shop.consumer(topic, group, decode=int) as consumer:
        first = consumer.poll(60)
        assert first is not None
        shop.numbers(topic, 1)
        while (last := consumer.poll(60)) is not None and last.offset < 4:  # another batch
            pass
        with pytest.raises(ConfigError, match=r"the stored message of .* at offset 0 is not here any more"):
            consumer.dead_letter(first, ValueError())


def test_a_message_that_decode_rejects(shop: Shop, group: str) -> None:
    topic, found = shop.topic(), list[int]()
    shop.producer.send_many(topic, [b"0", b"bad", b"2", b"worse", b"4"]).result(60)
    with shop.consumer(topic, group, decode=int) as consumer:
        while 4 not in found:
            try:
                for message in consumer:
                    found.append(message.value)
                    if message.value == 4:
                        break
            except DecodeError as error:
                consumer.dead_letter(error)
    assert found == [0, 2, 4]
    assert [(letter.value, letter.error[:12]) for letter in letters(shop, group)] == [
        (b"bad", "DecodeError:"),
        (b"worse", "DecodeError:"),
    ]
    assert shop.committed(group)[tp(topic)] == 5


def test_asyncio_does_the_same(shop: Shop, group: str) -> None:
    topic, found = shop.topic(), list[int]()
    shop.producer.send_many(topic, [b"0", b"bad", b"2"]).result(60)

    async def scenario() -> None:
        async with shop.cluster.aio_consumer(topics=topic, group=group, decode=int) as consumer:
            while 2 not in found:
                try:
                    async for message in consumer:
                        await consumer.dead_letter(message, ValueError(message.value))
                        found.append(message.value)
                        if message.value == 2:
                            break
                except DecodeError as error:
                    await consumer.dead_letter(error)

    asyncio.run(scenario())
    assert found == [0, 2]
    assert [letter.value for letter in letters(shop, group)] == [b"0", b"bad", b"2"]
    assert shop.committed(group)[tp(topic)] == 3


def test_wrong_uses(shop: Shop, group: str) -> None:
    topic, errors = shop.topic(), list[str]()
    shop.numbers(topic, 1)

    def listener(message: Message[Any]) -> None:
        with pytest.raises(ConfigError, match=r"Raise metamq\.GiveUp") as refused:
            consumer.dead_letter(message, ValueError())
        errors.append(str(refused.value))

    with shop.consumer(topic, group, idle_timeout_s=0.3) as consumer:
        run_until(lambda: errors, consumer, listener, order="key")
        with pytest.raises(WrongType, match="`message` must be"):
            consumer.dead_letter(b"0", ValueError())  # type: ignore[arg-type]
    with shop.consumer(topic) as consumer:
        message = next(iter(consumer))
        with pytest.raises(WrongType, match="`error` must be"):
            consumer.dead_letter(message)
        with pytest.raises(ConfigError, match="a dead-letter topic belongs to a group"):
            consumer.dead_letter(message, ValueError())
