"""A new master's wait for its journal: which requests wait, and until when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.broker.roles.role import MasterRole
from metamq.broker.transactions.journal import JournalStore
from metamq.broker.transactions.term import TransactionTerm
from metamq.broker.transactions.upkeep import Upkeep
from metamq.client.net.transport import BrokerConnection
from metamq.errors import Fenced, MetamqError
from metamq.testing import Cluster
from metamq.tx import Xid
from metamq.wire import status
from metamq.wire.columns import encode
from metamq.wire.commands import Command, PutEntry, Tx
from metamq.wire.xa import Verb
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, LocalBroker, wait_until


@pytest.fixture
def parts() -> Iterator[Cluster]:
    with cluster(brokers=0) as running:
        yield running


@pytest.fixture
def journal_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no epoch gets further."""
    everywhere = threading.Event()
    found_is_durable = Upkeep.found_is_durable

    async def when_everywhere(self: Upkeep, journal: JournalStore) -> None:
        while not everywhere.is_set():
            journal.check_term()
            await asyncio.sleep(0.01)
        await found_is_durable(self, journal)

    monkeypatch.setattr(Upkeep, "found_is_durable", when_everywhere)
    return everywhere


def term_of(broker: LocalBroker) -> TransactionTerm:
    role = broker.broker._parts.status.role
    assert isinstance(role, MasterRole)
    assert isinstance(role.transactions, TransactionTerm)
    return role.transactions


def test_a_producer_waits_for_the_commits_of_its_partition_and_for_no_others(
    parts: Cluster, tmp_path: Path, journal_is_everywhere: threading.Event
) -> None:
    with LocalBroker(parts.zookeeper, tmp_path / "broker", id=7) as broker, parts.admin() as admin:
        topic = admin.create_topic("orders", partitions=2, brokers=[7])
        term_of(broker).commits_first = frozenset({("orders", topic.id, 0)})
        with parts.producer() as producer:
            waiting = [producer.send("orders", b"%d" % number, partition="7-0") for number in range(3)]
            assert producer.send("orders", b"other", partition="7-1").result(SLOW_S).offset == 0
            with pytest.raises(TimeoutError):
                waiting[0].result(0.3)
            journal_is_everywhere.set()
            assert [delivery.result(SLOW_S).offset for delivery in waiting] == [0, 1, 2]


def test_a_broker_that_stops_answers_what_waits(
    parts: Cluster, tmp_path: Path, journal_is_everywhere: threading.Event
) -> None:
    """It would wait for these requests until its drain time-out ends."""
    answers: list[MetamqError] = []

    async def ask(broker: LocalBroker, topic_id: str) -> None:
        connection = await BrokerConnection.open("127.0.0.1", broker.port)
        try:
            batch = encode([b"value"], base_timestamp_us=1)
            entries = [PutEntry("orders", topic_id, 0, len(batch))]
            header = Tx([*Xid.random()], 0, "s", [Verb.START, Verb.SEND], 0, -1, 0, entries)
            response = await connection.send(Command.TX, header, [batch])
            answers.append(status.decode_error(response.status, response.header))
        finally:
            await connection.close()

    with LocalBroker(parts.zookeeper, tmp_path / "broker", id=7, drain_timeout_s=3600) as broker:
        with parts.admin() as admin:
            topic = admin.create_topic("orders", partitions=1, brokers=[7])
        asking = threading.Thread(target=lambda: asyncio.run(ask(broker, topic.id)))
        asking.start()
        term = term_of(broker)
        wait_until(lambda: term.queues, what="the request at the broker")
    asking.join(SLOW_S)
    (error,) = answers
    assert isinstance(error, Fenced)
    assert error.outcome == "not_done"
    assert not journal_is_everywhere.is_set()
