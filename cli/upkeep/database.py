"""The option --database: a URL of SQLite or PostgreSQL, or a function of the application that opens a connection.

The function is the way to every other database, and needs no driver here. A URL may have a password, so no error
repeats it.
"""

from __future__ import annotations

import importlib
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from metamq.cli.show.user_objects import load
from metamq.errors import ConfigError

Connect = Callable[[], Any]
SQLITE_WAIT_S = 30.0
_SQLITE = "sqlite:///"
_POSTGRESQL = ("postgresql://", "postgres://")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
FORMS = "sqlite:///shop.db, sqlite:////var/lib/shop.db, postgresql://host/name, or MODULE:FUNCTION"
HELP = (
    "The database: sqlite:///FILE, postgresql://HOST/NAME, or MODULE:FUNCTION, a function that opens a connection and "
    "takes no argument."
)


def parse_database(text: str) -> Connect:
    """Returns a function that opens a connection. Raises ConfigError if nothing can open it."""
    if text.startswith(_SQLITE):
        return _sqlite(Path(unquote(text.removeprefix(_SQLITE))))
    if text.startswith(_POSTGRESQL):
        return _postgresql(text)
    if "://" in text:
        kind = text.partition("://")[0]
        known = next((form for form in (_SQLITE, _POSTGRESQL[0]) if kind.startswith(form.partition(":")[0])), "")
        hint = f"Write {known}..." if known else "Give MODULE:FUNCTION, a function that opens a connection."
        raise ConfigError(f"a URL of {kind} is not supported", hint=hint)
    if not _FUNCTION.fullmatch(text):
        raise ConfigError(f"this is not a database: write it like {FORMS}")
    return _function(text)


def _sqlite(file: Path) -> Connect:
    if not file.is_file():  # sqlite3 would make an empty database
        raise ConfigError(f"there is no file {file}", hint="Three slashes begin a relative path, four an absolute one.")
    return lambda: sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", timeout=SQLITE_WAIT_S, uri=True)


def _postgresql(url: str) -> Connect:
    try:
        psycopg = importlib.import_module("psycopg")
    except ImportError as error:
        raise ConfigError("psycopg is not installed here", hint="`pip install 'psycopg[binary]'`") from error
    return lambda: psycopg.connect(url)


def _function(path: str) -> Connect:
    connect: Connect = load(path)
    if not callable(connect):
        raise ConfigError(f"{path} is not a function", hint="It must open a connection at each call.")
    return connect
