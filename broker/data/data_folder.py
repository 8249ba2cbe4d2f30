"""The data folder of one replica: its owner, the lock that admits one process only, and the topics in it.

    lock                                exclusive flock of the process that uses the folder; has its pid, for operators.
    meta.json                           broker id, replica number, identity, format, boot id, incarnation, clean, the
                                        highest epoch, and the marks of `lock` and of meta.json itself.
    partitions                          every partition that was made here (metamq.broker.data.made_partitions).
    topics/<topic>@<topic id>/<index>/  one partition log each (metamq.broker.log).
    topics/.removed-…                   a topic that is being removed
    broker-<id>/                        the data folder of a worker of `metamq broker --processes`

The *incarnation* shows if this replica still has everything that it ever acknowledged. A killed process loses nothing
that it wrote: the kernel's memory has it. A host that went down may have lost some of it. So a start after another boot
of the host without a clean stop is a new incarnation, which counts as in sync only after it has caught up. A start that
finds a torn log, or a log that ends before the messages that readers had seen, is a new incarnation, too. If the boots
of the host cannot be distinguished, every start without a clean stop is a new incarnation. The new number is stored
before any file is changed: a crash in between must not hide the loss. All losses before the number is
published count as one.

A folder may also replace another folder of the same replica: an empty one, or a copy, which may be older than the last
state of the original. Its incarnation is random, and not the next number: the original may come back and continue its
own count. `lock` stays the same file as long as the folder is in use. A copy of files *over* a folder leaves `lock`
alone. But it brings a meta.json that names another file than itself, because each version of meta.json is a new file.
Such a folder is *replaced* while it may lack data of the original: without other replicas, it waits for an operator.
Only a copy from after a clean stop, with the last epoch, certainly lacks nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from metamq.broker.data import made_partitions
from metamq.broker.data.folder_lock import FolderLock, mark_of
from metamq.broker.data.made_partitions import MadePartitions
from metamq.broker.log.disk import flushed
from metamq.broker.log.disk.files import FileCache, shortage
from metamq.broker.log.disk.whole_disk import sync_disk_of
from metamq.broker.log.fresh import set_aside
from metamq.errors import ConfigError, DiskFull, StorageError
from metamq.private_files import make_folder, opener, too_open
from metamq.zk.cluster.epochs import IF_REMOVED

log = logging.getLogger("metamq.broker")

FORMAT = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RIGHT_ZOOKEEPER = "Give the ZooKeeper, chroot and --root that the folder was used with."
LOST_ZOOKEEPER = "If ZooKeeper was lost, `metamq cluster restore` rebuilds its contents from the data folders."
REMOVED = (
    "The rest of the cluster exists: this broker was removed by `metamq cluster remove-broker`, or ZooKeeper was "
    f"restored to a state before its first start. {IF_REMOVED}. {LOST_ZOOKEEPER}"
)
GONE = "this replica had it, but its files are missing"
REPLACED = "its files are not those that this replica used last, but a copy, which may lack messages acknowledged later"
_REMOVED = ".removed-"
_COPIED = "of another folder"
"""Stands for the mark of the lock if meta.json was copied from another folder."""
_WORKER_FOLDER = re.compile(r"broker-(0|[1-9][0-9]{0,4})")
_TOPIC_FOLDER = re.compile(r"([^/@][^/@]*)@([^/@]+)")


@dataclass(frozen=True, slots=True)
class _Meta:
    """The content of meta.json."""

    broker_id: int
    replica: int
    identity: str
    format: int
    boot_id: str
    incarnation: int
    clean: bool
    cluster_id: str = ""
    generation: int = 0
    lock: str = ""
    """The mark of the lock's file: see metamq.broker.data.folder_lock."""
    file: str = ""
    """The mark of meta.json itself."""
    epoch: int = 0
    """The highest epoch that this replica has served or followed; 0: none, or written by an older release."""
    state_version: int = -1
    """The version of the state node that the master of that epoch saw last; -1 on a slave."""
    reigned_as: int = 0
    """The incarnation that began that epoch as its master; 0 on a slave, or if an older release wrote the file."""
    is_replaced: bool = False
    """True if the folder replaces one that may have had more data."""


class TopicFolder(NamedTuple):
    """A topic's folder. Its partitions are the folders in it, named by index."""

    topic: str
    topic_id: str
    path: Path
    partitions: tuple[int, ...]


class DataFolder:
    """An open data folder, locked by this process until close().

    Only one thread may use it. Exceptions: free_bytes(), and methods for a topic's folder, one thread at a time.
    """

    def __init__(self, path: Path, meta: _Meta, lock: FolderLock) -> None:
        """Internal: use open()."""
        self.path = path
        self._meta = meta
        self.broker_id, self.replica = meta.broker_id, meta.replica
        """`replica` is its number in the broker id, as of the folder's first start."""
        self.identity = meta.identity
        """A random id made with the folder; restarts do not change it."""
        self._lock = lock
        self.lock = lock.place
        """The lock that this process holds. An earlier holder of the same lock on this machine has ended."""
        self._is_known = True
        """True if other processes may have seen this incarnation."""
        self.asks_logs_for_epoch = False
        """True if meta.json may have too low an epoch, since it is old or of an older release. The logs know more."""
        self._synced: set[Path] = set()
        """Folders of topics whose names are durable."""
        self._made: MadePartitions

    @classmethod
    def open(cls, path: Path, broker_id: int, replica: int = 0, *, boot_id: str | None = None) -> DataFolder:
        """Opens or makes the folder for a replica of a broker id, and completes interrupted removals.

        It does not open the logs. `boot_id` names the host's boot; None asks the kernel. Raises ConfigError if another
        process uses the folder, or if it belongs to another replica or a newer release; StorageError.
        """
        path = Path(path).absolute()
        boot = current_boot() if boot_id is None else boot_id
        try:
            make_folder(path / "topics")
            if (problem := too_open(path)) is not None:
                log.warning("%s", problem)
            lock = FolderLock.take(path, boot or socket.gethostname())
        except OSError as error:
            raise _failure(path, "opening the data folder", error) from error
        try:
            former = _load(path)
            if former is None:
                _check_alone(path)
            meta = _started(path, former, broker_id, replica, boot, lock.mark)
            folder = cls(path, meta, lock)
            folder._store(meta)
            folder.asks_logs_for_epoch = former is not None and (former.epoch == 0 or folder.is_copy)
            if former is not None and former.incarnation != meta.incarnation:
                folder._raised("the host went down without a clean stop of the broker")
            folder._finish_removals()
            folder._look_for_partitions()
        except BaseException:
            lock.close()
            raise
        return folder

    @property
    def is_copy(self) -> bool:
        """True until begin_after() if this folder is a copy of the one that was used last."""
        return self._meta.lock != self._lock.mark

    @property
    def incarnation(self) -> int:
        """A number that rises when this replica may have lost messages that it acknowledged."""
        return self._meta.incarnation

    @property
    def cluster_id(self) -> str:
        """The cluster of the topics in this folder; empty if no broker has served from it yet."""
        return self._meta.cluster_id

    def join_cluster(self, cluster_id: str) -> None:
        """Binds the folder to a cluster, durably. Raises ConfigError if it belongs to another one, StorageError."""
        if self.cluster_id:
            self.check_cluster(cluster_id)
        else:
            self._store(replace(self._meta, cluster_id=cluster_id))

    def check_cluster(self, cluster_id: str | None) -> None:
        """Raises ConfigError unless this ZooKeeper has the folder's cluster; None: it has no cluster."""
        if self.cluster_id != cluster_id:
            raise ConfigError(
                f"the data folder {self.path} belongs to cluster {self.cluster_id}, but this ZooKeeper has "
                f"{f'cluster {cluster_id}' if cluster_id else 'no cluster'}",
                hint=RIGHT_ZOOKEEPER if cluster_id else f"{RIGHT_ZOOKEEPER} {LOST_ZOOKEEPER}",
            )

    @property
    def generation(self) -> int:
        """The last broker generation that this replica's logs follow."""
        return self._meta.generation

    def follow_generation(self, generation: int) -> None:
        """Stores, durably, that the logs match those of the master of this broker generation. Raises StorageError."""
        if generation != self._meta.generation:
            self._store(replace(self._meta, generation=generation))

    @property
    def epoch(self) -> int:
        """The highest epoch that this replica has served or followed."""
        return self._meta.epoch

    @property
    def state_version(self) -> int:
        """The last version of the state node that this replica saw as the master of `epoch`; -1: it was a slave."""
        return self._meta.state_version

    def know_epoch(self, epoch: int, state_version: int = -1) -> None:
        """Stores, durably, that this epoch has begun. Call it before any action in the epoch, and as a master again for
        each later `state_version`. Older values change nothing. Raises StorageError."""
        if (epoch, state_version) > (self._meta.epoch, self._meta.state_version):
            reigned_as = self._meta.reigned_as
            if epoch != self._meta.epoch:
                reigned_as = self.incarnation if state_version >= 0 else 0
            self._store(replace(self._meta, epoch=epoch, state_version=state_version, reigned_as=reigned_as))

    def check_writable(self) -> None:
        """Checks that the folder is writable: stores the current meta data again. Raises StorageError."""
        self._store(self._meta)

    def raise_incarnation(self, reason: str) -> None:
        """Begins a new incarnation, durably: this replica lacks something. Raises StorageError."""
        if self._is_known:
            self._store(replace(self._meta, incarnation=self._meta.incarnation + 1))
            self._raised(reason)

    def begin_after(self, incarnation: int, reason: str, *, is_older: bool) -> None:
        """Begins a new incarnation, durably, after replacing a folder with `incarnation`. The number is higher, and
        random, so that counting does not reach it. `is_older`: this folder may lack data. Raises StorageError."""
        drawn = max(incarnation, self.incarnation) + 1 + secrets.randbelow(1 << 31)
        self._store(replace(self._meta, incarnation=drawn, lock=self._lock.mark, clean=False, is_replaced=is_older))
        self._raised(f"the data folder {self.path} {reason}")

    @property
    def was_clean(self) -> bool:
        """True if this is a copy of a folder after a clean stop."""
        return self._meta.clean

    @property
    def is_replaced(self) -> bool:
        """True until has_caught_up() if this folder replaces one that may have had more data."""
        return self._meta.is_replaced

    def has_caught_up(self) -> None:
        """Notes that no data is missing any more, or that an operator accepted the loss. Raises StorageError."""
        if self._meta.is_replaced:
            self._store(replace(self._meta, is_replaced=False))

    def _raised(self, reason: str) -> None:
        self._is_known = False
        log.warning(
            "this replica is a new incarnation, %d, and may lack messages that it acknowledged: %s",
            self.incarnation,
            reason,
        )

    def incarnation_known(self) -> None:
        """Notes that other processes may see the incarnation now; the next loss begins another one."""
        self._is_known = True

    def topics(self) -> list[TopicFolder]:
        """The topics that have a folder here, ordered by name. Raises StorageError."""
        found = []
        try:
            with os.scandir(self.path / "topics") as entries:
                there = sorted((entry.name, entry.path) for entry in entries if entry.is_dir())
            for name, path in there:
                match = _TOPIC_FOLDER.fullmatch(name)
                if match is not None and not name.startswith("."):
                    partitions = sorted(int(index) for index in os.listdir(path) if index.isdecimal())
                    found.append(TopicFolder(match[1], match[2], Path(path), tuple(partitions)))
        except OSError as error:
            raise _failure(self.path / "topics", "listing it", error) from error
        return found

    def partition_folder(self, topic: str, topic_id: str, index: int) -> Path:
        """The folder of a partition's log. Makes the topic's folder. Raises ConfigError, StorageError."""
        name = f"{topic}@{topic_id}"
        if _TOPIC_FOLDER.fullmatch(name) is None or name.startswith(".") or "\0" in name:
            raise ConfigError(f"topic {topic!r} with id {topic_id!r} cannot be the name of a folder")
        folder = self.path / "topics" / name
        try:
            if folder not in self._synced:  # an existing folder may come from a start that was killed before the sync
                make_folder(folder)
                _sync(folder.parent)
                self._synced.add(folder)
        except OSError as error:
            raise _failure(folder, "making a topic's folder", error) from error
        return folder / str(index)

    def _look_for_partitions(self) -> None:
        """Reads the record of partitions. A folder that lost all partitions and the record counts as a new one.

        Raises StorageError.
        """
        try:
            found = {
                f"{topic.path.name}/{index}": mark
                for topic in self.topics()
                for index in topic.partitions
                if (mark := self._mark(topic.path.name, index)) is not None
            }
            if found.keys() - made_partitions.recorded(self.path).keys():  # a process that made logs was killed
                sync_disk_of(self.path)
            self._made = MadePartitions(self.path, found, is_copy=self.is_copy)
            _sync(self.path)
        except OSError as error:
            raise _failure(self.path, "reading the partitions", error) from error
        if self._made.is_new and not self.topics() and self.cluster_id:
            self._store(replace(self._meta, cluster_id=""))

    def missing(self, topic: str, topic_id: str, indexes: Iterable[int]) -> dict[int, str]:
        """Partitions that were made here and whose files are missing or replaced, each with a description. Any thread.
        Raises StorageError."""
        found = {}
        for index in indexes:
            made = self._made.mark(f"{topic}@{topic_id}/{index}")
            if made is None:
                continue
            mark = self._mark(f"{topic}@{topic_id}", index)
            if mark is None:
                found[index] = GONE
            elif made not in ("", mark):
                found[index] = REPLACED
        return found

    def is_made(self, topic: str, topic_id: str, index: int) -> bool:
        """True if this partition was made here. Any thread."""
        return self._made.mark(f"{topic}@{topic_id}/{index}") is not None

    def _mark(self, topic_folder: str, index: int) -> str | None:
        """The mark of a partition's file `flushed`; None if there is no such file. Raises StorageError."""
        path = f"{self.path}/topics/{topic_folder}/{index}/{flushed.FILE_NAME}"
        try:
            fd = os.open(path, os.O_RDWR)  # makes overlayfs copy the file first, which changes its mark
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failure(Path(path), "looking for it", error) from error
        try:
            return mark_of(fd)
        finally:
            os.close(fd)

    def were_made(self, topic: str, topic_id: str, indexes: Iterable[int]) -> None:
        """Records, durably, that these partitions exist. Their logs are durable. Any thread. Raises StorageError."""
        folder = f"{topic}@{topic_id}"
        try:
            self._made.add({f"{folder}/{index}": self._mark(folder, index) or "" for index in indexes})
        except OSError as error:
            raise _failure(self.path / made_partitions.FILE_NAME, "writing it", error) from error

    def forget_partition(self, topic: str, topic_id: str, index: int, name: str) -> Path | None:
        """Gives a partition's log up, for an operator: the next start makes an empty log. `name` is for errors.

        The incarnation rises before the log is moved, since this replica then lacks acknowledged messages. A crash in
        between leaves a partition without a folder, which still counts as damaged. Returns the new path of the log;
        None if its folder was missing. Raises StorageError.
        """
        folder, target = self.path / "topics" / f"{topic}@{topic_id}" / str(index), None
        self.raise_incarnation(f"{name} was given up")
        if folder.exists():
            target = Path(set_aside(folder, name, FileCache(), now_us=time.time_ns() // 1000))
        try:
            self._made.forget([f"{topic}@{topic_id}/{index}"])
        except OSError as error:
            raise _failure(self.path / made_partitions.FILE_NAME, "writing it", error) from error
        return target

    def accept_partition(self, topic: str, topic_id: str, index: int, name: str) -> None:
        """Accepts a partition's files that came from elsewhere as this replica's own, for an operator.

        First raises the incarnation, since the files may lack messages that this replica acknowledged. `name` is for
        the log. Raises StorageError.
        """
        self.raise_incarnation(f"{name} may be an older copy")
        self.were_made(topic, topic_id, [index])

    def remove_topic(self, topic: str, topic_id: str) -> None:
        """Removes the folder of a topic whose logs are closed. Once this returns, no start finds the topic again.

        The files may be many: if a crash interrupts the removal, the next open completes it. Raises StorageError.
        """
        folder = self.path / "topics" / f"{topic}@{topic_id}"
        self._synced.discard(folder)
        if not folder.exists():
            self._finish_removals()  # completes a removal that a lack of descriptors interrupted
            return
        doomed = folder.with_name(f"{_REMOVED}{secrets.token_hex(4)}-{folder.name}")
        try:
            self._made.forget(self._made.of(folder.name))
            folder.rename(doomed)
            _sync(folder.parent)
            shutil.rmtree(doomed)
        except OSError as error:
            raise _failure(folder, "removing a topic", error) from error

    def sync_topic(self, topic: str, topic_id: str) -> None:
        """Makes the names of a topic's partitions durable. Raises StorageError."""
        folder = self.path / "topics" / f"{topic}@{topic_id}"
        try:
            _sync(folder)
        except OSError as error:
            raise _failure(folder, "making partitions", error) from error

    def sync_disk(self, files: FileCache) -> None:
        """Makes everything durable that was written to the folder's disk. Raises StorageError."""
        try:
            files.sync_disk_of(str(self.path))
        except OSError as error:
            raise _failure(self.path, "the last fsync", error) from error

    def free_bytes(self) -> int:
        """Bytes that this process may still write to the folder's disk. Raises StorageError."""
        try:
            disk = os.statvfs(self.path)
        except OSError as error:
            raise _failure(self.path, "asking for free space", error) from error
        return disk.f_bavail * disk.f_frsize

    def close(self, *, clean: bool) -> None:
        """Releases the folder. `clean`: every log was closed cleanly. A second call does nothing.

        Raises StorageError; the lock is released anyway.
        """
        if not self._lock.held:
            return
        try:
            if clean:
                self._store(replace(self._meta, clean=True))
        except DiskFull as error:
            log.warning("the clean stop could not be stored, so the next start assumes a crash: %s", error)
        finally:
            self._lock.close()

    def _store(self, meta: _Meta) -> None:
        target, temporary = self.path / "meta.json", self.path / "meta.json.tmp"
        try:
            with open(temporary, "w", opener=opener) as file:
                meta = replace(meta, file=mark_of(file.fileno()))
                json.dump(asdict(meta), file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
            _sync(self.path)
        except OSError as error:
            raise _failure(target, "writing it", error) from error
        self._meta = meta

    def _finish_removals(self) -> None:
        for path in (self.path / "topics").glob(f"{_REMOVED}*"):
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise _failure(path, "removing a topic", error) from error


_META_HINT = "Restore the file from a backup: the logs do not identify the replica."


def worker_folder(data: Path, broker_id: int) -> Path:
    """The data folder of a worker in the data folder of `metamq broker --processes`."""
    return data / f"broker-{broker_id}"


def folders_below(data: Path) -> list[int]:
    """The broker ids of the workers that have a data folder in this one."""
    found = (_WORKER_FOLDER.fullmatch(meta.parent.name) for meta in data.glob("broker-*/meta.json"))
    return sorted(int(match[1]) for match in found if match)


def owner_of(path: Path) -> int | None:
    """The broker id of a data folder; None if no broker has used it. Raises ConfigError."""
    meta = _load(path)
    return None if meta is None else meta.broker_id


def _check_alone(path: Path) -> None:
    """Raises ConfigError if the folder has data folders of workers: a broker of its own would not find their data."""
    if below := folders_below(path):
        names = ", ".join(worker_folder(path, one).name for one in below)
        raise ConfigError(
            f"the data folder {path} was made by `metamq broker --processes`: it has {names}",
            hint=f"Give --processes as before, or a broker's own folder, as --data {worker_folder(path, below[0])}.",
        )


def _load(path: Path) -> _Meta | None:
    """The content of meta.json, or None in a new folder. Raises ConfigError if it cannot be understood."""
    try:
        with open(path / "meta.json") as file:
            mark = mark_of(file.fileno())
            document = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / 'meta.json'} cannot be read: {error}", hint=_META_HINT) from error
    found = document.get("format") if isinstance(document, dict) else None
    if not isinstance(found, int) or found > FORMAT:
        raise ConfigError(
            f"the data folder {path} has format {found}, but this release knows formats up to {FORMAT}",
            hint="Start the metamq release that last used the folder, or a newer one.",
        )
    try:
        meta = _Meta(**document)
    except TypeError as error:
        raise ConfigError(f"{path / 'meta.json'} is incomplete: {error}", hint=_META_HINT) from error
    return meta if meta.file in ("", mark) else replace(meta, lock=_COPIED)


def _started(path: Path, meta: _Meta | None, broker_id: int, replica: int, boot_id: str, lock: str) -> _Meta:
    """The folder's meta data from this start on. Raises ConfigError if the folder belongs to another broker."""
    if meta is None:
        if any((path / "topics").iterdir()):
            raise ConfigError(f"{path} has topics, but its meta.json is missing", hint=_META_HINT)
        return _Meta(broker_id, replica, secrets.token_hex(16), FORMAT, boot_id, 1, clean=False, lock=lock)
    if meta.broker_id != broker_id:
        raise ConfigError(
            f"the data folder {path} belongs to broker {meta.broker_id}, not {broker_id}",
            hint="Give this broker a data folder of its own, or the right id.",
        )
    if meta.replica != replica:
        raise ConfigError(
            f"the data folder {path} belongs to replica {meta.replica} of broker {broker_id}, not {replica}",
            hint=f"Start it with --replica {meta.replica}, or give replica {replica} a data folder of its own.",
        )
    lost = not meta.clean and (not boot_id or boot_id != meta.boot_id)
    is_copy = meta.lock not in ("", lock)
    return replace(
        meta,
        boot_id=boot_id,
        clean=meta.clean and is_copy,  # a copy is not changed before begin_after()
        incarnation=meta.incarnation + lost,
        lock=meta.lock or lock,
    )


def current_boot() -> str:
    """The kernel's name for this boot; empty if it has none."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _failure(path: Path, action: str, error: OSError) -> StorageError:
    return shortage(f"{path}: {action}", error) or StorageError(
        f"{path}: {action} failed: {error.strerror or error}",
        hint="Check the disk and the folder's permissions, then start the broker again.",
        outcome="not_done",
    )
