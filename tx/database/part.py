"""Part: a resource in a transaction of a Coordinator, from its connection to the end of its branch."""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, dataclass
from typing import Any

from metamq.client.offsets.dbapi import settled
from metamq.errors import RolledBack
from metamq.wire.xa import XACode

log = logging.getLogger("metamq.tx")

INTRANS = 2
"""libpq's status of a transaction that can be prepared. tpc_prepare() of a failed one returns without an error."""


@dataclass(eq=False)
class Part:
    """A resource in a transaction."""

    name: str
    connection: Any
    _: KW_ONLY
    is_own: bool
    """True if the connection was opened for this transaction; it is closed with the transaction."""
    xid: Any
    prepared: bool = False
    ended: bool = False
    """True if the resource has ended its part: it is committed or rolled back."""

    @property
    def has_failed(self) -> bool:
        """True if psycopg's transaction has failed: then it would only look prepared, or roll back without an error."""
        status = getattr(getattr(self.connection, "info", None), "transaction_status", None)
        return status is not None and int(status) != INTRANS

    async def prepare(self) -> bool:
        """Prepares the part. Returns False if there is nothing to commit."""
        if self.has_failed:
            raise RolledBack(self.xid, XACode.RBROLLBACK, f"the transaction of {self.name!r} has failed before")
        self.prepared = await settled(self.connection.tpc_prepare()) is not False
        return self.prepared

    async def commit(self) -> None:
        """Commits the part, prepared or not. Raises the resource's errors."""
        await settled(self.connection.tpc_commit())
        self.ended = True

    def abandon(self) -> None:
        """Frees a Producer from a transaction that did not end, as after Ctrl-C. A connection is closed instead."""
        if not self.ended and hasattr(self.connection, "_abandon"):
            self.connection._abandon()

    async def close(self) -> None:
        """Closes the connection if it was opened for this transaction."""
        if self.is_own:
            try:
                await settled(self.connection.close())
            except Exception as error:  # the part is over, even if the connection does not close
                log.info("a connection of resource %r does not close: %s", self.name, error)
