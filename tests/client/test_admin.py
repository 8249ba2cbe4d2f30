"""Admin against a real cluster of two brokers: what it promises when it returns, and what it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin, FileOffsets, TopicPartition, aio
from metamq.client.admin.admin_model import GroupDescription, GroupPartition
from metamq.errors import (
    ClosedError,
    ConfigError,
    ConnectError,
    CorruptData,
    ForkedError,
    OffsetOutOfRange,
    PartitionNotFound,
    Timeout,
    TopicExists,
    TopicNotFound,
    WrongType,
)
from metamq.testing import Cluster
from metamq.zk.cluster.topics import FlushEvery
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.session.session import Session
from tests.database_offsets import offsets_in
from tests.one_zookeeper import cluster

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(brokers=2) as running:
        yield running


@pytest.fixture(scope="module")
def admin(running: Cluster) -> Iterator[Admin]:
    with running.admin() as admin:
        yield admin


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name of this test's own."""
    return str(request.node.name).replace("[", "-").replace("]", "")


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def fill(running: Cluster, topic: str, partition: str, count: int) -> None:
    with running.producer() as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, partition=partition)


def read(running: Cluster, topic: str, count: int) -> list[bytes]:
    """So many messages, which are there for the group of the topic's name; committed."""
    with running.consumer(group=topic, topics=[topic], idle_timeout_s=LIMIT_S) as consumer:
        return [message.value for message in islice(consumer, count)]


# Topics


def test_a_created_topic_can_be_written_at_once(running: Cluster, admin: Admin, topic: str) -> None:
    config = admin.create_topic(topic, partitions=5, flush="ack", retention_ms=None, segment_bytes=1 << 20)
    assert config.partitions == {0: 3, 1: 2}
    described = admin.describe_topic(topic)
    assert [partition.partition for partition in described.partitions] == ["0-0", "0-1", "0-2", "1-0", "1-1"]
    assert all(partition.live and not partition.problem for partition in described.partitions)
    assert (described.config.flush, described.config.retention_ms) == ("ack", None)
    with running.producer() as producer:
        assert producer.send(topic, b"x", partition="1-1").result(timeout=LIMIT_S).offset == 0
    described = admin.describe_topic(topic)
    assert described.messages == 1
    last = described.partitions[-1]
    assert (last.start_offset, last.stable_offset, last.messages) == (0, 1, 1)
    assert last.size_bytes is not None
    assert last.size_bytes > 0
    assert last.address == f"127.0.0.1:{running.brokers[1].port}"
    assert topic in admin.topics()


def test_partitions_go_where_they_are_asked_to(admin: Admin, topic: str) -> None:
    assert admin.create_topic(topic, partitions=3, brokers=[1]).partitions == {1: 3}
    assert admin.alter(topic, partitions=5, brokers=[0]).partitions == {0: 2, 1: 3}
    with pytest.raises(ConfigError, match=r"broker 7 is not registered .* Live brokers: 0, 1"):
        admin.create_topic(f"{topic}-2", brokers=[0, 7])


def test_alter_changes_only_what_is_given(running: Cluster, admin: Admin, topic: str) -> None:
    before = admin.create_topic(topic, partitions=1, flush=FlushEvery(10, 20))
    after = admin.alter(topic, retention_bytes=1 << 20)
    assert after == dataclasses.replace(before, retention_bytes=1 << 20)
    assert admin.alter(topic, partitions=4).partitions == {0: 2, 1: 2}
    with running.producer() as producer:
        producer.send(topic, b"x", partition="1-1").result(timeout=LIMIT_S)
    with pytest.raises(ConfigError, match="cannot be reduced to 3"):
        admin.alter(topic, partitions=3)
    with pytest.raises(ConfigError, match="cleanup is 'shred'"):
        admin.alter(topic, cleanup="shred")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`brokers` is only for new partitions"):
        admin.alter(topic, brokers=[0])


def test_a_deleted_topic_is_gone_and_its_successor_is_empty(running: Cluster, admin: Admin, topic: str) -> None:
    first = admin.create_topic(topic, partitions=1, brokers=[0])
    fill(running, topic, "0-0", 3)
    deleted = admin.delete(topic)
    assert deleted is not None
    assert deleted.id == first.id
    assert topic not in admin.topics()
    second = admin.create_topic(topic, partitions=1, brokers=[0])
    assert second.id != first.id
    assert admin.describe_topic(topic).messages == 0
    fill(running, topic, "0-0", 1)
    assert admin.describe_topic(topic).messages == 1


@pytest.mark.parametrize("count", [0, -1, 10_001, True, "4"])
def test_a_count_of_partitions_that_cannot_be(admin: Admin, count: Any) -> None:
    with pytest.raises(ConfigError, match="partitions is"):
        admin.create_topic("impossible", partitions=count)
    assert "impossible" not in admin.topics()


def test_arguments_that_are_none_are_named(admin: Admin, topic: str) -> None:
    create: Any = admin.create_topic
    for settings, said in (
        ({"partition": 4}, r"unknown setting 'partition' in create_topic\(\)\. Did you mean 'partitions'\?"),
        ({"retention": 4}, "Did you mean 'retention_ms'"),
        ({"id": "0" * 16}, "unknown setting 'id'"),
        ({"brokers": 0}, "`brokers` must be a list of broker ids, not 0"),
        ({"brokers": ["0"]}, r"`brokers` must be a list of broker ids, not \['0'\]"),
        ({"timeout_s": "5"}, "`timeout_s` must be a number of seconds, not '5'"),
        ({"timeout_s": -1}, "`timeout_s` must be a number of seconds, 0 or more, not -1"),
        ({"retention_ms": "7d"}, "retention_ms is '7d'. It has to be a whole number"),
    ):
        with pytest.raises(ConfigError, match=said):
            create(topic, **settings)
    assert topic not in admin.topics()
    admin.create_topic(topic)
    alter: Any = admin.alter
    with pytest.raises(ConfigError, match=r"unknown setting 'partition' in alter\(\)\. Did you mean 'partitions'\?"):
        alter(topic, partition=8)
    statistics: Any = admin.statistics
    with pytest.raises(ConfigError, match="there is no broker '0'"):
        statistics("0")


def put(running: Cluster, nodes: dict[str, bytes]) -> None:
    """Writes into ZooKeeper past the checks, below the root."""

    async def write() -> None:
        async with await Session.open(running.zookeeper) as session:
            for path, data in nodes.items():
                await session.ensure(f"{session.paths.root}/{path}")
                await session.set(f"{session.paths.root}/{path}", data, ANY_VERSION)

    asyncio.run(write())


def test_a_topic_that_nobody_can_read_is_named_and_can_be_deleted(
    running: Cluster, admin: Admin, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin.create_topic(topic)
    fill(running, topic, "0-0", 3)
    read(running, topic, 3)
    spoilt = {topic: b"\xff\x00", ".dot": b'{"format": 1}', "a b" + "c" * 250: b"", topic + "-9": b'{"format": 9}'}
    put(running, {f"config/topics/{name}": data for name, data in spoilt.items()})
    assert not admin.topics().keys() & spoilt.keys()
    assert all(f"topic {name!r} is left out: " in caplog.text for name in spoilt)
    with pytest.raises(ConfigError, match="has format 9, this metamq reads 1"):
        admin.describe_topic(topic + "-9")
    with pytest.raises(CorruptData, match=f"`metamq topic delete {topic}` removes"):
        admin.describe_topic(topic)
    assert "is damaged" in admin.describe_group(topic).partitions[0].problem
    for name in spoilt:
        assert admin.delete(name) is None
    assert admin.describe_group(topic).partitions[0].problem == f"topic {topic!r} does not exist"
    caplog.clear()
    admin.topics()
    assert not caplog.records
    admin.create_topic(topic)
    assert admin.describe_topic(topic).messages == 0


def test_groups_of_names_that_are_no_longer_allowed_can_be_named(running: Cluster, admin: Admin, topic: str) -> None:
    names = [f".{topic}", "g" * 195, f"{topic} 1"]
    put(running, {f"consumers/{name}/offsets/{topic}": b"" for name in names})
    for name in names:
        assert admin.groups()[name].topics == (topic,)
        assert admin.describe_group(name).members == ()
        admin.delete_group(name)
    assert not admin.groups().keys() & set(names)
    for name in ("a/b", "", "..", "a\nb"):
        with pytest.raises(ConfigError, match=r"group .* has|group is|is a path"):
            admin.describe_group(name)


def test_topics_that_are_there_or_are_not(admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1)
    with pytest.raises(TopicExists, match=topic):
        admin.create_topic(topic)
    for call in (admin.describe_topic, admin.delete, admin.alter):
        with pytest.raises(TopicNotFound, match=f"Did you mean '{topic}'"):
            call(topic[:-1])
        with pytest.raises(ConfigError, match="has '/' at character 2"):
            call("a/b")


# Groups


def test_a_group_is_seen_from_outside(running: Cluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2, brokers=[0])
    fill(running, topic, "0-0", 5)
    consumer = running.consumer(group=topic, topics=[topic], commit_interval_ms=10, consumer_id="reader")
    with consumer:
        messages = iter(consumer)
        for _ in range(3):
            next(messages)
        until(lambda: admin.describe_group(topic).partitions[0].committed == 2)
        described = admin.describe_group(topic)
        assert [member.consumer_id for member in described.members] == ["reader"]
        assert described.members[0].partitions == (TopicPartition(topic, "0-0"), TopicPartition(topic, "0-1"))
        assert described.members[0].pid == os.getpid()
        assert 0 <= described.members[0].progress_age_ms < 60_000
        first, second = described.partitions
        assert (first.committed, first.start, first.end, first.lag, first.owner) == (2, 0, 5, 3, "reader")
        assert (second.committed, second.end, second.lag, second.problem) == (0, 0, 0, "")
        assert described.lag == 3
        assert admin.groups()[topic].members == ("reader",)
        explained = admin.explain_group(topic)
        assert explained.assignment == explained.owners == dict.fromkeys(described.members[0].partitions, "reader")
        assert "Strategy range" in str(explained)
        assert "Not as planned at this moment\n  nothing" in str(explained)
    assert admin.groups()[topic].members == ()
    assert "has no members now" in admin.explain_group(topic).text


def test_a_member_without_partitions_is_there_too(running: Cluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1)
    with (
        running.consumer(group=topic, topics=[topic], consumer_id="a"),
        running.consumer(group=topic, topics=[topic], consumer_id="b"),
    ):
        until(lambda: len(admin.describe_group(topic).members) == 2)
        until(lambda: admin.describe_group(topic).partitions[0].owner == "a")
        one, two = admin.describe_group(topic).members
        assert (one.consumer_id, one.idle_reason, len(one.partitions)) == ("a", "", 1)
        assert (two.consumer_id, two.partitions) == ("b", ())
        assert two.idle_reason == "2 members share 1 partition of 1 topic, by strategy range"


def test_offsets_are_reset_to_every_kind_of_place(running: Cluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1, brokers=[0])
    fill(running, topic, "0-0", 4)
    between = datetime.now(UTC)
    until(lambda: datetime.now(UTC) > between)  # so that the next messages are later
    fill(running, topic, "0-0", 2)
    assert len(read(running, topic, 6)) == 6
    tp = TopicPartition(topic, "0-0")
    for to, offset in (
        ("earliest", 0),
        ("latest", 6),
        (between, 4),
        (between + timedelta(days=1), 6),
        (3, 3),
        ({tp: 2}, 2),
    ):
        before = admin.describe_group(topic).partitions[0].committed
        dry = admin.reset_offsets(topic, topic, to, dry_run=True)  # type: ignore[arg-type]
        assert admin.describe_group(topic).partitions[0].committed == before
        assert [(one.before, one.after) for one in dry] == [(before, offset)]
        assert admin.reset_offsets(topic, topic, to) == dry  # type: ignore[arg-type]
        assert admin.describe_group(topic).partitions[0].committed == offset
    assert read(running, topic, 4) == [b"2", b"3", b"0", b"1"]


def test_a_reset_that_cannot_be(running: Cluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1, brokers=[0])
    fill(running, topic, "0-0", 2)
    with running.consumer(group=topic, topics=[topic], consumer_id="reader"):
        for refused in (lambda: admin.reset_offsets(topic, topic, "earliest"), lambda: admin.delete_group(topic)):
            with pytest.raises(ConfigError, match=rf"has members, .*: reader \(process {os.getpid()} on "):
                refused()
    with pytest.raises(OffsetOutOfRange, match="has the offsets 0 to 2, not 3"):
        admin.reset_offsets(topic, topic, 3)
    with pytest.raises(OffsetOutOfRange, match="has the offsets 0 to 2, not 3"):
        admin.reset_offsets(topic, topic, {TopicPartition(topic, "0-0"): 3})
    with pytest.raises(
        WrongType, match=r"the offset of .*/0-0 must be a whole number, .* or an aware datetime, not '3'"
    ):
        admin.reset_offsets(topic, topic, {TopicPartition(topic, "0-0"): "3"})  # type: ignore[dict-item]
    with pytest.raises(PartitionNotFound, match="has no partition '0-9'"):
        admin.reset_offsets(topic, topic, {TopicPartition(topic, "0-9"): 0})
    with pytest.raises(TopicNotFound):
        admin.reset_offsets(topic, "nowhere", "earliest")
    for to in ("soon", datetime(2026, 1, 1), True, None):
        with pytest.raises(ConfigError, match="`to` is"):
            admin.reset_offsets(topic, topic, to)  # type: ignore[arg-type]
    assert admin.describe_group(topic).partitions[0].committed is None


def test_offsets_that_are_kept_elsewhere_are_told_and_not_reset(
    running: Cluster, admin: Admin, topic: str, tmp_path: Path
) -> None:
    admin.create_topic(topic, partitions=1, brokers=[0])
    fill(running, topic, "0-0", 3)
    offsets = FileOffsets(tmp_path / "offsets.json")
    with running.consumer(group=topic, topics=[topic], offsets=offsets, idle_timeout_s=LIMIT_S) as consumer:
        next(iter(consumer))
    (partition,) = admin.describe_group(topic).partitions
    assert (partition.kept_by, partition.committed, partition.problem) == ("FileOffsets", None, "")
    assert (partition.progress, partition.lag) == (1, 2), "as its last owner told"
    with pytest.raises(ConfigError, match=r"keeps its offsets of topic '.*' by FileOffsets, not in ZooKeeper"):
        admin.reset_offsets(topic, topic, "earliest")
    with pytest.raises(ConfigError, match=rf"keeps its offsets of {topic}/0-0 in FileOffsets, .* in ZooKeeper"):
        read(running, topic, 1)
    admin.delete_group(topic)
    assert len(read(running, topic, 2)) == 2
    (partition,) = admin.describe_group(topic).partitions
    assert (partition.kept_by, partition.committed) == ("", 2)
    offsets = FileOffsets(tmp_path / "others.json")
    other = running.consumer(group=topic, topics=[topic], offsets=offsets, idle_timeout_s=LIMIT_S)
    with pytest.raises(ConfigError, match=r"in ZooKeeper, and this consumer in FileOffsets.*another group"), other:
        next(iter(other))


def test_an_evicted_member_ends_and_another_takes_over(
    running: Cluster, admin: Admin, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin.create_topic(topic, partitions=2, brokers=[0])
    ends: list[Exception] = []

    def consume(stuck: Any) -> None:
        try:
            for _message in stuck:
                continue
        except Exception as error:
            ends.append(error)

    with running.consumer(group=topic, topics=[topic], consumer_id="stuck") as stuck:
        thread = threading.Thread(target=consume, args=[stuck])
        thread.start()
        until(lambda: len(admin.describe_group(topic).members[0].partitions) == 2)
        with running.consumer(group=topic, topics=[topic], consumer_id="next") as following:
            until(lambda: len(following.assignment) == 1)
            assert len(admin.evict(topic, "stuck")) == 1
            until(lambda: len(following.assignment) == 2)
            assert [member.consumer_id for member in admin.describe_group(topic).members] == ["next"]
        thread.join(LIMIT_S)
        assert [type(error) for error in ends] == [ClosedError]
        assert "was evicted from group" in str(ends[0])
    assert caplog.messages == [], "it is raised"


def test_a_deleted_group_starts_anew(running: Cluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1, brokers=[0])
    fill(running, topic, "0-0", 2)
    assert len(read(running, topic, 2)) == 2
    assert admin.describe_group(topic).lag == 0
    admin.delete_group(topic)
    assert topic not in admin.groups()
    assert len(read(running, topic, 2)) == 2


def test_offsets_of_a_deleted_topic_are_not_taken_for_its_successors(
    running: Cluster, admin: Admin, topic: str
) -> None:
    admin.create_topic(topic, partitions=1, brokers=[0])
    fill(running, topic, "0-0", 2)
    read(running, topic, 2)
    admin.delete(topic)
    assert admin.describe_group(topic).partitions[0].problem == f"topic {topic!r} does not exist"
    admin.create_topic(topic, partitions=1, brokers=[0])
    found = admin.describe_group(topic).partitions[0]
    assert (found.committed, found.end) == (None, 0)
    assert "was committed for a deleted topic" in found.problem


def test_groups_that_are_not_there(admin: Admin, running: Cluster, topic: str) -> None:
    admin.create_topic(topic, partitions=1)
    read(running, topic, 0)
    near = topic[:-1]
    for call in (
        lambda: admin.describe_group(near),
        lambda: admin.explain_group(near),
        lambda: admin.evict(near, "x"),
        lambda: admin.delete_group(near),
        lambda: admin.reset_offsets(near, topic, "latest"),
    ):
        with pytest.raises(ConfigError, match=f"there is no group '{near}'. Did you mean '{topic}'"):
            call()
    with pytest.raises(ConfigError, match=r"has no member 'x'. It has no members"):
        admin.evict(topic, "x")
    with pytest.raises(ConfigError, match="group 'a/b' has '/'"):
        admin.describe_group("a/b")


# Brokers


def test_brokers_and_their_statistics(running: Cluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=2)
    fill(running, topic, "1-0", 3)
    brokers = admin.brokers()
    assert [(broker.broker_id, broker.live) for broker in brokers.values()] == [(0, True), (1, True)]
    assert brokers[1].address == f"127.0.0.1:{running.brokers[1].port}"
    found = admin.statistics(1)
    assert (found.broker_id, found.writes_refused, found.messages_in[topic]) == (1, None, 3)
    assert [one.end_offset for one in found.partitions if one.topic == topic] == [3]
    with pytest.raises(ConfigError, match=r"there is no broker 9. There are: 0, 1"):
        admin.statistics(9)


def test_what_a_broker_that_is_down_leaves_behind() -> None:
    """The topic is there, its partitions are not; what waits for the broker ends in time and says for what."""
    with cluster(session_timeout_ms=2000) as running, running.admin() as admin:
        admin.create_topic("flights", partitions=2)
        epoch = admin.brokers()[0].epoch
        running.broker.stop()
        until(lambda: not admin.brokers()[0].live)
        assert admin.brokers()[0].epoch == epoch
        dark = admin.describe_topic("flights").partitions
        assert [(one.live, one.address, one.messages) for one in dark] == [(False, None, None)] * 2
        assert all("not registered" in one.problem for one in dark)
        with pytest.raises(ConnectError, match="broker 0"):
            admin.statistics(0)
        with pytest.raises(ConfigError, match="there is no broker to put partitions on"):
            admin.create_topic("rides")
        with pytest.raises(ConfigError, match="broker 0 is not registered"):
            admin.alter("flights", partitions=4, brokers=[0])
        deleted = admin.delete("flights")
        assert deleted is not None
        assert deleted.topic == "flights"


def test_a_broker_that_hangs_is_not_waited_for_longer_than_asked() -> None:
    with cluster() as running, running.admin() as admin:
        running.broker.freeze()
        try:
            with pytest.raises(Timeout, match=r"broker 0 does not offer its 4 yet\) took longer than 0.3 s"):
                admin.create_topic("flights", timeout_s=0.3)
        finally:
            running.broker.thaw()
        until(lambda: all(one.live for one in admin.describe_topic("flights").partitions))


# The object itself


def test_after_close(running: Cluster) -> None:
    admin = running.admin()
    admin.close()
    admin.close()
    for use in (admin.topics, lambda: admin.create_topic("t"), admin.brokers, admin.__enter__):
        with pytest.raises(ClosedError, match=r"this admin is closed\. Make a new one"):
            use()


def test_one_that_is_not_closed_says_so(running: Cluster) -> None:
    admin = running.admin()
    with pytest.warns(ResourceWarning, match="an Admin was not closed"):
        del admin


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forks_child_it_says_so(running: Cluster) -> None:
    with running.admin() as admin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                admin.topics()
            except ForkedError:
                os.write(writer, b"refused")
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            assert pipe.read() == b"refused"
        os.waitpid(child, 0)
        assert isinstance(admin.topics(), dict)


def test_nobody_there() -> None:
    with pytest.raises(ConfigError, match="is not a host and a port"):
        Admin("what is this")


def test_the_asyncio_admin_has_it_all(running: Cluster, topic: str) -> None:
    async def scenario() -> None:
        async with aio.Admin(running.zookeeper) as admin:
            config = await admin.create_topic(topic, partitions=2)
            assert (await admin.topics())[topic] == config
            assert len((await admin.describe_topic(topic)).partitions) == 2
            assert (await admin.alter(topic, flush="ack")).flush == "ack"
            assert list(await admin.brokers()) == [0, 1]
            assert (await admin.statistics(0)).broker_id == 0
            assert topic not in await admin.groups()
            for refused in (
                admin.describe_group(topic),
                admin.explain_group(topic),
                admin.reset_offsets(topic, topic, "latest"),
                admin.evict(topic, "x"),
                admin.delete_group(topic),
            ):
                with pytest.raises(ConfigError, match="there is no group"):
                    await refused
            await admin.delete(topic)
        with pytest.raises(ClosedError):
            await admin.topics()

    asyncio.run(scenario())


def test_a_topic_that_may_exist_is_left_as_it_is(admin: Admin, topic: str) -> None:
    made = admin.create_topic(topic, partitions=2)
    assert admin.create_topic(topic, partitions=3, exist_ok=True) == made
    with pytest.raises(TopicExists):
        admin.create_topic(topic, partitions=2)


def test_the_lag_of_a_group_is_not_known_while_that_of_a_partition_is_not() -> None:
    known = GroupPartition("t", "0-0", 2, 0, 5, None, None)
    away = dataclasses.replace(known, start=None, end=None)
    lags = [
        GroupDescription("g", None, None, (), partitions, None).lag
        for partitions in ((), (known,), (known, dataclasses.replace(away, committed=None)), (known, away))
    ]
    assert lags == [0, 3, None, None]


def test_a_group_with_its_offsets_in_a_database_tells_how_far_it_is(
    running: Cluster, admin: Admin, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metamq.client.consumer.health.PROGRESS_CHECK_S", 0.05)
    admin.create_topic(topic, partitions=1, brokers=[0])
    fill(running, topic, "0-0", 5)
    offsets = offsets_in(lambda: sqlite3.connect(tmp_path / "offsets.sqlite3", timeout=LIMIT_S))
    with running.consumer(group=topic, topics=[topic], offsets=offsets) as consumer:
        messages = iter(consumer)
        until(lambda: admin.describe_group(topic).lag == 5)
        next(messages)
        next(messages)
        until(lambda: admin.describe_group(topic).lag == 4)
    assert admin.describe_group(topic).lag == 3, "what was in hand is done with the block"
    with running.consumer(group=topic, topics=[topic], offsets=offsets) as consumer:
        assert next(iter(consumer)).offset == 2


@pytest.mark.parametrize(
    ("changes", "lag"),
    [
        ({"owner": "a"}, 5),  # it begins at the log's start, or would have committed where it does
        ({}, None),  # the next owner says where it begins
        ({"owner": "a", "kept_by": "DatabaseOffsets"}, None),
        ({"start": 7, "end": 7}, 0),
        ({"start": 7, "end": 7, "kept_by": "DatabaseOffsets"}, 0),
        ({"owner": "a", "start": None, "end": None}, None),
    ],
)
def test_the_lag_where_nothing_is_committed(changes: dict[str, Any], lag: int | None) -> None:
    place = dataclasses.replace(GroupPartition("t", "0-0", None, 2, 7, None, None), **changes)
    assert place.lag == lag
    assert GroupDescription("g", None, None, (), (place,), None).lag == lag


def test_a_group_that_has_not_committed_lags_behind_all_there_is(running: Cluster, admin: Admin, topic: str) -> None:
    admin.create_topic(topic, partitions=1, brokers=[0])
    fill(running, topic, "0-0", 5)
    with running.consumer(group=topic, topics=[topic], auto_commit=False) as consumer:
        next(iter(consumer))
        until(lambda: admin.describe_group(topic).lag == 5)
        assert consumer.lag() == {TopicPartition(topic, "0-0"): 5}
    assert admin.describe_group(topic).lag == 5, "the place where it began is committed"
