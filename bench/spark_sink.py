"""Spark's sink compared with the query that makes its rows, and exactly once compared with at least once.

The same rows are written nowhere (`noop`), at least once and exactly once, one after another. The time is what a user
waits for: until `save()` returns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from flushed import until_flushed
from settle import settle
from spark_rows import PARTITIONS, ROWS, VALUE_BYTES, made, seconds_of

from metamq.testing import Cluster

Say = Callable[[str], None]

DELIVERIES = ("at_least_once", "exactly_once")


class Sink:
    """Writes the same rows several times, each time into a new topic."""

    def __init__(self, running: Cluster, spark: Any) -> None:
        self._running = running
        self._rows = made(spark)
        self._names = (f"sink-{number}" for number in count())

    def rate(self, delivery: str) -> float:
        """Returns rows per second; with `delivery` "noop", those of the query alone."""
        if delivery == "noop":
            return ROWS / seconds_of(self._rows)
        topic = next(self._names)
        self._running.create_topic(topic, partitions=PARTITIONS)
        options = {"zookeeper": self._running.zookeeper, "topic": topic, "delivery": delivery}
        settle(ROWS * VALUE_BYTES)
        began = time.perf_counter()
        self._rows.write.format("metamq").options(**options).mode("append").save()
        took = time.perf_counter() - began
        until_flushed(self._running.broker)
        with self._running.admin() as admin:
            stored = admin.describe_topic(topic).messages
            admin.delete(topic)
        assert stored == ROWS, f"{delivery}: {stored} of {ROWS} rows are in the topic"
        return ROWS / took


def measure(running: Cluster, spark: Any, rounds: int, say: Say) -> dict[str, float]:
    """Returns rows per second of each way, and their ratios."""
    sink = Sink(running, spark)
    ways = ("noop", *DELIVERIES)
    for way in ways:
        sink.rate(way)
    measured = []
    for number in range(rounds):
        order = ways if number % 2 == 0 else ways[::-1]
        rates = {way: sink.rate(way) for way in order}
        least, exactly = rates["at_least_once"], rates["exactly_once"]
        measured.append({**rates, "least_to_noop": least / rates["noop"], "exactly_to_least": exactly / least})
        say("sink: " + ", ".join(f"{way} {rate / 1e6:.2f} M rows/s" for way, rate in rates.items()))
    medians = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    return {"value_bytes": VALUE_BYTES, **medians}
