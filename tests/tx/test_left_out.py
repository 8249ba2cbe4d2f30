"""A commit that cannot be brought into one partition: it is brought once, later, and holds up nothing else."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from metamq.broker.transactions.term import CommitsFirst
from metamq.broker.transactions.upkeep import Upkeep
from metamq.errors import MetamqError
from metamq.tx.store.fold import JournalState
from metamq.tx.store.records import Waiting
from metamq.wire.batch import read_header
from metamq.wire.columns import encode
from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.sim_broker import JOURNAL_LOG, TOPIC, TOPIC_ID, TOPIC_LOG, Replica, new_replica
from tests.tx.sim_disk import DiskOs, modelled_disk
from tests.tx.test_journal_rules import DAMAGE, committed, prepared
from tests.tx.test_upkeep import upkeep_of

SEED = int(os.environ.get("METAMQ_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
SMALL = replace(JOURNAL_LOG, segment_bytes=2000)
PARTS = 3


class History:
    """A broker whose partitions come and go, and which is killed, or loses its power, now and then."""

    def __init__(self, own: DiskOs, rng: random.Random) -> None:
        self.own, self.rng = own, rng
        self.replica = new_replica(own, "a", journal_log=SMALL, parts=PARTS)
        self.epoch = 0
        self.away: dict[int, Any] = {}
        self.prepared: list[tuple[Xid, list[tuple[int, bytes]]]] = []
        self.committed: list[list[bytes]] = [[] for _ in range(PARTS)]
        """What each partition is to have, in this order."""
        self.number = 0
        self._begin()

    def _begin(self) -> None:
        self.epoch += 1
        for index in self.away:
            self.away[index] = self.replica.logs.open.pop((TOPIC, TOPIC_ID, index))
        self.replica.begin_term(self.epoch)
        self.replica.transactions.upkeep.cut_bytes = 3000

    def step(self) -> None:
        self.rng.choice([self.prepare] * 6 + [self.commit] * 6 + [self.upkeep] * 3 + self.rare())()

    def rare(self) -> list[Callable[[], None]]:
        return [self.leave, self.come_back, self.damage, self.put, self.kill, self.power_cut]

    def prepare(self) -> None:
        there = [i for i in range(PARTS) if i not in self.away and self.replica.part(i).closed_by is None]
        if not there:
            return
        self.number += 1
        xid = Xid(1, b"%d" % self.number)
        sends = [(self.rng.choice(there), b"%d.%d" % (self.number, n)) for n in range(self.rng.randint(1, 4))]
        prepared(self.replica, xid, *sends)
        self.prepared.append((xid, sends))

    def commit(self) -> None:
        if not self.prepared:
            return
        at = self.rng.randrange(len(self.prepared))
        xid, sends = self.prepared[at]
        if self.replica.do(xid, Verb.COMMIT) == [XACode.OK]:  # else one of its partitions is damaged
            del self.prepared[at]
            for index, value in sends:
                self.committed[index].append(value)

    def upkeep(self) -> None:
        upkeep_of(self.replica)

    def leave(self) -> None:
        index = self.rng.randrange(PARTS)
        if index not in self.away:
            self.away[index] = self.replica.logs.open.pop((TOPIC, TOPIC_ID, index))

    def come_back(self) -> None:
        if self.away:
            index = self.rng.choice(sorted(self.away))
            partition = self.replica.logs.open[TOPIC, TOPIC_ID, index] = self.away.pop(index)
            partition.unbound()

    def damage(self) -> None:
        index = self.rng.randrange(PARTS)
        if index not in self.away:
            self.replica.logs.is_damaged(self.replica.part(index), DAMAGE)

    def put(self) -> None:
        index = self.rng.randrange(PARTS)
        if index not in self.away and self.replica.part(index).closed_by is None:
            with contextlib.suppress(CommitsFirst):  # the partition lacks commits since it was away
                self.replica.put(index, b"outside")

    def kill(self) -> None:
        self.replica = Replica(self.own, "a", journal_log=SMALL, parts=PARTS)
        self._begin()

    def power_cut(self) -> None:
        """What was not flushed is gone."""
        kept = self.own.disks["a"].image()
        self.own.disks["a"] = type(self.own.disks["a"])(kept.names, kept.data)
        self.kill()

    def check(self) -> None:
        """Each partition has what was committed, once, in order."""
        while self.away:
            self.come_back()
        self.kill()  # what was damaged is served again
        upkeep_of(self.replica)
        assert not self.replica.term.journal.ended
        for index, values in enumerate(self.committed):
            assert [value for value in self.replica.stored(index) if value != b"outside"] == values
        assert not self.replica.term.store.journal.unmarked
        assert self.replica.term.store.journal.mark.left_out == ()


def look(seed: int, histories: int) -> int:
    """How many commits waited over a MARK and a new term and were written down once more."""
    rng = random.Random(seed)
    rewritten = 0
    append = Upkeep._append

    def counted(self: Upkeep, term: Any, records: Any, bodies: Any) -> None:
        nonlocal rewritten
        rewritten += isinstance(records[0], Waiting)
        append(self, term, records, bodies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Upkeep, "_append", counted)
        for _ in range(histories):
            with modelled_disk() as own:
                history = History(own, rng)
                for _ in range(rng.randint(20, 120)):
                    history.step()
                history.check()
    return rewritten


@pytest.mark.slow
def test_each_committed_message_is_there_once_whatever_its_partition_went_through() -> None:
    print(f"METAMQ_SEED={SEED}")
    assert look(SEED, 40) > 5


def covers_everything(patch: pytest.MonkeyPatch) -> None:
    mark = JournalState._mark
    patch.setattr(JournalState, "_mark", lambda self, record: mark(self, record._replace(left_out=())))


def forgets_which_bodies_are_there(patch: pytest.MonkeyPatch) -> None:
    mark = JournalState._mark

    def whole(self: JournalState, record: Any) -> None:
        before = dict(self.unmarked)
        mark(self, record)
        self.unmarked |= {lsn: before[lsn] for lsn in self.unmarked}

    patch.setattr(JournalState, "_mark", whole)


def says_where_a_partition_ends_that_it_leaves_out(patch: pytest.MonkeyPatch) -> None:
    """What is brought later, before a crash, lies before such an end once the tail is lost."""
    write = Upkeep._write

    def moved(self: Upkeep, term: Any, record: Any) -> Any:
        ends = {end[:3]: end[3] for end in record.ends}
        ends |= dict.fromkeys(record.left_out, 1 << 30)
        return write(self, term, record._replace(ends=[(*key, end) for key, end in ends.items()]))

    patch.setattr(Upkeep, "_write", moved)


def writes_nothing_down_and_cuts(patch: pytest.MonkeyPatch) -> None:
    needed = JournalState.first_needed_lsn
    patch.setattr(
        JournalState, "first_needed_lsn", lambda self, lsn, memory_lsn, _left_out: needed(self, lsn, memory_lsn, ())
    )
    patch.setattr(Upkeep, "_keep_waiting", lambda *_: None)


@pytest.mark.parametrize(
    "fault",
    [
        covers_everything,
        forgets_which_bodies_are_there,
        says_where_a_partition_ends_that_it_leaves_out,
        writes_nothing_down_and_cuts,
    ],
)
def test_the_histories_find(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"METAMQ_SEED={SEED}")
    fault(monkeypatch)
    with pytest.raises((AssertionError, MetamqError, KeyError)):
        look(SEED, 200)


@pytest.mark.slow
def test_one_commit_that_waits_does_not_make_the_journal_grow() -> None:
    with modelled_disk() as own:
        replica = new_replica(own, "a", journal_log=SMALL)
        replica.begin_term(1)
        replica.transactions.upkeep.cut_bytes = 4000
        prepared(replica, Xid(1, b"waits"), (1, b"w" * 500), (0, b"there"))
        away = replica.logs.open.pop((TOPIC, TOPIC_ID, 1))
        assert replica.do(Xid(1, b"waits"), Verb.COMMIT) == [XACode.OK]
        sizes = []
        for number in range(600):
            committed(replica, Xid(2, b"%d" % number), (0, b"x" * 50))
            if number % 10 == 9:
                upkeep_of(replica)
                sizes.append(replica.journal.log.size_bytes)
        assert max(sizes[30:]) < 2 * max(sizes[:30]), "what is remembered is all that grows"
        assert replica.journal.log.start_offset > 0
        assert replica.part(0).log.end_offset == 601
        replica.logs.open[TOPIC, TOPIC_ID, 1] = away
        upkeep_of(replica)
        assert replica.stored(1) == [b"w" * 500]


def test_nothing_is_written_while_nothing_changes() -> None:
    with modelled_disk() as own:
        replica = new_replica(own, "a")
        replica.begin_term(1)
        replica.transactions.upkeep.cut_bytes = 1 << 20
        prepared(replica, Xid(1, b"waits"), (1, b"w"), (0, b"there"))
        del replica.logs.open[TOPIC, TOPIC_ID, 1]
        assert replica.do(Xid(1, b"waits"), Verb.COMMIT) == [XACode.OK]
        upkeep_of(replica)
        assert replica.term.store.journal.mark.left_out == ((TOPIC, TOPIC_ID, 1),)
        end_offset = replica.journal.log.end_offset
        for _ in range(5):
            upkeep_of(replica)
        assert replica.journal.log.end_offset == end_offset


def test_retention_goes_on_at_partitions_that_nothing_waits_for() -> None:
    with modelled_disk() as own:
        replica = new_replica(own, "a", topic_log=replace(TOPIC_LOG, segment_bytes=100, retention_bytes=1))
        replica.begin_term(1)
        prepared(replica, Xid(1, b"waits"), (1, b"w"), (0, b"there"))
        away = replica.logs.open.pop((TOPIC, TOPIC_ID, 1))
        assert replica.do(Xid(1, b"waits"), Verb.COMMIT) == [XACode.OK]
        for one in (replica.part(0), away):
            for number in range(5):
                batch = memoryview(encode([b"%d" % number], base_timestamp_us=0))
                replica.append(one, batch, read_header(batch), None)
        replica.retain()
        assert replica.part(0).log.start_offset == 0
        replica.mark()
        replica.logs.open[TOPIC, TOPIC_ID, 1] = away
        away.unbound()
        replica.retain()
        assert (replica.part(0).log.start_offset, away.log.start_offset) == (5, 0)
