"""Many producers of single messages while replicas are killed: their master stores what arrives together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from metamq import aio
from metamq.errors import MetamqError
from metamq.testing.network import Way
from metamq.wire.commands import Command, PutEntry
from tests.broker.front_door.conftest import RawClient, batch_of
from tests.broker.ha.chaos import NetworkedGroup, networked_group, party
from tests.broker.ha.test_replication import a_sync_topic
from tests.load import Told, check
from tests.parts import read_topic, wait_until

PRODUCERS = 40
ENOUGH = 400
"""Acknowledged messages between two kills."""
AHEAD = 10
"""Messages that a killed master has and its slave lacks."""
UNREAD = 3000


@pytest.fixture
def group(tmp_path: Path) -> Iterator[NetworkedGroup]:
    with networked_group(tmp_path, replicas=2) as made:
        yield made


class SmallProducers:
    """Producers of one thread. Each sends its next message when the one before is acknowledged."""

    def __init__(self, zookeeper: str, topic: str) -> None:
        self.told = [Told() for _ in range(PRODUCERS)]
        self._zookeeper, self._topic = zookeeper, topic
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> SmallProducers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._send(number, told) for number, told in enumerate(self.told)))

    async def _send(self, number: int, told: Told) -> None:
        key = b"%d" % number
        async with aio.Producer[bytes](self._zookeeper, linger_ms=0, delivery_timeout_s=120) as producer:
            for index in itertools.count():
                if self._ending.is_set():
                    return
                value = b"%d-%d" % (number, index)
                told.sent.append((key, value))
                try:
                    receipt = await producer.send(self._topic, value, key)
                except MetamqError as error:
                    told.failed[value] = error
                else:
                    told.acknowledged[value] = receipt.partition, receipt.offset

    def wait_for_more(self) -> None:
        """Waits until every producer continues, and enough is acknowledged."""
        before = [len(told.acknowledged) for told in self.told]

        def more() -> bool:
            gained = [len(told.acknowledged) - was for told, was in zip(self.told, before, strict=True)]
            return all(gained) and sum(gained) >= ENOUGH

        wait_until(more, what="more acknowledged messages of each producer")


def send_and_read_nothing(client: RawClient, turn: int, topic: str, topic_id: str) -> Told:
    """Sends PUTs, and leaves their answers unread."""
    values = [b"unread %d-%d" % (turn, number) for number in range(UNREAD)]
    batches = [batch_of([value]) for value in values]
    puts = [client.frame(Command.PUT, [PutEntry(topic, topic_id, 0, len(one))], [one])[1] for one in batches]
    client.send(b"".join(puts))
    return Told(sent=[(None, value) for value in values])


def kill_ahead_of_slave(group: NetworkedGroup, master: int) -> None:
    """Kills the master when it has stored messages that its slave lacks."""

    def stored() -> int:
        return sum(end for end, _size in group.ends(master).values())

    link = Way(party(master), party(1 - master))
    group.network.cut(link)
    try:
        before = stored()
        wait_until(lambda: stored() >= before + AHEAD, what="messages that the slave lacks")
        group.replicas[master].kill()
    finally:
        group.network.heal(link, broken=True)


@pytest.mark.slow
def test_killed_replicas_lose_and_double_nothing_of_many_small_producers(group: NetworkedGroup) -> None:
    """A client that reads no answer is among them."""
    topic = a_sync_topic(group, partitions=2)
    group.wait_insync(0, 1)
    with group.cluster.admin() as admin:
        topic_id = admin.topics()[topic].id
    unread = []
    with SmallProducers(group.cluster.zookeeper, topic) as producers, contextlib.ExitStack() as clients:
        for turn, (master, slave) in enumerate(((0, 1), (1, 0), (0, 1))):
            client = clients.enter_context(RawClient(group.replicas[master].port, receive_buffer=4096))
            unread.append(send_and_read_nothing(client, turn, topic, topic_id))
            producers.wait_for_more()
            group.replicas[slave].kill()
            producers.wait_for_more()
            group.replicas[slave].start()
            group.lose_master(partial(kill_ahead_of_slave, group, master), slave, master=master)
            group.promote(slave)
            producers.wait_for_more()
            group.replicas[master].start()
            group.wait_insync(0, 1, master=slave)
    group.wait_equal(0, 1)
    check(producers.told + unread, read_topic(group.replicas[1], topic, topic_id))
    assert not any(told.failed for told in producers.told)
