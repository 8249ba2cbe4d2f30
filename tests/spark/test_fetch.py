"""Reading one range as a task does, with real brokers and without Spark."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from metamq.client.background import background
from metamq.client.net.cluster import MASTER
from metamq.client.scan.arrow_batches import ArrowBatches
from metamq.client.scan.fetch import FETCH_BYTES, Fetching, FetchTask, fetch
from metamq.client.scan.replicas import ReplicaAddress
from metamq.client.settings import ClusterAccess, zookeeper_root
from metamq.errors import (
    ConfigError,
    ConnectError,
    CorruptData,
    Fenced,
    OffsetDiverged,
    OffsetOutOfRange,
    TopicNotFound,
)
from metamq.spark_consumers.driver.planning import batch_ranges, tasks
from metamq.spark_consumers.driver.query_view import QueryView
from metamq.spark_consumers.driver.stream_offsets import StreamPlace
from metamq.spark_consumers.source.options import parse_options
from metamq.testing import Cluster, cluster
from metamq.zk.groups.ownership import CommittedOffset, read_offset
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.partitions import TopicPartition
from metamq.zk.server.ports import free_port
from tests.parts import statistics, wait_until
from tests.spark.conftest import new_topic, send

HEADERS = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.string()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
    ]
)


def planned(running: Cluster, topic: str, **options: str) -> list[FetchTask]:
    """The tasks of a batch query; they have brokers send what there is."""
    given = {"zookeeper": running.zookeeper, "subscribe": topic, "readFiles": "false", **options}
    parsed = parse_options(given, streaming=False)
    with QueryView(parsed.access) as view:
        ranges = batch_ranges(view, parsed)
        return tasks(view, parsed, ranges, topics={one.tp.topic for one in ranges})


def batches(task: FetchTask) -> Iterator[pa.RecordBatch]:
    return ArrowBatches(task.wanted, SCHEMA).of(fetch(task))


def table(planned_tasks: list[FetchTask]) -> Any:
    return pa.Table.from_batches([batch for task in planned_tasks for batch in batches(task)], SCHEMA)


def numbered(count: int, size: int = 100) -> list[bytes]:
    return [b"%d" % number + bytes(size) for number in range(count)]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_all_columns_come_through(running: Cluster, topic: str, compression: str | None) -> None:
    with running.producer(compression=compression) as producer:
        for number in range(300):
            key = None if number % 2 else f"k{number}"
            producer.send(topic, b"%d" % number, key=key, headers={"n": b"%d" % number} if number % 3 else None)
    rows = table(planned(running, topic)).to_pylist()
    found = sorted((int(row["value"]), row["key"], row["headers"]) for row in rows)
    assert found == [
        (
            number,
            None if number % 2 else b"k%d" % number,
            [{"key": "n", "value": b"%d" % number}] if number % 3 else None,
        )
        for number in range(300)
    ]
    assert {(row["topic"], row["timestampType"]) for row in rows} == {(topic, 0)}


def test_pieces_begin_and_end_within_batches(running: Cluster) -> None:
    topic = new_topic(running, 1)
    send(running, topic, numbered(1000))
    pieces = planned(running, topic, maxRecordsPerPartition="37")
    assert len(pieces) == 28
    assert table(pieces)["offset"].to_pylist() == list(range(1000))


def test_small_batches_are_merged_and_large_ones_go_on_as_they_came(running: Cluster) -> None:
    topic = new_topic(running, 1)
    with running.producer(linger_ms=0) as producer:
        for number in range(60):
            producer.send(topic, b"%d" % number).result()
    send(running, topic, numbered(50_000))
    (task,) = planned(running, topic)
    found = list(batches(task))
    assert sum(batch.num_rows for batch in found) == 50_060
    assert all(batch.num_rows >= 1000 for batch in found[:-1])
    assert found[0].num_rows > 1060  # the sixty, and the first batch of the others


def test_batches_that_overlap_are_cut_where_reading_had_come_to(running: Cluster) -> None:
    topic = new_topic(running, 1)
    send(running, topic, numbered(10))
    (task,) = planned(running, topic)
    ((batch,),) = list(fetch(task))
    arrow = ArrowBatches(task.wanted._replace(start=3), SCHEMA)
    found = pa.Table.from_batches(arrow.of([[batch], [batch]]), SCHEMA)
    assert found["offset"].to_pylist() == list(range(3, 10))


def test_an_empty_topic_makes_no_tasks(running: Cluster, topic: str) -> None:
    assert planned(running, topic, minPartitions="8") == []


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that a test may hurt."""
    with cluster(folder=tmp_path) as started:
        yield started


def in_sync(running: Cluster) -> bool:
    with running.admin() as admin:
        return len(admin.brokers()) == 1 and all(one.in_sync for one in admin.replicas()[0].replicas)


@pytest.mark.slow
def test_a_broker_that_is_killed_and_comes_back_is_read_on(own: Cluster) -> None:
    own.create_topic("t", partitions=1)
    count = 8 * FETCH_BYTES // 1000
    send(own, "t", numbered(count, 1000))
    (task,) = planned(own, "t")
    reading = batches(task)
    offsets = next(reading)["offset"].to_pylist()
    own.broker.kill()
    back = threading.Timer(1.0, own.broker.start)
    back.start()
    for batch in reading:
        offsets += batch["offset"].to_pylist()
    back.join()
    assert offsets == list(range(count))


@pytest.mark.slow
def test_a_slave_is_read_while_the_master_is_away_and_a_promoted_one_after(own: Cluster) -> None:
    slave = own.add_slave()
    own.create_topic("t", partitions=1, replication="sync", min_insync=2)
    wait_until(lambda: in_sync(own), what="a slave in sync")
    count = 8 * FETCH_BYTES // 1000
    send(own, "t", numbered(count, 1000))
    wait_until(lambda: len(planned(own, "t")[0].replicas) == 2, what="a first planning that knows the slave")
    (task,) = planned(own, "t")
    reading = batches(task)
    offsets = next(reading)["offset"].to_pylist()
    own.broker.kill()
    for batch in reading:
        offsets += batch["offset"].to_pylist()
    assert offsets == list(range(count))
    # A task that knows the dead master only finds the slave, too.
    assert table([task])["offset"].to_pylist() == list(range(count))
    assert slave.running
    # Of what it does not have a slave cannot say that it is lost.
    for fails in (True, False):
        beyond = task._replace(wanted=task.wanted._replace(start=count, end=count + 10), poll_timeout_s=0.5)
        with pytest.raises(ConnectError, match=r"its master cannot be reached|it is not registered|refused"):
            table([beyond._replace(fail_on_data_loss=fails)])
        # Nor can one that has come to where the master was, be ZooKeeper there or not.
        taken_for_it = beyond._replace(
            replicas=(ReplicaAddress(MASTER, "127.0.0.1", slave.port),), fail_on_data_loss=fails
        )
        for zookeeper in (own.zookeeper, f"127.0.0.1:{free_port()}"):
            with pytest.raises(Fenced, match="another replica may be the master"):
                table([taken_for_it._replace(access=ClusterAccess(zookeeper))])
    with own.admin() as admin:
        admin.promote(0, 1)
    assert table(planned(own, "t"))["offset"].to_pylist() == list(range(count))


@pytest.mark.slow
def test_a_batch_query_is_planned_from_a_slave_while_its_master_is_dead(
    own: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    own.add_slave()
    own.create_topic("t", partitions=1, replication="sync", min_insync=2)
    wait_until(lambda: in_sync(own), what="a slave in sync")
    send(own, "t", numbered(100))
    send(own, "t", numbered(50))  # with which the slave is told that the first are stable
    wait_until(lambda: len(planned(own, "t")[0].replicas) == 2, what="a first planning that knows the slave")
    own.broker.kill()
    found = table(planned(own, "t"))["offset"].to_pylist()
    assert 100 <= len(found) <= 150
    assert found == list(range(len(found)))
    assert "t/0-0 is read up to a slave's end: its broker has no master, which may have more" in caplog.text
    bounded = {"startingOffsets": '{"t": {"0-0": 20}}', "endingOffsets": '{"t": {"0-0": 90}}'}
    assert table(planned(own, "t", **bounded))["offset"].to_pylist() == list(range(20, 90))
    with pytest.raises(ConnectError, match="broker 0"):
        planned(own, "t", readFrom="master", pollTimeoutMs="1000")
    for beyond in ({"endingOffsets": '{"t": {"0-0": 999}}'}, {"startingTimestamp": "99999999999999"}):
        with pytest.raises(ConnectError, match="broker 0"):  # the master may have it
            planned(own, "t", pollTimeoutMs="1000", **beyond)


def test_a_slave_that_has_less_is_asked_after_the_others(own: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    own.create_topic("t", partitions=1)
    send(own, "t", numbered(10))
    (task,) = planned(own, "t")
    place = task.replicas[0]
    dead = place._replace(port=free_port())
    short, whole = place._replace(number=1, data="short"), place._replace(number=2, data="whole")
    asked: list[str] = []
    taken = Fetching._taken

    def seen(self: Fetching, data: memoryview, last_epoch: int) -> Any:
        asked.append(self._data)
        return ([], None) if self._data == "short" else taken(self, data, last_epoch)

    monkeypatch.setattr(Fetching, "_taken", seen)
    assert table([task._replace(replicas=(dead, short, whole), in_place=False)]).num_rows == 10
    assert asked == ["short", "whole"]


@pytest.mark.slow
def test_another_broker_at_the_address_does_not_answer_for_the_one_that_was_there(tmp_path: Path) -> None:
    """It has a partition of the same topic and index, with other messages."""
    with cluster(brokers=2, folder=tmp_path) as own:
        own.create_topic("t", partitions=2)
        with own.producer() as producer:
            for partition in ("0-0", "1-0"):
                producer.send("t", partition.encode(), partition=partition).result(20)
        zero, one = sorted(planned(own, "t"), key=lambda task: task.wanted.tp)
        assert [table([task])["value"].to_pylist() for task in (zero, one)] == [[b"0-0"], [b"1-0"]]
        strayed = zero._replace(replicas=one.replicas)
        assert table([strayed])["value"].to_pylist() == [b"0-0"], "looked up anew"
        with pytest.raises(ConnectError, match="broker 1 is there, not broker 0"):
            table([strayed._replace(access=ClusterAccess(f"127.0.0.1:{free_port()}"), poll_timeout_s=0.5)])


def test_zookeeper_is_not_needed_by_a_task_that_finds_its_broker(own: Cluster) -> None:
    own.create_topic("t", partitions=1)
    send(own, "t", numbered(100))
    planned_tasks = planned(own, "t")
    own.zookeeper_server.freeze()
    try:
        assert table(planned_tasks)["offset"].to_pylist() == list(range(100))
    finally:
        own.zookeeper_server.thaw()


def test_a_broken_connection_sends_no_task_to_zookeeper(own: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_given: object, **_more: object) -> None:
        raise AssertionError("ZooKeeper was asked")

    own.create_topic("t", partitions=1)
    count = 4 * FETCH_BYTES // 1000
    send(own, "t", numbered(count, 1000))
    (task,) = planned(own, "t")
    monkeypatch.setattr("metamq.client.scan.fetch.find_replicas", asked)
    fetching = Fetching(task)
    counts = []
    for chunk in fetching.chunks():
        counts.append(sum(header.count for header, _data in chunk))
        if len(counts) == 1:
            assert fetching.pooled is not None
            fetching.pooled.abort()
    assert len(counts) > 1
    assert sum(counts) == count
    own.broker.kill()
    with pytest.raises(AssertionError, match="ZooKeeper was asked"):  # nobody is where it was
        list(fetch(task))


@pytest.mark.slow
def test_what_is_gone_is_an_error_or_left_out(own: Cluster) -> None:
    own.create_topic("t", partitions=1)
    send(own, "t", numbered(100))
    (task,) = planned(own, "t")
    beyond = task._replace(wanted=task.wanted._replace(end=150), poll_timeout_s=0.5)
    with pytest.raises(OffsetOutOfRange, match="planned with messages that the log does not have any more"):
        table([beyond])
    careless = beyond._replace(fail_on_data_loss=False)
    assert table([careless])["offset"].to_pylist() == list(range(100))
    outside = task._replace(wanted=task.wanted._replace(start=120, end=150))
    with pytest.raises(OffsetOutOfRange, match="failOnDataLoss=false"):
        table([outside])
    assert table([outside._replace(fail_on_data_loss=False)]).num_rows == 0
    parted = task._replace(epoch=0, wanted=task.wanted._replace(start=50))
    with pytest.raises(OffsetDiverged):
        table([parted])
    assert table([parted._replace(fail_on_data_loss=False)]).num_rows == 0
    newer = task._replace(last_epoch=0)  # the range was planned before the epoch of any message that is there
    with pytest.raises(OffsetDiverged, match="gave up the messages read from 0 on"):
        table([newer])
    assert table([newer._replace(fail_on_data_loss=False)]).num_rows == 0
    with own.admin() as admin:
        admin.delete("t")
    own.create_topic("t", partitions=1)
    with pytest.raises(TopicNotFound, match=r"topic 't' was deleted and created again\. Its id is"):
        table([task])
    assert table([task._replace(fail_on_data_loss=False)]).num_rows == 0


def test_a_replica_that_does_not_know_the_topic_is_not_believed_without_zookeeper(
    own: Cluster, running: Cluster
) -> None:
    """As one that became the master a moment ago; here it is a broker of another cluster."""
    own.create_topic("t", partitions=1)
    send(own, "t", numbered(100))
    (task,) = planned(own, "t")
    (stranger,) = planned(running, new_topic_with_a_message(running))
    lost = task._replace(replicas=stranger.replicas, fail_on_data_loss=False, poll_timeout_s=1)
    with pytest.raises(TopicNotFound):
        table([lost._replace(access=ClusterAccess(f"127.0.0.1:{free_port()}"))])
    assert table([lost])["offset"].to_pylist() == list(range(100))


def new_topic_with_a_message(running: Cluster) -> str:
    topic = new_topic(running, 1)
    send(running, topic, [b"one"])
    return topic


def test_damage_on_the_brokers_disk_is_raised_after_what_is_before_it(own: Cluster) -> None:
    own.create_topic("t", partitions=1)
    with own.producer() as producer:
        for value in (b"before", b"flip this", b"behind"):
            producer.send("t", value).result(20)
    (task,) = planned(own, "t")
    assert table([task])["value"].to_pylist() == [b"before", b"flip this", b"behind"]
    assert own.broker.stop() == 0
    (segment,) = (own.broker.data / "topics").glob("t@*/0/*.log")
    stored = segment.read_bytes()
    segment.write_bytes(stored.replace(b"flip this", b"flip that"))
    assert segment.read_bytes() != stored
    own.broker.start()
    reading = fetch(task)
    assert [header.base_offset for header, _data in next(reading)] == [0]
    with pytest.raises(CorruptData):
        next(reading)


def test_a_group_with_members_is_refused(own: Cluster) -> None:
    """Where a query publishes its progress, no consumer's own offsets may be."""
    own.create_topic("t", partitions=1)
    place = {TopicPartition("t", "0-0"): StreamPlace("id", 1)}
    with QueryView(ClusterAccess(own.zookeeper, zookeeper_root(None))) as view:
        view.check_group("g")
        with own.consumer(topics="t", group="g") as consumer:
            wait_until(lambda: consumer.assignment, what="the assignment")
            with pytest.raises(ConfigError, match="a query cannot publish its progress there"):
                view.check_group("g")
            with pytest.raises(ConfigError, match="a query cannot publish its progress there"):
                view.publish_soon("g", place).result()
        view.publish_soon("g", place).result()
        session = view._cluster.session
        background().run(session.set(session.paths.offset("g", "t", "0-0"), b"none of ours", ANY_VERSION))
        view.publish_soon("g", place).result()  # the query knows better than a damaged node
        stored = background().run(read_offset(session, "g", TopicPartition("t", "0-0")))
        assert stored is not None
        assert stored[0].committed == CommittedOffset(1, -1, "id")


def test_no_more_is_fetched_ahead_than_a_task_has_memory_for(own: Cluster) -> None:
    own.create_topic("t", partitions=1)
    count = 20 * FETCH_BYTES // 1000
    send(own, "t", numbered(count, 1000))
    (task,) = planned(own, "t")
    reading = fetch(task)
    offsets = sum(header.count for header, _data in next(reading))
    looks: list[int] = []

    def is_at_rest() -> bool:
        looks.append(statistics(own.broker)["counters"]["bytes_out"])
        return looks[-1] > FETCH_BYTES and len(looks) > 30 and len(set(looks[-30:])) == 1

    wait_until(is_at_rest, 60, "a reader that waits")
    assert looks[-1] <= 2 * FETCH_BYTES
    for chunk in reading:
        offsets += sum(header.count for header, _data in chunk)
    assert offsets == count


def test_a_reader_that_stops_early_leaves_nothing_behind(running: Cluster) -> None:
    topic = new_topic(running, 1)
    count = 8 * FETCH_BYTES // 1000
    send(running, topic, numbered(count, 1000))
    (task,) = planned(running, topic)
    for _ in range(5):
        reading = fetch(task)
        assert isinstance(reading, Generator)
        next(reading)
        reading.close()
    assert table([task]).num_rows == count
