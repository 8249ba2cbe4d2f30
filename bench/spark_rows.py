"""Rows that Spark makes itself, in the JVM, all different; and how long Spark takes to have every row of something."""

from __future__ import annotations

import time
from typing import Any

ROWS = 6_000_000
VALUE_BYTES = 100
PARTITIONS = 8
"""And tasks: four a core, so that the last one runs alone for a small part of the time."""


def made(spark: Any) -> Any:
    """The rows, in a column `value`."""
    ids = spark.range(0, ROWS, 1, PARTITIONS)
    return ids.selectExpr(f"cast(lpad(string(id), {VALUE_BYTES}, '0') as binary) as value")


def seconds_of(frame: Any) -> float:
    """Until Spark has had every row of it, and thrown it away."""
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began
