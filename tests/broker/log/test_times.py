"""Searches by time are made of small steps, and what a batch's header tells too much of costs its look once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk import files as log_files
from metamq.broker.log.disk import scan, times
from metamq.broker.log.disk.cold import ColdReader, read_whole
from metamq.broker.log.disk.index import SparseIndex
from metamq.wire import batch as layout
from metamq.wire.columns import encode
from metamq.wire.compression import Codec
from tests.examples import examples

CONFIG = LogConfig(segment_bytes=20_000, index_interval_bytes=1000)
BIG_COUNT = 1 << 20


def append(log: Any, batch: bytearray) -> None:
    header = layout.read_header(batch)
    log.append(memoryview(batch), [header], epoch=1, batch_id=layout.make_batch_id(1, log.end_offset), now_us=0)


def lying(max_timestamp_us: int, timestamps_us: list[int]) -> bytearray:
    """A batch whose header tells of a greater time than its messages have."""
    batch = encode([b"x"] * len(timestamps_us), base_timestamp_us=0, timestamps_us=timestamps_us)
    header = layout.read_header(batch)
    layout.seal(
        batch, codec=Codec.NONE, flags=header.flags, count=header.count, producer_id=0, sequence=0,
        plain_size=header.plain_size, base_timestamp_us=header.base_timestamp_us, max_timestamp_us=max_timestamp_us,
        body_size=header.body_size,
    )  # fmt: skip
    return batch


def test_no_step_decodes_a_million_timestamps(shelf: Any) -> None:
    """A batch of a few KiB may hold so many. They are looked at piece by piece, and once."""
    log = shelf.open(LogConfig())
    timestamps = [*range(BIG_COUNT - 1), 10**9]
    append(log, encode([b""] * BIG_COUNT, base_timestamp_us=0, timestamps_us=timestamps, codec=Codec.ZSTD))
    steps: list[int] = []
    for wanted in (5, 10**9, BIG_COUNT // 2, 10**9 + 1, -1):
        expected = next(((n, at) for n, at in enumerate(timestamps) if at >= wanted), None)
        assert shelf.offset_at_time(log, wanted, steps=steps) == expected
    assert steps[0] >= BIG_COUNT // 16384, "it has as many steps as pieces"
    assert max(steps[1:]) <= 3, "what was found out is remembered"
    log.close()


@pytest.mark.parametrize("count", [1, 5, 3000])
def test_a_header_that_lies_costs_one_look(shelf: Any, count: int) -> None:
    """In each segment that it is in, the active one and sealed ones, also after more was appended."""
    log = shelf.open(CONFIG)
    for number in range(count):
        append(log, lying(2**62, [number]))
    steps: list[int] = []
    for _ in range(3):
        assert shelf.offset_at_time(log, 2**61, steps=steps) is None
    first, *others = steps
    assert first >= count
    assert max(others) <= len(log.segments()) + 1
    append(log, lying(2**62, [2**61]))
    assert shelf.offset_at_time(log, 2**61, steps=steps) == (count, 2**61)
    assert steps[-1] <= 1000 // 100 + 2 * len(log.segments()) + 3
    assert shelf.offset_at_time(log, count - 1) == (count - 1, count - 1)
    log.close()


def test_a_search_that_is_given_up_is_not_in_vain(shelf: Any) -> None:
    log = shelf.open(LogConfig(index_interval_bytes=1000))
    for number in range(2000):
        append(log, lying(2**62, [number]))
    given_up = 0
    while True:
        search = log.offset_at_time(2**61)
        if sum(1 for _ in zip(range(1000), search, strict=False)) < 1000:
            break
        search.close()
        given_up += 1
    assert 2 <= given_up < 20, "each goes on about where the one before was"
    log.close()


def searched_on_disk(log: Any, timestamp_us: int, steps: int, reads: list[int]) -> bool:
    """Takes steps of a search, and does its reads of the disk, as a broker does. True if the search is at its end."""
    search, cold = log.offset_at_time(timestamp_us), ColdReader()
    for _ in range(steps):
        try:
            with log.without_waiting(cold):
                missing = next(search)
        except StopIteration:
            return True
        if missing is None:
            cold.clear()
        else:
            reads.append(missing.at)
            view = memoryview(bytearray(missing.size))
            cold.add(missing, read_whole(os.open(missing.path, os.O_RDONLY), view, missing.at, 0))
    search.close()
    return False


@pytest.mark.parametrize("fault", ["", "it learns nothing", "it begins again after a read"])
def test_a_search_that_waits_for_the_disk_is_not_in_vain(
    shelf: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Given up and begun again, it reads no batch more often than it is given up. The seeded faults are found."""
    monkeypatch.setattr(log_files, "read_in_memory", lambda fd, view, at: 0)
    monkeypatch.setattr(scan, "_CHUNK_BYTES", 4096)
    log = shelf.open(LogConfig(index_interval_bytes=1000))
    for number in range(2000):
        append(log, lying(2**62, [number]))
    if fault == "it learns nothing":
        monkeypatch.setattr(SparseIndex, "learn", lambda index, position, greatest_us: None)
    elif fault:
        batches = times.checked_batches
        again = lambda files, segment, position: batches(files, segment, max(position - 8000, 0))  # noqa: E731
        monkeypatch.setattr(times, "checked_batches", again)
    rounds, reads = 1, list[int]()
    while rounds < 20 and not searched_on_disk(log, 2**61, 1000, reads):
        rounds += 1
    log.close()
    is_good = 2 <= rounds < 20 and len(reads) < 2000 * 1.5
    assert is_good != bool(fault), (rounds, len(reads))


def test_a_batch_whose_columns_are_wrong_has_no_times(shelf: Any) -> None:
    log = shelf.open(CONFIG)
    broken = lying(100, [7])
    broken[layout.HEADER_BYTES :] = bytes([255]) * (len(broken) - layout.HEADER_BYTES)
    header = layout.read_header(broken)
    layout.seal(
        broken, codec=Codec.NONE, flags=header.flags, count=1, producer_id=0, sequence=0, plain_size=header.plain_size,
        base_timestamp_us=7, max_timestamp_us=100, body_size=header.body_size,
    )  # fmt: skip
    append(log, broken)
    append(log, lying(9, [9]))
    assert shelf.offset_at_time(log, 5) == (1, 9)
    log.close()


def test_a_search_goes_on_while_the_log_grows_and_retention_takes_of_it(shelf: Any) -> None:
    log = shelf.open(CONFIG)
    for number in range(1000):
        append(log, lying(2**62, [number]))
    search = log.offset_at_time(2**61)
    for _ in range(50):
        next(search)
    for number in range(1000, 1400):
        append(log, lying(2**62, [number]))
    shelf.finish(log, log.retain(0, drop_before=1300))
    assert log.start_offset > 500
    found: list[Any] = []

    def rest() -> Iterator[None]:
        found.append((yield from search))

    assert len(list(rest())) > 0
    assert found == [None]
    assert shelf.offset_at_time(log, 0) == (log.start_offset, log.start_offset)
    log.close()


Batches = st.lists(
    st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 15)), min_size=1, max_size=30
)


@pytest.mark.slow
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=Batches, asked=st.lists(st.integers(-1, 40), min_size=1, max_size=12), seed=st.randoms())
def test_lying_headers_against_brute_force(make_shelf: Any, batches: Any, asked: Any, seed: Any) -> None:
    """Whatever is asked, in between appends: what was learnt never hides a message."""
    shelf = make_shelf()
    log = shelf.open(LogConfig(segment_bytes=1500, index_interval_bytes=200))
    times: list[int] = []
    for timestamps, too_much in batches:
        append(log, lying(max(timestamps) + too_much, timestamps))
        times += timestamps
        for wanted in seed.sample(asked, min(2, len(asked))):
            expected = next(((n, at) for n, at in enumerate(times) if at >= wanted), None)
            assert shelf.offset_at_time(log, wanted) == expected
    log.close(clean=False)


def test_an_index_learns_no_more_than_was_seen() -> None:
    index = SparseIndex(0, 0)
    for number in range(10):
        index.add(100, 1, 50 + number, 0, 100)
    index.learn(500, 7)
    assert list(index._maxima) == [-(2**63), 7, 7, 7, 7, 7, 55, 56, 57, 58]
    assert index.max_timestamp_us == 59
    index.learn(1000, 8)
    assert list(accumulate(index._maxima, max)) == list(index._maxima)
    assert index.max_timestamp_us == 8
