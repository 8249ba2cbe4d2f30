"""Offsets in a file, for consumers that do not share: broadcast consumers, each of which reads every message.

The file is one JSON document that is replaced as a whole: a new file is written, flushed, and renamed over it. So a
crash leaves either the old or the new offsets. There is no other owner and so no fence. A lock on a second file
prevents two processes from using one file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from metamq.client.checks import wrong_type
from metamq.errors import ClosedError, ConfigError, CorruptData, StorageError
from metamq.private_files import make_folder, opener
from metamq.zk.groups.ownership import CommittedOffset, Ownership

if TYPE_CHECKING:
    from metamq.client.offsets.offsets import ClaimOutcome, CommitOutcome, CommitRequest
    from metamq.zk.partitions import TopicPartition


class FileOffsets:
    """Offsets per group, topic and partition in the file `path`, which is created if missing. For one consumer.

    Raises ConfigError if another process uses the file, and CorruptData if it is not an offset file.
    """

    in_claim_node = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise wrong_type("`path`", "a path", path)
        self._path = Path(path)
        make_folder(self._path.parent)
        self._lock: IO[str] | None = _lock(self._path)
        self._turn = asyncio.Lock()
        try:
            self._offsets = _read(self._path)
        except BaseException:
            self._unlock()
            raise

    async def check(self) -> None:
        """Raises ClosedError if the consumer that used the file was closed."""
        if self._lock is None:
            raise ClosedError("offset file")

    async def claimed(self, claims: Sequence[Ownership]) -> Mapping[TopicPartition, ClaimOutcome]:
        """Returns the offsets in the file."""
        return {claim.tp: self._offsets.get(_key(claim)) for claim in claims}

    async def commit(self, requests: Sequence[CommitRequest]) -> Mapping[TopicPartition, CommitOutcome]:
        """Writes all requests to the file at once. They are on disk when this returns."""
        async with self._turn:
            await self.check()
            news = {
                _key(request.claim): CommittedOffset(request.offset, request.epoch, request.claim.topic_id)
                for request in requests
            }
            after = self._offsets | news
            try:
                await asyncio.to_thread(_write, self._path, after)
            except OSError as error:
                refused = StorageError(f"the offset file {self._path} cannot be written: {error}")
                return {request.claim.tp: refused for request in requests}
            self._offsets = after
            return {
                request.claim.tp: replace(request.claim, committed=news[_key(request.claim)]) for request in requests
            }

    async def close(self) -> None:
        """Releases the file for other consumers."""
        async with self._turn:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


_Key = tuple[str, str, str]


def _key(claim: Ownership) -> _Key:
    return claim.group, claim.tp.topic, claim.tp.partition


def _lock(path: Path) -> IO[str]:
    # A separate file: a lock on the offsets file would vanish with the file that each commit replaces.
    lock = open(path.with_name(path.name + ".lock"), "w", opener=opener)  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"the offset file {path} is in use by another consumer", hint="Give each consumer its own file."
        ) from error
    return lock


def _read(path: Path) -> dict[_Key, CommittedOffset]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    try:
        return {
            (entry["group"], entry["topic"], entry["partition"]): CommittedOffset(
                entry["next"], entry["epoch"], entry["topic_id"]
            )
            for entry in json.loads(text)["offsets"]
        }
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptData(f"the offset file {path}", f"{error!r}", hint="Move it away to start again.") from error


def _write(path: Path, offsets: Mapping[_Key, CommittedOffset]) -> None:
    entries = [
        {
            "group": group,
            "topic": topic,
            "partition": partition,
            "next": committed.offset,
            "epoch": committed.epoch,
            "topic_id": committed.topic_id,
        }
        for (group, topic, partition), committed in sorted(offsets.items())
    ]
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "w", opener=opener) as file:
            json.dump({"offsets": entries}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
