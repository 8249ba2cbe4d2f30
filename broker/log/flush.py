"""A flush under way: what one thread may fsync while the log goes on in another."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

from metamq.broker.log.disk.files import FileCache, Sync, disk_error
from metamq.errors import StorageError

FILES_MAX = 8
"""Of a log, in one ticket: the descriptors of a process are few, and there may be tickets of several logs at once."""


class FlushTicket:
    """Files that hold a log's unflushed bytes, up to `end_position`. Made by `PartitionLog.start_flush()`.

    It owns duplicates of their descriptors, so that nothing the log does meanwhile can close them. They are closed
    by sync(), which is to be called once the ticket exists.
    """

    __slots__ = (
        "_descriptors",
        "_done",
        "_failed",
        "_lock",
        "_name",
        "_sync",
        "end_offset",
        "end_position",
        "error",
        "whole",
    )

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
        """`paths` are files of the cache, `others` files or folders outside of it. `whole`: that is all there is.

        `failed` is called in the syncing thread, so that no append comes after the failure of an fsync. Raises OSError.
        """
        self.whole = whole
        """False: more is to be flushed than one ticket has descriptors for; the next one takes that."""
        self.end_offset = end_offset
        self.end_position = end_position
        self.error: StorageError | None = None
        """Why the fsync failed. Set before sync() raises it."""
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
        """Makes the bytes durable. Any thread; a second call waits for the first and has its outcome.

        Raises StorageError; the log then refuses every append, since an fsync is never tried again.
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
            of_close = self._close()  # which may tell of failed writes as well, over NFS for one
            failure = failure or of_close
            if failure is not None:
                self.error = disk_error(self._name, "fsync", failure)
                self._failed(self.error)
            self._done = True

    def _close(self) -> OSError | None:
        """Closes every descriptor, also after one that failed. Returns the first failure."""
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
        """Whether sync() has ended."""
        return self._done
