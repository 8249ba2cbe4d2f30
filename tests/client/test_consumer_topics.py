"""Logs and topics that change under a consumer: retention, enlargement, deletion, a topic made anew."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import pytest

from metamq import TopicPartition
from metamq.client.consumer.unshared import UnsharedAssignment
from metamq.errors import OffsetOutOfRange
from metamq.zk.cluster.topics import FlushEvery
from metamq.zk.groups.ownership import CommittedOffset, reset_offset
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.session.session import Session
from tests.parts import idle_reason

if TYPE_CHECKING:
    from tests.client.conftest import Shop

SMALL = {"segment_bytes": 1024, "retention_bytes": 4096, "flush": FlushEvery(messages=1)}
PAYLOAD = b"." * 200


def tp(topic: str, index: int = 0) -> TopicPartition:
    return TopicPartition(topic, f"0-{index}")


def bounds(shop: Shop, topic: str) -> tuple[int, int]:
    partition = shop.admin.describe_topic(topic).partitions[0]
    assert partition.start_offset is not None
    assert partition.stable_offset is not None
    return partition.start_offset, partition.stable_offset


def fill(shop: Shop, topic: str, count: int) -> None:
    """Messages one to a batch, so that segments end where they can."""
    for number in range(count):
        shop.producer.send(topic, b"%d" % number + PAYLOAD).result(60)


def retained_behind(shop: Shop, group: str) -> tuple[str, int, int]:
    """A topic whose start has moved past what the group has committed (5); the topic, its start and its end."""
    topic = shop.topic(**SMALL)
    fill(shop, topic, 10)
    with shop.consumer(topic, group) as consumer:
        list(islice(consumer, 5))
    assert shop.committed(group)[tp(topic)] == 5
    fill(shop, topic, 60)
    shop.until(lambda: bounds(shop, topic)[0] > 5)
    looks = [bounds(shop, topic)]

    def is_settled() -> bool:
        looks.append(bounds(shop, topic))
        return len(looks) > 20 and len(set(looks[-20:])) == 1

    shop.until(is_settled)
    return topic, *looks[-1]


@pytest.mark.slow
def test_behind_the_logs_start_goes_on_at_its_start(shop: Shop, group: str) -> None:
    topic, start, end = retained_behind(shop, group)
    with shop.consumer(topic, group, idle_timeout_s=0.5) as consumer:
        offsets = [message.offset for message in consumer]
        while not offsets or offsets[-1] < end - 1:  # it may be idle before, on a slow machine
            offsets += [message.offset for message in consumer]
        health = consumer.health()
    assert offsets == list(range(offsets[0], end))
    assert offsets[0] >= start
    assert health.lost_messages == offsets[0] - 5
    assert shop.committed(group)[tp(topic)] == end


@pytest.mark.slow
def test_behind_the_logs_start_goes_on_at_its_end(shop: Shop, group: str) -> None:
    topic, _, end = retained_behind(shop, group)
    with shop.consumer(topic, group, on_data_loss="latest") as consumer:
        shop.until(lambda: consumer.health().lost_messages == end - 5)
        shop.send(topic, [b"new"])
        assert next(iter(consumer)).offset == end


@pytest.mark.slow
@pytest.mark.parametrize("batches", [False, True])
def test_behind_the_logs_start_is_an_error_that_a_seek_ends(shop: Shop, group: str, batches: bool) -> None:
    topic, start, end = retained_behind(shop, group)
    with shop.consumer(topic, group, on_data_loss="fail") as consumer:
        for _ in range(2):
            with pytest.raises(OffsetOutOfRange, match=f"not 5.*{topic}|{topic}.*not 5") as caught:
                next(iter(consumer.batches() if batches else consumer))
        assert (caught.value.offset, caught.value.end) == (5, end)
        assert caught.value.start >= start
        assert "Seek" in str(caught.value)
        assert "not 5" in consumer.health().partitions[tp(topic)].last_error
        consumer.seek(tp(topic), end - 1)
        assert next(iter(consumer)).offset == end - 1
    assert shop.committed(group)[tp(topic)] == end


def test_messages_that_were_fetched_before_retention_are_handed_out(shop: Shop, group: str) -> None:
    topic = shop.topic(**SMALL)
    fill(shop, topic, 10)
    with shop.consumer(topic, group, prefetch_bytes=1, fetch_max_bytes=2_000) as consumer:
        messages = iter(consumer)
        assert next(messages).offset == 0
        shop.until(lambda: consumer.health().buffered_bytes > 0)
        fill(shop, topic, 60)
        shop.until(lambda: bounds(shop, topic)[0] > 20)
        got = [0]
        while got[-1] < 69:
            got.append(next(messages).offset)
        skipped = [two - one - 1 for one, two in pairwise(got)]  # retention may go on meanwhile
        assert (got[1], min(skipped)) == (1, 0), "what was fetched is handed out"
        assert consumer.health().lost_messages == sum(skipped) > 0


def test_an_offset_beyond_the_end_is_not_asked_for_for_ever(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)

    def go_beyond() -> None:
        """As a master that lost its end leaves it."""
        topic_id = shop.admin.describe_topic(topic).config.id

        async def write() -> None:
            async with await Session.open(shop.cluster.zookeeper) as session:
                await reset_offset(session, group, tp(topic), CommittedOffset(1_000, 1, topic_id))

        asyncio.run(write())

    go_beyond()
    with shop.consumer(topic, group, on_data_loss="latest") as consumer:
        shop.until(lambda: consumer.assignment)
        shop.until(lambda: consumer.health().partitions[tp(topic)].next_offset == 5)
        shop.numbers(topic, 1, start=5)
        assert int(next(iter(consumer)).value) == 5
    go_beyond()
    with shop.consumer(topic, group, on_data_loss="fail") as consumer, pytest.raises(OffsetOutOfRange, match="1000"):
        next(iter(consumer))


@pytest.mark.parametrize("in_a_group", [True, False])
def test_messages_of_a_partition_that_is_added_come_from_its_first_one(
    shop: Shop, group: str, in_a_group: bool
) -> None:
    topic = shop.topic()
    with shop.consumer(topic, group if in_a_group else None) as consumer:
        shop.until(lambda: consumer.assignment)
        shop.admin.alter(topic, partitions=3)
        shop.send(topic, [b"new"], "0-2")
        message = next(iter(consumer))
        assert (message.partition, message.offset, message.value) == ("0-2", 0, b"new")
        assert len(consumer.assignment) == 3


def anew(shop: Shop, topic: str, count: int) -> None:
    """Makes a deleted topic again, with other messages: b"100", b"101", ..."""
    shop.admin.create_topic(topic, 1)
    with shop.cluster.producer() as producer:
        producer.send_many(topic, [b"%d" % number for number in range(100, 100 + count)]).result(60)


@pytest.mark.slow
@pytest.mark.parametrize("in_a_group", [True, False])
def test_a_topic_made_anew_under_a_consumer_is_read_from_its_start(shop: Shop, group: str, in_a_group: bool) -> None:
    topic = shop.topic()
    shop.numbers(topic, 20)
    with shop.consumer(topic, group if in_a_group else None, commit_interval_ms=50) as consumer:
        messages = iter(consumer)
        assert [next(messages).offset for _ in range(10)] == list(range(10))
        shop.admin.delete(topic)
        anew(shop, topic, 3)
        # What was fetched before may still come; then the new messages, from the first one on.
        got = [int(next(messages).value)]
        while got[-1] != 102:
            got.append(int(next(messages).value))
        assert got == [*range(10, 10 + len(got) - 3), 100, 101, 102]
    if in_a_group:
        assert shop.committed(group)[tp(topic)] == 3


def test_offsets_of_a_deleted_topic_are_not_used_for_its_successor(
    shop: Shop, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = shop.topic()
    shop.numbers(topic, 20)
    with shop.consumer(topic, group) as consumer:
        list(islice(consumer, 10))
    shop.admin.delete(topic)
    anew(shop, topic, 30)
    with shop.consumer(topic, group) as consumer:
        assert int(next(iter(consumer)).value) == 100
        assert consumer.health().partitions[tp(topic)].committed_offset in (None, 0)
    assert f"topic '{topic}' was deleted and created again since offsets in it were committed" in caplog.text
    assert shop.committed(group)[tp(topic)] == 1


@pytest.mark.slow
def test_a_commit_for_the_topic_of_before_is_refused_or_of_no_effect(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 20)
    with shop.consumer(topic, group, auto_commit=False) as consumer:
        old = next(iter(consumer))
        shop.admin.delete(topic)
        anew(shop, topic, 1)
        new = next(iter(consumer))
        assert (old.offset, new.offset, new.value) == (0, 0, b"100")
        consumer.commit(new)
    assert shop.committed(group)[tp(topic)] == 1


@pytest.mark.slow
@pytest.mark.parametrize("in_a_group", [True, False])
def test_a_topic_that_is_deleted_is_told_of_once_and_leaves_the_others_alone(
    shop: Shop, group: str, in_a_group: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gone, stays = shop.topic(4), shop.topic(2)
    with shop.cluster.consumer(topics=[gone, stays], group=group if in_a_group else None) as consumer:
        for time in range(2):
            shop.until(lambda: len(consumer.assignment) == 6)
            shop.until(lambda: all(each.next_offset == 0 for each in consumer.health().partitions.values()))
            shop.admin.delete(gone)
            shop.until(lambda: consumer.assignment == [tp(stays, 0), tp(stays, 1)])
            warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert sum(f"topic '{gone}' was deleted:" in text for text in warned) == time + 1, warned
            shop.admin.create_topic(gone, 4)
        shop.send(stays, [b"still here"])
        assert next(iter(consumer)).value == b"still here"


@pytest.mark.parametrize("in_a_group", [True, False])
def test_a_consumer_whose_only_topic_is_deleted_says_that_it_waits_for_it(
    shop: Shop, group: str, in_a_group: bool, caplog: pytest.LogCaptureFixture
) -> None:
    topic = shop.topic()
    with shop.consumer(topic, group if in_a_group else None) as consumer:
        shop.until(lambda: consumer.assignment)
        shop.admin.delete(topic)
        shop.until(lambda: not consumer.assignment)
        assert caplog.text.count("has no topic left, and waits until one is created again") == 1
        shop.admin.create_topic(topic)
        shop.send(topic, [b"again"])
        assert next(iter(consumer)).value == b"again"
    assert caplog.text.count("has no topic left") == 1


def test_a_topic_that_is_deleted_while_a_member_joins_is_told(
    shop: Shop, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="metamq.client")
    topic = shop.topic()
    with (
        ThreadPoolExecutor(1) as pool,
        shop.consumer(topic, group, consumer_id="same", session_timeout_ms=60_000) as one,
    ):
        joining = pool.submit(shop.consumer, topic, group, consumer_id="same")
        shop.until(lambda: "waiting for the end of its session" in caplog.text)
        shop.admin.delete(topic)
        shop.until(lambda: not one.assignment)
        caplog.clear()
        one.close()
        with joining.result(60) as twin:
            shop.until(lambda: idle_reason(twin))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    text = f"topic '{topic}' was deleted: same of group {group} has no topic left, and waits until one is created again"
    assert [said for said in warned if "deleted" in said] == [text]


@pytest.mark.slow
def test_a_configuration_that_cannot_be_read_is_told_of_once(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    topic = shop.topic()
    looks: list[float] = []

    async def spoil(data: bytes) -> bytes:
        async with await Session.open(shop.cluster.zookeeper) as session:
            path = session.paths.topic_config(topic)
            before = (await session.get(path)).data
            await session.set(path, data, ANY_VERSION)
            return before

    with shop.consumer(topic) as consumer:
        assignment = consumer._core._assignment
        assert isinstance(assignment, UnsharedAssignment)
        look = assignment._look

        async def counted() -> None:
            looks.append(0)
            await look()

        before = asyncio.run(spoil(b"junk"))
        shop.until(lambda: "topics are not followed at present" in caplog.text)
        assignment._look = counted  # type: ignore[method-assign]
        shop.until(lambda: len(looks) >= 2)
        assert consumer.assignment == [tp(topic)]
        asyncio.run(spoil(before))
    assert caplog.text.count("topics are not followed at present") == 1


@pytest.mark.slow
def test_a_topic_made_anew_is_told_of_once(shop: Shop, group: str, caplog: pytest.LogCaptureFixture) -> None:
    topic = shop.topic(4)
    for index in range(4):
        shop.send(topic, [b"old"], f"0-{index}")
    with shop.consumer(topic, group) as consumer:
        assert len(list(islice(consumer, 4))) == 4
    shop.admin.delete(topic)
    shop.admin.create_topic(topic, 4)
    with shop.consumer(topic, group) as consumer:
        shop.until(lambda: len(consumer.assignment) == 4)
        shop.until(lambda: all(each.next_offset == 0 for each in consumer.health().partitions.values()))
    assert caplog.text.count("was deleted and created again") == 1


def test_messages_older_than_the_retention_are_not_waited_for(shop: Shop, group: str) -> None:
    topic = shop.topic(**SMALL)
    fill(shop, topic, 60)
    shop.until(lambda: bounds(shop, topic)[0] > 5)
    with shop.consumer(topic, group, start=datetime.now(UTC) - timedelta(days=1)) as consumer:
        assert next(iter(consumer)).offset >= 5
