"""What keeps a broker's journal short, and what a commit costs that cannot be brought into its partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from metamq.broker.data.partition import Partition
from metamq.broker.transactions import commits
from metamq.broker.transactions.processor import BODY_BYTES_MAX
from metamq.broker.transactions.upkeep import MOVED_BYTES
from metamq.errors import MetamqError, NotEnoughReplicas
from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.sim_broker import JOURNAL_LOG, TOPIC, TOPIC_ID, TOPIC_LOG, Replica, new_replica
from tests.tx.sim_disk import DiskOs, modelled_disk
from tests.tx.test_journal_rules import DAMAGE, A, B, committed, prepared


@pytest.fixture
def own() -> Iterator[DiskOs]:
    with modelled_disk() as disk:
        yield disk


def upkeep_of(replica: Replica) -> None:
    """What a broker does every few seconds."""
    with contextlib.suppress(MetamqError):
        list(replica.term.commits.retry(replica.term.store.journal))
        if replica.term.store.journal.unmarked:
            replica.mark()
        replica.shorten()
    with contextlib.suppress(MetamqError):  # of what is damaged
        replica.retain()


def refuse(replica: Replica, index: int, patch: pytest.MonkeyPatch) -> None:
    """A partition turns out to be damaged when something is appended to it."""
    append, damaged = replica.append, replica.part(index)

    def refused(partition: Partition, *others: Any) -> int:
        if partition is damaged:
            raise DAMAGE
        return append(partition, *others)

    patch.setattr(replica, "append", refused)


@pytest.mark.parametrize(
    "why", ["damage", "few replicas", "an answer that does not come", "a branch whose end is unknown"]
)
def test_nothing_is_written_down_again_and_again_while_nothing_can_be_cut(
    own: DiskOs, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    replica = new_replica(own, "a", journal_log=replace(JOURNAL_LOG, segment_bytes=20000))
    replica.begin_term(1)
    replica.transactions.upkeep.cut_bytes = 20000
    if why == "a branch whose end is unknown":
        prepared(replica, B, (0, b"b0"))
        replica.term.store.branches[B].busy = True
    for number in range(200):
        committed(replica, Xid(1, b"%03d" % number), (0, bytes(20)))
    replica.mark()
    with monkeypatch.context() as patch:
        if why == "damage":
            refuse(replica, 1, patch)
            committed(replica, A, (1, b"a0"))
            assert replica.term.commits.stuck
        if why == "few replicas":
            error = NotEnoughReplicas("the journal", 1, 2)
            patch.setattr(replica, "admit", lambda *_: (_ for _ in ()).throw(error))
        if why in ("few replicas", "an answer that does not come"):
            lost = NotEnoughReplicas("the journal", 1, 2, outcome="unknown")
            patch.setattr(replica, "when_durable", lambda _partition, _end, done: done(lost))
        for _ in range(3):
            upkeep_of(replica)
        size_bytes = replica.journal.log.size_bytes
        for _ in range(10):
            upkeep_of(replica)
        marks = 2000
        assert replica.journal.log.size_bytes < size_bytes + marks
    if why in ("few replicas", "an answer that does not come"):
        upkeep_of(replica)
        assert replica.journal.log.start_offset > 0, "cut as soon as it can be"


def test_what_is_stuck_costs_no_look_at_partitions_that_have_it(own: DiskOs, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = new_replica(own, "a")
    replica.begin_term(1)
    prepared(replica, A, (0, b"a0"), (1, b"a1"))
    away = replica.logs.open.pop((TOPIC, TOPIC_ID, 1))
    assert replica.do(A, Verb.COMMIT) == [XACode.OK]
    assert replica.stored(0) == [b"a0"]
    with monkeypatch.context() as patch:
        patch.setattr(commits, "_ids_from", lambda *_: 1 / 0)
        list(replica.term.commits.retry(replica.term.store.journal))
    assert replica.term.commits.stuck
    replica.logs.open[TOPIC, TOPIC_ID, 1] = away
    list(replica.term.commits.retry(replica.term.store.journal))
    assert not replica.term.commits.stuck
    assert (replica.stored(0), replica.stored(1)) == ([b"a0"], [b"a1"])


def test_what_is_looked_for_in_a_partition_is_looked_for_in_slices(own: DiskOs) -> None:
    """What is appended meanwhile is seen, and a partition that comes back meanwhile is not taken for an empty one."""
    topic_log = replace(TOPIC_LOG, segment_bytes=1 << 26)
    replica = new_replica(own, "a", topic_log=topic_log)
    replica.begin_term(1)
    committed(replica, A, (1, b"a1"), (0, b"a0"))
    for _ in range(50):
        replica.put(0, bytes(commits.SCAN_BYTES // 10))
    for partition in replica.logs.partitions():
        replica.flush(partition)
    again = Replica(own, "a", topic_log=topic_log)
    away = again.logs.open.pop((TOPIC, TOPIC_ID, 1))
    again.begin_term(2)
    state = again.term.store.journal
    again.term.commits.stuck.clear()  # as before its term
    everything = again.term.commits.redo(state, 0, 1 << 62)
    steps = 1
    assert next(everything) == 0
    again.logs.open[TOPIC, TOPIC_ID, 1] = away
    away.unbound()
    for brought in everything:
        assert brought == 0
        steps += 1
        if steps < 10:
            again.put(0, bytes(commits.SCAN_BYTES // 10))
    assert steps > 5
    assert again.term.commits.stuck
    list(again.term.commits.retry(state))
    assert not again.term.commits.stuck
    assert again.stored(0).count(b"a0") == 1
    assert again.stored(1) == [b"a1"]


@pytest.mark.slow
def test_a_branch_of_the_largest_batches_is_moved(own: DiskOs) -> None:
    """An entry of the journal is a batch itself, and may not be larger than one."""
    replica = new_replica(own, "a", journal_log=replace(JOURNAL_LOG, segment_bytes=1 << 30))
    replica.begin_term(1)
    sizes = [MOVED_BYTES - 5000, BODY_BYTES_MAX - 5000, 10, BODY_BYTES_MAX - 5000]
    for number, size in enumerate(sizes):
        verbs = (Verb.START, Verb.SEND) if number == 0 else (Verb.SEND,)
        assert replica.do(A, *verbs, sends=[(0, bytes(size))])[-1] == XACode.OK
    assert replica.do(A, Verb.END, Verb.PREPARE) == [XACode.OK] * 2
    for number in range(6):
        committed(replica, Xid(1, b"%d" % number), (1, bytes(14 << 20)))
    replica.shorten()
    assert replica.term.store.branches[A].first_lsn > 10, "it was written down once more"
    again = Replica(own, "a", journal_log=replace(JOURNAL_LOG, segment_bytes=1 << 30))
    again.begin_term(2)
    assert again.do(A, Verb.COMMIT) == [XACode.OK]
    assert [len(value) for value in again.stored(0)] == sizes


@pytest.mark.parametrize("promise", [(), (Verb.END, Verb.PREPARE)], ids=["open", "prepared"])
def test_a_branch_that_is_not_finished_holds_up_no_cut(own: DiskOs, promise: tuple[Verb, ...]) -> None:
    """Nor does it lose anything by being written down once more, or count what was sent before anew."""
    replica = new_replica(own, "a")
    replica.begin_term(1)
    replica.transactions.upkeep.cut_bytes = 2000
    assert replica.do(A, Verb.START, Verb.SEND, sends=[(0, b"a0"), (1, b"a1")])[-1] == XACode.OK
    assert replica.do(A, Verb.SEND, *promise, sends=[(0, b"a2")])[-1] == XACode.OK
    for number in range(100):
        committed(replica, Xid(2, b"%d" % number), (1, bytes(50)))
        if number % 10 == 9:
            upkeep_of(replica)
    assert replica.journal.log.start_offset > 100
    messages = 3
    if not promise:
        assert replica.states()[A] == "active", "who works in it still does"
        assert replica.do(A, Verb.SEND, Verb.END, Verb.PREPARE, sends=[(0, b"a3")]) == [XACode.OK] * 3
        messages = 4
    branch = replica.term.store.branches[A]
    assert (len(branch.bodies), branch.messages) == (messages, messages)
    again = Replica(own, "a")
    again.begin_term(2)
    assert again.term.store.branches[A].bodies == branch.bodies
    assert again.do(A, Verb.COMMIT) == [XACode.OK]
    assert again.stored(0) == [b"a0", b"a2", b"a3"][: messages - 1]
    assert again.stored(1)[-1] == b"a1"


@pytest.mark.parametrize(
    "verbs", [(Verb.DECIDE,), (Verb.PREPARE, Verb.HEURISTIC_ROLLBACK)], ids=["decided", "heuristic"]
)
def test_what_is_decided_is_shown_as_before_once_it_is_written_down_again(own: DiskOs, verbs: tuple[Verb, ...]) -> None:
    replica = new_replica(own, "a")
    replica.begin_term(1)
    assert replica.do(A, Verb.START, Verb.SEND, Verb.END, verbs[0], sends=[(0, bytes(5000))])[-1] == XACode.OK
    for verb in verbs[1:]:
        assert replica.do(A, verb) == [XACode.OK]
    first_lsn = replica.term.store.branches[A].first_lsn
    assert (replica.term.store.branches[A].messages, replica.term.store.branches[A].bytes) == (1, 0)
    for number in range(20):
        committed(replica, Xid(2, b"%d" % number), (1, bytes(50)))
    upkeep_of(replica)
    for one in (replica, Replica(own, "a")):
        if one is not replica:
            one.begin_term(2)
        branch = one.term.store.branches[A]
        assert branch.first_lsn > first_lsn
        assert (branch.messages, branch.bytes) == (1, 0)
