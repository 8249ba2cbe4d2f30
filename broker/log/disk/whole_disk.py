"""One fsync for everything on a disk: Linux's syncfs. It is for many new files at once.

It waits for all bytes that any process wrote to that disk before. A kernel before 5.8 does not report failed writes
there, so that syncfs counts as missing.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable

REPORTS_FAILURES = (5, 8)


def _found() -> Callable[[int], None] | None:
    version = re.match(r"(\d+)\.(\d+)", os.uname().release) if sys.platform == "linux" else None
    if version is None or (int(version[1]), int(version[2])) < REPORTS_FAILURES:
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None

    def sync(fd: int) -> None:
        if call(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    return sync


SYNC_DISK = _found()
"""Makes everything durable on the disk of a descriptor; None if this system cannot. Any thread. Raises OSError."""


def sync_disk_of(folder: str | os.PathLike[str]) -> None:
    """Makes everything durable on the disk of a folder. Raises OSError."""
    if SYNC_DISK is None:
        os.sync()
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        SYNC_DISK(fd)
    finally:
        os.close(fd)
