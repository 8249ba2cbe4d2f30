"""metamq.otel: one span per batch, linked to the producers' spans; the metrics of the conventions; nothing when off."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import metamq.aio
from metamq import otel
from metamq.client import telemetry
from metamq.errors import ConfigError, TopicNotFound
from metamq.tx import create_outcome_table, dbtx
from tests.client.idle import all_of, run_until

if TYPE_CHECKING:
    from tests.client.conftest import Shop


class Seen:
    """The spans and metrics of the tests, and a tracer of the application."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])
        self.tracer = self.tracers.get_tracer("shop")

    def spans(self, name: str) -> list[ReadableSpan]:
        """The spans of this name that have ended."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def points(self, metric: str) -> list[Any]:
        """The data points of a metric."""
        data = self.reader.get_metrics_data()
        found = [
            one
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for one in scope.metrics
        ]
        return [point for one in found if one.name == metric for point in one.data.data_points]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """Instruments the process for one test."""
    seen = Seen()
    otel.instrument(tracer_provider=seen.tracers, meter_provider=seen.meters)
    yield seen
    otel.uninstrument()
    seen.tracers.shutdown()
    seen.meters.shutdown()


def context_of(span: ReadableSpan) -> trace.SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def test_a_send_is_a_part_of_the_calling_trace_and_the_listener_links_to_it(shop: Shop, seen: Seen) -> None:
    topic = shop.topic()
    with shop.cluster.producer() as producer, seen.tracer.start_as_current_span("order") as order:
        producer.send(topic, b"1", headers={"own": b"x"}).result(60)
    (send,) = seen.spans(f"send {topic}")
    caller = order.get_span_context()
    assert send.parent is not None
    assert (send.parent.span_id, context_of(send).trace_id) == (caller.span_id, caller.trace_id)
    attributes = dict(send.attributes or {})
    assert attributes == {
        "messaging.system": "metamq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": "0-0",
        "messaging.batch.message_count": 1,
        "metamq.offset": 0,
    }
    inside: list[trace.Span] = []

    def listen(message: metamq.Message[bytes]) -> None:
        assert message.headers["own"] == b"x"
        inside.append(trace.get_current_span())

    with shop.consumer(topic, "g", idle_timeout_s=0.1) as consumer:
        run_until(lambda: inside, consumer, listen)
    (process,) = seen.spans(f"process {topic}")
    assert linked(process) == {caller.span_id}
    assert [one.get_span_context() for one in inside] == [context_of(process)]
    assert (process.attributes or {})["messaging.consumer.group.name"] == "g"


def test_many_messages_are_one_span_with_a_link_for_each_trace(shop: Shop, seen: Seen) -> None:
    topic = shop.topic()
    callers = set()
    with shop.cluster.producer(linger_ms=60_000) as producer:
        for number in range(3):
            with seen.tracer.start_as_current_span("order") as order:
                callers.add(order.get_span_context().span_id)
                for _ in range(10):
                    producer.send(topic, b"%d" % number)
        producer.flush()
    (send,) = seen.spans(f"send {topic}")
    assert (send.parent, linked(send)) == (None, callers)
    with shop.consumer(topic, idle_timeout_s=0.1) as consumer:
        all_of(consumer, 30)
    (process,) = seen.spans(f"process {topic}")
    assert linked(process) == callers
    assert (process.attributes or {})["messaging.batch.message_count"] == 30
    (sent,) = seen.points("messaging.client.sent.messages")
    (consumed,) = seen.points("messaging.client.consumed.messages")
    assert sent.value == consumed.value == 30
    assert [point.count for point in seen.points("messaging.process.duration")] == [1]


def test_without_a_span_messages_have_no_header(shop: Shop, seen: Seen) -> None:
    topic = shop.topic()
    with shop.cluster.producer() as producer:
        producer.send(topic, b"1").result(60)
        producer.send_many(topic, [b"2", b"3"]).result(60)
    with shop.consumer(topic, idle_timeout_s=0.1) as consumer:
        assert [dict(message.headers) for message in all_of(consumer, 3)] == [{}, {}, {}]
    assert [linked(span) for span in seen.spans(f"process {topic}")] == [set()] * 2


def test_send_many_puts_the_trace_into_the_first_message_of_a_batch(shop: Shop, seen: Seen) -> None:
    topic = shop.topic()
    with shop.cluster.producer() as producer, seen.tracer.start_as_current_span("import") as caller:
        producer.send_many(topic, [b"1", b"2"]).result(60)
        producer.send_many(topic, [b"3", b"4"], ["k", None]).result(60)
        with producer.transaction():
            producer.send_many(topic, [b"5", b"6"])
    with shop.consumer(topic, idle_timeout_s=0.1) as consumer:
        traced = {message.value for message in all_of(consumer, 6) if "traceparent" in message.headers}
    assert traced == {b"1", b"3", b"4", b"5"}  # the keyed 3 and the free 4 are in batches of their own
    assert all(linked(span) == {caller.get_span_context().span_id} for span in seen.spans(f"process {topic}"))


def test_a_failed_send_names_its_error(shop: Shop, seen: Seen) -> None:
    with shop.cluster.producer() as producer:
        assert isinstance(producer.send("nowhere", b"1").exception(60), TopicNotFound)
    (send,) = seen.spans("send nowhere")
    assert (send.attributes or {})["error.type"] == "TopicNotFound"
    assert send.status.status_code is trace.StatusCode.ERROR


def test_failures_of_a_listener_are_events_and_the_last_one_is_the_error(shop: Shop, seen: Seen) -> None:
    topic = shop.topic()
    shop.send(topic, [b"1"])

    def refuse(_message: metamq.Message[bytes]) -> None:
        raise ValueError("no")

    with shop.consumer(topic, "failing") as consumer, pytest.raises(ValueError, match="no"):
        consumer.run(refuse, max_attempts=2, retry_delay_s=0, dead_letter=False)
    process = seen.spans(f"process {topic}")[0]
    assert [(event.attributes or {})["metamq.offset"] for event in process.events] == [0, 0]
    assert (process.attributes or {})["error.type"] == "ValueError"


def test_commits_and_transactions_are_spans_of_the_caller(shop: Shop, seen: Seen) -> None:
    topic = shop.topic()
    database = sqlite3.connect(":memory:")
    create_outcome_table(database)
    with shop.cluster.producer() as producer, seen.tracer.start_as_current_span("order") as caller:
        with producer.transaction():
            producer.send(topic, b"1")
        with dbtx(database, producer) as tx:
            tx.send(topic, b"2")
        with shop.consumer(topic, "committing", auto_commit=False) as consumer:
            for message in islice(consumer, 2):
                assert "traceparent" in message.headers
                consumer.commit(message)
    database.close()
    names = ["commit_transaction", "dbtx", "commit"]
    parents = [{span.parent.span_id for span in seen.spans(name) if span.parent is not None} for name in names]
    assert parents == [{caller.get_span_context().span_id}] * 3
    durations = seen.points("messaging.client.operation.duration")
    assert {point.attributes["messaging.operation.name"] for point in durations} == set(names)


def test_processing_is_a_span_for_one_message_in_a_loop(shop: Shop, seen: Seen) -> None:
    topic = shop.topic()
    with shop.cluster.producer() as producer, seen.tracer.start_as_current_span("order") as order:
        producer.send(topic, b"1").result(60)
    with shop.consumer(topic) as consumer, otel.processing(next(iter(consumer))) as span:
        assert trace.get_current_span() is span
    own = next(one for one in seen.spans(f"process {topic}") if context_of(one) == span.get_span_context())
    assert linked(own) == {order.get_span_context().span_id}


def test_a_loop_that_breaks_ends_its_span(shop: Shop, seen: Seen) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    with shop.consumer(topic) as consumer:
        for _message in consumer:
            break
    assert len(seen.spans(f"process {topic}")) == 1
    (consumed,) = seen.points("messaging.client.consumed.messages")
    assert consumed.value == 1


def test_asyncio_listeners_run_in_the_span_of_their_batch(shop: Shop, seen: Seen) -> None:
    topic = shop.topic(partitions=2)

    async def run() -> set[int]:
        inside: set[int] = set()

        async def listen(_message: metamq.Message[bytes]) -> None:
            await asyncio.sleep(0)
            inside.add(trace.get_current_span().get_span_context().span_id)

        async with metamq.aio.Producer(shop.cluster.zookeeper) as producer:
            for partition in ("0-0", "0-1"):
                await producer.send(topic, b"1", partition=partition)
        async with metamq.aio.Consumer(shop.cluster.zookeeper, topics=topic, idle_timeout_s=0.1) as consumer:
            while len(inside) < 2:
                await consumer.run(listen, dead_letter=False)
        return inside

    assert asyncio.run(run()) == {context_of(span).span_id for span in seen.spans(f"process {topic}")}


def test_by_key_a_batch_is_one_span_and_its_messages_run_in_it(shop: Shop, seen: Seen) -> None:
    topic = shop.topic()
    with shop.cluster.producer() as producer:
        for size in (3, 4):
            producer.send_many(topic, [b"x"] * size, [b"a", b"b", b"c", b"d"][:size]).result(60)
    inside: dict[int, trace.SpanContext] = {}

    def listen(message: metamq.Message[bytes]) -> None:
        if message.offset == 5 and 5 not in inside:
            inside[5] = trace.get_current_span().get_span_context()
            raise ValueError("not yet")
        inside[message.offset] = trace.get_current_span().get_span_context()

    with shop.consumer(topic, "g", idle_timeout_s=0.1) as consumer:
        run_until(lambda: len(inside) == 7, consumer, listen, order="key", concurrency=8, retry_delay_s=0)
    first, second = seen.spans(f"process {topic}")
    assert [inside[offset] for offset in range(7)] == [context_of(first)] * 3 + [context_of(second)] * 4
    assert [event.name for event in second.events] == ["exception"]
    (consumed,) = seen.points("messaging.client.consumed.messages")
    assert consumed.value == 7


def test_off_is_off(shop: Shop) -> None:
    assert telemetry.current is None
    with pytest.raises(ConfigError, match=r"processing\(\) needs OpenTelemetry"), otel.processing(None):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("order", ["partition", "key"])
def test_log_records_of_a_listener_name_its_message_and_trace(
    shop: Shop, group: str, seen: Seen, caplog: pytest.LogCaptureFixture, request: Any, order: Any
) -> None:
    topic, log = shop.topic(), logging.getLogger("shop")
    shop.numbers(topic, 2)
    caplog.set_level(logging.INFO, "shop")
    names_message = metamq.LogFilter()
    caplog.handler.addFilter(names_message)
    request.addfinalizer(lambda: caplog.handler.removeFilter(names_message))

    def records() -> list[Any]:
        return [record for record in caplog.records if record.name == "shop"]

    def listen(message: metamq.Message[bytes]) -> None:
        log.info("own fields", extra={"topic": "mine"}) if message.offset else log.info("billed")

    with shop.consumer(topic, group, idle_timeout_s=0.3) as consumer:
        run_until(lambda: len(records()) > 1, consumer, listen, order=order)
        log.info("outside")

    billed, outside, own = sorted(records(), key=logging.LogRecord.getMessage)
    assert (billed.topic, billed.partition, billed.offset) == (topic, "0-0", 0)
    (span, *_) = seen.spans(f"process {topic}")
    assert billed.trace_id == own.trace_id == trace.format_trace_id(context_of(span).trace_id)
    assert (own.topic, hasattr(own, "offset")) == ("mine", False)
    assert not {"topic", "trace_id"} & set(vars(outside))
