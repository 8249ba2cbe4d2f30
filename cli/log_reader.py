"""Checks a broker's files from outside: reads every batch, locks nothing, changes nothing.

It reads with the broker's own code. The broker stops at damage; this module reads on after it, to find the extent of
the damage. Bad bytes that were never flushed are no damage: the broker cuts them at its next start.
metamq.broker.log.recovery explains the difference.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk import epochs as epochs_file
from metamq.broker.log.disk.derived import load_epochs, load_index, load_producers
from metamq.broker.log.disk.files import FileCache, ReadOnlyFiles
from metamq.broker.log.disk.flushed import FlushFile, FlushPoint
from metamq.broker.log.disk.scan import checked_batches, find_flushed_claim, find_intact, read_at
from metamq.broker.log.disk.segments import Inventory, Segment, take_inventory
from metamq.cli.processes import is_alive
from metamq.errors import ConfigError, CorruptData
from metamq.words import count
from metamq.zk.names import partition_name

if TYPE_CHECKING:
    from metamq.wire.batch import BatchHeader

ALIGNMENT = 8
_INDEX_INTERVAL_BYTES = LogConfig().index_interval_bytes
_TOPIC_FOLDER = re.compile(r"([^/@]+)@([^/@]+)")

Advance = Callable[[int], None]
Kind = Literal["damage", "torn tail"]


@dataclass(frozen=True, slots=True)
class PartitionFolder:
    """One partition on disk; `name` is "flights/0-3", or "flights/3" if the broker id is unknown."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LogFinding:
    """Bytes that are not batches: from `position` to `end_position`, in the file `path`, which begins at `base`."""

    kind: Kind
    path: str
    base: int
    position: int
    end_position: int
    reason: str


@dataclass(slots=True)
class SegmentReport:
    """The content of one segment. Offsets and positions count over the whole partition."""

    path: str
    base_offset: int
    end_offset: int
    base_position: int
    size_bytes: int
    batches: int = 0
    messages: int = 0


@dataclass(slots=True)
class PartitionReport:
    """The findings in one partition. `flushed_position` is None if it is unknown how far the log was flushed."""

    name: str
    path: str
    flushed_position: int | None = None
    segments: list[SegmentReport] = field(default_factory=list)
    findings: list[LogFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_damaged(self) -> bool:
        """True if the bad bytes may have been acknowledged messages."""
        return any(finding.kind == "damage" for finding in self.findings)

    def add(self, kind: Kind, segment: Segment, position: int, end_position: int, reason: str) -> None:
        """Adds a finding in the file of a segment."""
        self.findings.append(LogFinding(kind, segment.path, segment.base_position, position, end_position, reason))


def find_partitions(folder: Path) -> list[PartitionFolder]:
    """Returns the partitions in the folder of a broker, a topic or a partition. Raises ConfigError for any other."""
    for root in (folder, folder / "broker"):  # the latter: the folder of `metamq up`
        if (root / "topics").is_dir():
            topics = sorted(path for path in (root / "topics").iterdir() if _TOPIC_FOLDER.fullmatch(path.name))
            return [found for topic in topics if not topic.name.startswith(".") for found in _partitions_of(topic)]
    if _TOPIC_FOLDER.fullmatch(folder.resolve().name):
        return _partitions_of(folder)
    if (folder / "flushed").exists() or take_inventory(str(folder)).segments:
        return [_partition(folder)]
    raise ConfigError(
        f"{folder} is not a data folder, and not the folder of a topic or a partition",
        hint="Give the broker's --data folder, or topics/<topic>@<id>/<index> in it.",
    )


def _partitions_of(topic: Path) -> list[PartitionFolder]:
    indexes = sorted((path for path in topic.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    return [_partition(path) for path in indexes]


def _partition(path: Path) -> PartitionFolder:
    real = path.resolve()
    match = _TOPIC_FOLDER.fullmatch(real.parent.name)
    size = sum(segment.size_bytes for segment in take_inventory(str(path)).segments)
    if match is None or not real.name.isdecimal():
        return PartitionFolder(real.name, path, size)
    broker_id = _broker_id(real.parent.parent.parent)
    index = real.name if broker_id is None else partition_name(broker_id, int(real.name))
    return PartitionFolder(f"{match[1]}/{index}", path, size)


def _broker_id(data_folder: Path) -> int | None:
    try:
        return int(json.loads((data_folder / "meta.json").read_text())["broker_id"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def lock_holder(folder: Path) -> str | None:
    """Returns the process that uses the data folder: "process 4711"; None if no process is known to use it.

    `folder` is the data folder, or is in it. Trying the lock would take it for a moment. So this reads the kernel's
    list of locks, or else the process id in the lock file.
    """
    for place in (folder.resolve(), folder.resolve() / "broker", *folder.resolve().parents):
        lock = place / "lock"
        if not (place / "meta.json").exists() or not lock.exists():
            continue
        pid = lock.read_text(errors="replace").strip()
        return f"process {pid}" if _is_locked(lock, pid) else None
    return None


def _is_locked(lock: Path, pid: str) -> bool:
    with contextlib.suppress(OSError):
        inode = lock.stat().st_ino
        return any(" FLOCK " in line and f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())
    return is_alive(pid)


def verify_partition(partition: PartitionFolder, advance: Advance) -> PartitionReport:
    """Checks both checksums of every batch of a partition, and that segments and offsets join. Raises OSError."""
    folder = str(partition.path)
    report = PartitionReport(partition.name, folder)
    files = ReadOnlyFiles()
    try:
        inventory = take_inventory(folder)
        point = _flush_point(folder, partition.name, files, report)
        segments = _check_chain(inventory, point, report)
        expected: int | None = None
        for segment in segments:
            expected = _verify_segment(files, segment, segments, point, expected, report, advance)
        _check_derived(folder, inventory, report)
    finally:
        files.close()
    return report


def _flush_point(folder: str, name: str, files: FileCache, report: PartitionReport) -> FlushPoint | None:
    try:
        point = FlushFile(folder, files).load(name)
    except CorruptData as error:
        report.notes.append(error.problem)
        return None
    if point is None:
        report.notes.append("there is no file `flushed`: it is unknown how far the log was flushed")
        return None
    report.flushed_position = point.position
    return point


def _check_chain(inventory: Inventory, point: FlushPoint | None, report: PartitionReport) -> list[Segment]:
    """Returns the segments that count; reports segments that do not join."""
    if point is not None and point.emptying:
        report.notes.append(
            f"the log is being emptied, and will begin at byte {point.start_position:,}: no file counts"
        )
        return []
    start = point.start_position if point is not None else 0
    retired = [one for one in inventory.segments if point and one.size_bytes and one.end_position <= start]
    if retired:
        report.notes.append(f"past retention: {count(len(retired), 'segment')}; the broker removes them when it starts")
    segments = inventory.segments[len(retired) :]
    if point is not None and (not segments or segments[0].base_position != start):
        found = segments[0].base_position if segments else None
        reason = f"the log should begin at byte {start:,}" + ("" if found is None else f", not {found:,}")
        report.findings.append(LogFinding("damage", report.path, 0, start, start if found is None else found, reason))
    for before, after in pairwise(segments):
        if before.end_position != after.base_position:
            reason = f"the segment ends at byte {before.end_position:,}, the next one begins at {after.base_position:,}"
            kind = _kind(before.end_position, point)
            report.add(kind, before, before.end_position, after.base_position, reason)
    if point is not None and segments and segments[-1].end_position < point.position:
        last = segments[-1]
        reason = f"the log was flushed up to byte {point.position:,}, but ends before that byte"
        report.add("damage", last, last.end_position, point.position, reason)
    return segments


def _kind(position: int, point: FlushPoint | None) -> Kind:
    return "damage" if point is None or position < point.position else "torn tail"


def _verify_segment(
    files: FileCache,
    segment: Segment,
    segments: list[Segment],
    point: FlushPoint | None,
    expected: int | None,
    report: PartitionReport,
    advance: Advance,
) -> int | None:
    """Checks one segment, and continues after damage; returns the next offset, or None if that is unknown."""
    found = SegmentReport(
        segment.path, segment.base_offset, segment.base_offset, segment.base_position, segment.size_bytes
    )
    report.segments.append(found)
    if expected is not None and expected != segment.base_offset:
        reason = f"the segment begins with offset {segment.base_offset:,}, expected {expected:,}"
        report.add("damage", segment, segment.base_position, segment.base_position, reason)
    due: int | None = segment.base_offset
    position: int | None = segment.base_position
    while position is not None and position < segment.end_position:
        bad: tuple[int, str] | None = None
        for at, header, problem in checked_batches(files, segment, position):
            if header is None or problem is not None:
                bad = at, problem or "there is no header"
                break
            if due is not None and header.base_offset != due:
                reason = f"offset {header.base_offset:,}, expected {due:,}"
                report.add("damage", segment, at, at, reason)
            due = header.end_offset
            found.batches += 1
            found.messages += header.count
            found.end_offset = header.end_offset
            advance(header.size)
        if bad is None:
            break
        position = next((at for at, _header in find_intact(files, segment, bad[0] + ALIGNMENT)), None)
        end = segment.end_position if position is None else position
        kind = _kind_of_bad_bytes(files, segment, segments, bad[0], point)
        report.add(kind, segment, bad[0], end, bad[1])
        advance(end - bad[0])
        due = None  # the number of messages in the bad bytes is unknown
    return due


def _kind_of_bad_bytes(
    files: FileCache, segment: Segment, segments: list[Segment], bad: int, point: FlushPoint | None
) -> Kind:
    """Decides as recovery does: damage below the flushed point, or if a later intact batch says it was flushed."""
    if point is None or _kind(bad, point) == "damage":
        return "damage"
    for later in segments[segments.index(segment) :]:
        if find_flushed_claim(files, later, max(bad, later.base_position), bad, point.own_epochs) is not None:
            return "damage"
    return "torn tail"


def _check_derived(folder: str, inventory: Inventory, report: PartitionReport) -> None:
    """Reports indexes, producer states and epochs that are not usable. The broker rebuilds them."""
    for segment in inventory.segments:
        if segment.index_path in inventory.indexes and load_index(segment, _INDEX_INTERVAL_BYTES) is None:
            report.notes.append(f"the index {segment.index_path} is not usable; the broker rebuilds it")
    for snapshot in inventory.snapshots:
        if load_producers(snapshot) is None:
            report.notes.append(f"the producer states {snapshot.path} are not usable; the broker rebuilds them")
    epochs = os.path.join(folder, epochs_file.FILE_NAME)
    if os.path.exists(epochs) and load_epochs(folder) is None:
        report.notes.append(f"the epochs {epochs} are not usable; the broker rebuilds them")
    for orphan in inventory.orphans:
        report.notes.append(f"{orphan} is half-written; the broker removes it")


def stored_batches(partition: PartitionFolder, from_offset: int) -> Iterator[tuple[int, BatchHeader, memoryview]]:
    """Yields (position, header, bytes) of each batch, from the one that holds `from_offset` on.

    Raises CorruptData at the first bad batch, OSError.
    """
    files = ReadOnlyFiles()
    try:
        segments = take_inventory(str(partition.path)).segments
        for number, segment in enumerate(segments):
            following = segments[number + 1] if number + 1 < len(segments) else None
            if following is not None and following.base_offset <= from_offset:
                continue
            for at, header, problem in checked_batches(files, segment, segment.base_position):
                if header is None or problem is not None:
                    hint = f"`metamq log verify {partition.path}` shows the extent of the damage."
                    raise CorruptData(segment.path, problem or "there is no header", position=at, hint=hint)
                if header.end_offset > from_offset:
                    yield at, header, memoryview(read_at(files, segment, at, header.size))
    finally:
        files.close()
