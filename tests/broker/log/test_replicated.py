"""A log copied from a master's, byte by byte: what it takes, what it refuses, and how it recovers."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metamq.broker.log import recovery
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.flushed import FlushFile
from metamq.errors import ConfigError, CorruptData, Fenced, MetamqError, ProtocolError, StorageError
from metamq.wire.batch import read_header, stamp
from tests.examples import examples

SEED = 20250311
MASTER = LogConfig(segment_bytes=700, index_interval_bytes=250)
REPLICA = LogConfig(segment_bytes=1100, index_interval_bytes=300)
ONE_SEGMENT = LogConfig(segment_bytes=1 << 20, index_interval_bytes=300)


class Pair:
    """A master's log and a replica's, each on a shelf of its own."""

    def __init__(self, make_shelf: Callable[[], Any], config: LogConfig = REPLICA, files: Any = None) -> None:
        self.master_shelf, self.shelf = make_shelf(), make_shelf()
        self.config = config
        self.master = self.master_shelf.open(MASTER)
        self.replica = self.shelf.open(config, files=files, bound=True)
        self.sequence = 0

    def append(self, count: int = 1, **fields: Any) -> None:
        """Batches of two messages, from producer 5."""
        for _ in range(count):
            value = b"value %d " % self.sequence
            number, self.sequence = self.sequence, self.sequence + 1
            self.master_shelf.append(
                self.master, [value * 3] * 2, producer_id=5, sequence=number, now_us=1000 + number, **fields
            )

    def copy(self, bytes_max: int = 1 << 20) -> None:
        """One copy, as a link makes it: whole batches from where the replica's log ends."""
        run = self.master.read_position(self.replica.end_position, bytes_max)
        self.replica.append_replicated(run.data, run.position)
        assert (self.replica.end_offset, self.replica.end_position) == (run.end_offset, run.end_position)

    def catch_up(self, bytes_max: int = 1 << 20) -> None:
        while self.replica.end_position < self.master.end_position:
            self.copy(bytes_max)

    def reopen(self, clean: bool = False) -> None:
        self.replica.close(clean)
        self.replica = self.shelf.open(self.config, bound=True)

    def flush(self) -> None:
        self.shelf.flush(self.replica)

    def swap(self) -> None:
        """The replica becomes the master."""
        self.master.set_bound(self.master.stable_offset, self.master.stable_position)
        self.replica.clear_bound()
        self.master, self.replica = self.replica, self.master
        self.master_shelf, self.shelf = self.shelf, self.master_shelf

    def assert_equal(self) -> None:
        """The bytes, and all that follows from them."""
        mine, other = self.replica, self.master
        assert bytes_of(self.shelf) == bytes_of(self.master_shelf)
        assert (mine.end_offset, mine.end_position) == (other.end_offset, other.end_position)
        assert mine.last_append_us == other.last_append_us
        assert mine.epochs() == other.epochs()
        for sequence in range(max(self.sequence - 7, 0), self.sequence + 1):
            _batch, header = self.shelf.batch([b"x"] * 2, producer_id=5, sequence=sequence)
            assert mine.check_producer(header) == other.check_producer(header)
        for log in (mine, other):
            log.clear_bound()
        assert self.shelf.read_all(mine) == self.master_shelf.read_all(other)
        for time_us in (0, 2, 5):
            assert self.shelf.offset_at_time(mine, time_us) == self.shelf.offset_at_time(other, time_us)


def bytes_of(shelf: Any) -> bytes:
    return b"".join(path.read_bytes() for path in shelf.paths("log"))


@pytest.fixture
def pair(make_shelf: Any) -> Pair:
    return Pair(make_shelf)


def test_the_copy_is_the_log_byte_by_byte(pair: Pair) -> None:
    for epoch in (1, 1, 4):
        pair.append(8, epoch=epoch)
        pair.catch_up(1000)
    assert len(pair.master.segments()) > len(pair.replica.segments()) > 1
    pair.assert_equal()
    pair.reopen()
    pair.assert_equal()
    pair.reopen(clean=True)
    assert pair.replica.recovery.clean
    pair.assert_equal()


def test_segments_are_cut_by_the_replicas_own_settings(make_shelf: Any) -> None:
    """Also in the middle of one copy, and where one batch is larger than a segment."""
    pair = Pair(make_shelf, LogConfig(segment_bytes=400))
    master = pair.master_shelf
    pair.master.reconfigure(ONE_SEGMENT)
    pair.append(5)
    master.append(pair.master, [b"v" * 1000])
    pair.append(5)
    pair.copy()
    segments = pair.replica.segments()
    assert len(segments) > 4
    assert all(segment.size_bytes <= 400 or segment.end_offset == segment.base_offset + 1 for segment in segments)
    pair.replica.set_bound(pair.replica.end_offset, pair.replica.end_position)
    assert pair.shelf.read_all(pair.replica) == master.read_all(pair.master)
    assert bytes_of(pair.shelf) == bytes_of(master)


def test_nothing_at_all_is_nothing(pair: Pair) -> None:
    pair.replica.append_replicated(memoryview(b""), 0)
    pair.append(1)
    pair.catch_up()
    pair.replica.append_replicated(memoryview(b""), pair.replica.end_position)
    pair.assert_equal()


# -- refusing ---------------------------------------------------------------------------------------------------------


def refused(pair: Pair, batches: bytes | bytearray, position: int) -> MetamqError:
    """The error; nothing has changed, and the log takes what is right afterwards."""
    log, shelf = pair.replica, pair.shelf
    before = shelf.contents(), log.end_offset, log.end_position, log.epochs(), log.last_append_us
    with pytest.raises((CorruptData, ProtocolError)) as caught:
        log.append_replicated(memoryview(batches), position)
    assert (shelf.contents(), log.end_offset, log.end_position, log.epochs(), log.last_append_us) == before
    assert "flights/0-0" in str(caught.value)
    assert "Nothing of it was stored" in caught.value.hint
    return caught.value


def test_a_flipped_bit_in_any_byte_of_a_copy_is_refused(pair: Pair) -> None:
    pair.append(2)
    pair.copy(1)
    pair.append(3)
    run = pair.master.read_position(pair.replica.end_position, 1 << 20)
    for at in range(len(run.data)):
        spoilt = bytearray(run.data)
        spoilt[at] ^= 1 << at % 8
        error = refused(pair, spoilt, run.position)
        assert isinstance(error, CorruptData)
        assert run.position <= (error.position or 0) <= run.position + at
    pair.catch_up()
    pair.assert_equal()


def test_a_copy_that_was_cut_anywhere_but_between_batches_is_refused(pair: Pair) -> None:
    pair.append(3)
    run = pair.master.read_position(0, 1 << 20)
    boundaries = {read_header(run.data).size * number for number in range(4)}
    assert max(boundaries) == len(run.data)
    for size in range(len(run.data)):
        if size not in boundaries:
            assert isinstance(refused(pair, bytes(run.data[:size]), 0), CorruptData)
    pair.copy()
    pair.assert_equal()


def test_a_copy_of_another_place_is_refused(pair: Pair) -> None:
    pair.append(5)
    pair.copy(1)
    size = pair.replica.end_position
    for position in (0, size - 8, size + 8, 2 * size):
        run = pair.master.read_position(position // size * size, 1)
        error = refused(pair, bytes(run.data), position)
        assert f"ends at byte {size:,}, the copy begins at byte {position:,}" in str(error)
    for wrong in (0, 2):  # batches that are not the next one, said to be
        run = pair.master.read_position(wrong * size, 1)
        error = refused(pair, bytes(run.data), size)
        assert f"at byte {size:,} the copy has offset {2 * wrong:,} of epoch 1; expected is offset 2" in str(error)
    gap = bytes(pair.master.read_position(size, 1).data) + bytes(pair.master.read_position(3 * size, 1).data)
    assert "expected is offset 4" in str(refused(pair, gap, size))
    pair.catch_up()
    pair.assert_equal()


def test_an_epoch_that_falls_is_refused(pair: Pair) -> None:
    pair.append(2, epoch=5)
    pair.catch_up()
    batch, header = pair.shelf.batch([b"value"])
    for epoch in (4, 5):
        stamp(batch, 0, epoch=epoch, base_offset=4, batch_id=9, append_time_us=0, unflushed_bytes=0)
        if epoch == 4:
            error = refused(pair, bytes(batch), pair.replica.end_position)
            assert "has offset 4 of epoch 4; expected is offset 4 of epoch 5 or later" in str(error)
    pair.replica.append_replicated(batch, pair.replica.end_position)
    assert pair.replica.end_offset == 4 + header.count


def test_a_former_master_that_copied_since_appends_no_more(pair: Pair) -> None:
    pair.append(2, epoch=3)
    pair.catch_up()
    pair.swap()
    pair.append(1, epoch=5)
    pair.catch_up()
    with pytest.raises(Fenced, match="epoch 3 of flights/0-0 is not the master: the log already has batches of"):
        pair.shelf.append(pair.replica, [b"own"], epoch=3)
    pair.assert_equal()


# -- failing, dying ---------------------------------------------------------------------------------------------------


def test_a_disk_that_fails_while_copying_ends_the_writing(make_shelf: Any, disk: Any) -> None:
    """At any write of a copy over several segments: what is there are whole batches, and the next start goes on."""
    for fail_at in range(100):
        disk.write_fault = lambda number, size: None
        files = disk.files()
        pair = Pair(make_shelf, LogConfig(segment_bytes=400), files)
        pair.master.reconfigure(ONE_SEGMENT)
        pair.append(6)
        disk.writes = 0
        fault = OSError(errno.EIO, "Input/output error")
        disk.write_fault = lambda number, size: (None, 100, fault)[(number >= fail_at) + (number > fail_at)]  # noqa: B023
        try:
            pair.copy()
            failed = False
        except StorageError:
            failed = True
            with pytest.raises(StorageError, match="takes no writes"):
                pair.copy()
        pair.replica.close(clean=False)
        files.close()
        pair.replica = pair.shelf.open(LogConfig(segment_bytes=400), bound=True)
        pair.catch_up()
        pair.assert_equal()
        pair.replica.close()
        pair.master.close()
        if not failed:
            assert fail_at > 8
            return
    raise AssertionError("the copying does not end")


def crashed_at(shelf: Any, target: Path, size: int) -> Any:
    """The shelf after a crash that left `size` bytes of its one segment."""
    copy = type(shelf)(target)
    shutil.copytree(shelf.folder, copy.folder)
    os.truncate(copy.byte_at(0)[0], size)
    return copy


def test_a_log_that_lost_all_it_had_takes_batches_of_an_earlier_epoch(make_shelf: Any, tmp_path: Path) -> None:
    # It was the master of epoch 3 by an accepted loss, and lost power before anything was flushed; then so was the
    # other one, whose log begins with epoch 2. What its list of epochs names is not there any more.
    pair = Pair(make_shelf, ONE_SEGMENT)
    pair.append(2, epoch=2)
    pair.replica.clear_bound()
    pair.shelf.append(pair.replica, [b"lost"], epoch=3)
    pair.shelf = crashed_at(pair.shelf, tmp_path / "crashed", 0)
    pair.replica = pair.shelf.open(pair.config, bound=True)
    assert pair.replica.end_position == 0
    assert pair.replica.epochs().last == 3
    pair.append(1, epoch=4)
    pair.catch_up()
    pair.assert_equal()


@pytest.mark.slow
def test_torn_at_any_byte_of_what_was_copied(make_shelf: Any, tmp_path: Path) -> None:
    pair = Pair(make_shelf, ONE_SEGMENT)
    pair.append(4)
    pair.catch_up()
    pair.flush()
    flushed = pair.replica.flushed_position
    pair.append(2, epoch=2)
    pair.copy()
    pair.replica.close(clean=False)
    shelf, end = pair.shelf, pair.replica.end_position
    for size in range(flushed, end):
        pair.shelf = crashed_at(shelf, tmp_path / "torn" / str(size), size)
        pair.replica = pair.shelf.open(ONE_SEGMENT, bound=True)
        assert flushed <= pair.replica.end_position <= size
        assert pair.replica.end_position == size - pair.replica.recovery.cut_bytes
        pair.catch_up()
        pair.assert_equal()
        pair.replica.close(clean=False)
        shutil.rmtree(pair.shelf.folder)


# -- damage or torn tail ----------------------------------------------------------------------------------------------


def master_flushed_more(make_shelf: Any) -> Pair:
    """The master flushed after every batch, the replica after the second: the later ones tell of the master's disk."""
    pair = Pair(make_shelf, ONE_SEGMENT)
    pair.master.reconfigure(ONE_SEGMENT)
    for number in range(6):
        pair.append()
        pair.master_shelf.flush(pair.master)
        pair.catch_up()
        if number == 1:
            pair.flush()
    header = read_header(pair.master.read_position(pair.master.end_position * 5 // 6, 1).data)
    assert header.unflushed_bytes == 0
    pair.replica.close(clean=False)
    return pair


def test_a_torn_tail_is_one_whatever_the_master_had_flushed(make_shelf: Any) -> None:
    pair = master_flushed_more(make_shelf)
    pair.shelf.damage(pair.replica.end_position // 2)
    pair.replica = pair.shelf.open(ONE_SEGMENT, bound=True)
    assert pair.replica.end_offset == 6
    assert pair.replica.recovery.cut_bytes
    pair.catch_up()
    pair.assert_equal()


def test_it_would_be_refused_if_the_masters_word_counted(make_shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = master_flushed_more(make_shelf)
    pair.shelf.damage(pair.replica.end_position // 2)
    find: Callable[..., Any] = recovery.find_flushed_claim
    monkeypatch.setattr(recovery, "find_flushed_claim", lambda *args: find(*args[:-1], range(100)))
    with pytest.raises(CorruptData, match="says that these bytes were flushed"):
        pair.shelf.open(ONE_SEGMENT)


def test_damage_below_the_replicas_flushed_point_is_refused(make_shelf: Any) -> None:
    pair = master_flushed_more(make_shelf)
    pair.shelf.damage(pair.replica.flushed_position - 9)
    before = pair.shelf.contents()
    with pytest.raises(CorruptData, match="is damaged at byte"):
        pair.shelf.open(ONE_SEGMENT)
    assert pair.shelf.contents() == before


def test_a_former_replica_that_became_master_proves_its_own_flushes(make_shelf: Any) -> None:
    """Its own batches tell of its own disk again, and those copied before still do not."""
    pair = master_flushed_more(make_shelf)
    copied = pair.replica.end_position
    log = pair.replica = pair.shelf.open(ONE_SEGMENT)
    pair.shelf.append(log, [b"own"], epoch=2)
    pair.flush()
    durable = (pair.shelf.folder / "flushed").read_bytes()
    own = log.end_position
    for _ in range(3):
        pair.shelf.append(log, [b"own"], epoch=2)
        pair.flush()
    log.close(clean=False)
    (pair.shelf.folder / "flushed").write_bytes(durable)  # a power cut took what was stored since
    held = bytes_of(pair.shelf)
    pair.shelf.damage(own + 90)
    with pytest.raises(CorruptData, match="says that these bytes were flushed"):
        pair.shelf.open(ONE_SEGMENT)
    pair.shelf.paths("log")[0].write_bytes(held)
    for place in (copied - 9, 9):
        pair.shelf.damage(place)
        with pytest.raises(CorruptData):
            pair.shelf.open(ONE_SEGMENT)
        pair.shelf.paths("log")[0].write_bytes(held)
    pair.shelf.open(ONE_SEGMENT).close()


def test_own_batches_that_come_back_from_another_master_prove_nothing(make_shelf: Any) -> None:
    """They were cut here and copied again: what lies below them was flushed once, and is not any more."""
    pair = Pair(make_shelf, ONE_SEGMENT)
    pair.master.reconfigure(ONE_SEGMENT)
    for number in range(6):
        pair.append()
        if number == 1:
            end = pair.master.end_position
        pair.master_shelf.flush(pair.master)
    pair.catch_up()
    pair.swap()
    pair.replica.truncate(end)
    pair.catch_up()
    pair.replica.close(clean=False)
    pair.shelf.damage(pair.replica.end_position // 2)
    pair.replica = pair.shelf.open(ONE_SEGMENT, bound=True)
    assert pair.replica.end_offset == 6
    pair.catch_up()
    pair.assert_equal()


def test_the_flushed_point_on_the_disk_is_one_flush_behind_at_most(make_shelf: Any) -> None:
    """A master's log leaves that to its batches; those that were copied say nothing about this disk."""
    pair = Pair(make_shelf)
    path = pair.shelf.folder / "flushed"
    durable = path.read_bytes()

    def sync(fd: int) -> None:
        nonlocal durable
        if os.path.samestat(os.fstat(fd), path.stat()):
            durable = path.read_bytes()

    pair.shelf.files.sync = sync
    before = 0
    for _ in range(8):
        pair.append(2)
        pair.copy(400)
        pair.flush()
        held = path.read_bytes()
        path.write_bytes(durable)
        point = FlushFile(str(pair.shelf.folder), pair.shelf.files).load("flights/0-0")
        path.write_bytes(held)
        assert point is not None
        assert point.position >= before
        before = pair.replica.flushed_position
    assert before > 1000


@pytest.mark.slow
def test_a_power_cut_leaves_a_replica_the_log_of_its_master(make_shelf: Any) -> None:
    """Sectors of what was not flushed survive at random, and `flushed` may lack its last update."""
    print(f"seed {SEED}")
    choice = random.Random(SEED)
    for _ in range(100):
        pair = Pair(make_shelf, LogConfig(segment_bytes=choice.choice([400, 1500, 1 << 20]), index_interval_bytes=300))
        path = pair.shelf.folder / "flushed"
        slots, flushes = [path.read_bytes()], [0]
        for _ in range(choice.randrange(1, 25)):
            pair.append(choice.randrange(3), epoch=1 + len(flushes) // 3)
            if choice.random() < 0.4:
                pair.master_shelf.flush(pair.master)
            pair.copy(choice.randrange(600))
            if choice.random() < 0.2:
                pair.flush()
                slots.append(path.read_bytes())
                flushes.append(pair.replica.flushed_position)
        pair.replica.close(clean=False)
        path.write_bytes(choice.choice(slots[-2:]))
        for segment in pair.replica.segments():
            data = bytearray(Path(segment.path).read_bytes())
            safe = max(flushes[-1] - segment.base_position, 0)
            for sector in range(safe // 512, len(data) // 512 + 1):
                if choice.random() < 0.4:
                    start, end = max(sector * 512, safe), min((sector + 1) * 512, len(data))
                    data[start:end] = bytes(max(end - start, 0))
            Path(segment.path).write_bytes(data)
        pair.replica = pair.shelf.open(pair.config, bound=True)
        assert pair.replica.end_position >= flushes[-1]
        assert pair.replica.stable_position <= pair.replica.end_position
        pair.catch_up()
        pair.assert_equal()
        pair.replica.close()
        pair.master.close()


Event = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4)),
    st.tuples(st.just("copy"), st.integers(0, 900)),
    st.tuples(st.just("copy"), st.integers(0, 900)),
    st.tuples(st.just("flush"), st.integers(0, 1)),
    st.tuples(st.just("checkpoint"), st.integers(0, 1)),
    st.tuples(st.just("reopen"), st.integers(0, 1)),
    st.tuples(st.just("cut"), st.integers(0, 100)),
    st.tuples(st.just("epoch"), st.just(0)),
    st.tuples(st.just("retain"), st.just(0)),
    st.tuples(st.just("swap"), st.just(0)),
)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(Event, min_size=5, max_size=50))
def test_whatever_happens_in_between_a_copy_ends_equal(make_shelf: Any, events: Any) -> None:
    """`cut`: the replica is cut as after a disagreement. `swap`: it caught up and becomes the master."""
    pair = Pair(make_shelf)
    epoch = 1
    for name, argument in events:
        if name == "append":
            pair.append(argument, epoch=epoch)
        elif name == "copy":
            pair.copy(argument)
        elif name == "flush":
            shelf, log = [(pair.shelf, pair.replica), (pair.master_shelf, pair.master)][argument]
            shelf.flush(log)
        elif name == "checkpoint":
            shelf, log = [(pair.shelf, pair.replica), (pair.master_shelf, pair.master)][argument]
            shelf.checkpoint(log)
        elif name == "reopen":
            pair.reopen(clean=bool(argument))
        elif name == "cut":
            pair.replica.truncate(pair.replica.end_position * argument // 100)
        elif name == "epoch":
            epoch += 1
        elif name == "swap":
            pair.catch_up()
            epoch += 1
            pair.swap()
        stable = pair.replica.stable_position
        assert stable <= pair.replica.end_position
        pair.shelf.checkpoint(pair.replica)
        assert pair.replica.stable_position == stable
    pair.catch_up()
    pair.assert_equal()
    pair.reopen()
    pair.assert_equal()
    pair.replica.close(clean=False)
    pair.master.close(clean=False)


# -- reading what is copied -------------------------------------------------------------------------------------------


def test_whole_batches_of_one_segment_up_to_the_end(make_shelf: Any) -> None:
    shelf = make_shelf()
    log = shelf.open(MASTER)
    log.set_bound(0, 0)
    for number in range(20):
        shelf.append(log, [b"v" * (1 + number * 37 % 200)] * 2)
    assert log.stable_offset == 0, "readers see nothing, replicas all"
    ends = {segment.base_position + segment.size_bytes for segment in log.segments()}
    data = bytes_of(shelf)
    boundaries = [0]
    while boundaries[-1] < len(data):
        boundaries.append(boundaries[-1] + read_header(data, boundaries[-1]).size)
    for number, position in enumerate(boundaries[:-1]):
        for bytes_max in (0, 1, 100, 333, 400, 5000):
            run = log.read_position(position, bytes_max)
            assert (run.position, run.base_offset) == (position, 2 * number)
            assert bytes(run.data) == data[position : run.end_position]
            assert run.end_position in boundaries
            assert run.end_offset == 2 * boundaries.index(run.end_position)
            first = read_header(data, position).size
            following = boundaries[min(boundaries.index(run.end_position) + 1, len(boundaries) - 1)]
            assert len(run.data) == first or len(run.data) <= bytes_max
            assert run.end_position in ends or following - position > bytes_max, "as many as fit"
            assert not any(position < end < run.end_position for end in ends)
    at_end = log.read_position(boundaries[-1], 1000)
    assert (len(at_end.data), at_end.end_offset, at_end.end_position) == (0, 40, boundaries[-1])
    log.close(clean=False)


def test_a_position_that_is_none_of_the_logs_is_refused(make_shelf: Any) -> None:
    shelf = make_shelf()
    log = shelf.open(LogConfig(segment_bytes=400, retention_bytes=400))
    for _ in range(6):
        shelf.append(log, [b"value"] * 8)
    shelf.retain(log, 0)
    assert log.start_position > 0
    for position in (0, log.start_position - 8, log.end_position + 8):
        with pytest.raises(ConfigError, match=f"has the bytes {log.start_position:,} to {log.end_position:,}, not"):
            log.read_position(position, 100)
    for position in (log.start_position + 8, log.end_position - 8):
        with pytest.raises(CorruptData, match="a batch should begin here"):
            log.read_position(position, 100)
    log.close(clean=False)
