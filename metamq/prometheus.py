"""Prometheus metrics of producers and consumers, for the registry of prometheus-client.

    from prometheus_client import REGISTRY
    from metamq.prometheus import ClientCollector

    REGISTRY.register(ClientCollector(producer, consumer))

A scrape reads `health()` of each client: it makes no request, and between scrapes the metrics cost nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from metamq.client.checks import wrong_type
from metamq.client.consumer.consumer_api import ConsumerApi
from metamq.client.handling.handler_figures import HANDLER_BOUNDS_S
from metamq.client.producer.producer_api import ProducerApi

if TYPE_CHECKING:
    from metamq.client.consumer.health import ConsumerHealth
    from metamq.client.handling.handler_figures import HandlerHealth
    from metamq.client.producer.producer_health import ProducerHealth, TopicHealth

__all__ = ["ClientCollector"]

_ONLY_ONE = "metamq: make one ClientCollector for all clients of a process, or unregister() the first one"
"""The registry's error for a second collector shows it: the metrics of both would have the same names."""


class ClientCollector(Collector):
    """Collects the metrics of these clients, blocking or asyncio. Several producers are added up, and so are several
    consumers of one group. A client that is not open yet is left out. A closed producer keeps its last figures; a
    closed consumer has no partitions. Make one collector for all clients of a process."""

    def __init__(self, *clients: ProducerApi[Any] | ConsumerApi[Any]) -> None:
        for client in clients:
            if not isinstance(client, ProducerApi | ConsumerApi):
                raise wrong_type("a client", "a Producer or a Consumer", client)
        self._producers = [client for client in clients if isinstance(client, ProducerApi)]
        self._consumers = [client for client in clients if isinstance(client, ConsumerApi)]

    def describe(self) -> Iterable[Metric]:
        """Returns a name for each registry to refuse a second collector by. It does not collect meanwhile."""
        only = Metric("metamq_clients", "", "untyped")
        only.name = _ONLY_ONE
        return [only]

    def collect(self) -> Iterator[Metric]:
        """Reads the health of each client."""
        producers = [one.health() for one in self._producers if "_core" in vars(one)]
        if producers:
            yield from _of_producers(producers)
        consumers = [(one._core.plan.group or "", one.health()) for one in self._consumers if "_core" in vars(one)]
        if consumers:
            yield from _of_consumers(consumers)


def _of_producers(healths: list[ProducerHealth]) -> Iterator[Metric]:
    yield from _of_topics("metamq_producer", "Messages", "accepted, not acknowledged", [h.topics for h in healths])
    yield from _of_topics("metamq_dbtx", "Messages of dbtx", "in open blocks", [h.dbtx for h in healths])
    slowest = GaugeMetricFamily(
        "metamq_producer_unanswered_seconds", "Age of the oldest unanswered PUT", labels=["broker"]
    )
    obstructed = GaugeMetricFamily("metamq_producer_obstructed", "1 when messages wait for an error", labels=["broker"])
    for broker_id in sorted({broker_id for health in healths for broker_id in health.brokers}):
        requests = [health.brokers[broker_id] for health in healths if broker_id in health.brokers]
        slowest.add_metric([str(broker_id)], max(one.slowest_s for one in requests))
        obstructed.add_metric([str(broker_id)], int(any(one.last_error for one in requests)))
    yield from (slowest, obstructed)
    text = "Bytes of closed batches that are not acknowledged"
    yield GaugeMetricFamily("metamq_producer_buffered_bytes", text, value=sum(h.buffered_bytes for h in healths))


def _of_topics(prefix: str, what: str, wait: str, healths: list[Mapping[str, TopicHealth]]) -> Iterator[Metric]:
    topic = ["topic"]
    waiting = GaugeMetricFamily(f"{prefix}_waiting_messages", f"{what} {wait}", labels=topic)
    oldest = GaugeMetricFamily(f"{prefix}_oldest_seconds", "Age of the oldest that waits", labels=topic)
    stored = CounterMetricFamily(f"{prefix}_stored_messages", f"{what} that were stored", labels=topic)
    size = CounterMetricFamily(f"{prefix}_stored_bytes", "Their bytes before compression", labels=topic)
    failed = CounterMetricFamily(f"{prefix}_failed_messages", f"{what} that were not stored", labels=topic)
    for name in sorted({name for topics in healths for name in topics}):
        found = [topics[name] for topics in healths if name in topics]
        waiting.add_metric([name], sum(one.waiting for one in found))
        oldest.add_metric([name], max(one.oldest_s for one in found))
        stored.add_metric([name], sum(one.stored for one in found))
        size.add_metric([name], sum(one.stored_bytes for one in found))
        failed.add_metric([name], sum(one.failed for one in found))
    yield from (waiting, oldest, stored, size, failed)


def _of_consumers(healths: list[tuple[str, ConsumerHealth]]) -> Iterator[Metric]:
    both = ["group", "topic"]
    lag = GaugeMetricFamily("metamq_consumer_lag_messages", "Messages stored, not done, as last fetched", labels=both)
    done = GaugeMetricFamily("metamq_consumer_done_offset", "Sum of the partitions' next offsets to do", labels=both)
    partitions = GaugeMetricFamily("metamq_consumer_partitions", "Assigned partitions", labels=both)
    failing = GaugeMetricFamily("metamq_consumer_failing_partitions", "Partitions not fetched now", labels=both)
    text = "Time since the first call of the handler for the message that is processed longest"
    running = GaugeMetricFamily("metamq_consumer_oldest_running_seconds", text, labels=both)
    names = ("lag", "done", "assigned", "failing", "running")
    figures: dict[str, dict[tuple[str, str], float]] = {name: defaultdict(float) for name in names}
    for group, health in healths:
        for tp, one in health.partitions.items():
            key = group, tp.topic
            if one.lag is not None:
                figures["lag"][key] += one.lag
            figures["done"][key] += max(one.done_offset, 0)
            figures["assigned"][key] += 1
            figures["failing"][key] += bool(one.last_error)
            oldest_s = max((message.running_s for message in one.running), default=0.0)
            figures["running"][key] = max(figures["running"].get(key, 0.0), oldest_s)
    for family, values in zip((lag, done, partitions, failing, running), figures.values(), strict=True):
        for labels, value in sorted(values.items()):
            family.add_metric(labels, value)
        yield family
    yield from _of_handlers(healths)
    lost: Counter[str] = Counter()
    buffered: Counter[str] = Counter()
    paused: Counter[str] = Counter()
    for group, health in healths:
        lost[group] += health.lost_messages
        buffered[group] += health.buffered_bytes
        paused[group] += not health.delivering
    text = "Messages that retention removed before they were read"
    by_group: list[tuple[CounterMetricFamily | GaugeMetricFamily, Counter[str]]] = [
        (CounterMetricFamily("metamq_consumer_lost_messages", text, labels=["group"]), lost),
        (GaugeMetricFamily("metamq_consumer_buffered_bytes", "Bytes fetched, not done", labels=["group"]), buffered),
        (GaugeMetricFamily("metamq_consumer_paused", "Consumers without a lease now", labels=["group"]), paused),
    ]
    for total, values_of in by_group:
        for group, value in sorted(values_of.items()):
            total.add_metric([group], value)
        yield total


def _of_handlers(healths: list[tuple[str, ConsumerHealth]]) -> Iterator[Metric]:
    both = ["group", "topic"]
    text = "Calls of handlers of run() that failed"
    failed = CounterMetricFamily("metamq_consumer_failed_attempts", text, labels=both)
    given_up = CounterMetricFamily("metamq_consumer_dead_letters", "Messages sent to the dead letters", labels=both)
    times = HistogramMetricFamily("metamq_consumer_handler_seconds", "Times of calls of handlers", labels=both)
    by_key: defaultdict[tuple[str, str], list[HandlerHealth]] = defaultdict(list)
    for group, health in healths:
        for topic, one in health.handlers.items():
            by_key[group, topic].append(one)
    bounds = [*map(str, HANDLER_BOUNDS_S), "+Inf"]
    for key, found in sorted(by_key.items()):
        failed.add_metric(key, sum(one.failed_attempts for one in found))
        given_up.add_metric(key, sum(one.given_up for one in found))
        calls = accumulate(map(sum, zip(*(one.calls for one in found), strict=True)))
        times.add_metric(key, list(zip(bounds, calls, strict=True)), sum(one.seconds for one in found))
    yield from (failed, given_up, times)
