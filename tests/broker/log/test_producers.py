"""Idempotent producers: repeats, gaps, and states that follow the log wherever it goes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.producers import KEPT_BATCHES, Duplicate, New, ProducerStates
from metamq.broker.log.partition_log import PartitionLog
from metamq.errors import CorruptData, ProtocolError, SequenceGap
from tests.examples import examples

SMALL = LogConfig(segment_bytes=2000, index_interval_bytes=300)
DAY_US = 24 * 3600 * 1_000_000


def check(shelf: Any, log: PartitionLog, producer_id: int, sequence: int) -> Any:
    _batch, header = shelf.batch([b"x", b"y"], producer_id=producer_id, sequence=sequence)
    return log.check_producer(header)


def put(shelf: Any, log: PartitionLog, producer_id: int, sequence: int, now_us: int = 0) -> int:
    assert check(shelf, log, producer_id, sequence) == New()
    offset: int = shelf.append(log, [b"a", b"b"], producer_id=producer_id, sequence=sequence, now_us=now_us)
    return offset


def assert_states(shelf: Any, log: PartitionLog, last: int, first_offset: int = 0) -> None:
    """Producer 5 stored the batches up to `last`, of two messages each and nobody else's between them."""
    assert check(shelf, log, 5, last + 1) == New()
    for sequence in range(last + 1):
        expected = first_offset + 2 * sequence if sequence > last - KEPT_BATCHES else -1
        assert check(shelf, log, 5, sequence).base_offset == expected
    with pytest.raises(
        SequenceGap, match=f"flights/0-0 expects batch {last + 1} of this producer next, got {last + 2}"
    ):
        check(shelf, log, 5, last + 2)


def test_without_a_producer_id_everything_is_new(shelf: Any) -> None:
    log = shelf.open()
    for sequence in (7, 7, 3):
        assert check(shelf, log, 0, sequence) == New()
        shelf.append(log, [b"a"], sequence=sequence)
    log.close()


def test_a_repeat_is_answered_with_its_first_place(shelf: Any) -> None:
    log = shelf.open()
    for sequence in range(8):
        put(shelf, log, 5, sequence, now_us=100 + sequence)
    assert check(shelf, log, 5, 7) == Duplicate(14, 107)
    assert check(shelf, log, 5, 2) == Duplicate(-1, -1)
    assert_states(shelf, log, 7)
    assert check(shelf, log, 6, 0) == New()
    log.close()


def test_a_repeat_with_another_count_is_refused(shelf: Any) -> None:
    """It is no repeat: what it would end with is in no log, and whoever waits for that waits for ever."""
    log = shelf.open()
    put(shelf, log, 5, 0)
    for values in ([b"x"], [b"x"] * 3):
        _batch, header = shelf.batch(values, producer_id=5, sequence=0)
        with pytest.raises(ProtocolError, match=f"2 messages, but its repeat has {len(values)}"):
            log.check_producer(header)
    assert check(shelf, log, 5, 0) == Duplicate(0, 0)
    log.close()


def test_an_unknown_producer_may_begin_anywhere(shelf: Any) -> None:
    log = shelf.open()
    put(shelf, log, 5, 41)
    assert check(shelf, log, 5, 42) == New()
    assert check(shelf, log, 5, 40) == Duplicate(-1, -1)
    log.close()


def test_sequences_wrap() -> None:
    states = ProducerStates()
    states.record(5, 2**32 - 1, 10, 1, 0)
    assert states.check("p", 5, 0, 1) == New()
    states.record(5, 0, 11, 1, 0)
    assert states.check("p", 5, 2**32 - 1, 1).base_offset == 10  # type: ignore[union-attr]
    assert states.check("p", 5, 1, 1) == New()
    with pytest.raises(SequenceGap):
        states.check("p", 5, 2, 1)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("checkpoint_at", [None, 3, 11])
@pytest.mark.parametrize("snapshots", ["kept", "lost", "damaged"])
def test_states_outlive_a_restart(shelf: Any, clean: bool, checkpoint_at: int | None, snapshots: str) -> None:
    log = shelf.open(LogConfig(segment_bytes=700))
    for sequence in range(12):
        put(shelf, log, 5, sequence)
        if sequence == checkpoint_at:
            shelf.checkpoint(log)
    log.close(clean)
    for path in shelf.paths("producers"):
        if snapshots == "lost":
            path.unlink()
        elif snapshots == "damaged":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    log = shelf.open(LogConfig(segment_bytes=700))
    assert_states(shelf, log, 11)
    put(shelf, log, 5, 12)
    log.close()


def test_states_follow_a_cut_to_any_place(shelf: Any, tmp_path: Any) -> None:
    config = LogConfig(segment_bytes=700)
    for last in range(12):
        copy = type(shelf)(tmp_path / str(last))
        log = copy.open(config)
        for sequence in range(12):
            put(copy, log, 5, sequence)
            if sequence in (4, 7):
                shelf.checkpoint(log)
        cut_at = copy.boundaries(log)[last + 1]
        log.truncate(cut_at)
        assert_states(copy, log, last)
        put(copy, log, 5, last + 1)
        log.close(clean=bool(last % 2))
        log = copy.open(config)
        assert_states(copy, log, last + 1)
        log.close()


def test_states_outlive_retention(shelf: Any) -> None:
    config = LogConfig(segment_bytes=700, retention_bytes=0)
    log = shelf.open(config)
    for sequence in range(4):
        put(shelf, log, 5, sequence)
    for sequence in range(20):
        put(shelf, log, 9, sequence)
    assert shelf.retain(log, 1)
    assert log.start_offset > 8, "the batches of producer 5 are gone"
    for clean in (False, True, True):
        assert check(shelf, log, 5, 4) == New()
        assert check(shelf, log, 5, 3) == Duplicate(6, 0)
        with pytest.raises(SequenceGap):
            check(shelf, log, 5, 5)
        log.close(clean)
        log = shelf.open(config)
    log.close()


def test_a_silent_producer_is_forgotten(shelf: Any) -> None:
    log = shelf.open(now_us=0)
    put(shelf, log, 5, 0, now_us=0)
    put(shelf, log, 6, 0, now_us=DAY_US)
    shelf.retain(log, 7 * DAY_US)
    assert check(shelf, log, 5, 0) == Duplicate(0, 0)
    shelf.retain(log, 7 * DAY_US + 1)
    assert check(shelf, log, 5, 9) == New(), "its state is gone: it starts over, anywhere"
    assert check(shelf, log, 6, 0) == Duplicate(2, DAY_US)
    log.close()
    log = shelf.open(now_us=8 * DAY_US + 1)
    assert check(shelf, log, 6, 9) == New()
    log.close()


def test_old_snapshots_go(shelf: Any) -> None:
    log = shelf.open(LogConfig(segment_bytes=1 << 20))
    for sequence in range(10):
        put(shelf, log, 5, sequence)
        shelf.checkpoint(log)
    assert len(shelf.paths("producers")) == 2
    log.close()
    log = shelf.open(LogConfig(segment_bytes=500))
    for sequence in range(10, 30):
        put(shelf, log, 5, sequence)
    bases = {segment.base_position for segment in log.segments()} - {0}
    kept = {int(path.stem.split("-")[1]) for path in shelf.paths("producers")}
    assert bases <= kept, "a cut to any place finds one"
    assert len(kept) <= len(bases) + 2
    log.close()


def test_check_finds_damage_below_a_clean_end(shelf: Any) -> None:
    log = shelf.open()
    put(shelf, log, 5, 0)
    log.close()
    for path in shelf.paths("producers"):
        path.unlink()
    shelf.damage(100)
    log = shelf.open()
    for use in (lambda: check(shelf, log, 5, 0), lambda: shelf.append(log, [b"a"])):
        with pytest.raises(CorruptData, match="is damaged at byte 0"):
            use()
    log.close(clean=False)


Operation = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 3)),
    st.tuples(st.just("plain"), st.just(0)),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("checkpoint"), st.just(0)),
    st.tuples(st.just("reopen"), st.integers(0, 1)),
    st.tuples(st.just("cut"), st.integers(0, 100)),
    st.tuples(st.just("retain"), st.just(0)),
)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(Operation, min_size=5, max_size=60))
def test_any_life_of_a_log_keeps_states_and_messages(make_shelf: Any, operations: Any) -> None:
    """Against a model that keeps every batch ever stored; retention lets the model forget the messages only."""
    shelf = make_shelf()
    config = LogConfig(segment_bytes=600, index_interval_bytes=200, retention_bytes=1200)
    log = shelf.open(config)
    stored: list[tuple[int, int, int, int]] = []  # producer, sequence, base offset, position
    for name, argument in operations:
        if name == "put":
            sequence = sum(1 for batch in stored if batch[0] == argument)
            stored.append((argument, sequence, log.end_offset, log.end_position))
            assert put(shelf, log, argument, sequence) == stored[-1][2]
        elif name == "plain":
            stored.append((0, 0, log.end_offset, log.end_position))
            shelf.append(log, [b"a", b"b"])
        elif name == "flush":
            shelf.flush(log)
        elif name == "checkpoint":
            shelf.checkpoint(log)
        elif name == "reopen":
            log.close(clean=bool(argument))
            log = shelf.open(config)
        elif name == "retain":
            shelf.retain(log, 0)
        elif (end := log.end_position - argument * log.size_bytes // 100) >= log.start_position:
            log.truncate(end)
            stored = [batch for batch in stored if batch[3] < log.end_position]
        assert len(shelf.read_all(log)) == log.end_offset - log.start_offset
        assert log.end_offset == (stored[-1][2] + 2 if stored else 0)
        for producer_id in (1, 2, 3):
            mine = [batch for batch in stored if batch[0] == producer_id]
            if mine:
                assert check(shelf, log, producer_id, mine[-1][1] + 1) == New()
                assert check(shelf, log, producer_id, mine[-1][1]).base_offset == mine[-1][2]
                if len(mine) > KEPT_BATCHES:
                    assert check(shelf, log, producer_id, mine[-1][1] - KEPT_BATCHES).base_offset == -1
    log.close(clean=False)


def test_snapshot_bytes_are_checked() -> None:
    choice = random.Random(3)
    states = ProducerStates()
    for number in range(20):
        states.record(choice.randrange(5), number, number * 2, 2, number)
    data = states.to_bytes(40, 4000)
    assert ProducerStates.from_bytes(data, 40, 4000) == states
    assert ProducerStates.from_bytes(data, 41, 4000) is None
    for at in range(len(data)):
        assert ProducerStates.from_bytes(data[:at], 40, 4000) is None
        assert ProducerStates.from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], 40, 4000) is None
