"""What is sent in a transaction waits for room where it has to; a small one for nothing. None of it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from metamq import Producer, aio
from metamq.errors import BranchMisuse, BranchNotKnown, BufferFull, TopicNotFound
from metamq.testing import Cluster, cluster
from tests.parts import wait_until


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


def send_more_than_fits(running: Cluster, topic: str) -> None:
    with running.producer(buffer_bytes=50_000) as producer, producer.transaction():
        for number in range(100):
            producer.send_many(topic, [b"%05d" % number] * 1000)
            producer.send(topic, b"%05d" % number)


def read(running: Cluster, topic: str) -> list[bytes]:
    with running.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
        return [value for batch in consumer.batches() for value in batch.values]


def test_lists_larger_than_the_buffer(running: Cluster) -> None:
    running.create_topic("large", partitions=1)
    send_more_than_fits(running, "large")
    assert read(running, "large") == [b"%05d" % (number // 1001) for number in range(100 * 1001)]


def test_more_than_a_frame_is_left_when_it_ends(running: Cluster) -> None:
    running.create_topic("wide", partitions=70)
    with running.producer(batch_bytes=2 * 1024 * 1024) as producer, producer.transaction():
        for index in range(70):  # none fills its batch
            producer.send("wide", index.to_bytes(2, "big") * 500_000, partition=f"0-{index}")
    assert sorted(value[:2] for value in read(running, "wide")) == [index.to_bytes(2, "big") for index in range(70)]


def calls_of_loop(producer: Producer[bytes]) -> list[object]:
    """The callbacks that sends hand to the producer's loop from now on."""
    core, calls = producer._core, list[object]()
    original = core.in_loop

    def in_loop(callback: Callable[..., object], *args: object) -> None:
        calls.append(callback)
        original(callback, *args)

    core.in_loop = in_loop  # type: ignore[method-assign]
    return calls


def test_what_is_small_wakes_the_loop_at_its_end_only(running: Cluster) -> None:
    running.create_topic("small", partitions=1)
    with running.producer() as producer:
        with producer.transaction():
            producer.send("small", b"1")
        calls = calls_of_loop(producer)
        with producer.transaction():
            producer.send("small", b"2", key=b"k")
            producer.send_many("small", [b"3"] * 100)
            assert calls == []
            producer.send_many("small", [bytes(1000)] * 65)
            assert len(calls) == 1
    assert read(running, "small") == [b"1", b"2", *[b"3"] * 100, *[bytes(1000)] * 65]


def test_room_behind_a_savepoint_is_what_was_sent_before_it(running: Cluster) -> None:
    running.create_topic("saved", partitions=1)
    with running.producer(buffer_bytes=10_000, on_full="raise") as producer:
        producer.tpc_begin(producer.xid(1, "saved"))
        one = producer._transactions.of(producer._owner())
        assert one is not None
        producer.send("saved", b"before" * 500)
        one.outbox.savepoint()
        producer.send("saved", b"behind" * 1300)
        assert one.outbox.is_full
        producer._background.run(asyncio.wait_for(one.outbox.until_half(), 10))
        producer.send("saved", b"behind" * 1300)
        with pytest.raises(BufferFull):
            producer._background.run(asyncio.wait_for(one.outbox.until_half(), 10))
        producer.tpc_commit()
    assert [len(value) for value in read(running, "saved")] == [3000, 7800, 7800]


def test_a_topic_that_is_not_there_is_told_before_the_end(running: Cluster) -> None:
    running.create_topic("there", partitions=1)
    with running.producer() as producer, pytest.raises(TopicNotFound), producer.transaction():  # noqa: PT012
        producer.send("there", b"1")
        producer.send("nowhere", b"1")

        def is_told() -> bool:
            try:
                producer.send("there", b"1")
            except TopicNotFound:
                return True
            return False

        wait_until(is_told)
    assert read(running, "there") == []


def test_what_is_rolled_back_meanwhile_is_not_prepared_in_part(running: Cluster) -> None:
    running.create_topic("meanwhile", partitions=1)

    async def main() -> None:
        async with aio.Producer(running.zookeeper) as producer:
            xid = producer.xid(1, "meanwhile")
            await producer.tpc_begin(xid)
            producer.send_many("meanwhile", [b"1"] * 2000)  # four turns; the topic is asked for first
            one = producer._transactions.of(asyncio.current_task())
            assert one is not None

            async def roll_back() -> None:  # as close() does, in whatever task it is called
                assert one.outbox._is_running
                await producer._transactions.rollback(one)

            rolling_back = asyncio.create_task(roll_back())
            with pytest.raises(BranchMisuse, match="rolled back meanwhile"):
                await producer.tpc_prepare()
            await rolling_back
            producer._all_left()
            with pytest.raises(BranchNotKnown):
                await producer.tpc_commit(xid)

    asyncio.run(main())


def test_a_block_that_was_left_leaves_what_its_task_began_since(running: Cluster) -> None:
    running.create_topic("left", partitions=1)

    async def main() -> None:
        async with aio.Producer(running.zookeeper) as producer:
            first = producer.transaction()
            await first.__aenter__()
            producer.send("left", b"of another task")
            entered = asyncio.Event()

            async def other() -> None:
                async with producer.transaction():
                    entered.set()
                    await first.__aexit__(None, None, None)
                    producer.send("left", b"of its own")
                    assert b"of its own" not in await asyncio.to_thread(read, running, "left")

            await asyncio.create_task(other())

    asyncio.run(main())
    assert read(running, "left") == [b"of another task", b"of its own"]
