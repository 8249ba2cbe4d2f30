"""Branches at a real broker: what others see of them, and what a restart, a lost answer or a late one does."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from metamq.errors import BranchMisuse, BranchNotKnown, RolledBack
from metamq.testing import Cluster
from metamq.tx import TM, Vote, XACode, XAResource, Xid
from tests.parts import read_to_end, until_answered, wait_until
from tests.tx.both_faces import in_time


@pytest.fixture
def topic(running: Cluster) -> str:
    name = f"orders-{time.monotonic_ns()}"
    running.create_topic(name, partitions=4)
    return name


@pytest.fixture
def mq(running: Cluster) -> Iterator[XAResource]:
    with XAResource(0, running.zookeeper) as resource:
        yield resource


@pytest.fixture
def other(running: Cluster) -> Iterator[XAResource]:
    with XAResource(0, running.zookeeper) as resource:
        yield resource


def seen(running: Cluster, topic: str) -> list[bytes]:
    """All that a new reader finds, by partition and offset."""
    with running.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
        found = [(message.partition, message.offset, message.value) for message in read_to_end(consumer)]
    return [value for _partition, _offset, value in sorted(found)]


def work(mq: XAResource, topic: str, *values: bytes, xid: Xid | None = None) -> Xid:
    """A branch in which these were sent, and which nobody works in any more."""
    xid = xid or Xid.random()
    mq.start(xid)
    for value in values:
        mq.send(topic, value, key=b"k")
    mq.end(xid)
    return xid


def test_nobody_sees_what_is_not_committed(running: Cluster, mq: XAResource, topic: str) -> None:
    xid = work(mq, topic, b"1", b"2", b"3")
    assert seen(running, topic) == []
    assert mq.prepare(xid) is Vote.OK
    assert seen(running, topic) == []
    mq.commit(xid)
    assert seen(running, topic) == [b"1", b"2", b"3"]


def test_one_phase(running: Cluster, mq: XAResource, topic: str) -> None:
    xid = work(mq, topic, b"1", b"2")
    mq.commit(xid, one_phase=True)
    assert seen(running, topic) == [b"1", b"2"]


@pytest.mark.parametrize("prepared", [False, True])
def test_what_is_rolled_back_is_never_seen(running: Cluster, mq: XAResource, topic: str, prepared: bool) -> None:
    xid = work(mq, topic, b"1")
    if prepared:
        mq.prepare(xid)
    mq.rollback(xid)
    with pytest.raises(BranchNotKnown):
        mq.commit(xid)
    running.broker.kill()
    running.broker.start()
    assert seen(running, topic) == []
    assert xid not in {branch.xid for branch in until_answered(mq.recover)}


def test_an_empty_branch_is_read_only(mq: XAResource, topic: str) -> None:
    xid = work(mq, topic)
    assert mq.prepare(xid) is Vote.RDONLY
    with pytest.raises(BranchNotKnown):
        mq.commit(xid)


def test_two_sessions_commit_together(running: Cluster, mq: XAResource, other: XAResource, topic: str) -> None:
    xid = Xid.random()
    mq.start(xid)
    with pytest.raises(BranchMisuse) as duplicate:
        other.start(xid)
    assert duplicate.value.code == XACode.DUPID
    other.start(xid, TM.JOIN)
    mq.send(topic, b"mine", key=b"a")
    other.send(topic, b"theirs", key=b"b")
    other.end(xid)
    mq.end(xid)
    assert mq.is_same_rm(other)
    assert mq.prepare(xid) is Vote.OK
    other.commit(xid)
    assert sorted(seen(running, topic)) == [b"mine", b"theirs"]


def test_failed_work_cannot_be_committed(mq: XAResource, topic: str) -> None:
    xid = Xid.random()
    mq.start(xid)
    mq.send(topic, b"1")
    mq.end(xid, TM.FAIL)
    with pytest.raises(RolledBack):
        mq.prepare(xid)
    with pytest.raises(BranchNotKnown):
        mq.rollback(xid)


@pytest.mark.parametrize("gtrid", [b"x", b"\x00\xff\x80" * 21, b"\xc3\xa9" * 32])
def test_ids_are_opaque_bytes(mq: XAResource, topic: str, gtrid: bytes) -> None:
    xid = work(mq, topic, b"1", xid=Xid(7, gtrid, b"" if len(gtrid) == 1 else bytes(64)))
    mq.prepare(xid)
    assert [branch.xid for branch in mq.recover() if branch.xid == xid] == [xid]
    assert Xid.parse(str(xid)) == xid
    mq.rollback(xid)


def test_a_branch_past_its_time_is_rolled_back_and_a_prepared_one_never(
    running: Cluster, mq: XAResource, topic: str
) -> None:
    def prepare() -> Xid:
        xid = work(mq, topic, b"prepared")
        mq.prepare(xid)
        return xid

    prepared = in_time(mq, prepare)
    idle = in_time(mq, lambda: work(mq, topic, b"idle"))
    wait_until(lambda: (idle, "rollback-only") in _states(mq), what="the time-out")
    with pytest.raises(RolledBack) as over:
        mq.prepare(idle)
    assert over.value.code == XACode.RBTIMEOUT
    mq.commit(prepared)
    assert seen(running, topic) == [b"prepared"]


def _states(mq: XAResource) -> set[tuple[Xid, str]]:
    known = mq._background.run(mq._core._client.branches(0, all_of_them=True))
    return {(branch.xid, branch.state) for branch in known}


def test_a_prepared_branch_takes_no_more(mq: XAResource, topic: str) -> None:
    xid = work(mq, topic, b"1")
    mq.prepare(xid)
    with pytest.raises(BranchMisuse):
        mq.start(xid, TM.JOIN)
    mq.rollback(xid)


def test_recover_gives_all_of_them_once(mq: XAResource, topic: str) -> None:
    xids = [work(mq, topic, b"1") for _ in range(3)]
    for xid in xids:
        mq.prepare(xid)
    assert {branch.xid for branch in mq.recover()} >= set(xids)
    assert mq.recover(TM.NOFLAGS) == []
    assert {branch.messages for branch in mq.recover() if branch.xid in xids} == {1}
    for xid in xids:
        mq.rollback(xid)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_prepared_branch_outlives_the_broker(running: Cluster, mq: XAResource, topic: str, how: str) -> None:
    prepared, idle = work(mq, topic, b"1", b"2"), work(mq, topic, b"idle")
    mq.prepare(prepared)
    getattr(running.broker, how)()
    running.broker.start()
    found = {branch.xid: branch for branch in until_answered(mq.recover)}
    assert found[prepared].messages == 2
    assert idle not in found
    mq.commit(prepared)
    with pytest.raises(BranchNotKnown):
        mq.prepare(idle)
    assert seen(running, topic) == [b"1", b"2"]


def test_a_repeated_commit_is_answered_as_the_first(running: Cluster, mq: XAResource, topic: str) -> None:
    xid = work(mq, topic, b"1")
    mq.prepare(xid)
    mq.commit(xid)
    mq.commit(xid)
    running.broker.kill()
    running.broker.start()
    mq.commit(xid)
    with pytest.raises(BranchNotKnown) as finished:
        mq.rollback(xid)
    assert finished.value.finished == "committed"
    with pytest.raises(BranchMisuse):
        mq.start(xid)
    assert seen(running, topic) == [b"1"]


def test_a_large_branch_in_many_batches(running: Cluster, topic: str) -> None:
    with XAResource(0, running.zookeeper, batch_bytes=1000) as mq:
        values = [b"%06d" % number for number in range(5000)]
        xid = work(mq, topic, *values)
        mq.prepare(xid)
        mq.commit(xid)
    assert seen(running, topic) == values


def test_plain_messages_and_branches_side_by_side(running: Cluster, mq: XAResource, topic: str) -> None:
    with running.producer() as producer:
        xid = work(mq, topic, b"in a branch")
        producer.send(topic, b"plain", key=b"k").result()
        mq.commit(xid, one_phase=True)
        producer.send(topic, b"after", key=b"k").result()
    assert seen(running, topic) == [b"plain", b"in a branch", b"after"]


@pytest.mark.slow
def test_what_nobody_is_behind_any_more_is_rolled_back(running: Cluster, mq: XAResource, topic: str) -> None:
    with XAResource(0, running.zookeeper) as gone:
        idle, prepared = work(gone, topic, b"idle"), work(gone, topic, b"prepared")
        active = Xid.random()
        gone.start(active)
        gone.send(topic, b"active")
        gone.prepare(prepared)
    wait_until(lambda: not {(idle, "idle"), (active, "active")} & _states(mq), what="its branches given up")
    with pytest.raises(RolledBack) as lost:
        mq.prepare(idle)
    assert lost.value.code == XACode.RBCOMMFAIL
    mq.commit(prepared)
    assert seen(running, topic) == [b"prepared"]
