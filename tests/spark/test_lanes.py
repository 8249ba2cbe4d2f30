"""Connections that are used again by one reader after another: which are kept, and which are not."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from metamq.client.net.blocking_connection import BlockingConnection
from metamq.spark_consumers.source.lanes import IDLE_MAX, Lane, LaneKey, Lanes, ReadPosition
from metamq.testing import Cluster
from metamq.zk.partitions import TopicPartition


@pytest.fixture
def key(running: Cluster) -> LaneKey:
    return LaneKey(0, "127.0.0.1", running.broker.port)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes()
    yield made
    while made.kept:
        made.kept.pop().abort()


def is_open(lane: Lane) -> bool:
    return lane.connection.is_open


def test_a_lane_that_was_given_back_is_taken_again_the_last_one_first(lanes: Lanes, key: LaneKey) -> None:
    first, second = lanes.take(key), lanes.take(key)
    assert first is not second
    lanes.give_back(first)
    lanes.give_back(second)
    assert [lanes.take(key), lanes.take(key)] == [second, first]
    assert lanes.kept == []
    first.abort()
    second.abort()


def test_a_lane_with_an_answer_to_come_is_closed(lanes: Lanes, key: LaneKey) -> None:
    lane = lanes.take(key)
    lane.ask(ReadPosition(TopicPartition("no-such-topic", "0-0"), "none", 0, -1), 100, 1000)
    lanes.give_back(lane)
    assert lanes.kept == []
    assert not is_open(lane)


def test_a_lane_that_broke_while_it_was_idle_is_closed_whoever_gives_back(lanes: Lanes, key: LaneKey) -> None:
    theirs, ours = socket.socketpair()
    elsewhere = Lane(BlockingConnection("127.0.0.2:1", ours), LaneKey(7, "127.0.0.2", 1))
    lanes.give_back(elsewhere)
    assert lanes.kept == [elsewhere]
    theirs.close()
    lane = lanes.take(key)
    lanes.give_back(lane)
    assert lanes.kept == [lane]
    assert not is_open(elsewhere)


def test_so_many_are_kept_and_no_more(lanes: Lanes, key: LaneKey) -> None:
    taken = [lanes.take(key) for _ in range(IDLE_MAX + 2)]
    for lane in taken:
        lanes.give_back(lane)
    assert lanes.kept == taken[2:]
    assert [is_open(lane) for lane in taken[:3]] == [False, False, True]
