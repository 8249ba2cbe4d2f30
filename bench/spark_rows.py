"""Rows that Spark makes itself, in the JVM, all different; and the time that Spark takes to read all rows."""

from __future__ import annotations

import time
from typing import Any

ROWS = 6_000_000
VALUE_BYTES = 100
PARTITIONS = 8
"""Also the number of tasks: four per core, so that the last task runs alone for a short time only."""


def made(spark: Any) -> Any:
    """Returns the rows, in a column `value`."""
    ids = spark.range(0, ROWS, 1, PARTITIONS)
    return ids.selectExpr(f"cast(lpad(string(id), {VALUE_BYTES}, '0') as binary) as value")


def seconds_of(frame: Any) -> float:
    """Returns the seconds that Spark takes to read every row and drop it."""
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began
