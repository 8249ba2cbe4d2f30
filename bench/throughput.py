"""Messages per second through a real broker, for every way to produce and every way to consume."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from flushed import until_flushed
from settle import settle

from metamq import Consumer, Producer
from metamq.testing import Cluster

BYTES = {100: 300_000_000, 1024: 512 * 1024 * 1024}
"""The bytes of a measurement, by message size: about a second of the fastest way."""
SINGLE_SENDS = 1_000_000
LISTENED = 1_000_000
IDLE_S = 10.0


def _values(size: int) -> list[bytes]:
    value = os.urandom(size)
    return [value] * (BYTES[size] // size)


def send(producer: Producer[bytes], topic: str, size: int) -> float:
    """Measures `send`, one call for each message."""
    value = os.urandom(size)
    count = min(SINGLE_SENDS, BYTES[size] // size)
    began = time.perf_counter()
    call = producer.send
    for _ in range(count):
        call(topic, value)
    producer.flush()
    return count / (time.perf_counter() - began)


def send_many(producer: Producer[bytes], topic: str, size: int) -> float:
    """Measures `send_many`, one call for all messages."""
    values = _values(size)
    began = time.perf_counter()
    producer.send_many(topic, values).result()
    return len(values) / (time.perf_counter() - began)


def iterate(consumer: Consumer[bytes], count: int) -> None:
    """Reads with `for message in consumer`."""
    left = count
    for _message in consumer:
        left -= 1
        if not left:
            return


def batches(consumer: Consumer[bytes], count: int) -> None:
    """Reads verified batches with `batches()`, and nothing in them."""
    left = count
    for batch in consumer.batches():
        left -= len(batch)
        if left <= 0:
            return


def batch_values(consumer: Consumer[bytes], count: int) -> None:
    """Reads every value with `batches()`, on the standard library."""
    left = count
    for batch in consumer.batches():
        left -= len(batch.values)
        if left <= 0:
            return


def batch_arrow(consumer: Consumer[bytes], count: int) -> None:
    """Reads `batches()` as Arrow."""
    left = count
    for batch in consumer.batches():
        left -= batch.to_arrow().num_rows
        if left <= 0:
            return


CONSUMERS: dict[str, Callable[[Consumer[bytes], int], None]] = {
    "iteration": iterate,
    "batches": batches,
    "batches, values": batch_values,
    "batches, arrow": batch_arrow,
}


def consume(cluster: Cluster, topic: str, count: int, way: Callable[[Consumer[bytes], int], None]) -> float:
    """Measures one way to read `count` messages from the start of a topic, after the consumer has connected."""
    with cluster.consumer(topics=[topic], idle_timeout_s=IDLE_S) as consumer:
        began = time.perf_counter()
        way(consumer, count)
        return count / (time.perf_counter() - began)


def listen(cluster: Cluster, topic: str, count: int) -> float:
    """Measures `run(listener)` in one thread."""
    count = min(count, LISTENED)
    left = count
    with cluster.consumer(topics=[topic], idle_timeout_s=IDLE_S) as consumer:
        began = time.perf_counter()

        def listener(message: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise StopIteration

        try:
            consumer.run(listener, concurrency=1, max_attempts=1, dead_letter=False)
        except RuntimeError:
            pass
        except StopIteration:
            pass
        return count / (time.perf_counter() - began)


def measure(cluster: Cluster, size: int, partitions: int, say: Callable[[str], None]) -> dict[str, float]:
    """Measures every way once, on new topics, which are deleted afterwards.

    The topic for producing already has logs. The topic for consuming is flushed, and has the messages of one
    `send_many` only: with many partitions, a batch of one message in each would be most of the batches.
    """
    produced, consumed = (f"bench-{size}-{partitions}-{time.monotonic_ns()}-{name}" for name in ("in", "out"))
    for topic in (produced, consumed):
        cluster.create_topic(topic, partitions=partitions)
    rates: dict[str, float] = {}

    def report(name: str, rate: float) -> None:
        rates[name] = rate
        say(f"{name:16} {rate:12,.0f}/s")

    try:
        with cluster.producer() as producer:
            warm = [producer.send(produced, b"warm", partition=f"0-{index}") for index in range(partitions)]
            for delivery in warm:
                delivery.result()
            for way in (send, send_many):
                settle(2 * BYTES[size])
                report(way.__name__, way(producer, produced, size))
            settle(BYTES[size])
            send_many(producer, consumed, size)
        until_flushed(cluster.broker)
        count = BYTES[size] // size
        for name, consumer_way in CONSUMERS.items():
            report(name, consume(cluster, consumed, count, consumer_way))
        report("listener", listen(cluster, consumed, count))
    finally:
        with cluster.admin() as admin:
            for topic in (produced, consumed):
                admin.delete(topic)
    return rates
