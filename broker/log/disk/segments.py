"""Segments: the files of a partition log, their names, and the inventory of a folder.

    <base offset, 20 digits>-<base position, 20 digits>.log        batches back to back
    ….index                                                        its sparse index, once sealed or checkpointed
    <offset>-<position>.producers                                  the producer states as of this place

Positions count bytes over all segments. So a segment's end is its base position plus its size, and the names alone show
if segments are adjacent.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from metamq.broker.log.disk.index import SparseIndex

_NAME = re.compile(r"(\d{20})-(\d{20})\.(log|index|producers)")


class Segment:
    """One segment. The index of the active segment is in memory."""

    __slots__ = ("base_offset", "base_position", "index", "last_append_us", "path", "size_bytes")

    def __init__(self, path: str, base_offset: int, base_position: int, size_bytes: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self.base_position = base_position
        self.size_bytes = size_bytes
        self.index: SparseIndex | None = None
        self.last_append_us: int | None = None
        """Time of a sealed segment's last append; None until its index is read."""

    @property
    def end_position(self) -> int:
        """The position after the last byte."""
        return self.base_position + self.size_bytes

    @property
    def index_path(self) -> str:
        return self.path.removesuffix(".log") + ".index"


class SegmentStats(NamedTuple):
    """One segment in the result of `PartitionLog.segments()`."""

    path: str
    base_offset: int
    end_offset: int
    base_position: int
    size_bytes: int


class SnapshotName(NamedTuple):
    """A snapshot of producer states, by its name; ordered by position."""

    position: int
    offset: int
    path: str


@dataclass(slots=True)
class Inventory:
    """The content of a partition's folder, by names and sizes; no file is opened."""

    segments: list[Segment] = field(default_factory=list)
    snapshots: list[SnapshotName] = field(default_factory=list)
    indexes: set[str] = field(default_factory=set)
    orphans: list[str] = field(default_factory=list)
    """Incomplete files of a process that was killed."""


def file_path(folder: str, offset: int, position: int, suffix: str) -> str:
    """The path of a segment, index or snapshot."""
    return f"{folder}/{offset:020d}-{position:020d}.{suffix}"


def take_inventory(folder: str) -> Inventory:
    """Lists a partition's folder, segments and snapshots ordered by position; empty if the folder does not exist."""
    inventory = Inventory()
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return inventory
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            if entry.name.endswith(".tmp"):
                inventory.orphans.append(entry.path)
            continue
        offset, position, suffix = int(match[1]), int(match[2]), match[3]
        if suffix == "log":
            inventory.segments.append(Segment(entry.path, offset, position, entry.stat().st_size))
        elif suffix == "producers":
            inventory.snapshots.append(SnapshotName(position, offset, entry.path))
        else:
            inventory.indexes.add(entry.path)
    inventory.segments.sort(key=lambda segment: segment.base_position)
    inventory.snapshots.sort()
    return inventory
