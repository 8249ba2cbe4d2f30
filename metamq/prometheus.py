"""Prometheus metrics of producers and consumers, for the registry of prometheus-client.

    from prometheus_client import REGISTRY
    from metamq.prometheus import ClientCollector

    REGISTRY.register(ClientCollector(producer, consumer))

A scrape reads `health()` of each client: it makes no request, and between scrapes the metrics cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from metamq.client.checks import wrong_type
from metamq.client.consumer.consumer_api import ConsumerApi
from metamq.client.producer.producer_api import ProducerApi

if TYPE_CHECKING:
    from metamq.client.consumer.health import ConsumerHealth
    from metamq.client.producer.producer_health import ProducerHealth

__all__ = ["ClientCollector"]


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
        """Returns nothing: the registry then does not collect when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Reads the health of each client."""
        producers = [one.health() for one in self._producers if "_core" in vars(one)]
        if producers:
            yield from _of_producers(producers)
        consumers = [(one._core.plan.group or "", one.health()) for one in self._consumers if "_core" in vars(one)]
        if consumers:
            yield from _of_consumers(consumers)


def _of_producers(healths: list[ProducerHealth]) -> Iterator[Metric]:
    topic, broker = ["topic"], ["broker"]
    waiting = GaugeMetricFamily("metamq_producer_waiting_messages", "Messages accepted, not acknowledged", labels=topic)
    oldest = GaugeMetricFamily("metamq_producer_oldest_seconds", "Age of the oldest waiting message", labels=topic)
    stored = CounterMetricFamily("metamq_producer_stored_messages", "Messages stored", labels=topic)
    failed = CounterMetricFamily("metamq_producer_failed_messages", "Messages that failed", labels=topic)
    for name in sorted({name for health in healths for name in health.topics}):
        found = [health.topics[name] for health in healths if name in health.topics]
        waiting.add_metric([name], sum(one.waiting for one in found))
        oldest.add_metric([name], max(one.oldest_s for one in found))
        stored.add_metric([name], sum(one.stored for one in found))
        failed.add_metric([name], sum(one.failed for one in found))
    yield from (waiting, oldest, stored, failed)
    slowest = GaugeMetricFamily("metamq_producer_unanswered_seconds", "Age of the oldest unanswered PUT", labels=broker)
    obstructed = GaugeMetricFamily("metamq_producer_obstructed", "1 when messages wait for an error", labels=broker)
    for broker_id in sorted({broker_id for health in healths for broker_id in health.brokers}):
        requests = [health.brokers[broker_id] for health in healths if broker_id in health.brokers]
        slowest.add_metric([str(broker_id)], max(one.slowest_s for one in requests))
        obstructed.add_metric([str(broker_id)], int(any(one.last_error for one in requests)))
    yield from (slowest, obstructed)
    text = "Bytes of closed batches that are not acknowledged"
    yield GaugeMetricFamily("metamq_producer_buffered_bytes", text, value=sum(h.buffered_bytes for h in healths))


def _of_consumers(healths: list[tuple[str, ConsumerHealth]]) -> Iterator[Metric]:
    both = ["group", "topic"]
    lag = GaugeMetricFamily("metamq_consumer_lag_messages", "Messages stored, not done, as last fetched", labels=both)
    done = GaugeMetricFamily("metamq_consumer_done_offset", "Sum of the partitions' next offsets to do", labels=both)
    partitions = GaugeMetricFamily("metamq_consumer_partitions", "Assigned partitions", labels=both)
    failing = GaugeMetricFamily("metamq_consumer_failing_partitions", "Partitions not fetched now", labels=both)
    figures: dict[str, Counter[tuple[str, str]]] = {name: Counter() for name in ("lag", "done", "assigned", "failing")}
    for group, health in healths:
        for tp, one in health.partitions.items():
            key = group, tp.topic
            if one.lag is not None:
                figures["lag"][key] += one.lag
            figures["done"][key] += max(one.done_offset, 0)
            figures["assigned"][key] += 1
            figures["failing"][key] += bool(one.last_error)
    for family, values in zip((lag, done, partitions, failing), figures.values(), strict=True):
        for labels, value in sorted(values.items()):
            family.add_metric(labels, value)
        yield family
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
