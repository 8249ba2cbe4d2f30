"""The decision log of a Coordinator: which transactions are to be committed, and at which resources.

    folder/lock            held by the one process that uses the folder
    folder/decisions       records: length (u32), CRC-32C (u32), and msgpack [kind, synced, ...]
        0 ID      [0, synced, id]                whose log it is: begins every gtrid; made with the folder
        1 COMMIT  [1, synced, gtrid, resources]  decided; on the disk before anybody is told
        2 END     [2, synced, gtrid]             every resource has committed it; written, not waited for

What has no COMMIT was not decided, and is rolled back (presumed abort). `synced` is how many bytes were on the disk for
sure when a record was written. So a torn tail is told from damage: if a later record proves that the place was on the
disk, a decision may be lost there, and the log is refused.

Opening writes the log anew with what is open, to a file of its own, flushes that and puts it in the place of the old:
also what a failed fsync left in the cache alone is on the disk then, before anybody acts on it. A failed write or fsync
ends the log's life: whether the decision is there the next opening tells.
"""

from __future__ import annotations

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
    """It takes no more, and has not taken this: something failed before, or it is closed."""

    outcome: Outcome = "not_done"


class DecisionLog:
    """Thread-safe. Raises StorageError for what the disk refuses; LogEnded after that, and behind close()."""

    def __init__(self, folder: Path, *, fsync: Callable[[int], None] = os.fsync) -> None:
        """Opens the log, and makes it when it is not there. Raises ConfigError while another process has it,
        CorruptData, StorageError."""
        self.open: dict[str, tuple[str, ...]] = {}
        """What is decided and not ended: resources by gtrid."""
        self.identity = ""
        self._folder = folder
        self._fsync = fsync
        self._lock = threading.Lock()
        self._failed: StorageError | None = None
        self._file = self._locked = -1
        try:
            make_folder(folder)
            self._locked = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, FILE_MODE)
            self._take_lock()
            self._read()
            self._write_anew()
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
                hint="Each process has a folder of its own: recovery of one would roll back what another works at.",
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
                f"the decision log {self._path}", f"it is damaged at byte {end}, and what stood there was on the disk"
            )
        if not self.identity:
            raise CorruptData(f"the decision log {self._path}", "it does not say whose it is")

    def _write_anew(self) -> None:
        """The log with what is open only, in the place of the old one. Raises OSError."""
        packed = [_packed(_ID, 0, self.identity), *(_packed(_COMMIT, 0, *one) for one in self.open.items())]
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

    def check(self) -> None:
        """Raises LogEnded: what it knows is not all that may be on the disk then."""
        if self._failed is not None:
            raise LogEnded(self._failed.problem)

    def commit(self, gtrid: str, resources: tuple[str, ...]) -> None:
        """Decides. Raises LogEnded: it is not decided; StorageError: nobody knows, before the log is opened again."""
        with self._lock:
            self._append(_COMMIT, gtrid, list(resources))
            try:
                self._fsync(self._file)
            except OSError as error:
                raise self._broken(error) from error
            self._synced = self._end
            self.open[gtrid] = resources

    def ended(self, gtrid: str) -> None:
        """Every resource has committed it."""
        with self._lock:
            if self.open.pop(gtrid, None) is None:
                return
            self._append(_END, gtrid)
            if self._end > COMPACT_BYTES and self._end > 4 * len(self.open) * 256:
                try:
                    self._write_anew()
                except OSError as error:
                    raise self._broken(error) from error

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
        """Lets go of the folder, behind what is being written; may be repeated."""
        with self._lock:  # a decision is there for who opens the log next, or is not made
            self._failed = self._failed or StorageError(f"the decision log {self._path} is closed")
            for file in (self._file, self._locked):
                if file >= 0:
                    os.close(file)
            self._file = self._locked = -1


def records(data: bytes) -> Iterator[tuple[int, list[Any]]]:
    """(where it ends, the record) of each, up to the first that is not whole."""
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
    """What whole records behind a damaged one say was on the disk."""
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
