"""Frames: the envelope of every request and every response.

    u32 length    of all that follows
    u8  version   protocol version, fixed by HELLO
    u8  command
    u16 status    0 in requests; in responses 0 is OK, else metamq.wire.status
    u32 opaque    the requester's number, echoed in the response
    u32 header    length of the header
    header        msgpack; before a body filled up to a multiple of 8 bytes with msgpack nils, which are skipped
    body          the rest: batches, or nothing

All integers are little-endian. Requests may be answered in any order.

`FrameReader` turns received bytes into frames. It hands out the memory to receive into, so that a large body is
written once by the kernel and never copied after: small frames share one buffer, a large frame gets its own, which
grows with what has really arrived, so that a length alone never costs more memory than `initial_bytes`.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgpack

from metamq.errors import ProtocolError
from metamq.wire.limits import FRAME_BYTES_MAX, HEADER_BYTES_MAX

Buffer = bytes | bytearray | memoryview

PREFIX = struct.Struct("<IBBHII")
PREFIX_BYTES = PREFIX.size
_LENGTH_BYTES = 4
_FIXED_BYTES = PREFIX_BYTES - _LENGTH_BYTES  # what the length counts besides header and body

_NIL = b"\xc0"

assert PREFIX_BYTES % 8 == 0  # so that a body starts 8-byte aligned, as Arrow wants its buffers


class Frame(NamedTuple):
    """One received frame; `body` is a writable view of memory that belongs to this frame alone."""

    version: int
    command: int
    status: int
    opaque: int
    header: Any
    body: memoryview


def encode_frame(
    version: int, command: int, status: int, opaque: int, header: Any, bodies: list[Buffer] | None = None
) -> list[Buffer]:
    """The buffers to send, in order. The bodies are not copied."""
    packed = msgpack.packb(header)
    if not bodies:
        length = _FIXED_BYTES + len(packed)
        return [PREFIX.pack(length, version, command, status, opaque, len(packed)) + packed]
    packed += _NIL * (-len(packed) % 8)
    length = _FIXED_BYTES + len(packed) + sum(map(len, bodies))
    assert length <= FRAME_BYTES_MAX
    return [PREFIX.pack(length, version, command, status, opaque, len(packed)) + packed, *bodies]


class FrameReader:
    """Incremental decoder: `buffer = next_buffer()`, receive n bytes into it, `frames = received(n)`.

    Any error leaves it unusable: after a broken frame the stream has no next one.
    """

    def __init__(
        self, *, frame_bytes_max: int = FRAME_BYTES_MAX, buffer_bytes: int = 64 * 1024, initial_bytes: int
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._initial_bytes = initial_bytes
        self._buffer = bytearray(buffer_bytes)
        self._filled = 0
        self._large: bytearray | None = None  # a frame of its own, `_large_size` bytes when complete
        self._large_size = 0
        self._large_filled = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes received of a frame that is not complete."""
        return self._large_filled if self._large is not None else self._filled

    def next_buffer(self) -> memoryview:
        """Where to receive the next bytes; never empty. Drop it before calling received()."""
        if self._large is None:
            return memoryview(self._buffer)[self._filled :]
        if self._large_filled == len(self._large):
            grown = min(2 * len(self._large), self._large_size)
            self._large += bytes(grown - len(self._large))
        return memoryview(self._large)[self._large_filled :]

    def received(self, count: int) -> list[Frame]:
        """Takes note of `count` bytes put into next_buffer(); returns the frames that are complete now.

        Raises ProtocolError when the bytes are not frames or exceed the limits.
        """
        if self._large is not None:
            self._large_filled += count
            if self._large_filled < self._large_size:
                return []
            frame = _decode(memoryview(self._large))
            self._large = None
            return [frame]
        self._filled += count
        return self._split()

    def _split(self) -> list[Frame]:
        frames = []
        at = 0
        filled = self._filled
        view = memoryview(self._buffer)
        while filled - at >= PREFIX_BYTES:
            size = self._checked_size(at)
            if size > filled - at:
                if size > len(self._buffer):
                    self._start_large(view[at:filled], size)
                    at = filled
                break
            frames.append(_decode(memoryview(bytearray(view[at : at + size]))))
            at += size
        if at:
            view[: filled - at] = view[at:filled]
            self._filled = filled - at
        return frames

    def _checked_size(self, at: int) -> int:
        length, version, command, _status, _opaque, header = PREFIX.unpack_from(self._buffer, at)
        size: int = length + _LENGTH_BYTES
        if size > self.frame_bytes_max:
            raise ProtocolError(
                f"a frame of {size:,} bytes (command {command}, version {version}) is over the limit of "
                f"{self.frame_bytes_max:,}",
                hint="Is the other side metamq? Then raise its limits together with this one's.",
            )
        if length < _FIXED_BYTES or header > min(length - _FIXED_BYTES, HEADER_BYTES_MAX):
            raise ProtocolError(f"a frame of {size:,} bytes cannot have a header of {header:,}")
        return size

    def _start_large(self, start: memoryview, size: int) -> None:
        self._large = bytearray(max(min(size, self._initial_bytes), len(start)))
        self._large[: len(start)] = start
        self._large_filled = len(start)
        self._large_size = size


def _decode(frame: memoryview) -> Frame:
    _length, version, command, status, opaque, header_bytes = PREFIX.unpack_from(frame)
    end = PREFIX_BYTES + header_bytes
    try:
        unpacker = msgpack.Unpacker(None, max_buffer_size=HEADER_BYTES_MAX)
        unpacker.feed(frame[PREFIX_BYTES:end])
        header = unpacker.unpack()
    except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError, and errors of its own
        raise ProtocolError(f"the header of a frame (command {command}) is not msgpack: {error}") from error
    return Frame(version, command, status, opaque, header, frame[end:])
