"""Nodes in ZooKeeper that make no sense: what they are about is passed over or refused, and nothing else breaks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from metamq import Consumer
from metamq.errors import ConfigError, CorruptData
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S

POISON = {
    "deep": b"[" * 100_000,
    "bytes": b"\xff\xfe\x00",
    "types": b'{"format": [], "topics": {"a": 1}, "inputs": 3, "next": "x", "insync": 5, "epoch": {}, "partitions": 1}',
}

# What is poisoned, by its path below the root; the master's own nodes come from sessions that are gone.
KINDS = [
    "config/topics/bad",
    "brokers/ids/0/state",
    "brokers/ids/0/failover",
    "brokers/ids/7/state",
    "brokers/ids/7/master",
    "brokers/ids/0/slave5",
    "brokers/ids/x/master",
    "brokers/topics-pub/good/9-m",
    "brokers/topics-sub/good/0-s9",
    "consumers/g/ids/stranger",
    "consumers/g/plan",
    "consumers/g/owners/bad/0-0",
    "consumers/g/offsets/bad/0-0",
    "consumers/other/plan",
    "consumers/other/offsets/good/0-0",
    "spark/s",
    "spark/s/1",
    "cluster",
]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(folder=tmp_path) as parts:
        yield parts


@contextlib.contextmanager
def kazoo(parts: Cluster) -> Iterator[KazooClient]:
    client = KazooClient(parts.zookeeper)
    client.start(int(SLOW_S))
    try:
        yield client
    finally:
        client.stop()
        client.close()


def run(parts: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "METAMQ_ZOOKEEPER": parts.zookeeper}
    command = [sys.executable, "-m", "metamq.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=4 * SLOW_S, check=False)


def read(consumer: Consumer, values: set[bytes]) -> None:
    for message in consumer:
        if message.topic == "good":
            values.discard(message.value)
        if not values:
            return


def cases() -> list[object]:
    """Each kind with one poison; with the others in the long run."""
    return [
        pytest.param(kind, poison, marks=() if number % len(POISON) == place else pytest.mark.long)
        for number, kind in enumerate(KINDS)
        for place, poison in enumerate(POISON)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "poison"), cases())
def test_the_rest_works(running: Cluster, kind: str, poison: str) -> None:
    path = f"/meta/{kind}"
    with running.admin() as admin, running.producer() as producer, kazoo(running) as zookeeper:
        for topic in ("good", "bad"):
            admin.create_topic(topic, partitions=1)
        producer.send("good", b"before").result(SLOW_S)
        producer.send("bad", b"before").result(SLOW_S)
        with running.consumer(topics=["good", "bad"], group="g", consumer_id="c") as first:
            read(first, {b"before"})
            if zookeeper.exists(path):
                zookeeper.set(path, POISON[poison])
            else:
                zookeeper.create(path, POISON[poison], makepath=True)
            producer.send("good", b"during").result(SLOW_S)
            read(first, {b"during"})
        is_refused = kind == "config/topics/bad"
        if is_refused:
            with pytest.raises((CorruptData, ConfigError), match="the configuration of topic 'bad'"):
                running.consumer(topics=["good", "bad"], group="g", consumer_id="d")
        topics = ["good"] if is_refused else ["good", "bad"]
        with running.consumer(topics=topics, group="g", consumer_id="d") as second:
            producer.send("good", b"after").result(SLOW_S)
            read(second, {b"after"})
        listed = run(running, "topic", "list")
        assert "good" in listed.stdout, listed
        if is_refused:
            assert "bad" in listed.stdout + listed.stderr
        doctor = run(running, "doctor")
        assert "Traceback" not in doctor.stdout + doctor.stderr, doctor
        assert "internal error" not in doctor.stdout + doctor.stderr, doctor
        groups = run(running, "group", "list")
        assert groups.returncode == 0, groups
        assert "g" in groups.stdout
    assert running.broker.running, running.broker.log_path.read_text()[-2000:]
