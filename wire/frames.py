"""Frames: the envelope of every request and every response.

    u32 length    of everything after this field
    u8  version   protocol version, fixed by HELLO
    u8  command
    u16 status    0 in requests; in responses 0 is OK, else see metamq.wire.status
    u32 opaque    the requester's number, echoed in the response
    u32 header    length of the header
    header        msgpack; before a body, padded to a multiple of 8 bytes with msgpack nils, which receivers skip
    body          the rest: batches, or nothing

All integers are little-endian. Requests may be answered in any order.

`FrameReader` turns received bytes into frames. It provides the memory to receive into, so that the kernel writes a
large body only once. Small frames share one buffer, and readers of a thread may share theirs: an idle connection then
needs none. A large frame gets its own when its second piece is requested. The frame's length is only the peer's claim,
so the size of this memory is limited by the peer's credit: 64 KiB for an unknown peer, then the size of its largest
frame so far, up to `initial_bytes`. The memory of a larger frame grows fourfold with the bytes that have arrived, or up
to eightfold if that is the whole frame. So at worst a sixth of it is copied again. Growing copies into new memory:
extending a bytearray in place cost twenty times as much in a measurement. A client trusts its broker with a whole
frame: see trust().

A header is unpacked only if this cannot cost more than a small multiple of its size: msgpack allocates the elements
that an array announces before it has seen any of them, again at each level of nesting.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgpack

from metamq.errors import MessageTooLarge, ProtocolError
from metamq.wire.limits import FRAME_BYTES_MAX, HEADER_BYTES_MAX

Buffer = bytes | bytearray | memoryview

PREFIX = struct.Struct("<IBBHII")
PREFIX_BYTES = PREFIX.size
_LENGTH_BYTES = 4
_FIXED_BYTES = PREFIX_BYTES - _LENGTH_BYTES  # the part of the length that is neither header nor body

_NIL = b"\xc0"

_GROWTH = 4
_STRANGER_BYTES = 64 * 1024
_HEADER_TRUSTED_BYTES = 512  # nested arrays that announce as many elements as this cost 0.4 MiB

assert PREFIX_BYTES % 8 == 0  # so that a body starts 8-byte aligned, as Arrow wants its buffers


class Packed(NamedTuple):
    """A header that is not unpacked yet: unpacking a large one takes some time."""

    command: int
    data: memoryview

    def unpacked(self) -> Any:
        """Unpacks the header. Raises ProtocolError."""
        try:
            return _unpack_header(self.data)
        except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError, and errors of its own
            reason = str(error) or type(error).__name__
            raise ProtocolError(
                f"the header of a frame (command {self.command}) is not msgpack: {reason:.200}"
            ) from error


Scratch = Callable[[int], bytearray]
"""Returns memory of this size, the same one at each call in a thread."""


class Frame(NamedTuple):
    """One received frame. `header` is Packed if it is larger than the reader unpacks at once. `body` is a writable view
    of memory that belongs only to this frame."""

    version: int
    command: int
    status: int
    opaque: int
    header: Any
    body: memoryview


def encode_frame(
    version: int,
    command: int,
    status: int,
    opaque: int,
    header: Any,
    bodies: list[Buffer] | None = None,
    *,
    header_bytes_max: int = HEADER_BYTES_MAX,
    frame_bytes_max: int = FRAME_BYTES_MAX,
) -> list[Buffer]:
    """The buffers to send, in order. The bodies are not copied. Raises MessageTooLarge above a limit."""
    packed = msgpack.packb(header)
    if bodies:
        packed += _NIL * (-len(packed) % 8)
        length = _FIXED_BYTES + len(packed) + sum(map(len, bodies))
    else:
        length = _FIXED_BYTES + len(packed)
    if len(packed) > header_bytes_max:
        raise MessageTooLarge("a frame's header", len(packed), header_bytes_max, hint=_ASK_FOR_LESS)
    if length + _LENGTH_BYTES > frame_bytes_max:
        raise MessageTooLarge("a frame", length + _LENGTH_BYTES, frame_bytes_max, hint=_ASK_FOR_LESS)
    first = PREFIX.pack(length, version, command, status, opaque, len(packed)) + packed
    return [first, *bodies] if bodies else [first]


_ASK_FOR_LESS = "Send or request less at a time."


class FrameReader:
    """An incremental decoder: `buffer = next_buffer()`, receive n bytes into it, `for frame in received(n)`.

    After an error the stream has no more frames: all later bytes are dropped.
    """

    def __init__(
        self,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        header_bytes_max: int = HEADER_BYTES_MAX,
        buffer_bytes: int = 64 * 1024,
        scratch: Scratch | None = None,
        initial_bytes: int,
        unpacked_bytes_max: int = FRAME_BYTES_MAX,
        allocate: Callable[[int], bytearray] = bytearray,
    ) -> None:
        """The limits may be changed at any time, and apply from the next frame on.

        Headers over `unpacked_bytes_max` stay Packed. `allocate` returns memory of at least the requested size for a
        large frame. `scratch` returns the memory that the readers of this thread share; such a reader has a buffer of
        its own only while it has a part of a frame. No other one of them may be used between next_buffer() and the end
        of received().
        """
        self._unpacked_bytes_max = unpacked_bytes_max
        self.frame_bytes_max = frame_bytes_max
        self.header_bytes_max = header_bytes_max
        self._initial_bytes = initial_bytes
        self._allocate = allocate
        self._credit_bytes = min(_STRANGER_BYTES, initial_bytes)
        self._buffer_bytes = buffer_bytes
        self._scratch = scratch
        self._buffer = scratch(buffer_bytes) if scratch is not None else bytearray(buffer_bytes)
        self._filled = 0
        self.large_bytes = 0
        """The size of a large frame that has begun, and for which memory will be allocated; 0 if none has begun."""
        self._large: memoryview | None = None
        """The first bytes of a large frame; None until its second piece is requested: they are in the shared buffer."""
        self._large_filled = 0
        self._broken = False

    def trust(self) -> None:
        """Gives any later frame within the limits all of its memory at once."""
        self._credit_bytes = self._initial_bytes = FRAME_BYTES_MAX

    @property
    def in_frame(self) -> bool:
        """True if a part of a frame has arrived."""
        return self._filled > 0 or self.large_bytes > 0

    @property
    def missing_bytes(self) -> int:
        """Number of missing bytes of a large frame that has begun; 0 if none has."""
        if not self.large_bytes:
            return 0
        return self.large_bytes - (self._filled if self._large is None else self._large_filled)

    def next_buffer(self) -> memoryview:
        """The memory for the next bytes; never empty. The last received() must be exhausted before this call."""
        if not self.large_bytes:
            if self._scratch is not None and not self._filled:  # of this thread: a loop may have moved to another one
                self._buffer = self._scratch(self._buffer_bytes)
            return memoryview(self._buffer)[self._filled :]
        large = self._large
        if large is None:
            large = self._grown(memoryview(self._buffer)[: self._filled], self._credit_bytes)
            self._filled = 0
        elif self._large_filled == len(large):
            large = self._grown(large, _GROWTH * len(large))
        return large[self._large_filled :]

    def _grown(self, start: memoryview, wanted_bytes: int) -> memoryview:
        """New memory for the large frame: `wanted_bytes`, or the whole frame if it is at most twice as large."""
        size = self.large_bytes
        if size > 2 * wanted_bytes:
            size = max(wanted_bytes, len(start) + 1)
        grown = memoryview(self._allocate(size))[:size]
        grown[: len(start)] = start
        self._large, self._large_filled = grown, len(start)
        return grown

    def received(self, count: int) -> Iterator[Frame]:
        """Takes `count` bytes that were put into next_buffer(). Yields the frames that are complete.

        Raises ProtocolError, after the earlier frames, if the bytes are not frames or exceed the limits. A caller that
        ends the iteration early closes the reader: no frame is returned twice.
        """
        if self._broken:
            return
        try:
            if self._large is None:
                self._filled += count
                yield from self._split()
            else:
                self._large_filled += count
                if self._large_filled == self.large_bytes:
                    large, self._large = self._large, None
                    self._credit_bytes = max(self._credit_bytes, min(self.large_bytes, self._initial_bytes))
                    self.large_bytes = 0
                    yield _decode(large, PREFIX.unpack_from(large), self._unpacked_bytes_max)
            if self._scratch is not None:
                self._change_buffer(self._scratch(self._buffer_bytes))
        except (ProtocolError, GeneratorExit):
            self.close()
            raise

    def _change_buffer(self, scratch: bytearray) -> None:
        """Returns to the shared buffer, or copies a part of a frame out of it."""
        if not self._filled:
            self._buffer = scratch
        elif self._buffer is scratch:
            part = memoryview(scratch)[: self._filled]
            self._buffer = bytearray(self._buffer_bytes if not self.large_bytes else len(part))
            self._buffer[: len(part)] = part

    def close(self) -> None:
        """Drops the received bytes and all later ones."""
        self._broken = True
        self._filled = 0
        self.large_bytes = 0
        self._large = None

    def _split(self) -> Iterator[Frame]:
        at = 0
        filled = self._filled
        view = memoryview(self._buffer)
        while filled - at >= PREFIX_BYTES:
            prefix = PREFIX.unpack_from(view, at)
            size = self._checked_size(prefix)
            if size > filled - at:
                if size > len(view):
                    self.large_bytes = size
                break
            yield _decode(memoryview(bytearray(view[at : at + size])), prefix, self._unpacked_bytes_max)
            at += size
        if at:
            view[: filled - at] = view[at:filled]
            self._filled = filled - at

    def _checked_size(self, prefix: tuple[int, ...]) -> int:
        length, version, command, _status, _opaque, header = prefix
        size: int = length + _LENGTH_BYTES
        if size > self.frame_bytes_max:
            raise ProtocolError(
                f"a frame of {size:,} bytes (command {command}, version {version}) is over the limit of "
                f"{self.frame_bytes_max:,}",
                hint="Check the address and the port: the other side may not be metamq.",
            )
        if length < _FIXED_BYTES or header > length - _FIXED_BYTES:
            raise ProtocolError(f"a frame of {size:,} bytes cannot have a header of {header:,}")
        if header > self.header_bytes_max:
            raise ProtocolError(f"a header of {header:,} bytes is over the limit of {self.header_bytes_max:,}")
        return size


def _decode(frame: memoryview, prefix: tuple[int, ...], unpacked_bytes_max: int) -> Frame:
    _length, version, command, status, opaque, header_bytes = prefix
    end = PREFIX_BYTES + header_bytes
    packed, body = frame[PREFIX_BYTES:end], frame[end:]
    header = _small_header(packed, is_padded=bool(body)) if header_bytes <= _HEADER_TRUSTED_BYTES else None
    if header is None:
        header = Packed(command, packed)
        if header_bytes <= unpacked_bytes_max:
            header = header.unpacked()
    return Frame(version, command, status, opaque, header, body)


def _small_header(packed: memoryview, is_padded: bool) -> Any:
    """Unpacks a small header in the fast way, or returns None: it is not as usual, or wrong."""
    try:
        return msgpack.unpackb(bytes(packed).rstrip(_NIL) if is_padded else packed)
    except Exception:  # perhaps its last byte is no padding
        return None


def _unpack_header(packed: memoryview) -> Any:
    size = len(packed)
    if not size:
        raise ValueError("it is empty")
    if size > _HEADER_TRUSTED_BYTES:  # walks through it without allocating: checks that all announced elements exist
        checker = msgpack.Unpacker(None, max_buffer_size=size)
        checker.feed(packed)
        checker.skip()
    unpacker = msgpack.Unpacker(None, max_buffer_size=size)  # also bounds every announced length
    unpacker.feed(packed)
    return unpacker.unpack()
