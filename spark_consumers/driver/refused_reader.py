"""The streaming reader of a query that cannot run: it raises the error when Spark first calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    from metamq.errors import MetamqError


class RefusedReader(DataSourceStreamReader):
    """A reader that only raises. If streamReader() itself raises, Spark 4.3 hides that behind an error of its own."""

    def __init__(self, error: MetamqError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        """Raises the error, as all methods do."""
        raise self._error

    def latestOffset(self, *_args: Any) -> dict[str, Any]:
        """Raises the error. Spark calls this first for a query that continues."""
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Raises the error. Spark calls this first if a batch was planned before."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Raises the error. Spark does not call this."""
        raise self._error
