"""What becomes of branches, by value, and decisions in a real ZooKeeper; tasks and drivers without Spark.

The cases of an exactly-once sink that are easily wrong: what a replay, a second driver, a late abort, a lost answer and
a deleted checkpoint do.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from metamq.errors import ConfigError, MetamqError
from metamq.spark_consumers.committing import Committer
from metamq.spark_consumers.decisions import BranchName, Decision, SinkState, ends, name_of, new_attempt, new_job
from metamq.spark_consumers.exact_sink import checkpoint_id, named
from metamq.spark_consumers.gathering import Gatherer
from metamq.spark_consumers.sink_client import SinkClient
from metamq.spark_consumers.sink_options import parse_sink_options
from metamq.testing import Cluster, cluster
from metamq.wire.xa import Verb, Xid
from metamq.zk.errors import BadVersion, ConnectionLost
from tests.parts import wait_until

QUERY = "3b5bd2a1-8e9a-4b52-9d63-6f2c5d0b7a11"
_numbers = itertools.count()

Attempts = dict[str, Mapping[int, str]]


def test_names_are_found_again_and_others_are_nobodys() -> None:
    name = BranchName(QUERY, 2**63 - 1, new_attempt(99_999, 3))
    assert name_of(name.at(99_999)) == name
    assert name_of(BranchName(new_job(), 0, "0.0.a").at(1)) is not None
    for xid in (
        Xid(1, b"spark:a:0", b"0.0.a.1"),
        Xid.random(b"spark:"),
        Xid.random(b"db:x:"),
        Xid(0x4D51, b"spark:a:x"),
    ):
        assert name_of(xid) is None


def test_what_is_decided_survives_its_json() -> None:
    decision = Decision({"0.0.ab": {0: "0:1", 3: "3:1"}, "1.2.cd": {0: "0:1"}})
    assert Decision.from_json(decision.to_json()) == decision
    assert SinkState.from_json(SinkState(QUERY, 17).to_json()) == SinkState(QUERY, 17)


def test_each_branch_has_one_end_or_none() -> None:
    def branch(batch_id: int, attempt: str, sink: str = "s") -> tuple[Xid, int]:
        return BranchName(sink, batch_id, attempt).at(0), 0

    decisions = {4: Decision({"a": {0: ""}}), 5: Decision({"a": {0: ""}})}
    left = ends(
        "s",
        5,
        decisions,
        [branch(5, "a"), branch(5, "b"), branch(4, "a"), branch(4, "b"), branch(3, "a"), branch(6, "a"),
         branch(5, "a", "other"), (Xid.random(), 0)],
    )  # fmt: skip
    assert left.commit == [branch(5, "a"), branch(4, "a")]
    assert left.rollback == [branch(5, "b"), branch(4, "b"), branch(3, "a")]


def test_a_task_that_is_not_told_its_query_or_batch(tmp_path: Any) -> None:
    assert named(None, "q", "7") == ("q", 7)
    assert named("mine", None, "7") == ("mine", 7)
    with pytest.raises(ConfigError, match="sinkId"):
        named(None, None, "7")
    with pytest.raises(ConfigError, match="at_least_once"):
        named("mine", "q", None)
    (tmp_path / "metadata").write_text('{"id":"the-id"}')
    assert checkpoint_id(str(tmp_path)) == checkpoint_id(f"file://{tmp_path}") == "the-id"
    with pytest.raises(ConfigError, match="the query's id is not in its checkpoint"):
        checkpoint_id(None)


# -- with ZooKeeper and two brokers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """Two brokers."""
    with cluster(brokers=2) as started:
        yield started


_clients: list[SinkClient] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _clients:
        _clients.pop().close()


class Died(Exception):
    """The driver does nothing more."""


class Driver:
    """A driver and its tasks, as Spark would call them."""

    def __init__(self, running: Cluster, topic: str, sink: str, identity: str = QUERY) -> None:
        options = parse_sink_options(
            {"zookeeper": running.zookeeper, "topic": topic, "delivery": "exactly_once"}, streaming=True
        )
        self.client = SinkClient(options)
        _clients.append(self.client)
        self.sink = sink
        self.identity = identity

    def write(self, batch_id: int, values: list[str], tasks: int = 2) -> Attempts:
        """What successful tasks hand to the driver."""
        attempts: Attempts = {}
        for task in range(tasks):
            name = BranchName(self.sink, batch_id, new_attempt(task, 0))
            branches = self.client.background.run(self.client.branches(name))
            gatherer = Gatherer(self.client.options.topic, self.client.topic)
            some = values[task::tasks]
            rows = pa.record_batch({"value": some, "key": some})
            branches.add((one, self.client.topic(one.target.topic)) for one in [*gatherer.add(rows), *gatherer.rest()])
            attempts[name.attempt] = self.client.background.run(branches.prepare())
        return attempts

    def committer(self) -> Committer:
        return self.client.committer(self.sink, self.identity)

    def commit(self, batch_id: int, attempts: Attempts, committer: Committer | None = None) -> None:
        self.client.background.run((committer or self.committer()).commit(batch_id, attempts))

    def abort(self, batch_id: int, attempts: Attempts) -> None:
        self.client.background.run(self.committer().abort(batch_id, attempts))


@pytest.fixture
def topic(two: Cluster) -> str:
    name = f"exact-{next(_numbers)}"
    two.create_topic(name, partitions=4)
    return name


@pytest.fixture
def sink() -> str:
    return f"sink-{next(_numbers)}"


def texts(first: int, end: int, tag: str = "") -> list[str]:
    return [f"{tag}{number}" for number in range(first, end)]


def seen(running: Cluster, topic: str) -> Counter[str]:
    with running.consumer(group=f"g{next(_numbers)}", topics=[topic], start="earliest", idle_timeout_s=0.5) as consumer:
        return Counter(message.value.decode() for message in consumer)


def check(running: Cluster, topic: str, sink: str, values: list[str]) -> None:
    """Each once, and no branch of the sink is left."""
    assert seen(running, topic) == Counter(values)
    assert _open(running, sink) == []


def _dying(committer: Committer, point: str, monkeypatch: pytest.MonkeyPatch) -> Committer:
    """It dies at a point of commit()."""
    decide, client = committer.store.decide, "metamq.spark_consumers.committing.TxClient"

    async def dying_decide(*arguments: Any) -> Any:
        if point == "prepared":
            raise Died
        await decide(*arguments)
        raise Died

    from metamq.client.branches import TxClient

    class DyingClient(TxClient):
        commits = 0

        async def ask(self, branch: Any, verbs: Any, *rest: Any, **fields: Any) -> Any:
            if verbs[-1] is Verb.COMMIT:
                DyingClient.commits += 1
                if DyingClient.commits > 1:
                    raise Died
            return await super().ask(branch, verbs, *rest, **fields)

        async def branches(self, broker_id: int, *, all_of_them: bool = False) -> Any:
            raise Died

    class DyingAtTheSweep(TxClient):
        branches = DyingClient.branches

    if point in ("prepared", "decided"):
        monkeypatch.setattr(committer.store, "decide", dying_decide)
    elif point in ("one committed", "all committed"):
        monkeypatch.setattr(client, DyingClient if point == "one committed" else DyingAtTheSweep)
    return committer


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
            first.commit(1, attempts, _dying(first.committer(), point, patched))
    second = Driver(two, topic, sink)
    second.commit(1, second.write(1, texts(10, 60)[::-1], tasks=3))
    check(two, topic, sink, texts(0, 60))
    second.commit(2, second.write(2, texts(60, 70)))
    check(two, topic, sink, texts(0, 70))


def test_s1_8_a_the_list_of_the_first_decision_counts_not_the_replays_branches(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Driver(two, topic, sink), Driver(two, topic, sink)
    attempts, committer = first.write(0, texts(0, 9, "first ")), _dying(first.committer(), "decided", monkeypatch)
    with pytest.raises(Died):
        first.commit(0, attempts, committer)
    assert seen(two, topic) == Counter()
    second.commit(0, second.write(0, texts(0, 9, "second ")))
    check(two, topic, sink, texts(0, 9, "first "))


def test_s1_8_b_of_two_drivers_one_decides(two: Cluster, topic: str, sink: str) -> None:
    drivers = [Driver(two, topic, sink) for _ in range(2)]
    written = [driver.write(0, texts(0, 20, f"{tag} ")) for tag, driver in enumerate(drivers)]

    async def both() -> None:
        await asyncio.gather(*(one.committer().commit(0, of) for one, of in zip(drivers, written, strict=True)))

    drivers[0].client.background.run(both())
    found = seen(two, topic)
    assert found in (Counter(texts(0, 20, "0 ")), Counter(texts(0, 20, "1 ")))
    check(two, topic, sink, list(found))


def test_s1_8_b_a_driver_that_was_paused_finds_its_batch_over_also_when_its_decision_is_removed(
    two: Cluster, topic: str, sink: str
) -> None:
    paused, living = Driver(two, topic, sink), Driver(two, topic, sink)
    old = paused.write(0, texts(0, 5, "old "))
    for batch_id in range(3):
        living.commit(batch_id, living.write(batch_id, texts(batch_id * 5, batch_id * 5 + 5)))
    left = living.client.background.run(living.committer().store.decisions(sink))
    assert set(left) == {2}, "old decisions are removed"
    paused.commit(0, old)
    paused.commit(1, paused.write(1, texts(5, 10, "late ")))  # its tasks went on after it woke
    check(two, topic, sink, texts(0, 15))


def test_s1_8_c_an_abort_after_the_decision_brings_it_about(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(two, topic, sink)
    attempts = driver.write(0, texts(0, 9))
    with pytest.raises(Died):
        driver.commit(0, attempts, _dying(driver.committer(), "decided", monkeypatch))
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


def test_what_is_under_way_when_a_batch_is_aborted_decides_nothing_any_more(
    two: Cluster, topic: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the decision's request is lost, and the request arrives after the abort."""
    driver = Driver(two, topic, sink)
    attempts = driver.write(0, texts(0, 9))
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
    attempts = again.write(0, texts(5, 10))
    with pytest.raises(
        ConfigError, match=r"is of the query checkpoint-1, and this one is checkpoint-2.* another sinkId"
    ):
        again.commit(0, attempts)
    again.abort(0, attempts)  # as Spark does
    check(two, topic, sink, texts(0, 5))


def test_a_batch_write_whose_driver_died_behind_its_decision_is_ended_by_the_next(
    two: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Driver(two, topic, job, job) for job in (new_job(), new_job())]
    for one in jobs:
        one.client.background.run(one.committer().store.begin(one.sink, one.sink))
    with monkeypatch.context() as patched, pytest.raises(Died):
        jobs[0].commit(0, jobs[0].write(0, texts(0, 5)), _dying(jobs[0].committer(), "decided", patched))
    assert seen(two, topic) == Counter()
    jobs[1].commit(0, jobs[1].write(0, texts(5, 10)))
    jobs[1].client.background.run(jobs[1].committer().finish_jobs())
    for one in jobs:
        check(two, topic, one.sink, texts(0, 10))
    assert jobs[1].client.background.run(jobs[1].committer().store.jobs()) == []


def test_a_commit_waits_for_zookeeper(two: Cluster, topic: str, sink: str) -> None:
    driver = Driver(two, topic, sink)
    attempts = driver.write(0, texts(0, 5))
    two.zookeeper_server.freeze()
    timer = _after(2.0, two.zookeeper_server.thaw)
    try:
        driver.commit(0, attempts)
    finally:
        timer()
    check(two, topic, sink, texts(0, 5))


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
    gatherer = Gatherer(topic, driver.client.topic)
    config = driver.client.topic(topic)
    values = texts(0, 40)
    branches.add((one, config) for one in [*gatherer.add(pa.record_batch({"value": values, "key": values}))])
    branches.add((one, config) for one in gatherer.rest())
    wait_until(lambda: len(_open(two, sink)) == 2, 20, "a branch at each broker")
    two.brokers[1].kill()
    two.brokers[1].start()
    with pytest.raises(MetamqError):
        driver.client.background.run(branches.prepare())
    driver.client.background.run(branches.give_up())
    driver.commit(0, driver.write(0, values))
    check(two, topic, sink, values)


def test_a_slave_that_is_promoted_has_what_was_prepared(tmp_path: Path, sink: str) -> None:
    with cluster(brokers=2, folder=tmp_path) as own, own.admin() as admin:
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
        while _clients:
            _clients.pop().close()


def _open(running: Cluster, sink: str) -> list[Any]:
    with running.admin() as admin:
        return [one for one in admin.transactions().branches if (name_of(one.xid) or ("",))[0] == sink]


def _after(delay_s: float, call: Callable[[], object]) -> Callable[[], None]:
    timer = threading.Timer(delay_s, call)
    timer.start()
    return timer.join
