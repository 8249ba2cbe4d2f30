"""Reads a topic with DuckDB in a process that the system allows 1 GB of memory. Prints its figures as JSON.

    python bench/scan_memory.py ZOOKEEPER TOPIC files|sent

The limit (RLIMIT_DATA) counts all that the process allocates, also what it has not touched. The peak is of resident
memory, with Python, DuckDB and pyarrow. The query reads every value.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import duckdb

import metamq

LIMIT_BYTES = 1_000_000_000
QUERY = "SELECT count(*), sum(octet_length(value)), max(value) FROM messages"


def as_elsewhere(table: metamq.Scan) -> metamq.Scan:
    """Returns the same scan as on another machine: the broker sends its messages."""
    return metamq.Scan([task._replace(in_place=False) for task in table._tasks], table.schema)


def peak_bytes() -> int:
    """Returns the peak of this process's resident memory. Another figure, ru_maxrss, may be that of its parent."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def main(zookeeper: str, topic: str, way: str) -> None:
    """Reads the topic, and prints the figures."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    before = peak_bytes()
    began = time.perf_counter()
    messages = metamq.scan(topic, zookeeper=zookeeper)
    if way == "sent":
        messages = as_elsewhere(messages)
    found = duckdb.execute(QUERY).fetchone()
    took_s = time.perf_counter() - began
    assert found is not None
    figures = {"messages": found[0], "value_bytes": int(found[1]), "s": took_s}
    print(json.dumps({**figures, "before_bytes": before, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
