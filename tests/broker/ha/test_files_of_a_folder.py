"""Each file of a data folder is removed, emptied, or replaced by yesterday's, at a master and at a slave.

Nothing that was acknowledged is lost in silence: it is served, or somebody is told, and nothing is acknowledged into
the gap. One topic stands for each thing that happens to the files of a partition, so that one start shows them all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq.broker.data.data_folder import GONE, REPLACED
from metamq.errors import Fenced, MetamqError
from metamq.testing import BrokerProcess
from tests.broker.ha.test_replication import Group, replica_group
from tests.parts import http_get, read_topic, statistics, until_answered, wait_until

KINDS = ["folder", "flushed", "epochs", "*.log", "*.index", "*.producers"]
HAPPENS = ["removed", "emptied", "yesterdays"]
BEFORE, LATER = 4, 3
JOURNAL = "~transactions"
SEGMENT_BYTES = 1024
"""So that a log has sealed segments, and with them an index."""


def removed(path: Path, yesterday: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def emptied(path: Path, yesterday: Path) -> None:
    for file in path.rglob("*") if path.is_dir() else [path]:
        if path.is_dir():
            file.unlink()
        else:
            file.write_bytes(b"")


def yesterdays(path: Path, yesterday: Path) -> None:
    removed(path, yesterday)
    if yesterday.exists():
        shutil.copytree(yesterday, path) if yesterday.is_dir() else shutil.copy(yesterday, path)


DOES: dict[str, Callable[[Path, Path], None]] = {"removed": removed, "emptied": emptied, "yesterdays": yesterdays}
CASES = {f"{happens}-{number}": (kind, happens) for happens in HAPPENS for number, kind in enumerate(KINDS)}
"""By topic."""


class Scene:
    """A broker id, and what was acknowledged at it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.acknowledged: dict[str, list[bytes]] = {}

    def send(self, topics: list[str], count: int, what: str) -> None:
        with self.group.cluster.producer(linger_ms=0, delivery_timeout_s=60) as producer:
            for number in range(count):
                sent = {topic: f"{what}-{number}-{'x' * 400}".encode() for topic in topics}
                futures = {topic: producer.send(topic, value) for topic, value in sent.items()}
                for topic, future in futures.items():
                    future.result(60)
                    self.acknowledged.setdefault(topic, []).append(sent[topic])

    def try_to_send(self, topics: list[str], what: str) -> None:
        """Keeps what is acknowledged, if anything is."""
        with self.group.cluster.producer(linger_ms=0, delivery_timeout_s=3) as producer:
            futures = {topic: producer.send(topic, what.encode()) for topic in topics}
            for topic, future in futures.items():
                if future.exception(60) is None:
                    self.acknowledged.setdefault(topic, []).append(what.encode())

    def stored(self, number: int, topic: str) -> list[bytes]:
        with self.group.cluster.admin() as admin:
            identity = admin.describe_topic(topic).config.id
        (found,) = read_topic(self.group.replicas[number], topic, identity).values()
        return [message.value for message in found]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with replica_group(retention_check_s=3600) as group:
        yield Scene(group)


def make_history(scene: Scene, replica: BrokerProcess, topics: list[str], yesterday: Path) -> None:
    """Messages of before and after a copy of the folder that was made after a clean stop."""
    with scene.group.cluster.admin() as admin:
        for topic in topics:
            admin.create_topic(topic, partitions=1, replication="sync", flush="ack", segment_bytes=SEGMENT_BYTES)
    scene.send(topics, BEFORE, "before")
    is_master = replica is scene.group.replicas[0]
    replica.stop()
    shutil.copytree(replica.data, yesterday)
    replica.start()
    if len(scene.group.replicas) > 1:
        scene.group.wait_insync(0, 1)
    assert is_master or scene.group.replication(0)["role"] == "master"
    scene.send(topics, LATER, "later")


def spoil(replica: BrokerProcess, yesterday: Path) -> set[str]:
    """Does all of CASES; returns the topics to which something happened."""
    done = set()
    for topic, (kind, happens) in CASES.items():
        (folder,) = (replica.data / "topics").glob(f"{topic}@*/0")
        for path in [folder] if kind == "folder" else sorted(folder.glob(kind)):
            DOES[happens](path, yesterday / path.relative_to(replica.data))
            done.add(topic)
    return done


def told(replica: BrokerProcess) -> str:
    return http_get(replica.http_port, "/readyz")[1] + replica.log_path.read_text()


@pytest.mark.slow
def test_at_a_master_whose_slave_is_in_sync(scene: Scene, tmp_path: Path) -> None:
    group, topics = scene.group, list(CASES)
    group.add_slave()
    group.wait_insync(0, 1)
    master = group.replicas[0]
    make_history(scene, master, topics, tmp_path / "yesterday")
    group.wait_equal(0, 1)
    group.lose_master(master.kill, 1)
    assert len(spoil(master, tmp_path / "yesterday")) > len(CASES) - len(HAPPENS)
    master.start()
    wait_until(lambda: group.replication(0)["role"] == "master", what="a master again")
    wait_until(lambda: group.replication(0)["slaves"], what="the link")
    scene.try_to_send(topics, "into the gap?")
    group.wait_insync(0, 1)
    group.promote(1)
    group.wait_insync(0, 1, master=1)
    for topic in topics:
        assert scene.stored(1, topic) == scene.acknowledged[topic], CASES[topic]
    group.wait_equal(0, 1)


@pytest.mark.slow
def test_at_a_slave(scene: Scene, tmp_path: Path) -> None:
    group, topics = scene.group, list(CASES)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    make_history(scene, slave, topics, tmp_path / "yesterday")
    group.wait_equal(0, 1)
    slave.kill()
    spoil(slave, tmp_path / "yesterday")
    slave.start()
    group.wait_insync(0, 1)
    scene.send(topics, 1, "after")
    group.wait_equal(0, 1)
    group.promote(1)
    for topic in topics:
        assert scene.stored(1, topic) == scene.acknowledged[topic], CASES[topic]


@pytest.mark.slow
def test_at_a_broker_without_slaves(scene: Scene, tmp_path: Path) -> None:
    """What is whole is served, and what is not is told, and takes nothing more."""
    topics = list(CASES)
    broker = scene.group.replicas[0]
    make_history(scene, broker, topics, tmp_path / "yesterday")
    broker.kill()
    spoil(broker, tmp_path / "yesterday")
    broker.start()
    before = {topic: list(values) for topic, values in scene.acknowledged.items()}
    scene.try_to_send(topics, "into the gap?")
    served = {entry["topic"] for entry in statistics(broker)["partitions"]}
    damage = http_get(broker.http_port, "/readyz")[1]
    for topic in topics:
        is_told = f"{topic}/0-0 is damaged" in damage or f"{topic}/0-0: " in damage
        if is_told:
            assert scene.acknowledged[topic] == before[topic], f"nothing is acknowledged into the gap of {CASES[topic]}"
        else:
            assert topic in served
            assert scene.stored(0, topic) == scene.acknowledged[topic], CASES[topic]
    (gone,) = [topic for topic, case in CASES.items() if case == ("folder", "removed")]
    assert f"{gone}/0-0 is damaged: {GONE}" in damage
    for file in ("folder", "flushed"):
        (older,) = [topic for topic, case in CASES.items() if case == (file, "yesterdays")]
        assert f"{older}/0-0 is damaged: {REPLACED}" in damage


FILES = ["meta.json", "partitions", "lock", "topics", f"topics/{JOURNAL}@*", "topics/t@*", "topics/t@*/settings.json"]


def spoil_one(broker: BrokerProcess, file: str, happens: str, yesterday: Path) -> None:
    (path,) = broker.data.glob(file)
    if path.is_dir() and happens == "emptied":
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    else:
        DOES[happens](path, yesterday / path.relative_to(broker.data))


def start_or_end(broker: BrokerProcess) -> None:
    """It serves, or says why it does not and ends."""
    with contextlib.suppress(MetamqError, AssertionError, TimeoutError):
        broker.start()


@pytest.mark.slow
@pytest.mark.parametrize("happens", HAPPENS)
@pytest.mark.parametrize("file", FILES)
def test_the_files_that_are_not_a_partitions(scene: Scene, tmp_path: Path, file: str, happens: str) -> None:
    """At a broker alone: it is served, or the broker refuses to start, or waits, or does not serve the partition."""
    broker = scene.group.replicas[0]
    make_history(scene, broker, ["t"], tmp_path / "yesterday")
    broker.kill()
    spoil_one(broker, file, happens, tmp_path / "yesterday")
    start_or_end(broker)
    before = list(scene.acknowledged["t"])
    if not broker.running:
        assert "meta.json" in broker.log_path.read_text()
        return
    scene.try_to_send(["t"], "into the gap?")
    status, text = http_get(broker.http_port, "/readyz")
    if status == 200:
        assert scene.stored(0, "t") == scene.acknowledged["t"]
        return
    assert scene.acknowledged["t"] == before or f"{JOURNAL}" in text
    assert os.path.exists(broker.data)


def of_replicas() -> list[object]:
    """Each file with one thing that happens to it; with the others in the long run."""
    return [
        pytest.param(file, happens, marks=pytest.mark.slow if number % len(HAPPENS) == place else pytest.mark.long)
        for number, file in enumerate(FILES)
        for place, happens in enumerate(HAPPENS)
    ]


@pytest.mark.parametrize(("file", "happens"), of_replicas())
def test_the_files_that_are_not_a_partitions_at_a_slave(scene: Scene, tmp_path: Path, file: str, happens: str) -> None:
    """It is promoted, with all that was acknowledged, or refused; then it copies from its master what it lacks."""
    group = scene.group
    slave = group.add_slave()
    group.wait_insync(0, 1)
    make_history(scene, slave, ["t"], tmp_path / "yesterday")
    group.wait_equal(0, 1)
    master = group.replicas[0]
    group.lose_master(master.kill, 1)
    slave.kill()
    spoil_one(slave, file, happens, tmp_path / "yesterday")
    start_or_end(slave)
    if not slave.running:
        assert "meta.json" in slave.log_path.read_text()
        master.start()
        # Its last messages are shown once the slave has left the in-sync set.
        wait_until(lambda: scene.stored(0, "t") == scene.acknowledged["t"], what="all that was acknowledged")
        return
    try:
        until_answered(lambda: group.promote_once(1))
    except Fenced:
        master.start()
        group.wait_insync(0, 1)
        group.promote(1)
    else:
        if "t/0-0" not in http_get(slave.http_port, "/readyz")[1]:
            assert scene.stored(1, "t") == scene.acknowledged["t"]
        master.start()
    group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    assert scene.stored(1, "t") == scene.acknowledged["t"]


@pytest.mark.parametrize(("file", "happens"), of_replicas())
def test_the_files_that_are_not_a_partitions_at_a_master_whose_slave_is_in_sync(
    scene: Scene, tmp_path: Path, file: str, happens: str
) -> None:
    group = scene.group
    group.add_slave()
    group.wait_insync(0, 1)
    master = group.replicas[0]
    make_history(scene, master, ["t"], tmp_path / "yesterday")
    group.wait_equal(0, 1)
    group.lose_master(master.kill, 1)
    spoil_one(master, file, happens, tmp_path / "yesterday")
    start_or_end(master)
    scene.try_to_send(["t"], "into the gap?")
    group.promote(1)
    if master.running:
        group.wait_insync(0, 1, master=1)
        group.wait_equal(0, 1)
    else:
        assert "meta.json" in master.log_path.read_text()
    assert scene.stored(1, "t") == scene.acknowledged["t"]
