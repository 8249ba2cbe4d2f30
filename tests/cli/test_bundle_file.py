"""The file of `metamq bundle`: for its owner only, never in place of another one, and whole or not there."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.cli.support.archive import new_archive
from metamq.errors import ConfigError
from tests.parts import wait_until

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]
QUICK = ("--samples", 1, "--timeout", "60s")


@pytest.fixture
def _open_mask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_open_mask")
@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tgz"])
def test_the_file_is_its_owners_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with new_archive(path) as archive:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, "from its first byte on"
        archive.add("a/b.txt", b"text")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    if name.endswith(".zip"):
        with zipfile.ZipFile(path) as packed:
            assert packed.read("a/b.txt") == b"text"
    else:
        with tarfile.open(path) as unpacked:
            member = unpacked.extractfile("a/b.txt")
            assert member is not None
            assert member.read() == b"text"


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"), new_archive(path):
        raise AssertionError
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["a.rar", "zip", ".zip", "a.tar"])
def test_the_name_says_the_form(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of an archive"), new_archive(tmp_path / name):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_no_part_of_a_file_stays(tmp_path: Path, error: BaseException) -> None:
    def write() -> None:
        with new_archive(tmp_path / "a.zip") as archive:
            archive.add("a", b"text")
            raise error

    with pytest.raises(type(error)) as raised:
        write()
    assert list(tmp_path.iterdir()) == []
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(tmp_path / "a.zip")


def test_another_file_stays(metamq: Metamq, tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    path.write_text("mine")
    ended = metamq("bundle", path)
    assert (ended.status, ended.data) == (1, b"")
    assert ended.talk == f"metamq: {path} is there already\n  Give another name, or remove it.\n"
    assert path.read_text() == "mine"
    assert metamq("bundle", tmp_path / "b.txt").talk.startswith(f"metamq: {tmp_path / 'b.txt'} is not the name of an")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o500)
        yield folder
        return
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', error)}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_without_rights_is_noticed_first(offline: Metamq, read_only: Path) -> None:
    ended = offline("bundle", read_only / "b.zip", "--zookeeper", "127.0.0.1:1")
    assert (ended.status, ended.data) == (1, b"")
    assert ended.talk in {
        f"metamq: {read_only / 'b.zip'}: {reason}\n" for reason in ("Read-only file system", "Permission denied")
    }


def test_on_a_disk_without_space_no_part_of_the_file_stays(process: Start, tmp_path: Path) -> None:
    def limit() -> None:  # as a full disk, for this process only
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    child = process("bundle", tmp_path / "b.zip", *QUICK, preexec_fn=limit, cwd=tmp_path)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (1, b"")
    assert err.decode() == f"metamq: {tmp_path / 'b.zip'}: File too large\n"
    assert list(tmp_path.iterdir()) == [] or [one.name for one in tmp_path.iterdir()] == ["config"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_file(process: Start, tmp_path: Path, number: signal.Signals) -> None:
    child = process("bundle", tmp_path / "b.tar.gz", "--every", "1h")
    wait_until((tmp_path / "b.tar.gz").exists, what="the file")
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, b"", b"")
    assert not (tmp_path / "b.tar.gz").exists()
