"""What is being written down once more when the disk is full: what was written of it so far means nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from metamq.broker.data.partition import Partition
from metamq.broker.transactions import upkeep
from metamq.errors import DiskFull
from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.sim_broker import TOPIC, TOPIC_ID, Replica, new_replica
from tests.tx.sim_disk import DiskOs, modelled_disk
from tests.tx.test_journal_rules import A, committed, prepared
from tests.tx.test_upkeep import upkeep_of


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskOs]:
    monkeypatch.setattr(upkeep, "MOVED_BYTES", 1)  # each body is an entry of its own
    with modelled_disk() as disk:
        yield disk


def full_after(replica: Replica, entries: int, patch: pytest.MonkeyPatch) -> None:
    """The disk has room for so many entries of the journal."""
    append, left = replica.append, iter(range(entries))

    def refused(partition: Partition, *others: Any) -> int:
        if partition is replica.journal and next(left, None) is None:
            raise DiskFull("the journal", 0, 1)
        return append(partition, *others)

    patch.setattr(replica, "append", refused)


@pytest.mark.parametrize("entries", range(5))
def test_a_branch_goes_on_whose_move_was_broken_off(own: DiskOs, monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    replica = new_replica(own, "a")
    replica.begin_term(1)
    assert replica.do(A, Verb.START, Verb.SEND, sends=[(0, b"a0"), (0, b"a1")])[-1] == XACode.OK
    for number in range(9):
        committed(replica, Xid(2, b"%d" % number), (1, b"other"))
    with monkeypatch.context() as patch:
        full_after(replica, 1 + entries, patch)  # the first one has what is remembered
        upkeep_of(replica)
    assert replica.do(A, Verb.SEND, Verb.END, Verb.PREPARE, sends=[(0, b"a2")]) == [XACode.OK] * 3
    again = Replica(own, "a")
    again.begin_term(2)
    assert again.do(A, Verb.COMMIT) == [XACode.OK]
    assert again.stored(0) == [b"a0", b"a1", b"a2"]


@pytest.mark.parametrize("entries", range(5))
def test_what_waits_is_brought_once_when_writing_it_down_was_broken_off(
    own: DiskOs, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    replica = new_replica(own, "a", parts=3)
    replica.begin_term(1)
    prepared(replica, A, (1, b"a1"), (2, b"a2"), (2, b"a3"))
    away = {index: replica.logs.open.pop((TOPIC, TOPIC_ID, index)) for index in (1, 2)}
    assert replica.do(A, Verb.COMMIT) == [XACode.OK]
    for number in range(9):
        committed(replica, Xid(2, b"%d" % number), (0, b"other"))
    replica.mark()
    with monkeypatch.context() as patch:
        full_after(replica, 1 + entries, patch)
        upkeep_of(replica)
    replica.logs.open[TOPIC, TOPIC_ID, 1] = away[1]
    away[1].unbound()
    replica.transactions.upkeep.cut_bytes = 1 << 20
    upkeep_of(replica)
    assert replica.stored(1) == [b"a1"]
    assert [key[2] for key in replica.term.store.journal.mark.left_out] == [2]
    replica.transactions.upkeep.cut_bytes = 0
    with monkeypatch.context() as patch:
        full_after(replica, 3, patch)  # what is remembered, and what waits: there is no room for the MARK
        upkeep_of(replica)
    for epoch in (2, 3):
        replica = Replica(own, "a", parts=3)
        replica.begin_term(epoch)
        assert (replica.stored(1), replica.stored(2)) == ([b"a1"], [b"a2", b"a3"])
