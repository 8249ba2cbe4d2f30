"""A running flush: the files that a thread fsyncs while the log continues in another thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from metamq.broker.log.disk.files import FileCache, Sync, disk_error

if TYPE_CHECKING:
    from metamq.errors import StorageError

FILES_MAX = 8
"""Maximum files of a log in one ticket: descriptors are scarce, and several logs may have tickets at one time."""


class FlushTicket:
    """The files that hold a log's unflushed bytes, up to `end_position`. `PartitionLog.start_flush()` makes it.

    It owns duplicates of their descriptors: the log cannot close them during the flush. sync() closes them, so
    every ticket must be synced.
    """

    __slots__ = (
        "_descriptors", "_done", "_failed", "_lock", "_name", "_sync", "end_offset", "end_position",
        "error", "whole",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        files: FileCache,
        paths: list[str],
        others: list[str],
        end_offset: int,
        end_position: int,
        failed: Callable[[StorageError], None],
        *,
        whole: bool,
    ) -> None:
        """`paths` are files of the cache, `others` are files or folders outside of it. `whole`: nothing else is dirty.

        `failed` is called in the syncing thread: no append may follow a failed fsync. Raises OSError.
        """
        self.whole = whole
        """False if more files must be flushed than one ticket has descriptors for; the next ticket takes the rest."""
        self.end_offset = end_offset
        self.end_position = end_position
        self.error: StorageError | None = None
        """The failure of the fsync. Set before sync() raises it."""
        self._name = name
        self._sync: Sync = files.sync
        self._failed = failed
        self._lock = threading.Lock()
        self._done = False
        self._descriptors: list[int] = []
        try:
            for path in paths:
                self._descriptors.append(files.duplicate(path))
            for path in others:
                self._descriptors.append(files.opened(partial(os.open, path, os.O_RDONLY)))
        except OSError:
            self._close()
            raise

    def sync(self) -> None:
        """Makes the bytes durable. Any thread; a second call waits for the first and has the same result.

        Raises StorageError. The log then refuses every append, since an fsync is never retried.
        """
        with self._lock:
            if not self._done:
                self._run()
            if self.error is not None:
                raise self.error

    def _run(self) -> None:
        failure: OSError | None = None
        try:
            for fd in self._descriptors:
                self._sync(fd)
        except OSError as error:
            failure = error
        finally:
            close_failure = self._close()  # a close may report failed writes too, for example on NFS
            failure = failure or close_failure
            if failure is not None:
                self.error = disk_error(self._name, "fsync", failure)
                self._failed(self.error)
            self._done = True

    def _close(self) -> OSError | None:
        """Closes every descriptor, even after a failure. Returns the first failure."""
        failure: OSError | None = None
        descriptors, self._descriptors = self._descriptors, []
        for fd in descriptors:
            try:
                os.close(fd)
            except OSError as error:
                failure = failure or error
        return failure

    @property
    def done(self) -> bool:
        """True when sync() has ended."""
        return self._done
