"""The topics of a broker: opens logs by their configuration.

The configuration in ZooKeeper is the only source. If ZooKeeper does not have the topic id of a folder, the topic was
deleted, or deleted and made again while this broker was down. The folder is removed and never served again. If an older
ZooKeeper has forgotten the topic (metamq.broker.data.kept_topics), it is not served, and the folder stays.

Making, moving and removing folders waits for the disk, so threads do it; one thread is for removals, which may be slow.
The threads only know the folder. The loop opens a log afterwards, and closes it before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from metamq.broker.data import topic_settings
from metamq.broker.data.cold_reads import ColdReads
from metamq.broker.data.partition import Partition
from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.disk.derived import remove_orphans
from metamq.broker.log.disk.files import SHORTAGES, FileCache
from metamq.broker.log.fresh import TOGETHER, is_half_made, set_aside
from metamq.broker.log.trim import TrimmedLog
from metamq.broker.log_once import LogOnce
from metamq.errors import (
    ConfigError,
    CorruptData,
    DiskFull,
    MetamqError,
    PartitionNotFound,
    TooManyOpenFiles,
    TopicNotFound,
)
from metamq.threads import start_pool
from metamq.wire.limits import BATCH_BYTES_MAX
from metamq.words import count
from metamq.zk.cluster.topics import FlushEvery, TopicConfig
from metamq.zk.names import OWN, parse_partition, partition_name

if TYPE_CHECKING:
    from metamq.broker.data.data_folder import DataFolder, TopicFolder

log = logging.getLogger("metamq.broker")


def log_config(config: TopicConfig, archive_folder: Path) -> LogConfig:
    """The settings of a topic's logs."""
    if isinstance(config.flush, FlushEvery):
        flush = FlushPolicy(every_messages=config.flush.messages, every_ms=config.flush.ms)
    else:
        flush = FlushPolicy(before_ack=True, every_messages=None, every_ms=None)
    return LogConfig(
        segment_bytes=config.segment_bytes,
        flush=flush,
        retention_ms=config.retention_ms,
        retention_bytes=config.retention_bytes,
        cleanup=config.cleanup,
        archive_dir=archive_folder if config.cleanup == "archive" else None,
        batch_bytes_max=BATCH_BYTES_MAX,
    )


NOTHING_KEPT: Mapping[str, MetamqError] = {}
THREADS = 3
"""Number of threads: one may remove a topic for long, and one the files of an emptied log."""
RETRY_S = 1.0
MISSING_HINT = (
    "Put its folder back. Or promote a replica that is in sync: then this one copies the partition. Without one: stop "
    "the broker; `metamq log accept` takes a copy that you put there"
)
FORGET_HINT = ", and `metamq log forget` begins an empty log"
"""The text after `MISSING_HINT` for a topic of users."""


class Topics:
    """The open topics. Only the broker's loop uses it; run_removals() must run in a task."""

    def __init__(self, broker_id: int, folder: DataFolder, files: FileCache) -> None:
        self._broker_id = broker_id
        self._folder = folder
        self._files = files
        self._configs: dict[str, TopicConfig] = {}
        self.open: dict[str, dict[int, Partition]] = {}
        """The open partitions, by topic and index. Callers may read it, but not change it."""
        self._broken: dict[tuple[str, int], CorruptData] = {}
        """Partitions whose logs are damaged: they are not served, but all others are."""
        self._set_aside: set[Path] = set()
        """Folders of damaged logs that were moved away, and are not replaced by an open new log yet."""
        self._doomed: asyncio.Queue[TopicFolder] = asyncio.Queue()
        self._removed: set[tuple[str, str]] = set()
        """(topic, id) of deleted topics whose removal was logged."""
        self.cold_reads = ColdReads(files)
        try:
            self._executor = start_pool(THREADS, "metamq-topics")
        except BaseException:
            self.cold_reads.close()
            raise
        self.opened: Callable[[Partition], None] = lambda partition: None
        """Called with each partition that was opened."""
        self.closing: Callable[[Partition], None] = lambda partition: None
        """Called with each partition that ZooKeeper does not list any more, before it is closed."""
        self.flush_changed: Callable[[Partition], None] = lambda partition: None
        """Called with each partition whose topic starts or stops flushing before it acknowledges."""
        self.trimmed: Callable[[], None] = lambda: None
        """Called when messages are hidden, and must be removed from the disk."""
        self.damaged: Callable[[], None] = lambda: None
        """Called when a log was found to be damaged."""
        self.listed = 0
        """The version of ZooKeeper's list of topics that is applied; 0: not known."""
        self.unlisted: dict[str, MetamqError] = {}
        """Topics with more partitions in the folder than ZooKeeper lists: it was restored from an older copy."""
        self._changing = asyncio.Lock()
        self._is_clean = True
        """False if a partition that is not listed any more was not closed cleanly."""
        self._unreadable: dict[str, MetamqError] = {}
        """Topics whose configuration in ZooKeeper cannot be read or used, or needs more space than the disk has."""

    def find(self, topic: str, topic_id: str, index: int) -> Partition:
        """The partition. Raises TopicNotFound (also if the topic was made again), PartitionNotFound."""
        config = self._configs.get(topic)
        if config is None:
            reason = self._unreadable.get(topic)
            raise TopicNotFound(topic, hint=None if reason is None else f"This broker may have it: {reason}")
        if topic_id != config.id:
            raise TopicNotFound.made_anew(topic, config.id, topic_id)
        partition = self.open[topic].get(index)
        if partition is None and (topic, index) in self._broken:
            raise self._broken[topic, index]
        if partition is None:
            known = count(config.partitions[self._broker_id], "partition")  # no names: there may be 10,000
            hint = f"It has {known} at broker {self._broker_id}."
            raise PartitionNotFound(topic, partition_name(self._broker_id, index), hint=hint)
        return partition

    def find_for_clients(self, topic: str, topic_id: str, index: int) -> Partition:
        """A partition that clients may read and write. Raises the errors of find(), and CorruptData."""
        if topic.startswith(OWN):
            raise TopicNotFound(topic)
        return self.find(topic, topic_id, index)

    def is_gone(self, topic: str, topic_id: str) -> bool:
        """True if a topic was deleted permanently, or made again under another id."""
        config = self._configs.get(topic)
        return config.id != topic_id if config is not None else topic not in self._unreadable

    def get(self, topic: str, index: int) -> Partition | None:
        """The partition if it is open, whatever the id of its topic."""
        return self.open.get(topic, {}).get(index)

    def config(self, topic: str) -> TopicConfig:
        """The configuration of an open topic."""
        return self._configs[topic]

    def partitions(self) -> Iterator[Partition]:
        """All open partitions."""
        for indexed in list(self.open.values()):
            yield from list(indexed.values())

    def counts(self) -> dict[str, int]:
        """Number of partitions of each user topic, as registered in ZooKeeper."""
        return {
            topic: config.partitions[self._broker_id]
            for topic, config in self._configs.items()
            if not topic.startswith(OWN)
        }

    def without_room(self) -> DiskFull | None:
        """The shortage that keeps a topic from its configuration, or None. The caller must then call apply() again."""
        return next((error for error in self._unreadable.values() if isinstance(error, DiskFull)), None)

    def broken(self) -> list[MetamqError]:
        """The reasons why partitions or topics are not served as configured, or are served from damaged logs."""
        return [*(self.unlisted | self._unreadable).values(), *self.damage().values()]

    def damage(self) -> dict[tuple[str, int], CorruptData]:
        """The partitions whose logs are damaged, with their damage."""
        found = {(p.topic, p.index): p.closed_by or p.damage for p in self.partitions()}
        return self._broken | {place: error for place, error in found.items() if isinstance(error, CorruptData)}

    def is_damaged(self, partition: Partition, error: CorruptData) -> None:
        """Closes an open partition that was found to be damaged."""
        if partition.closed_by is None:
            log.critical("%s is not served any more: %s", partition.name, error, extra=self._fields(partition))
            partition.close(error, clean=False)
            self.damaged()

    def has_damage(self, partition: Partition, error: CorruptData) -> None:
        """Notes the damage of an open partition, which is still served: the rest of it is intact."""
        if partition.closed_by is None and partition.damage is None:
            log.critical("%s is damaged, but still served: %s", partition.name, error, extra=self._fields(partition))
            partition.damage = error
            self.damaged()

    def _fields(self, partition: Partition) -> dict[str, str]:
        return {"topic": partition.topic, "partition": partition_name(self._broker_id, partition.index)}

    async def set_damaged_aside(self) -> None:
        """Moves damaged logs of a slave away and makes new ones in their place, which the master then fills.

        First raises the incarnation: this replica lacks messages that it acknowledged. Raises StorageError.
        """
        async with self._changing:
            damage = self.damage()
            if damage:
                self._folder.raise_incarnation(f"{', '.join(self._name(*place) for place in damage)}: damaged")
            for (topic, index), error in damage.items():
                config, name = self._configs[topic], self._name(topic, index)
                log.warning("%s is copied again from the master: %s", name, error)
                closed = self.open[topic].pop(index, None)
                if closed is not None:
                    self.closing(closed)
                    if closed.closed_by is None:
                        closed.close(error, clean=False)
                self._broken[topic, index] = error  # until it has been moved
                folder = self._folder.partition_folder(topic, config.id, index)
                if folder not in self._set_aside:
                    moving = partial(self._move_aside, folder, name)
                    await asyncio.get_running_loop().run_in_executor(self._executor, moving)
                    self._set_aside.add(folder)
                await self._open(topic, config, [index], makes_missing=True)
                self._set_aside.discard(folder)
                if index in self.open[topic]:
                    del self._broken[topic, index]

    def _move_aside(self, folder: Path, name: str) -> None:
        if folder.exists() and not is_half_made(folder):
            set_aside(folder, name, self._files, now_us=time.time_ns() // 1000)

    async def apply(
        self,
        configs: Mapping[str, TopicConfig],
        unreadable: Mapping[str, MetamqError],
        kept: Mapping[str, MetamqError] = NOTHING_KEPT,
    ) -> None:
        """Makes the open logs match the configuration: opens, enlarges, reconfigures; removes, a little later.

        A topic whose configuration is `unreadable` stays unchanged, on the disk too. The topics to keep, which
        ZooKeeper has forgotten, are closed: no replica serves them, whether it has restarted or not. A damaged log
        stops only its own partition, and is logged. A configuration that is unusable, or needs more space than the disk
        has, affects only its own topic. Raises StorageError if the disk fails.
        """
        async with self._changing:
            before = self._unreadable
            self._unreadable = {**before, **kept}  # from here on is_gone() must not take a closed topic for deleted
            for topic in kept.keys() & self._configs.keys():
                del self._configs[topic]
                for index in sorted(self.open[topic], reverse=True)[:-1]:
                    self._close(topic, index)
                    await asyncio.sleep(0)  # each close waits for the disk
                self._close(topic)
            await self._apply(configs, {**unreadable, **kept})
            for topic, problem in self._unreadable.items():
                if str(before.get(topic)) != str(problem):
                    state = "is not served, and keeps its folder" if topic in kept else "stays unchanged"
                    log.error("topic %s %s: %s", topic, state, problem, extra={"topic": topic})

    async def _apply(self, configs: Mapping[str, TopicConfig], unreadable: dict[str, MetamqError]) -> None:
        for topic, old in list(self._configs.items()):
            if topic not in unreadable and (topic not in configs or configs[topic].id != old.id):
                self._remove(topic)
        for topic, config in configs.items():
            if self._configs.get(topic) != config:
                try:
                    await self._apply_one(topic, config)
                except (ConfigError, DiskFull) as error:  # the retention of other topics may free space
                    unreadable[topic] = error
        self._unreadable = unreadable
        wanted = {(config.topic, config.id) for config in self._configs.values()}
        for folder in self._folder.topics():
            if (folder.topic, folder.topic_id) not in wanted and folder.topic not in unreadable:
                if folder[:2] not in self._removed:
                    log.warning("ZooKeeper has no topic %s with id %s: %s will be removed", *folder[:3])
                self._removed.add(folder[:2])
                self._doomed.put_nowait(folder)

    async def _apply_one(self, topic: str, config: TopicConfig) -> None:
        indexed = self.open.setdefault(topic, {})
        settings = log_config(config, self._folder.path / "archive")
        for partition in indexed.values():
            flushed_before = partition.flushes_before_ack
            partition.reconfigure(settings)
            if partition.flushes_before_ack != flushed_before:
                self.flush_changed(partition)
        self._hide(config, indexed)
        wanted = config.partitions[self._broker_id]
        missing = [index for index in range(wanted) if index not in indexed and (topic, index) not in self._broken]
        await self._open(topic, config, missing)
        self._configs[topic] = config
        self._close(topic, wanted)

    def _hide(self, config: TopicConfig, indexed: Mapping[int, Partition]) -> None:
        """Hides the messages that were deleted by a trim since the last configuration."""
        former = self._configs.get(config.topic)
        known = former.trims if former is not None else {}
        for name, trim in config.trims.items():
            broker_id, index = parse_partition(name)
            partition = indexed.get(index) if broker_id == self._broker_id else None
            if trim == known.get(name) or partition is None or partition.closed_by is not None:
                continue
            try:
                partition.log.hide_before(*trim)
            except CorruptData as error:
                self.is_damaged(partition, error)
            self.trimmed()

    async def _open(self, topic: str, config: TopicConfig, indexes: list[int], *, makes_missing: bool = False) -> None:
        """Opens logs, and makes those that this folder never had; with `makes_missing`, also those that it lost."""
        indexed, settings = self.open[topic], log_config(config, self._folder.path / "archive")
        missing = await self._made(config, indexes, makes_missing)
        hint = MISSING_HINT + ("" if config.topic.startswith(OWN) else FORGET_HINT) + "."
        for index in indexes:
            name = self._name(topic, index)
            folder = self._folder.partition_folder(topic, config.id, index)
            try:
                if index in missing:
                    raise CorruptData(name, f"{missing[index]}: {folder}", hint=hint)
                opened = await self._open_log(str(folder), name, settings)
                if (trim := config.trims.get(partition_name(self._broker_id, index))) is not None:
                    opened.hide_before(*trim)
                    self.trimmed()
                if self._folder.asks_logs_for_epoch:
                    self._folder.know_epoch(opened.epochs().last)
            except CorruptData as error:
                log.critical("%s is not served: %s", name, error)
                self._broken[topic, index] = error
                continue
            indexed[index] = Partition(topic, config.id, index, opened)
            self.opened(indexed[index])
            await asyncio.sleep(0)  # recovery reads files, and there may be a thousand logs

    async def _made(self, config: TopicConfig, indexes: list[int], makes_missing: bool) -> dict[int, str]:
        log_once = LogOnce()
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._make, config, indexes, makes_missing
                )
            except TooManyOpenFiles as error:
                log_once.failed(f"the logs of topic {config.topic!r} wait", error)
                await asyncio.sleep(RETRY_S)

    async def _open_log(self, folder: str, name: str, settings: LogConfig) -> TrimmedLog:
        log_once = LogOnce()
        on_loss = self._folder.raise_incarnation
        while True:
            try:
                now_us = time.time_ns() // 1000
                return TrimmedLog.open(folder, name, settings, self._files, now_us=now_us, on_loss=on_loss)
            except TooManyOpenFiles as error:
                log_once.failed(f"{name} waits", error)
                await asyncio.sleep(RETRY_S)

    def _name(self, topic: str, index: int) -> str:
        return f"{topic}/{partition_name(self._broker_id, index)}"

    def _make(self, config: TopicConfig, indexes: list[int], makes_missing: bool) -> dict[int, str]:
        """Makes the missing logs, and stores the topic's settings next to them. Runs in a thread.

        Returns the partitions that existed and are now missing, with a description. Empty with `makes_missing`, which
        makes them again.
        """
        place = config.topic, config.id
        missing = {} if makes_missing else self._folder.missing(*place, indexes)
        if not makes_missing:
            indexes = [index for index in indexes if not self._folder.is_made(*place, index)]
        folders = [self._folder.partition_folder(*place, index) for index in indexes]
        TrimmedLog.make(folders, config.topic, self._files)
        if not config.topic.startswith(OWN):
            folder = self._folder.partition_folder(config.topic, config.id, 0).parent
            topic_settings.save(folder, config, self.listed)
        if indexes:
            self._folder.sync_topic(*place)
            self._folder.were_made(*place, indexes)
        return missing

    async def run_removals(self) -> None:
        """Removes the folders of deleted topics, without end. Raises StorageError."""
        while True:
            folder = await self._doomed.get()
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._folder.remove_topic, folder.topic, folder.topic_id
                )
            except SHORTAGES:  # on a full disk even a rename may need space
                await asyncio.sleep(RETRY_S)
                self._doomed.put_nowait(folder)

    def remove_orphans(self, paths: list[str]) -> None:
        """Removes the files of an emptied log, in a thread."""
        asyncio.get_running_loop().run_in_executor(self._executor, remove_orphans, paths)

    def _remove(self, topic: str) -> None:
        topic_id = self._configs[topic].id
        text = "topic %s (id %s) was deleted: its data will be removed"
        log.info(text, topic, topic_id, extra={"topic": topic})
        self._removed.add((topic, topic_id))
        del self._configs[topic]
        self._close(topic, clean=False)

    def _close(self, topic: str, first: int = 0, *, clean: bool = True) -> None:
        """Closes the partitions of a topic, from the index `first` on. Raises StorageError."""
        self._broken = {place: error for place, error in self._broken.items() if place[0] != topic or place[1] < first}
        indexed = self.open[topic]
        for index in [index for index in indexed if index >= first]:
            partition = indexed.pop(index)
            self.closing(partition)
            error = PartitionNotFound(topic, partition_name(self._broker_id, index)) if first else TopicNotFound(topic)
            self._is_clean &= self._close_log(partition, error, clean) or not clean
        if not first:
            del self.open[topic]

    def close(self, error: MetamqError, *, clean: bool = True) -> bool:
        """Closes every log and waits for a running removal. After a clean close the next start scans nothing.

        Many logs wait for the disk together, at the end. Returns True if all logs were closed cleanly, and none was
        closed earlier because of damage. Raises StorageError.
        """
        all_clean, partitions = clean and self._is_clean, list(self.partitions())
        self.cold_reads.close()
        together = clean and self._files.sync_disk is not None and len(partitions) >= TOGETHER
        for partition in partitions:
            all_clean &= self._close_log(partition, error, clean, synced_later=together)
        if together:
            self._folder.sync_disk(self._files)
        self._executor.shutdown(wait=True)
        return all_clean

    @staticmethod
    def _close_log(partition: Partition, error: MetamqError, clean: bool, *, synced_later: bool = False) -> bool:
        """Closes a partition; returns False if damage has closed it before, or if its next open must recover it."""
        if partition.closed_by is not None:
            return False
        try:
            partition.close(error, clean=clean, synced_later=synced_later)
        except SHORTAGES as failure:
            log.warning("%s was not closed cleanly: %s", partition.name, failure)
            return False
        return clean
