"""A streaming query planned and read as Spark has it done, with real brokers and without Spark."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.client.scan.fetch import FetchTask, fetch
from metamq.client.settings import ClusterAccess
from metamq.errors import ConfigError, ConnectError, OffsetDiverged
from metamq.spark_consumers.driver.planning import batch_ranges
from metamq.spark_consumers.driver.query_view import QueryView
from metamq.spark_consumers.driver.stream_offsets import START
from metamq.spark_consumers.driver.stream_planner import StreamPlanner
from metamq.spark_consumers.source.options import parse_options
from metamq.testing import Cluster
from metamq.wire import columns
from tests.broker.ha.test_replication import LAG_MS, SESSION_MS, Group, a_sync_topic
from tests.one_zookeeper import cluster
from tests.spark.conftest import send

PLANNERS: list[StreamPlanner] = []


@pytest.fixture(autouse=True)
def planners_are_closed() -> Iterator[None]:
    """As Spark does when a query ends."""
    yield
    while PLANNERS:
        PLANNERS.pop().close()


class Query:
    """In the place of Spark: keeps how far it is, as JSON."""

    def __init__(self, running: Cluster, **options: str) -> None:
        self._given = {"zookeeper": running.zookeeper, "subscribe": "t", "startingOffsets": "earliest", **options}
        self.at = json.dumps(START)
        self.batches: list[list[bytes]] = []
        self.opened()

    def opened(self, **options: str) -> None:
        """As after a restart."""
        self._given |= options
        self.planner = StreamPlanner(parse_options(self._given, streaming=True))
        PLANNERS.append(self.planner)

    def planned(self, *, is_only_batch: bool = False) -> tuple[str, list[FetchTask]]:
        start = json.loads(self.at)
        end = json.loads(json.dumps(self.planner.next_offset(start, is_only_batch=is_only_batch)))
        return json.dumps(end), [] if end == start else self.planner.tasks(start, end)

    def batch(self, **how: bool) -> bool:
        """Plans and reads one; False when there is none."""
        end, tasks = self.planned(**how)
        if end == self.at:
            return False
        self.batches.append([value for task in tasks for value in values(task)])
        self.at = end
        return True

    def run_available_now(self) -> None:
        self.planner.fix_target()
        while self.batch():
            pass

    def seen(self) -> Counter[bytes]:
        return Counter(value for batch in self.batches for value in batch)


def values(task: FetchTask) -> Iterator[bytes]:
    """The messages of a task's range."""
    for chunk in fetch(task):
        for header, data in chunk:
            every = columns.decode(data, header).values.tolist()
            first = max(task.wanted.start - header.base_offset, 0)
            yield from every[first : task.wanted.end - header.base_offset]


def named(name: str, count: int) -> list[bytes]:
    return [f"{name} {number}".encode() for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [{}, {"maxOffsetsPerTrigger": "300", "minPartitions": "3"}])
@pytest.mark.timeout(240)
def test_an_accepted_loss_of_what_was_read_is_noticed_and_what_took_its_place_is_read(
    tmp_path: Path, bounded: dict[str, str]
) -> None:
    """Also when the query was in the middle of the log, and the new one is longer than that by the next batch."""
    with cluster(session_timeout_ms=SESSION_MS, insync_lag_ms=LAG_MS, folder=tmp_path / "cluster") as running:
        group = Group(running)
        a_sync_topic(group, "t", 1)
        slave = group.add_slave()
        group.wait_insync(0, 1)
        try:
            both, gone, new = named("both", 500), named("gone", 700), named("new", 2000)
            send(running, "t", both)
            group.wait_equal(0, 1)
            slave.kill()
            group.wait_insync(0)
            send(running, "t", gone)
            query = Query(running, **bounded)
            while sum(query.seen().values()) < 800:
                assert query.batch()
            read = query.seen()
            _end, planned = query.planned()
            late = Query(running, failOnDataLoss="false", maxOffsetsPerTrigger="300")
            late.planner.fix_target()
            assert late.batch()
            group.replicas[0].kill()
            slave.start()
            group.promote(1, accept_loss=True)
            send(running, "t", new)
            for task in planned:  # of the log that was given up
                with pytest.raises(OffsetDiverged, match="gave up the messages read from 500 on"):
                    list(values(task))
                assert list(values(task._replace(fail_on_data_loss=False))) == []
            query.opened()
            with pytest.raises(
                OffsetDiverged, match=r"gave up the messages read from 500 on(?s:.*)failOnDataLoss=false"
            ):
                query.batch()
            query.opened(failOnDataLoss="false")
            query.run_available_now()
            assert query.seen() == read + Counter(new)
            assert read == Counter((both + gone)[: sum(read.values())])
            rest = next(number for number in range(10) if not late.batch())
            assert rest < 5, "what its target was in is gone: it ends all the same"
            late.opened()
            late.run_available_now()
            assert late.seen() == Counter(both + new)
        finally:
            slave.kill()


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_hardly_meant_is_warned_of(two: Cluster, caplog: pytest.LogCaptureFixture, streaming: bool) -> None:
    name = f"doubtful-{streaming}"
    two.create_topic(name, partitions=1)
    for options in (
        {"subscribePattern": "doubtfull.*"},
        {"subscribe": name, "startingTimestamp": "1735689600", "startingOffsetsByTimestampStrategy": "latest"},
    ):
        parsed = parse_options({"zookeeper": two.zookeeper, **options}, streaming=streaming)
        if streaming:
            with contextlib.closing(StreamPlanner(parsed)) as planner:
                planner.next_offset(START, is_only_batch=False)
        else:
            with QueryView(ClusterAccess(two.zookeeper)) as view:
                batch_ranges(view, parsed)
    first, second = (record.getMessage() for record in caplog.records if record.name == "metamq.spark")
    assert first == "no topic matches option 'subscribePattern', 'doubtfull.*', at present"
    assert "'startingTimestamp' has the time 1735689600, in 1970, probably in seconds" in second


@pytest.fixture
def two_brokers(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(brokers=2, folder=tmp_path / "cluster") as running:
        running.create_topic("t", partitions=2)
        send_to_all(running)
        yield running


EVERYTHING = Counter(named("0-0", 100) + named("1-0", 100))


@pytest.mark.slow
def test_available_now_does_not_end_before_what_there_is_of_a_broker_that_is_away(two_brokers: Cluster) -> None:
    query = Query(two_brokers, maxOffsetsPerTrigger="50", groupId="g")
    query.planner.fix_target()
    assert query.batch()
    two_brokers.brokers[1].kill()
    back = threading.Timer(1.0, two_brokers.brokers[1].start)
    back.start()
    try:
        while query.batch():
            pass
    finally:
        back.join()
    assert query.seen() == EVERYTHING
    assert max(map(len, query.batches)) <= 50
    with two_brokers.admin() as admin:
        found = admin.describe_group("g").partitions
    assert {one.partition: one.committed for one in found} == {"0-0": 100, "1-0": 100}, "published by its end"


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_nothing_new_is_said_once_each_broker_has_said_it(two_brokers: Cluster, fault: str) -> None:
    """Spark takes it for the end of what there is, and what was acknowledged was left out."""
    query = Query(two_brokers)
    assert query.batch()
    assert not query.batch()
    with two_brokers.producer() as producer:
        producer.send("t", b"acknowledged", partition="1-0").result()
    broker = two_brokers.brokers[1]
    (broker.kill if fault == "killed" else broker.freeze)()
    back = threading.Timer(1.0, broker.start if fault == "killed" else broker.thaw)
    back.start()
    try:
        assert query.batch()
    finally:
        back.join()
    assert query.batches[-1] == [b"acknowledged"]


def test_a_broker_that_was_warned_of_is_not_waited_for(
    two_brokers: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metamq.spark_consumers.driver.stream_planner.WARN_AFTER_S", 0.5)
    query = Query(two_brokers)
    assert query.batch()
    two_brokers.brokers[1].kill()
    assert not query.batch()
    assert "the new messages of t/1-0 have been unknown for" in caplog.text
    with two_brokers.producer() as producer:
        producer.send("t", b"of the other broker", partition="0-0").result()
    assert query.batch()
    assert query.batches[-1] == [b"of the other broker"]


@pytest.mark.slow
def test_a_single_batch_waits_for_a_broker_that_is_away_or_says_so(two_brokers: Cluster) -> None:
    query = Query(two_brokers)
    assert query.batch()
    send_to_all(two_brokers)
    two_brokers.brokers[1].kill()
    query.opened(pollTimeoutMs="300")
    with pytest.raises(ConnectError):
        query.batch(is_only_batch=True)
    query.opened(pollTimeoutMs="60000")
    back = threading.Timer(1.0, two_brokers.brokers[1].start)
    back.start()
    try:
        assert query.batch(is_only_batch=True)
    finally:
        back.join()
    assert query.seen() == EVERYTHING + EVERYTHING


def test_the_first_trigger_waits_for_no_further_messages(two_brokers: Cluster) -> None:
    query = Query(two_brokers, minOffsetsPerTrigger="1000", maxTriggerDelay="1h")
    assert query.batch()
    assert query.seen() == EVERYTHING
    send_to_all(two_brokers)
    assert not query.batch(), "the next one does"
    query.opened(minOffsetsPerTrigger="1000", maxTriggerDelay="1h")
    assert query.batch(), "after a restart it is the first one again"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"startingOffsets": '{"t": {"0-0": 50, "1-0": 0}}', "endingTimestamp": "978307200000"},
            "begins t/0-0 at offset 50",
        ),
        ({"startingOffsets": '{"t": {"0-0": 0, "1-0": 0}}', "endingTimestamp": "978307200000"}, None),
        ({"startingOffsets": '{"t": "earliest"}', "endingOffsetsByTimestamp": '{"t": 9223372036854775807}'}, None),
    ],
)
def test_a_batch_that_begins_behind_its_end_is_an_error(
    two_brokers: Cluster, options: dict[str, str], words: str | None
) -> None:
    parsed = parse_options({"zookeeper": two_brokers.zookeeper, "subscribe": "t", **options}, streaming=False)
    with QueryView(ClusterAccess(two_brokers.zookeeper)) as view:
        if words is not None:
            with pytest.raises(ConfigError, match=words):
                batch_ranges(view, parsed)
            return
        sizes = {one.size for one in batch_ranges(view, parsed)}
    assert sizes == ({100} if "endingOffsetsByTimestamp" in options else {0})


def send_to_all(running: Cluster) -> None:
    with running.producer() as producer:
        for partition in ("0-0", "1-0"):
            for value in named(partition, 100):
                producer.send("t", value, partition=partition)
