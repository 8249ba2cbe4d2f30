"""The lock of a data folder: one process at a time, whether a former one is gone; and what tells a file from its copy.

Theory of operation. `flock` is held on the file `lock`, and the kernel gives it up with the process. So who holds it
knows that nobody else does who ever held it *on this file*. A copy of the folder says of itself all that the original
does; but its `lock` is another file, which may be locked while the original's is. Two names tell such files apart:

    mark     the file, in its file system: the same after a restart, another boot, a rename of the folder, and wherever
             the volume is mounted. In a copy, in what was restored from a backup, and in what was moved across file
             systems, it is another one. An inode's number alone is not enough: a file system soon gives it out again,
             and in a fresh one the numbers are the same as in another fresh one. So the time of the file's birth goes
             with it, which no program can set; some file systems do not know it (NFS before version 4).
    place    the file, on this machine, at this boot: who holds the lock of the same place as another process did knows
             that the other one is dead. Never the same by accident; where it differs without need (a container's own
             layer, mounted anew) that process's session is waited for.

A snapshot that the file system or the virtual machine is taken back to has the mark of before, and cannot be told.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from pathlib import Path

from metamq.errors import ConfigError
from metamq.private_files import FILE_MODE

_EMPTY_PATH = 0x1000
_BIRTH_TIME = 0x800
_STATX_BYTES = 256
_BIRTH_TIME_AT = 80
_LIBC = ctypes.CDLL(None)


class FolderLock:
    """A lock that this process holds, until close()."""

    def __init__(self, fd: int, machine: str) -> None:
        """Use take()."""
        self._fd = fd
        self.mark = mark_of(fd)
        self.place = f"{machine}/{os.fstat(fd).st_dev}/{self.mark}"

    @classmethod
    def take(cls, folder: Path, machine: str) -> FolderLock:
        """Takes the folder's lock. `machine` names the host, and its boot. Raises ConfigError, OSError."""
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            _lock(fd, folder)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return cls(fd, machine)
        except BaseException:  # without room for the pid, say: the next attempt of this process must get the lock
            os.close(fd)
            raise

    @property
    def held(self) -> bool:
        """Whether it was not given up."""
        return self._fd >= 0

    def close(self) -> None:
        """Gives it up. May be repeated."""
        if self.held:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int, folder: Path) -> None:
    """Locks the open file `lock` of a folder. Raises ConfigError when another process has it locked, OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 32).decode(errors="replace").strip()
        raise ConfigError(
            f"the data folder {folder} is in use by process {pid or 'unknown'}",
            hint="Stop that process first, or give this broker a data folder of its own.",
        ) from None


def mark_of(fd: int) -> str:
    """What tells an open file from any other in its file system, see above. Raises OSError."""
    return f"{os.fstat(fd).st_ino}.{_born_ns(fd)}"


def _born_ns(fd: int) -> int:
    """When the file was made; 0 where that is not known. Python's own stat has it from 3.15 on."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        status = _LIBC.statx(fd, b"", _EMPTY_PATH, _BIRTH_TIME, found)
    except (AttributeError, OSError):  # not on this system
        return 0
    (mask,) = struct.unpack_from("I", found)
    seconds, nanoseconds = struct.unpack_from("qI", found, _BIRTH_TIME_AT)
    return int(seconds * 1_000_000_000 + nanoseconds) if status == 0 and mask & _BIRTH_TIME else 0
