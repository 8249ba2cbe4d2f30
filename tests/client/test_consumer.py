"""The blocking Consumer on a real cluster: what it gives, what counts as done, and what is committed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Consumer, Message, TopicPartition
from metamq.errors import ConfigError, ConnectError, OffsetOutOfRange, OwnershipLost, PartitionNotFound
from metamq.zk.cluster.topics import TopicStore
from metamq.zk.groups.ownership import CommittedOffset, reset_offset
from metamq.zk.session.session import Session
from tests.client.idle import LIMIT_S, all_of

if TYPE_CHECKING:
    from tests.client.conftest import Shop

QUICK_MS = 50


def tp(topic: str, index: int = 0) -> TopicPartition:
    return TopicPartition(topic, f"0-{index}")


def first(consumer: Consumer[Any], count: int) -> list[Message[Any]]:
    """The next messages; the last of them stays in hand."""
    messages: list[Message[Any]] = []
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:  # a short idle time-out may end a loop on a slow machine
        for message in consumer:
            messages.append(message)
            if len(messages) == count:
                return messages
    raise AssertionError(f"{len(messages)} of {count} messages came")


def values(messages: list[Message[Any]]) -> list[int]:
    return [int(message.value) for message in messages]


# What comes


def test_every_message_comes_once_with_all_it_was_sent_with(shop: Shop) -> None:
    topic = shop.topic()
    sent_us = 1_700_000_000_123_456
    shop.producer.send(topic, b"v", key="k", headers={"h": b"1"}, timestamp=sent_us).result(60)
    shop.send(topic, [b""])
    with shop.consumer(topic) as consumer:
        full, plain = first(consumer, 2)
    assert full == Message(topic, "0-0", 0, b"k", b"v", {"h": b"1"}, sent_us)
    assert full.time == datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
    assert (plain.offset, plain.key, plain.value, plain.headers) == (1, None, b"", {})
    assert abs(plain.timestamp / 1e6 - time.time()) < 60


def test_partitions_keep_their_order(shop: Shop) -> None:
    topic = shop.topic(4)
    for number in range(400):
        shop.producer.send(topic, b"%d" % number, key=b"%d" % (number % 7))
    shop.producer.flush()
    with shop.consumer(topic) as consumer:
        messages = first(consumer, 400)
    assert sorted(values(messages)) == list(range(400))
    for index in range(4):
        mine = [message for message in messages if message.partition == f"0-{index}"]
        assert [message.offset for message in mine] == list(range(len(mine)))
    for key in range(7):
        numbers = [int(message.value) for message in messages if message.key == b"%d" % key]
        assert numbers == sorted(numbers)


def test_batches_come_as_they_are_stored(shop: Shop) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(1_000)]).result(60)
    got: list[bytes] = []
    with shop.consumer(topic) as consumer:
        for batch in consumer.batches():
            assert (batch.topic, batch.partition, batch.offset) == (topic, "0-0", len(got))
            assert len(batch) == len(batch.values) == len(batch.keys) == len(batch.timestamps)
            assert batch.to_arrow().column("value").to_pylist() == list(batch.values)
            got += batch.values
            if len(got) == 1_000:
                break
    assert got == [b"%d" % number for number in range(1_000)]


def test_a_fetch_in_the_middle_of_a_batch_gives_the_rest_of_it(shop: Shop) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(100)]).result(60)
    with shop.consumer(topic) as consumer:
        shop.until(lambda: consumer.assignment)
        consumer.seek(tp(topic), 37)
        batch = next(consumer.batches())
        assert (batch.offset, len(batch), batch.values[0], batch.plain_value(38)) == (37, 63, b"37", b"38")
        assert batch.to_arrow().num_rows == 63
        assert [message.offset for message in batch] == list(range(37, 100))


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_compressed_batches(shop: Shop, codec: str | None) -> None:
    topic = shop.topic()
    with shop.cluster.producer(compression=codec) as producer:
        producer.send_many(topic, [b"x" * 50 + b"%d" % number for number in range(500)], ["k"] * 500).result(60)
        producer.send(topic, b"last", headers={"a": b"b"}).result(60)
    with shop.consumer(topic) as consumer:
        messages = first(consumer, 501)
    assert [message.value for message in messages[:500]] == [b"x" * 50 + b"%d" % number for number in range(500)]
    assert {message.key for message in messages[:500]} == {b"k"}
    assert messages[500].headers == {"a": b"b"}


def test_messages_of_two_megabytes_and_a_small_fetch_size(shop: Shop) -> None:
    topic = shop.topic(max_message_bytes=3 * 1024 * 1024)
    payloads = [bytes([number]) * (2 * 1024 * 1024) for number in range(8)]
    with shop.cluster.producer(max_message_bytes=3 * 1024 * 1024) as producer:
        for payload in payloads:
            producer.send(topic, payload).result(60)
    with shop.consumer(topic, prefetch_bytes=1, fetch_max_bytes=1, partition_fetch_max_bytes=1) as consumer:
        assert [message.value for message in first(consumer, 8)] == payloads


def test_filter_and_decode(shop: Shop) -> None:
    topic = shop.topic()
    shop.numbers(topic, 1_000)
    with shop.consumer(topic, decode=int, filter=lambda message: message.value % 2 == 0) as consumer:
        messages = first(consumer, 500)
        assert [message.value for message in messages] == list(range(0, 1_000, 2))
        with pytest.raises(ConfigError, match="does not filter"):
            next(consumer.batches())
    with shop.consumer(topic, decode=int) as consumer:
        assert next(consumer.batches()).values[0] == 0


def test_a_decode_that_raises_stops_at_its_message_and_may_be_passed(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.send(topic, [b"0", b"1", b"two", b"3"])
    got: list[Message[int]] = []
    with pytest.raises(ValueError), shop.consumer(topic, group, decode=int) as consumer:
        got.extend(consumer)
    assert values(got) == [0, 1]
    assert shop.committed(group)[tp(topic)] == 2, "it is not done"
    with shop.consumer(topic, group, decode=int) as consumer:
        for _ in range(2):  # it comes again
            with pytest.raises(ValueError):
                first(consumer, 1)
        consumer.seek(tp(topic), 3)
        assert [message.value for message in first(consumer, 1)] == [3]
    assert shop.committed(group)[tp(topic)] == 4


def test_an_idle_consumer_ends_its_loop(shop: Shop) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    with shop.consumer(topic, idle_timeout_s=0.3) as consumer:
        assert values(all_of(consumer, 10)) == list(range(10))
        start = time.monotonic()
        assert list(consumer) == []
        assert 0.2 < time.monotonic() - start < 30
        assert list(consumer.batches()) == []


def test_a_new_loop_goes_on_where_the_last_was_left(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(30)]).result(60)
    with shop.consumer(topic, group) as consumer:
        assert values(first(consumer, 10)) == list(range(10))
        assert values(first(consumer, 5)) == list(range(10, 15))
        # The rest of a batch that was begun message by message comes as a batch of its own.
        batch = next(consumer.batches())
        assert batch.offsets == range(15, 30)
    assert shop.committed(group)[tp(topic)] == 30


# Done and committed


def test_a_block_that_ends_well_makes_the_message_in_hand_done(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    with shop.consumer(topic, group) as consumer:
        assert values(first(consumer, 4)) == [0, 1, 2, 3]
    assert shop.committed(group)[tp(topic)] == 4
    with shop.consumer(topic, group) as consumer:
        assert values(first(consumer, 1)) == [4]


@pytest.mark.parametrize("as_batches", [False, True])
def test_after_an_exception_what_was_in_hand_comes_again(shop: Shop, group: str, as_batches: bool) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    with pytest.raises(ZeroDivisionError), shop.consumer(topic, group) as consumer:  # noqa: PT012
        if as_batches:
            next(consumer.batches())
        else:
            first(consumer, 4)
        raise ZeroDivisionError
    with shop.consumer(topic, group) as consumer:
        assert values(first(consumer, 1)) == ([0] if as_batches else [3])


def test_close_alone_does_not_make_the_message_in_hand_done(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    consumer = shop.consumer(topic, group)
    first(consumer, 4)
    consumer.close()
    consumer.close()
    assert shop.committed(group)[tp(topic)] == 3


def test_what_is_done_is_committed_every_interval(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    with shop.consumer(topic, group, commit_interval_ms=QUICK_MS) as consumer:
        first(consumer, 4)
        shop.until(lambda: shop.committed(group)[tp(topic)] == 3)
        first(consumer, 1)
        shop.until(lambda: shop.committed(group)[tp(topic)] == 4)


def test_commit_of_a_message_a_batch_all_that_is_done_or_given_offsets(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 100)
    with shop.consumer(topic, group, auto_commit=False) as consumer:
        messages = first(consumer, 10)
        consumer.commit(messages[4])
        assert shop.committed(group)[tp(topic)] == 5
        consumer.commit()
        assert shop.committed(group)[tp(topic)] == 9, "the tenth is in hand"
        batch = next(consumer.batches())
        consumer.commit(batch)
        assert shop.committed(group)[tp(topic)] == batch.end_offset
        consumer.commit({tp(topic): 42})
        assert shop.committed(group)[tp(topic)] == 42
        assert consumer.health().partitions[tp(topic)].committed_offset == 42
        consumer.commit({})
        with pytest.raises(PartitionNotFound, match="It has: 0-0"):
            consumer.commit({TopicPartition(topic, "0-7"): 1})
        with pytest.raises(ConfigError, match="not an offset"):
            consumer.commit({tp(topic): -1})
    assert shop.committed(group)[tp(topic)] == 42, "without auto_commit the end commits nothing"


def test_a_commit_beyond_the_end_is_refused_and_changes_nothing(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    shop.numbers(topic, 5)
    with shop.consumer(topic, group, auto_commit=False) as consumer:
        shop.until(lambda: len(consumer.assignment) == 2)
        for _ in range(2):  # before something was fetched, and after
            with pytest.raises(OffsetOutOfRange, match=f"{topic}/0-0 has the offsets 0 to 5, not 6") as caught:
                consumer.commit({tp(topic, 1): 0, tp(topic): 6})
            assert "Give the offset after the last message that is done" in str(caught.value)
            assert shop.committed(group) == {tp(topic): None, tp(topic, 1): None}
            assert values(first(consumer, 1))
        consumer.commit({tp(topic): 5})
    assert shop.committed(group) == {tp(topic): 5, tp(topic, 1): 0}, "where it began"


def test_without_commits_everything_comes_again(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    for _ in range(2):
        with shop.consumer(topic, group, auto_commit=False) as consumer:
            assert values(first(consumer, 5)) == list(range(5))
    assert shop.committed(group)[tp(topic)] == 0, "where it began"


def test_a_consumer_without_a_group_keeps_nothing(shop: Shop) -> None:
    topic = shop.topic(2)
    shop.numbers(topic, 5)
    for _ in range(2):
        with shop.consumer(topic) as consumer:
            assert values(first(consumer, 5)) == list(range(5))
            assert consumer.assignment == [tp(topic, 0), tp(topic, 1)]
            assert consumer.health().group is None
            with pytest.raises(ConfigError, match="without a group"):
                consumer.commit()


async def set_from_outside(shop: Shop, group: str, topic: str, offset: int) -> None:
    """Sets the group's offset; its owner's next commit is refused, and it takes the partition anew."""
    async with await Session.open(shop.cluster.zookeeper) as session:
        topic_id = (await TopicStore(session).get(topic)).id
        await reset_offset(session, group, tp(topic), CommittedOffset(offset, 1, topic_id))


def test_a_message_of_before_the_partition_was_lost_is_not_committed(shop: Shop, group: str) -> None:
    # It would set the group back, or over what it has not read.
    topic = shop.topic()
    shop.numbers(topic, 10)
    with shop.consumer(topic, group, auto_commit=False) as consumer:
        messages = first(consumer, 8)
        asyncio.run(set_from_outside(shop, group, topic, 6))
        with pytest.raises(OwnershipLost):
            consumer.commit(messages[7])
        assert values(first(consumer, 1)) == [6]
        for message in (messages[2], messages[7]):
            with pytest.raises(OwnershipLost, match="another owner, or a seek"):
                consumer.commit(message)
        assert shop.committed(group)[tp(topic)] == 6
        consumer.commit(first(consumer, 1)[0])
        assert shop.committed(group)[tp(topic)] == 8


# Seek, pause, resume, lag, health


def test_seek_to_an_offset_the_ends_and_a_time(shop: Shop, group: str) -> None:
    topic = shop.topic()
    for number in range(20):
        shop.producer.send(topic, b"%d" % number, timestamp=datetime.fromtimestamp(100 + number, UTC))
    shop.producer.flush()
    with shop.consumer(topic, group) as consumer:
        first(consumer, 5)
        consumer.seek(tp(topic), 15)
        assert values(first(consumer, 2)) == [15, 16]
        consumer.seek(tp(topic), "earliest")
        assert values(first(consumer, 2)) == [0, 1]
        consumer.seek(tp(topic), datetime.fromtimestamp(110, UTC))
        assert values(first(consumer, 2)) == [10, 11]
        consumer.seek(tp(topic), "latest")
        shop.numbers(topic, 1, start=20)
        assert values(first(consumer, 1)) == [20]
        consumer.seek(tp(topic), 3)
    assert shop.committed(group)[tp(topic)] == 3, "a seek is where the group goes on"
    with shop.consumer(topic, group) as consumer:
        assert values(first(consumer, 1)) == [3]
        for nonsense in (-1, "begin", datetime(2020, 1, 1), None, True):
            with pytest.raises(ConfigError, match="seek to"):
                consumer.seek(tp(topic), nonsense)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_a_group", [True, False])
def test_a_partition_that_is_none_is_named_with_those_there_are(shop: Shop, group: str, in_a_group: bool) -> None:
    topic = shop.topic(3)
    with shop.consumer(topic, group if in_a_group else None) as consumer:
        shop.until(lambda: len(consumer.assignment) == 3)
        uses: list[Callable[[tuple[str, str]], object]] = [
            lambda tp: consumer.seek(tp, 0),
            lambda tp: consumer.seek(tp, "latest"),
            consumer.pause,
            consumer.resume,
        ]
        if in_a_group:
            uses.append(lambda tp: consumer.commit({TopicPartition(*tp): 0}))
        for use in uses:
            with pytest.raises(PartitionNotFound, match=f"{topic}.* has no partition '1-7'. It has: 0-0, 0-1, 0-2"):
                use((topic, "1-7"))
            with pytest.raises(ConfigError, match=f"does not read topic 'other'. It reads {topic}"):
                use(("other", "0-0"))
            with pytest.raises(ConfigError, match="'7' is not a broker id"):
                use((topic, "7"))


def test_a_partition_of_another_member_is_not_ours_to_seek(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    with shop.consumer(topic, group, consumer_id="a") as consumer, shop.consumer(topic, group, consumer_id="b"):
        shop.until(lambda: consumer.assignment == [tp(topic, 0)])
        with pytest.raises(OwnershipLost, match="not assigned to this consumer"):
            consumer.seek(tp(topic, 1), 0)


def test_a_seek_beyond_the_end_is_refused_and_changes_nothing(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    with shop.consumer(topic, group, on_assigned=lambda _: None) as consumer:
        shop.until(lambda: consumer.assignment)
        for _ in range(2):  # before something was fetched, and after
            with pytest.raises(OffsetOutOfRange, match=f"{topic}/0-0 has the offsets 0 to 5, not 6") as caught:
                consumer.seek(tp(topic), 6)
            assert "'earliest', 'latest'" in str(caught.value)
            assert values(first(consumer, 1)) == [0]
            consumer.seek(tp(topic), 0)
        consumer.seek(tp(topic), 5)
        shop.numbers(topic, 1, start=5)
        assert values(first(consumer, 1)) == [5]
        shop.numbers(topic, 1, start=6)
        consumer.seek(tp(topic), 7)  # more than was fetched, not more than there is
    assert shop.committed(group)[tp(topic)] == 7


def test_a_seek_of_another_thread_takes_effect_at_the_next_message(shop: Shop) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(1_000)]).result(60)
    with shop.consumer(topic) as consumer:
        messages = iter(consumer)
        assert int(next(messages).value) == 0
        thread = threading.Thread(target=consumer.seek, args=(tp(topic), 700))
        thread.start()
        thread.join(60)
        assert int(next(messages).value) == 700


@pytest.mark.slow
def test_paused_partitions_give_nothing_and_stay_assigned(shop: Shop) -> None:
    topic = shop.topic(2)
    shop.send(topic, [b"0"] * 50, "0-0")
    shop.send(topic, [b"1"] * 50, "0-1")
    with shop.consumer(topic, idle_timeout_s=0.5) as consumer:
        one = first(consumer, 1)[0]
        consumer.pause((topic, one.partition))
        rest = all_of(consumer, 50)
        assert {message.partition for message in rest} == {"0-0", "0-1"} - {one.partition}
        assert len(rest) == 50
        assert len(consumer.assignment) == 2
        assert [tp for tp, health in consumer.health().partitions.items() if health.paused] == [(topic, one.partition)]
        consumer.resume((topic, one.partition))
        assert [message.offset for message in all_of(consumer, 49)] == list(range(1, 50))
        consumer.pause()
        shop.send(topic, [b"0"], "0-0")
        assert list(consumer) == []
        consumer.resume()
        assert len(all_of(consumer, 1)) == 1


def test_pause_and_resume_before_it_is_known_where_to_start(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    with shop.consumer(topic, group, start="latest", on_assigned=lambda _: None) as consumer:
        shop.until(lambda: consumer.assignment)
        consumer.pause()
        consumer.resume()
        shop.until(lambda: consumer.health().partitions[tp(topic)].next_offset >= 0)
        shop.numbers(topic, 1, start=5)
        assert values(first(consumer, 1)) == [5]


def test_lag_and_health(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    shop.numbers(topic, 10)
    with shop.consumer(topic, group) as consumer:
        first(consumer, 4)
        shop.until(lambda: consumer.lag() == {tp(topic, 0): 7, tp(topic, 1): 0})
        health = consumer.health()
        assert health.delivering
        assert health.partitions[tp(topic, 0)].lag == 7
        assert health.partitions[tp(topic, 0)].in_hand
        assert (health.partitions[tp(topic, 0)].next_offset, health.partitions[tp(topic, 0)].done_offset) == (0, 3)
        assert health.lost_messages == 0
        assert health.last_fetch_s is not None
        assert health.group is not None
        assert health.group.state == "member"
        assert health.group.assigned == (tp(topic, 0), tp(topic, 1))


# Where to start


def test_start_at_the_end_gives_only_what_comes_after(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    for each in (group, None):
        with shop.consumer(topic, each, start="latest") as consumer:
            shop.until(lambda: consumer.lag() == {tp(topic): 0})
            shop.send(topic, [b"new"])
            assert first(consumer, 1)[0].value == b"new"


def test_a_group_that_starts_at_the_end_misses_nothing_when_its_members_change(shop: Shop, group: str) -> None:
    # "latest" is decided once. The first member did nothing; what came since then is the second one's.
    topic = shop.topic()
    shop.numbers(topic, 10)
    with shop.consumer(topic, group, start="latest", auto_commit=False) as consumer:
        shop.until(lambda: shop.committed(group).get(tp(topic)) == 10)
        assert consumer.health().partitions[tp(topic)].committed_offset == 10
    shop.numbers(topic, 1, start=10)
    with shop.consumer(topic, group, start="latest") as consumer:
        assert values(first(consumer, 1)) == [10]


def test_start_at_a_time(shop: Shop, group: str) -> None:
    topic = shop.topic()
    for number in range(10):
        shop.producer.send(topic, b"%d" % number, timestamp=datetime.fromtimestamp(100 + number, UTC))
    shop.producer.flush()
    with shop.consumer(topic, group, start=datetime.fromtimestamp(106.5, UTC)) as consumer:
        assert values(first(consumer, 3)) == [7, 8, 9]
    with shop.consumer(topic, start=datetime(1960, 1, 1, tzinfo=UTC)) as consumer:
        assert values(first(consumer, 1)) == [0]
    with shop.consumer(topic, start=datetime(2100, 1, 1, tzinfo=UTC)) as consumer:
        shop.until(lambda: consumer.health().partitions[tp(topic)].next_offset == 10)
    with shop.consumer(topic, group) as consumer:
        shop.until(lambda: consumer.lag() == {tp(topic): 0})


# Callbacks


def test_the_application_is_told_of_partitions_before_their_messages_come(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    shop.numbers(topic, 10)
    events: list[Any] = []
    with shop.consumer(
        topic,
        group,
        on_assigned=lambda partitions: events.append(("assigned", sorted(partitions))),
        on_revoked=lambda partitions: events.append(("revoked", sorted(partitions))),
    ) as consumer:
        first(consumer, 1)
        assert events == [("assigned", [tp(topic, 0), tp(topic, 1)])]
    assert events[1:] == [("revoked", [tp(topic, 0), tp(topic, 1)])]


def test_on_assigned_may_seek(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    ready = threading.Event()
    consumers: list[Consumer[Any]] = []

    def seek(partitions: list[TopicPartition]) -> None:
        assert ready.wait(60)
        for partition in partitions:
            consumers[0].seek(partition, 6)

    with shop.consumer(topic, group, on_assigned=seek) as consumer:
        consumers.append(consumer)
        ready.set()
        assert values(first(consumer, 2)) == [6, 7]


def test_on_revoked_may_commit(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    consumers: list[Consumer[Any]] = []
    with shop.consumer(
        topic, group, auto_commit=False, on_revoked=lambda partitions: consumers[0].commit()
    ) as consumer:
        consumers.append(consumer)
        first(consumer, 4)
    assert shop.committed(group)[tp(topic)] == 4


def test_a_callback_that_fails_ends_the_consumer(shop: Shop, group: str, caplog: pytest.LogCaptureFixture) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)

    def fail(partitions: list[TopicPartition]) -> None:
        raise ZeroDivisionError(len(partitions))

    with pytest.raises(ZeroDivisionError), shop.consumer(topic, group, on_assigned=fail) as consumer:
        first(consumer, 1)
    # What it could not save before the partitions were given away is not taken for done.
    with pytest.raises(ZeroDivisionError), shop.consumer(topic, group, on_revoked=fail) as consumer:
        first(consumer, 4)
    assert shop.committed(group)[tp(topic)] in (None, 0)
    with pytest.raises(ZeroDivisionError), shop.consumer(topic, on_assigned=fail) as consumer:
        first(consumer, 1)
    assert caplog.messages == [], "it is raised"


def test_an_unreachable_zookeeper_is_named_and_leaves_nothing_unclosed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Session.open.__func__.__kwdefaults__, "connect_timeout_s", 0.3)  # type: ignore[attr-defined]
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1"):
        Consumer("127.0.0.1:1", topics="t")


def test_the_time_it_takes_to_join_is_not_idle(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 100)
    has_joined = threading.Event()

    def join(_partitions: list[TopicPartition]) -> None:
        time.sleep(0.6)
        has_joined.set()

    with shop.consumer(topic, group, idle_timeout_s=0.2, on_assigned=join) as consumer:
        assert len(list(consumer)) == 100
        assert has_joined.is_set()
