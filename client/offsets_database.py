"""Offsets in a table of any DB-API database: in the same transaction as the results, each message counts exactly once.

One row per group and partition holds the generation of the last claim and the next offset. The fence is in the rows,
since ZooKeeper cannot stop a transaction that a frozen process left open:

    claim    UPDATE ... SET generation = mine WHERE generation < mine: waits for the open transaction of the owner
             before on the row's lock, then shuts it out; only then is the offset read
    commit   UPDATE ... WHERE generation = mine AND next_offset = what I know; no row means that another owner, or
             another transaction of this one, was there: roll back results and offset together

`consumer.commit(..., connection=...)` runs in the application's own transaction and leaves commit and rollback to it;
metamq.client.commit_in decides what may be counted there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

from metamq.client.checks import check_callables
from metamq.client.dbapi import Connection, check_paramstyle, check_table, columns_of, execute
from metamq.client.offsets import ClaimOutcome, CommitOutcome, CommitRequest
from metamq.errors import MetamqError, OwnershipLost
from metamq.zk.ownership import Claim, Committed
from metamq.zk.partitions import TopicPartition

R = TypeVar("R")

NOTHING_COMMITTED = -1


class DatabaseOffsets:
    """Offsets in `table` ("name" or "schema.name") of the database that `connect` connects to.

    `connect` is called in a worker thread, once per operation, for connections that metamq commits and closes itself.
    `paramstyle` is taken from the connection's module when None. Tried with sqlite3 and psycopg.
    Raises ConfigError for a wrong table name or paramstyle.
    """

    in_claim_node = False

    def __init__(
        self,
        connect: Callable[[], Connection],
        *,
        table: str = "metamq_offsets",
        paramstyle: str | None = None,
    ) -> None:
        check_callables(connect=connect)
        if paramstyle is not None:
            check_paramstyle(paramstyle)
        self._connect = connect
        self._table = check_table(table)
        self._paramstyle = paramstyle

    async def create_table(self) -> None:
        """Make the table unless it is there. Raises MetamqError when the database refuses."""
        await self._run(
            lambda connection: self._execute(
                connection,
                f"CREATE TABLE IF NOT EXISTS {self._table} ("
                "group_name VARCHAR(200) NOT NULL, "
                "topic VARCHAR(200) NOT NULL, "
                "partition_name VARCHAR(32) NOT NULL, "
                "topic_id VARCHAR(16) NOT NULL, "
                "generation BIGINT NOT NULL, "
                "next_offset BIGINT NOT NULL, "
                "epoch BIGINT NOT NULL, "
                "PRIMARY KEY (group_name, topic, partition_name))",
            ).close()
        )

    async def check(self) -> None:
        """Raise MetamqError when the table cannot be read, as when it was not made."""
        sql = f"SELECT next_offset FROM {self._table} WHERE 1 = 0"
        await self._run(lambda connection: self._execute(connection, sql).close())

    async def claimed(self, claims: Sequence[Claim]) -> Mapping[TopicPartition, ClaimOutcome]:
        """Raise the rows' generations to the claims', then read them; see `OffsetStorage.claimed`.

        Waits for as long as an earlier owner's transaction holds a row.
        """
        ordered = sorted(claims, key=lambda claim: claim.tp)
        return await self._run(lambda connection: {claim.tp: self._claim(connection, claim) for claim in ordered})

    async def commit(self, requests: Sequence[CommitRequest]) -> Mapping[TopicPartition, CommitOutcome]:
        """Commit in one transaction of our own, for consumers whose results are not in this database."""
        ordered = sorted(requests, key=lambda request: request.claim.tp)
        try:
            return await self._run(
                lambda connection: {request.claim.tp: self._commit_one(connection, request) for request in ordered}
            )
        except MetamqError as error:
            return {request.claim.tp: error for request in requests}

    def _update_in(self, connection: Connection, request: CommitRequest) -> bool:
        """Commit inside the transaction that `connection` is in, without ending it; False when the row does not hold
        the generation of the request's claim, and the offset last known by it.

        The database's own exceptions go through as they are. Blocks; to be called in the thread that uses `connection`.
        """
        known = request.claim.committed
        return self._update(connection, request, known.offset if known else NOTHING_COMMITTED)

    def _read_in(self, connection: Connection, claim: Claim) -> Committed | None:
        """What the row holds, read inside the transaction that `connection` is in; None for nothing.

        Raises OwnershipLost when the row is not this claim's any more.
        """
        row = self._row(connection, claim)
        if row is None or row[0] != claim.generation:
            raise self._lost(connection, claim)
        return row[1]

    async def close(self) -> None:
        """Nothing to do: no connection outlives its operation, and other consumers may use this one."""

    def _claim(self, connection: Connection, claim: Claim) -> ClaimOutcome:
        key = (claim.group, *claim.tp)
        while True:
            self._change(
                connection,
                f"UPDATE {self._table} SET generation = {{}} "
                "WHERE group_name = {} AND topic = {} AND partition_name = {} AND generation < {}",
                (claim.generation, *key, claim.generation),
            )
            row = self._row(connection, claim)
            if row is None:
                # Of two claims that insert at the same time, the key refuses one, which is then repeated.
                self._change(
                    connection,
                    f"INSERT INTO {self._table} "
                    "(group_name, topic, partition_name, topic_id, generation, next_offset, epoch) "
                    "VALUES ({}, {}, {}, {}, {}, {}, {})",
                    (*key, claim.topic_id, claim.generation, NOTHING_COMMITTED, 0),
                )
            # A transaction for each row: no row stays locked while the next one waits for its earlier owner.
            connection.commit()
            if row is None:
                return None
            generation, committed = row
            if generation == claim.generation:
                return committed
            if generation > claim.generation:
                reason = f"the database knows generation {generation}, ours is {claim.generation}"
                return OwnershipLost(*claim.tp, reason=reason)
            # Somebody with an earlier claim inserted the row between our two statements.

    def _commit_one(self, connection: Connection, request: CommitRequest) -> CommitOutcome:
        if not self._update(connection, request, known_offset=None):
            return self._lost(connection, request.claim)
        committed = Committed(request.offset, request.epoch, request.claim.topic_id)
        return replace(request.claim, committed=committed)

    def _update(self, connection: Connection, request: CommitRequest, known_offset: int | None) -> bool:
        claim = request.claim
        sql = (
            f"UPDATE {self._table} SET next_offset = {{}}, epoch = {{}}, topic_id = {{}} "
            "WHERE group_name = {} AND topic = {} AND partition_name = {} AND generation = {}"
        )
        values = (request.offset, request.epoch, claim.topic_id, claim.group, *claim.tp, claim.generation)
        if known_offset is None:
            return self._change(connection, sql, values)
        return self._change(connection, sql + " AND next_offset = {}", (*values, known_offset))

    def _lost(self, connection: Connection, claim: Claim) -> OwnershipLost:
        row = self._row(connection, claim)
        if row is None:
            reason = f"its row in {self._table} is gone"
        else:
            reason = f"the database knows generation {row[0]}, ours is {claim.generation}"
        return OwnershipLost(*claim.tp, reason=reason)

    def _row(self, connection: Connection, claim: Claim) -> tuple[int, Committed | None] | None:
        sql = (
            f"SELECT generation, next_offset, epoch, topic_id FROM {self._table} "
            "WHERE group_name = {} AND topic = {} AND partition_name = {}"
        )
        with closing(self._execute(connection, sql, (claim.group, *claim.tp))) as cursor:
            row = cursor.fetchone()
        if row is None:
            return None
        generation, next_offset, epoch, topic_id = columns_of(row)
        committed = None if next_offset == NOTHING_COMMITTED else Committed(next_offset, epoch, topic_id)
        return generation, committed

    def _change(self, connection: Connection, sql: str, values: Sequence[object]) -> bool:
        with closing(self._execute(connection, sql, values)) as cursor:
            return bool(cursor.rowcount)

    def _execute(self, connection: Connection, sql: str, values: Sequence[object] = ()) -> Any:
        return execute(connection, sql, values, self._paramstyle)

    async def _run(self, operation: Callable[[Connection], R]) -> R:
        return await asyncio.to_thread(self._in_own_transaction, operation)

    def _in_own_transaction(self, operation: Callable[[Connection], R]) -> R:
        try:
            with closing(self._connect()) as connection:
                try:
                    result = operation(connection)
                    connection.commit()
                except BaseException:
                    connection.rollback()
                    raise
                return result
        except MetamqError:
            raise
        except Exception as error:  # PEP 249 has a tree of exceptions per module, with no common root
            reason = str(error).partition("\n")[0]
            refused = MetamqError(
                f"the offset table {self._table} could not be used: {type(error).__name__}: {reason}",
                hint="Is the database up? `asyncio.run(DatabaseOffsets(connect).create_table())` makes the table.",
                outcome="unknown",
            )
            refused.retriable = True
            raise refused from error
