"""XAResource, blocking and asyncio: the verbs and flags of XA, and what each error asks its caller to do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metamq.errors import (
    BranchMisuse,
    BranchNotKnown,
    ClosedError,
    ConfigError,
    ConnectError,
    HeuristicOutcome,
    OutcomeUnknown,
    RolledBack,
    WrongType,
)
from metamq.testing import Cluster
from metamq.tx import TM, Vote, XACode, XAResource, Xid
from metamq.wire.xa import Verb
from tests.one_zookeeper import cluster
from tests.parts import until_answered, wait_until
from tests.tx.both_faces import FACES, in_time, resource, same_rm
from tests.tx.databases import messages as seen

Open = Callable[..., Any]


@pytest.fixture
def topic(running: Cluster) -> str:
    name = f"orders-{time.monotonic_ns()}"
    running.create_topic(name, partitions=2)
    return name


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(running: Cluster, face: str) -> Iterator[Open]:
    made: list[Any] = []

    def one(**settings: Any) -> Any:
        made.append(resource(face, running.zookeeper, **settings))
        return made[-1]

    yield one
    for each in made:
        each.close()


def code_of(call: Callable[[], object]) -> int:
    with pytest.raises((BranchMisuse, BranchNotKnown, RolledBack)) as raised:
        call()
    return raised.value.code


def test_a_branch_from_its_start_to_its_commit(running: Cluster, topic: str, opened: Open) -> None:
    mq, xid = opened(), Xid.random()
    mq.start(xid)
    for value in (b"1", b"2", b"3"):
        assert mq.send(topic, value, key=b"k", headers={"h": b"v"}) is None
    mq.end(xid)
    assert seen(running, topic) == []
    assert mq.prepare(xid) is Vote.OK
    (branch,) = [one for one in mq.recover() if one.xid == xid]
    assert (branch.state, branch.messages, branch.history) == ("prepared", 3, "0:1")
    assert branch.bytes > 0
    assert abs(branch.prepared_us / 1e6 - time.time()) < 60
    mq.commit(xid)
    assert seen(running, topic) == [b"1", b"2", b"3"]


def test_suspended_work_is_resumed_and_other_work_done_meanwhile(running: Cluster, topic: str, opened: Open) -> None:
    mq, first, second = opened(), Xid.random(), Xid.random()
    mq.start(first)
    mq.send(topic, b"a1")
    mq.end(first, TM.SUSPEND)
    mq.start(second)
    mq.send(topic, b"b")
    assert code_of(lambda: mq.start(first, TM.RESUME)) == XACode.PROTO  # another one is worked in
    mq.end(second)
    assert code_of(lambda: mq.prepare(first)) == XACode.PROTO
    mq.start(first, TM.RESUME)
    mq.send(topic, b"a2")
    mq.end(first)
    mq.commit(first, one_phase=True)
    mq.rollback(second)
    assert seen(running, topic) == [b"a1", b"a2"]


def test_who_has_ended_may_join_again_and_goes_on_counting(running: Cluster, topic: str, opened: Open) -> None:
    mq, xid = opened(), Xid.random()
    mq.start(xid)
    for value in (b"1", b"2", b"3"):
        mq.send(topic, value)
        mq.end(xid)
        mq.start(xid, TM.JOIN)
    mq.end(xid)
    assert mq.prepare(xid) is Vote.OK
    mq.commit(xid)
    assert seen(running, topic) == [b"1", b"2", b"3"]


def test_suspended_work_may_be_ended_without_resuming_it(running: Cluster, topic: str, opened: Open) -> None:
    mq, kept, given_up = opened(), Xid.random(), Xid.random()
    for xid, flags in ((kept, TM.SUCCESS), (given_up, TM.FAIL)):
        mq.start(xid)
        mq.send(topic, str(xid).encode())
        mq.end(xid, TM.SUSPEND)
        assert code_of(lambda xid=xid: mq.end(xid, TM.SUSPEND)) == XACode.PROTO  # type: ignore[misc]
        mq.end(xid, flags)
    mq.commit(kept, one_phase=True)
    assert code_of(lambda: mq.commit(given_up, one_phase=True)) == XACode.RBROLLBACK
    assert seen(running, topic) == [str(kept).encode()]


def test_only_who_suspended_may_resume_and_join_is_not_resume(topic: str, opened: Open) -> None:
    mq, other, xid = opened(), opened(), Xid.random()
    mq.start(xid)
    mq.end(xid, TM.SUSPEND)
    assert code_of(lambda: other.start(xid, TM.RESUME)) == XACode.PROTO
    assert code_of(lambda: other.start(xid, TM.JOIN | TM.RESUME)) == XACode.INVAL
    assert code_of(lambda: other.start(Xid.random(), TM.JOIN)) == XACode.NOTA
    other.start(xid, TM.JOIN)
    other.send(topic, b"1")
    other.end(xid)
    mq.start(xid, TM.RESUME)
    mq.end(xid)
    mq.rollback(xid)


def test_same_rm(running: Cluster, opened: Open, face: str) -> None:
    assert same_rm(opened(), opened())
    with cluster() as another:
        elsewhere = resource(face, another.zookeeper)
        try:
            assert not same_rm(opened(), elsewhere)
        finally:
            elsewhere.close()


def test_a_time_out_is_that_of_branches_started_later(topic: str, opened: Open) -> None:
    mq, long = opened(), Xid.random()
    for wrong in (-1, float("nan"), float("inf"), 1e9):
        assert code_of(lambda wrong=wrong: mq.set_timeout(wrong)) == XACode.INVAL  # type: ignore[misc]
    mq.start(long)
    mq.send(topic, b"1")
    mq.set_timeout(0.2)
    mq.end(long)

    def worked() -> Xid:
        xid = Xid.random()
        mq.start(xid)
        mq.send(topic, b"1")
        mq.end(xid)
        return xid

    short = in_time(mq, worked)
    # No verb may touch it: any would be answered as the first.
    wait_until(lambda: (short, "rollback-only") in {(one.xid, one.state) for one in branches(mq)}, what="its end")
    assert code_of(lambda: mq.prepare(short)) == XACode.RBTIMEOUT
    mq.set_timeout(0)
    assert mq.prepare(long) is Vote.OK
    mq.rollback(long)


def branches(mq: Any) -> list[Any]:
    """All that are open at the broker."""
    if isinstance(mq, XAResource):
        return mq._background.run(mq._core._client.branches(0, all_of_them=True))
    found: list[Any] = mq._runner.run(mq.client._core._client.branches(0, all_of_them=True))
    return found


@pytest.mark.parametrize("verb", [Verb.HEURISTIC_COMMIT, Verb.HEURISTIC_ROLLBACK])
def test_what_an_operator_decided_is_told_until_it_is_forgotten(
    running: Cluster, topic: str, opened: Open, verb: Verb
) -> None:
    mq, xid = opened(), Xid.random()
    mq.start(xid)
    mq.send(topic, b"1")
    mq.end(xid)
    assert code_of(lambda: mq.forget(xid)) == XACode.NOTA
    mq.prepare(xid)
    operator = XAResource(0, running.zookeeper)
    operator._background.run(operator._core._ask(operator._core._branch_of(xid), verb))
    operator.close()
    running.broker.kill()
    running.broker.start()
    (branch,) = [one for one in until_answered(mq.recover) if one.xid == xid]
    assert branch.state == "heuristically completed"
    expected = XACode.HEURCOM if verb is Verb.HEURISTIC_COMMIT else XACode.HEURRB
    for call in (mq.commit, mq.rollback):
        with pytest.raises(HeuristicOutcome, match="an operator has") as told:
            call(xid)
        assert told.value.code == expected
    mq.forget(xid)
    assert code_of(lambda: mq.commit(xid)) == XACode.NOTA
    assert seen(running, topic) == ([b"1"] if verb is Verb.HEURISTIC_COMMIT else [])


def test_xids_of_0_1_64_and_65_bytes(topic: str, opened: Open) -> None:
    mq = opened()
    for wrong in (Xid(1, b""), Xid(1, bytes(65)), Xid(1, b"g", bytes(65)), Xid(-1, b"g"), Xid(1 << 31, b"g")):
        for call in (mq.start, mq.prepare, mq.commit, mq.rollback, mq.forget):
            assert code_of(lambda call=call, wrong=wrong: call(wrong)) == XACode.INVAL  # type: ignore[misc]
    with pytest.raises(WrongType, match="Xid"):
        mq.start("1_Zw==_")
    for right in (Xid(0, b"\xff"), Xid(0x7FFFFFFF, bytes(64), b"\xfe" * 64)):
        mq.start(right)
        mq.send(topic, b"1")
        mq.end(right)
        mq.prepare(right)
        assert [one.xid for one in mq.recover() if one.xid == right] == [right]
        mq.rollback(right)


def test_wrong_flags_and_calls_out_of_order(topic: str, opened: Open) -> None:
    mq, xid = opened(), Xid.random()
    assert code_of(lambda: mq.start(xid, TM.SUSPEND)) == XACode.INVAL
    assert code_of(lambda: mq.end(xid)) == XACode.PROTO
    assert code_of(lambda: mq.send(topic, b"1")) == XACode.PROTO
    mq.start(xid)
    assert code_of(lambda: mq.start(Xid.random())) == XACode.PROTO
    assert code_of(lambda: mq.end(xid, TM.JOIN)) == XACode.INVAL
    for call in (mq.prepare, mq.commit, mq.rollback):
        assert code_of(lambda call=call: call(xid)) == XACode.PROTO  # type: ignore[misc]
    mq.end(xid, TM.FAIL)
    mq.rollback(xid)


def test_a_closed_one_says_so_and_close_may_be_repeated(opened: Open, face: str) -> None:
    mq = opened()
    if face == "blocking":
        mq.close()
        mq.close()
        with pytest.raises(ClosedError):
            mq.start(Xid.random())
    else:
        mq._runner.run(mq.client.close())
        with pytest.raises(ClosedError):
            mq.recover()


def test_a_broker_that_is_not_there_is_not_an_empty_list(opened: Open, running: Cluster) -> None:
    mq = opened(request_timeout_s=0.5)
    running.broker.stop()
    try:
        with pytest.raises(ConnectError):
            mq.recover()
    finally:
        running.broker.start()
    assert isinstance(until_answered(mq.recover), list)


@pytest.mark.parametrize("verb", ["end", "prepare", "commit", "one-phase", "rollback"])
def test_a_lost_answer_is_unknown_and_the_call_may_be_repeated(
    topic: str, face: str, verb: str, running: Cluster, opened: Open
) -> None:
    """The line breaks behind the request, so that the broker has done it and nobody was told."""
    mq, xid = opened(), Xid.random()
    core = mq._core if isinstance(mq, XAResource) else mq.client._core
    lost = lose_answers(core)
    mq.start(xid)
    mq.send(topic, b"1")
    if verb == "end":
        lost.next = 1
        with pytest.raises(OutcomeUnknown):
            mq.end(xid)
    else:
        mq.end(xid)
    if verb == "one-phase":
        lost.next = 1
        mq.commit(xid, one_phase=True)  # it asked what became of it
        assert seen(running, topic) == [b"1"]
        return
    if verb == "prepare":
        lost.next = 1
        with pytest.raises(OutcomeUnknown):
            mq.prepare(xid)
        assert xid in {one.xid for one in mq.recover()}
    else:
        assert mq.prepare(xid) is Vote.OK
    if verb in ("commit", "rollback"):
        lost.next = 1
    getattr(mq, "rollback" if verb == "rollback" else "commit")(xid)
    assert lost.count == 1
    assert seen(running, topic) == ([] if verb == "rollback" else [b"1"])


@pytest.mark.parametrize("first", [TM.NOFLAGS, TM.JOIN, TM.RESUME])
@pytest.mark.parametrize("last", [TM.SUCCESS, TM.SUSPEND])
def test_work_that_begins_or_ends_without_an_answer_may_be_called_again(
    running: Cluster, topic: str, opened: Open, face: str, first: TM, last: TM
) -> None:
    mq, other, xid = opened(request_timeout_s=1.0), opened(), Xid.random()
    core = mq._core if isinstance(mq, XAResource) else mq.client._core
    if first is TM.JOIN:
        other.start(xid)
        other.end(xid, TM.SUSPEND)
    elif first is TM.RESUME:
        mq.start(xid)
        mq.end(xid, TM.SUSPEND)
    lost = lose_answers(core)
    lost.next = 1
    with pytest.raises(OutcomeUnknown):
        mq.start(xid, first)
    mq.start(xid, first)
    mq.send(topic, b"1")
    lost.next = 1
    with pytest.raises(OutcomeUnknown):
        mq.end(xid, last)
    mq.end(xid, last)
    if last is TM.SUSPEND:
        mq.start(xid, TM.RESUME)
        mq.send(topic, b"2")
        mq.end(xid)
    if first is TM.JOIN:
        other.end(xid)
    mq.commit(xid, one_phase=True)
    assert seen(running, topic) == ([b"1"] if last is TM.SUCCESS else [b"1", b"2"])


def test_a_start_that_is_called_again_takes_no_other_branch_for_its_own(topic: str, opened: Open, face: str) -> None:
    mq, other, xid = opened(request_timeout_s=1.0), opened(), Xid.random()
    core = mq._core if isinstance(mq, XAResource) else mq.client._core
    once = core._client._once

    async def never_arrives(*_: Any, **__: Any) -> Any:
        raise ConnectError("the broker", "the line broke", outcome="unknown")

    core._client._once = never_arrives
    with pytest.raises(OutcomeUnknown):
        mq.start(xid)
    core._client._once = once
    other.start(xid)
    assert code_of(lambda: mq.start(xid)) == XACode.DUPID
    other.end(xid)
    other.rollback(xid)


class Lost:
    """Whose answers do not come."""

    next = 0
    count = 0


def lose_answers(core: Any) -> Lost:
    """From now on `next` answers to the resource are thrown away when they are there."""
    lost, client = Lost(), core._client
    once = client._once

    async def without_answer(*arguments: Any) -> Any:
        reply = await once(*arguments)
        if lost.next:
            lost.next -= 1
            lost.count += 1
            raise ConnectError("the broker", "the line broke", outcome="unknown")
        return reply

    client._once = without_answer
    return lost


def test_what_failed_on_its_way_is_sent_again_or_never_committed(
    running: Cluster, topic: str, opened: Open, face: str
) -> None:
    """A batch that did not go out is not left out of the branch in silence."""
    mq, xid = opened(batch_bytes=100), Xid.random()
    core = mq._core if isinstance(mq, XAResource) else mq.client._core
    mq.start(xid)
    mq.send(topic, b"0" * 60, partition="0-0")
    once, failures = core._client._once, itertools.count()

    async def fails_twice(*arguments: Any, **named: Any) -> Any:
        if next(failures) < 2:
            raise ConfigError("nothing was done")
        return await once(*arguments, **named)

    core._client._once = fails_twice
    with pytest.raises(ConfigError):
        mq.send(topic, b"1" * 60, partition="0-0")
    with pytest.raises(ConfigError):
        mq.end(xid)
    mq.end(xid)
    assert mq.prepare(xid) is Vote.OK
    mq.commit(xid)
    assert seen(running, topic) == [b"0" * 60, b"1" * 60]


def test_a_batch_that_was_lost_lets_the_branch_fail(running: Cluster, topic: str, opened: Open, face: str) -> None:
    mq, xid = opened(), Xid.random()
    core = mq._core if isinstance(mq, XAResource) else mq.client._core
    mq.start(xid)
    for number in range(5):
        mq.send(topic, b"%d" % number, partition=f"0-{number % 2}")
    assert core._current is not None
    core._current.staging.rest(0)
    mq.end(xid)
    assert code_of(lambda: mq.prepare(xid)) == XACode.RBPROTO
    assert seen(running, topic) == []
