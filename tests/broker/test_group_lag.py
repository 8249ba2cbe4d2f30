"""The lags of groups in /metrics: messages and age by group and topic, at the master, and nothing guessed."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import metamq
from metamq import DatabaseOffsets, TopicPartition
from metamq.broker.process import group_lag
from metamq.testing import BrokerProcess, Cluster
from tests.one_zookeeper import cluster, new_chroot
from tests.parts import SLOW_S, LocalBroker, http_get

Samples = dict[tuple[str, str, str], float]


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(group_lag_s=0.05) as one:
        yield one


def lags(broker: BrokerProcess) -> Samples:
    """The value of each metric of groups, by metric, group and topic."""
    status, text = http_get(broker.http_port, "/metrics")
    assert status == 200
    return {
        (sample.name, sample.labels.get("group", ""), sample.labels.get("topic", "")): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith("metamq_group_lag")
        for sample in family.samples
    }


def until(broker: BrokerProcess, condition: Callable[[Samples], bool]) -> Samples:
    deadline = time.monotonic() + SLOW_S
    while not condition(found := lags(broker)):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_the_lag_of_a_group_falls_with_its_commits(running: Cluster) -> None:
    running.create_topic("orders", partitions=2)
    messages = ("metamq_group_lag_messages", "billing", "orders")
    seconds = ("metamq_group_lag_seconds", "billing", "orders")
    with running.producer() as producer, running.consumer(topics="orders", group="billing", auto_commit=False) as one:
        for number in range(5):
            producer.send("orders", b"%d" % number, partition="0-0").result(60)
        producer.send("orders", b"x", partition="0-1").result(60)
        found = until(running.broker, lambda found: found.get(messages) == 6)  # claimed, and nothing is committed
        assert 0 < found[seconds] < SLOW_S
        one.commit({TopicPartition("orders", "0-0"): 4, TopicPartition("orders", "0-1"): 1})
        until(running.broker, lambda found: found[messages] == 1 and found[seconds] > 0)
        one.commit({TopicPartition("orders", "0-0"): 5})
        found = until(running.broker, lambda found: found[messages] == 0)
        assert found[seconds] == 0
    assert found["metamq_group_lag_left_out_partitions", "", ""] == 0
    assert found["metamq_group_lag_age_seconds", "", ""] < SLOW_S


def test_offsets_in_a_database_are_unknown(running: Cluster, tmp_path: Path) -> None:
    running.create_topic("bills", partitions=3)
    with running.producer() as producer:
        producer.send_many("bills", [b"1"] * 10).result(60)
    storage = DatabaseOffsets(lambda: sqlite3.connect(tmp_path / "offsets.db", check_same_thread=False))
    asyncio.run(storage.create_table())
    with running.consumer(topics="bills", group="books", offsets=storage, auto_commit=False):
        unknown = ("metamq_group_lag_unknown_partitions", "books", "bills")
        found = until(running.broker, lambda found: found.get(unknown) == 3)
    assert found["metamq_group_lag_messages", "books", "bills"] == 0


def test_a_slave_shows_no_lags() -> None:
    with cluster(group_lag_s=0.05) as running:
        slave = running.add_slave(group_lag_s=0.05)
        running.create_topic("t", partitions=1)
        with running.consumer(topics="t", group="g"):
            until(running.broker, lambda found: ("metamq_group_lag_messages", "g", "t") in found)
            assert lags(slave) == {}


def test_a_round_reads_only_so_many_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker runs in this process, with a limit of 3 offsets: it says how many it left out."""
    monkeypatch.setattr(group_lag, "READS_MAX", 3)
    with LocalBroker(new_chroot(), tmp_path / "broker", group_lag_s=0.05) as local:
        with metamq.Admin(local.broker._access.zookeeper) as admin:
            admin.create_topic("t", partitions=5)
        with metamq.Consumer(local.broker._access.zookeeper, topics="t", group="g") as consumer:
            reader = local.broker._parts.lags

            def is_read() -> bool:
                return reader.last is not None and reader.last.left_out == 2 and len(consumer.assignment) == 5

            deadline = time.monotonic() + SLOW_S
            while not is_read():
                assert time.monotonic() < deadline, reader.last
                time.sleep(0.02)
            assert reader.last is not None
            assert reader.last.by_group_and_topic["g", "t"].messages == 0
