"""A scan that stands still in the middle of its tasks, so that something can happen to them there."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from metamq.testing import Cluster
from tests.parts import wait_until
from tests.spark.conftest import new_topic, send
from tests.spark.test_stream_source import numbers

MESSAGES = 60_000


def waiting_in_the_middle(place: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: behind its first batch each task says that it has begun, and waits until `place`/go is there."""

    def each(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import time

        for number, batch in enumerate(batches):
            if number == 1:
                open(f"{place}/{os.getpid()}.begun", "w").close()
                while not os.path.exists(f"{place}/go"):
                    time.sleep(0.01)
            yield batch

    return each


def begun(place: Path) -> int:
    """How many attempts at tasks got to the middle."""
    return len(list(place.glob("*.begun")))


@contextlib.contextmanager
def scan_in_the_middle(spark: Any, running: Cluster, place: Path) -> Iterator[None]:
    """A batch query of two tasks, both in the middle of their ranges. Behind the block each message came once."""
    topic = new_topic(running, 1)
    send(running, topic, [number.ljust(300) for number in numbers(0, MESSAGES)])
    frame = spark.read.format("metamq").options(zookeeper=running.zookeeper, subscribe=topic, minPartitions=2).load()
    counted = frame.select("value").mapInArrow(waiting_in_the_middle(str(place)), "value binary")
    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(counted.collect)
        try:
            wait_until(lambda: begun(place) == 2 or collecting.done(), 90, "two tasks")
            yield
        finally:
            (place / "go").touch()
        rows = collecting.result(120)
    assert Counter(bytes(row.value).rstrip() for row in rows) == Counter(numbers(0, MESSAGES))
