"""The figures of dbtx blocks, in the blocking and the asyncio API: health, Prometheus, OpenTelemetry."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import metamq.tx.aio
from metamq import Producer, aio, otel
from metamq.errors import MetamqError
from metamq.prometheus import ClientCollector
from metamq.testing import Cluster
from metamq.tx import create_outcome_table, dbtx
from tests.one_zookeeper import cluster
from tests.parts import wait_until
from tests.tx.both_faces import FACES

Messages = list[tuple[str, bytes]]
Block = Callable[[Messages, Callable[[], object]], None]
"""Sends messages in a dbtx block, at whose end it calls a function."""


class Face:
    """dbtx of one of the two APIs, in a database of its own."""

    def __init__(self, face: str, zookeeper: str, path: Path) -> None:
        with sqlite3.connect(path) as database:
            create_outcome_table(database)
        database.close()
        self._path, self._runner = path, asyncio.Runner()
        self.is_blocking = face == "blocking"
        self.producer: Any = Producer(zookeeper) if self.is_blocking else aio.Producer(zookeeper)
        if not self.is_blocking:
            self._runner.run(self.producer.open())

    def block(self, messages: Messages, at_end: Callable[[], object] = lambda: None) -> None:
        """Sends the messages in a block, and then calls `at_end` in it."""
        if not self.is_blocking:
            self._runner.run(self._aio_block(messages, at_end), context=copy_context())  # the trace of the caller
            return
        database = sqlite3.connect(self._path)
        try:
            with dbtx(database, self.producer) as tx:
                for topic, value in messages:
                    tx.send(topic, value)
                at_end()
        finally:
            database.close()

    async def _aio_block(self, messages: Messages, at_end: Callable[[], object]) -> None:
        async with aiosqlite.connect(self._path) as database, metamq.tx.aio.dbtx(database, self.producer) as tx:
            for topic, value in messages:
                await tx.send(topic, value)
            at_end()

    def let_run(self) -> None:
        """Lets the loop of the asyncio producer run; the other one has a thread."""
        if not self.is_blocking:
            self._runner.run(asyncio.sleep(0.01))

    def close(self) -> None:
        closing = self.producer.close()
        if not self.is_blocking:
            self._runner.run(closing)
        self._runner.close()


@pytest.fixture(params=FACES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_blocks_count_by_topic(running: Cluster, kind: str, tmp_path: Path) -> None:
    one, other = f"one-{kind}", f"other-{kind}"
    for topic in (one, other):
        running.create_topic(topic, partitions=1)
    face = Face(kind, running.zookeeper, tmp_path / "shop.db")
    seen: list[tuple[int, int, bool]] = []

    def look() -> None:
        health = face.producer.health().dbtx[one]
        seen.append((health.waiting, health.stored, health.oldest_s > 0))

    face.block([(one, b"1"), (other, b"22"), (one, b"3")], look)
    with pytest.raises(ZeroDivisionError):
        face.block([(one, b"4")], lambda: 1 // 0)
    health = face.producer.health()
    first, second = health.dbtx[one], health.dbtx[other]
    registry = CollectorRegistry()
    registry.register(ClientCollector(face.producer))
    face.close()
    assert seen == [(2, 0, True)]
    assert (first.waiting, first.oldest_s, first.stored, first.failed) == (0, 0.0, 2, 1)
    assert (second.stored, second.failed, second.last_error) == (1, 0, "")
    assert first.last_error == "integer division or modulo by zero"
    assert first.stored_bytes >= 2
    assert second.stored_bytes == first.stored_bytes / 2 + 1
    assert health.topics == {}
    assert health.brokers[0].last_error == ""

    def value(name: str, topic: str) -> float | None:
        return registry.get_sample_value(f"metamq_dbtx_{name}", {"topic": topic})

    assert [value("stored_messages_total", topic) for topic in (one, other)] == [2, 1]
    assert [value("failed_messages_total", topic) for topic in (one, other)] == [1, 0]
    assert value("stored_bytes_total", one) == first.stored_bytes


@pytest.mark.slow
def test_a_broker_that_is_down_is_named_until_it_answers(kind: str, tmp_path: Path) -> None:
    with cluster() as one:
        one.create_topic("t", partitions=1)
        face = Face(kind, one.zookeeper, tmp_path / "shop.db")
        face.block([("t", b"1")])
        one.broker.kill()
        with pytest.raises(MetamqError) as raised:
            face.block([("t", b"2")])
        health = face.producer.health()
        assert health.dbtx["t"].failed == 1
        assert health.dbtx["t"].last_error == str(raised.value)
        assert health.brokers[0].last_error
        one.broker.start()

        def answers() -> bool:
            face.let_run()
            return not face.producer.health().brokers[0].last_error

        wait_until(answers, what="no error of the broker, without another block")
        face.block([("t", b"3")])
        assert face.producer.health().dbtx["t"].stored == 2
        face.close()


def test_spans_have_topics_and_the_number_of_messages(running: Cluster, kind: str, tmp_path: Path) -> None:
    one, other = f"span-{kind}", f"span-other-{kind}"
    for topic in (one, other):
        running.create_topic(topic, partitions=1)
    exporter, reader, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider([reader])
    otel.instrument(tracer_provider=tracers, meter_provider=meters)
    try:
        face = Face(kind, running.zookeeper, tmp_path / "shop.db")
        with tracers.get_tracer("shop").start_as_current_span("order"):
            face.block([(one, b"1"), (one, b"2")])
            face.block([(one, b"3"), (other, b"4")])
        face.close()
    finally:
        otel.uninstrument()
    names = ("destination.name", "batch.message_count", "operation.name", "operation.type")
    found = [dict(span.attributes or {}) for span in exporter.get_finished_spans() if span.name == "dbtx"]
    assert [[span.get(f"messaging.{name}") for name in names] for span in found] == [
        [one, 2, "dbtx", "send"],
        [None, 2, "dbtx", "send"],
    ]
    assert [span["metamq.topics"] for span in found] == [(one,), (one, other)]
    data = reader.get_metrics_data()
    assert data is not None
    metrics = {each.name: each for each in data.resource_metrics[0].scope_metrics[0].metrics}
    points: Any = metrics["messaging.client.sent.messages"].data.data_points
    sent = {point.attributes["messaging.destination.name"]: point.value for point in points}
    assert sent == {one: 3, other: 1}
    meters.shutdown()
