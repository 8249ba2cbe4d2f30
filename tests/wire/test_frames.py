"""Frames: any cut of the bytes gives the same frames, and no bytes make the reader allocate what they do not have."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.errors import MessageTooLarge, ProtocolError
from metamq.threads import scratch
from metamq.wire.connection import INITIAL_BYTES
from metamq.wire.frames import PREFIX, PREFIX_BYTES, Frame, FrameReader, encode_frame
from metamq.wire.limits import FRAME_BYTES_MAX, HEADER_BYTES_MAX, HELLO_BYTES_MAX
from tests.examples import examples

MEBIBYTE = 1024 * 1024

headers = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
frames = st.tuples(
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 65_535),
    st.integers(0, 2**32 - 1),
    headers,
    st.lists(st.binary(min_size=1, max_size=300), max_size=3),
)


def joined(*fields: Any) -> bytes:
    return b"".join(encode_frame(*fields))


def feed(reader: FrameReader, data: bytes, piece: Callable[[], int]) -> list[Frame]:
    """Receives `data` in pieces of at most `piece()` bytes."""
    found: list[Frame] = []
    at = 0
    while at < len(data):
        buffer = reader.next_buffer()
        count = min(len(buffer), len(data) - at, piece())
        assert count > 0
        buffer[:count] = data[at : at + count]
        at += count
        found += reader.received(count)
    return found


def small_reader() -> FrameReader:
    """One whose buffers are so small that every path is taken by frames of a few bytes."""
    return FrameReader(buffer_bytes=48, initial_bytes=64)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(150))
@given(st.lists(frames, max_size=6), st.randoms(use_true_random=False))
def test_any_pieces_give_the_same_frames(sent: list[Any], chance: random.Random) -> None:
    data = b"".join(joined(*fields) for fields in sent)
    received = feed(small_reader(), data, lambda: chance.randint(1, 70))
    got = [(f.version, f.command, f.status, f.opaque, f.header, bytes(f.body)) for f in received]
    assert got == [(*fields[:5], b"".join(fields[5])) for fields in sent]
    assert all(not f.body.readonly for f in received)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(150))
@given(st.lists(st.lists(frames, max_size=4), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_readers_that_share_a_buffer_do_not_disturb_each_other(sent: list[Any], chance: random.Random) -> None:
    readers = [FrameReader(buffer_bytes=48, scratch=scratch, initial_bytes=64) for _ in sent]
    waiting = [b"".join(joined(*fields) for fields in of_one) for of_one in sent]
    received: list[list[Any]] = [[] for _ in sent]
    while any(waiting):
        number = chance.choice([number for number, data in enumerate(waiting) if data])
        piece = chance.randint(1, 70)
        count = min(piece, len(waiting[number]), len(readers[number].next_buffer()))
        found = feed(readers[number], waiting[number][:count], lambda piece=piece: piece)  # type: ignore[misc]
        received[number] += [(*frame[:5], bytes(frame.body)) for frame in found]
        waiting[number] = waiting[number][count:]
    assert received == [[(*fields[:5], b"".join(fields[5])) for fields in of_one] for of_one in sent]


def test_an_idle_reader_needs_no_buffer() -> None:
    data = joined(1, 3, 0, 7, ["flights", 1], [bytes(1000)])
    tracemalloc.start()
    try:
        readers = [FrameReader(scratch=scratch, initial_bytes=1024) for _ in range(100)]
        for reader in readers:
            feed(reader, data[:500], lambda: 1000)
            assert len(feed(reader, data[500:], lambda: 1000)) == 1
        assert tracemalloc.get_traced_memory()[0] < 100 * 2000 + 64 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bodies", [[], [b"12345678"], [bytes(200), bytes(8)]])
def test_a_frame_cut_at_every_byte(bodies: list[bytes]) -> None:
    data = joined(1, 3, 0, 7, ["flights", 1], bodies)
    for cut in range(len(data)):
        reader = small_reader()
        assert feed(reader, data[:cut], lambda: 1000) == []
        (frame,) = feed(reader, data[cut:], lambda: 1000)
        assert (frame.opaque, frame.header, bytes(frame.body)) == (7, ["flights", 1], b"".join(bodies))


def test_a_body_is_aligned_and_belongs_to_its_frame() -> None:
    data = b"".join(joined(1, 3, 0, n, ["x" * n], [bytes([n]) * 64]) for n in range(1, 20))
    received = feed(FrameReader(initial_bytes=1024), data, lambda: len(data))
    for n, frame in enumerate(received, 1):
        memory = frame.body.obj
        assert isinstance(memory, bytearray)
        assert (len(memory) - len(frame.body)) % 8 == 0
        frame.body[:] = bytes(64)
        assert all(bytes(other.body) == bytes([m]) * 64 for m, other in enumerate(received, 1) if m > n)


def test_frames_before_a_broken_one_still_count() -> None:
    data = joined(1, 3, 0, 1, None) + joined(1, 3, 0, 2, None) + PREFIX.pack(3, 1, 3, 0, 0, 0)
    for piece in (1, 5, len(data)):
        reader = FrameReader(buffer_bytes=len(data), initial_bytes=64)
        pieces = (data[start : start + piece] for start in range(0, len(data), piece))
        received = (frame.opaque for part in pieces for frame in filled(reader, part))
        assert [next(received), next(received)] == [1, 2]
        with pytest.raises(ProtocolError, match="cannot have a header"):
            next(received)


def filled(reader: FrameReader, part: bytes) -> Iterator[Frame]:
    reader.next_buffer()[: len(part)] = part
    return reader.received(len(part))


def test_after_an_error_the_rest_is_thrown_away() -> None:
    reader = small_reader()
    with pytest.raises(ProtocolError):
        feed(reader, b"GET / HTTP/1.1\r\n", lambda: 1000)
    for _ in range(1000):
        assert feed(reader, joined(1, 3, 0, 1, None), lambda: 1000) == []


@pytest.mark.parametrize(
    ("prefix", "problem"),
    [
        (PREFIX.pack(FRAME_BYTES_MAX, 1, 3, 0, 0, 0), r"67,108,868 bytes \(command 3, version 1\) is over the limit"),
        (PREFIX.pack(2**32 - 1, 1, 3, 0, 0, 0), "4,294,967,299 bytes"),
        (PREFIX.pack(11, 1, 3, 0, 0, 0), "cannot have a header"),
        (PREFIX.pack(0, 1, 3, 0, 0, 0), "cannot have a header"),
        (PREFIX.pack(100, 1, 3, 0, 0, 89), "cannot have a header of 89"),
        (PREFIX.pack(FRAME_BYTES_MAX - 4, 1, 3, 0, 0, HEADER_BYTES_MAX + 1), "header of 1,048,577 bytes is over"),
        (b"GET / HTTP/1.1\r\n", "the other side may not be metamq"),
    ],
)
def test_lengths_are_checked_with_the_prefix(prefix: bytes, problem: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=problem):
            feed(FrameReader(initial_bytes=INITIAL_BYTES), prefix, lambda: 1)
        assert tracemalloc.get_traced_memory()[1] < MEBIBYTE
    finally:
        tracemalloc.stop()


def test_the_limit_is_that_of_the_moment() -> None:
    reader = FrameReader(frame_bytes_max=HELLO_BYTES_MAX, initial_bytes=INITIAL_BYTES)
    data = joined(1, 1, 0, 1, None) + joined(1, 3, 0, 2, None, [bytes(2 * HELLO_BYTES_MAX)])
    reader.next_buffer()[: len(data)] = data
    opaques = []
    for frame in reader.received(len(data)):
        opaques.append(frame.opaque)
        reader.frame_bytes_max = FRAME_BYTES_MAX
    assert opaques == [1, 2]


def announced(size: int) -> bytes:
    return PREFIX.pack(size - 4, 1, 3, 0, 0, 1) + b"\xc0"


def test_a_length_alone_costs_little() -> None:
    """A stranger's 64 KiB; at most INITIAL_BYTES for a peer that has sent large frames before."""
    reader = FrameReader(initial_bytes=INITIAL_BYTES)
    large = joined(1, 3, 0, 1, None, [bytes(8 * MEBIBYTE)])
    tracemalloc.start()
    try:
        feed(FrameReader(initial_bytes=INITIAL_BYTES), announced(FRAME_BYTES_MAX), lambda: 1000)
        assert tracemalloc.get_traced_memory()[1] < MEBIBYTE // 2
        assert len(feed(reader, large, lambda: MEBIBYTE)) == 1
        tracemalloc.reset_peak()
        feed(reader, announced(FRAME_BYTES_MAX), lambda: 1000)
        assert tracemalloc.get_traced_memory()[1] < INITIAL_BYTES + MEBIBYTE // 2 < 4 * MEBIBYTE
    finally:
        tracemalloc.stop()


def test_no_room_is_made_before_it_is_asked_for() -> None:
    """Whoever reads decides whether a large frame may begin; until then it is in nobody's way."""
    reader = FrameReader(initial_bytes=INITIAL_BYTES)
    reader.trust()
    assert not reader.in_frame
    tracemalloc.start()
    try:
        assert feed(reader, announced(FRAME_BYTES_MAX), lambda: 1000) == []
        assert (reader.in_frame, reader.large_bytes) == (True, FRAME_BYTES_MAX)
        assert tracemalloc.get_traced_memory()[1] < MEBIBYTE // 2
    finally:
        tracemalloc.stop()
    reader.close()
    assert not reader.in_frame


def test_memory_grows_with_what_has_arrived() -> None:
    reader = FrameReader(initial_bytes=INITIAL_BYTES)
    data = announced(FRAME_BYTES_MAX) + bytes(10 * MEBIBYTE)
    tracemalloc.start()
    try:
        for sent in range(0, len(data), 128 * 1024):
            assert feed(reader, data[sent : sent + 128 * 1024], lambda: 64 * 1024) == []
            held = tracemalloc.get_traced_memory()[0]
            assert held < 8 * (sent + 256 * 1024), f"{held} bytes are held for {sent}"
    finally:
        tracemalloc.stop()


def nested(depth: int, header: bytes) -> bytes:
    return header * depth


@pytest.mark.parametrize(
    "header",
    [
        nested(800, b"\xdd\x00\x0f\xff\xff"),  # arrays of a million, each in the one before
        nested(1_000, b"\xdc\x0f\xff"),
        nested(200_000, b"\xdd\x00\x0f\xff\xff"),
        nested(100, b"\xdd\x00\x00\x01\xf0"),
        nested(500_000, b"\x91"),
        nested(5_000, b"\x81\xa1a"),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xc6\xff\xff\xff\xffabc",
        b"\xc9\xff\xff\xff\xff\x01abc",
        b"\xc1",
        b"\xa2\xff\xfe",  # not UTF-8
        b"\x81\x01\x02",  # a key that is neither str nor bytes
        b"\x92\x01",
        b"",
    ],
    ids=lambda header: f"{len(header)} bytes of {header[:5].hex()}",
)
def test_headers_that_are_not_what_they_announce(header: bytes) -> None:
    data = PREFIX.pack(12 + len(header), 1, 3, 0, 0, len(header)) + header
    reader = FrameReader(initial_bytes=INITIAL_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=r"header of a frame \(command 3\) is not msgpack: .+"):
            feed(reader, data, lambda: MEBIBYTE)
        assert tracemalloc.get_traced_memory()[1] < 4 * MEBIBYTE
    finally:
        tracemalloc.stop()


def test_a_deep_header_that_is_all_there() -> None:
    header = nested(900, b"\x91") + b"\xc0"
    (frame,) = feed(small_reader(), PREFIX.pack(12 + len(header), 1, 3, 0, 0, len(header)) + header, lambda: 100)
    assert msgpack.packb(frame.header) == header


def test_senders_keep_the_limits() -> None:
    with pytest.raises(MessageTooLarge, match="a frame's header has 1,048,58"):
        encode_frame(1, 3, 0, 1, "x" * HEADER_BYTES_MAX)
    with pytest.raises(MessageTooLarge, match="a frame has 67,108,888 bytes, the limit is 67,108,864"):
        encode_frame(1, 3, 0, 1, None, [bytes(FRAME_BYTES_MAX)])
    largest = joined(1, 3, 0, 1, None, [bytes(FRAME_BYTES_MAX - PREFIX_BYTES - 8)])
    assert len(largest) == FRAME_BYTES_MAX
    assert len(feed(FrameReader(initial_bytes=INITIAL_BYTES), largest, lambda: FRAME_BYTES_MAX)) == 1
