"""DatabaseOffsets whose table is there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

from metamq import DatabaseOffsets, aio, create_offsets_table


def offsets_in(connect: Callable[[], Any], **settings: Any) -> DatabaseOffsets:
    """With blocking connections."""
    with closing(connect()) as connection:
        create_offsets_table(connection, **settings)
    return DatabaseOffsets(connect, **settings)


async def aio_offsets_in(connect: Callable[[], Awaitable[Any]]) -> DatabaseOffsets:
    """With connections of asyncio."""
    connection = await connect()
    try:
        await aio.create_offsets_table(connection)
    finally:
        await connection.close()
    return DatabaseOffsets(connect)
