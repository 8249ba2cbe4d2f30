"""Faults planted on purpose, after those of other journals and our own near misses: power cuts find each of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metamq.broker.data.partition import Done
from metamq.broker.transactions import commits
from metamq.broker.transactions.commits import CommitApplier
from metamq.broker.transactions.journal import JournalStore, Written
from metamq.broker.transactions.processor import TransactionalCommandProcessor
from metamq.broker.transactions.term import TransactionTerm
from metamq.broker.transactions.upkeep import Upkeep
from metamq.errors import MetamqError
from metamq.tx.store.fold import CommittedBranch, JournalState
from metamq.tx.store.records import Commit, Heuristic, Key, Prepare, Record
from metamq.wire.batch import HEADER_BYTES, read_header
from tests.tx.crash_history import Violation, enumerate_crashes
from tests.tx.sim_disk import DiskOs, modelled_disk

pytestmark = pytest.mark.timeout(600)  # thousands of recoveries
Patch = pytest.MonkeyPatch


def append_before_the_commit_record(patch: Patch, _own: DiskOs) -> None:
    """As Metamorphosis does: into the partitions first, then the record."""
    with_ids, apply = TransactionalCommandProcessor._with_ids, CommitApplier.apply

    def early(self: TransactionalCommandProcessor, term: TransactionTerm, record: Record) -> Record:
        record = with_ids(self, term, record)
        if isinstance(record, Commit | Heuristic) and not term.journal.holds:
            branch = term.store.branches[record.branch.xid]
            apply(
                term.commits,
                CommittedBranch(0, 0, record.branch, dict(enumerate(branch.bodies)), record.first_batch_id),
            )
        return record

    def only_redo(self: CommitApplier, committed: CommittedBranch, present: Any = None) -> int:
        return apply(self, committed, present) if present is not None else 0

    patch.setattr(TransactionalCommandProcessor, "_with_ids", early)
    patch.setattr(CommitApplier, "apply", only_redo)


def redo_blindly(patch: Patch, _own: DiskOs) -> None:
    """What a restart finds committed is appended, whether or not it is there."""
    patch.setattr(commits, "_ids_from", lambda log, position: iter(()))


def look_from_where_it_was_appended_first(patch: Patch, _own: DiskOs) -> None:
    """What takes its place after a loss lies below: only a second crash shows it."""
    hints: dict[tuple[int, Key], int] = {}
    redo, apply = CommitApplier._redo, CommitApplier.apply

    def noted(self: CommitApplier, committed: CommittedBranch, present: Any = None) -> int:
        for body in committed.bodies.values() if present is None else []:
            partition = self._topics.find(body.place.topic, body.place.topic_id, body.place.partition)
            hints.setdefault((committed.first_batch_id, partition.key), partition.log.end_position)
        return apply(self, committed, present)

    def from_the_hint(self: CommitApplier, state: JournalState, wanted: list[int]) -> Iterator[int]:
        ids = {state.unmarked[lsn].first_batch_id for lsn in wanted}
        lowest: dict[Key, int] = {}
        for (first_id, key), position in hints.items():
            if first_id in ids:
                lowest[key] = min(lowest.get(key, position), position)
        state.mark = state.mark._replace(ends=[(*key, position) for key, position in lowest.items()])
        yield from redo(self, state, wanted)

    patch.setattr(CommitApplier, "apply", noted)
    patch.setattr(CommitApplier, "_redo", from_the_hint)


def look_from_an_end_that_is_not_flushed(patch: Patch, _own: DiskOs) -> None:
    """A MARK says where partitions end, and what lies before that may be lost."""

    async def settle(self: Upkeep, term: TransactionTerm, key: Key) -> bool:
        """No fsync; and all of it counts as if there had been one."""
        return True

    patch.setattr(Upkeep, "_settle", settle)


def answer_before_the_fsync(kind: type[Any]) -> Callable[[Patch, DiskOs], None]:
    def fault(patch: Patch, _own: DiskOs) -> None:
        when_durable = JournalStore.when_durable

        def early(self: JournalStore, written: Written, done: Done) -> None:
            if isinstance(written.entry.records[-1], kind):
                done(None)
            else:
                when_durable(self, written, done)

        patch.setattr(JournalStore, "when_durable", early)

    fault.__name__ = f"answer_{kind.__name__.lower()}_before_the_fsync"
    return fault


def write_a_promise_without_what_was_sent(patch: Patch, _own: DiskOs) -> None:
    """Where one request has both: it is brought from memory, so only a crash shows it."""
    append = JournalStore.append

    def alone(self: JournalStore, records: list[Record], bodies: list[memoryview]) -> Written:
        held, self._held = self._held, ([], [])
        written = append(self, records, bodies)
        if held[0]:
            self._recent[written.entry.position] = [bytes(body) for body in held[1]]
        return written

    patch.setattr(JournalStore, "append", alone)


def cut_without_a_fsync(patch: Patch, own: DiskOs) -> None:
    """The old bytes come back behind new ones: only a second crash shows it."""
    cut: set[int] = set()
    ftruncate, fsync = own.ftruncate, own.fsync

    def noted(fd: int, size: int) -> None:
        ftruncate(fd, size)
        inode = own._open[fd][1]
        assert isinstance(inode, int)
        cut.add(inode)

    def skipped(fd: int) -> None:
        inode = own._open[fd][1]
        if inode in cut:
            cut.discard(inode)  # type: ignore[arg-type]
        else:
            fsync(fd)

    patch.setattr(own, "ftruncate", noted, raising=False)
    patch.setattr(own, "sync_of_caches", skipped, raising=False)


def no_fsync_of_folders(patch: Patch, own: DiskOs) -> None:
    """The name of a new segment is lost, with all that was flushed into it."""
    fsync = own.fsync

    def files_only(fd: int) -> None:
        if isinstance(own._open[fd][1], int):
            fsync(fd)

    patch.setattr(own, "sync_of_caches", files_only, raising=False)


def no_fsync_before_a_rename(patch: Patch, own: DiskOs) -> None:
    """A new file has its name, and not its content."""
    fsync = own.fsync

    def not_of_new_files(fd: int) -> None:
        disk, what = own._open[fd]
        if not any(inode == what and os.path.splitext(path)[1] == ".tmp" for path, inode in disk.names.items()):
            fsync(fd)

    patch.setattr(own, "sync_of_caches", not_of_new_files, raising=False)


def cut_the_journal_below_a_live_branch(patch: Patch, _own: DiskOs) -> None:
    patch.setattr(JournalState, "first_needed_lsn", lambda self, lsn, memory_lsn, _left_out: min(lsn, memory_lsn))


def cut_the_journal_without_writing_down_what_is_remembered(patch: Patch, _own: DiskOs) -> None:
    patch.setattr("metamq.tx.store.memory.OutcomeMemory.items", lambda self: iter(()))


def new_ids_at_each_try(patch: Patch, _own: DiskOs) -> None:
    """A batch is known by its id."""
    apply = CommitApplier.apply

    def renumbered(self: CommitApplier, committed: CommittedBranch, present: Any = None) -> int:
        first = self._journal._ids.reserve(len(committed.bodies))
        return apply(self, committed._replace(first_batch_id=first), present)

    patch.setattr(CommitApplier, "apply", renumbered)


def trust_what_was_written(patch: Patch, _own: DiskOs) -> None:
    """What recovery finds in a log's tail is taken for whole."""
    patch.setattr("metamq.broker.log.disk.scan.check_stored", lambda buffer, at, end: _unchecked(buffer, at, end))


def _unchecked(buffer: memoryview, at: int, end: int) -> tuple[Any, str | None]:
    if end - at < HEADER_BYTES:
        return None, "less than a header"
    header = read_header(buffer, at)
    return header, None if HEADER_BYTES <= header.size <= end - at else "its size"


FAULTS: list[Callable[[Patch, DiskOs], None]] = [
    append_before_the_commit_record,
    redo_blindly,
    look_from_where_it_was_appended_first,
    look_from_an_end_that_is_not_flushed,
    answer_before_the_fsync(Commit),
    answer_before_the_fsync(Prepare),
    write_a_promise_without_what_was_sent,
    cut_without_a_fsync,
    no_fsync_of_folders,
    no_fsync_before_a_rename,
    cut_the_journal_below_a_live_branch,
    cut_the_journal_without_writing_down_what_is_remembered,
    new_ids_at_each_try,
    trust_what_was_written,
]


def _look_for_it(own: DiskOs, seed: int) -> None:
    """By chance it takes a second look, now and then."""
    for more in range(6):
        enumerate_crashes(own, random.Random(seed + more), most=6, inside=20)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_power_cuts_find(fault: Callable[[Patch, DiskOs], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with modelled_disk() as own:
        fault(monkeypatch, own)
        with pytest.raises((Violation, MetamqError)) as found:
            _look_for_it(own, seed)
    print(found.value)
