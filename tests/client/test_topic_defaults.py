"""The defaults of a cluster for new topics, against a real cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from metamq import Admin
from metamq.errors import ConfigError, CorruptData
from metamq.testing import Cluster
from metamq.zk.cluster.topics import FlushEvery
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.session.session import Session
from tests.one_zookeeper import cluster

WRONG: dict[str, Any] = {"replicas": 2}


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


@pytest.fixture(scope="module")
def admin(running: Cluster) -> Iterator[Admin]:
    with running.admin() as admin:
        yield admin


def test_new_topics_have_the_defaults_of_the_cluster(admin: Admin) -> None:
    before = admin.create_topic("before", partitions=1)
    assert admin.topic_defaults() == {}
    try:
        admin.set_topic_defaults(replication="sync", flush=FlushEvery(messages=10), retention_ms=None)
        assert admin.topic_defaults() == {"replication": "sync", "flush": FlushEvery(10), "retention_ms": None}
        made = admin.create_topic("t", partitions=1, flush="ack")
        assert (made.replication, made.flush, made.retention_ms, made.cleanup) == ("sync", "ack", None, "delete")
        assert admin.describe_topic(before.topic).config == before
        with pytest.raises(ConfigError, match="min_insync is 17"):
            admin.set_topic_defaults(min_insync=17)
        with pytest.raises(ConfigError, match="replicas"):
            admin.set_topic_defaults(**WRONG)
        admin.set_topic_defaults(cleanup="archive")
        assert admin.topic_defaults() == {"cleanup": "archive"}
    finally:
        admin.set_topic_defaults()
    assert admin.create_topic("after", partitions=1).cleanup == "delete"


@pytest.mark.parametrize(
    "data", [b"[]", b"{", b'{"replication": 3}', b'{"id": "x"}', b'{"flush": {"s": 1}}'], ids=range(5)
)
def test_defaults_that_nobody_can_read_are_named_and_can_be_replaced(
    running: Cluster, admin: Admin, data: bytes
) -> None:
    async def write() -> None:
        async with await Session.open(running.zookeeper) as session:
            await session.set(session.paths.topic_defaults(), data, ANY_VERSION)

    admin.set_topic_defaults()
    asyncio.run(write())
    with pytest.raises((CorruptData, ConfigError)):
        admin.create_topic("unread", partitions=1)
    admin.set_topic_defaults()
    admin.create_topic("unread", partitions=1)
    admin.delete("unread")
