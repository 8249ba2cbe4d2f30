"""The file `flushed`: the position up to which the log is known to be on the disk, and the log's start.

It has two slots. Each is inside a disk sector of its own and has a CRC. A write goes to the older slot, so a torn
write leaves the newer one. The file is written by a plain pwrite right *after* an fsync of the log. So after a crash
both slots are true; the older one only covers less. A killed process loses nothing of the file. It is fsynced at
checkpoints, after a roll, and on a clean close.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from metamq.errors import CorruptData

if TYPE_CHECKING:
    from metamq.broker.log.disk.files import FileCache

FILE_NAME = "flushed"
MAGIC = b"MQFL"
VERSION = 2
SLOT_BYTES = 512
FILE_BYTES = 2 * SLOT_BYTES
_SLOT = struct.Struct("<4sIQQQQQQQqIII")  # magic, version, generation, the fields, flags; then a CRC
_CRC = struct.Struct("<I")
_CLEAN, _EMPTYING = 1, 2
NO_EPOCHS = (1, 0)
"""`own_from` and `own_to` of a log to which this replica never appended as the master."""


class FlushPoint(NamedTuple):
    """The content of a slot."""

    position: int
    """The log is on the disk at least up to this position."""
    offset: int
    """The offset at `position`."""
    stable_offset: int
    stable_position: int
    start_offset: int
    start_position: int
    last_append_us: int
    own_from: int
    """The first epoch up to `own_to` in which this replica appended as the master. All other batches were copied."""
    own_to: int
    clean: bool
    """A clean close wrote this slot, and nothing was appended after it."""
    emptying: bool = False
    """The log is being emptied and will begin at `start_position`. Only this file counts; all others are obsolete."""

    @property
    def own_epochs(self) -> range:
        """Epochs whose batches say how far *this* log was flushed when they were appended."""
        return range(self.own_from, self.own_to + 1)


def new_file(point: FlushPoint) -> bytes:
    """The content of the file of a new log."""
    return _pack(2, point).ljust(SLOT_BYTES, b"\0") + _pack(1, point).ljust(SLOT_BYTES, b"\0")


class FlushFile:
    """The two slots of one partition log. One thread only."""

    __slots__ = ("_files", "_generation", "path")

    def __init__(self, folder: str, files: FileCache) -> None:
        self.path = f"{folder}/{FILE_NAME}"
        self._files = files
        self._generation = 0

    def load(self, name: str) -> FlushPoint | None:
        """The newest intact slot, or None if there is no file. Raises CorruptData if no slot is intact."""
        try:
            with open(self.path, "rb") as file:
                data = file.read(FILE_BYTES)
        except FileNotFoundError:
            return None
        slots = [slot for slot in (_unpack(data, 0), _unpack(data, SLOT_BYTES)) if slot is not None]
        if not slots:
            raise CorruptData(
                f"{name}: {self.path}",
                "neither of its two slots has a valid checksum",
                hint="Without it, the log cannot distinguish a torn tail from damage. Promote a replica that is in "
                "sync: then this one copies the partition again. If no replica is in sync: stop the broker, and give "
                "the log up with `metamq log forget`.",
            )
        self._generation, point = max(slots)
        return point

    def write(self, point: FlushPoint) -> None:
        """Stores the point in the older slot, without fsync. Raises OSError."""
        generation = self._generation + 1
        self._files.write(self.path, _pack(generation, point), generation % 2 * SLOT_BYTES)
        self._generation = generation  # only after the write: else the next write goes to the newest slot

    def write_both(self, point: FlushPoint) -> None:
        """Stores the point in both slots and fsyncs, so that no slot covers more. Raises OSError."""
        self.write(point)
        self.write_other(point)

    def write_other(self, point: FlushPoint) -> None:
        """Makes the last written point durable, then also stores it in the other slot. Raises OSError."""
        self.sync()
        self.write(point)
        self.sync()

    def sync(self) -> None:
        """Fsyncs the file. Raises OSError."""
        self._files.sync(self._files.descriptor(self.path))


def _pack(generation: int, point: FlushPoint) -> bytes:
    body = _SLOT.pack(MAGIC, VERSION, generation, *point[:-2], _CLEAN * point.clean | _EMPTYING * point.emptying)
    return body + _CRC.pack(crc32c(body))


def _unpack(data: bytes, at: int) -> tuple[int, FlushPoint] | None:
    if len(data) < at + _SLOT.size + _CRC.size:
        return None
    if crc32c(data[at : at + _SLOT.size]) != _CRC.unpack_from(data, at + _SLOT.size)[0]:
        return None
    magic, version, generation, *fields, flags = _SLOT.unpack_from(data, at)
    if magic != MAGIC or version != VERSION:
        return None
    return generation, FlushPoint._make((*fields, bool(flags & _CLEAN), bool(flags & _EMPTYING)))
