"""Many new logs with two waits for the whole disk: after a crash at any step each folder has a whole log, or none."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.broker.log import fresh
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.disk.whole_disk import SYNC_DISK
from metamq.broker.log.partition_log import PartitionLog
from metamq.errors import CorruptData, StorageError

SEED = 20251128
COUNT = fresh.TOGETHER


class Crash(Exception):
    """The host goes down."""


class Host:
    """A host that goes down at a step. Then the disk has each change since its last sync, or not."""

    def __init__(self, root: Path, rng: random.Random, crash_at: int, *, forgets: bool = False) -> None:
        self.root, self.rng, self.crash_at = root, rng, crash_at
        self.forgets = forgets
        """A falsified disk: a sync makes nothing durable."""
        self.steps = 0
        self.durable: dict[int, Path] = {}
        """Inode -> path, as of the last sync."""
        self.folders = [str(root / str(index)) for index in range(COUNT)]
        root.mkdir()

    def files(self) -> FileCache:
        return FileCache(8, sync=lambda fd: None, sync_disk=self._sync)

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.crash_at:
            raise Crash

    def _paths(self) -> Iterator[Path]:
        return self.root.rglob("*")

    def _sync(self, fd: int) -> None:
        self.step()
        if not self.forgets:
            self.durable = {path.stat().st_ino: path for path in self._paths()}
        self.step()

    def go_down(self) -> None:
        """Leaves of each change what may be left."""
        for path in sorted(self._paths()):
            if not path.exists():
                continue
            before = self.durable.get(path.stat().st_ino)
            if before == path:
                continue
            if before is not None and self.rng.random() < 0.5:
                path.rename(before)
            elif before is None and path.is_dir() and self.rng.random() < 0.3:
                shutil.rmtree(path)
            elif before is None and path.is_file():
                fate = self.rng.random()
                if fate < 0.3:
                    path.unlink()
                elif fate < 0.6:
                    path.write_bytes(b"")


def made(host: Host, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Makes the logs; returns False if the host went down."""
    rename = os.rename

    def slowly(source: str, target: str) -> None:
        host.step()
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(fresh.os, "rename", slowly)
        try:
            fresh.make_all(host.folders, host.files())
        except Crash:
            return False
    return True


def open_all(host: Host) -> list[PartitionLog]:
    """What the next start does. Raises CorruptData."""
    files = FileCache(8, sync=lambda fd: None)
    fresh.make_all(host.folders, files)
    return [PartitionLog.open(folder, "t/0", LogConfig(), files, now_us=0) for folder in host.folders]


@pytest.mark.slow
def test_after_a_crash_at_any_step_all_logs_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(SEED)
    for crash_at in range(1, COUNT + 6):
        for attempt in range(4):
            host = Host(tmp_path / f"{crash_at}-{attempt}", rng, crash_at)
            is_made = made(host, monkeypatch)
            assert is_made == (crash_at > COUNT + 4), "two steps a sync, one a rename"
            host.go_down()
            if is_made:
                assert not any(map(fresh.is_half_made, host.folders)), "what was made is durable"
            for log in open_all(host):
                assert (log.recovery.clean, log.end_offset) == (True, 0)
                log.close()


def test_the_check_finds_a_disk_that_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path / "falsified", random.Random(SEED), 0, forgets=True)
    assert made(host, monkeypatch)
    host.go_down()
    with pytest.raises(CorruptData, match="neither of its two slots"):
        open_all(host)


def test_a_failed_sync_of_the_disk_is_an_error(tmp_path: Path) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(StorageError, match="t: making the log failed: Input/output error"):
        PartitionLog.make([tmp_path / str(index) for index in range(COUNT)], "t", FileCache(sync_disk=fail))


def test_few_logs_and_old_folders_are_synced_alone(tmp_path: Path) -> None:
    synced: list[str] = []
    files = FileCache(8, sync=lambda fd: synced.append("one"), sync_disk=lambda fd: synced.append("disk"))
    PartitionLog.make([tmp_path / "few" / str(index) for index in range(COUNT - 1)], "t", files)
    assert set(synced) == {"one"}
    synced.clear()
    folders = [tmp_path / "many" / str(index) for index in range(COUNT + 1)]
    folders[0].mkdir(parents=True)
    PartitionLog.make(folders, "t", files)
    assert synced == ["disk", "disk", "one", "one"]
    PartitionLog.make(folders, "t", files)
    assert len(synced) == 4, "they are all there"


@pytest.mark.skipif(SYNC_DISK is None, reason="this system has no syncfs")
def test_the_real_call(tmp_path: Path) -> None:
    assert SYNC_DISK is not None
    with open(tmp_path / "file", "w") as file:
        SYNC_DISK(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        SYNC_DISK(-1)
