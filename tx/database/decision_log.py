"""The decision log of a Coordinator: the transactions that must be committed, and their resources.

    folder/lock            held by the one process that uses the folder
    folder/decisions       records: length (u32), CRC-32C (u32), and msgpack [kind, synced, ...]
        0 ID      [0, synced, id]                the log's identity: begins every gtrid; made with the folder
        1 COMMIT  [1, synced, gtrid, resources]  decided; on the disk before any resource commits
        2 END     [2, synced, gtrid]             every resource has committed; written, not waited for

A transaction without a COMMIT was not decided, and is rolled back (presumed abort). `synced` is the number of bytes
that were certainly on the disk when the record was written. It distinguishes a torn tail from damage: if a later record
proves that the damaged place was on the disk, a decision may be lost there, and the log is refused.

Opening writes the open transactions to a new file, flushes it, and renames it to replace the old log. A failed fsync
may have left records in the cache only: now they are on the disk, before any resource acts on them. After a failed
write or fsync the log takes no more records. The next opening finds out if that decision is on the disk.

Decisions are flushed in groups. While one thread flushes, others append their records and wait; the first of them then
flushes for all. commit() returns only after an fsync that began after its record was written. So no resource commits
before its decision is on the disk. A record may survive a crash of the machine without the one before it in its group.
Then both are part of the torn tail, and no commit() of either has returned.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
from crc32c import crc32c

from metamq.errors import ConfigError, CorruptData, Outcome, StorageError
from metamq.private_files import FILE_MODE, make_folder

_PREFIX = struct.Struct("<II")
_RECORD_BYTES_MAX = 1 << 20
_ID, _COMMIT, _END = 0, 1, 2
COMPACT_BYTES = 1 << 20


class LogEnded(StorageError):
    """The error of a log that has failed before, or is closed. This record was not written."""

    outcome: Outcome = "not_done"


class DecisionLog:
    """Thread-safe. Raises StorageError if the disk fails; LogEnded after that, and after close()."""

    def __init__(self, folder: Path, *, fsync: Callable[[int], None] = os.fsync) -> None:
        """Opens the log; creates it if it does not exist. Raises ConfigError while another process uses it,
        CorruptData, StorageError."""
        self.open: dict[str, tuple[str, ...]] = {}
        """Transactions that are decided and not ended: resources by gtrid."""
        self.identity = ""
        self._folder = folder
        self._fsync = fsync
        self._pending: dict[str, tuple[str, ...]] = {}
        """Decisions that are written and not certainly on the disk."""
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        """Held during a flush, and by who replaces or closes the file. Taken before `_lock`, never after it."""
        self._failed: StorageError | None = None
        self._file = self._locked = -1
        try:
            make_folder(folder)
            self._locked = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, FILE_MODE)
            self._take_lock()
            self._read()
            self._rewrite()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise self._broken(error) from error
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"the decision log in {self._folder} is in use by another Coordinator",
                hint="Give each process a folder of its own: recovery would roll back another process's transactions.",
            ) from None

    @property
    def _path(self) -> Path:
        return self._folder / "decisions"

    def _read(self) -> None:
        if not self._path.exists():
            self.identity = secrets.token_hex(6)
            return
        data = self._path.read_bytes()
        end = 0
        for at, record in records(data):
            end = at
            kind, _synced, *fields = record
            if kind == _ID:
                self.identity = fields[0]
            elif kind == _COMMIT:
                self.open[fields[0]] = tuple(fields[1])
            else:
                self.open.pop(fields[0], None)
        if any(synced > end for synced in _later(data, end)):
            raise CorruptData(
                f"the decision log {self._path}", f"it is damaged at byte {end}, and those bytes were on the disk"
            )
        if not self.identity:
            raise CorruptData(f"the decision log {self._path}", "it has no identity")

    def _rewrite(self) -> None:
        """Replaces the log by a new file with the open transactions only. Raises OSError."""
        everything = self.open | self._pending
        packed = [_packed(_ID, 0, self.identity), *(_packed(_COMMIT, 0, *one) for one in everything.items())]
        fresh = self._folder / "decisions.new"
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            _write(file, b"".join(packed))
            self._fsync(file)
            os.rename(fresh, self._path)
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                self._fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            os.close(file)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file = file
        self._end = self._synced = sum(map(len, packed))
        self.open, self._pending = everything, {}

    def check(self) -> None:
        """Raises LogEnded if the log has failed: then the disk may have more than `open`."""
        if self._failed is not None:
            raise LogEnded(self._failed.problem)

    def commit(self, gtrid: str, resources: tuple[str, ...]) -> None:
        """Records the decision.

        Raises LogEnded if it is certainly not recorded. Raises StorageError if that is unknown until the log is opened
        again.
        """
        self.write(gtrid, resources)
        self.flush(gtrid)

    def write(self, gtrid: str, resources: tuple[str, ...]) -> None:
        """Writes the record of a decision, which flush() makes durable. Raises the errors of commit()."""
        with self._lock:
            self._append(_COMMIT, gtrid, list(resources))
            self._pending[gtrid] = resources

    def flush(self, gtrid: str) -> None:
        """Makes the written decision durable, and all that are pending with it. Raises the errors of commit()."""
        with self._flushing:
            if not self.is_flushed(gtrid):  # no other thread has flushed it in the meantime
                self._flush()

    def is_flushed(self, gtrid: str) -> bool:
        """True unless a written decision waits for its flush."""
        return gtrid not in self._pending

    def _flush(self) -> None:
        """Makes all pending decisions durable, with one fsync. The caller holds `_flushing`."""
        with self._lock:
            if self._failed is not None:
                raise StorageError(self._failed.problem)
            pending, end = list(self._pending), self._end
        try:
            self._fsync(self._file)
        except OSError as error:
            with self._lock:
                raise self._broken(error) from error
        with self._lock:
            self._synced = end
            self.open.update((gtrid, self._pending.pop(gtrid)) for gtrid in pending)

    def ended(self, gtrid: str) -> bool:
        """Records that every resource has committed. Returns True if the log is long, and compact() is due."""
        with self._lock:
            if self.open.pop(gtrid, None) is None:
                return False
            self._append(_END, gtrid)
            return self._is_long

    def compact(self) -> None:
        """Makes a long log short. Until it returns, calls that write wait for the disk."""
        with self._flushing, self._lock:
            if self._is_long and self._failed is None:  # another thread may have replaced or closed the file
                try:
                    self._rewrite()
                except OSError as error:
                    raise self._broken(error) from error

    @property
    def _is_long(self) -> bool:
        return self._end > COMPACT_BYTES and self._end > 4 * len(self.open) * 256

    def _append(self, kind: int, *fields: object) -> None:
        self.check()
        record = _packed(kind, self._synced, *fields)
        try:
            _write(self._file, record)
        except OSError as error:
            raise self._broken(error) from error
        self._end += len(record)

    def _broken(self, error: OSError) -> StorageError:
        self._failed = StorageError(f"the decision log {self._path}: {error.strerror or error}")
        return self._failed

    def close(self) -> None:
        """Releases the folder after a last flush; a second call does nothing."""
        with self._flushing:
            if self._pending:  # a decision is either on the disk for the next process, or not made
                with contextlib.suppress(StorageError):
                    self._flush()
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._failed = self._failed or StorageError(f"the decision log {self._path} is closed")
            for file in (self._file, self._locked):
                if file >= 0:
                    os.close(file)
            self._file = self._locked = -1


def records(data: bytes) -> Iterator[tuple[int, list[Any]]]:
    """Yields (end, fields) of each record, up to the first that is not complete."""
    at = 0
    while (record := _record_at(data, at)) is not None:
        at, fields = record
        yield at, fields


def _record_at(data: bytes, at: int) -> tuple[int, list[Any]] | None:
    if at + _PREFIX.size > len(data):
        return None
    length, checksum = _PREFIX.unpack_from(data, at)
    body = data[at + _PREFIX.size : at + _PREFIX.size + length]
    if not 0 < length <= _RECORD_BYTES_MAX or len(body) < length or crc32c(body) != checksum:
        return None
    return at + _PREFIX.size + length, msgpack.unpackb(body)


def _later(data: bytes, after: int) -> Iterator[int]:
    """Yields `synced` of the complete records after a damaged one."""
    for at in range(after + 1, len(data)):
        found = _record_at(data, at)
        if found is not None:
            yield found[1][1]


def _packed(kind: int, synced: int, *fields: object) -> bytes:
    body = msgpack.packb([kind, synced, *fields])
    return _PREFIX.pack(len(body), crc32c(body)) + bytes(body)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
