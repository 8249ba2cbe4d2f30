"""The lock of a data folder: it admits one process at a time, proves that an earlier one has ended, and detects copies.

Theory of operation. A process holds `flock` on the file `lock`, and the kernel releases it when the process ends. So
the holder knows that no other process holds the lock *of this file*. A copy of the folder has the same content as the
original, but its `lock` is another file, and both can be locked at the same time. Two names tell such files apart:

    mark     identifies the file within its file system. It survives a restart, another boot, a rename of the folder,
             and a mount at another place. A copy, a file restored from a backup, and a file moved across file systems
             get another mark. The inode's number is not enough: a file system soon reuses it, and fresh file systems
             have the same numbers. So the mark includes the file's time of birth, which no program can set. Some file
             systems do not have it (NFS before version 4).
    place    identifies the file on this machine, at this boot. If the lock of another process had the same place, the
             holder knows that this process has ended. Two files never have the same place by accident. If one file gets
             another place (a container's own layer, mounted again), the broker waits for the old session to expire.

If the file system or the virtual machine returns to a snapshot, the mark is the same as before: this is not detected.
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
    """A lock that this process holds until close()."""

    def __init__(self, fd: int, machine: str) -> None:
        """Internal: use take()."""
        self._fd = fd
        self.mark = mark_of(fd)
        self.place = f"{machine}/{os.fstat(fd).st_dev}/{self.mark}"

    @classmethod
    def take(cls, folder: Path, machine: str) -> FolderLock:
        """Takes the folder's lock. `machine` names the host and its boot. Raises ConfigError, OSError."""
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            _lock(fd, folder)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return cls(fd, machine)
        except BaseException:  # the disk may be full, for example: the next attempt must get the lock
            os.close(fd)
            raise

    @property
    def held(self) -> bool:
        """True until close()."""
        return self._fd >= 0

    def close(self) -> None:
        """Releases the lock. A second call does nothing."""
        if self.held:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int, folder: Path) -> None:
    """Locks a folder's open file `lock`. Raises ConfigError if another process has locked it, OSError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 32).decode(errors="replace").strip()
        raise ConfigError(
            f"the data folder {folder} is in use by process {pid or 'unknown'}",
            hint="Stop that process first, or give this broker a data folder of its own.",
        ) from None


def mark_of(fd: int) -> str:
    """The mark of an open file, unique in its file system, see above. Raises OSError."""
    return f"{os.fstat(fd).st_ino}.{_born_ns(fd)}"


def _born_ns(fd: int) -> int:
    """The file's time of birth in nanoseconds; 0 if unknown. Python's own stat has it from 3.15 on."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        status = _LIBC.statx(fd, b"", _EMPTY_PATH, _BIRTH_TIME, found)
    except (AttributeError, OSError):  # not on this system
        return 0
    (mask,) = struct.unpack_from("I", found)
    seconds, nanoseconds = struct.unpack_from("qI", found, _BIRTH_TIME_AT)
    return int(seconds * 1_000_000_000 + nanoseconds) if status == 0 and mask & _BIRTH_TIME else 0
