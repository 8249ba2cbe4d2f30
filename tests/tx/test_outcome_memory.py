"""What is remembered of committed branches: the newest, in the order of their time, whatever is read again."""

from __future__ import annotations

from metamq.tx.store.memory import OutcomeMemory
from metamq.tx.store.records import BranchKey
from metamq.wire.xa import Xid


def memory_of(numbers: range, most: int) -> OutcomeMemory:
    memory = OutcomeMemory(most)
    for number in numbers:
        memory.add(BranchKey(Xid(1, b"%d" % number), number), number)
    return memory


def test_what_was_forgotten_while_it_was_written_down_stays_forgotten() -> None:
    memory = memory_of(range(10), most=5)
    written_down = list(memory.items())
    memory.add(BranchKey(Xid(1, b"10"), 10), 10)
    memory.restore(written_down)
    assert list(memory.items()) == [*written_down[1:], *list(memory_of(range(10, 11), 1).items())]


def test_older_ones_come_before_newer_ones_that_are_there() -> None:
    memory = memory_of(range(8, 10), most=5)
    memory.restore(memory_of(range(8), most=5).items())
    memory.add(BranchKey(Xid(1, b"10"), 10), 10)
    assert list(memory.items()) == list(memory_of(range(11), most=5).items())


def test_what_a_master_writes_down_is_not_sorted_anew_at_the_next_commit() -> None:
    memory = memory_of(range(10), most=5)
    known, written_down = memory._known, list(memory.items())
    memory.add(BranchKey(Xid(1, b"10"), 10), 10)
    memory.restore(written_down)
    memory.add(BranchKey(Xid(1, b"11"), 11), 11)
    assert memory._known is known
