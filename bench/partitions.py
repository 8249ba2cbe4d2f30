"""The cost of many partitions and of many topics at a broker: in seconds, and in seconds of a processor."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from metamq import Admin
from metamq.testing import Cluster, cluster
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.session.session import Session

SIZES = (1_000, 10_000)
TOPICS = 1_000
LIMIT_S = 600.0


def _cpu_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def _rss_mb(running: Cluster) -> float:
    return float(psutil.Process(running.broker.pid).memory_info().rss) / 1e6


def _start(running: Cluster) -> dict[str, float]:
    began = time.perf_counter()
    running.broker.start()
    return {"s": time.perf_counter() - began, "cpu_s": _cpu_s(running.broker.pid)}


def _stop(running: Cluster) -> float:
    began = time.perf_counter()
    running.broker.stop()
    return time.perf_counter() - began


def _create(running: Cluster, admin: Admin, name: str, partitions: int) -> dict[str, float]:
    before, began = _cpu_s(running.broker.pid), time.perf_counter()
    admin.create_topic(name, partitions=partitions, timeout_s=LIMIT_S)
    return {"s": time.perf_counter() - began, "cpu_s": _cpu_s(running.broker.pid) - before}


def of_one_topic(partitions: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures the life of a broker with that many partitions, each with a message: their creation, starts, a stop."""
    with cluster() as running, running.admin() as admin:
        created = _create(running, admin, "many", partitions)
        empty_stop_s = _stop(running)
        empty = _start(running)
        empty_mb = _rss_mb(running)
        with running.producer(batch_bytes=1000) as producer:
            producer.send_many("many", [b"x" * 100] * (2 * partitions)).result()
        stop_s = _stop(running)
        clean = _start(running)
        clean_mb = _rss_mb(running)
        running.broker.kill()
        killed = _start(running)
        killed_mb = _rss_mb(running)
    found = {
        "partitions": partitions, "created": created, "clean": clean, "killed": killed, "stop_s": stop_s,
        "empty": empty, "empty_stop_s": empty_stop_s, "mb": max(empty_mb, clean_mb, killed_mb),
    }  # fmt: skip
    say(f"{partitions:,} partitions: {found}")
    return found


async def _make_topics(address: str, names: list[str]) -> None:
    session = await Session.open(address)
    try:
        store = TopicStore(session)
        await asyncio.gather(*(store.create(TopicConfig(name, {0: 1})) for name in names))
    finally:
        await session.close()


def of_many_topics(topics: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures what one more topic, a start and `metamq doctor` cost beside so many topics of one partition."""
    with cluster() as running, running.admin() as admin:
        asyncio.run(_make_topics(running.zookeeper, [f"topic-{number}" for number in range(topics - 1)]))
        _create(running, admin, "last", 1)
        more = [_create(running, admin, f"one-more-{number}", 1) for number in range(rounds)]
        command = [sys.executable, "-m", "metamq.cli", "--zookeeper", running.zookeeper, "doctor"]
        began = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        doctor_s = time.perf_counter() - began
        running.broker.stop()
        started = _start(running)
    one_more = {name: statistics.median(one[name] for one in more) for name in more[0]}
    found = {"topics": topics, "one_more": one_more, "doctor_s": doctor_s, "clean": started}
    say(f"{topics:,} topics: {found}")
    return found


def measure(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures each number of partitions once, and topics in as many rounds as asked."""
    by_count = [of_one_topic(partitions, say) for partitions in SIZES]
    return {"by_count": by_count, "topics": of_many_topics(TOPICS, rounds, say), "load": os.getloadavg()[2]}
