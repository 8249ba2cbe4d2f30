"""The file `flushed`: how far the log is known to be on the disk, and where it starts.

Two slots, each inside a disk sector of its own and each under a CRC; a write goes to the slot that is not the newest,
so that a torn write leaves the one before it. The file is written by a plain pwrite right *after* an fsync of the
log: whatever slot a crash leaves is true, the older one merely says less. A process that is killed loses nothing of
it; it is fsynced at checkpoints, after a roll, and on clean close.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from crc32c import crc32c

from metamq.broker.log.disk.files import FileCache
from metamq.errors import CorruptData

FILE_NAME = "flushed"
MAGIC = b"MQFL"
VERSION = 2
SLOT_BYTES = 512
FILE_BYTES = 2 * SLOT_BYTES
_SLOT = struct.Struct("<4sIQQQQQQQqIII")  # magic, version, generation, the fields, flags; a CRC follows
_CRC = struct.Struct("<I")
_CLEAN, _EMPTYING = 1, 2
NO_EPOCHS = (1, 0)
"""`own_from` and `own_to` of a log that nothing was appended to by a master of its own."""


class FlushPoint(NamedTuple):
    """What a slot says."""

    position: int
    """The log is on the disk up to this position, at least."""
    offset: int
    """The offset that goes with it."""
    stable_offset: int
    stable_position: int
    start_offset: int
    start_position: int
    last_append_us: int
    own_from: int
    """With `own_to`, the epochs in which this replica was the master that appended; batches of others were copied."""
    own_to: int
    clean: bool
    """Written by a clean close: nothing was appended after it."""
    emptying: bool = False
    """No file but this one counts: the log is being made one without a batch, that begins at `start_position`."""

    @property
    def own_epochs(self) -> range:
        """Batches of these epochs say how far *this* log was flushed when they came."""
        return range(self.own_from, self.own_to + 1)


def new_file(point: FlushPoint) -> bytes:
    """What the file of a new log holds."""
    return _pack(2, point).ljust(SLOT_BYTES, b"\0") + _pack(1, point).ljust(SLOT_BYTES, b"\0")


class FlushFile:
    """The two slots of one partition log. One thread only."""

    __slots__ = ("_files", "_generation", "path")

    def __init__(self, folder: str, files: FileCache) -> None:
        self.path = f"{folder}/{FILE_NAME}"
        self._files = files
        self._generation = 0

    def load(self, name: str) -> FlushPoint | None:
        """The newest intact slot, or None when there is no file. Raises CorruptData when no slot is intact."""
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
                hint="The log cannot tell a torn tail from damage without it. Promote a replica that is in sync, "
                "and this one copies the partition. Without one: stop the broker, and give the log up with "
                "`metamq log forget`.",
            )
        self._generation, point = max(slots)
        return point

    def write(self, point: FlushPoint) -> None:
        """Stores the point in the older slot, without fsync. Raises OSError."""
        generation = self._generation + 1
        self._files.write(self.path, _pack(generation, point), generation % 2 * SLOT_BYTES)
        self._generation = generation  # not before: the next one would go to the newest slot

    def write_both(self, point: FlushPoint) -> None:
        """Stores the point in both slots and fsyncs: no slot says more any longer. Raises OSError."""
        self.write(point)
        self.write_other(point)

    def write_other(self, point: FlushPoint) -> None:
        """Makes the point that was written last durable, and then stores it in the other slot, too. Raises OSError."""
        self.sync()
        self.write(point)
        self.sync()

    def sync(self) -> None:
        """Raises OSError."""
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
