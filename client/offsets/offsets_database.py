"""Offsets in a table of any DB-API database: in the same transaction as the results, each message counts exactly once.

One row per group and partition holds the claim generation of the last claim and the next offset. The fence is in the
rows, because ZooKeeper cannot stop a transaction that a frozen process left open:

    claim    UPDATE ... SET generation = mine WHERE generation < mine: waits at the row's lock for the open transaction
             of the previous owner, then locks that owner out; the offset is read only afterwards
    commit   UPDATE ... WHERE generation = mine AND next_offset = the one I know; if there is no such row, another
             owner, or another transaction of this one, has changed it: roll back results and offset together

`consumer.commit(..., connection=...)` runs in the application's own transaction, which the application commits or rolls
back; metamq.client.fetch.commit_in decides which offsets may be committed there.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from metamq.client.background import at_once
from metamq.client.checks import check_callables
from metamq.client.offsets.connections import AnyConnection, BlockingConnection, blocking_database_of, database_of
from metamq.client.offsets.dbapi import MYSQL, Database, check_paramstyle, check_table
from metamq.errors import MetamqError, OwnershipLost
from metamq.zk.groups.ownership import CommittedOffset, Ownership

if TYPE_CHECKING:
    from metamq.client.offsets.offsets import ClaimOutcome, CommitOutcome, CommitRequest
    from metamq.zk.partitions import TopicPartition

R = TypeVar("R")

DEFAULT_TABLE = "metamq_offsets"
NOTHING_COMMITTED = -1


def create_offsets_table(
    connection: BlockingConnection, table: str = DEFAULT_TABLE, *, paramstyle: str | None = None
) -> None:
    """Creates the table of DatabaseOffsets in this database, unless it exists, and commits."""
    hint = "`await metamq.aio.create_offsets_table(connection)` takes it."
    at_once(make_table(blocking_database_of(connection, paramstyle, hint), table))


async def make_table(database: Database, table: str) -> None:
    """Creates the table unless it exists. Commits. Raises the database's errors, and ConfigError for a wrong name."""
    await database.change(
        f"CREATE TABLE IF NOT EXISTS {check_table(table)} ("
        "group_name VARCHAR(200) NOT NULL, "
        "topic VARCHAR(200) NOT NULL, "
        "partition_name VARCHAR(32) NOT NULL, "
        "topic_id VARCHAR(16) NOT NULL, "
        "generation BIGINT NOT NULL, "
        "next_offset BIGINT NOT NULL, "
        "epoch BIGINT NOT NULL, "
        f"PRIMARY KEY (group_name, topic, partition_name)){database.table_options}"
    )
    await database.commit()


class DatabaseOffsets:
    """Offsets in `table` ("name" or "schema.name") of the database that `connect` connects to.

    `connect` is called in a worker thread, once per operation, for connections that metamq commits and closes itself.
    It may be asynchronous: `lambda: asyncpg.connect(dsn)`; then the connection is used in the consumer's loop.
    `create_offsets_table` makes the table. `paramstyle` None takes that of the connection's module. Tested with
    sqlite3, aiosqlite, asyncpg, both kinds of psycopg's connections, PyMySQL, mysqlclient, SQLAlchemy and Django.
    Several consumers may share one. Raises ConfigError for a wrong table name or paramstyle.
    """

    in_claim_node = False

    def __init__(
        self,
        connect: Callable[[], AnyConnection | Awaitable[AnyConnection]],
        *,
        table: str = DEFAULT_TABLE,
        paramstyle: str | None = None,
    ) -> None:
        check_callables(connect=connect)
        if paramstyle is not None:
            check_paramstyle(paramstyle)
        self._connect = connect
        self._table = check_table(table)
        self._paramstyle = paramstyle

    async def check(self) -> None:
        """Raises MetamqError if the table cannot be read, for example because it does not exist."""
        sql = f"SELECT next_offset FROM {self._table} WHERE 1 = 0"
        await self._run(lambda database: database.rows(sql))

    async def read(self, group: str, tps: Sequence[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset | None]:
        """Returns the committed offsets of a group, without a claim. Raises MetamqError if the database refuses."""

        async def read_all(database: Database) -> Mapping[TopicPartition, CommittedOffset | None]:
            rows = {tp: await self._row(database, group, tp) for tp in tps}
            return {tp: row[1] if row is not None else None for tp, row in rows.items()}

        return await self._run(read_all)

    async def claimed(self, claims: Sequence[Ownership]) -> Mapping[TopicPartition, ClaimOutcome]:
        """Raises the rows' generations to those of the claims, then reads the rows; see `OffsetStorage.claimed`.

        Waits for as long as an earlier owner's transaction locks a row.
        """
        ordered = sorted(claims, key=lambda claim: claim.tp)

        async def claim_all(database: Database) -> Mapping[TopicPartition, ClaimOutcome]:
            return {claim.tp: await self._claim(database, claim) for claim in ordered}

        return await self._run(claim_all)

    async def commit(self, requests: Sequence[CommitRequest]) -> Mapping[TopicPartition, CommitOutcome]:
        """Commits in a transaction of its own, for consumers whose results are not in this database."""
        ordered = sorted(requests, key=lambda request: request.claim.tp)

        async def commit_all(database: Database) -> Mapping[TopicPartition, CommitOutcome]:
            return {request.claim.tp: await self._commit_one(database, request) for request in ordered}

        try:
            return await self._run(commit_all)
        except MetamqError as error:
            return {request.claim.tp: error for request in requests}

    async def _update_in(self, database: Database, request: CommitRequest) -> bool:
        """Commits inside the current transaction of `database`, without ending it.

        Returns False if the row does not hold the generation of the request's claim and its last known offset. The
        database's own exceptions are passed on.
        """
        known = request.claim.committed
        return await self._update(database, request, known.offset if known else NOTHING_COMMITTED)

    async def _read_in(self, database: Database, claim: Ownership) -> CommittedOffset | None:
        """Returns the offset in the row, read inside the current transaction of `database`; None if there is none.

        Raises OwnershipLost if the row does not belong to this claim any more.
        """
        row = await self._row(database, claim.group, claim.tp)
        if row is None or row[0] != claim.generation:
            raise await self._lost(database, claim)
        return row[1]

    async def close(self) -> None:
        """Does nothing: no connection outlives its operation, and other consumers may use this storage."""

    async def _claim(self, database: Database, claim: Ownership) -> ClaimOutcome:
        key = (claim.group, *claim.tp)
        while True:
            await database.change(
                f"UPDATE {self._table} SET generation = {{}} "
                "WHERE group_name = {} AND topic = {} AND partition_name = {} AND generation < {}",
                (claim.generation, *key, claim.generation),
            )
            row = await self._row(database, claim.group, claim.tp)
            if row is None:
                # Of two claims that insert at the same time, the key refuses one, which is then repeated.
                await database.change(
                    f"INSERT INTO {self._table} "
                    "(group_name, topic, partition_name, topic_id, generation, next_offset, epoch) "
                    "VALUES ({}, {}, {}, {}, {}, {}, {})",
                    (*key, claim.topic_id, claim.generation, NOTHING_COMMITTED, 0),
                )
            # One transaction per row: no row stays locked while the next one waits for its previous owner.
            await database.commit()
            if row is None:
                return None
            generation, committed = row
            if generation == claim.generation:
                return committed
            if generation > claim.generation:
                reason = f"the database knows generation {generation}, ours is {claim.generation}"
                return OwnershipLost(*claim.tp, reason=reason)
            # Another owner with an earlier claim has inserted the row between our two statements.

    async def _commit_one(self, database: Database, request: CommitRequest) -> CommitOutcome:
        if not await self._update(database, request, known_offset=None):
            return await self._lost(database, request.claim)
        committed = CommittedOffset(request.offset, request.epoch, request.claim.topic_id)
        return replace(request.claim, committed=committed)

    async def _update(self, database: Database, request: CommitRequest, known_offset: int | None) -> bool:
        claim = request.claim
        new = (request.offset, request.epoch, claim.topic_id)
        row: tuple[object, ...] = (claim.group, *claim.tp, claim.generation)
        where = "WHERE group_name = {} AND topic = {} AND partition_name = {} AND generation = {}"
        if known_offset is not None:
            row, where = (*row, known_offset), f"{where} AND next_offset = {{}}"
        sql = f"UPDATE {self._table} SET next_offset = {{}}, epoch = {{}}, topic_id = {{}} {where}"
        changed = await database.change(sql, (*new, *row))
        if changed or database.dialect != MYSQL:
            return bool(changed)
        # MySQL does not count a row that has these values already.
        return bool(await database.rows(f"SELECT 1 FROM {self._table} {where} FOR UPDATE", row))

    async def _lost(self, database: Database, claim: Ownership) -> OwnershipLost:
        row = await self._row(database, claim.group, claim.tp)
        if row is None:
            reason = f"its row in {self._table} is gone"
        else:
            reason = f"the database knows generation {row[0]}, ours is {claim.generation}"
        return OwnershipLost(*claim.tp, reason=reason)

    async def _row(
        self, database: Database, group: str, tp: TopicPartition
    ) -> tuple[int, CommittedOffset | None] | None:
        sql = (
            f"SELECT generation, next_offset, epoch, topic_id FROM {self._table} "
            "WHERE group_name = {} AND topic = {} AND partition_name = {}"
        )
        if database.dialect == MYSQL:
            sql += " FOR UPDATE"  # without it: as of the begin of the application's transaction
        found = await database.rows(sql, (group, *tp))
        if not found:
            return None
        generation, next_offset, epoch, topic_id = found[0]
        committed = None if next_offset == NOTHING_COMMITTED else CommittedOffset(next_offset, epoch, topic_id)
        return generation, committed

    async def _run(self, operation: Callable[[Database], Coroutine[Any, Any, R]]) -> R:
        """Runs an operation in its own transaction: in a worker thread, or in this loop for an asyncio connection."""

        def begin() -> R | _ForLoop:
            opened = self._connect()
            if inspect.isawaitable(opened):
                return _ForLoop(opened)
            database = database_of(opened, self._paramstyle)
            if database.is_asyncio:
                return _ForLoop(opened)
            return at_once(_in_own_transaction(database, operation))

        try:
            result = await asyncio.to_thread(begin)
            if not isinstance(result, _ForLoop):
                return result
            opened = await result.opened if inspect.isawaitable(result.opened) else result.opened
            return await _in_own_transaction(database_of(opened, self._paramstyle), operation)
        except MetamqError:
            raise
        except Exception as error:  # each module of PEP 249 has its own exceptions, without a common base class
            reason = str(error).partition("\n")[0]
            refused = MetamqError(
                f"the offset table {self._table} could not be used: {type(error).__name__}: {reason}",
                hint="Check the database. `metamq.create_offsets_table(connection)` makes the table.",
                outcome="unknown",
            )
            refused.retriable = True
            raise refused from error


class _ForLoop(NamedTuple):
    """A connection for the loop, or an awaitable of it."""

    opened: Any


async def _in_own_transaction(database: Database, operation: Callable[[Database], Coroutine[Any, Any, R]]) -> R:
    try:
        try:
            await database.begin()
            result = await operation(database)
            await database.commit()
        except BaseException:
            await database.rollback()
            raise
        return result
    finally:
        await database.close()
