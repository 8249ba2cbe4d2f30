"""The cost and the benefit of a slave: throughput and latency of `sync`, catching up, promotion.

A master and a slave of one broker id, and the client: three processes that share the cores.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import latency
import psutil
import raw
from settle import settle

from metamq import Admin
from metamq.testing import BrokerProcess, Cluster, cluster

Say = Callable[[str], None]

BYTES = {100: 200_000_000, 1024: 512 * 1024 * 1024}
"""The bytes sent for one figure, by message size."""
AWAY_BYTES = 1024 * 1024 * 1024
"""The bytes that a slave lacks after its absence."""
ROUND_TRIPS = 1500
PROMOTIONS = 6
PARTITIONS = 4
BUSY_MESSAGES, BUSY_EVERY_S = 10, 0.01
"""The load of the master while a slave catches up: 1,000 messages a second, from a producer to a consumer."""


class Pair:
    """Two replicas of broker 0."""

    def __init__(self, running: Cluster) -> None:
        slave = BrokerProcess(running.zookeeper, running.folder / "replica-1", 0, replica=1)
        self.cluster = running
        self.replicas: list[BrokerProcess] = [running.broker, slave]

    def wait_in_sync(self, admin: Admin, count: int = 2, limit_s: float = 120.0) -> None:
        """Waits until `count` replicas are in sync and have all messages: an in-sync replica may lag for seconds."""
        deadline = time.monotonic() + limit_s
        while sum(one.holds_all and not one.lag_bytes for one in admin.replicas()[0].replicas) != count:
            assert time.monotonic() < deadline, f"{count} replicas were not in sync within {limit_s:g} s"
            time.sleep(0.01)


@contextmanager
def pair(**settings: Any) -> Iterator[Pair]:
    """Yields a master, with these settings, and its slave, which is not started yet."""
    with tempfile.TemporaryDirectory() as folder, cluster(folder=Path(folder), **settings) as running:
        made = Pair(running)
        try:
            yield made
        finally:
            made.replicas[1].kill()


def _send_many(running: Cluster, topic: str, size: int) -> float:
    """Returns messages per second."""
    values = [os.urandom(size)] * (BYTES[size] // size)
    with running.producer() as producer:
        producer.send(topic, b"warm").result()
        settle(3 * BYTES[size])  # the logs of both replicas, and the messages in flight
        began = time.perf_counter()
        producer.send_many(topic, values).result()
        return len(values) / (time.perf_counter() - began)


def _cpu_s(process: BrokerProcess) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def _costed(both: Pair, topic: str, size: int) -> float:
    """Returns the master's CPU seconds per byte stored, including replication if there is a slave."""
    before_s = _cpu_s(both.replicas[0])
    _send_many(both.cluster, topic, size)
    return (_cpu_s(both.replicas[0]) - before_s) / BYTES[size]


def throughput(both: Pair, rounds: int, say: Say) -> list[dict[str, float]]:
    """Measures `send_many` to an `async` and then to a `sync` topic, both with the slave in sync."""
    rows = []
    with both.cluster.admin() as admin:
        for size in BYTES:
            rates: dict[Literal["async", "sync"], list[float]] = {"async": [], "sync": []}
            for _ in range(rounds):
                for mode, found in rates.items():
                    topic = f"{mode}-{size}-{time.monotonic_ns()}"
                    admin.create_topic(topic, partitions=PARTITIONS, replication=mode)
                    both.wait_in_sync(admin)
                    found.append(_send_many(both.cluster, topic, size))
                    both.wait_in_sync(admin)
                    admin.delete(topic)
            row = {"message_bytes": float(size), **{mode: statistics.median(found) for mode, found in rates.items()}}
            row["ratio"] = statistics.median(s / a for s, a in zip(rates["sync"], rates["async"], strict=True))
            say(f"{size} B: async {row['async']:,.0f}/s, sync {row['sync']:,.0f}/s, a ratio of {row['ratio']:.2f}")
            rows.append(row)
    return rows


def added_latency(both: Pair, rounds: int, say: Say) -> dict[str, float]:
    """Measures blocking round trips to an `async` and a `sync` topic, and the difference of their medians."""
    found: dict[str, list[float]] = {"async": [], "sync": []}
    for mode in found:
        both.cluster.create_topic(f"latency-{mode}", partitions=1, replication=mode)
    with both.cluster.admin() as admin:
        both.wait_in_sync(admin)
    with both.cluster.producer() as producer:
        for _ in range(rounds):
            for mode, samples in found.items():
                for number in range(ROUND_TRIPS // rounds):
                    began = time.perf_counter()
                    producer.send(f"latency-{mode}", bytes(100)).result()
                    if number >= 20:
                        samples.append(time.perf_counter() - began)
    results = {f"{mode}_{k}": v for mode, samples in found.items() for k, v in latency.percentiles(samples).items()}
    results["added_p50_ms"] = results["sync_p50_ms"] - results["async_p50_ms"]
    say(f"async p50 {results['async_p50_ms']:.3f} ms, sync p50 {results['sync_p50_ms']:.3f} ms")
    return results


@contextmanager
def _busy(running: Cluster, topic: str) -> Iterator[None]:
    """Keeps the master busy: a producer sends messages of some hundred bytes, and a consumer reads them."""
    stop = threading.Event()

    def produce() -> None:
        with running.producer() as producer:
            while not stop.wait(BUSY_EVERY_S):
                for _ in range(BUSY_MESSAGES):
                    producer.send(topic, bytes(500))

    def consume() -> None:
        with running.consumer(topics=[topic], start="latest", idle_timeout_s=0.5) as consumer:
            while not stop.is_set():
                for _message in consumer:
                    pass

    threads = [threading.Thread(target=produce), threading.Thread(target=consume)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _topic_bytes(data: Path, topic: str) -> int:
    return sum(path.stat().st_size for path in data.glob(f"topics/{topic}@*/*/*.log"))


def catching_up(both: Pair, rounds: int, say: Say) -> dict[str, float]:
    """Measures how fast a slave catches up while the master serves, and a raw copy from file to file."""
    rates, raws = [], []
    slave = both.replicas[1]
    both.cluster.create_topic("served", partitions=1)
    with both.cluster.admin() as admin:
        for _ in range(rounds):
            topic = f"away-{time.monotonic_ns()}"
            admin.create_topic(topic, partitions=PARTITIONS)
            both.wait_in_sync(admin)
            slave.stop()
            with both.cluster.producer() as producer:
                producer.send_many(topic, [os.urandom(1024)] * (AWAY_BYTES // 1024)).result()
            raws.append(raw.copy_to_file(str(both.cluster.folder)))
            settle(AWAY_BYTES)
            with _busy(both.cluster, "served"):
                slave.start()
                began = time.perf_counter()
                while _topic_bytes(slave.data, topic) < AWAY_BYTES:  # a request would delay the brokers
                    time.sleep(0.005)
                both.wait_in_sync(admin)
                rates.append(AWAY_BYTES / (time.perf_counter() - began))
            admin.delete(topic)
            say(f"caught up at {rates[-1] / 1e9:.2f} GB/s; a raw copy makes {raws[-1] / 1e9:.2f} GB/s")
    ratio = statistics.median(ours / theirs for ours, theirs in zip(rates, raws, strict=True))
    return {
        "bytes_per_s": statistics.median(rates),
        "raw_bytes_per_s": statistics.median(raws),
        "ratio": ratio,
    }


def promotion(both: Pair, say: Say) -> dict[str, float]:
    """Measures seconds from the request to the new master's first acknowledgement; the old one runs, or is killed."""
    found: dict[str, list[float]] = {"living": [], "dead": []}
    both.cluster.create_topic("promoted", partitions=1, replication="sync")
    with both.cluster.admin() as admin, both.cluster.producer() as producer:
        master = 0
        for fate in ["living", "dead"] * (PROMOTIONS // 2):
            both.wait_in_sync(admin)
            producer.send("promoted", b"before").result(30)
            if fate == "dead":
                both.replicas[master].kill()
            began = time.perf_counter()
            admin.promote(0, 1 - master)
            producer.send("promoted", b"after").result(30)
            found[fate].append(time.perf_counter() - began)
            if fate == "dead":
                both.replicas[master].start()
            master = 1 - master
    results = {f"{fate}_s": statistics.median(samples) for fate, samples in found.items()}
    say(", ".join(f"promotion with a {fate} master {results[f'{fate}_s']:.3f} s" for fate in found))
    return results


def measure(rounds: int, say: Say) -> dict[str, object]:
    """Runs all measurements of replication."""
    with pair() as both:
        both.cluster.create_topic("alone", partitions=PARTITIONS)
        alone = statistics.median(_costed(both, "alone", 1024) for _ in range(rounds))
        both.replicas[1].start()
        with both.cluster.admin() as admin:
            both.wait_in_sync(admin)
        replicated = statistics.median(_costed(both, "alone", 1024) for _ in range(rounds))
        say(f"master: {alone * 1e9:.2f} ns of CPU per byte alone, {replicated * 1e9:.2f} with a slave")
        return {
            "throughput": throughput(both, rounds, say),
            "latency": added_latency(both, rounds, say),
            "catching_up": catching_up(both, rounds, say),
            "promotion": promotion(both, say),
            "master_cpu_ns_per_byte": {"alone": alone * 1e9, "replicated": (replicated - alone) * 1e9},
        }
