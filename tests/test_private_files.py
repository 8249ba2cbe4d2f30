"""What metamq's processes make: nobody but the owner changes it, nobody but the group reads it."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from metamq.broker.data.data_folder import DataFolder
from metamq.broker.log.disk.files import FileCache
from metamq.client.offsets.offsets_file import FileOffsets
from metamq.private_files import make_folder, too_open
from metamq.tx.database.decision_log import DecisionLog
from tests.one_zookeeper import cluster


def modes(folder: Path) -> dict[str, str]:
    """What others could do with anything there: the files, with their modes."""
    found = [folder, *folder.rglob("*")]
    assert len(found) > 1
    return {str(path): oct(path.stat().st_mode) for path in found if stat.S_IMODE(path.stat().st_mode) & 0o027}


def test_a_broker_keeps_its_data_to_itself(tmp_path: Path) -> None:
    """Logs, indexes, snapshots, marks: all of it, also after a clean stop."""
    with cluster() as running:
        running.create_topic("t", partitions=2, segment_bytes=4096)
        with running.producer() as producer:
            for _ in range(20):
                producer.send("t", bytes(1000)).result(60)
        data = running.broker.data
        assert modes(data) == {}
        assert running.broker.stop() == 0
        assert modes(data) == {}
        assert any(path.suffix == ".log" for path in data.rglob("*"))
        data.chmod(0o755)
        running.broker.start()
        said = running.broker.log_path.read_text()
        assert f"the folder {data} has the mode 755, others may read or change it: chmod -R g-w,o-rwx {data}" in said


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [("000", 0o640, 0o750), ("022", 0o640, 0o750), ("077", 0o600, 0o700)]
)
def test_a_stricter_umask_stays(tmp_path: Path, umask: str, file: int, folder: int) -> None:
    program = (
        "import os, sys; os.umask(int(sys.argv[2], 8)); from metamq.private_files import *; restrict_process(); "
        "os.makedirs(sys.argv[1] + '/a/b'); open(sys.argv[1] + '/a/b/c', 'w').close()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path), umask], check=True)
    assert stat.S_IMODE((tmp_path / "a/b/c").stat().st_mode) == file
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == folder


def test_what_a_library_makes_in_somebody_elses_process(tmp_path: Path) -> None:
    """Whose umask stays as it is."""
    before = os.umask(0o000)
    try:
        DataFolder.open(tmp_path / "x" / "broker", 0).close(clean=True)
        files = FileCache()
        files.replace(str(tmp_path / "x" / "broker" / "small"), b"x")
        files.close()
        offsets = FileOffsets(tmp_path / "y" / "offsets.json")
        asyncio.run(offsets.close())
        DecisionLog(tmp_path / "z" / "decisions").close()
        assert modes(tmp_path / "x") == modes(tmp_path / "y") == modes(tmp_path / "z") == {}
    finally:
        assert os.umask(before) == 0


def test_what_is_too_open(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert too_open(tmp_path / "a" / "b") is None
    for mode in (0o751, 0o754, 0o770, 0o777):
        (tmp_path / "a").chmod(mode)
        assert f"has the mode {mode:o}" in str(too_open(tmp_path / "a"))
