"""A shelf: one partition log on real files, and short ways to fill, read and break it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.disk.segments import SegmentStats
from metamq.broker.log.partition_log import PartitionLog
from metamq.broker.log.steps import FLUSH, Steps
from metamq.errors import StorageError
from metamq.wire.batch import BatchHeader, read_header, walk
from metamq.wire.columns import decode, encode

T = TypeVar("T")
SMALL = LogConfig(segment_bytes=2000, index_interval_bytes=300)


class Shelf:
    """The folder of one partition log; its fsyncs are left out unless asked for."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "flights@t1" / "0"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.files = FileCache(8, sync=lambda fd: None)
        self.batch_ids = 0

    def open(
        self,
        config: LogConfig = SMALL,
        *,
        now_us: int = 0,
        files: FileCache | None = None,
        bound: bool = False,
        on_loss: Callable[[str], object] = str,
    ) -> PartitionLog:
        """As a master without other replicas does; or, `bound`, as one that does not know its role yet."""
        log = PartitionLog.open(self.folder, "flights/0-0", config, files or self.files, now_us=now_us, on_loss=on_loss)
        if not bound:
            log.clear_bound()
        return log

    def offset_at_time(self, log: PartitionLog, timestamp_us: int, *, steps: list[int] | None = None) -> Any:
        """What the log's search finds; how many steps it took is added to `steps`."""
        search, count = log.offset_at_time(timestamp_us), 0
        while True:
            try:
                next(search)
            except StopIteration as end:
                if steps is not None:
                    steps.append(count)
                return end.value
            count += 1

    def batch(
        self,
        values: Sequence[bytes],
        *,
        producer_id: int = 0,
        sequence: int = 0,
        timestamps_us: Sequence[int] | None = None,
        base_timestamp_us: int = 0,
    ) -> tuple[memoryview, BatchHeader]:
        batch = encode(
            values,
            base_timestamp_us=base_timestamp_us,
            timestamps_us=timestamps_us,
            producer_id=producer_id,
            sequence=sequence,
        )
        return memoryview(batch), read_header(batch)

    def append(
        self, log: PartitionLog, values: Sequence[bytes], *, now_us: int = 0, epoch: int = 1, **fields: object
    ) -> int:
        batch, header = self.batch(values, **fields)  # type: ignore[arg-type]
        self.batch_ids += 1
        return log.append(batch, [header], epoch=epoch, batch_id=self.batch_ids, now_us=now_us)

    def flush(self, log: PartitionLog) -> bool:
        """Whether there was something to flush."""
        ticket = log.start_flush()
        if ticket is not None:
            ticket.sync()
            log.finish_flush(ticket)
        return ticket is not None

    def finish(self, log: PartitionLog, steps: Steps[T]) -> T:
        """Carries the steps out, here and now."""
        result: Any = None
        error: OSError | None = None
        while True:
            try:
                step = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as end:
                done: T = end.value
                return done
            result = error = None
            if step == FLUSH:
                with contextlib.suppress(StorageError):  # the log remembers
                    while self.flush(log):  # a ticket takes so many files
                        pass
                continue
            try:
                result = step()
            except OSError as raised:
                error = raised

    def checkpoint(self, log: PartitionLog) -> None:
        self.finish(log, log.checkpoint())

    def retain(self, log: PartitionLog, now_us: int) -> list[SegmentStats]:
        return self.finish(log, log.retain(now_us))

    def read_all(self, log: PartitionLog, offset: int | None = None, bytes_max: int = 1 << 20) -> list[bytes]:
        """All values from `offset` on, as a consumer gets them; checks both checksums and every offset."""
        offset = log.start_offset if offset is None else offset
        values: list[bytes] = []
        while True:
            piece = log.read(offset, bytes_max)
            if not piece.data:
                return values
            view = memoryview(piece.data)
            before = offset
            for at, header in walk(view):
                if header.base_offset <= offset < header.end_offset:
                    found = decode(view[at : at + header.size], header).values.tolist()
                    values += found[offset - header.base_offset :]
                    offset = header.end_offset
            assert offset > before, "a read must bring at least one whole batch"

    def contents(self) -> dict[str, str]:
        """Name and checksum of every file."""
        return {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }

    def paths(self, suffix: str) -> list[Path]:
        return sorted(self.folder.glob(f"*.{suffix}"))

    def byte_at(self, position: int) -> tuple[Path, int]:
        """The segment file that holds a position of the log, and where in it."""
        for path in reversed(self.paths("log")):
            base = int(path.stem.split("-")[1])
            if base <= position:
                return path, position - base
        raise AssertionError(f"no segment holds {position}")

    def damage(self, position: int, change: Callable[[int], int] = lambda byte: byte ^ 0x10) -> None:
        """Changes one byte of the log, given by its position."""
        path, at = self.byte_at(position)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([change(byte)]))

    def boundaries(self, log: PartitionLog) -> list[int]:
        """The positions at which batches begin, and the end."""
        positions = [log.start_position]
        offset = log.start_offset
        while True:
            piece = log.read(offset, 1)
            if not piece.data:
                return positions
            header = read_header(piece.data)
            assert piece.position == positions[-1]
            positions.append(piece.position + header.size)
            offset = header.end_offset


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.fixture
def make_shelf(tmp_path: Path) -> Callable[[], Shelf]:
    """Fresh shelves, for tests that need one an example."""
    count = iter(range(10**9))
    return lambda: Shelf(tmp_path / str(next(count)))


@pytest.fixture
def before_ack() -> LogConfig:
    return LogConfig(segment_bytes=2000, index_interval_bytes=300, flush=FlushPolicy(before_ack=True))


class FaultyDisk:
    """os.pwrite and os.fsync with a fault at a chosen call, and every call counted."""

    def __init__(self) -> None:
        self.writes = 0
        self.syncs = 0
        self.write_fault: Callable[[int, int], int | OSError | None] = lambda number, size: None
        self.sync_fault: Callable[[int], OSError | None] = lambda number: None

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        fault = self.write_fault(self.writes, len(data))
        self.writes += 1
        if isinstance(fault, OSError):
            raise fault
        return os.pwrite(fd, data if fault is None else memoryview(data)[:fault], at)

    def sync(self, fd: int) -> None:
        fault = self.sync_fault(self.syncs)
        self.syncs += 1
        if fault is not None:
            raise fault

    def files(self, limit: int = 8) -> FileCache:
        return FileCache(limit, write=self.write, sync=self.sync)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()
