"""Reads one topic as a table, beside a consumer and beside the plain read of the same files. Prints rates.

    python bench/scan.py [rounds]

All of them read the same messages from the page cache, one after another, in this process.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flushed import until_flushed
from settle import settle
from throughput import BYTES, batch_arrow, batch_values, consume, send_many

import metamq
from metamq.testing import Cluster, cluster

PIECE = 1024 * 1024
PARTITIONS = 4


def scan(running: Cluster, count: int, *, in_place: bool, columns: list[str] | None = None) -> float:
    """Measures a whole scan, with the requests for its bounds."""
    began = time.perf_counter()
    table = metamq.scan("table", columns=columns, zookeeper=running.zookeeper)
    if not in_place:  # as on another machine
        table = metamq.Scan([task._replace(in_place=False) for task in table._tasks], table.schema)
    assert sum(batch.num_rows for batch in table) == count
    return count / (time.perf_counter() - began)


def read_files(folder: Path, count: int) -> float:
    """Measures the plain read of the topic's files, in messages per second."""
    buffer = bytearray(PIECE)
    began = time.perf_counter()
    for path in folder.rglob("topics/table@*/*/*.log"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return count / (time.perf_counter() - began)


def measure(size: int) -> dict[str, float]:
    """Measures every way once, on a new cluster."""
    count = BYTES[size] // size
    with tempfile.TemporaryDirectory() as folder, cluster(folder=Path(folder)) as running:
        running.create_topic("table", partitions=PARTITIONS)
        settle(BYTES[size])
        with running.producer() as producer:
            send_many(producer, "table", size)
        until_flushed(running.broker)
        ways: dict[str, Callable[[], float]] = {
            "plain read of the files": lambda: read_files(Path(folder), count),
            "consumer, values": lambda: consume(running, "table", count, batch_values),
            "consumer, arrow": lambda: consume(running, "table", count, batch_arrow),
            "scan, through the broker": lambda: scan(running, count, in_place=False),
            "scan, in the files": lambda: scan(running, count, in_place=True),
            "scan, only offsets": lambda: scan(running, count, in_place=True, columns=["offset"]),
        }
        return {name: way() for name, way in ways.items()}


def main() -> None:
    """Prints the medians of some rounds."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(f"{os.cpu_count()} cores, {PARTITIONS} partitions, medians of {rounds} rounds")
    for size in BYTES:
        measured = [measure(size) for _ in range(rounds)]
        for name in measured[0]:
            rate = statistics.median(one[name] for one in measured)
            print(f"{size:5} B  {name:26} {rate / 1e6:7.2f} M/s {rate * size / 1e6:9,.0f} MB/s")


if __name__ == "__main__":
    main()
