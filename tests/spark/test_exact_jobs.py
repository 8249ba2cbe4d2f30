"""Batch writes, exactly once: what is left by those that failed, by late tasks and dead drivers; without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from metamq.client.producer.batching import Batcher
from metamq.spark_consumers.sink.decisions import (
    BranchName,
    NotOurs,
    new_attempt,
    new_job,
)
from metamq.testing import Cluster
from metamq.zk.errors import ConnectionLost
from tests.spark.drivers import (
    Died,
    Driver,
    check,
    closing_clients,
    dying,
    left_open,
    new_jobs,
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


def test_a_batch_write_whose_driver_died_behind_its_decision_is_ended_by_the_next(
    two: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (died,) = new_jobs(two, topic, 1)
    with monkeypatch.context() as patched, pytest.raises(Died):
        died.commit(0, died.write(0, texts(0, 5)), dying(died.committer(), "decided", patched))
    assert seen(two, topic) == Counter()
    (after,) = new_jobs(two, topic, 1)
    assert seen(two, topic) == Counter(texts(0, 5))
    after.commit(0, after.write(0, texts(5, 10)))
    for one in (died, after):
        check(two, topic, one.sink, texts(0, 10))
    assert {died.sink, after.sink} & set(nodes(after)) == {died.sink}, "its driver may live, and ask"
    with monkeypatch.context() as patched:
        patched.setattr("metamq.spark_consumers.sink.committing.GIVEN_UP_AFTER_MS", -1)
        (third,) = new_jobs(two, topic, 1)
    assert died.sink not in nodes(third)
    assert third.sink in nodes(third)
    third.abort(0, {})
    assert third.sink not in nodes(third)


def test_a_batch_write_that_another_one_has_finished_is_not_given_up(
    two: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to its decision is lost, and before it asks again another driver has committed what it decided."""
    (job,) = new_jobs(two, topic, 1)
    attempts = job.write(0, texts(0, 9))
    session = job.client.cluster.session
    multi = session.multi
    other = Driver(two, topic, new_job())

    async def lost_once(operations: Any) -> Any:
        monkeypatch.undo()
        await multi(operations)
        await other.committer().begin_job()
        raise ConnectionLost("zk", "as if by a fault", outcome="unknown")

    monkeypatch.setattr(session, "multi", lost_once)
    job.commit(0, attempts)
    check(two, topic, job.sink, texts(0, 9))
    assert job.sink not in nodes(job)


def test_what_batch_writes_have_left_prepared_is_rolled_back_by_the_next(
    two: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, done, died, runs = new_jobs(two, topic, 4)
    failed.write(0, texts(0, 9, "its message did not come "))
    failed.abort(0, {})
    done.commit(0, done.write(0, texts(0, 5)))
    late = done.client.background.run(done.client.branches(BranchName(done.sink, 0, new_attempt(0, 1))))
    batcher = Batcher(topic, done.client.topic)
    rows = pa.record_batch({"value": ["late"], "key": ["late"]})
    late.add((one, done.client.topic(topic)) for one in [*batcher.add(rows), *batcher.rest()])
    done.client.background.run(late.prepare())  # a speculative attempt's
    of_dead = died.write(0, texts(0, 9, "of a dead driver "))
    going_on = runs.write(0, texts(5, 9))
    assert left_open(two, failed.sink)
    assert left_open(two, done.sink)
    new_jobs(two, topic, 1)
    assert left_open(two, failed.sink) == left_open(two, done.sink) == []
    assert len(left_open(two, died.sink)) == len(left_open(two, runs.sink)) == 4, "they may be about to decide"
    runs.commit(0, going_on)
    with monkeypatch.context() as patched:
        patched.setattr("metamq.spark_consumers.sink.committing.GIVEN_UP_AFTER_MS", -1)
        new_jobs(two, topic, 1)
    with pytest.raises(NotOurs, match=r"was given up.*Check if"):
        died.commit(0, of_dead)
    check(two, topic, died.sink, texts(0, 9))
    with pytest.raises(NotOurs, match="was given up"):
        died.write(0, ["more"])


def test_what_is_wrong_with_others_batch_writes_does_not_matter(two: Cluster, topic: str) -> None:
    (other,) = new_jobs(two, topic, 1)
    session = other.client.cluster.session
    other.client.background.run(session.set(session.paths.sink(other.sink), b"junk", -1))
    (job,) = new_jobs(two, topic, 1)
    job.commit(0, job.write(0, texts(0, 5)))
    check(two, topic, job.sink, texts(0, 5))
    other.client.background.run(session.delete(session.paths.sink(other.sink), -1))
