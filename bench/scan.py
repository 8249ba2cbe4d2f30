"""A topic read as a table, beside consumers and the physical limits; and the memory of a scan of a large topic.

All ways read the same messages from the page cache, in turns, in this process. Every value is different. The limits are
the plain read of the topic's files, and the raw read and send of bench/raw.py.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import raw
import scan_memory
from flushed import until_flushed
from settle import settle
from throughput import BYTES, batch_arrow, batch_values, consume

import metamq
from metamq.testing import Cluster, cluster

Say = Callable[[str], None]

PIECE = 1024 * 1024
FILLED_AT_ONCE = 64 * PIECE
PARTITIONS = 4
GIGABYTES = 2.0
LARGE_VALUE_BYTES = 1000
LIMIT_S = 570.0


def fill(running: Cluster, topic: str, size: int, total: float) -> int:
    """Makes the topic and its messages, whose values all differ; returns their number."""
    running.create_topic(topic, partitions=PARTITIONS)
    settle(BYTES[1024])
    count, left = 0, round(total) // size
    with running.producer() as producer:
        while left:
            part = min(left, FILLED_AT_ONCE // size)
            data = os.urandom(part * size)
            producer.send_many(topic, [data[at : at + size] for at in range(0, len(data), size)]).result()
            count, left = count + part, left - part
    until_flushed(running.broker)
    return count


def scan(running: Cluster, topic: str, count: int, *, in_place: bool, columns: list[str] | None = None) -> float:
    """Measures a whole scan, with the requests for its bounds, in messages per second."""
    began = time.perf_counter()
    table = metamq.scan(topic, columns=columns, zookeeper=running.zookeeper)
    if not in_place:
        table = scan_memory.as_elsewhere(table)
    assert sum(batch.num_rows for batch in table) == count
    return count / (time.perf_counter() - began)


def read_files(folder: Path, topic: str, count: int) -> float:
    """Measures the plain read of the topic's files, in messages per second."""
    buffer, paths = bytearray(PIECE), [*folder.rglob(f"topics/{topic}@*/*/*.log")]
    assert paths
    began = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return count / (time.perf_counter() - began)


def speeds(running: Cluster, folder: Path, size: int, rounds: int, say: Say) -> dict[str, float]:
    """Measures every way, in messages per second, and the ratios of each round. The first round is a warm-up."""
    topic = f"table-{size}"
    count = fill(running, topic, size, BYTES[size])
    ways: dict[str, Callable[[], float]] = {
        "plain_read": lambda: read_files(folder, topic, count),
        "files": lambda: scan(running, topic, count, in_place=True),
        "sent": lambda: scan(running, topic, count, in_place=False),
        "arrow": lambda: consume(running, topic, count, batch_arrow),
        "values": lambda: consume(running, topic, count, batch_values),
        "offsets": lambda: scan(running, topic, count, in_place=True, columns=["offset"]),
    }
    found: list[dict[str, float]] = []
    for number in range(rounds + 1):
        one = {name: way() for name, way in ways.items()}
        one["read_send"] = raw.measure(str(folder))["read_send"] / size
        one["files_to_read"] = one["files"] / one["plain_read"]
        one["sent_to_read_send"] = one["sent"] / one["read_send"]
        one["sent_to_arrow"] = one["sent"] / one["arrow"]
        if number:
            found.append(one)
            say(f"{size} B, round {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in one.items()))
    return {"message_bytes": size, **{name: statistics.median(one[name] for one in found) for name in found[0]}}


def memory(gigabytes: float, rounds: int, say: Say) -> dict[str, Any]:
    """Measures the peak memory of a process that reads a large topic with DuckDB (bench/scan_memory.py).

    Each round is a new process for each way. Peaks are the largest of all rounds, seconds are medians.
    """
    with tempfile.TemporaryDirectory() as folder, cluster(folder=Path(folder)) as running:
        count = fill(running, "large", LARGE_VALUE_BYTES, gigabytes * 1e9)
        found: dict[str, list[dict[str, float]]] = {"files": [], "sent": []}
        for _ in range(rounds):
            for way, rows in found.items():
                command = [sys.executable, scan_memory.__file__, running.zookeeper, "large", way]
                done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
                if done.returncode:
                    raise RuntimeError(f"the scan of {gigabytes:g} GB failed: {done.stderr.decode()}")
                rows.append(json.loads(done.stdout))
                assert rows[-1]["messages"] == count
                assert rows[-1]["value_bytes"] == count * LARGE_VALUE_BYTES
                say(f"{gigabytes:g} GB, {way}: " + ", ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()))
    results: dict[str, Any] = {"messages": count, "value_bytes": LARGE_VALUE_BYTES, "limit": scan_memory.LIMIT_BYTES}
    for way, rows in found.items():
        results[way] = {
            "s": statistics.median(one["s"] for one in rows),
            "before_bytes": max(one["before_bytes"] for one in rows),
            "peak_bytes": max(one["peak_bytes"] for one in rows),
        }
    return results


def measure(rounds: int, gigabytes: float, say: Say) -> dict[str, Any]:
    """Measures everything, on one cluster for the speeds and another one for the memory."""
    with tempfile.TemporaryDirectory() as folder, cluster(folder=Path(folder)) as running:
        rows = [speeds(running, Path(folder), size, rounds, say) for size in BYTES]
    return {"speeds": rows, "memory": memory(gigabytes, rounds, say)}
