"""The streaming reader of a query that cannot be run: says so when Spark first asks for something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from metamq.errors import MetamqError


class RefusedReader(DataSourceStreamReader):
    """Where streamReader() itself raises, Spark 4.3 ends the query with an error about a variable of its own."""

    def __init__(self, error: MetamqError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        """Raises ConfigError, as all of it."""
        raise self._error

    def latestOffset(self, *_args: Any) -> dict[str, Any]:
        """Asked first of a query that goes on."""
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Asked first where a batch was planned before."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Not reached."""
        raise self._error
