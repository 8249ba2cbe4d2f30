"""A modelled disk, under the real code of partition logs: what a power cut leaves of it, in every way.

It stands in the place of `os` in the modules of metamq.broker.log. A write that was not fsynced is lost, torn (its
first half is there) or kept, each for itself, so that a kept one behind a lost one leaves a hole of zeros. One that is
meant to lie in one sector of the disk, as the slots of the file `flushed`, is not torn. A change of size is lost or
kept; names made, changed and removed in a folder are kept up to any of them, in their order.

A machine's files lie below a folder of its own ("/a/..."), and machines lose their power one by one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from metamq.broker.log import durable, flush, fresh, partition_log, recovery, store
from metamq.broker.log.disk import derived, files, flushed, segments

MODULES: list[Any] = [derived, durable, files, flush, flushed, fresh, partition_log, recovery, segments, store]
Change = tuple[str, Any, Any]
"""Of a file ("write" or "sector", at, bytes), ("size", bytes, None); of a folder ("name", path, inode), ("gone", path,
None), ("move", (from, to), inode)."""


class Image(NamedTuple):
    """A disk at one moment: what is on it for certain, and what was asked of it since the last fsyncs."""

    names: dict[str, int]
    data: dict[int, bytes]
    of_files: dict[int, tuple[Change, ...]]
    of_folders: dict[str, tuple[Change, ...]]


class Disk:
    """The files of one machine. Names are whole paths; folders need not be made."""

    def __init__(self, names: dict[str, int] | None = None, data: dict[int, bytes] | None = None) -> None:
        self.names = dict(names or {})
        self.data = {inode: bytearray(content) for inode, content in (data or {}).items()}
        self._sure_names = dict(self.names)
        self._sure_data = dict(data or {})
        self._of_files: dict[int, list[Change]] = {}
        self._of_folders: dict[str, list[Change]] = {}
        self._next = max(self.data, default=0) + 1
        self.changed: Callable[[str], None] = lambda what: None
        """Called after each change, with what it was."""

    def image(self) -> Image:
        return Image(
            dict(self._sure_names),
            dict(self._sure_data),
            {inode: tuple(changes) for inode, changes in self._of_files.items() if changes},
            {folder: tuple(changes) for folder, changes in self._of_folders.items() if changes},
        )

    def _rename_change(self, path: str, inode: int | None) -> None:
        change: Change = ("name", path, inode) if inode is not None else ("gone", path, None)
        self._of_folders.setdefault(os.path.dirname(path), []).append(change)

    def create(self, path: str) -> int:
        inode, self._next = self._next, self._next + 1
        self.names[path] = inode
        self.data[inode], self._sure_data[inode] = bytearray(), b""
        self._rename_change(path, inode)
        self.changed(f"create {path}")
        return inode

    def write(self, inode: int, at: int, content: bytes) -> None:
        _put(self.data[inode], at, content)
        in_a_sector = any(of == inode and path.endswith("/flushed") for path, of in self.names.items())
        self._of_files.setdefault(inode, []).append(("sector" if in_a_sector else "write", at, content))
        self.changed(f"write {len(content)} bytes of {inode} at {at}")

    def resize(self, inode: int, size: int) -> None:
        _size(self.data[inode], size)
        self._of_files.setdefault(inode, []).append(("size", size, None))
        self.changed(f"resize {inode} to {size}")

    def sync(self, inode: int) -> None:
        if self._of_files.pop(inode, None):
            self._sure_data[inode] = bytes(self.data[inode])
            self.changed(f"fsync {inode}")

    def sync_folder(self, folder: str) -> None:
        if self._of_folders.pop(folder, None):
            inside = {path: inode for path, inode in self.names.items() if os.path.dirname(path) == folder}
            outside = {path: inode for path, inode in self._sure_names.items() if os.path.dirname(path) != folder}
            self._sure_names = outside | inside
            self.changed(f"fsync {folder}")

    def rename(self, source: str, target: str) -> None:
        inode = self.names.pop(source)
        self.names[target] = inode
        folder = self._of_folders.setdefault(os.path.dirname(target), [])
        folder.append(("move", (source, target), inode))
        self.changed(f"rename {source} {target}")

    def unlink(self, path: str) -> None:
        del self.names[path]
        self._rename_change(path, None)
        self.changed(f"unlink {path}")


def _put(data: bytearray, at: int, content: bytes) -> None:
    if len(data) < at:
        data.extend(bytes(at - len(data)))
    data[at : at + len(content)] = content


def _size(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def left_by(image: Image, fates: dict[int, tuple[int, ...]], kept_names: dict[str, int]) -> Disk:
    """What a power cut leaves. `fates`: 0 lost, 1 kept, 2 torn, of each change; `kept_names`: how many a folder."""
    names = dict(image.names)
    for folder, changes in image.of_folders.items():
        for kind, path, inode in changes[: kept_names[folder]]:
            if kind == "name":
                names[path] = inode
            elif kind == "move":
                names.pop(path[0], None)
                names[path[1]] = inode
            else:
                names.pop(path, None)
    data = {}
    for inode in set(names.values()):
        content = bytearray(image.data.get(inode, b""))
        for (kind, at, written), fate in zip(image.of_files.get(inode, ()), fates.get(inode, ()), strict=True):
            if fate and kind != "size":
                _put(content, at, written if fate == 1 else written[: len(written) // 2])
            elif fate:
                _size(content, at)
        data[inode] = bytes(content)
    return Disk(names, data)


def power_cuts(image: Image, chance: random.Random, most: int) -> Iterator[Disk]:
    """All that a power cut may leave, or `most` of it: all kept, all lost, of files and of names, and what is drawn."""
    inodes, folders = list(image.of_files), list(image.of_folders)
    fates = [[(1, 0, 2) if kind == "write" else (1, 0) for kind, _, _ in image.of_files[inode]] for inode in inodes]
    kept = [range(len(image.of_folders[folder]), -1, -1) for folder in folders]
    total = 1
    for options in itertools.chain(itertools.chain.from_iterable(fates), kept):
        total *= len(options)

    def state(of_files: list[tuple[int, ...]], of_folders: list[int]) -> Disk:
        return left_by(image, dict(zip(inodes, of_files, strict=True)), dict(zip(folders, of_folders, strict=True)))

    if total <= most:
        every = [list(itertools.product(*options)) for options in fates]
        for names in itertools.product(*kept):
            for of_files in itertools.product(*every):
                yield state(list(of_files), list(names))
        return
    for all_files, all_names in itertools.product((1, 0), (True, False)):
        yield state([(all_files,) * len(o) for o in fates], [max(o) if all_names else 0 for o in kept])
    for _ in range(most - 4):
        # Most is there, or most is not: what is drawn evenly is neither.
        weights = chance.choice([(9, 1, 1), (1, 9, 1), (1, 1, 1)])
        drawn = [tuple(chance.choices(o, weights[: len(o)])[0] for o in options) for options in fates]
        yield state(drawn, [chance.choice(o) for o in kept])


class _Entry(NamedTuple):
    name: str
    path: str
    size: int

    def stat(self) -> Any:
        return os.stat_result((0, 0, 0, 0, 0, 0, self.size, 0, 0, 0))


class _Path:
    """`os.path`, where it looks at the disk."""

    def __init__(self, own: DiskOs) -> None:
        self._own = own

    def exists(self, path: str) -> bool:
        names = self._own.disk_of(path).names
        return path in names or any(os.path.dirname(name) == path for name in names)

    def __getattr__(self, name: str) -> Any:
        return getattr(os.path, name)


class DiskOs:
    """What the log's modules know as `os`."""

    def __init__(self) -> None:
        self.disks: dict[str, Disk] = {}
        self.path = _Path(self)
        self._open: dict[int, tuple[Disk, int | str]] = {}
        self._next = itertools.count(1000)
        self.fault: Callable[[str], OSError | int | None] = lambda call: None
        """Asked before each call that may fail: an error to raise, or, for a write, how many bytes are written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def disk_of(self, path: str) -> Disk:
        """A device file, which a log opens to see that it may open files, stands for a file on any of them."""
        if path == os.devnull:
            return next(iter(self.disks.values()))
        return self.disks[path.split("/", 2)[1]]

    def _ask(self, call: str) -> int | None:
        answer = self.fault(call)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _inode(self, path: str) -> int:
        inode = self.disk_of(path).names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        return inode

    def open(self, path: str, flags: int, _mode: int = 0) -> int:
        disk = self.disk_of(path)
        self._ask("open")
        what: int | str
        if flags & os.O_DIRECTORY or (not os.path.splitext(path)[1] and path not in disk.names):
            what = path
        elif flags & os.O_CREAT and path not in disk.names:
            what = disk.create(path)
        else:
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "File exists", path)
            what = self._inode(path)
            if flags & os.O_TRUNC:
                disk.resize(what, 0)
        fd = next(self._next)
        self._open[fd] = disk, what
        return fd

    def close(self, fd: int) -> None:
        del self._open[fd]

    def dup(self, fd: int) -> int:
        new = next(self._next)
        self._open[new] = self._open[fd]
        return new

    def pread(self, fd: int, size: int, at: int) -> bytes:
        disk, inode = self._open[fd]
        assert isinstance(inode, int)
        return bytes(disk.data[inode][at : at + size])

    def preadv(self, fd: int, buffers: list[memoryview], at: int) -> int:
        (buffer,) = buffers
        content = self.pread(fd, len(buffer), at)
        buffer[: len(content)] = content
        return len(content)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        written = self._ask("write")
        content = bytes(data) if written is None else bytes(data)[:written]
        disk, inode = self._open[fd]
        assert isinstance(inode, int)
        disk.write(inode, at, content)
        return len(content)

    def fsync(self, fd: int) -> None:
        self._ask("fsync")
        disk, what = self._open[fd]
        if isinstance(what, int):
            disk.sync(what)
        else:
            disk.sync_folder(what)

    def sync_of_caches(self, fd: int) -> None:
        """What logs call; a test may have another one."""
        self.fsync(fd)

    def ftruncate(self, fd: int, size: int) -> None:
        self._ask("truncate")
        disk, inode = self._open[fd]
        assert isinstance(inode, int)
        disk.resize(inode, size)

    def rename(self, source: str, target: str) -> None:
        self._ask("rename")
        self._inode(source)
        self.disk_of(source).rename(source, target)

    def unlink(self, path: str) -> None:
        self._ask("unlink")
        self._inode(path)
        self.disk_of(path).unlink(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are there."""

    def scandir(self, folder: str) -> Iterator[_Entry]:
        disk = self.disk_of(folder)
        inside = sorted(path for path in disk.names if os.path.dirname(path) == folder)
        return iter([_Entry(os.path.basename(path), path, len(disk.data[disk.names[path]])) for path in inside])

    def open_file(self, path: str, mode: str, *, opener: object = None) -> Any:
        if mode == "rb":
            return io.BytesIO(bytes(self.disk_of(path).data[self._inode(path)]))
        flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if mode == "xb" else os.O_TRUNC)
        return _File(self, self.open(path, flags))


class _File:
    """A file that is open for writing."""

    def __init__(self, own: DiskOs, fd: int) -> None:
        self._own = own
        self._fd = fd
        self._at = 0

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._own.close(self._fd)

    def write(self, data: bytes) -> None:
        """All of it, or an error: as a buffered file does, it goes on after a short write."""
        end = self._at + len(data)
        while self._at < end:
            self._at += self._own.pwrite(self._fd, data[self._at - end :], self._at)

    def flush(self) -> None:
        """Nothing is kept back."""

    def fileno(self) -> int:
        return self._fd


@contextlib.contextmanager
def modelled_disk() -> Iterator[DiskOs]:
    """The log's modules work on modelled disks meanwhile."""
    own = DiskOs()
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            if hasattr(module, "os"):
                patch.setattr(module, "os", own)
            patch.setattr(module, "open", own.open_file, raising=False)
        yield own
