"""The list of epochs by value, and the rule it is for: where two logs part."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metamq.broker.log.disk.epochs import Epoch, EpochList


class Batch(NamedTuple):
    """`name` makes every append another batch, whatever else is equal."""

    epoch: int
    count: int
    size: int
    name: int


class ModelLog:
    """A log as a list of batches, from some place on."""

    def __init__(self) -> None:
        self.start: tuple[int, int] = (0, 0)
        self.batches: list[Batch] = []

    def marks(self) -> list[tuple[int, int]]:
        """(offset, position) of every boundary."""
        marks = [self.start]
        for batch in self.batches:
            marks.append((marks[-1][0] + batch.count, marks[-1][1] + batch.size))
        return marks

    @property
    def end(self) -> tuple[int, int]:
        return self.marks()[-1]

    def epochs(self) -> EpochList:
        """As the log makes it: batch by batch."""
        epochs = EpochList()
        for batch, (offset, position) in zip(self.batches, self.marks(), strict=False):
            epochs = epochs.add(batch.epoch, offset, position)
        return epochs


@st.composite
def logs(draw: st.DrawFn) -> ModelLog:
    log = ModelLog()
    epoch = 0
    for name in range(draw(st.integers(0, 12))):
        epoch += draw(st.sampled_from([0, 0, 1, 3]))
        log.batches.append(Batch(epoch, draw(st.integers(1, 3)), 8 * draw(st.integers(1, 3)), name))
    return log


@given(log=logs())
def test_an_entry_for_each_epoch_at_its_first_batch(log: ModelLog) -> None:
    epochs, marks = log.epochs(), log.marks()
    firsts: dict[int, tuple[int, int]] = {}
    for batch, mark in zip(log.batches, marks, strict=False):
        firsts.setdefault(batch.epoch, mark)
    assert epochs.entries == tuple(Epoch(epoch, *mark) for epoch, mark in firsts.items())
    assert epochs.last == (log.batches[-1].epoch if log.batches else -1)
    assert EpochList.of(list(epochs.entries)) == epochs
    lasts = {batch.epoch: mark for batch, mark in zip(log.batches, marks[1:], strict=True)}
    assert epochs.ends(*log.end) == tuple(Epoch(epoch, *mark) for epoch, mark in lasts.items())
    for batch, (_offset, position) in zip(log.batches, marks[1:], strict=True):
        assert epochs.epoch_before(position) == batch.epoch
    assert epochs.epoch_before(0) == -1


@given(log=logs(), data=st.data())
def test_what_is_behind_an_offset_is_told_by_epochs(log: ModelLog, data: st.DataObject) -> None:
    of_message = [batch.epoch for batch in log.batches for _ in range(batch.count)]
    end = data.draw(st.integers(0, len(of_message)))
    offset = data.draw(st.integers(0, len(of_message) + 1))
    told = log.epochs().after(offset, end)
    found = [next((epoch for epoch, until in told if at < until), None) for at in range(offset, end)]
    assert found == of_message[offset:end]
    assert [until for _epoch, until in told][-1:] == ([end] if offset < end else [])


@given(log=logs(), data=st.data())
def test_a_cut_leaves_the_list_of_what_is_left(log: ModelLog, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, len(log.batches)))
    whole, position = log.epochs(), log.marks()[kept][1]
    del log.batches[kept:]
    assert whole.cut(position) == log.epochs()


@pytest.mark.slow
@given(log=logs(), data=st.data())
def test_without_its_beginning_a_log_ends_its_epochs_where_it_did(log: ModelLog, data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(log.batches)))
    whole, ends, end, start = log.epochs(), log.epochs().ends(*log.end), log.end, log.marks()[gone]
    last_gone = log.batches[gone - 1].epoch if gone else -1
    del log.batches[:gone]
    log.start = start
    left = whole.drop_prefix(*start)
    if log.batches:
        assert left == log.epochs()
        assert left.ends(*end) == ends[-len(left.entries) :]
    else:
        assert left == (EpochList((Epoch(last_gone, *start),)) if gone else EpochList())
    assert left.drop_prefix(*start) == left
    assert left.is_of(start[1], end[1], left.last)
    if left.entries:
        later = left.add(left.last + 1, *end)
        assert later == (left if log.batches else EpochList()).add(left.last + 1, *end)


def test_an_epoch_that_falls_is_refused() -> None:
    epochs = EpochList().add(5, 0, 0)
    with pytest.raises(ValueError, match="epoch 4 after epoch 5"):
        epochs.add(4, 10, 100)
    with pytest.raises(ValueError, match="does not follow"):
        EpochList.of([(5, 0, 0), (5, 10, 100)])
    with pytest.raises(ValueError, match="does not follow"):
        EpochList.of([(5, 0, 0), (6, 10, 0)])


@given(log=logs())
def test_the_list_of_another_log_is_told(log: ModelLog) -> None:
    epochs, (_offset, end) = log.epochs(), log.end
    if not log.batches:
        assert EpochList().is_of(0, 0, -1)
        return
    last = log.batches[-1].epoch
    assert epochs.is_of(0, end, last)
    assert not epochs.is_of(0, end, last + 1), "older than the log"
    assert not epochs.is_of(0, end, last - 1), "newer than the log"
    assert not epochs.is_of(8, end, last), "before retention"
    if len(epochs.entries) > 1:
        assert not epochs.is_of(0, epochs.entries[-1].position, last), "before a cut"
    assert not EpochList().is_of(0, end, last)


@given(log=logs(), data=st.data())
def test_bytes_are_checked(log: ModelLog, data: st.DataObject) -> None:
    epochs = log.epochs()
    packed = epochs.to_bytes()
    assert EpochList.from_bytes(packed) == epochs
    at = data.draw(st.integers(0, len(packed) - 1))
    assert EpochList.from_bytes(packed[:at]) is None
    assert EpochList.from_bytes(packed[:at] + bytes([packed[at] ^ 0x20]) + packed[at + 1 :]) is None
    assert EpochList.from_bytes(packed + bytes(20)) is None


# -- the rule ----------------------------------------------------------------------------------------------------------


def point_of_agreement(mine: ModelLog, other: ModelLog) -> int:
    """Up to which position two logs are equal, told from their lists and ends alone."""
    my_ends = {end.epoch: end.position for end in mine.epochs().ends(*mine.end)}
    other_ends = {end.epoch: end.position for end in other.epochs().ends(*other.end)}
    common = my_ends.keys() & other_ends.keys()
    return min(my_ends[max(common)], other_ends[max(common)]) if common else 0


def equal_up_to(mine: ModelLog, other: ModelLog) -> int:
    """The same, from the batches."""
    position = 0
    for my_batch, other_batch in zip(mine.batches, other.batches, strict=False):
        if my_batch != other_batch:
            break
        position += my_batch.size
    return position


History = st.lists(
    st.one_of(
        st.tuples(st.just("elect"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("append"), st.integers(1, 3), st.integers(1, 2)),
        st.tuples(st.just("follow"), st.integers(0, 3), st.integers(0, 4)),
        st.tuples(st.just("lose"), st.integers(0, 3), st.integers(0, 4)),
    ),
    max_size=40,
)


def live(history: list[tuple[str, int, int]], *, restart_raises_the_epoch: bool = True) -> list[ModelLog]:
    """Four replicas: anybody may become master, with whatever log it has; anybody may lose the tail of its log."""
    replicas = [ModelLog() for _ in range(4)]
    master, epoch = 0, 1
    for number, (event, who, amount) in enumerate(history):
        if event == "elect":
            master = who
            epoch += 1
        elif event == "append":
            replicas[master].batches.append(Batch(epoch, who, 8 * amount, number))
        elif event == "follow" and who != master:
            slave, source = replicas[who], replicas[master]
            agreed = point_of_agreement(slave, source)
            slave.batches = [b for b, (_, end) in zip(slave.batches, slave.marks()[1:], strict=True) if end <= agreed]
            have = len(slave.batches)
            slave.batches += source.batches[have : have + amount]
        elif event == "lose" and amount:
            del replicas[who].batches[-amount:]
            if who == master and restart_raises_the_epoch:
                epoch += 1
    return replicas


@given(history=History)
def test_the_lists_tell_where_any_two_logs_part(history: list[tuple[str, int, int]]) -> None:
    """Empty epochs, fast fail-over, a master that comes back shorter, a slave that is ahead: all are in there."""
    replicas = live(history)
    for mine in replicas:
        for other in replicas:
            assert point_of_agreement(mine, other) == equal_up_to(mine, other)


def test_without_a_new_epoch_at_a_restart_they_would_not() -> None:
    """Hazard S1-2: the master loses a tail that a slave has, and writes another under the same epoch."""
    history = [("append", 1, 1), ("append", 2, 1), ("follow", 1, 4), ("lose", 0, 1), ("append", 3, 1)]
    for raised in (True, False):
        master, slave, *_ = live(history, restart_raises_the_epoch=raised)
        assert equal_up_to(master, slave) == 8
        assert (point_of_agreement(master, slave) == 8) is raised


def test_empty_epochs_hide_nothing() -> None:
    """2.10-1 of RocketMQ: the new master's epoch is empty; the old one wrote on alone; a third takes over."""
    history = [
        ("append", 1, 1), ("follow", 1, 4), ("follow", 2, 4), ("append", 2, 1),  # replica 0 writes on alone
        ("elect", 1, 0), ("elect", 2, 0), ("follow", 1, 4),  # epochs 2 and 3 have no batch
        ("elect", 1, 0), ("append", 3, 1),
    ]  # fmt: skip
    old, new, *_ = live(history)
    assert [entry.epoch for entry in old.epochs().entries] == [1]
    assert [entry.epoch for entry in new.epochs().entries] == [1, 4]
    assert point_of_agreement(old, new) == equal_up_to(old, new) == 8


@st.composite
def two_logs_of_one_partition(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """What two replicas hold, an epoch for each message: every epoch goes on from where some replica had got to."""
    written: list[list[int]] = [[]]
    for epoch in range(1, draw(st.integers(1, 6))):
        before = draw(st.sampled_from(written))
        written.append(before[: draw(st.integers(0, len(before)))] + [epoch] * draw(st.integers(0, 4)))
    first, second = (draw(st.sampled_from(written)) for _ in range(2))
    return first[: draw(st.integers(0, len(first)))], second[: draw(st.integers(0, len(second)))]


@given(both=two_logs_of_one_partition())
@example(both=([1, 3], [1, 1, 1, 2]))
@example(both=([1] * 5 + [3] * 3, [1] * 6 + [2]))  # two losses: the master of epoch 3 had nothing of epoch 2
def test_a_reader_is_told_up_to_where_it_agrees_with_a_log(both: tuple[list[int], list[int]]) -> None:
    """What is accepted is the same; where it is not, that is noticed, and nothing that is new is passed over."""
    read, log = both
    offset = len(read)
    epochs = EpochList()
    for at, epoch in enumerate(log):
        epochs = epochs.add(epoch, at, at)
    # Of one epoch the same messages lie at the same places, and what is before it is the same, too.
    common = next((n for n, pair in enumerate(zip(read[:offset], log, strict=False)) if len(set(pair)) > 1), None)
    common = min(offset, len(log)) if common is None else common
    epoch = read[offset - 1] if offset else -1
    agreed = epochs.agrees_with_reader(offset, epoch, 0, len(log))
    assert (agreed == offset) == (common == offset)
    assert agreed <= common
    if epoch in log:
        assert agreed == common
    assert epochs.epoch_of_reader(agreed) == (log[agreed - 1] if agreed else -1)
    assert epochs.agrees_with_reader(offset, -1, 0, len(log)) == offset


def test_a_reader_at_the_start_of_a_log_agrees_whatever_it_has_read() -> None:
    """Retention took what it has read."""
    epochs = EpochList.of([(5, 100, 100)])
    assert epochs.agrees_with_reader(100, 3, 100, 120) == 100
    assert epochs.agrees_with_reader(90, 3, 100, 120) == 90
    assert epochs.agrees_with_reader(110, 3, 100, 120) == 100
