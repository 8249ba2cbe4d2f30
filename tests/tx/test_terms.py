"""A term ends while something that was begun in it pauses; it goes on beside the next term, and must do nothing."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from metamq.broker.data.partition import Partition
from metamq.broker.transactions import commits
from metamq.errors import CorruptData, Fenced
from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.sim_broker import JOURNAL_LOG, Replica, flush, new_replica
from tests.tx.sim_disk import DiskOs, modelled_disk
from tests.tx.test_journal_rules import A, B, committed, prepared

LONG = replace(JOURNAL_LOG, segment_bytes=1 << 20)


@pytest.fixture
def own() -> Iterator[DiskOs]:
    with modelled_disk() as disk:
        yield disk


@pytest.mark.parametrize("cut", [False, True], ids=["it ends", "and a new master cuts the log"])
def test_no_mark_is_written_after_an_fsync_during_which_the_term_ended(own: DiskOs, cut: bool) -> None:
    replica = new_replica(own, "a")
    replica.begin_term(1)
    committed(replica, A, (0, b"a0"))
    end_position = replica.journal.log.end_position

    async def settle(partition: Partition) -> None:
        flush(partition)
        replica.end_term()
        if cut:
            partition.cut(0)

    replica.transactions.upkeep._flusher.settle = settle  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        replica.mark()
    assert replica.journal.log.end_position == end_position, "a slave's journal is its master's"


def test_a_branch_is_not_written_down_once_more_behind_the_commit_of_the_next_term(own: DiskOs) -> None:
    """It would be prepared again after a restart, and its messages be there twice."""
    replica = new_replica(own, "a", journal_log=LONG)
    replica.begin_term(1)
    prepared(replica, A, (0, b"a0"))
    prepared(replica, B, (0, b"b0"))
    for number in range(20):
        committed(replica, Xid(2, b"%d" % number), (1, bytes(50)))
    shortening = replica.transactions.upkeep.shorten(replica.term)
    moved = replica.term.store.branches[A].first_lsn
    while replica.term.store.branches[A].first_lsn == moved:
        shortening.send(None)
    assert replica.term.store.branches[B].first_lsn < 10, "it pauses between the two"
    replica.end_term()
    replica.begin_term(2)
    assert replica.do(B, Verb.COMMIT) == [XACode.OK]
    with pytest.raises(Fenced):
        _go_on(shortening)
    assert replica.stored(0) == [b"b0"]
    again = Replica(own, "a", journal_log=LONG)
    again.begin_term(3)
    assert again.states() == {A: "prepared"}
    assert again.do(B, Verb.COMMIT) == [XACode.OK], "it is remembered"
    assert again.stored(0) == [b"b0"]


def _go_on(work: Coroutine[Any, Any, None]) -> None:
    for _ in range(1000):
        work.send(None)


def _retrying(replica: Replica, patch: pytest.MonkeyPatch) -> Iterator[int]:
    """A commit that was stuck is brought, which pauses where partition 1 is read."""
    for _ in range(10):
        replica.put(1, bytes(100))
    prepared(replica, A, (0, b"a0"), (1, b"a1"))
    find = replica.logs.find
    assert replica.connection.codes(opaque := replica.ask(A, Verb.COMMIT)) is None
    with patch.context() as unreadable:
        unreadable.setattr(replica.logs, "find", lambda *_: (_ for _ in ()).throw(CorruptData("t", "a test says so")))
        replica.flush(find("~transactions", "0" * 16, 0))
    assert replica.connection.codes(opaque) == [XACode.OK]
    assert replica.term.commits.stuck
    patch.setattr(commits, "SCAN_BYTES", 200)
    retrying = replica.term.commits.retry(replica.term.store.journal)
    assert [next(retrying) for _ in range(3)] == [0, 0, 0]
    assert replica.stored(0) == []
    return retrying


def test_what_was_stuck_is_not_brought_once_more_beside_the_next_term(
    own: DiskOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = new_replica(own, "a")
    replica.begin_term(1)
    retrying = _retrying(replica, monkeypatch)
    replica.end_term()
    replica.begin_term(2)
    with pytest.raises(Fenced):
        list(retrying)
    assert replica.stored(0) == [b"a0"]
    assert replica.stored(1).count(b"a1") == 1


def test_a_log_that_a_new_master_cuts_is_not_taken_for_a_damaged_one(
    own: DiskOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of it so far ends in the middle of another batch now."""
    replica = new_replica(own, "a")
    replica.begin_term(1)
    retrying = _retrying(replica, monkeypatch)
    replica.end_term()
    replica.part(1).cut(0)
    replica.put(1, bytes(2000))
    with pytest.raises(Fenced):
        list(retrying)
    assert replica.part(1).closed_by is None
