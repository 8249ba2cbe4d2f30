"""Offsets in a database: no former owner gets a row through, and results and offsets stand or fall together."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from metamq.client.background import at_once
from metamq.client.fetch import commit_in as in_transaction
from metamq.client.fetch.inbox import PartitionState
from metamq.client.group.assignment import AssignedPartition
from metamq.client.group.rebalance import ZKLoadRebalanceListener
from metamq.client.offsets.connections import database_of
from metamq.client.offsets.offsets import CommitRequest
from metamq.client.offsets.offsets_database import DatabaseOffsets
from metamq.errors import ConfigError, MetamqError, OwnershipLost
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.groups import ownership
from metamq.zk.groups.ownership import CommittedOffset, Ownership
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.lease import Lease
from metamq.zk.session.session import Session
from tests import mariadb
from tests.database_offsets import offsets_in
from tests.postgres import new_schema
from tests.tx.databases import giving_mappings

Connect = Callable[[], Any]

TP = TopicPartition("flights", "0-3")
TOPIC_ID = "0123456789abcdef"


@pytest.fixture(params=["sqlite3", "psycopg", "pymysql", "mysqlclient"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Connects to a database that only this test has."""
    if request.param == "sqlite3":
        return lambda: sqlite3.connect(tmp_path / "results.db", timeout=60)
    if request.param in mariadb.DRIVERS:
        if request.param == "mysqlclient":
            mariadb.mysqlclient()
        mysql = request.getfixturevalue("mariadb")
        name = mysql.new_database()
        return lambda: mariadb.DRIVERS[request.param](mysql, name)
    server = request.getfixturevalue("postgres")
    schema = new_schema(server)
    return lambda: psycopg.connect(server, options=f"-c search_path={schema}")


async def storage_on(connect: Connect) -> DatabaseOffsets:
    offsets_in(connect)
    return offsets_in(connect)  # the table is there already


def a_claim(generation: int, consumer_id: str = "one", tp: TopicPartition = TP) -> Ownership:
    return Ownership("etl", tp, TOPIC_ID, consumer_id, generation, version=0, committed=None)


async def claimed(storage: DatabaseOffsets, claim: Ownership) -> Ownership:
    """The claim as the listener keeps it once the storage has accepted it."""
    outcome = (await storage.claimed([claim]))[claim.tp]
    if isinstance(outcome, MetamqError):
        raise outcome
    return replace(claim, committed=outcome)


def commit_in(
    storage: DatabaseOffsets, connection: Any, request: CommitRequest, state: PartitionState | None = None
) -> None:
    """As consumer.commit(connection=...), of a consumer that has just got the partition unless `state` says more."""
    state = state or PartitionState(request.claim.tp, request.claim, 0)
    database, position = database_of(connection, storage._paramstyle), {request.claim.tp: request.offset}
    one = in_transaction.offset_write(state, request, position)
    counted = at_once(in_transaction.commit_in(storage, database, one))
    if counted is not None:
        raise OwnershipLost(*request.claim.tp, reason=f"counted up to {counted}")


def rows(connect: Connect, sql: str) -> list[Any]:
    with closing(connect()) as connection, closing(connection.cursor()) as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


def execute(connection: Any, sql: str) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.execute(sql)


def test_claim_commit_and_claim_again(connect: Connect) -> None:
    async def scenario() -> None:
        storage = await storage_on(connect)
        claim = await claimed(storage, a_claim(10))
        assert claim.committed is None
        outcome = (await storage.commit([CommitRequest(claim, 7, 2)]))[TP]
        assert isinstance(outcome, Ownership)
        assert outcome.committed == CommittedOffset(7, 2, TOPIC_ID)
        assert (await claimed(storage, claim)).committed == CommittedOffset(7, 2, TOPIC_ID)
        # A topic made anew: what is committed keeps the id it was committed under.
        later = await claimed(storage, replace(a_claim(11, "two"), topic_id="f" * 16))
        assert later.committed == CommittedOffset(7, 2, TOPIC_ID)
        await storage.commit([CommitRequest(later, 1, 1)])
        assert (await claimed(storage, later)).committed == CommittedOffset(1, 1, "f" * 16)

    asyncio.run(scenario())


def test_connections_whose_rows_are_mappings(connect: Connect) -> None:
    async def scenario() -> None:
        storage = await storage_on(giving_mappings(connect))
        first = await claimed(storage, a_claim(1))
        assert isinstance((await storage.commit([CommitRequest(first, 42, 7)]))[TP], Ownership)
        second = await claimed(storage, a_claim(2, "two"))
        assert second.committed == CommittedOffset(42, 7, TOPIC_ID)

    asyncio.run(scenario())


def test_a_former_owner_commits_nothing(connect: Connect) -> None:
    async def scenario() -> None:
        storage = await storage_on(connect)
        old = await claimed(storage, a_claim(10))
        new = await claimed(storage, a_claim(11, "two"))
        outcome = (await storage.commit([CommitRequest(old, 7, 1)]))[TP]
        assert isinstance(outcome, OwnershipLost)
        assert "the database knows generation 11, ours is 10" in str(outcome)
        with closing(connect()) as connection:
            with pytest.raises(OwnershipLost, match="generation 11, ours is 10"):
                commit_in(storage, connection, CommitRequest(old, 7, 1))
            connection.rollback()
        with pytest.raises(OwnershipLost, match="generation 11, ours is 10"):
            await claimed(storage, old)
        assert (await claimed(storage, new)).committed is None

    asyncio.run(scenario())


def test_results_and_offsets_stand_or_fall_together(connect: Connect) -> None:
    async def scenario() -> None:
        storage = await storage_on(connect)
        with closing(connect()) as connection:
            execute(connection, "CREATE TABLE results (value INTEGER)")
            connection.commit()
            claim = await claimed(storage, a_claim(10))

            execute(connection, "INSERT INTO results VALUES (1)")
            commit_in(storage, connection, CommitRequest(claim, 1, 1))
            connection.rollback()
            assert rows(connect, "SELECT value FROM results") == []
            assert (await claimed(storage, claim)).committed is None

            execute(connection, "INSERT INTO results VALUES (1)")
            commit_in(storage, connection, CommitRequest(claim, 1, 1))
            connection.commit()
            assert rows(connect, "SELECT value FROM results") == [(1,)]

            # The same messages again, by a transaction that still expects nothing to be committed.
            execute(connection, "INSERT INTO results VALUES (1)")
            with pytest.raises(OwnershipLost, match="counted up to 1"):
                commit_in(storage, connection, CommitRequest(claim, 1, 1))
            connection.rollback()
            assert rows(connect, "SELECT value FROM results") == [(1,)]

            claim = await claimed(storage, claim)
            commit_in(storage, connection, CommitRequest(claim, 2, 1))
            connection.commit()

    asyncio.run(scenario())


def test_a_new_owner_waits_for_the_open_transaction_of_the_one_before(connect: Connect) -> None:
    async def scenario() -> None:
        storage = await storage_on(connect)
        old = await claimed(storage, a_claim(10))
        with closing(connect()) as connection:
            commit_in(storage, connection, CommitRequest(old, 7, 1))
            taking_over = asyncio.create_task(claimed(storage, a_claim(11, "two")))
            await asyncio.wait({taking_over}, timeout=0.2)
            assert not taking_over.done()
            connection.commit()
            assert (await taking_over).committed == CommittedOffset(7, 1, TOPIC_ID)

    asyncio.run(scenario())


# sqlite3 locks the whole database.
@pytest.mark.parametrize("connect", ["psycopg"], indirect=True)
def test_a_row_that_is_waited_for_holds_up_no_other_row(connect: Connect) -> None:
    async def scenario() -> None:
        storage = await storage_on(connect)
        busy, free = TopicPartition("flights", "0-9"), TopicPartition("flights", "0-1")
        old = await claimed(storage, a_claim(10, tp=busy))
        with closing(connect()) as connection:
            commit_in(storage, connection, CommitRequest(old, 7, 1))
            taking_over = asyncio.create_task(storage.claimed([a_claim(11, "two", free), a_claim(11, "two", busy)]))
            await asyncio.wait({taking_over}, timeout=0.2)
            assert not taking_over.done()
            async with asyncio.timeout(60):
                await claimed(storage, a_claim(12, "three", free))
            connection.rollback()
            assert (await taking_over)[busy] is None

    asyncio.run(scenario())


def test_of_claims_that_race_the_last_one_holds(connect: Connect) -> None:
    async def scenario() -> None:
        storage = await storage_on(connect)
        claims = [a_claim(generation, f"c{generation}") for generation in range(10, 16)]

        async def insistent(claim: Ownership) -> object:
            # Two inserts of the first row at once: one is refused by the key, and repeated, as the listener does.
            while True:
                try:
                    return (await storage.claimed([claim]))[TP]
                except MetamqError as error:
                    if not error.retriable:
                        raise

        outcomes = await asyncio.gather(*map(insistent, claims))
        assert outcomes[-1] is None
        assert rows(connect, "SELECT generation FROM metamq_offsets") == [(15,)]

    asyncio.run(scenario())


def test_many_partitions_are_each_decided_on_their_own(connect: Connect) -> None:
    async def scenario() -> None:
        storage = await storage_on(connect)
        items = [TopicPartition("flights", f"0-{index}") for index in range(20)]
        claims = [a_claim(10, tp=tp) for tp in items]
        assert await storage.claimed(claims) == dict.fromkeys(items)
        await claimed(storage, a_claim(11, "two", items[3]))
        outcomes = await storage.commit([CommitRequest(claim, 5, 1) for claim in claims])
        assert [tp for tp in items if isinstance(outcomes[tp], OwnershipLost)] == [items[3]]
        found = await storage.claimed([claim for claim in claims if claim.tp != items[3]])
        assert set(found.values()) == {CommittedOffset(5, 1, TOPIC_ID)}

    asyncio.run(scenario())


def test_a_missing_table_is_named_and_may_come_later(connect: Connect) -> None:
    async def scenario() -> None:
        storage = DatabaseOffsets(connect, table="offsets_of_etl")
        with pytest.raises(
            MetamqError, match=r"offset table offsets_of_etl could not be used.*create_offsets_table"
        ) as caught:
            await storage.check()
        assert caught.value.retriable
        with pytest.raises(MetamqError, match="offset table offsets_of_etl could not be used"):
            await storage.claimed([a_claim(10)])
        assert caught.value.outcome == "unknown"
        outcome = (await storage.commit([CommitRequest(a_claim(10), 1, 1)]))[TP]
        assert isinstance(outcome, MetamqError)
        offsets_in(connect, table="offsets_of_etl")
        await storage.check()
        assert (await claimed(storage, a_claim(10))).committed is None

    asyncio.run(scenario())


@pytest.mark.parametrize("table", ["", "a b", "offsets; DROP TABLE results", "a.b.c", "1st", "x" * 64])
def test_a_table_name_that_is_none_is_refused(table: str) -> None:
    with pytest.raises(ConfigError, match="is not a table name"):
        DatabaseOffsets(lambda: None, table=table)  # type: ignore[arg-type,return-value]


def test_the_paramstyle_is_taken_from_the_connections_module_or_given(tmp_path: Path) -> None:
    class Wrapped:
        """A connection of a module that does not say how it wants its parameters."""

        def __init__(self) -> None:
            self._inner = sqlite3.connect(tmp_path / "x.db")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    def wrapped() -> Any:
        return Wrapped()

    async def scenario() -> None:
        offsets_in(wrapped)
        with pytest.raises(ConfigError, match=r"module of .*Wrapped does not declare its paramstyle"):
            await DatabaseOffsets(wrapped).claimed([a_claim(10)])
        for paramstyle in ("qmark", "named"):
            storage = DatabaseOffsets(wrapped, paramstyle=paramstyle)
            assert (await claimed(storage, a_claim(10))).committed is None
        with pytest.raises(ConfigError, match="'numeric' is unknown"):
            DatabaseOffsets(wrapped, paramstyle="numeric")

    asyncio.run(scenario())


def test_a_frozen_owner_that_thaws_in_its_transaction_doubles_no_result(servers: str, connect: Connect) -> None:
    """ZooKeeper cannot stop a database transaction; the row's generation does."""

    async def scenario() -> None:
        storage = await storage_on(connect)
        with closing(connect()) as of_one, closing(connect()) as of_two:
            execute(of_one, "CREATE TABLE results (value INTEGER)")
            of_one.commit()
            async with await Session.open(servers) as one, await Session.open(servers) as two:
                old = await claimed(storage, await zookeeper_claim(one, "one"))
                # "one" has read message 0, and is frozen before it writes. Its session ends.
                await two.delete(two.paths.owner("etl", *TP), ANY_VERSION)
                new = await claimed(storage, await zookeeper_claim(two, "two"))
                assert new.committed is None
                execute(of_two, "INSERT INTO results VALUES (0)")
                commit_in(storage, of_two, CommitRequest(new, 1, 1))
                of_two.commit()
                # "one" thaws.
                execute_late = "INSERT INTO results VALUES (0)"
                execute(of_one, execute_late)
                with pytest.raises(OwnershipLost):
                    commit_in(storage, of_one, CommitRequest(old, 1, 1))
                of_one.rollback()
                assert rows(connect, "SELECT value FROM results") == [(0,)]

    async def zookeeper_claim(session: Session, consumer_id: str) -> Ownership:
        outcome = await ownership.claim(session, "etl", TP, TOPIC_ID, consumer_id, freed=lambda: None)
        assert isinstance(outcome, Ownership)
        return outcome

    asyncio.run(scenario())


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Consumer:
    """Counts one message up in each partition it is asked to revoke."""

    def __init__(self) -> None:
        self.consuming: dict[TopicPartition, AssignedPartition] = {}

    async def assigned(self, partitions: Sequence[AssignedPartition]) -> None:
        self.consuming.update((assigned.tp, assigned) for assigned in partitions)

    async def revoke(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int] | None]:
        given = {tp: self.consuming.pop(tp) for tp in partitions}
        return {tp: (assigned.committed.offset + 1 if assigned.committed else 1, 1) for tp, assigned in given.items()}

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        for tp in partitions:
            del self.consuming[tp]

    def failed(self, error: MetamqError) -> None:
        raise error

    async def has(self, count: int) -> None:
        await until(lambda: len(self.consuming) == count)


def test_a_group_hands_its_offsets_on_through_the_database_and_waits_for_it(servers: str, connect: Connect) -> None:
    async def scenario() -> None:
        storage = DatabaseOffsets(connect)
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            await TopicStore(one).create(TopicConfig("t", {0: 2}))
            consumers = Consumer(), Consumer()
            listeners = [
                ZKLoadRebalanceListener(session, "etl", name, ["t"], "range", storage, consumer, Lease(session))
                for session, name, consumer in zip((one, two), ("one", "two"), consumers, strict=True)
            ]
            await listeners[0].start()
            # No table yet: it is tried again, for as long as it takes.
            await until(lambda: "offset table" in listeners[0].health().last_error)
            offsets_in(connect)
            await consumers[0].has(2)
            await listeners[1].start()
            await consumers[0].has(1)
            await consumers[1].has(1)
            assigned = consumers[1].consuming[TopicPartition("t", "0-1")]
            assert assigned.committed == CommittedOffset(1, 1, assigned.claim.topic_id)

            # The application commits results and offset itself.
            state = PartitionState(assigned.tp, assigned.claim, 0)
            with closing(connect()) as connection:
                for offset in (5, 6):
                    commit_in(storage, connection, CommitRequest(assigned.claim, offset, 1), state)
                    connection.commit()

            await listeners[0].stop()
            await consumers[1].has(2)
            await listeners[1].stop()
            assert rows(connect, "SELECT partition_name, next_offset FROM metamq_offsets ORDER BY 1") == [
                ("0-0", 2),
                ("0-1", 2),
            ]

    asyncio.run(scenario())
