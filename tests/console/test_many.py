"""The console's pages about a topic of many partitions: the requests that they make, counted in this process."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

import metamq
from metamq.client.net.transport import BrokerConnection
from metamq.console.messages import COUNT, Question, read_messages
from metamq.testing import Cluster
from metamq.wire.commands import Command
from metamq.zk.session.link import Link
from tests.one_zookeeper import cluster
from tests.parts import wait_until

MANY, FEW, EACH = 400, 100, 3
"""The partitions of two topics, and the messages in each partition."""


def is_assigned(consumer: metamq.Consumer[bytes], partitions: int) -> bool:
    return len(consumer.assignment) == partitions


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    """A group has an offset and an owner for each partition of both topics, one group for each topic."""
    with cluster() as one, one.producer() as producer:
        for topic, partitions in (("many", MANY), ("few", FEW)):
            one.create_topic(topic, partitions)
            for index in range(partitions):
                producer.send_many(topic, [b"%d" % number for number in range(EACH - 1)], partition=f"0-{index}")
            producer.flush()
            for index in range(partitions - COUNT):
                producer.send(topic, b"%d" % (EACH - 1), partition=f"0-{index}")
            producer.flush()
            for index in range(partitions - COUNT, partitions):
                producer.send(topic, b"%d" % (EACH - 1), partition=f"0-{index}").result(60)
        settings: dict[str, Any] = {"auto_commit": False}
        with (
            one.consumer(group="of-many", topics="many", **settings) as many,
            one.consumer(group="of-few", topics="few", **settings) as few,
        ):
            for consumer, topic, partitions in ((many, "many", MANY), (few, "few", FEW)):
                wait_until(partial(is_assigned, consumer, partitions), what="the assignment")
                consumer.commit({metamq.TopicPartition(topic, f"0-{index}"): EACH for index in range(partitions)})
            yield one


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The requests of this thread: those to ZooKeeper, and to brokers by command. The members have another thread."""
    counts: Counter[str] = Counter()
    submit, send, thread = Link.submit, BrokerConnection.send, threading.get_ident()

    def counted_submit(self: Link, *given: Any) -> Any:
        counts["ZooKeeper"] += threading.get_ident() == thread
        return submit(self, *given)

    def counted_send(self: BrokerConnection, command: int, *given: Any, **more: Any) -> Any:
        counts[Command(command).name] += threading.get_ident() == thread
        return send(self, command, *given, **more)

    monkeypatch.setattr(Link, "submit", counted_submit)
    monkeypatch.setattr(BrokerConnection, "send", counted_send)
    return counts


def ask(running: Cluster, question: Callable[[metamq.aio.Admin], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with metamq.aio.Admin(running.zookeeper) as admin:
            return await question(admin)

    return asyncio.run(main())


def test_a_group_of_many_partitions_takes_few_requests(running: Cluster, asked: Counter[str]) -> None:
    counts = {}
    for topic, partitions in (("few", FEW), ("many", MANY)):

        async def describe(admin: metamq.aio.Admin, group: str = f"of-{topic}") -> metamq.GroupDescription:
            await admin.describe_group(group)  # connects
            asked.clear()
            found = await admin.describe_group(group)
            assert (await admin.explain_group(group)).owners == {
                (one.topic, one.partition): one.owner for one in found.partitions
            }
            return found

        found = ask(running, describe)
        assert [(one.committed, one.end, one.owner is None) for one in found.partitions] == (
            [(EACH, EACH, False)] * partitions
        )
        counts[topic] = asked.copy()
    assert counts["many"]["ZooKeeper"] - counts["few"]["ZooKeeper"] == 3 * (MANY - FEW) / 100
    assert counts["many"]["ZooKeeper"] < 35
    assert counts["many"]["OFFSETS"] == 1


def newest(running: Cluster, topic: str, **more: Any) -> list[tuple[str, int]]:
    """The places of the newest messages, as the page shows them."""
    question = Question(**{"topic": topic, "partition": "", "place": -COUNT, "matches": None, **more})

    async def read(admin: metamq.aio.Admin) -> list[tuple[str, int]]:
        described = await admin.describe_topic(topic)
        found = await read_messages({"zookeeper": running.zookeeper}, described, question)
        assert not found.is_cut
        return [(message.partition, message.offset) for message in found.messages]

    places: list[tuple[str, int]] = ask(running, read)
    return places


def test_messages_of_many_partitions_take_as_many_requests_as_of_few(running: Cluster, asked: Counter[str]) -> None:
    counts = {}
    for topic, partitions in (("few", FEW), ("many", MANY)):
        asked.clear()
        last = [(f"0-{index}", EACH - 1) for index in range(partitions - COUNT, partitions)]
        assert newest(running, topic) == last[::-1]
        counts[topic] = asked.copy()
    assert counts["many"]["OFFSETS"] == counts["few"]["OFFSETS"] <= 3
    assert counts["many"]["STATS"] == counts["few"]["STATS"]
    assert abs(counts["many"]["ZooKeeper"] - counts["few"]["ZooKeeper"]) < 5


@pytest.mark.parametrize("place", [EACH - 1, "earliest", 0])
def test_messages_from_a_place_on_are_of_as_many_partitions_as_are_shown(running: Cluster, place: int | str) -> None:
    found = newest(running, "many", place=place)
    assert len(found) == COUNT
    assert {int(partition[2:]) for partition, _offset in found} <= set(range(COUNT))
    assert {offset for _partition, offset in found} <= set(range(EACH - 1 if place == EACH - 1 else 0, EACH))


def test_a_filter_finds_messages_in_any_partition(running: Cluster) -> None:
    def is_third(message: metamq.Message[bytes]) -> bool:
        return message.value == b"2" and message.partition.endswith("77")

    names = [f"0-{index}" for index in range(MANY) if str(index).endswith("77")]
    assert newest(running, "many", matches=is_third) == [(name, 2) for name in names[::-1]]


def test_a_place_beyond_each_end_has_no_message(running: Cluster, asked: Counter[str]) -> None:
    assert newest(running, "many", place=EACH) == newest(running, "many", place="latest") == []
    assert asked["GET"] == 0
