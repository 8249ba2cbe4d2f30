"""Databases of tests, by SQLAlchemy's drivers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict

from tests.postgres import new_schema


def url(driver: str, request: pytest.FixtureRequest, folder: Path) -> tuple[sqlalchemy.URL, dict[str, Any]]:
    """Of a database that only this test has; and the arguments to connect with."""
    if "sqlite" in driver:
        return sqlalchemy.URL.create(driver, database=str(folder / "shop.db")), {"timeout": 1}
    server = request.getfixturevalue("postgres")
    named, schema = conninfo_to_dict(server), new_schema(server)
    place = {"host": str(named["host"])}
    arguments: dict[str, Any] = (
        {"server_settings": {"search_path": schema}} if "asyncpg" in driver else {"options": f"-c search_path={schema}"}
    )
    found = sqlalchemy.URL.create(driver, str(named["user"]), database=str(named["dbname"]), query=place)
    return found, arguments
