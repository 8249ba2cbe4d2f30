"""The scenarios of transactions that a client sees, one by one, through the blocking and the asyncio XAResource."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metamq.client.net.branches import Branch
from metamq.errors import BranchMisuse, BranchNotKnown, HeuristicOutcome, RolledBack
from metamq.tx import TM, Vote, XACode, XAResource, Xid
from metamq.tx.store.table import BranchPhase
from metamq.wire.columns import encode
from metamq.wire.commands import PutEntry, Tx, TxReply, TxResult
from metamq.wire.xa import Verb
from tests.parts import SLOW_S, read_to_end, wait_until
from tests.tx.both_faces import FACES, in_time, resource, same_rm
from tests.tx.test_table import EXPECTED, SUSPENDED

if TYPE_CHECKING:
    from tests.tx.conftest import Shop

PLACES = ("0-0", "0-1")


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(shop: Shop, face: str) -> Iterator[Callable[[], Any]]:
    made: list[Any] = []

    def one() -> Any:
        made.append(resource(face, shop.cluster.zookeeper))
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.fixture
def mq(opened: Callable[[], Any]) -> Any:
    return opened()


@pytest.fixture
def topic(shop: Shop) -> str:
    return shop.topic()


def work(mq: Any, topic: str, *values: bytes, xid: Xid | None = None) -> Xid:
    xid = xid or Xid.random()
    mq.start(xid)
    for number, value in enumerate(values):
        assert mq.send(topic, value, partition=PLACES[number % 2]) is None  # no offset: there is none yet
    mq.end(xid)
    return xid


def in_order(shop: Shop, topic: str) -> dict[str, list[tuple[int, bytes]]]:
    """(offset, value) by partition."""
    found: dict[str, list[tuple[int, bytes]]] = {}
    with shop.cluster.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
        for message in read_to_end(consumer):
            found.setdefault(message.partition, []).append((message.offset, message.value))
    return found


def journal_bytes(shop: Shop) -> int:
    folder = next(path for path in shop.cluster.broker.data.rglob("*") if "~transactions" in path.name)
    return sum(path.stat().st_size for path in Path(folder).rglob("*.log"))


def test_scenario_1_what_is_sent_is_seen_by_nobody_and_has_no_offset(shop: Shop, mq: Any, topic: str) -> None:
    xid = Xid.random()
    mq.start(xid)
    for _ in range(3):
        assert mq.send(topic, b"1") is None
    assert shop.seen(topic) == []
    mq.end(xid)
    assert shop.seen(topic) == []
    mq.rollback(xid)


def test_scenario_2_one_phase_shows_all_once_in_a_row_and_in_order(shop: Shop, mq: Any, topic: str) -> None:
    values = [b"%d" % number for number in range(8)]
    mq.commit(work(mq, topic, *values), one_phase=True)
    assert in_order(shop, topic) == {
        "0-0": list(enumerate(values[::2])), "0-1": list(enumerate(values[1::2])),
    }  # fmt: skip


def test_scenario_3_what_is_rolled_back_is_never_seen_and_not_known(shop: Shop, mq: Any, topic: str) -> None:
    xid = work(mq, topic, b"1", b"2", b"3")
    mq.rollback(xid)
    for call in (mq.commit, mq.rollback, mq.prepare, mq.forget):
        with pytest.raises(BranchNotKnown) as raised:
            call(xid)
        assert raised.value.code == XACode.NOTA
    assert shop.seen(topic) == []


def test_scenario_4_two_phases_show_it_once(shop: Shop, mq: Any, topic: str) -> None:
    xid = work(mq, topic, b"1", b"2")
    assert mq.prepare(xid) is Vote.OK
    assert shop.seen(topic) == []
    mq.commit(xid)
    assert shop.seen(topic) == [b"1", b"2"]


def test_scenario_5_a_branch_without_messages_is_read_only_and_not_in_the_journal(
    shop: Shop, mq: Any, topic: str
) -> None:
    mq.commit(work(mq, topic, b"1"), one_phase=True)
    before = journal_bytes(shop)
    xid = work(mq, topic)
    assert mq.prepare(xid) is Vote.RDONLY
    with pytest.raises(BranchNotKnown) as raised:
        mq.commit(xid)
    assert raised.value.code == XACode.NOTA
    assert 0 < journal_bytes(shop) == before


class Wire:
    """Requests as they are, to a real broker."""

    def __init__(self, shop: Shop, topic: str) -> None:
        self._client = XAResource(0, shop.cluster.zookeeper)
        self._run = self._client._background.run
        core = self._client._core
        assert core._cluster is not None
        self._topic = topic
        self._topic_id = self._run(core._cluster.topic(topic)).id

    def ask(self, xid: Xid, verb: Verb, *, epoch: int = 0, session: str = "a", first: int = 0, count: int = -1) -> Any:
        body = bytearray(encode([b"value"], base_timestamp_us=1_700_000_000_000_000))
        entries = [PutEntry(self._topic, self._topic_id, 0, len(body))] if verb is Verb.SEND else []
        header = Tx([*xid], epoch, session, [int(verb)], 3_600_000, count, first, entries)
        once = self._client._core._client._once
        reply: TxReply = self._run(
            once(Branch(xid, 0, session), header, [body] if entries else [], time.monotonic() + SLOW_S)
        )
        return TxResult(*reply.results[0][: len(TxResult._fields)])

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def wire(shop: Shop, topic: str) -> Iterator[Wire]:
    made = Wire(shop, topic)
    yield made
    made.close()


WAYS = {
    BranchPhase.NONE: [],
    BranchPhase.ACTIVE: [Verb.START, Verb.SEND],
    BranchPhase.IDLE: [Verb.START, Verb.SEND, Verb.END],
    BranchPhase.PREPARED: [Verb.START, Verb.SEND, Verb.END, Verb.PREPARE],
    BranchPhase.ROLLBACK_ONLY: [Verb.START, Verb.SEND, Verb.FAIL],
    BranchPhase.HEURISTIC: [Verb.START, Verb.SEND, Verb.END, Verb.PREPARE, Verb.HEURISTIC_COMMIT],
    BranchPhase.DECIDED: [Verb.START, Verb.SEND, Verb.END, Verb.DECIDE],
}


@pytest.mark.slow
def test_scenario_6_each_verb_in_each_state_has_the_code_of_the_table(shop: Shop, wire: Wire) -> None:
    """At a real broker; tests/tx/test_table.py asks the store alone."""
    for state in BranchPhase:
        for verb in Verb:
            xid = Xid.random()
            suspended = (verb, state) in SUSPENDED
            for step in [Verb.START, Verb.SEND, Verb.SUSPEND] if suspended else WAYS[state]:
                assert wire.ask(xid, step).code == XACode.OK
            if suspended and state is BranchPhase.ACTIVE:
                assert wire.ask(xid, Verb.JOIN, session="b").code == XACode.OK
            other = (verb, state) == (Verb.JOIN, BranchPhase.ACTIVE)
            code, follows = EXPECTED[state].get(verb, (XACode.PROTO, state))
            got = wire.ask(xid, verb, session="b" if other else "a", first=1 if verb is Verb.SEND else 0).code
            assert got == code, (verb, state)
            states = {one.xid: one.state for one in shop.branches(0)}
            assert states.get(xid, BranchPhase.NONE.value) == follows.value, (verb, state)
            for end in (Verb.RESOLVE, Verb.ROLLBACK, Verb.FORGET):
                wire.ask(xid, end)


def test_scenario_7_a_known_id_is_refused_and_joined_by_another_session(
    shop: Shop, opened: Callable[[], Any], topic: str
) -> None:
    mq, other, xid = opened(), opened(), Xid.random()
    mq.start(xid)
    with pytest.raises(BranchMisuse) as raised:
        other.start(xid)
    assert raised.value.code == XACode.DUPID
    assert same_rm(mq, other)
    other.start(xid, TM.JOIN)
    mq.send(topic, b"mine")
    other.send(topic, b"theirs")
    mq.end(xid)
    other.end(xid)
    mq.commit(xid, one_phase=True)
    assert shop.seen(topic) == [b"mine", b"theirs"]


@pytest.mark.parametrize("one_phase", [True, False])
def test_scenario_8_failed_work_is_rolled_back_and_gone(shop: Shop, mq: Any, topic: str, one_phase: bool) -> None:
    xid = Xid.random()
    mq.start(xid)
    mq.send(topic, b"1")
    mq.end(xid, TM.FAIL)
    with pytest.raises(RolledBack) as raised:
        mq.commit(xid, one_phase=True) if one_phase else mq.prepare(xid)
    assert XACode.RBROLLBACK <= raised.value.code <= XACode.RBTRANSIENT
    with pytest.raises(BranchNotKnown):
        mq.rollback(xid)
    assert shop.seen(topic) == []


@pytest.mark.parametrize("size", [0, 1, 64, 65])
def test_scenario_9_ids_are_bytes_of_1_to_64(mq: Any, topic: str, size: int) -> None:
    xid = Xid(7, b"\xff\x00\xc3"[:1] * size, b"\x80" * min(size, 64))
    if size in (0, 65):
        with pytest.raises(BranchMisuse) as raised:
            mq.start(xid)
        assert raised.value.code == XACode.INVAL
        return
    work(mq, topic, b"1", xid=xid)
    mq.prepare(xid)
    assert [one.xid for one in mq.recover() if one.xid == xid] == [xid]
    mq.rollback(xid)


def test_scenario_10_time_ends_what_is_idle_and_never_what_is_prepared(shop: Shop, mq: Any, topic: str) -> None:
    idle, prepared = in_time(mq, lambda: work(mq, topic, b"1")), Xid.random()
    mq.start(prepared, timeout_s=600)
    mq.send(topic, b"2")
    mq.end(prepared)
    mq.prepare(prepared)
    wait_until(lambda: (idle, "rollback-only") in {(one.xid, one.state) for one in shop.branches(0)}, what="its end")
    with pytest.raises(RolledBack) as raised:
        mq.prepare(idle)
    assert raised.value.code == XACode.RBTIMEOUT
    mq.commit(prepared)
    assert shop.seen(topic) == [b"2"]


def test_scenario_12_what_comes_late_or_twice_does_not_change_a_prepared_branch(shop: Shop, wire: Wire) -> None:
    xid = Xid.random()
    for verb in (Verb.START, Verb.SEND):
        wire.ask(xid, verb)
    assert wire.ask(xid, Verb.SEND).code == XACode.OK  # twice: taken once
    wire.ask(xid, Verb.END)
    assert wire.ask(xid, Verb.PREPARE, count=1).code == XACode.OK
    for first in (0, 1):
        assert wire.ask(xid, Verb.SEND, first=first).code == XACode.PROTO
    (branch,) = [one for one in shop.branches(0) if one.xid == xid]
    assert (branch.state, branch.messages) == ("prepared", 1)
    wire.ask(xid, Verb.ROLLBACK)


def test_scenario_13_a_count_that_does_not_fit_is_rolled_back(shop: Shop, wire: Wire, topic: str) -> None:
    xid = Xid.random()
    wire.ask(xid, Verb.START)
    for number in range(4):
        wire.ask(xid, Verb.SEND, first=number)
    wire.ask(xid, Verb.END)
    assert wire.ask(xid, Verb.PREPARE, count=5).code == XACode.RBPROTO
    wire.ask(xid, Verb.ROLLBACK)
    assert shop.seen(topic) == []


def test_scenario_14_recover_lists_what_is_prepared_and_what_an_operator_decided(
    shop: Shop, mq: Any, topic: str
) -> None:
    xids = [work(mq, topic, b"1") for _ in range(4)]
    for xid in xids:
        mq.prepare(xid)
    with shop.cluster.admin() as admin:
        admin.rollback_branch(xids[3], 0)
    states = {one.xid: one.state for one in mq.recover(TM.STARTRSCAN) if one.xid in xids}
    assert states == {**dict.fromkeys(xids[:3], "prepared"), xids[3]: "heuristically completed"}
    assert mq.recover(TM.NOFLAGS) == []
    assert mq.recover(TM.ENDRSCAN) == []
    for xid in xids[:3]:
        mq.rollback(xid)
    mq.forget(xids[3])


def test_scenario_18_a_late_commit_of_an_earlier_use_of_the_id_is_refused(shop: Shop, wire: Wire, topic: str) -> None:
    xid = Xid.random()
    epochs = []
    for _ in range(2):
        epochs.append(wire.ask(xid, Verb.START).epoch)
        for verb in (Verb.SEND, Verb.END, Verb.PREPARE):
            assert wire.ask(xid, verb).code == XACode.OK
        if len(epochs) == 1:
            wire.ask(xid, Verb.ROLLBACK)
    for verb in (Verb.COMMIT, Verb.ROLLBACK):
        assert wire.ask(xid, verb, epoch=epochs[0]).code == XACode.PROTO
    assert shop.seen(topic) == []
    assert wire.ask(xid, Verb.COMMIT, epoch=epochs[1]).code == XACode.OK
    assert shop.seen(topic) == [b"value"]


def test_scenario_19_an_operators_roll_back_is_told_until_it_is_forgotten(shop: Shop, mq: Any, topic: str) -> None:
    xid = work(mq, topic, b"1")
    mq.prepare(xid)
    with shop.cluster.admin() as admin:
        admin.rollback_branch(xid, 0)
    shop.cluster.broker.kill()
    shop.cluster.broker.start()
    for _ in range(2):
        with pytest.raises(HeuristicOutcome) as raised:
            mq.commit(xid)
        assert raised.value.code == XACode.HEURRB
    mq.forget(xid)
    with pytest.raises(BranchNotKnown):
        mq.commit(xid)
    assert shop.seen(topic) == []
