"""A disk that tests slow down, stop, or let fail, for the reads of a broker in this process."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from metamq.broker.log.disk import files as log_files

EIO = OSError(errno.EIO, os.strerror(errno.EIO))


class SlowDisk:
    """A disk whose page cache is empty while `is_cold`, and whose reads wait for `goes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_cold = False
        self.error: OSError | None = None
        self.goes = threading.Event()
        self.goes.set()
        self.waiting = 0
        """Reads that have begun and wait for `goes`."""
        self.began = 0
        read_in_memory, preadv = log_files.read_in_memory, os.preadv

        def in_memory(fd: int, view: memoryview, at: int) -> int | None:
            return 0 if self.is_cold else read_in_memory(fd, view, at)

        def slow(fd: int, views: list[memoryview], at: int, *flags: int) -> int:
            if threading.current_thread().name.startswith("metamq-read"):
                self.began += 1
                self.waiting += 1
                self.goes.wait()
                self.waiting -= 1
                if self.error is not None:
                    raise self.error
            return preadv(fd, views, at, *flags)

        monkeypatch.setattr(log_files, "read_in_memory", in_memory)
        monkeypatch.setattr(os, "preadv", slow)

    def stops(self) -> None:
        """From now on nothing is cached, and reads do not end."""
        self.is_cold = True
        self.goes.clear()
