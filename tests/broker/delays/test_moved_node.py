"""The node of delayed messages: what it forgets, and which transactions are rolled back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.delays import moved_node
from metamq.broker.delays.moved_node import MovedNode, gtrid_prefix
from metamq.broker.log_once import LogOnce
from metamq.broker.process.server import Broker
from metamq.client.net.branches import Branch, TxClient
from metamq.client.net.cluster import ClusterClient
from metamq.client.producer.outgoing import CheckedMessage
from metamq.client.producer.partitioner import by_key_hash
from metamq.errors import ConnectError
from metamq.testing import Cluster
from metamq.tx.app.staging import Routes, Staging
from metamq.tx.app.work import GlobalTransaction
from metamq.wire.compression import Codec
from metamq.wire.limits import BATCH_TARGET_BYTES, MESSAGE_BYTES_MAX
from metamq.wire.xa import Xid
from metamq.zk.cluster.delays import read_moved, write_moved
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.session.session import Session
from tests.broker.delays.delayed_history import read_all
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, LocalBroker, read_to_end, until_answered, wait_until

_ids = itertools.count(1)


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(brokers=1) as found:
        yield found


@contextlib.asynccontextmanager
async def client_of(running: Cluster) -> AsyncIterator[ClusterClient]:
    async with await Session.open(running.zookeeper) as session:
        client = ClusterClient(session)
        try:
            yield client
        finally:
            await client.close()


def made(running: Cluster, broker_id: int) -> tuple[str, str]:
    """Makes a topic that takes its delayed messages at one broker; returns it, and the id of `<topic>.delayed`."""
    topic = f"t-{broker_id}-{next(_ids)}"
    with running.admin() as admin:
        inbox = admin.create_topic(f"{topic}.delayed", partitions=1, brokers=[broker_id])
        admin.create_topic(topic, partitions=1, brokers=[0])
    return topic, inbox.id


def deliver(running: Cluster, local: LocalBroker, topic: str, value: bytes) -> None:
    with running.producer() as producer:
        producer.send(topic, value, delay_s=0.01)
    read_all(running, topic, 1, lambda: local.broker._parts.delays.figures.waiting)


def noted(running: Cluster, broker_id: int) -> set[str]:
    """The ids of topics in the node."""

    async def read() -> set[str]:
        async with await Session.open(running.zookeeper) as session:
            return {name.partition("/")[0] for name in (await read_moved(session, broker_id)).offsets}

    return asyncio.run(read())


@pytest.mark.slow
def test_deleted_topics_are_forgotten_and_one_that_cannot_be_opened_is_not(
    running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_node, "FORGET_S", 0.05)
    number = next(_ids)
    with LocalBroker(running.zookeeper, tmp_path, id=number) as local:
        (broken, broken_id), (gone, gone_id), (kept, kept_id) = (made(running, number) for _ in range(3))
        for topic in (broken, gone, kept):
            deliver(running, local, topic, b"x")
        assert {broken_id, gone_id, kept_id} <= noted(running, number)
    (log,) = (tmp_path / "topics").glob(f"{broken}.delayed@*/0")
    shutil.rmtree(log)
    with LocalBroker(running.zookeeper, tmp_path, id=number) as local:
        deliver(running, local, kept, b"y")
        assert f"{broken}.delayed" not in {one.topic for one in local.broker._topics.partitions()}
        with running.admin() as admin:
            admin.delete(f"{gone}.delayed")
        wait_until(lambda: gone_id not in noted(running, number))
        assert {broken_id, kept_id} <= noted(running, number)


def test_a_topic_that_was_deleted_and_forgotten_but_is_still_open_is_not_read_again(
    running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier process of this broker has forgotten it; this one still opens it, by an older view of ZooKeeper."""
    number, follows, begins = next(_ids), threading.Event(), threading.Event()
    with LocalBroker(running.zookeeper, tmp_path, id=number) as local:
        (topic, inbox_id), (other, _) = made(running, number), made(running, number)
        deliver(running, local, topic, b"once")
    follow, read = Broker._read_topics, moved_node.read_moved
    first = list[Broker]()

    async def after_a_while(self: Broker) -> None:
        if self in first:
            await asyncio.to_thread(follows.wait)
        first.append(self)
        await follow(self)

    async def read_later(*arguments: Any) -> Any:
        await asyncio.to_thread(begins.wait)
        return await read(*arguments)

    async def forget() -> None:
        async with await Session.open(running.zookeeper) as session:
            await TopicStore(session).delete(f"{topic}.delayed")
            moved = await read_moved(session, number)
            offsets = {name: at for name, at in moved.offsets.items() if not name.startswith(inbox_id)}
            assert await write_moved(session, number, replace(moved, offsets=offsets)) is not None

    monkeypatch.setattr(Broker, "_read_topics", after_a_while)
    monkeypatch.setattr(moved_node, "read_moved", read_later)
    with LocalBroker(running.zookeeper, tmp_path, id=number) as local, contextlib.ExitStack() as ends:
        ends.callback(follows.set)
        ends.callback(begins.set)
        asyncio.run(forget())
        begins.set()
        deliver(running, local, other, b"x")
        assert f"{topic}.delayed" in local.broker._topics.open
        follows.set()
        wait_until(lambda: f"{topic}.delayed" not in local.broker._topics.open)
        with running.consumer(topics=topic, start="earliest", idle_timeout_s=0.2) as consumer:
            assert [one.value for one in read_to_end(consumer)] == [b"once"]


def test_nothing_is_forgotten_while_the_id_of_a_topic_is_not_known(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_node, "FORGET_S", 0.0)
    number = next(_ids)

    async def forget() -> list[set[str]]:
        async with client_of(running) as client:
            session, store = client.session, client.topics
            path = session.paths.topic_config("bad.delayed")
            there = await store.create(TopicConfig(f"t-{number}.delayed", {number: 1}))
            await session.create(path, b"not JSON", makepath=True)
            offsets = {f"{there.id}/0": (7, 1), "0123456789abcdef/0": (3, 1)}
            moved = await read_moved(session, number)
            assert await write_moved(session, number, replace(moved, offsets=offsets)) is not None
            node = MovedNode(session, client, number, LogOnce())
            await node.begin()
            await node.forget_deleted([])
            found = [set((await read_moved(session, number)).offsets)]
            await session.delete(path, -1)
            await node.forget_deleted(["0123456789abcdef/0"])
            found.append(set((await read_moved(session, number)).offsets))
            await node.forget_deleted([])
            found.append(set((await read_moved(session, number)).offsets))
            await store.delete(there.topic)
            return found

    first, second, third = asyncio.run(forget())
    assert len(first) == 2
    assert second == first, "an open log is kept"
    assert len(third) == 1
    assert "0123456789abcdef/0" not in third


async def prepared_at_0(client: ClusterClient, number: int, topic: str, value: bytes = b"moved") -> GlobalTransaction:
    """A transaction that moves a message, prepared at broker 0, as a master of this number leaves it after a crash."""
    routes = Routes(BATCH_TARGET_BYTES, MESSAGE_BYTES_MAX, by_key_hash, Codec.NONE, None)
    gtrid = Xid.random(gtrid_prefix(number)).gtrid
    work = GlobalTransaction(client, Staging(routes), gtrid, branch_timeout_s=0, answer_s=SLOW_S)
    await work.send_many(topic, [CheckedMessage(value)])
    await work.prepare()
    return work


def prepared(running: Cluster) -> list[bytes]:
    """The gtrids that are prepared at broker 0."""

    async def ask() -> list[bytes]:
        async with client_of(running) as client:
            await client.refresh_brokers()
            return [one.xid.gtrid for one in await TxClient(client).branches(0)]

    return until_answered(lambda: asyncio.run(ask()))


def test_a_transaction_at_a_broker_that_was_down_is_rolled_back_once_it_runs(
    running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_node, "ASK_SOON_S", 0.05)
    number = next(_ids)

    async def prepare() -> bytes:
        async with client_of(running) as client:
            return (await prepared_at_0(client, number, topic)).gtrid

    with LocalBroker(running.zookeeper, tmp_path, id=number) as local:
        topic, _ = made(running, number)
        deliver(running, local, topic, b"x")
    gtrid = asyncio.run(prepare())
    assert prepared(running) == [gtrid]
    running.processes[0].kill()
    with LocalBroker(running.zookeeper, tmp_path, id=number) as local:
        wait_until(lambda: local.broker._parts.delays._term is not None)
        running.processes[0].start()
        wait_until(lambda: not prepared(running))


def test_a_transaction_that_another_master_has_decided_is_not_rolled_back(
    running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This replica takes itself for the master after another one has begun. It finds the transaction of that one."""
    number, branches, others = next(_ids), TxClient.branches, list[str]()

    async def another_works_meanwhile(self: TxClient, broker_id: int, **named: Any) -> Any:
        if broker_id or others or not armed:
            return await branches(self, broker_id, **named)
        async with client_of(running) as client:
            work = await prepared_at_0(client, number, topic)
            found = await branches(self, broker_id, **named)
            moved = await read_moved(client.session, number)
            decided = replace(moved, committing={work.gtrid.hex(): (0,)})
            assert await write_moved(client.session, number, decided) is not None
            others.append(work.gtrid.hex())
            return found

    monkeypatch.setattr(TxClient, "branches", another_works_meanwhile)
    armed = False
    with LocalBroker(running.zookeeper, tmp_path, id=number) as local:
        topic, _ = made(running, number)
        deliver(running, local, topic, b"x")
    armed = True
    with LocalBroker(running.zookeeper, tmp_path, id=number):
        wait_until(lambda: others and not prepared(running))
        with running.consumer(topics=topic, start="earliest", idle_timeout_s=0.2) as consumer:
            assert [one.value for one in read_to_end(consumer)] == [b"x", b"moved"]


def test_a_broker_commits_transactions_in_the_order_of_their_decisions(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, ask = next(_ids), TxClient.ask
    lost = set[bytes]()

    async def ask_or_fail(self: TxClient, branch: Branch, *arguments: Any, **named: Any) -> Any:
        if branch.xid.gtrid in lost:
            raise ConnectError("broker 0", "a seeded fault")
        return await ask(self, branch, *arguments, **named)

    async def commit() -> list[int]:
        async with client_of(running) as client:
            node = MovedNode(client.session, client, number, LogOnce())
            await node.begin()
            for value in (b"first", b"second"):
                work = await prepared_at_0(client, number, topic, value)
                lost.add(work.gtrid)
                await node.decide({}, work)
            lost.remove(work.gtrid)
            await node.finish(work)
            left = [len(await TxClient(client).branches(0))]
            lost.clear()
            await node.finish()
            return [*left, len(await TxClient(client).branches(0))]

    topic = f"t-{number}"
    running.create_topic(topic, partitions=1)
    monkeypatch.setattr(TxClient, "ask", ask_or_fail)
    assert asyncio.run(commit()) == [2, 0]
    with running.consumer(topics=topic, start="earliest", idle_timeout_s=0.2) as consumer:
        assert [one.value for one in read_to_end(consumer)] == [b"first", b"second"]
