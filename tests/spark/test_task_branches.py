"""What an attempt at a task does when a broker is away, or cannot go on at present; without Spark, on real brokers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from metamq.client.net.branches import TxClient
from metamq.client.producer.batching import Batcher
from metamq.errors import ConfigError, ConnectError, MetamqError, TryLater
from metamq.spark_consumers.sink.decisions import BranchName, new_attempt
from metamq.spark_consumers.sink.sink_client import SinkClient, sink_client
from metamq.spark_consumers.sink.sink_options import SinkOptions, parse_sink_options
from metamq.spark_consumers.sink.task_branches import TaskBranches
from metamq.testing import Cluster
from metamq.tx.store.verbs import TransactionLimits
from metamq.zk.session.session import Session
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker, wait_until

AWAY_S = 1.0


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """Two brokers."""
    with cluster(brokers=2) as started:
        yield started


def options(running: Cluster, **given: str) -> SinkOptions:
    some = {"zookeeper": running.zookeeper, "delivery": "exactly_once", **given}
    return parse_sink_options({"topic": "t", **some}, streaming=True)


@pytest.fixture
def opened() -> Iterator[Callable[[SinkOptions], SinkClient]]:
    """Makes clients, each with a session of its own."""
    clients: list[SinkClient] = []

    def make(of: SinkOptions) -> SinkClient:
        clients.append(SinkClient(of))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def attempt(client: SinkClient, values: list[str], *, keys: bool = True) -> TaskBranches:
    """An attempt that has these rows, and is not prepared."""
    branches = client.background.run(client.branches(BranchName("s", 0, new_attempt(0, 0))))
    assert client.options.topic is not None
    config = client.topic(client.options.topic)
    batcher = Batcher(config.topic, client.topic)
    columns = {"value": values, "key": values} if keys else {"value": values}
    found = [*batcher.add(pa.record_batch(columns)), *batcher.rest()]
    branches.add((one, config) for one in found)
    return branches


def after(delay_s: float, call: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(delay_s, call)
    timer.start()
    return timer


def open_at(client: SinkClient, broker_id: int) -> list[tuple[str, int]]:
    """The state and the messages of each branch there."""
    found = client.background.run(TxClient(client.cluster).branches(broker_id, all_of_them=True))
    return [(one.state, one.messages) for one in found]


@pytest.mark.slow
def test_a_prepare_that_cannot_be_kept_at_present_is_asked_again(
    two: Cluster, tmp_path: Path, opened: Callable[[SinkOptions], SinkClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is nearly full when a task ends, and is not a moment later."""
    free_bytes = 1 << 40
    with LocalBroker(two.zookeeper, tmp_path / "broker", id=7) as local:
        monkeypatch.setattr(local.broker._folder, "free_bytes", lambda: free_bytes)
        with two.admin() as admin:
            admin.create_topic("room", partitions=1, brokers=[7])
        values = [str(number) for number in range(100)]
        hasty, patient = (opened(options(two, topic="room", deliveryTimeoutMs=each)) for each in ("1000", "60000"))
        attempts = [attempt(client, values) for client in (hasty, patient)]
        wait_until(lambda: open_at(patient, 7) == [("active", 100)] * 2, what="both attempts at their broker")
        free_bytes = 1
        wait_until(lambda: local.broker._parts.status.disk_full is not None, what="a disk that is nearly full")
        with pytest.raises(TryLater, match="bytes free"):
            hasty.background.run(attempts[0].prepare())
        hasty.background.run(attempts[0].give_up())

        def there_is_room() -> None:
            nonlocal free_bytes
            free_bytes = 1 << 40

        timer = after(AWAY_S, there_is_room)
        try:
            assert patient.background.run(attempts[1].prepare()).keys() == {7}
        finally:
            timer.join()
        assert open_at(patient, 7) == [("prepared", 100)]
        patient.background.run(attempts[1].give_up())


@pytest.mark.slow
def test_what_a_broker_does_not_take_at_present_is_sent_again(
    two: Cluster, tmp_path: Path, opened: Callable[[SinkOptions], SinkClient]
) -> None:
    """Its journal is as large as it may be, for a moment."""
    with LocalBroker(two.zookeeper, tmp_path / "broker", id=8) as local:
        with two.admin() as admin:
            admin.create_topic("journal", partitions=2, brokers=[8])
        processor = local.broker._parts.transactions
        limits = processor.limits
        processor.limits = limits._replace(journal_bytes=-1)

        def there_is_room() -> None:
            processor.limits = limits

        client = opened(options(two, topic="journal"))
        timer = after(AWAY_S, there_is_room)
        try:
            branches = attempt(client, ["one", "two", "three"])
            assert client.background.run(branches.prepare()).keys() == {8}
        finally:
            timer.join()
        assert open_at(client, 8) == [("prepared", 3)]
        client.background.run(branches.give_up())


def test_a_write_that_needs_more_branches_than_a_broker_takes_is_told_what_to_do(
    two: Cluster, tmp_path: Path, opened: Callable[[SinkOptions], SinkClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metamq.spark_consumers.sink.task_branches.LOOK_S", 0.1)
    with LocalBroker(two.zookeeper, tmp_path / "broker", id=9) as local:
        with two.admin() as admin:
            admin.create_topic("many", partitions=1, brokers=[9])
        processor = local.broker._parts.transactions
        limits = TransactionLimits(branches=2)
        assert processor._term is not None
        processor._term.store.limits = limits
        client = opened(options(two, topic="many"))
        others = [attempt(client, ["x"]) for _ in range(2)]
        for one in others:
            client.background.run(one.prepare())
        late = attempt(client, ["y"])
        timer = after(AWAY_S, lambda: client.background.run(others[0].give_up()))
        try:
            assert client.background.run(late.prepare()).keys() == {9}, "there is room, by and by"
        finally:
            timer.join()
        monkeypatch.setattr("metamq.spark_consumers.sink.task_branches.OWN_MAX", 2)
        with pytest.raises(ConfigError, match=r"2 of its 2 .* belong to this write.*coalesce\(n\)"):
            client.background.run(attempt(client, ["z"]).prepare())
        for one in (late, others[1]):
            client.background.run(one.give_up())


def test_rows_that_may_go_anywhere_go_where_a_broker_is(
    two: Cluster, opened: Callable[[SinkOptions], SinkClient]
) -> None:
    two.create_topic("anywhere", partitions=4)
    client = opened(options(two, topic="anywhere"))
    client.background.run(client.cluster.refresh_brokers())
    two.brokers[1].stop()
    try:
        wait_until(lambda: list(client.cluster.brokers) == [0], 20, "the news that broker 1 is away")
        for number in range(6):
            branches = attempt(client, [str(number)], keys=False)
            assert client.background.run(branches.prepare()).keys() == {0}
            client.background.run(branches.give_up())
    finally:
        two.brokers[1].start()


def test_a_branch_begins_once_its_broker_is_there(
    two: Cluster, opened: Callable[[SinkOptions], SinkClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits longer than for an answer."""
    monkeypatch.setattr("metamq.spark_consumers.sink.task_branches.ANSWER_S", AWAY_S / 4)
    two.create_topic("later", partitions=4)
    client = opened(options(two, topic="later"))
    two.brokers[1].stop()
    timer = after(AWAY_S, two.brokers[1].start)
    try:
        branches = attempt(client, [str(number) for number in range(40)])
        assert client.background.run(branches.prepare()).keys() == {0, 1}
    finally:
        timer.join()
    client.background.run(branches.give_up())


def test_queries_with_other_options_share_their_process_session(two: Cluster) -> None:
    two.create_topic("t", partitions=1)
    with contextlib.closing(sink_client(options(two))) as first:
        others = [
            sink_client(options(two, topic="u")),
            sink_client(options(two, compression="zstd", deliveryTimeoutMs="5000")),
            sink_client(options(two, sinkId="mine", transactionTimeoutMs="5000")),
        ]
        assert {id(one.cluster) for one in others} == {id(first.cluster)}
        assert others[1].shipment()._sender is not first.shipment()._sender
        assert others[0].shipment()._sender is first.shipment()._sender


@pytest.mark.parametrize(("is_first", "tries"), [(True, 1), (False, 5)])
def test_zookeeper_is_tried_once_at_first_contact_and_waited_for_later(
    is_first: bool, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One try is ten seconds: the driver tells a wrong address then, and a task waits."""
    tried = 0

    async def refused(servers: str, *_more: object) -> Session:
        nonlocal tried
        tried += 1
        raise ConnectError(servers, "as if by a fault") if tried < 5 else ConfigError("there")

    monkeypatch.setattr("metamq.spark_consumers.sink.sink_client.open_client_session", refused)
    monkeypatch.setattr("metamq.spark_consumers.sink.sink_client.RETRY_S", 0.01)
    wrong = parse_sink_options({"topic": "t", "zookeeper": "no-such-host:1"}, streaming=True)
    with pytest.raises(MetamqError):
        sink_client(wrong, is_first=is_first)
    assert tried == tries
