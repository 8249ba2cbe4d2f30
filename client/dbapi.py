"""SQL for any DB-API (PEP 249) connection: values are written the way its module wants them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from metamq.client.checks import wrong_type
from metamq.errors import ConfigError

_TABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,62}\.)?[A-Za-z_][A-Za-z0-9_]{0,62}")

_PLACEHOLDERS: Mapping[str, Callable[[int], str]] = {
    "qmark": lambda number: "?",
    "format": lambda number: "%s",
    "named": lambda number: f":p{number}",
    "pyformat": lambda number: f"%(p{number})s",
}


class Connection(Protocol):
    """What is used of a DB-API connection."""

    def cursor(self) -> Any: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


def check_connection(connection: object) -> None:
    """Raises WrongType where it is none."""
    if not all(hasattr(connection, name) for name in ("cursor", "commit", "rollback")):
        raise wrong_type("`connection`", "a DB-API connection", connection)


def check_table(table: str) -> str:
    """`table` itself, "name" or "schema.name". Raises ConfigError."""
    if not isinstance(table, str) or not _TABLE.fullmatch(table):
        raise ConfigError(f"{table!r} is no table name", hint='Use letters, digits and "_", as in "metamq_offsets".')
    return table


def execute(connection: Connection, sql: str, values: Sequence[object] = (), paramstyle: str | None = None) -> Any:
    """Runs `sql`, in which "{}" stands for a value; returns the cursor, for the caller to close.

    `paramstyle`: None takes that of the connection's module. Raises what the database raises, ConfigError.
    """
    if not values:
        cursor = connection.cursor()
        cursor.execute(sql)
        return cursor
    style = paramstyle or _paramstyle_of(connection)
    placeholders = [_PLACEHOLDERS[style](number) for number in range(1, len(values) + 1)]
    cursor = connection.cursor()
    if style in ("named", "pyformat"):
        named = {f"p{number}": value for number, value in enumerate(values, start=1)}
        cursor.execute(sql.format(*placeholders), named)
    else:
        cursor.execute(sql.format(*placeholders), tuple(values))
    return cursor


def columns_of(row: Any) -> Sequence[Any]:
    """Of a row, in their order, also where the connection gives mappings."""
    return tuple(row.values()) if isinstance(row, Mapping) else row


def _paramstyle_of(connection: Connection) -> str:
    """What the module that the connection's class comes from, or a package above it, says of itself."""
    for cls in type(connection).__mro__:  # an application may have derived its own
        name = cls.__module__
        while name:
            paramstyle = getattr(sys.modules.get(name), "paramstyle", None)
            if isinstance(paramstyle, str):
                return check_paramstyle(paramstyle)
            name = name.rpartition(".")[0]
    raise ConfigError(
        f"the module of {type(connection).__qualname__} does not tell its paramstyle", hint="Pass paramstyle=...."
    )


def check_paramstyle(paramstyle: str) -> str:
    """`paramstyle` itself. Raises ConfigError when it is not known."""
    if paramstyle not in _PLACEHOLDERS:
        raise ConfigError(
            f"paramstyle {paramstyle!r} is not among those that are known",
            hint=f"Of PEP 249's, there are {', '.join(_PLACEHOLDERS)}.",
        )
    return paramstyle
