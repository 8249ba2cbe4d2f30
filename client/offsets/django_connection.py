"""SQL on a connection of Django, whose transactions are the blocks of transaction.atomic().

A block of dbtx is itself a durable atomic(), that is an outermost one: when it ends, the database has decided. So the
block is refused within another atomic(), and inner ones are savepoints. Operations of metamq's own, as a Recoverer has
them, begin an atomic() with their first statement. In an atomic() of the application, statements are part of it.
"""

from __future__ import annotations

from typing import Any

from metamq.client.offsets.dbapi import Blocking
from metamq.errors import ConfigError


class DjangoConnection(Blocking):
    """django.db.connection, or connections[alias], in the thread that it belongs to."""

    def __init__(self, given: Any) -> None:
        from django.db import connections
        from django.utils.connection import ConnectionProxy

        own = connections[given.alias]
        if not isinstance(given, ConnectionProxy) and given is not own:
            raise ConfigError(
                f"the Django connection {given.alias!r} is of another thread",
                hint=f"Give `django.db.connections[{given.alias!r}]`, taken in the thread that uses it.",
            )
        super().__init__(own, "format")
        self.dialect = own.vendor
        self._atomic: Any = None
        """The atomic() that was begun here."""

    @property
    def began(self) -> bool:
        return self._atomic is not None

    async def begin(self) -> None:
        from django.db import transaction

        if not self.connection.in_atomic_block and not self.connection.get_autocommit():
            raise ConfigError(
                "Django's autocommit is off: transaction.atomic() would commit nothing",
                hint="Leave AUTOCOMMIT and set_autocommit() alone: the block begins and commits the transaction.",
            )
        atomic = transaction.atomic(self.connection.alias, durable=True)
        try:
            atomic.__enter__()
        except RuntimeError as error:
            raise ConfigError(
                "the connection is in transaction.atomic(), which would be committed later than the block",
                hint="Leave it out: the block is an atomic() itself. With ATOMIC_REQUESTS decorate the view with "
                "transaction.non_atomic_requests.",
            ) from error
        self._atomic = atomic

    async def _executed(self, sql: str, values: Any) -> Any:
        if self.connection.get_autocommit():
            await self.begin()
        return await super()._executed(sql, values)

    async def driver(self) -> Any:
        self.connection.ensure_connection()
        return self.connection.connection

    async def _autocommit(self) -> bool:
        return False  # begin() begins

    async def check_in_transaction(self) -> None:
        if self.connection.get_autocommit():
            raise ConfigError(
                "the Django connection is in no transaction: the offsets would be stored without the results",
                hint="Work and commit the offsets in one `with transaction.atomic()`.",
            )

    async def commit(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            atomic.__exit__(None, None, None)

    async def rollback(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            self.connection.set_rollback(True)
            atomic.__exit__(None, None, None)
