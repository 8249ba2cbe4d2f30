"""Connections that are used again by one reader after another: which are kept, and which are not."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from metamq import SecurityConfig
from metamq.client.net.blocking_connection import BlockingConnection
from metamq.client.scan.connection_pool import (
    IDLE_MAX,
    ConnectionKey,
    ConnectionPool,
    PooledConnection,
    ReadPosition,
)
from metamq.testing import Cluster
from metamq.zk.partitions import TopicPartition


@pytest.fixture
def key(running: Cluster) -> ConnectionKey:
    return ConnectionKey(0, "127.0.0.1", running.broker.port, SecurityConfig())


@pytest.fixture
def pool() -> Iterator[ConnectionPool]:
    made = ConnectionPool()
    yield made
    while made.kept:
        made.kept.pop().abort()


def is_open(pooled: PooledConnection) -> bool:
    return pooled.connection.is_open


def test_a_connection_that_was_given_back_is_taken_again_the_last_one_first(
    pool: ConnectionPool, key: ConnectionKey
) -> None:
    first, second = pool.take(key), pool.take(key)
    assert first is not second
    pool.give_back(first)
    pool.give_back(second)
    assert [pool.take(key), pool.take(key)] == [second, first]
    assert pool.kept == []
    first.abort()
    second.abort()


def test_a_connection_with_an_answer_to_come_is_closed(pool: ConnectionPool, key: ConnectionKey) -> None:
    pooled = pool.take(key)
    pooled.ask(ReadPosition(TopicPartition("no-such-topic", "0-0"), "none", 0, -1), 100, 1000)
    pool.give_back(pooled)
    assert pool.kept == []
    assert not is_open(pooled)


def test_a_connection_that_broke_while_it_was_idle_is_closed_whoever_gives_back(
    pool: ConnectionPool, key: ConnectionKey
) -> None:
    theirs, ours = socket.socketpair()
    elsewhere = PooledConnection(
        BlockingConnection("127.0.0.2:1", ours), ConnectionKey(7, "127.0.0.2", 1, SecurityConfig())
    )
    pool.give_back(elsewhere)
    assert pool.kept == [elsewhere]
    theirs.close()
    pooled = pool.take(key)
    pool.give_back(pooled)
    assert pool.kept == [pooled]
    assert not is_open(elsewhere)


def test_so_many_are_kept_and_no_more(pool: ConnectionPool, key: ConnectionKey) -> None:
    taken = [pool.take(key) for _ in range(IDLE_MAX + 2)]
    for pooled in taken:
        pool.give_back(pooled)
    assert pool.kept == taken[2:]
    assert [is_open(pooled) for pooled in taken[:3]] == [False, False, True]
