"""The lags of groups in /metrics: messages and age by group and topic, at the master, and nothing guessed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from kazoo.client import KazooClient
from prometheus_client.parser import text_string_to_metric_families

import metamq
from metamq import TopicPartition
from metamq.broker.process import group_lag
from metamq.testing import BrokerProcess, Cluster
from tests.database_offsets import offsets_in
from tests.one_zookeeper import cluster, new_chroot
from tests.parts import SLOW_S, LocalBroker, http_get, wait_until

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
    found: Samples = {}

    def holds() -> bool:
        found.clear()
        found.update(lags(broker))
        return condition(found)

    wait_until(holds, what="the lag")
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


def test_offsets_in_a_database_are_known_by_the_published_progress(running: Cluster, tmp_path: Path) -> None:
    """The owner publishes its progress every few seconds, and a group whose owner has gone keeps the last one."""
    running.create_topic("bills", partitions=1)
    storage = offsets_in(lambda: sqlite3.connect(tmp_path / "offsets.db", check_same_thread=False))
    messages, seconds = (f"metamq_group_lag_{what}" for what in ("messages", "seconds"))
    with running.producer() as producer:
        producer.send_many("bills", [b"1"] * 10).result(60)
        with running.consumer(topics="bills", group="books", offsets=storage, auto_commit=True) as one:
            for message in one:
                if message.offset == 3:
                    break
        found = until(running.broker, lambda found: found.get((messages, "books", "bills"), 10) < 10)
        assert found[seconds, "books", "bills"] > 0
        assert found["metamq_group_lag_unknown_partitions", "books", "bills"] == 0
        left = found[messages, "books", "bills"]
        producer.send("bills", b"2").result(60)
        until(running.broker, lambda found: found[messages, "books", "bills"] == left + 1)


def test_a_lag_that_is_not_known_has_no_sample(running: Cluster) -> None:
    """An owner that ended before it published its progress leaves its offset node without one."""
    running.create_topic("letters", partitions=3)
    with running.producer() as producer:
        for number in range(3):
            producer.send("letters", b"1", partition=f"0-{number}").result(60)
    documents = {"next": None, "epoch": None, "topic_id": None, "generation": 1, "consumer": "c", "kept_by": "files"}
    zookeeper = KazooClient(running.zookeeper)
    zookeeper.start()
    for number in range(3):
        path = f"/meta/consumers/copies/offsets/letters/0-{number}"
        zookeeper.create(path, json.dumps(documents).encode(), makepath=True)
    zookeeper.stop()
    zookeeper.close()
    unknown = ("metamq_group_lag_unknown_partitions", "copies", "letters")
    found = until(running.broker, lambda found: found.get(unknown) == 3)
    assert not {name for name, group, _topic in found if group == "copies"} - {unknown[0]}


def test_a_slave_shows_no_lags() -> None:
    with cluster(group_lag_s=0.05) as running:
        slave = running.add_slave(group_lag_s=0.05)
        running.create_topic("t", partitions=1)
        with running.consumer(topics="t", group="g"):
            until(running.broker, lambda found: ("metamq_group_lag_messages", "g", "t") in found)
            assert lags(slave) == {}


def test_a_round_reads_only_so_many_offsets_and_the_next_one_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker runs in this process, with a limit of 3 offsets."""
    monkeypatch.setattr(group_lag, "READS_MAX", 3)
    left_out = []
    figures = group_lag.GroupLagReader._figures

    def noted(self: group_lag.GroupLagReader, places: Collection[group_lag.Place]) -> group_lag.GroupLags:
        found = figures(self, places)
        if len(places) == 5:
            left_out.append(found.left_out)
        return found

    monkeypatch.setattr(group_lag.GroupLagReader, "_figures", noted)
    with LocalBroker(new_chroot(), tmp_path / "broker", group_lag_s=0.05) as local:
        zookeeper = local.broker._access.zookeeper
        with metamq.Admin(zookeeper) as admin, metamq.Producer(zookeeper) as producer:
            admin.create_topic("t", partitions=5)
            for number in range(5):
                producer.send("t", b"1", partition=f"0-{number}").result(60)
            with metamq.Consumer(zookeeper, topics="t", group="g", auto_commit=False) as consumer:
                reader = local.broker._parts.lags

                def is_read() -> bool:
                    last = reader.last
                    return last is not None and ("g", "t") in last.by_group_and_topic and last.left_out == 0

                wait_until(lambda: len(consumer.assignment) == 5 and is_read(), what="a reading of all partitions")
                assert reader.last is not None
                assert reader.last.by_group_and_topic["g", "t"].messages == 5
                producer.send("t", b"2", partition="0-4").result(60)
                wait_until(
                    lambda: reader.last is not None and reader.last.by_group_and_topic["g", "t"].messages == 6,
                    what="a later reading of the last partition",
                )
    assert left_out[0] == 2


def test_before_the_first_reading_its_age_grows_and_a_former_master_shows_nothing(tmp_path: Path) -> None:
    with LocalBroker(new_chroot(), tmp_path / "broker", group_lag_s=3600) as local:
        reader = local.broker._parts.lags
        wait_until(lambda: reader.last is not None, what="the first figures")
        assert reader.last is not None
        assert (reader.last.interval_s, reader.last.left_out) == (3600, 0)
        reader._status = SimpleNamespace(role=None)  # type: ignore[assignment]
        assert reader.last is None
