"""Django without a project: connections to databases that a test makes, by an alias for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings
from django.db import connections
from psycopg.conninfo import conninfo_to_dict

_numbers = itertools.count()


@contextmanager
def django_database(**database: Any) -> Iterator[str]:
    """Adds a database, as in DATABASES; the alias is gone at the end."""
    if not settings.configured:
        settings.configure(DATABASES={}, USE_TZ=True)
        django.setup()
    alias = f"test_{next(_numbers)}"
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: database})[alias]
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


def on_postgres(dsn: str, schema: str = "public") -> dict[str, Any]:
    """Such a database in the server of this connection string."""
    named = conninfo_to_dict(dsn)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": named["host"],
        "USER": named["user"],
        "NAME": named["dbname"],
        "OPTIONS": {"options": f"-c search_path={schema}"},
    }
