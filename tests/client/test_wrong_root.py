"""Clients where no broker has ever been: they say so, make nothing there, and go on once there is one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin, Consumer, Producer, aio
from metamq.errors import ConfigError, MetamqError, TopicNotFound
from metamq.testing import BrokerProcess
from metamq.zk.session.session import Session


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return found


async def nodes(servers: str) -> list[str]:
    async with await Session.open(servers) as session:
        return sorted(await session.children("/"))


async def make(servers: str, path: str) -> None:
    async with await Session.open(servers) as session:
        await session.ensure(path)


def test_a_root_without_a_broker_is_named_and_not_made(servers: str, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(make(servers, "/meta/brokers/ids/0"))

    async def opened() -> None:
        async with aio.Producer(servers, root="/nope"):
            pass

    def produce() -> None:
        with Producer(servers, root="/nope") as producer, pytest.raises(TopicNotFound):
            producer.send("orders", b"x").result(60)

    def consume() -> None:
        with pytest.raises(TopicNotFound):
            Consumer(servers, root="/nope", topics=["orders"], group="g")

    def administer() -> None:
        with Admin(servers, root="/nope") as admin:
            assert (admin.topics(), admin.brokers(), admin.groups()) == ({}, {}, {})
            with pytest.raises(ConfigError, match="there is no broker"):
                admin.create_topic("orders")

    for use in (produce, consume, administer, lambda: asyncio.run(opened())):
        use()
        (said,) = warnings_of(caplog)
        assert said.startswith(f"there is no /nope in ZooKeeper at {servers}. Beside it: /meta. Choose with ")
    assert asyncio.run(nodes(servers)) == ["meta"]
    asyncio.run(make(servers, "/nope/consumers"))
    administer()
    (said,) = warnings_of(caplog)
    assert said.startswith(f"there is no broker below /nope in ZooKeeper at {servers}. Beside it: /meta. ")
    Admin(servers).close()
    assert warnings_of(caplog) == []


def test_a_chroot_that_is_missing_is_named_and_not_made(servers: str, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(make(servers, "/meta/brokers/ids/0"))
    misspelt = f"{servers}/misspelt/deep"

    async def opened() -> None:
        async with aio.Producer(misspelt) as producer:
            with pytest.raises(TopicNotFound):
                await producer.send("orders", b"x")

    def consume() -> None:
        every: list[dict[str, Any]] = [{"group": "g"}, {}]
        for settings in every:
            with pytest.raises(TopicNotFound):
                Consumer(misspelt, topics=["orders"], **settings)

    def administer() -> None:
        with Admin(misspelt) as admin:
            assert (admin.topics(), admin.brokers(), admin.groups()) == ({}, {}, {})
            with pytest.raises(ConfigError, match="there is no broker"):
                admin.create_topic("orders")

    chroot = servers.partition("/")[2]
    for use in (consume, administer, lambda: asyncio.run(opened())):
        use()
        said = warnings_of(caplog)
        first = f"there is no /{chroot}/misspelt/deep in ZooKeeper at {servers.partition('/')[0]}. "
        assert {line.startswith(f"{first}Beside it: /{chroot}/meta. It is the end of the ") for line in said} == {True}
    assert asyncio.run(nodes(servers)) == ["meta"]


def test_a_new_broker_makes_the_chroot_and_clients_that_wait_there_find_it(
    servers: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    below = f"{servers}/new"
    with Admin(below) as admin, Producer(below) as producer:
        with pytest.raises(TopicNotFound):
            producer.send("orders", b"x").result(60)
        broker = BrokerProcess(below, tmp_path / "broker")
        broker.start()
        try:
            admin.create_topic("orders")
            assert producer.send("orders", b"x").result(60).offset == 0
        finally:
            assert broker.stop() == 0
    elsewhere = BrokerProcess(f"{servers}/misspelt", tmp_path / "broker")
    with pytest.raises(MetamqError, match="does not know broker 0"):
        elsewhere.start()
    assert asyncio.run(nodes(servers)) == ["new"]


def test_clients_may_be_there_before_the_first_broker(
    servers: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = BrokerProcess(servers, tmp_path / "broker")
    with Admin(servers) as admin, Producer(servers) as producer:
        said = warnings_of(caplog)
        assert len(said) == 2
        assert all("no broker has ever been there. Start the first with `metamq broker`." in line for line in said)
        assert admin.brokers() == {}
        with pytest.raises(TopicNotFound):
            producer.send("orders", b"x").result(60)
        broker.start()
        try:
            admin.create_topic("orders")
            assert producer.send("orders", b"x").result(60).offset == 0
            with Consumer(servers, topics=["orders"]) as consumer:
                assert next(iter(consumer)).value == b"x"
        finally:
            broker.stop()
