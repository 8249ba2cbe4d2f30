"""Retention, archive and checkpoints on a disk that takes its time: everybody is served meanwhile."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin
from metamq.errors import DiskFull
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker, wait_until


class SlowDisk:
    """fsync that waits on the files that a test holds."""

    def __init__(self) -> None:
        self._held: Callable[[str], bool] = lambda path: False
        self._free = threading.Event()
        self.waiting: set[str] = set()

    def sync(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if self._held(path):
            self.waiting.add(path)
            assert self._free.wait(110)
        os.fsync(fd)

    def hold(self, held: Callable[[str], bool]) -> None:
        """From now on an fsync of such a file does not return."""
        self.waiting.clear()
        self._free.clear()
        self._held = held

    def release(self) -> None:
        """They return."""
        self._held = lambda path: False
        self._free.set()


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names descriptors by /proc")


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[Cluster]:
    with cluster(brokers=0) as parts:
        yield parts


class Parts:
    """A broker on a slow disk, one topic to look after, and others beside it."""

    def __init__(self, zookeeper: Cluster, local: LocalBroker, broker_id: int) -> None:
        self.zookeeper = zookeeper
        self.broker_id = broker_id
        self.broker = local.broker
        self.disk = SlowDisk()
        self.broker._files.sync = self.disk.sync
        self.name, self.acked = f"old-{broker_id}", f"acked-{broker_id}"

    def create(self, admin: Admin, **settings: Any) -> str:
        if self.acked not in admin.topics():
            admin.create_topic(self.acked, partitions=1, brokers=[self.broker_id], flush="ack")
        topic = admin.create_topic(self.name, partitions=1, brokers=[self.broker_id], segment_bytes=2000, **settings)
        with self.zookeeper.producer() as producer:
            for _ in range(20):
                producer.send(self.name, b"x" * 400).result(60)
        return topic.id

    def begin(self, admin: Admin, held: str) -> None:
        """Lets retention go on until it waits for what is held."""
        partition = f"/{self.name}@"
        self.disk.hold(lambda path: HELD[held](path) and (partition in path or held == "archive"))
        with self.zookeeper.producer() as producer:
            producer.send(self.name, b"so that a checkpoint is due").result(60)
        admin.alter(self.name, retention_bytes=4000)
        wait_until(lambda: self.disk.waiting, what=f"an fsync of the {held}")

    def serves(self, admin: Admin) -> None:
        """Everything that does not wait for the held file is answered."""
        name = self.name
        with self.zookeeper.producer(delivery_timeout_s=60) as producer:
            for number in range(8):  # more than a segment
                producer.send(name, b"meanwhile-%d" % number + bytes(400)).result(60)
            producer.send(self.acked, b"x").result(60)
        with self.zookeeper.consumer(topics=[name], group=name, start="earliest", auto_commit=False) as consumer:
            values = [message.value for _, message in zip(range(8), consumer, strict=False)]
        assert len(values) == 8
        assert admin.statistics(self.broker_id).partitions


BROKER_IDS = count()


@pytest.fixture
def parts(zookeeper: Cluster, tmp_path: Path) -> Iterator[Parts]:
    broker_id = next(BROKER_IDS)
    with LocalBroker(zookeeper.zookeeper, tmp_path / "broker", id=broker_id, retention_check_s=0.1) as local:
        made = Parts(zookeeper, local, broker_id)
        try:
            yield made
        finally:
            made.disk.release()


HELD: dict[str, Callable[[str], bool]] = {
    "archive": lambda path: "/archive" in path,
    "checkpoint": lambda path: path.endswith(".producers"),
    "retention": lambda path: path.endswith("/flushed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD)
def test_requests_are_answered_while_the_disk_is_slow(parts: Parts, held: str) -> None:
    disk = parts.disk
    with parts.zookeeper.admin() as admin:
        topic_id = parts.create(admin, cleanup="archive" if held == "archive" else "delete")
        parts.begin(admin, held)
        before = admin.statistics(parts.broker_id)
        parts.serves(admin)
        found = parts.broker._topics.find(parts.name, topic_id, 0)
        assert Path(found.log.segments()[0].path).exists()
        disk.release()
        wait_until(lambda: found.log.size_bytes <= 6000, what="the end of retention")
        after = admin.statistics(parts.broker_id)
    assert _of(after, parts.name).start_offset > _of(before, parts.name).start_offset
    assert _of(after, parts.name).end_offset == 29
    wanted = range(found.log.start_offset, 29)
    with parts.zookeeper.consumer(topics=[parts.name], group="end", start="earliest") as consumer:
        first = next(iter(consumer)).offset  # more may have gone by now
        assert first in wanted
        assert [message.offset for _, message in zip(range(first + 1, 29), consumer, strict=False)] == list(
            range(first + 1, 29)
        )


@pytest.mark.parametrize("held", ["archive"])
def test_a_disk_that_fills_up_meanwhile_is_noticed(parts: Parts, held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    status = parts.broker._parts.status
    with parts.zookeeper.admin() as admin:
        parts.create(admin, cleanup="archive")
        parts.begin(admin, held)
        monkeypatch.setattr(parts.broker._folder, "free_bytes", lambda: 0)
        wait_until(lambda: isinstance(status.writes_refused, DiskFull))
        monkeypatch.undo()
        wait_until(lambda: status.writes_refused is None)


@pytest.mark.parametrize("held", HELD)
def test_a_topic_that_is_deleted_meanwhile_is_let_go(parts: Parts, held: str) -> None:
    disk = parts.disk
    with parts.zookeeper.admin() as admin:
        topic_id = parts.create(admin, cleanup="archive" if held == "archive" else "delete")
        parts.begin(admin, held)
        folder = parts.broker._folder.path / "topics" / f"{parts.name}@{topic_id}"
        assert folder.exists()
        admin.delete(parts.name)
        wait_until(lambda: not folder.exists(), what="the removal of the topic")
        disk.release()
        parts.create(admin, retention_bytes=4000)
        wait_until(lambda: _of(admin.statistics(parts.broker_id), parts.name).start_offset > 0)
    assert parts.broker.failure is None


def in_thread(work: Callable[..., object], *arguments: object, **settings: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, kwargs=settings)
    thread.start()
    return thread


@pytest.mark.slow
def test_requests_are_answered_while_a_topic_is_made(parts: Parts) -> None:
    disk = parts.disk
    with parts.zookeeper.admin() as admin:
        parts.create(admin)
        disk.hold(lambda path: f"/new-{parts.broker_id}@" in path)
        made = in_thread(
            admin.create_topic, f"new-{parts.broker_id}", partitions=3, brokers=[parts.broker_id], timeout_s=110
        )
        wait_until(lambda: disk.waiting, what="an fsync of the new topic")
        parts.serves(admin)
        assert made.is_alive()
        disk.release()
        made.join(60)
        with parts.zookeeper.producer() as producer:
            producer.send(f"new-{parts.broker_id}", b"x").result(60)


@pytest.mark.slow
def test_requests_are_answered_while_a_topic_is_removed(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many gigabytes take their time."""
    removing, free = threading.Event(), threading.Event()
    rmtree = shutil.rmtree

    def slow(path: Any) -> None:
        removing.set()
        assert free.wait(110)
        rmtree(path)

    monkeypatch.setattr("metamq.broker.data.data_folder.shutil.rmtree", slow)
    name = f"gone-{parts.broker_id}"
    with parts.zookeeper.admin() as admin:
        parts.create(admin)
        admin.create_topic(name, partitions=1, brokers=[parts.broker_id])
        admin.delete(name)
        assert removing.wait(60)
        try:
            parts.serves(admin)
        finally:
            free.set()
        admin.create_topic(name, partitions=1, brokers=[parts.broker_id])
    folders = [folder.topic for folder in parts.broker._folder.topics()]
    assert folders.count(name) == 1


def _of(statistics: Any, topic: str) -> Any:
    return next(one for one in statistics.partitions if one.topic == topic)
