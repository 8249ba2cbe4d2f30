"""Two replicas, crashes of either, promotions, retention on either: what was promised stays, each commit comes once."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metamq.broker.data.partition import Done, Partition
from metamq.broker.transactions import commits, upkeep
from metamq.broker.transactions.journal import JournalStore, Written
from metamq.broker.transactions.processor import TransactionalCommandProcessor
from metamq.broker.transactions.term import TransactionTerm
from metamq.errors import MetamqError, TooManyOpenFiles
from metamq.tx.store.fold import JournalState
from metamq.tx.store.records import Key
from metamq.tx.store.verbs import JournalTransactionStore
from metamq.wire.xa import Verb
from tests.tx.crash_history import Violation
from tests.tx.sim_broker import LOOP
from tests.tx.sim_disk import modelled_disk
from tests.tx.two_replicas import JOURNAL_KEY, Pair, random_life

STEPS = 120


def lives(chance: random.Random, seconds: float, most: int) -> int:
    """Returns how many lives were lived. Raises Violation."""
    until, number = time.monotonic() + seconds, 0
    while number < most and time.monotonic() < until:
        number += 1
        with modelled_disk() as own:
            pair = Pair(own, chance)
            try:
                random_life(pair, STEPS)
            except Violation as violation:
                raise Violation(f"{violation}; after {pair.what}") from violation
    return number


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [8, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_two_replicas_whatever_happens_to_them(seconds: float, report_figures: Callable[[str], None]) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    count = lives(random.Random(seed), seconds, 1_000_000)
    report_figures(f"{count:,} lives of two replicas, {STEPS} steps each, seed {seed}")


def marks_that_do_not_wait_for_the_slave(patch: pytest.MonkeyPatch) -> None:
    async def settle(self: upkeep.Upkeep, term: TransactionTerm, key: Key) -> bool:
        partition = term.commits.find(key)
        if isinstance(partition, Partition):
            await self._flusher.settle(partition)
        return True

    patch.setattr(upkeep.Upkeep, "_settle", settle)


def answers_that_do_not_wait_for_the_slave(patch: pytest.MonkeyPatch) -> None:
    def when_stored(self: JournalStore, written: Written, done: Done) -> None:
        if self.partition.when_stored(written.end_offset, done):
            done(None)

    patch.setattr(JournalStore, "when_durable", when_stored)


def answers_from_a_journal_that_may_be_given_up(patch: pytest.MonkeyPatch) -> None:
    """A master that came back answers by what it finds, before its slave has it."""

    def serve(self: TransactionalCommandProcessor, term: TransactionTerm) -> None:
        term.journal.durable_offset = 0
        list(term.commits.redo(term.store.journal, 0, term.journal.found_offset))
        term.is_settled = True

    patch.setattr(TransactionalCommandProcessor, "serve", serve)


def a_promoted_slave_that_does_not_look_into_the_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commits.CommitApplier, "redo", lambda self, state, start, end: iter(()))


def a_promoted_slave_that_redoes_blindly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commits, "_ids_from", lambda log, position: iter(()))


def a_journal_that_is_cut_by_a_mark_which_may_be_given_up(patch: pytest.MonkeyPatch) -> None:
    """What was written down once more before the MARK is given up with it."""
    begin = TransactionTerm.__init__

    def trusting(self: TransactionTerm, store: JournalTransactionStore, *others: Any) -> None:
        begin(self, store, *others)
        self.needed_lsn = store.journal.mark.needed_lsn

    patch.setattr(TransactionTerm, "__init__", trusting)
    patch.setattr(Partition, "needed_offset", property(lambda self: 1 << 63, lambda self, value: None))


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    answers_that_do_not_wait_for_the_slave,
    answers_from_a_journal_that_may_be_given_up,
    a_promoted_slave_that_does_not_look_into_the_journal,
    a_promoted_slave_that_redoes_blindly,
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_two_replicas_find(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    fault(monkeypatch)
    with pytest.raises((Violation, MetamqError)) as found:
        lives(random.Random(seed), 500, 20_000)
    print(found.value)


def mark_given_up() -> None:
    """A master writes down once more what it has, and a MARK, and dies before its slave has them. It comes back, may
    look after its journal as a master, dies again, and is the slave that follows, and then is promoted itself."""
    with modelled_disk() as own:
        pair = Pair(own, random.Random(1))
        for _ in range(12):
            pair.new_branch()
        pair.settle()
        first, *others = pair.branches
        first.asked[Verb.PREPARE] = pair.at_master.ask(first.xid, Verb.PREPARE)
        for branch in others:
            branch.asked[Verb.COMMIT_ONE_PHASE] = pair.at_master.ask(branch.xid, Verb.COMMIT_ONE_PHASE)
        pair.settle()
        assert first.promised
        assert all(branch.done for branch in others)
        LOOP.run_until_complete(pair.shorten_and_flush_here())
        pair.restart(pair.master, power=False)
        pair.begin("a")
        pair.retain("a")
        pair.fail_over()
        pair.attach()
        pair.settle()
        pair.fail_over()
        pair.attach()
        pair.finish()


def test_a_mark_that_is_given_up_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mark_given_up()
    a_journal_that_is_cut_by_a_mark_which_may_be_given_up(monkeypatch)
    with pytest.raises(Violation, match="forgotten"):
        mark_given_up()


def mark_before_the_slave_has_it() -> None:
    """The slave has the journal, and not yet what was committed: it is sent copies of logs, one after the other."""
    with modelled_disk() as own:
        pair = Pair(own, random.Random(1))
        pair.new_branch()
        (branch,) = pair.branches
        branch.asked[Verb.COMMIT_ONE_PHASE] = pair.at_master.ask(branch.xid, Verb.COMMIT_ONE_PHASE)
        pair.settle(JOURNAL_KEY)
        assert branch.done
        LOOP.run_until_complete(pair.mark_with_the_journal_alone())
        pair.fail_over()
        pair.attach()
        pair.finish()


def test_a_mark_waits_until_the_slave_has_what_it_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    mark_before_the_slave_has_it()
    marks_that_do_not_wait_for_the_slave(monkeypatch)
    with pytest.raises(Violation, match="lost"):
        mark_before_the_slave_has_it()


def message_after_a_commit(seed: int, *, few_descriptors: bool = False) -> int:
    """The slave has the journal, and not yet what was committed; it takes over, and is sent messages at once, while it
    applies the commit, and afterwards. Returns how many of the first ones it refused."""
    with modelled_disk() as own:
        pair = Pair(own, random.Random(seed))
        pair.new_branch()
        (branch,) = pair.branches
        branch.asked[Verb.COMMIT_ONE_PHASE] = pair.at_master.ask(branch.xid, Verb.COMMIT_ONE_PHASE)
        pair.settle(JOURNAL_KEY)
        assert branch.done
        pair.restart(pair.master, power=False)
        pair.begin(pair.slave)
        for _ in range(8):
            pair.put()
        refused = 8 - len(pair.plain)
        with pytest.MonkeyPatch.context() as patch:
            redo = pair.at_master.term.commits.redo
            patch.setattr(pair.at_master.term.commits, "redo", lambda *args: amid(pair, redo(*args)))
            if few_descriptors:
                append = pair.at_master.append
                patch.setattr(
                    pair.at_master, "append", lambda partition, *args: no_descriptor(append, partition, *args)
                )
            pair.attach()
            pair.put()
        for _ in range(2):
            pair.put()
            LOOP.run_until_complete(pair._upkeep(retried(pair)))
        before = len(pair.plain)
        for _ in range(8):
            pair.put()
        assert len(pair.plain) == before + 8, "once it has the commit it takes all"
        pair.finish()
        return refused


def amid(pair: Pair, steps: Iterator[int]) -> Iterator[int]:
    """The steps, and after each of them a message."""
    for step in steps:
        yield step
        pair.put()


def no_descriptor(append: Callable[..., int], partition: Partition, *args: Any) -> int:
    if args[-1] is not None:  # the id of a commit's batch
        raise TooManyOpenFiles(partition.name, 64)
    return append(partition, *args)


async def retried(pair: Pair) -> None:
    """As every few seconds."""
    term = pair.at_master.term
    await pair.at_master.transactions._in_slices(term.commits.retry(term.store.journal))


def not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransactionTerm, "check_order", lambda self, partition: None)


def opened_before_the_last_commits(patch: pytest.MonkeyPatch) -> None:
    """As soon as the journal is everywhere, before what is in it is in its partitions."""
    redo = commits.CommitApplier.redo

    def opening(self: commits.CommitApplier, state: JournalState, start: int, end: int) -> Iterator[int]:
        yield 0
        yield from redo(self, state, start, end)

    patch.setattr(commits.CommitApplier, "redo", opening)
    check_order = TransactionTerm.check_order

    def until_everywhere(self: TransactionTerm, partition: Partition) -> None:
        if self.journal.partition.log.stable_offset < self.journal.found_offset:
            check_order(self, partition)

    patch.setattr(TransactionTerm, "check_order", until_everywhere)


def opened_while_commits_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        commits.CommitApplier, "lacking", property(lambda self: Counter(), lambda self, value: None), raising=False
    )


def test_no_message_overtakes_a_commit_that_was_answered_before() -> None:
    refused = [message_after_a_commit(seed, few_descriptors=seed % 2 == 0) for seed in range(40)]
    assert 0 in refused, "where the slave was told that the journal is everywhere"
    assert any(refused)


@pytest.mark.parametrize("fault", [not_checked, opened_before_the_last_commits, opened_while_commits_wait])
def test_messages_that_overtake_commits_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(Violation, match="overtook"):
        [message_after_a_commit(seed, few_descriptors=seed % 2 == 0) for seed in range(40)]
