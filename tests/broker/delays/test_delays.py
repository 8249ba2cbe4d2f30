"""Delayed messages: readable when due, once, as if they were sent then."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin, Consumer, Producer, Topic
from metamq.broker.delays.forwarder import DelayForwarder
from metamq.client.delayed import DELAY_MAX_S, delayed_topic
from metamq.client.producer.partitioner import by_key_hash
from metamq.errors import ConfigError, TopicNotFound, WrongType
from metamq.testing import Cluster
from metamq.tx import create_outcome_table, dbtx
from metamq.tx.aio import dbtx as aio_dbtx
from metamq.zk.cluster.delays import read_moved
from metamq.zk.session.session import Session
from tests.broker.delays.delayed_history import check, check_order, delayed, read_all, send_delayed, send_in_order
from tests.one_zookeeper import cluster, new_chroot
from tests.parts import LocalBroker, wait_until


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    """Two brokers: messages are moved between brokers, too."""
    with cluster(brokers=2) as found:
        yield found


@pytest.fixture
def topic(running: Cluster) -> str:
    name = f"t-{uuid.uuid4().hex[:12]}"
    running.create_topic(name, partitions=4)
    return name


@pytest.mark.slow
def test_thousands_of_delays_each_once_and_none_early(running: Cluster, topic: str) -> None:
    sent = send_delayed(running, topic, 5000, 3.0)
    found = read_all(running, topic, len(sent))
    check(sent, found)
    assert len(found) == len(sent)
    names = ["0-0", "0-1", "1-0", "1-1"]
    assert all(one.partition == names[by_key_hash(topic, one.key, 4)] for one in found if one.key)


@pytest.mark.slow
def test_messages_of_a_key_with_the_same_delay_keep_their_order_under_load(running: Cluster, topic: str) -> None:
    send_in_order(running, topic, 20_000, [0.05, 0.21, 0.41, 0.85, 3.3])
    found = read_all(running, topic, 20_000)
    check_order(found)
    assert len(found) == 20_000


def test_a_named_partition_is_kept_and_a_past_time_is_now(running: Cluster, topic: str) -> None:
    due = datetime.now(UTC) + timedelta(seconds=0.7)
    with running.producer() as producer:
        receipt = producer.send(topic, b"named", partition="1-1", deliver_at=due).result()
        assert receipt.topic == delayed_topic(topic)
        producer.send(topic, b"past", deliver_at=due - timedelta(days=1))
        producer.send(topic, b"now", delay_s=0)
    found = read_all(running, topic, 3)
    assert sorted(one.value for one in found) == [b"named", b"now", b"past"]
    (named,) = [one for one in found if one.value == b"named"]
    assert (named.partition, named.headers) == ("1-1", {})
    assert named.timestamp >= due.timestamp() * 1e6


def test_what_waits_can_be_seen() -> None:
    due = datetime.now(UTC) + timedelta(days=30)
    with cluster() as running, running.producer() as producer:
        running.create_topic("orders", partitions=1)
        producer.send("orders", b"month", deliver_at=due)
        producer.send("orders", b"year", delay_s=DELAY_MAX_S - 1)
        producer.flush()
        wait_until(lambda: delayed(running)["waiting"] == 2)
        wait_until(lambda: delayed(running)["next_us"] == round(due.timestamp() * 1e6))


def test_a_transaction_is_delayed_as_a_whole_or_not_at_all(running: Cluster, topic: str) -> None:
    with running.producer() as producer:
        with producer.transaction():
            for number in range(10):
                producer.send(topic, b"%d" % number, delay_s=0.1)
        with contextlib.suppress(ZeroDivisionError), producer.transaction():
            producer.send(topic, b"never", delay_s=0.01)
            raise ZeroDivisionError
    assert sorted(one.value for one in read_all(running, topic, 10)) == [b"%d" % number for number in range(10)]


def test_rows_and_a_delayed_message(running: Cluster, topic: str) -> None:
    connection = sqlite3.connect(":memory:")
    create_outcome_table(connection)
    with running.producer() as producer, dbtx(connection, producer) as tx:
        tx.send(topic, b"row", key=b"k", delay_s=0.1)
    connection.close()
    assert [one.value for one in read_all(running, topic, 1)] == [b"row"]


def test_many_at_once_are_delayed_in_order(running: Cluster, topic: str) -> None:
    due = datetime.now(UTC) + timedelta(seconds=0.7)
    typed, connection = Topic(topic, int), sqlite3.connect(":memory:")
    create_outcome_table(connection)
    keys = [b"a", None, b"b", b"c"] * 25
    with running.producer() as producer:
        for _ in range(2):  # at first the topic's partitions are not known
            stored = producer.send_many(topic, [b"%d" % n for n in range(100)], keys, deliver_at=due).result()
            assert {one.topic for one in stored} == {delayed_topic(topic)}
        producer.send_many(typed, list(range(100, 150)), [b"a"] * 50, delay_s=0.41)
        with dbtx(connection, producer) as tx:
            tx.send_many(typed, list(range(150, 200)), keys=[b"a"] * 50, delay_s=0.5)
        with producer.transaction():
            producer.send_many(topic, [b"%d" % n for n in range(200, 300)], partition="1-1", delay_s=0.1)
    connection.close()
    found = read_all(running, topic, 300)
    values = [int(one.value) for one in found]
    assert sorted(values) == sorted([*range(100), *range(300)])
    assert [n for n in values if 100 <= n < 150] == [*range(100, 150)]
    assert [n for n in values if 150 <= n < 200] == [*range(150, 200)]
    assert [(one.partition, int(one.value)) for one in found if int(one.value) >= 200] == [
        ("1-1", n) for n in range(200, 300)
    ]
    assert all(one.timestamp >= due.timestamp() * 1e6 for one in found if int(one.value) < 100)
    assert not any(one.headers for one in found)
    assert [one.key for one in found if one.value == b"1"] == [None, None]


def test_asyncio(running: Cluster, topic: str) -> None:
    connection = sqlite3.connect(":memory:")
    create_outcome_table(connection)

    async def send() -> None:
        async with running.aio_producer() as producer:
            await producer.send(topic, b"alone", delay_s=0.1)
            async with producer.transaction():
                producer.send(topic, b"together", deliver_at=datetime.now(UTC))
            async with aio_dbtx(connection, producer) as tx:
                await tx.send(topic, b"row", delay_s=0.05)
                await tx.send_many(topic, [b"rows"], delay_s=0.05)
            await producer.send_many(topic, [b"many"], delay_s=0.05)

    asyncio.run(send())
    connection.close()
    found = read_all(running, topic, 5)
    assert sorted(one.value for one in found) == [b"alone", b"many", b"row", b"rows", b"together"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"delay_s": -1}, ConfigError),
        ({"delay_s": "30"}, WrongType),
        ({"delay_s": DELAY_MAX_S + 1}, ConfigError),
        ({"delay_s": 1, "deliver_at": datetime.now(UTC)}, ConfigError),
        ({"deliver_at": datetime(2026, 11, 1)}, ConfigError),
        ({"deliver_at": 7}, WrongType),
        ({"delay_s": 1, "timestamp": datetime.now(UTC)}, ConfigError),
        ({"delay_s": 1, "headers": {"metamq-due": b"7"}}, ConfigError),
        ({"delay_s": 1, "partition": "first"}, ConfigError),
    ],
)
def test_wrong_arguments(running: Cluster, topic: str, arguments: dict[str, Any], error: type[Exception]) -> None:
    with running.producer() as producer, pytest.raises(error):
        producer.send(topic, b"x", **arguments)
    if arguments.keys() <= {"delay_s", "deliver_at", "partition"}:
        with running.producer() as producer, pytest.raises(error):
            producer.send_many(topic, [b"x"], **arguments)


@pytest.mark.parametrize("name", ["orders.delayed", "metamq.delays.0.3"])
def test_topics_of_delayed_messages_have_none_themselves(running: Cluster, name: str) -> None:
    with running.producer() as producer, pytest.raises(ConfigError, match="delayed messages of other topics"):
        producer.send(name, b"x", delay_s=1)


def test_a_topic_that_does_not_exist(running: Cluster) -> None:
    with running.producer() as producer, pytest.raises(TopicNotFound, match="'missing'"):
        producer.send("missing", b"x", delay_s=1).result()


def test_a_deleted_topic_and_a_message_without_a_time_hold_nothing_up(running: Cluster, topic: str) -> None:
    before = delayed(running)
    running.create_topic(f"{topic}-2", partitions=1)
    with running.producer() as producer:
        producer.send(f"{topic}-2", b"lost", delay_s=0.8).result()
        producer.send(topic, b"kept", delay_s=0.9).result()
        producer.send(delayed_topic(topic), b"no time").result()
        producer.send(delayed_topic(topic), b"no number", headers={"metamq-due": b"soon"}).result()
    with running.admin() as admin:
        admin.delete(f"{topic}-2")
    assert [one.value for one in read_all(running, topic, 1)] == [b"kept"]
    assert delayed(running)["refused"] == before["refused"] + 3


def test_a_new_topic_of_the_name_gets_no_messages_of_the_deleted_one(running: Cluster, topic: str) -> None:
    before = delayed(running)["refused"]
    with running.producer() as producer, running.admin() as admin:
        for number in range(4):
            producer.send(topic, b"lost", partition=f"{number % 2}-{number // 2}", delay_s=1.5).result()
        inbox = admin.describe_topic(delayed_topic(topic)).config.id
        wait_until(lambda: moved(running, inbox) == 4, what="the move to the levels")
        admin.delete(topic)
        admin.create_topic(topic, partitions=4)
        producer.send(topic, b"kept", delay_s=1.6).result()
    assert [one.value for one in read_all(running, topic, 1)] == [b"kept"]
    assert delayed(running)["refused"] == before + 4


def moved(running: Cluster, topic_id: str) -> int:
    """The messages that left the topic with this id, at both brokers."""

    async def read() -> int:
        async with await Session.open(running.zookeeper) as session:
            nodes = [await read_moved(session, broker_id) for broker_id in (0, 1)]
        return sum(at for node in nodes for name, (at, _) in node.offsets.items() if name.startswith(f"{topic_id}/"))

    return asyncio.run(read())


def test_a_message_of_a_former_version_has_no_id_and_is_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker runs in this process, and notes no ids, as a former version did."""

    async def no_id(self: DelayForwarder, topic: str) -> str:
        return ""

    monkeypatch.setattr(DelayForwarder, "_topic_id", no_id)
    with LocalBroker(new_chroot(), tmp_path / "broker") as local, Producer(local.broker._access.zookeeper) as producer:
        with Admin(local.broker._access.zookeeper) as admin:
            admin.create_topic("t", partitions=1)
            producer.send("t", b"1", delay_s=0.5).result()
        with Consumer(local.broker._access.zookeeper, topics="t") as consumer:
            assert next(iter(consumer)).value == b"1"


def at_levels(forwarder: DelayForwarder) -> int:
    """The messages that left the topic that takes them."""
    term = forwarder._term
    return 0 if term is None else sum(one.waiting for one in [*term.logs.values()] if one.level is not None)


@pytest.mark.slow
def test_many_messages_of_a_deleted_topic_cost_zookeeper_one_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalBroker(new_chroot(), tmp_path / "broker") as local, Producer(local.broker._access.zookeeper) as producer:
        forwarder, syncs = local.broker._parts.delays, []
        sync = forwarder._session.sync

        async def counted() -> None:
            syncs.append(forwarder.figures.refused)
            await sync()

        with Admin(local.broker._access.zookeeper) as admin:
            admin.create_topic("t", partitions=1)
            producer.send_many("t", [b"%d" % number for number in range(200)], delay_s=4.0).result()
            wait_until(lambda: at_levels(forwarder) == 200)
            monkeypatch.setattr(forwarder._session, "sync", counted)
            admin.delete("t")
            admin.create_topic("t", partitions=1)
        wait_until(lambda: forwarder.figures.refused == 200)
        assert len(syncs) < 100


@pytest.mark.slow
def test_a_topic_that_takes_nothing_holds_up_only_its_own_messages(running: Cluster, topic: str) -> None:
    running.create_topic(f"{topic}-2", partitions=1)
    with running.producer() as producer, running.admin() as admin:
        producer.send(f"{topic}-2", b"late", delay_s=0.5).result()
        admin.alter(f"{topic}-2", min_insync=2)
        producer.send(topic, b"kept", delay_s=0.6).result()
        assert [one.value for one in read_all(running, topic, 1, waiting=lambda: 0)] == [b"kept"]
        admin.alter(f"{topic}-2", min_insync=1)
    assert [one.value for one in read_all(running, f"{topic}-2", 1)] == [b"late"]


def test_compressed_batches_are_not_compressed_where_they_wait(running: Cluster, topic: str) -> None:
    with running.producer(compression="lz4") as producer:
        producer.send(topic, b"x" * 10_000, delay_s=0.1)
        with producer.transaction():
            producer.send(topic, b"y" * 10_000, delay_s=0.1)
    assert {one.value[:1] for one in read_all(running, topic, 2)} == {b"x", b"y"}
