"""Start-up, recovery and memory of a broker, by the size of its logs and the number of its partitions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from metamq import FlushEvery
from metamq.testing import Cluster, cluster

SIZES_MB = (0, 256, 1024)
MANY = 1000


def _start(running: Cluster) -> float:
    began = time.perf_counter()
    running.broker.start()
    return time.perf_counter() - began


def _rss_mb(running: Cluster) -> float:
    return float(psutil.Process(running.broker.pid).memory_info().rss) / 1e6


def against_size(say: Callable[[str], None]) -> list[dict[str, float]]:
    """Measures seconds from exec to serving, after a clean stop and after kill -9, for growing logs on 4 partitions.

    The first kill -9 comes before any flush: recovery checks the whole log. The second one comes after all flushes.
    """
    rows = []
    for size_mb in SIZES_MB:
        with cluster() as running:
            running.create_topic("grown", partitions=4, flush=FlushEvery(messages=1 << 31, ms=24 * 3600 * 1000))
            if size_mb:
                with running.producer() as producer:
                    producer.send_many("grown", [os.urandom(1024)] * (size_mb * 1024)).result()
            running.broker.kill()
            unflushed_s = _start(running)
            running.broker.stop()
            clean_s = _start(running)
            running.broker.kill()
            killed_s = _start(running)
            row = {"log_mb": size_mb, "after_clean_stop_s": clean_s, "after_kill_s": killed_s}
            rows.append({**row, "after_kill_unflushed_s": unflushed_s})
            say(
                f"log of {size_mb:5} MB: up in {clean_s:.2f} s after a clean stop, {killed_s:.2f} s after kill -9, "
                f"{unflushed_s:.2f} s if nothing was flushed"
            )
    return rows


def many_partitions(say: Callable[[str], None]) -> dict[str, Any]:
    """Measures memory and restart of a broker with 1,000 partitions, each with data."""
    with cluster() as running:
        empty_mb = _rss_mb(running)
        running.create_topic("many", partitions=MANY)
        with running.producer(batch_bytes=1000) as producer:
            producer.send_many("many", [os.urandom(1000)] * (4 * MANY)).result()
        used_mb = _rss_mb(running)
        running.broker.stop()
        restart_s = _start(running)
        restarted_mb = _rss_mb(running)
    say(f"{MANY} partitions: {used_mb:.0f} MB ({empty_mb:.0f} MB without), restart {restart_s:.2f} s")
    return {
        "partitions": MANY,
        "empty_mb": empty_mb,
        "used_mb": used_mb,
        "restarted_mb": restarted_mb,
        "kb_per_partition": (used_mb - empty_mb) * 1000 / MANY,
        "restart_after_clean_stop_s": restart_s,
    }
