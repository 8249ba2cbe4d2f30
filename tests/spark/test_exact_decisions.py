"""Streams, exactly once, by decisions in a real ZooKeeper and branches at two brokers; without Spark.

The cases of an exactly-once sink that are easily wrong: what a replay, a second driver, a late abort, a lost answer and
a deleted checkpoint do.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from metamq.client.producer.batching import Batcher
from metamq.errors import ConfigError, ConnectError, MetamqError
from metamq.spark_consumers.sink.branch_ends import CommitLost
from metamq.spark_consumers.sink.committing import CommitUnfinished
from metamq.spark_consumers.sink.decision_store import KEPT
from metamq.spark_consumers.sink.decisions import (
    BranchName,
    NotOurs,
    new_attempt,
    new_job,
)
from metamq.testing import Cluster, cluster
from metamq.zk.errors import BadVersion, ConnectionLost
from metamq.zk.nodes import ANY_VERSION
from tests.parts import wait_until
from tests.spark.drivers import (
    Attempts,
    Died,
    Driver,
    check,
    closing_clients,
    dying,
    left_open,
    next_name,
    nodes,
    seen,
    texts,
)


@pytest.fixture
def topic(two: Cluster) -> str:
    name = next_name("exact")
    two.create_topic(name, partitions=4)
    return name


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    with closing_clients():
        yield


@pytest.mark.parametrize("point", ["prepared", "decided", "one committed", "all committed", "before the commit log"])
def test_a_driver_that_dies_anywhere_and_the_batch_that_comes_again(
    two: Cluster, topic: str, sink: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Driver(two, topic, sink)
    first.commit(0, first.write(0, texts(0, 10)))
    attempts = first.write(1, texts(10, 60))
    if point == "before the commit log":
        first.commit(1, attempts)
    else:
        with monkeypatch.context() as patched, pytest.raises(Died):
            first.commit(1, attempts, dying(first.committer(), point, patched))
    second = Driver(two, topic, sink)
    second.commit(1, second.write(1, texts(10, 60)[::-1], tasks=3))
    check(two, topic, sink, texts(0, 60))
    second.commit(2, second.write(2, texts(60, 70)))
    check(two, topic, sink, texts(0, 70))


def test_s1_8_a_the_list_of_the_first_decision_counts_not_the_replays_branches(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Driver(two, topic, sink), Driver(two, topic, sink)
    attempts, committer = first.write(0, texts(0, 9, "first ")), dying(first.committer(), "decided", monkeypatch)
    with pytest.raises(Died):
        first.commit(0, attempts, committer)
    assert seen(two, topic) == Counter()
    second.commit(0, second.write(0, texts(0, 9, "second ")))
    check(two, topic, sink, texts(0, 9, "first "))


def test_s1_8_b_of_two_drivers_one_decides(two: Cluster, topic: str, sink: str) -> None:
    drivers = [Driver(two, topic, sink) for _ in range(2)]
    written = [driver.write(0, texts(0, 20, f"{tag} ")) for tag, driver in enumerate(drivers)]

    async def both() -> list[BaseException | None]:
        commits = (one.committer().commit(0, of) for one, of in zip(drivers, written, strict=True))
        return await asyncio.gather(*commits, return_exceptions=True)

    first, second = drivers[0].client.background.run(both())
    assert isinstance(first, NotOurs), "the one that began to write last decides"
    assert second is None
    drivers[0].abort(0, written[0])  # as Spark does
    check(two, topic, sink, texts(0, 20, "1 "))


def test_s1_8_b_a_driver_that_was_paused_is_told_and_nothing_doubles(two: Cluster, topic: str, sink: str) -> None:
    """Also when the decision about its batch is removed by then."""
    paused, living = Driver(two, topic, sink), Driver(two, topic, sink)
    old = paused.write(0, texts(0, 5, "old "))
    last = KEPT + 1
    for batch_id in range(last + 1):
        living.commit(batch_id, living.write(batch_id, [f"{batch_id}"]))
    session = living.client.cluster.session
    kept = living.client.background.run(session.children(session.paths.sink(sink)))
    assert {int(name) for name in kept} == set(range(last - KEPT, last + 1)), "old decisions are removed"
    with pytest.raises(NotOurs, match=f"taken over by the run {living.owner.run}"):
        paused.commit(0, old)
    paused.abort(0, old)
    with pytest.raises(NotOurs, match="taken over"):
        paused.write(1, texts(5, 10, "late "))  # its tasks, in workers that have not asked before
    check(two, topic, sink, texts(0, last + 1))


def test_a_zookeeper_of_yesterday_has_no_decisions_of_today_and_the_next_batch_is_written_once(
    two: Cluster, topic: str, sink: str
) -> None:
    driver = Driver(two, topic, sink)
    driver.commit(0, driver.write(0, ["0"]))
    session, run = driver.client.cluster.session, driver.client.background.run
    yesterday = run(session.get(session.paths.sink(sink))).data
    for batch_id in (1, 2):
        driver.commit(batch_id, driver.write(batch_id, [f"{batch_id}"]))
        run(session.delete(session.paths.sink_decision(sink, batch_id), ANY_VERSION))
    run(session.set(session.paths.sink(sink), yesterday, ANY_VERSION))
    driver.commit(3, driver.write(3, ["3"]))
    restarted = Driver(two, topic, sink)
    restarted.commit(4, restarted.write(4, ["4"]))
    check(two, topic, sink, texts(0, 5))


def test_a_checkpoint_from_a_backup_is_an_error(two: Cluster, topic: str, sink: str) -> None:
    """Its next batches have the numbers of others: they are not taken for these, and dropped."""
    driver = Driver(two, topic, sink)
    for batch_id in range(3):
        driver.commit(batch_id, driver.write(batch_id, [f"{batch_id}"]), content=f"to {batch_id}")
    restored = Driver(two, topic, sink)
    for batch_id, made_from, said in ((1, "to 1", "batch 1 .* runs again"), (2, "to 4", "decided with other offsets")):
        attempts = restored.write(batch_id, ["new"])
        with pytest.raises(NotOurs, match=said):
            restored.commit(batch_id, attempts, content=made_from)
        restored.abort(batch_id, attempts)
    restored.commit(2, restored.write(2, ["2 again"]), content="to 2")
    check(two, topic, sink, texts(0, 3))


def test_s1_8_c_an_abort_after_the_decision_brings_it_about(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(two, topic, sink)
    attempts = driver.write(0, texts(0, 9))
    with pytest.raises(Died):
        driver.commit(0, attempts, dying(driver.committer(), "decided", monkeypatch))
    driver.abort(0, attempts)
    check(two, topic, sink, texts(0, 9))


def test_an_abort_before_the_decision_rolls_back_and_the_batch_can_be_written(
    two: Cluster, topic: str, sink: str
) -> None:
    driver = Driver(two, topic, sink)
    driver.abort(0, driver.write(0, texts(0, 9)))
    check(two, topic, sink, [])
    driver.commit(0, driver.write(0, texts(0, 9)))
    check(two, topic, sink, texts(0, 9))


def about_to_commit(two: Cluster, topic: str, sink: str) -> tuple[Driver, Attempts]:
    """A driver whose tasks have written batch 0."""
    driver = Driver(two, topic, sink)
    return driver, driver.write(0, texts(0, 9))


def test_what_is_under_way_when_a_batch_is_aborted_decides_nothing_any_more(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the decision's request is lost, and the request arrives after the abort."""
    driver, attempts = about_to_commit(two, topic, sink)
    committer = driver.committer()
    session = driver.client.cluster.session
    late: list[Any] = []

    async def lost(operations: Any) -> None:
        late.append(operations)
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(session, "multi", lost)
        with pytest.raises(Died):
            driver.commit(0, attempts, committer)
    driver.abort(0, attempts)
    with pytest.raises(BadVersion):
        driver.client.background.run(session.multi(late[0]))
    check(two, topic, sink, [])


def test_a_commit_that_still_runs_when_its_batch_is_aborted_decides_nothing(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is refused, and it reads the sink's node again."""
    driver, attempts = about_to_commit(two, topic, sink)
    session = driver.client.cluster.session
    multi = session.multi

    async def late(operations: Any) -> Any:
        monkeypatch.undo()
        await driver.committer().abort(0, attempts)
        return await multi(operations)

    monkeypatch.setattr(session, "multi", late)
    with pytest.raises(NotOurs, match=r"batch 0 .* was aborted, and its rows were rolled back"):
        driver.commit(0, attempts)
    check(two, topic, sink, [])
    driver.commit(0, driver.write(0, texts(0, 9)))
    check(two, topic, sink, texts(0, 9))


def test_a_decision_whose_answer_is_lost_is_found(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(two, topic, sink)
    attempts = driver.write(0, texts(0, 9))
    session = driver.client.cluster.session
    multi = session.multi

    async def lost_once(operations: Any) -> Any:
        monkeypatch.undo()
        await multi(operations)
        raise ConnectionLost("zk", "as if by a fault", outcome="unknown")

    monkeypatch.setattr(session, "multi", lost_once)
    driver.commit(0, attempts)
    check(two, topic, sink, texts(0, 9))


def test_s1_8_d_what_failed_attempts_have_prepared_is_rolled_back_with_a_later_batch(
    two: Cluster, topic: str, sink: str
) -> None:
    driver = Driver(two, topic, sink)
    driver.write(0, texts(0, 5, "lost "))  # its worker was killed behind prepare()
    driver.commit(0, driver.write(0, texts(0, 5)))
    check(two, topic, sink, texts(0, 5))
    driver.write(0, texts(0, 5, "late "))  # a zombie's
    coming = driver.write(2, texts(10, 15))  # of a batch that is not decided: left alone
    driver.commit(1, driver.write(1, texts(5, 10)))
    assert seen(two, topic) == Counter(texts(0, 10))
    driver.commit(2, coming)
    check(two, topic, sink, texts(0, 15))


def test_s1_8_e_a_sink_id_whose_checkpoint_was_deleted_is_an_error(two: Cluster, topic: str, sink: str) -> None:
    driver = Driver(two, topic, sink, "checkpoint-1")
    driver.commit(0, driver.write(0, texts(0, 5)))
    again = Driver(two, topic, sink, "checkpoint-2")
    with pytest.raises(
        ConfigError, match=r"belongs to the query checkpoint-1, and this one is checkpoint-2.*another sinkId"
    ):
        again.write(0, texts(5, 10))
    check(two, topic, sink, texts(0, 5))


def written(two: Cluster, topic: str, sink: str, **options: str) -> tuple[Driver, Attempts]:
    """A driver whose tasks have written five rows."""
    driver = Driver(two, topic, sink, **options)
    if driver.is_job:
        driver.begin_job()
    return driver, driver.write(0, texts(0, 5))


@pytest.mark.parametrize("is_job", [False, True])
def test_only_the_brokers_that_it_wrote_to_are_waited_for(two: Cluster, sink: str, is_job: bool) -> None:
    topic = next_name("exact")
    two.create_topic(topic, partitions=2, brokers=[0])
    driver, attempts = written(two, topic, new_job() if is_job else sink, deliveryTimeoutMs="3000")
    two.brokers[1].kill()
    try:
        driver.commit(0, attempts)
        assert seen(two, topic) == Counter(texts(0, 5))
        assert driver.sink not in nodes(driver)
    finally:
        two.brokers[1].start()


@pytest.mark.slow
@pytest.mark.parametrize("is_job", [False, True])
def test_a_decision_whose_broker_stays_away_is_not_told_as_a_failure(
    two: Cluster, topic: str, sink: str, is_job: bool
) -> None:
    driver, attempts = written(two, topic, new_job() if is_job else sink, deliveryTimeoutMs="1000")
    two.brokers[1].kill()
    try:
        for call in (driver.commit, driver.abort):
            with pytest.raises(CommitUnfinished, match="is decided, but readers do not see it yet") as raised:
                call(0, attempts)
            assert driver.sink in str(raised.value)
    finally:
        two.brokers[1].start()
    if is_job:
        assert "Do not write it again" in str(raised.value)
        with pytest.raises(CommitUnfinished, match=f"{driver.sink} has not failed: all its rows are there"):
            Driver(two, topic, driver.sink).abort(0, attempts)
    else:
        patient = Driver(two, topic, sink)
        patient.commit(0, patient.write(0, texts(0, 5)))
    check(two, topic, driver.sink, texts(0, 5))


@pytest.mark.slow
def test_a_broker_that_stays_away_holds_a_commit_up_once_however_many_branches_it_has(
    two: Cluster, topic: str, sink: str
) -> None:
    """And the branches of the other broker not at all."""
    driver = Driver(two, topic, sink, deliveryTimeoutMs="1000")
    attempts = driver.write(0, texts(0, 800), tasks=160)
    both = Counter(broker for at in attempts.values() for broker in at)
    assert both[0] > 128
    assert both[1] > 128
    two.brokers[1].kill()
    try:
        began_s = time.monotonic()
        with pytest.raises(CommitUnfinished, match="is decided, but readers do not see it yet"):
            driver.commit(0, attempts)
        took_s = time.monotonic() - began_s
        assert not [one for one in left_open(two, sink) if one.broker_id == 0], "the other broker's"
    finally:
        two.brokers[1].start()
    assert took_s < 7, "two rounds, of a second each"
    driver.commit(0, attempts)
    check(two, topic, sink, texts(0, 800))


def test_what_is_decided_is_brought_about_as_it_was_read_once(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the record should be gone then: winners are not taken for branches that lost."""
    driver = Driver(two, topic, sink)
    attempts, committer = driver.write(0, texts(0, 9)), driver.committer()
    decide = committer.store.decide

    async def decide_and_lose(*arguments: Any) -> Any:
        decision = await decide(*arguments)
        session = driver.client.cluster.session
        await session.delete(session.paths.sink_decision(sink, 0), -1)
        return decision

    monkeypatch.setattr(committer.store, "decide", decide_and_lose)
    driver.commit(0, attempts, committer)
    check(two, topic, sink, texts(0, 9))


def test_a_commit_leaves_nothing_behind_in_the_driver(two: Cluster, topic: str, sink: str) -> None:
    driver = Driver(two, topic, sink)
    driver.commit(0, driver.write(0, ["0"]))
    watches = driver.client.cluster.session._watches.waiting
    before = len(watches)
    for batch_id in range(1, 21):
        driver.commit(batch_id, driver.write(batch_id, [f"{batch_id}"], tasks=1))
    assert len(watches) == before


def test_what_an_older_batch_decided_and_a_broker_has_prepared_still_is_committed(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a promotion with an accepted loss that took its commit back, and not that it is prepared."""
    driver = Driver(two, topic, sink)
    with monkeypatch.context() as patched, pytest.raises(Died):
        driver.commit(0, driver.write(0, texts(0, 5)), dying(driver.committer(), "decided", patched))
    for batch_id in range(1, 4):
        driver.commit(batch_id, driver.write(batch_id, [f"{4 + batch_id}"]))
    check(two, topic, sink, texts(0, 8))


@pytest.mark.parametrize("is_committed", [True, False])
def test_what_an_operator_has_decided_by_hand(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    driver = Driver(two, topic, sink)
    attempts = driver.write(0, texts(0, 9))
    with monkeypatch.context() as patched, pytest.raises(Died):
        driver.commit(0, attempts, dying(driver.committer(), "decided", patched))
    with two.admin() as admin:
        opened = left_open(two, sink)
        for one in opened:
            (admin.commit_branch if is_committed else admin.rollback_branch)(one.xid, one.broker_id)
        if is_committed:
            driver.commit(0, attempts)
        else:
            with pytest.raises(CommitLost, match="2 of its branches are not committed by an operator at broker 1"):
                driver.commit(0, attempts)
            accepting = Driver(two, topic, sink, failOnDataLoss="false")
            accepting.commit(0, accepting.write(0, texts(0, 9)))
            for one in opened:
                admin.forget_branch(one.xid, one.broker_id)
    check(two, topic, sink, texts(0, 9) if is_committed else [])


@pytest.mark.parametrize("is_same_worker", [True, False])
def test_s1_8_f_at_least_once_all_of_a_second_attempt_is_stored_in_whatever_order(
    two: Cluster, topic: str, is_same_worker: bool
) -> None:
    """Nothing of it is taken for a repetition of what the first attempt has sent, from this worker or another."""
    values = texts(0, 600)
    first = Driver(two, topic, "")
    second = first if is_same_worker else Driver(two, topic, "")
    for worker, rows in ((first, values[:400]), (second, values[::-1])):
        batcher = Batcher(topic, worker.client.topic)
        shipment = worker.client.shipment()
        for at in range(0, len(rows), 100):
            some = pa.record_batch({"value": rows[at : at + 100], "key": rows[at : at + 100]})
            target_batch = [*batcher.add(some), *batcher.rest()]
            shipment.send([one.outgoing() for one in target_batch])
        shipment.wait()
    assert seen(two, topic) == Counter(values) + Counter(values[:400])


@pytest.mark.long
def test_what_was_decided_and_is_lost_is_an_error_until_it_is_accepted(tmp_path: Path, sink: str) -> None:
    with cluster(folder=tmp_path) as own, own.admin() as admin, closing_clients():
        slave = own.add_slave(0)
        own.create_topic("t", partitions=2)
        wait_until(lambda: sum(one.holds_all for one in admin.replicas()[0].replicas) == 2, 60, "the slave in sync")
        slave.kill()
        driver = Driver(own, "t", sink)
        attempts = driver.write(0, texts(0, 5))
        own.brokers[0].kill()
        slave.start(wait=False)
        wait_until(
            lambda: [bool(one.address) for one in admin.replicas()[0].replicas] == [False, True], 60, "the slave"
        )
        admin.promote(0, 1, accept_loss=True)
        for _ in range(2):
            with pytest.raises(
                CommitLost, match=f"batch 0 of the sink {sink} .* 2 of its branches are unknown to broker 0.*failOnData"
            ):
                driver.commit(0, attempts)
        accepting = Driver(own, "t", sink, failOnDataLoss="false")
        accepting.commit(0, accepting.write(0, texts(0, 5)))
        accepting.commit(1, accepting.write(1, texts(5, 10)))
        check(own, "t", sink, texts(5, 10))


@pytest.mark.slow
def test_a_commit_waits_for_zookeeper(two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(two, topic, sink)
    attempts, committer = driver.write(0, texts(0, 5)), driver.committer()
    decide, failed = committer.store.decide, 0

    async def counted(*arguments: Any) -> Any:
        nonlocal failed
        try:
            return await decide(*arguments)
        except ConnectError:
            failed += 1
            two.zookeeper_server.thaw()
            raise

    monkeypatch.setattr(committer.store, "decide", counted)
    two.zookeeper_server.freeze()
    try:
        driver.commit(0, attempts, committer)
    finally:
        two.zookeeper_server.thaw()
    assert failed, "it was away for longer than a request is waited for"
    check(two, topic, sink, texts(0, 5))


@pytest.mark.slow
def test_a_commit_waits_for_its_brokers(two: Cluster, topic: str, sink: str) -> None:
    driver = Driver(two, topic, sink)
    attempts = driver.write(0, texts(0, 40))
    two.brokers[1].kill()
    timer = _after(1.0, two.brokers[1].start)
    try:
        driver.commit(0, attempts)
    finally:
        timer()
    check(two, topic, sink, texts(0, 40))


def test_an_attempt_whose_broker_is_killed_fails_and_the_next_one_counts(two: Cluster, topic: str, sink: str) -> None:
    driver = Driver(two, topic, sink)
    name = BranchName(sink, 0, new_attempt(0, 0))
    branches = driver.client.background.run(driver.client.branches(name))
    batcher = Batcher(topic, driver.client.topic)
    config = driver.client.topic(topic)
    values = texts(0, 40)
    branches.add((one, config) for one in [*batcher.add(pa.record_batch({"value": values, "key": values}))])
    branches.add((one, config) for one in batcher.rest())
    wait_until(lambda: len(left_open(two, sink)) == 2, 20, "a branch at each broker")
    two.brokers[1].kill()
    two.brokers[1].start()
    with pytest.raises(MetamqError):
        driver.client.background.run(branches.prepare())
    driver.client.background.run(branches.give_up())
    driver.commit(0, driver.write(0, values))
    check(two, topic, sink, values)


@pytest.mark.slow
def test_a_slave_that_is_promoted_has_what_was_prepared(tmp_path: Path, sink: str) -> None:
    with cluster(brokers=2, folder=tmp_path) as own, own.admin() as admin, closing_clients():
        own.add_slave(0)
        own.create_topic("t", partitions=4, replication="sync")
        wait_until(lambda: sum(one.holds_all for one in admin.replicas()[0].replicas) == 2, 60, "the slave in sync")
        driver = Driver(own, "t", sink)
        attempts = driver.write(0, texts(0, 40))
        own.brokers[0].kill()
        admin.promote(0, 1)
        driver.commit(0, attempts)
        driver.commit(1, driver.write(1, texts(40, 50)))
        check(own, "t", sink, texts(0, 50))


def _after(delay_s: float, call: Callable[[], object]) -> Callable[[], None]:
    timer = threading.Timer(delay_s, call)
    timer.start()
    return timer.join
