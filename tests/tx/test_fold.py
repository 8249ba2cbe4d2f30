"""What a restart finds in the journal is what was there: the same fold, over any history and from any beginning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from metamq.errors import CorruptData
from metamq.tx.store.fold import Entry, JournalState, Retained, move_of
from metamq.tx.store.records import (
    Add,
    BodyPlace,
    BranchKey,
    Mark,
    Move,
    Moved,
    Prepare,
    Record,
    Remembered,
    pack,
    unpack,
)
from metamq.tx.store.table import LASTING
from metamq.tx.store.verbs import JournalTransactionStore, VerbRequest
from metamq.wire.xa import Verb, Xid
from tests.examples import examples

XIDS = [Xid(1, b"a"), Xid(1, b"b"), Xid(1, b"c", b"q")]
PLACES = [BodyPlace("orders", "0123456789abcdef", 0, 2), BodyPlace("orders", "0123456789abcdef", 1, 5)]
SESSIONS = ["s", "t"]


def essence(state: JournalState) -> Any:
    """What has to survive: promises, decisions, what is remembered, what may still have to be brought."""
    kept = {
        branch.xid: (
            branch.epoch, branch.state, [body.place for body in branch.bodies], branch.messages, branch.bytes,
            branch.heuristic_commit, branch.follows, branch.followers,
        )
        for branch in state.branches.values()
        if branch.state in LASTING
    }  # fmt: skip
    commits = [
        (c.branch, {n: body.place for n, body in c.bodies.items()}, c.first_batch_id) for c in state.unmarked.values()
    ]
    return kept, list(state.memory.items()), commits


class Journal(RuleBasedStateMachine):
    """A store whose records go to a list, which is cut as the broker cuts its log."""

    @initialize()
    def begin(self) -> None:
        self.store = JournalTransactionStore(1)
        self.entries: list[Entry] = []
        self.lsn = 0
        self.ids = 0
        self.now_us = 0
        self.memory_lsn = 0
        self.sent: dict[tuple[str, Xid], int] = {}

    def _write(self, records: list[Record], bodies: int = 0) -> None:
        packed = unpack(pack(records), bodies)
        assert packed == records
        entry = Entry(self.lsn, self.lsn * 1000, packed, [10] * bodies)
        self.lsn += 1 + bodies
        self.entries.append(entry)
        self.store.written(entry)

    @rule(
        verb=st.sampled_from(list(Verb)),
        xid=st.sampled_from(XIDS),
        session=st.sampled_from(SESSIONS),
        count=st.integers(1, 2),
    )
    def ask(self, verb: Verb, xid: Xid, session: str, count: int) -> None:
        branch = self.store.branches.get(xid)
        association = branch.sessions.get(session) if branch is not None else None
        places = tuple(PLACES[:count]) if verb is Verb.SEND else ()
        first = association.sent if association is not None else 0
        asked = VerbRequest(
            verb, xid, session=session, places=places, first=first, owner=session,
            follows=(1, 0, count) if verb is Verb.PREPARE and count == 2 else (),
            followers=(1, 7, 2, 8) if verb is Verb.DECIDE else (),
        )  # fmt: skip
        self.now_us += 1
        step = self.store.ask(asked, 0.0, self.now_us)
        if step.record is None:
            return
        record = step.record
        if hasattr(record, "first_batch_id"):
            self.ids += 10
            record = record._replace(first_batch_id=self.ids)
        self._write([record], len(places))

    @rule(xid=st.sampled_from(XIDS), count=st.integers(1, 2))
    def promise(self, xid: Xid, count: int) -> None:
        """As an application does: what is drawn at random gets there too seldom."""
        for verb in (Verb.START, Verb.SEND, Verb.END, Verb.PREPARE):
            self.ask(verb, xid, "s", count)

    @rule(xid=st.sampled_from(XIDS))
    def decide(self, xid: Xid) -> None:
        for verb in (Verb.START, Verb.SEND, Verb.END, Verb.DECIDE):
            self.ask(verb, xid, "s", 1)

    @rule(remembering=st.booleans())
    def mark(self, remembering: bool) -> None:
        state, lsn = self.store.journal, self.lsn
        if remembering:
            self._write([Remembered(list(state.memory.items()))])
            self.memory_lsn = lsn
        needed_lsn = state.first_needed_lsn(self.lsn, self.memory_lsn, ())
        self._write([Mark(self.lsn, needed_lsn, 1, [("orders", "0123456789abcdef", 0, 4)])])

    @rule(xid=st.sampled_from(XIDS), whole=st.booleans())
    def move(self, xid: Xid, whole: bool) -> None:
        branch = self.store.branches.get(xid)
        if branch is None or branch.first_lsn < 0:
            return
        places = [body.place for body in branch.bodies]
        for first, place in enumerate(places or [None]):
            begins: list[Record] = [move_of(branch)] if first == 0 else []
            add: list[Record] = [Add(branch.key, first, [place], branch.owner)] if place is not None else []
            self._write([*begins, *add], len(add))
            if first and not whole:
                break
        if whole:
            self._write([Moved(branch.key)])
        else:  # a new master begins in the middle of it
            self.restart()

    @rule()
    def cut(self) -> None:
        retained = Retained()
        for entry in self.entries:
            retained.apply(entry)
        for key in [place.key for place in PLACES]:
            assert retained.is_needed(key) >= self.store.journal.is_needed(key)
        self.entries = [entry for entry in self.entries if entry.lsn >= retained.mark.needed_lsn]

    @rule()
    def restart(self) -> None:
        epoch = self.store.journal.epoch_max >> 32
        self.store = JournalTransactionStore(epoch + 1)
        for entry in self.entries:
            self.store.journal.apply(entry)
        self.memory_lsn = self.store.journal.mark.needed_lsn
        self.store.journal.drop_unprepared()

    @invariant()
    def a_restart_finds_what_is_there(self) -> None:
        found = JournalState()
        for entry in self.entries:
            found.apply(entry)
        found.drop_unprepared()
        assert essence(found) == essence(self.store.journal)


@pytest.mark.slow
def test_any_life_of_a_journal() -> None:
    many = settings(
        max_examples=examples(300), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(Journal, settings=many)


def test_a_promise_of_which_something_is_missing_is_damage() -> None:
    branch = BranchKey(XIDS[0], 1 << 32)
    add = Add(branch, 0, [PLACES[0]], "s")
    whole = [
        Entry(0, 0, [add], [10]),
        Entry(2, 90, [add._replace(first=1)], [10]),
        Entry(4, 180, [Prepare(branch, 4, 1)], []),
    ]
    state = JournalState()
    for entry in whole:
        state.apply(entry)
    state = JournalState()
    state.apply(whole[0])
    with pytest.raises(CorruptData, match="4 messages, and has 2"):
        state.apply(whole[2])


def test_what_was_half_written_down_again_takes_nothing_from_a_later_use_of_its_id() -> None:
    """The broker died meanwhile. The branch was open, so its end stands nowhere."""
    old, new = BranchKey(XIDS[0], 1 << 32), BranchKey(XIDS[0], 2 << 32)
    state = JournalState()
    state.apply(Entry(0, 0, [Add(old, 0, [PLACES[0]], "s")], [10]))
    state.apply(Entry(2, 90, [Move(old, 0, 0, 2, "s"), Add(old, 0, [PLACES[0]], "s")], [10]))
    for first in range(2):
        state.apply(Entry(4 + 2 * first, 180, [Add(new, first, [PLACES[1]], "s")], [10]))
    state.apply(Entry(8, 360, [Prepare(new, 10, 1)], []))
    assert [body.place for body in state.branches[XIDS[0]].bodies] == [PLACES[1]] * 2
