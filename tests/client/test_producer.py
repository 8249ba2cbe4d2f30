"""The Producer as users call it, blocking and asyncio, on a real cluster."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import pytest

from metamq import Producer, aio
from metamq.client.model import ReceiptRange
from metamq.client.producer.outgoing import Delivery, ManyDelivery
from metamq.client.producer.partitioner import by_key_hash
from metamq.errors import (
    BufferFull,
    ClosedError,
    ConfigError,
    DeliveryTimeout,
    MessageTooLarge,
    MetamqError,
    PartitionNotFound,
    Timeout,
    TopicNotFound,
)
from metamq.testing import Cluster
from metamq.zk.cluster.topics import TopicConfig
from tests.one_zookeeper import cluster
from tests.parts import read_topic, statistics, wait_until


@pytest.fixture
def topic(parts: Cluster, request: pytest.FixtureRequest) -> TopicConfig:
    """A topic of four partitions, of this test's own."""
    with parts.admin() as admin:
        return admin.create_topic(request.node.originalname, partitions=4)


def values(parts: Cluster, topic: TopicConfig) -> list[bytes]:
    stored = read_topic(parts.broker, topic.topic, topic.id)
    return [message.value for messages in stored.values() for message in messages]


def batches_in(parts: Cluster, topic: TopicConfig) -> int:
    count: int = statistics(parts.broker)["counters"]["batches_in"].get(topic.topic, 0)
    return count


# -- what is sent is stored, and where it is said to be ---------------------------------------------


def test_receipts(parts: Cluster, topic: TopicConfig) -> None:
    when = datetime(2013, 1, 1, 5, 17, tzinfo=UTC)
    with parts.producer() as producer:
        before_us = time.time_ns() // 1000
        first = producer.send(topic.topic, b"first", "key").result(60)
        second = producer.send(topic.topic, b"second", b"key", {"h": b"1"}, timestamp=when).result(60)
        third = producer.send(topic.topic, bytearray(b"third"), partition="0-3", timestamp=1 << 50).result(60)
        keyless = producer.send(topic.topic, memoryview(b"keyless")).result(60)
    assert (first.topic, first.offset) == (topic.topic, 0)
    assert before_us <= first.timestamp <= time.time_ns() // 1000
    assert second == (topic.topic, first.partition, 1, 1_357_017_420_000_000)
    assert second.time == when
    assert (third.partition, third.timestamp) == ("0-3", 1 << 50)
    places = {
        message.value: (partition, message.offset, message.key)
        for partition, messages in read_topic(parts.broker, topic.topic, topic.id).items()
        for message in messages
    }
    assert places == {
        b"first": (first.partition, 0, b"key"),
        b"second": (first.partition, 1, b"key"),
        b"third": ("0-3", third.offset, None),
        b"keyless": (keyless.partition, keyless.offset, None),
    }


def test_many_at_once(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer() as producer:
        (one,) = producer.send_many(topic.topic, [b"a", b"b", b"c"]).result(60)
        assert one == ReceiptRange(topic.topic, one.partition, 0, 3)
        keys = [b"%d" % n for n in range(40)]
        ranges = producer.send_many(topic.topic, keys, keys).result(60)
        assert [r.partition for r in ranges] == ["0-0", "0-1", "0-2", "0-3"]
        assert sum(r.count for r in ranges) == 40
        mixed = producer.send_many(topic.topic, [b"x", b"y"], [None, "k"]).result(60)
        assert sum(r.count for r in mixed) == 2
        assert producer.send_many(topic.topic, []).result(60) == []
    stored = read_topic(parts.broker, topic.topic, topic.id)
    for r in ranges:
        assert all(m.key == m.value for m in stored[r.partition][r.offset : r.offset + r.count])


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_compressed(parts: Cluster, compression: str | None) -> None:
    name = f"compressed-{compression}"
    with parts.admin() as admin:
        config = admin.create_topic(name, partitions=1)
    with parts.producer(compression=compression) as producer:
        producer.send_many(name, [b"again " * 200] * 50).result(60)
    assert values(parts, config) == [b"again " * 200] * 50
    size = next(p["size_bytes"] for p in statistics(parts.broker)["partitions"] if p["topic"] == name)
    assert (size < 10_000) == (compression is not None)


def test_encoded(parts: Cluster, topic: TopicConfig) -> None:
    with Producer[str](parts.zookeeper, encode=str.encode) as producer:
        producer.send(topic.topic, "één").result(60)
        producer.send_many(topic.topic, ["twee", "drie"]).result(60)
    assert sorted(values(parts, topic)) == sorted(["één".encode(), b"twee", b"drie"])


def test_keyless_batches_take_turns_over_all_partitions(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer() as producer:
        receipts = [producer.send(topic.topic, b"x").result(60) for _ in range(12)]
    places = sorted((r.partition, r.offset) for r in receipts)
    assert places == [(f"0-{i}", offset) for i in range(4) for offset in range(3)]


def test_two_megabytes_in_one_message(parts: Cluster) -> None:
    with parts.admin() as admin:
        config = admin.create_topic("large", partitions=1, max_message_bytes=3_000_000)
    with parts.producer() as producer:
        producer.send("large", b"x" * 2_000_000).result(60)
        producer.send("large", b"small").result(60)
        with pytest.raises(MessageTooLarge, match="the limit is 3,000,000"):
            producer.send("large", b"x" * 3_000_001)
    assert [len(value) for value in values(parts, config)] == [2_000_000, 5]


def test_many_threads_and_each_message_once(parts: Cluster, topic: TopicConfig) -> None:
    told: dict[bytes, tuple[str, int]] = {}

    def work(producer: Producer[bytes], number: int) -> None:
        sent = [(b"%d-%d" % (number, i)) for i in range(1500)]
        deliveries = [producer.send(topic.topic, value, value[:1] if i % 3 else None) for i, value in enumerate(sent)]
        for value, delivery in zip(sent, deliveries, strict=True):
            receipt = delivery.result(60)
            told[value] = receipt.partition, receipt.offset

    with parts.producer() as producer:
        threads = [threading.Thread(target=work, args=(producer, number)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    stored = read_topic(parts.broker, topic.topic, topic.id)
    assert {m.value: (name, m.offset) for name, messages in stored.items() for m in messages} == told
    assert len(told) == sum(map(len, stored.values())) == 9000


# -- linger and hurry -------------------------------------------------------------------------------


def test_linger_gathers_messages_into_one_batch(parts: Cluster, topic: TopicConfig) -> None:
    def are_stored(count: int) -> bool:
        return len(values(parts, topic)) == count

    with parts.producer(linger_ms=300) as producer:
        producer.send(topic.topic, b"to know the topic").result(60)
        for turn in range(1, 11):
            before = batches_in(parts, topic)
            begun = time.monotonic()
            for number in range(10):
                producer.send(topic.topic, b"%d" % number)
            took_s = time.monotonic() - begun
            wait_until(partial(are_stored, 1 + turn * 10))
            assert time.monotonic() - begun >= 0.25
            if took_s < 0.25:  # else the machine was slow
                break
        assert batches_in(parts, topic) - before == 1


@pytest.mark.parametrize("wait", [lambda p, d: d.result(60), lambda p, d: p.flush(60), lambda p, d: d.exception(60)])
def test_whoever_waits_does_not_linger(
    parts: Cluster, wait: Callable[[Producer[bytes], Delivery], object], request: pytest.FixtureRequest
) -> None:
    with parts.admin() as admin:
        admin.create_topic(name := f"hurry-{request.node.callspec.id[-1]}", partitions=2)
    with parts.producer(linger_ms=60_000) as producer:
        begun = time.monotonic()
        wait(producer, producer.send(name, b"x", b"k"))
        wait(producer, producer.send(name, b"y"))
        producer.send(name, b"left for close()")
    assert time.monotonic() - begun < 50


def test_a_short_linger_ends_every_time(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer(linger_ms=0.2) as producer:  # shorter than what the loop's timers can tell from now
        for _ in range(30):
            delivery = producer.send(topic.topic, b"x")
            wait_until(delivery.done)


def test_awaiting_does_not_linger_either(parts: Cluster, topic: TopicConfig) -> None:
    async def run() -> None:
        async with aio.Producer(parts.zookeeper, linger_ms=60_000) as producer:
            async with asyncio.timeout(50):
                assert (await producer.send(topic.topic, b"x")).topic == topic.topic
                await producer.send_many(topic.topic, [b"x"] * 10)
                await producer.flush()

    asyncio.run(run())


# -- errors, and who is told of them ----------------------------------------------------------------


def test_flush_raises_what_failed_and_nobody_was_told_of(
    parts: Cluster, topic: TopicConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with parts.producer() as producer:
        producer.send("nowhere", b"x", b"k")
        producer.send(topic.topic, b"fine")
        told = producer.send("nowhere-else", b"x")
        assert isinstance(told.exception(60), TopicNotFound)
        with pytest.raises(TopicNotFound) as caught:
            producer.flush()
        assert str(caught.value) == (
            "topic 'nowhere' does not exist. Create it with `metamq topic create nowhere` or Admin.create_topic()."
        )
        producer.flush()
        producer.send("nowhere", b"x")
        with pytest.raises(TopicNotFound):
            producer.flush()
    assert caplog.messages == [], "it is raised"


def test_failures_that_flush_cannot_keep_are_logged(
    parts: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metamq.client.producer.producer_core.FAILURES_MAX", 2)
    with parts.producer() as producer:
        for number in range(4):  # two of them are told at once, and need no room
            delivery = producer.send(f"nowhere-{number}", b"x")
            wait_until(delivery.done)
            if number < 2:
                delivery.exception()
        assert caplog.messages == []
        producer.send("nowhere-4", b"x")
        wait_until(lambda: caplog.messages)
        assert [message.partition(". ")[0] for message in caplog.messages] == [
            "not stored: 1 message for nowhere-4: topic 'nowhere-4' does not exist"
        ]
        with pytest.raises(TopicNotFound, match="'nowhere-2'") as caught:
            producer.flush()
        assert [note.partition(" does")[0] for note in caught.value.__notes__] == ["Also not stored: topic 'nowhere-3'"]


def test_close_raises_it_too_and_is_closed_all_the_same(parts: Cluster) -> None:
    producer = parts.producer()
    producer.send("nowhere", b"x")
    with pytest.raises(TopicNotFound):
        producer.close()
    producer.close()
    for call in (
        lambda: producer.send("t", b"x"),
        lambda: producer.send("t", b"x", key="k"),
        lambda: producer.send_many("t", [b"x"]),
        producer.flush,
        producer.__enter__,
    ):
        with pytest.raises(ClosedError, match=r"this producer is closed\. Make a new one"):
            call()


def test_a_message_for_a_partition_there_is_not(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer() as producer:
        early = producer.send(topic.topic, b"x", partition="0-9")
        with pytest.raises(PartitionNotFound, match=r"has no partition '0-9'\. It has: 0-0, 0-1, 0-2, 0-3"):
            early.result(60)
        with pytest.raises(PartitionNotFound):
            producer.send(topic.topic, b"x", partition="0-9")
        producer.send(topic.topic, b"x", partition="0-1").result(60)


def test_flush_raises_for_a_message_that_found_no_partition(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer() as producer:
        producer.send(topic.topic, b"x", partition="0-9")
        with pytest.raises(PartitionNotFound):
            producer.flush()


def test_a_producer_that_was_not_made_leaves_nothing_behind(parts: Cluster) -> None:
    with pytest.raises(ConfigError, match="'meta', does not start with '/'"):
        Producer(parts.zookeeper, root="meta")
    gc.collect()  # a warning of an unclosed Producer would be an error


# -- the buffer's bound -----------------------------------------------------------------------------


def test_a_full_buffer_raises_or_blocks_and_goes_on(parts: Cluster, topic: TopicConfig) -> None:
    with (
        parts.producer(on_full="raise", buffer_bytes=20_000, delivery_timeout_s=60) as raising,
        parts.producer(full_timeout_s=0.1, buffer_bytes=20_000, delivery_timeout_s=60) as patient,
    ):
        for producer in (raising, patient):
            producer.send(topic.topic, b"to know the topic").result(60)
        parts.broker.freeze()
        try:
            sent: list[ManyDelivery] = []

            def fill(producer: Producer[bytes]) -> None:
                while len(sent) < 100:
                    sent.append(producer.send_many(topic.topic, [b"x" * 1000]))

            for producer in (raising, patient):
                with pytest.raises(BufferFull, match="buffer of 20,000 bytes is full"):
                    fill(producer)
        finally:
            parts.broker.thaw()
        for delivery in sent:
            delivery.result(60)
        for producer in (raising, patient):
            producer.send(topic.topic, b"again").result(60)
    assert len(values(parts, topic)) == len(sent) + 4


def test_blocked_until_there_is_room(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer(buffer_bytes=50_000) as producer:
        for _ in range(400):
            producer.send(topic.topic, b"x" * 1000)
    assert len(values(parts, topic)) == 400


def test_messages_for_a_topic_that_does_not_exist_do_not_fill_the_buffer(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer(on_full="raise", buffer_bytes=20_000) as producer:
        for _ in range(10):
            for send in (
                lambda: producer.send("nowhere", b"x" * 5000, b"k"),
                lambda: producer.send("nowhere", b"x" * 5000),
                lambda: producer.send_many("nowhere", [b"x" * 5000], [b"k"]),
            ):
                assert isinstance(send().exception(60), TopicNotFound)
        producer.send(topic.topic, b"x").result(60)


# -- callbacks, futures, loops ----------------------------------------------------------------------


def test_callbacks_run_and_one_that_fails_disturbs_nobody(
    parts: Cluster, topic: TopicConfig, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    with parts.producer() as producer:
        deliveries = [producer.send(topic.topic, b"%d" % n, partition=f"0-{n % 4}") for n in range(40)]
        for number, delivery in enumerate(deliveries):
            delivery.add_done_callback(lambda _: 1 // 0)
            delivery.add_done_callback(lambda d, number=number: done.append(number))  # type: ignore[misc]
        for delivery in deliveries:
            delivery.result(60)
        wait_until(lambda: len(done) == 40)
        late: list[Delivery] = []
        deliveries[0].add_done_callback(late.append)
        wait_until(lambda: late == [deliveries[0]])
        producer.send(topic.topic, b"and on it goes").result(60)


def test_what_would_block_the_loop_is_refused_in_it(parts: Cluster, topic: TopicConfig) -> None:
    problems: list[BaseException] = []
    with parts.producer(linger_ms=5000) as producer:

        def in_the_loop(_: object) -> None:
            try:
                producer.send(topic.topic, b"y").result(60)
            except BaseException as error:
                problems.append(error)

        producer.send(topic.topic, b"x").add_done_callback(in_the_loop)
        wait_until(lambda: problems)
    assert isinstance(problems[0], ConfigError)
    assert "a wait here would block the event loop that must receive the answer" in str(problems[0])


def test_futures_and_awaits_in_any_loop(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer() as producer:
        assert producer.send(topic.topic, b"x").as_future().result(60).topic == topic.topic
        assert isinstance(producer.send("nowhere", b"x").as_future().exception(60), TopicNotFound)

        async def elsewhere() -> None:
            receipts = await asyncio.gather(*(producer.send(topic.topic, b"%d" % n) for n in range(50)))
            assert len({(r.partition, r.offset) for r in receipts}) == 50
            with pytest.raises(TopicNotFound):
                await producer.send("nowhere", b"x")
            given_up = asyncio.wrap_future(producer.send(topic.topic, b"x").as_future())
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)

        asyncio.run(elsewhere())


def test_asyncio_with_a_small_buffer(parts: Cluster, topic: TopicConfig) -> None:
    async def run() -> int:
        drains = 0
        async with aio.Producer(parts.zookeeper, buffer_bytes=30_000, batch_bytes=5000) as producer:
            for number in range(500):
                try:
                    producer.send(topic.topic, b"%d" % number + b"x" * 500)
                except BufferFull:
                    drains += 1
                    await producer.drain()
                    producer.send(topic.topic, b"%d" % number + b"x" * 500)
        return drains

    assert asyncio.run(run()) > 0
    assert len(values(parts, topic)) == 500


def test_asyncio_misused(parts: Cluster, topic: TopicConfig) -> None:
    async def run() -> None:
        producer = aio.Producer(parts.zookeeper)
        with pytest.raises(ConfigError, match=r"this Producer is not open\. Use `async with"):
            producer.send(topic.topic, b"x")
        await producer.close()
        async with aio.Producer(parts.zookeeper) as producer:
            with pytest.raises(ConfigError, match="was opened before"):
                await producer.open()
            with pytest.raises(ConfigError, match="Await the delivery"):
                producer.send(topic.topic, b"x").result(60)
        with pytest.raises(ClosedError):
            producer.send(topic.topic, b"x")
        for use in (producer.flush, producer.drain):
            with pytest.raises(ClosedError, match="Make a new one"):
                await use()
        await producer.close()

    asyncio.run(run())


def test_time_limits_of_the_callers_own(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer() as producer:
        producer.send(topic.topic, b"x").result(60)
        parts.broker.freeze()
        try:
            delivery = producer.send(topic.topic, b"y")
            with pytest.raises(Timeout, match=f"the delivery to {topic.topic}.* took longer than 0.05 s"):
                delivery.result(0.05)
            with pytest.raises(
                Timeout, match=r"flush\(\) of 1 message for topic .* took longer than 0.05 s.*metamq doctor"
            ):
                producer.flush(0.05)
            assert not delivery._batch.callbacks, "a flush that ended leaves nothing behind"
            with pytest.raises(Timeout):
                delivery.exception(0)
        finally:
            parts.broker.thaw()
        assert delivery.result(60).offset >= 0


def test_close_that_cannot_wait_says_what_became_of_the_rest(parts: Cluster, topic: TopicConfig) -> None:
    producer = parts.producer()
    producer.send(topic.topic, b"x").result(60)
    parts.broker.freeze()
    try:
        delivery = producer.send(topic.topic, b"y")
        with pytest.raises(Timeout):
            producer.close(0.1)
        error = delivery.exception(0)
        assert isinstance(error, ClosedError)
        assert "its messages were not acknowledged in time" in str(error)
    finally:
        parts.broker.thaw()


# -- two brokers ------------------------------------------------------------------------------------


def test_a_dead_broker_holds_up_its_own_partitions_only() -> None:
    with cluster(brokers=2) as parts:
        with parts.admin() as admin:
            admin.create_topic("t", partitions=4)
            admin.create_topic("both", partitions=2)
        dead = parts.brokers[1]
        with parts.producer(delivery_timeout_s=200) as producer:
            for name in ("0-0", "1-0"):
                producer.send("t", b"x", partition=name).result(60)
            dead.kill()
            key = next(key for n in range(100) if by_key_hash("t", key := b"%d" % n, 4) == 2)  # that is 1-0
            waiting = [producer.send("t", b"%d" % n, key) for n in range(20)]
            wait_until(lambda: producer._core.sender.busy().brokers == {1})
            begun = time.monotonic()
            for _ in range(20):
                producer.send("t", b"x", partition="0-1").result(60)
                waiting.append(producer.send("t", b"%d" % len(waiting), partition="1-0"))
            receipts = [producer.send("both", b"x").result(60) for _ in range(10)]
            assert {receipt.partition for receipt in receipts} == {"0-0"}, "messages without a key go elsewhere"
            assert time.monotonic() - begun < 100
            assert not any(delivery.done() for delivery in waiting)
            dead.start()
            assert [delivery.result(60).offset for delivery in waiting] == list(range(1, 41))
            producer.flush()


@pytest.mark.slow
def test_messages_for_a_dead_broker_time_out_and_later_ones_are_stored(caplog: pytest.LogCaptureFixture) -> None:
    with cluster() as parts:
        with parts.admin() as admin:
            config = admin.create_topic("t", partitions=1)
        limit = time.monotonic() + 60
        with parts.producer(delivery_timeout_s=2) as producer:
            while producer.send("t", b"before").exception(60) is not None:
                assert time.monotonic() < limit  # else the machine was slow
            parts.broker.kill()
            first = producer.send("t", b"first")
            wait_until(lambda: producer._core.sender.busy().brokers == {0})
            gathered = [producer.send("t", b"gathered-%d" % n) for n in range(10)]
            errors = [delivery.exception(60) for delivery in [first, *gathered]]
            assert {type(error) for error in errors} == {DeliveryTimeout}
            assert isinstance(errors[-1], MetamqError)
            assert errors[-1].outcome == "not_done"
            assert "was not acknowledged within 2 s (last error: no connection to 127.0.0.1:" in str(errors[-1])
            warnings = [record.getMessage() for record in caplog.records if "for topic 't' wait" in record.getMessage()]
            assert len(warnings) == 1
            # All 11, unless the machine was slow.
            assert re.fullmatch(
                r"broker 0: no connection to 127.0.0.1:\d+: .*; [1-9]\d* messages? for topic 't' waits?", warnings[0]
            )
            parts.broker.start()
            deadline = time.monotonic() + 60
            while producer.send("t", b"after").exception(60) is not None:
                assert time.monotonic() < deadline
        stored = values(parts, config)
        assert stored[0] == b"before"
        assert stored[-1] == b"after"
        assert not [value for value in stored if value.startswith(b"gathered")]
