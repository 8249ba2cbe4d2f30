"""What a broker's topics do by themselves: look-ups that miss, and configurations that cannot be used."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.data.data_folder import DataFolder
from metamq.broker.data.made_partitions import MadePartitions
from metamq.broker.data.topics import Topics
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.fresh import TOGETHER, set_aside
from metamq.errors import ClosedError, ConfigError, CorruptData, DiskFull, PartitionNotFound, TopicNotFound
from metamq.wire.batch import read_header
from metamq.wire.columns import encode
from metamq.zk.cluster.topics import TopicConfig


class NoNames(TopicConfig):
    """Thousands of partitions, whose names nobody may ask for."""

    @property
    def partition_names(self) -> list[str]:
        raise AssertionError("names were built for somebody who asked for a partition that is not there")


def test_a_partition_that_is_not_there_costs_no_list_of_those_that_are(tmp_path: Path) -> None:
    async def run() -> None:
        topics = Topics(0, DataFolder.open(tmp_path, 0), FileCache())
        config = NoNames("t", {0: 1, 1: 9_999})
        await topics.apply({"t": config}, {})
        with pytest.raises(PartitionNotFound) as caught:
            topics.find("t", config.id, 1)
        assert str(caught.value).endswith("It has 1 partition at broker 0.")
        topics.close(ClosedError("broker"))

    asyncio.run(run())


def test_a_topic_that_cannot_be_a_folder_is_refused_and_named_and_the_others_are_served(tmp_path: Path) -> None:
    async def run() -> None:
        topics = Topics(0, DataFolder.open(tmp_path, 0), FileCache())
        hidden, seen = TopicConfig(".hidden", {0: 1}), TopicConfig("seen", {0: 1})
        await topics.apply({".hidden": hidden, "seen": seen}, {})
        assert ["'.hidden'" in str(error) for error in topics.broken()] == [True]
        assert topics.counts() == {"seen": 1}
        assert topics.find("seen", seen.id, 0).index == 0
        await topics.apply({"seen": seen}, {})
        assert topics.broken() == []
        topics.close(ClosedError("broker"))

    asyncio.run(run())


def test_a_damaged_log_is_moved_away_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    movers: list[threading.Thread] = []

    def seen(*args: Any, **settings: Any) -> str:
        movers.append(threading.current_thread())
        return set_aside(*args, **settings)

    async def run() -> None:
        topics = Topics(0, DataFolder.open(tmp_path, 0), FileCache())
        config = TopicConfig("t", {0: 2})
        await topics.apply({"t": config}, {})
        damaged = topics.find("t", config.id, 1)
        topics.is_damaged(damaged, CorruptData("t/0-1", "a checksum"))
        await topics.set_damaged_aside()
        assert topics.damage() == {}
        assert topics.find("t", config.id, 1) is not damaged
        topics.close(ClosedError("broker"))

    monkeypatch.setattr("metamq.broker.data.topics.set_aside", seen)
    asyncio.run(run())
    assert len(movers) == 1
    assert movers[0] is not threading.main_thread()
    assert len(list((tmp_path / "topics").glob("*/1.damaged-*"))) == 1


@pytest.mark.parametrize(
    ("lacks_room_at", "restarts"),
    [("making the log", False), ("making the log", True), ("noting that it is made", False)],
)
def test_a_damaged_log_is_moved_away_once_however_often_the_new_one_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks_room_at: str, restarts: bool
) -> None:
    """It would be moved away at each attempt, and leave a folder with nothing in it."""

    def lack(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def opened(folder: DataFolder, files: FileCache, config: TopicConfig) -> Topics:
        topics = Topics(0, folder, files)
        await topics.apply({"t": config}, {})
        return topics

    async def run() -> None:
        folder, files, config = DataFolder.open(tmp_path, 0), FileCache(), TopicConfig("t", {0: 2})
        topics = await opened(folder, files, config)
        topics.is_damaged(topics.find("t", config.id, 1), CorruptData("t/0-1", "a checksum"))
        for _ in range(3):
            with monkeypatch.context() as patch:
                if lacks_room_at == "making the log":
                    patch.setattr(files, "sync", lack)
                else:
                    patch.setattr(MadePartitions, "add", lack)
                with pytest.raises(DiskFull):
                    await topics.set_damaged_aside()
            if restarts:
                topics.close(ClosedError("broker"))
                folder.close(clean=True)
                folder, files = DataFolder.open(tmp_path, 0), FileCache()
                topics = await opened(folder, files, config)
        await topics.set_damaged_aside()
        assert topics.damage() == {}
        assert topics.find("t", config.id, 1).log.end_offset == 0
        topics.close(ClosedError("broker"))

    asyncio.run(run())
    assert len(list((tmp_path / "topics").glob("*/1.damaged-*"))) == 1


def test_what_zookeeper_has_forgotten_is_closed_kept_and_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes it for deleted meanwhile, also while other topics are made."""
    reason = ConfigError("ZooKeeper does not list topic 't'")
    config, other = TopicConfig("t", {0: 2}), TopicConfig("other", {0: 1})

    async def run() -> None:
        topics = Topics(0, DataFolder.open(tmp_path, 0), FileCache())
        await topics.apply({"t": config}, {})
        former = topics.find("t", config.id, 1)
        gone: list[bool] = []
        closing: list[tuple[int, bool]] = []
        made = topics._made
        topics.closing = lambda partition: closing.append((partition.index, topics.is_gone("t", config.id)))

        async def seen(*arguments: Any) -> Any:
            gone.append(topics.is_gone("t", config.id))
            return await made(*arguments)

        monkeypatch.setattr(topics, "_made", seen)
        await topics.apply({"other": other}, {}, {"t": reason})
        assert closing == [(1, False), (0, False)]
        assert gone == [False]
        assert isinstance(former.closed_by, PartitionNotFound)
        with pytest.raises(TopicNotFound, match=r"does not exist\. This broker may have it: ZooKeeper does not list"):
            topics.find("t", config.id, 0)
        await topics.apply({"t": config, "other": other}, {})
        assert topics.find("t", config.id, 1) is not former
        assert topics.close(ClosedError("broker"))

    asyncio.run(run())


def test_partitions_that_are_not_listed_any_more_are_closed_and_come_back(tmp_path: Path) -> None:
    two = TopicConfig("t", {0: 2})

    async def run() -> None:
        topics = Topics(0, DataFolder.open(tmp_path, 0), FileCache())
        await topics.apply({"t": two}, {})
        await topics.apply({"t": replace(two, partitions={0: 1})}, {})
        with pytest.raises(PartitionNotFound):
            topics.find("t", two.id, 1)
        assert [partition.index for partition in topics.partitions()] == [0]
        await topics.apply({"t": two}, {})
        assert topics.find("t", two.id, 1).closed_by is None
        topics.close(ClosedError("broker"))

    asyncio.run(run())


def test_many_logs_wait_for_the_disk_together_when_they_close(tmp_path: Path) -> None:
    """Each one is flushed first; then one sync makes all their marks durable, and the next start scans nothing."""
    config, order = TopicConfig("t", {0: TOGETHER}), list[str]()

    async def run() -> None:
        files = FileCache(sync=lambda fd: order.append("one"), sync_disk=lambda fd: order.append("disk"))
        topics = Topics(0, DataFolder.open(tmp_path, 0), files)
        await topics.apply({"t": config}, {})
        for partition in topics.partitions():
            batch = encode([b"value"], base_timestamp_us=0)
            partition.log.append(memoryview(batch), [read_header(batch)], epoch=1, batch_id=1, now_us=1)
        order.clear()
        assert topics.close(ClosedError("broker"))
        assert order.index("disk") == len(order) - 1
        assert order.count("one") >= TOGETHER, "their bytes"
        again = Topics(0, topics._folder, FileCache())
        await again.apply({"t": config}, {})
        assert all(one.log.recovery.clean and one.log.end_offset == 1 for one in again.partitions())
        again.close(ClosedError("broker"))

    asyncio.run(run())
