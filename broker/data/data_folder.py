"""The data folder of one replica: whose it is, that only one process uses it, and which topics lie in it.

    lock                                exclusive flock of the process that uses the folder; its pid, for people
    meta.json                           broker id, replica number, identity, format, boot id, incarnation, clean, the
                                        highest epoch, and which files `lock` and it itself are
    partitions                          which partitions were ever made here (metamq.broker.data.made_partitions)
    topics/<topic>@<topic id>/<index>/  one partition log each (metamq.broker.log)
    topics/.removed-…                   a topic that is being removed

The *incarnation* tells whether this replica still has all that it ever acknowledged. A killed process keeps what it
wrote, in the kernel's memory; a host that went down may have lost it. So a start after another boot of the host
without a clean stop is a new incarnation, which counts as in sync only after it caught up; so is one that finds a log
torn, or ending before what readers had seen of it. Where the host's boots cannot be told apart, every start without a
clean stop counts as a new one. It is stored before anything of what was found is changed: a crash in between must not
lose the news. Losses before anybody has been told the number are one.

A folder may also take the place of another one that was the same replica: an empty one, or a copy, which may be older
than what that one held last. It begins with an incarnation that is drawn, not counted: the other folder may come back,
and count on from where it was. `lock` stays the same file for as long as the folder is in use; what was copied *over*
a folder leaves it alone, but brings a meta.json that names another file than it is: each version of it is a new one.
Such a folder is *replaced* while it may lack what the other one had: alone, its replica waits for a person. Only a copy
that was made after a clean stop, with the last epoch there was, is known to lack nothing.
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
from metamq.broker.log.fresh import set_aside
from metamq.errors import ConfigError, DiskFull, StorageError
from metamq.private_files import make_folder, opener, too_open
from metamq.zk.cluster.epochs import IF_REMOVED

log = logging.getLogger("metamq.broker")

FORMAT = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RIGHT_ZOOKEEPER = "Give the ZooKeeper, chroot and --root that the folder was used with."
LOST_ZOOKEEPER = "If ZooKeeper was lost, `metamq cluster restore` makes what it held anew, from the data folders."
REMOVED = (
    "The rest of the cluster is there: this broker was removed by `metamq cluster remove-broker`, or ZooKeeper was "
    f"taken back to before its first start. {IF_REMOVED}. {LOST_ZOOKEEPER}"
)
GONE = "this replica had it, and its files are not there"
REPLACED = "its files are not those that this replica used last, but a copy, which may lack what was acknowledged later"
_REMOVED = ".removed-"
_COPIED = "of another folder"
"""In the place of a lock's mark: meta.json came from elsewhere."""
_TOPIC_FOLDER = re.compile(r"([^/@][^/@]*)@([^/@]+)")


@dataclass(frozen=True, slots=True)
class _Meta:
    """meta.json."""

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
    """The mark of the lock's file, see metamq.broker.data.folder_lock."""
    file: str = ""
    """The mark of meta.json itself."""
    epoch: int = 0
    """The highest epoch that this replica has served or followed; 0: none, or an older release did not write it."""
    state_version: int = -1
    """The version of the state node that the master of that epoch saw last; -1 at a slave."""
    reigned_as: int = 0
    """The incarnation that began that epoch as its master; 0 at a slave, or if an older release did not write it."""
    is_replaced: bool = False
    """Whether the folder is in the place of one that had more, as far as anybody knows."""


class TopicFolder(NamedTuple):
    """A topic's folder: its partitions' indexes are the folders in it."""

    topic: str
    topic_id: str
    path: Path
    partitions: tuple[int, ...]


class DataFolder:
    """An open data folder, locked by this process until close().

    One thread only, save for free_bytes(), and for what concerns a topic's folder: whichever thread, one at a time.
    """

    def __init__(self, path: Path, meta: _Meta, lock: FolderLock) -> None:
        """Use open()."""
        self.path = path
        self._meta = meta
        self._lock = lock
        self._is_known = True
        """Whether others may have been told this incarnation."""
        self.asks_logs_for_epoch = False
        """Whether meta.json may tell too low an epoch: it is older, or of an older release. The logs tell the rest."""
        self._synced: set[Path] = set()
        """Topics' folders whose names are durable."""
        self._made: MadePartitions

    @classmethod
    def open(cls, path: Path, broker_id: int, replica: int = 0, *, boot_id: str | None = None) -> DataFolder:
        """Opens or makes the folder for a replica of a broker id, and finishes removals that were broken off.

        The logs in it are opened apart. `boot_id` names the host's boot; None asks the kernel. Raises ConfigError when
        another process uses the folder, or when it belongs to another replica or a newer release; StorageError.
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
    def broker_id(self) -> int:
        return self._meta.broker_id

    @property
    def replica(self) -> int:
        """The replica's number in its broker id: that of the folder's first start."""
        return self._meta.replica

    @property
    def identity(self) -> str:
        """Made at random with the folder; unchanged by restarts."""
        return self._meta.identity

    @property
    def lock(self) -> str:
        """The lock that this process holds: who held it before, on this machine, is gone."""
        return self._lock.place

    @property
    def is_copy(self) -> bool:
        """Whether this is not the folder that was in use last, but one like it; until begin_after()."""
        return self._meta.lock != self._lock.mark

    @property
    def incarnation(self) -> int:
        """Raised when this replica may have lost what it acknowledged."""
        return self._meta.incarnation

    @property
    def cluster_id(self) -> str:
        """The cluster that the topics in here belong to; empty in a folder that no broker has served from."""
        return self._meta.cluster_id

    def join_cluster(self, cluster_id: str) -> None:
        """Binds the folder to a cluster, durably. Raises ConfigError when it belongs to another one, StorageError."""
        if self.cluster_id:
            self.check_cluster(cluster_id)
        else:
            self._store(replace(self._meta, cluster_id=cluster_id))

    def check_cluster(self, cluster_id: str | None) -> None:
        """Whether this ZooKeeper has the cluster that the folder belongs to; None: it has none. Raises ConfigError."""
        if self.cluster_id != cluster_id:
            raise ConfigError(
                f"the data folder {self.path} belongs to cluster {self.cluster_id}, this ZooKeeper to "
                f"{cluster_id or 'none'}",
                hint=RIGHT_ZOOKEEPER if cluster_id else f"{RIGHT_ZOOKEEPER} {LOST_ZOOKEEPER}",
            )

    @property
    def generation(self) -> int:
        """The last generation of the broker id's state that this replica's logs have followed."""
        return self._meta.generation

    def follow_generation(self, generation: int) -> None:
        """The logs are what the master of this generation has, durably. Raises StorageError."""
        if generation != self._meta.generation:
            self._store(replace(self._meta, generation=generation))

    @property
    def epoch(self) -> int:
        """The highest epoch that this replica has served or followed."""
        return self._meta.epoch

    @property
    def state_version(self) -> int:
        """The version of the state node that this replica saw last as the master of `epoch`; -1: it was not."""
        return self._meta.state_version

    def know_term(self, epoch: int, state_version: int = -1) -> None:
        """Stores, durably, that this epoch has begun: before anything is done under it. `state_version` is for a
        master, which also tells each later version. What is known stays as it is. Raises StorageError."""
        if (epoch, state_version) > (self._meta.epoch, self._meta.state_version):
            reigned_as = self._meta.reigned_as
            if epoch != self._meta.epoch:
                reigned_as = self.incarnation if state_version >= 0 else 0
            self._store(replace(self._meta, epoch=epoch, state_version=state_version, reigned_as=reigned_as))

    def check_writable(self) -> None:
        """Whether something can be stored at present: stores what is known once more. Raises StorageError."""
        self._store(self._meta)

    def raise_incarnation(self, reason: str) -> None:
        """A new incarnation, durably: this replica lacks something. Raises StorageError."""
        if self._is_known:
            self._store(replace(self._meta, incarnation=self._meta.incarnation + 1))
            self._raised(reason)

    def begin_after(self, incarnation: int, reason: str, *, is_older: bool) -> None:
        """A new incarnation, durably, above that of a folder that this one is in the place of, and one that nobody
        comes to by counting. `is_older`: what that one had is not known to be here. Raises StorageError."""
        drawn = max(incarnation, self.incarnation) + 1 + secrets.randbelow(1 << 31)
        self._store(replace(self._meta, incarnation=drawn, lock=self._lock.mark, clean=False, is_replaced=is_older))
        self._raised(f"the data folder {self.path} {reason}")

    @property
    def was_clean(self) -> bool:
        """Of a copy: whether it is one of a folder after a clean stop."""
        return self._meta.clean

    @property
    def is_replaced(self) -> bool:
        """Whether it is in the place of one that had more, as far as anybody knows; until has_caught_up()."""
        return self._meta.is_replaced

    def has_caught_up(self) -> None:
        """It has what the other one had, or somebody accepted that it has not. Raises StorageError."""
        if self._meta.is_replaced:
            self._store(replace(self._meta, is_replaced=False))

    def _raised(self, reason: str) -> None:
        self._is_known = False
        log.warning(
            "this replica is a new incarnation, %d, and may lack what it acknowledged: %s", self.incarnation, reason
        )

    def incarnation_known(self) -> None:
        """Others are told the incarnation now; the next loss makes another one."""
        self._is_known = True

    def topics(self) -> list[TopicFolder]:
        """The topics that have a folder here, by name. Raises StorageError."""
        found = []
        try:
            for path in sorted((self.path / "topics").iterdir()):
                match = _TOPIC_FOLDER.fullmatch(path.name)
                if match is not None and not path.name.startswith(".") and path.is_dir():
                    partitions = sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal())
                    found.append(TopicFolder(match[1], match[2], path, tuple(partitions)))
        except OSError as error:
            raise _failure(self.path / "topics", "listing it", error) from error
        return found

    def partition_folder(self, topic: str, topic_id: str, index: int) -> Path:
        """Where a partition's log belongs; the topic's folder is made. Raises ConfigError, StorageError."""
        name = f"{topic}@{topic_id}"
        if _TOPIC_FOLDER.fullmatch(name) is None or name.startswith(".") or "\0" in name:
            raise ConfigError(f"topic {topic!r} with id {topic_id!r} cannot be the name of a folder")
        folder = self.path / "topics" / name
        try:
            if folder not in self._synced:  # one that is there may come from a start that was killed before the sync
                make_folder(folder)
                _sync(folder.parent)
                self._synced.add(folder)
        except OSError as error:
            raise _failure(folder, "making a topic's folder", error) from error
        return folder / str(index)

    def _look_for_partitions(self) -> None:
        """Reads which partitions there were. A folder that lost all of them, and their record, counts as a new one.

        Raises StorageError.
        """
        try:
            found = {
                f"{topic.path.name}/{index}": mark
                for topic in self.topics()
                for index in topic.partitions
                if (mark := self._mark(topic.path.name, index)) is not None
            }
            self._made = MadePartitions(self.path, found, is_copy=self.is_copy)
            _sync(self.path)
        except OSError as error:
            raise _failure(self.path, "reading which partitions there are", error) from error
        if self._made.is_new and not self.topics() and self.cluster_id:
            self._store(replace(self._meta, cluster_id=""))

    def missing(self, topic: str, topic_id: str, indexes: Iterable[int]) -> dict[int, str]:
        """Partitions that were made here, and whose files are gone or others: what to say of each. Any thread. Raises
        StorageError."""
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

    def _mark(self, topic_folder: str, index: int) -> str | None:
        """Which file a partition's `flushed` is; None without one. Raises StorageError."""
        path = f"{self.path}/topics/{topic_folder}/{index}/{flushed.FILE_NAME}"
        try:
            fd = os.open(path, os.O_RDWR)  # overlayfs then makes its own copy of a file, which has another mark
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failure(Path(path), "looking for it", error) from error
        try:
            return mark_of(fd)
        finally:
            os.close(fd)

    def were_made(self, topic: str, topic_id: str, indexes: Iterable[int]) -> None:
        """Makes it durable that there are these partitions. Their logs are. Any thread. Raises StorageError."""
        folder = f"{topic}@{topic_id}"
        try:
            self._made.add({f"{folder}/{index}": self._mark(folder, index) or "" for index in indexes})
        except OSError as error:
            raise _failure(self.path / made_partitions.FILE_NAME, "writing it", error) from error

    def forget_partition(self, topic: str, topic_id: str, index: int, name: str) -> Path | None:
        """Gives a partition's log up, for a person: the next start makes an empty one. `name` is for errors.

        The incarnation rises before the log is moved: from there on this replica lacks what it acknowledged. A crash in
        between leaves a partition whose folder is missing, which is damaged as before. Returns where the log is now,
        None where its folder was missing. Raises StorageError.
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
        """Takes files of a partition that came from elsewhere for this replica's own, for a person.

        The incarnation rises before, since they may lack what this replica acknowledged. `name` is for the log. Raises
        StorageError.
        """
        self.raise_incarnation(f"{name} may be an older copy")
        self.were_made(topic, topic_id, [index])

    def remove_topic(self, topic: str, topic_id: str) -> None:
        """Removes a topic's folder; its logs are closed. Once this returns, no start finds it again.

        The files may be many: what a crash leaves of them is removed at the next open. Raises StorageError.
        """
        folder = self.path / "topics" / f"{topic}@{topic_id}"
        self._synced.discard(folder)
        if not folder.exists():
            self._finish_removals()  # of one that was broken off for want of descriptors
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

    def free_bytes(self) -> int:
        """Bytes that this process may still write to the folder's disk. Raises StorageError."""
        try:
            disk = os.statvfs(self.path)
        except OSError as error:
            raise _failure(self.path, "asking for free space", error) from error
        return disk.f_bavail * disk.f_frsize

    def close(self, *, clean: bool) -> None:
        """Gives the folder up. `clean`: every log was closed cleanly. A second call does nothing.

        Raises StorageError; the lock is gone all the same.
        """
        if not self._lock.held:
            return
        try:
            if clean:
                self._store(replace(self._meta, clean=True))
        except DiskFull as error:
            log.warning("the stop is not noted, so that the next start takes it for a crash: %s", error)
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


_META_HINT = "Restore the file from a backup: whose replica this is cannot be guessed from the logs."


def _load(path: Path) -> _Meta | None:
    """meta.json, or None in a new folder. Raises ConfigError when it cannot be understood."""
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
            f"the data folder {path} has format {found}, this release knows formats up to {FORMAT}",
            hint="Start the metamq release that last used the folder, or a newer one.",
        )
    try:
        meta = _Meta(**document)
    except TypeError as error:
        raise ConfigError(f"{path / 'meta.json'} is not complete: {error}", hint=_META_HINT) from error
    return meta if meta.file in ("", mark) else replace(meta, lock=_COPIED)


def _started(path: Path, meta: _Meta | None, broker_id: int, replica: int, boot_id: str, lock: str) -> _Meta:
    """The folder's meta data from this start on. Raises ConfigError when the folder is another broker's."""
    if meta is None:
        if any((path / "topics").iterdir()):
            raise ConfigError(f"{path} holds topics, but its meta.json is missing", hint=_META_HINT)
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
        clean=meta.clean and is_copy,  # nothing is done with a copy before begin_after()
        incarnation=meta.incarnation + lost,
        lock=meta.lock or lock,
    )


def current_boot() -> str:
    """The kernel's name for this boot; empty where there is none."""
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
        hint="Look at the disk and at the folder's permissions, then start the broker again.",
        outcome="not_done",
    )
