"""Many partitions, few descriptors."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import BoundedCache, FileCache
from metamq.broker.log.disk.index import SparseIndex
from metamq.broker.log.partition_log import PartitionLog
from metamq.wire.batch import read_header, walk
from metamq.wire.columns import encode

SEED = 11


def test_two_hundred_partitions_within_sixteen_descriptors(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    choice = random.Random(SEED)
    files = FileCache(16, sync=lambda fd: None)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    config = LogConfig(segment_bytes=1000)
    logs = [PartitionLog.open(tmp_path / "t@1" / str(n), f"t/0-{n}", config, files, now_us=0) for n in range(200)]
    for log in logs:
        log.clear_bound()
    for _ in range(2000):
        log = choice.choice(logs)
        batch = encode([log.name.encode() * 9], base_timestamp_us=0)
        log.append(memoryview(batch), [read_header(batch)], epoch=1, batch_id=1, now_us=0)
        other = choice.choice(logs)
        if other.end_offset:
            piece = other.read(choice.randrange(other.end_offset), 500)
            assert other.name.encode() * 9 in piece.data
        if choice.random() < 0.1 and (ticket := log.start_flush()) is not None:
            ticket.sync()
            log.finish_flush(ticket)
        assert files.open_count <= 16
        if before is not None:
            assert len(os.listdir("/proc/self/fd")) <= before + 16 + 1
    for log in logs:
        assert sum(1 for segment in log.segments() for _ in walk(memoryview(Path(segment.path).read_bytes()))) == (
            log.end_offset
        )
        log.close()
    assert files.open_count == 0


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    files = FileCache(2)
    paths = [str(tmp_path / name) for name in "abc"]
    for path in paths[:2]:
        files.create(path)
    first = files.descriptor(paths[0])
    files.create(paths[2])
    assert files.descriptor(paths[0]) == first
    with pytest.raises(FileExistsError):
        files.create(paths[0])
    files.forget(paths[0])
    assert files.open_count <= 1
    files.close()
    assert files.open_count == 0


def test_loaded_indexes_are_bounded() -> None:
    cache = BoundedCache[str, SparseIndex](3000, lambda index: index.memory_bytes)
    for number in range(50):
        index = SparseIndex(0, 0)
        for _ in range(20):
            index.add(100, 1, 0, 0, 1)
        cache.put(str(number), index)
    kept = [number for number in range(50) if cache.get(str(number)) is not None]
    assert kept == [47, 48, 49]
    for number in kept:
        cache.forget(str(number))
    assert cache.get("49") is None


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_what_was_read_stays_as_it_is_while_somebody_holds_it(tmp_path: Path, size: int) -> None:
    files = FileCache(4)
    path = str(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"".join(bytes([number]) * size for number in range(40)))
    held = [files.read(path, size, number * size) for number in range(40)]
    assert [bytes(data) for data in held] == [bytes([number]) * size for number in range(40)]
    held = [data[10:20] for data in held]
    for number in range(40):
        assert files.read(path, size, number * size) == bytes([number]) * size
    assert held == [bytes([number]) * 10 for number in range(40)]
    assert len(files.read(path, size, 40 * size - 7)) == 7
    files.close()
