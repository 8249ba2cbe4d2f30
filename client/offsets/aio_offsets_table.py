"""The table of DatabaseOffsets, made by a connection of asyncio."""

from __future__ import annotations

from metamq.client.offsets.connections import AnyConnection, database_of
from metamq.client.offsets.dbapi import check_table
from metamq.client.offsets.offsets_database import DEFAULT_TABLE, make_table


async def create_offsets_table(
    connection: AnyConnection, table: str = DEFAULT_TABLE, *, paramstyle: str | None = None
) -> None:
    """Creates the table of DatabaseOffsets in this database, unless it exists, and commits."""
    database, table = database_of(connection, paramstyle), check_table(table)
    await database.begin()
    await make_table(database, table)
