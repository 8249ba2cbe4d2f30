"""Latency of a blocking round trip, and from `send` in one process to a consumer's loop in another."""

from __future__ import annotations

import struct
import subprocess
import sys
import time

import raw

from metamq.testing import Cluster

ROUND_TRIPS = 3000
RATE = 1000
SECONDS = 10.0
_STAMP = struct.Struct("<q")


def percentiles(samples: list[float]) -> dict[str, float]:
    """Returns p50, p99 and p99.9, in milliseconds."""
    ordered = sorted(samples)
    return {
        name: ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000
        for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("p99_9_ms", 0.999))
    }


def round_trip(cluster: Cluster, topic: str) -> dict[str, float]:
    """Measures `send(...).result()` of 100 bytes, one after the other."""
    samples = []
    with cluster.producer() as producer:
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            producer.send(topic, bytes(100)).result()
            samples.append(time.perf_counter() - began)
    return percentiles(samples[100:])


def end_to_end(cluster: Cluster, topic: str) -> dict[str, float]:
    """Measures 1,000 messages of 100 bytes per second, from another process; both use the host's clock."""
    count = int(RATE * SECONDS)
    samples = []
    with cluster.consumer(topics=[topic], start="latest", idle_timeout_s=10) as consumer:
        while not consumer.health().last_fetch_s and not any(
            p.next_offset >= 0 for p in consumer.health().partitions.values()
        ):
            time.sleep(0.01)
        command = [sys.executable, __file__, cluster.zookeeper, topic, str(count)]
        sender = subprocess.Popen(command)
        for message in consumer:
            samples.append((time.monotonic_ns() - _STAMP.unpack_from(message.value)[0]) / 1e9)
            if len(samples) == count:
                break
        sender.wait()
    return percentiles(samples[RATE:])


def _send(zookeeper: str, topic: str, count: int) -> None:
    from metamq import Producer

    with Producer[bytes](zookeeper) as producer:
        producer.send(topic, _STAMP.pack(time.monotonic_ns()) + bytes(92)).result()
        due = time.monotonic()
        for _ in range(count - 1):
            due += 1 / RATE
            while (left := due - time.monotonic()) > 0:
                time.sleep(left)
            producer.send(topic, _STAMP.pack(time.monotonic_ns()) + bytes(92))


def measure(cluster: Cluster) -> dict[str, dict[str, float]]:
    """Runs all measurements of latency, on a topic of one partition."""
    topic = f"latency-{time.monotonic_ns()}"
    cluster.create_topic(topic, partitions=1)
    return {
        "round_trip": round_trip(cluster, topic),
        "raw_round_trip": percentiles(raw.round_trips(ROUND_TRIPS, 100)[100:]),
        "end_to_end": end_to_end(cluster, topic),
    }


if __name__ == "__main__":
    _send(sys.argv[1], sys.argv[2], int(sys.argv[3]))
