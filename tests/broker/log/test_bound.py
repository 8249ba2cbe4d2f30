"""The bound that a log's owner sets for its readers, and what they see before there is one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.partition_log import PartitionLog
from tests.examples import examples

CONFIG = LogConfig(segment_bytes=700, index_interval_bytes=200)
FLUSHED_FIRST = LogConfig(segment_bytes=700, index_interval_bytes=200, flush=FlushPolicy(before_ack=True))


def fill(shelf: Any, log: PartitionLog, count: int) -> list[tuple[int, int]]:
    """One message a batch; (offset, position) of each boundary from the end before."""
    marks = [(log.end_offset, log.end_position)]
    for _ in range(count):
        shelf.append(log, [b"value %d" % log.end_offset])
        marks.append((log.end_offset, log.end_position))
    return marks


def stable(log: PartitionLog) -> tuple[int, int]:
    return log.stable_offset, log.stable_position


def test_the_bound_holds_readers_back_and_lets_them_on(shelf: Any) -> None:
    log = shelf.open(CONFIG)
    marks = fill(shelf, log, 3)
    log.set_bound(*marks[1])
    assert stable(log) == marks[3], "what readers saw is not taken back"
    marks += fill(shelf, log, 5)[1:]
    assert stable(log) == marks[3]
    assert shelf.read_all(log) == [b"value 0", b"value 1", b"value 2"]
    assert shelf.offset_at_time(log, 0) == (0, 0)
    for number in (4, 7):
        log.set_bound(*marks[number])
        assert stable(log) == marks[number]
        assert len(shelf.read_all(log)) == number
        assert log.read(number, 1000).data == b""
    log.clear_bound()
    assert stable(log) == marks[8]
    log.close()


def test_a_place_in_a_file_ends_where_readers_see_no_further(shelf: Any) -> None:
    log = shelf.open(CONFIG)
    marks = fill(shelf, log, 2)
    log.set_bound(*marks[2])
    fill(shelf, log, 1)
    part = log.locate(1, 1)
    assert part is not None
    assert (part.position, part.position + part.size) == (marks[1][1], marks[2][1])
    with open(part.path, "rb") as file:
        file.seek(part.at)
        assert file.read(part.size) == bytes(log.read(1, 1000).data)
    assert log.locate(2, 1) is None
    marks += fill(shelf, log, 20)[1:]
    log.clear_bound()
    first, last = log.segments()[0], log.segments()[-1]
    assert first.path != last.path
    part = log.locate(0, 1 << 20)
    assert part is not None
    assert (part.path, part.at, part.size) == (first.path, 0, first.size_bytes), "of one segment"
    log.close()


def test_a_bound_beyond_the_end_holds_once_the_log_gets_there(shelf: Any) -> None:
    """A slave hears of its master's stable mark before it has the batches."""
    longer = shelf.open(CONFIG)
    marks = fill(shelf, longer, 4)
    longer.truncate(0)
    longer.set_bound(*marks[3])
    for number in (1, 2, 3):
        fill(shelf, longer, 1)
        assert stable(longer) == marks[number]
    fill(shelf, longer, 1)
    assert stable(longer) == marks[3]
    longer.close()


def test_a_topic_that_flushes_first_shows_the_lesser_of_both(shelf: Any) -> None:
    log = shelf.open(FLUSHED_FIRST)
    marks = fill(shelf, log, 2)
    log.set_bound(*marks[1])
    assert stable(log) == (0, 0)
    shelf.flush(log)
    assert stable(log) == marks[1]
    log.set_bound(*(marks[2][0] + 9, marks[2][1] + 900))
    assert stable(log) == marks[2]
    fill(shelf, log, 1)
    assert stable(log) == marks[2]
    log.reconfigure(CONFIG)
    assert log.stable_offset == 3
    log.reconfigure(FLUSHED_FIRST)
    assert log.stable_offset == 3
    log.close()


@pytest.mark.parametrize("config", [CONFIG, FLUSHED_FIRST], ids=["flushes now and then", "flushes first"])
@pytest.mark.parametrize("clean", [True, False])
def test_after_a_restart_readers_see_what_was_stable_until_the_owner_decides(
    shelf: Any, config: LogConfig, clean: bool
) -> None:
    log = shelf.open(config)
    marks = fill(shelf, log, 3)
    log.set_bound(*marks[2])
    log.close(clean=False)  # nothing was flushed, so nothing is stored of the bound
    log = shelf.open(config, bound=True)
    assert log.stable_offset == 0
    assert shelf.read_all(log) == []
    log.set_bound(*marks[2])
    shelf.flush(log)
    fill(shelf, log, 2)
    for _ in range(2):
        log.close(clean)
        log = shelf.open(config, bound=True)
        assert stable(log) == marks[2]
        assert (log.end_offset, log.recovery.clean) == (5, clean)
        assert shelf.read_all(log) == [b"value 0", b"value 1"]
        assert shelf.offset_at_time(log, 0) == (0, 0)
        shelf.flush(log)
        assert stable(log) == marks[2]
    log.clear_bound()
    assert log.stable_offset == 5
    log.close()


def test_a_checkpoint_stores_a_mark_that_moved_without_a_flush(shelf: Any) -> None:
    log = shelf.open(CONFIG)
    log.set_bound(0, 0)
    marks = fill(shelf, log, 3)
    shelf.checkpoint(log)
    log.set_bound(*marks[2])
    shelf.checkpoint(log)
    log.close(clean=False)
    log = shelf.open(CONFIG, bound=True)
    assert stable(log) == marks[2]
    log.close()
    log = shelf.open(CONFIG, bound=True)
    log.set_bound(*marks[3])
    log.close()
    log = shelf.open(CONFIG, bound=True)
    assert log.recovery.clean
    assert stable(log) == marks[3]
    log.close()


def test_looking_into_a_log_makes_it_no_less_clean(shelf: Any, disk: Any) -> None:
    log = shelf.open(CONFIG)
    fill(shelf, log, 3)
    log.close()
    log = shelf.open(CONFIG, files=disk.files(), bound=True)
    shelf.checkpoint(log)
    log.clear_bound()
    shelf.checkpoint(log)
    log.close()
    assert (disk.writes, disk.syncs) == (0, 0)
    assert shelf.open(CONFIG).recovery.clean


def test_a_cut_takes_the_bound_back(shelf: Any) -> None:
    """It was about what went: what comes instead need not have a boundary there, nor be stable."""
    log = shelf.open(CONFIG)
    marks = fill(shelf, log, 5)
    log.set_bound(*marks[4])
    log.truncate(marks[2][1])
    shelf.append(log, [b"another, and longer"] * 20)
    assert stable(log) == marks[2]
    log.clear_bound()
    log.truncate(marks[1][1])
    fill(shelf, log, 1)
    assert log.stable_offset == 2, "no bound is no bound"
    log.close()


def test_a_copy_is_never_unbound(make_shelf: Any) -> None:
    """A former master's log: what it copies now is stable when its master says so."""
    master_shelf, shelf = make_shelf(), make_shelf()
    master, log = master_shelf.open(CONFIG), shelf.open(CONFIG)
    marks = fill(master_shelf, master, 4)
    for number in (1, 2):
        log.append_replicated(master.read_position(log.end_position, 1).data, log.end_position)
        assert log.end_offset == number
        assert stable(log) == (0, 0)
    log.set_bound(*marks[4])
    assert stable(log) == marks[2]
    log.append_replicated(master.read_position(log.end_position, 1).data, log.end_position)
    assert stable(log) == marks[3]
    for open_log in (master, log):
        open_log.close()


def test_a_stable_mark_beyond_a_torn_end_is_taken_back_for_good(shelf: Any) -> None:
    """Else it would lie in the middle of a batch that came there instead."""
    log = shelf.open(CONFIG)
    marks = fill(shelf, log, 1)
    ticket = log.start_flush()
    marks += fill(shelf, log, 3)[1:]
    ticket.sync()
    log.finish_flush(ticket)  # flushed: 1, stable: 4
    log.close(clean=False)
    shelf.damage(marks[2][1] + 50)
    log = shelf.open(CONFIG, bound=True)
    assert stable(log) == marks[2] == (log.end_offset, log.end_position)
    assert log.recovery.stable_offset_before == 4
    shelf.append(log, [b"another, and longer"] * 20)
    log.close(clean=False)
    log = shelf.open(CONFIG, bound=True)
    assert stable(log) == marks[2]
    assert shelf.read_all(log) == [b"value 0", b"value 1"]
    log.close()


Event = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 3)),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("bound"), st.integers(-8, 3)),
    st.tuples(st.just("clear"), st.just(0)),
    st.tuples(st.just("reopen"), st.integers(0, 1)),
    st.tuples(st.just("cut"), st.integers(0, 8)),
)


@settings(deadline=None, max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(Event, min_size=3, max_size=40), flushed_first=st.booleans())
def test_any_order_of_events(make_shelf: Any, events: Any, flushed_first: bool) -> None:
    """Against the rule: the greatest least-of-own-and-bound since the open or the cut; stored by each flush."""
    shelf = make_shelf()
    config = FLUSHED_FIRST if flushed_first else CONFIG
    log = shelf.open(config, bound=True)
    marks = [(number, 104 * number) for number in range(200)]
    expected, stored, bound = 0, 0, 0
    unbound = 1 << 62

    def moved() -> int:
        return max(expected, min(log.flushed_offset if flushed_first else log.end_offset, bound))

    for name, argument in events:
        if name == "append":
            for _ in range(argument):
                shelf.append(log, [b"%08d" % log.end_offset])
        elif name == "flush":
            if shelf.flush(log):
                stored = moved()
        elif name == "bound":
            bound = max(log.end_offset + argument, 0)
            log.set_bound(*marks[bound])
        elif name == "clear":
            bound = unbound
            log.clear_bound()
        elif name == "reopen":
            if argument:
                stored = expected = max(expected, min(log.end_offset, bound))  # a clean close flushes
            log.close(clean=bool(argument))
            log = shelf.open(config, bound=True)
            assert stored <= log.stable_offset <= expected
            expected = bound = stored = log.stable_offset
        else:
            kept = max(log.end_offset - argument, 0)
            if kept < log.end_offset:
                log.truncate(marks[kept][1])
                expected = stored = min(expected, kept)
                bound = bound if bound == unbound else min(bound, kept)
        expected = moved()
        assert (log.end_offset, log.end_position) == marks[log.end_offset]
        assert stable(log) == marks[expected]
        assert len(shelf.read_all(log)) == expected
    log.close(clean=False)
