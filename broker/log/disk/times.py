"""Searches for the first message at or after a time, in small steps: no step takes long.

The times in batch headers come from producers and may be wrong. The index of a segment has for each entry the greatest
time in the headers before it. If a header states a time that is too late, the search reads the messages and remembers
their true times, so that each wrong header costs one read only:

- of a batch: the running maximum of its timestamps, in a cache bounded in bytes. It never falls, so it can be bisected;
- of a segment: in its index. The maxima are lowered to the greatest time that was really found.

If a header states a time that is too early, a search does not find its messages.

Messages that a trim has hidden count as if they were gone: the index of a segment learns that they have no times.

A search is a generator. It yields None after each step, which is one batch or some ten thousand timestamps. If a read
would wait for the disk, it yields NotInMemory, and repeats the read in its next step. Between steps the log may grow,
and retention may remove segments. If the log is cut or emptied, the search must be abandoned:
metamq.broker.data.partition does that.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from metamq.broker.log.disk.cold import NotInMemory
from metamq.broker.log.disk.index import NO_TIME
from metamq.broker.log.disk.scan import checked_batches, damaged, read_at
from metamq.errors import CorruptData
from metamq.wire.batch import HAS_TIMESTAMPS, BatchHeader
from metamq.wire.columns import decode

if TYPE_CHECKING:
    from metamq.broker.log.disk.files import FileCache
    from metamq.broker.log.disk.index import SparseIndex
    from metamq.broker.log.disk.segments import Segment

T = TypeVar("T")
Steps = Generator[NotInMemory | None, None, T]
Search = Steps[tuple[int, int] | None]
"""Returns (offset, timestamp) at its end, or None if there is no such message."""

AT_ONCE = 16 * 1024
"""Timestamps that are processed between two yields."""
LEARN_BATCHES = 100
"""The index learns the result each time after this many batches: an abandoned search is useful, too."""
_BASE_POSITION = attrgetter("base_position")
_BASE_OFFSET = attrgetter("base_offset")
_NONE = array("q")


def first_at_time(
    files: FileCache,
    segments: list[Segment],
    index_of: Callable[[Segment], SparseIndex],
    begin: Callable[[], int],
    timestamp_us: int,
    stable_position: int,
) -> Search:
    """Searches the segments (at least one) that begin below the stable mark. Raises CorruptData, OSError.

    `begin` returns the offset of the first message that is not hidden; it may rise between the steps.
    """
    position = segments[max(bisect_right(segments, begin(), key=_BASE_OFFSET) - 1, 0)].base_position
    while position < stable_position:
        segment = segments[max(bisect_right(segments, position, key=_BASE_POSITION) - 1, 0)]
        position = segment.end_position
        try:
            index = segment.index or (yield from _in_memory(partial(index_of, segment)))
            if index.max_timestamp_us >= timestamp_us:
                found = yield from _in_segment(files, segment, index, begin, timestamp_us)
                if found is not None:
                    return found
        except (OSError, CorruptData):
            if any(one is segment for one in segments):  # else retention has removed the segment meanwhile
                raise
        yield None
    return None


def _in_segment(
    files: FileCache, segment: Segment, index: SparseIndex, begin: Callable[[], int], timestamp_us: int
) -> Search:
    position, greatest = index.find_time(timestamp_us)
    _offset, first_position = index.find(max(begin(), index.base_offset))
    if first_position > position:
        position, greatest = first_position, NO_TIME
    batches = checked_batches(files, segment, position)
    number = 0
    while True:
        try:
            found = next(batches, None)
        except NotInMemory as missing:
            yield missing
            batches = checked_batches(files, segment, position)
            continue
        if found is None:
            break
        at, header, problem = found
        if header is None or problem is not None:
            raise damaged(segment.path, at, problem or "there is no header")
        hidden = max(begin() - header.base_offset, 0)
        latest_us = header.max_timestamp_us if hidden < header.count else greatest
        if latest_us >= timestamp_us:
            maxima = yield from _running_maxima(files, segment, at, header, hidden)
            message = bisect_left(maxima, timestamp_us)
            if message < len(maxima):
                index.learn(at, greatest)
                return header.base_offset + hidden + message, maxima[message]
            latest_us = maxima[-1] if maxima else greatest
        greatest = max(greatest, latest_us)
        position = at + header.size
        if number % LEARN_BATCHES == 0:
            index.learn(position, greatest)
        number += 1
        yield None
    index.learn(position, greatest)
    return None


def _running_maxima(files: FileCache, segment: Segment, at: int, header: BatchHeader, hidden: int) -> Steps[array[int]]:
    """Returns the greatest timestamp up to each message that is not hidden; none if the columns are damaged."""
    if not header.flags & HAS_TIMESTAMPS:
        return array("q", [header.base_timestamp_us])
    batch = segment.path, at, header.producer_crc, hidden
    known = files.times.get(batch)
    if known is not None:
        return known
    stored = yield from _in_memory(lambda: read_at(files, segment, at, header.size))
    try:
        timestamps = decode(memoryview(stored), header).timestamps
    except CorruptData:  # its messages cannot be read, so the search finds none
        return _NONE
    assert timestamps is not None
    yield None
    maxima = array("q")
    for start in range(hidden, len(timestamps), AT_ONCE):
        greatest = maxima[-1] if maxima else timestamps[start]
        maxima.extend(accumulate(timestamps[start : start + AT_ONCE], max, initial=greatest))
        del maxima[start - hidden]  # the initial one
        yield None
    files.times.put(batch, maxima)
    return maxima


def _in_memory(read: Callable[[], T]) -> Steps[T]:
    """Returns what `read` returns, as soon as it does not wait for the disk."""
    while True:
        try:
            return read()
        except NotInMemory as missing:
            yield missing
