"""`metamq bench`: measures a running cluster from this machine. The project's own measurements are in bench/."""

from __future__ import annotations

import secrets
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.show.output import TABLE_OR_JSON, print_json, print_table, say
from metamq.cli.show.progress import progress_bar
from metamq.cli.show.units import SIZE
from metamq.client.settings import load
from metamq.errors import Timeout

CHUNK_BYTES = 1024 * 1024
IDLE_LIMIT_S = 30.0
ROUND_TRIPS = 200


@dataclass(frozen=True, slots=True)
class Rate:
    """One measurement of throughput."""

    what: str
    messages: int
    bytes: int
    seconds: float

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.seconds

    @property
    def mb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e6


@click.command(cls=CliCommand)
@click.option(
    "-n", "--messages", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Number of messages."
)
@click.option("-s", "--size", type=SIZE, default="100", show_default=True, help="Size of a message: 100, 1KiB.")
@click.option(
    "-p", "--partitions", type=click.IntRange(min=1), default=4, show_default=True, help="Partitions of the topic."
)
@click.option("-z", "--compression", type=click.Choice(["lz4", "zstd"]), help="Compress batches.")
@click.option("--keep", is_flag=True, help="Do not delete the topic.")
@TABLE_OR_JSON
def bench(messages: int, size: int, partitions: int, compression: str | None, keep: bool, output: str) -> None:
    """Send messages to a new topic, read them back, and print the rates.

    \b
    metamq bench
    metamq bench --messages 200000 --size 1KiB --partitions 16
    metamq bench -o json
    """
    from metamq.client.fetch.consumer_options import ConsumerOptions
    from metamq.client.producer.producer_core import ProducerOptions

    topic = f"bench-{secrets.token_hex(4)}"
    load(ProducerOptions, "producer", file=current().config_file, arguments={"compression": compression})
    load(ConsumerOptions, "consumer", file=current().config_file, arguments={})
    settings = current().client()
    with current().admin() as admin:
        admin.create_topic(topic, partitions)
        try:
            rates = [_produce(settings, topic, messages, size, compression), _consume(settings, topic, messages, size)]
            trips_ms = _round_trips(settings, topic, size)
        finally:
            if keep:
                say(f"Topic {topic} is kept.")
            else:
                admin.delete(topic)
    _report(rates, trips_ms, output)


def _produce(settings: dict[str, Any], topic: str, messages: int, size: int, compression: str | None) -> Rate:
    """Measures send_many, until the last acknowledgement."""
    from metamq import Producer

    per_call = max(min(messages, CHUNK_BYTES // max(size, 1)), 1)
    # Random bytes: a compressor must not see the same message a million times.
    pool = secrets.token_bytes(size + per_call)
    values = [pool[start : start + size] for start in range(per_call)]
    producer: Producer[bytes] = Producer(**settings, compression=compression)
    with producer, progress_bar("send_many", messages, unit="messages") as advance:
        began = time.perf_counter()
        for sent in range(0, messages, per_call):
            number = min(per_call, messages - sent)
            producer.send_many(topic, values[:number])
            advance(number)
        producer.flush(timeout=None)
        took_s = time.perf_counter() - began
    return Rate("send_many", messages, messages * size, took_s)


def _consume(settings: dict[str, Any], topic: str, messages: int, size: int) -> Rate:
    """Measures batches(), with every value."""
    from metamq import Consumer

    consumer: Consumer[bytes] = Consumer(**settings, topics=topic, idle_timeout_s=IDLE_LIMIT_S)
    with consumer, progress_bar("batches", messages, unit="messages") as advance:
        began = time.perf_counter()
        seen = 0
        for batch in consumer.batches():
            seen += len(batch.values)
            advance(len(batch))
            if seen >= messages:
                break
        took_s = time.perf_counter() - began
    if seen < messages:
        raise Timeout(f"reading {messages:,} messages back ({seen:,} received)", IDLE_LIMIT_S)
    return Rate("batches", messages, messages * size, took_s)


def _round_trips(settings: dict[str, Any], topic: str, size: int) -> list[float]:
    """Measures send(...).result(), one at a time; returns sorted milliseconds."""
    from metamq import Producer

    value = secrets.token_bytes(size)
    trips_ms = []
    producer: Producer[bytes] = Producer(**settings)
    with producer, progress_bar("round trips", ROUND_TRIPS, unit="messages") as advance:
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            producer.send(topic, value).result(timeout=IDLE_LIMIT_S)
            trips_ms.append((time.perf_counter() - began) * 1000)
            advance(1)
    return sorted(trips_ms)


def _report(rates: list[Rate], trips_ms: list[float], output: str) -> None:
    p50, p99 = statistics.median(trips_ms), trips_ms[int(len(trips_ms) * 0.99)]
    if output == "json":
        measured = [
            {**asdict(rate), "messages_per_s": round(rate.messages_per_s), "mb_per_s": round(rate.mb_per_s, 1)}
            for rate in rates
        ]
        print_json({"rates": measured, "round_trip_ms": {"p50": round(p50, 3), "p99": round(p99, 3)}})
        return
    print_table(
        ["CALL", "MESSAGES", "SECONDS", "MESSAGES/S", "MB/S"],
        [
            [rate.what, rate.messages, f"{rate.seconds:.2f}", round(rate.messages_per_s), round(rate.mb_per_s)]
            for rate in rates
        ],
    )
    click.echo()
    click.echo(f"round trip of send(...).result(): p50 {p50:.2f} ms, p99 {p99:.2f} ms")
