"""`producer.health()` and the Prometheus metrics of clients, against a real cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

import metamq.aio
from metamq.errors import TopicNotFound, WrongType
from metamq.prometheus import ClientCollector
from tests.client.idle import all_of
from tests.one_zookeeper import cluster

if TYPE_CHECKING:
    from tests.client.conftest import Shop


def test_the_health_of_a_producer_counts_outcomes(shop: Shop) -> None:
    topic = shop.topic()
    with shop.cluster.producer(linger_ms=60_000) as producer:
        producer.send(topic, b"1")
        waiting = producer.health().topics[topic]
        assert (waiting.waiting, waiting.stored, waiting.failed) == (1, 0, 0)
        assert waiting.oldest_s > 0
        producer.flush()
        assert isinstance(producer.send("nowhere", b"2").exception(60), TopicNotFound)
    health = producer.health()
    stored, failed = health.topics[topic], health.topics["nowhere"]
    assert (stored.waiting, stored.stored, stored.failed, stored.oldest_s) == (0, 1, 0, 0.0)
    assert (failed.waiting, failed.stored, failed.failed) == (0, 0, 1)
    assert "'nowhere'" in failed.last_error
    assert (health.brokers[0].unanswered, health.brokers[0].last_error) == (0, "")
    assert health.buffered_bytes == 0


def test_the_health_of_a_producer_shows_a_broker_that_does_not_answer(shop: Shop) -> None:
    with cluster() as running, running.producer() as producer:
        running.create_topic("t", partitions=1)
        producer.send("t", b"1").result(60)
        running.broker.freeze()
        try:
            producer.send("t", b"2")
            shop.until(lambda: producer.health().brokers[0].slowest_s > 0.2)
            assert producer.health().topics["t"].waiting == 1
        finally:
            running.broker.thaw()
        producer.flush()
        assert producer.health().topics["t"].stored == 2


def test_asyncio_has_the_same_health(shop: Shop) -> None:
    topic = shop.topic()

    async def run() -> int:
        async with metamq.aio.Producer(shop.cluster.zookeeper) as producer:
            await producer.send(topic, b"1")
            return producer.health().topics[topic].stored

    assert asyncio.run(run()) == 1


def test_a_scrape_shows_all_clients_of_the_collector(shop: Shop, group: str) -> None:
    topic = shop.topic(partitions=2)
    registry = CollectorRegistry()
    with (
        shop.cluster.producer() as one,
        shop.cluster.producer() as other,
        shop.consumer(topic, group, idle_timeout_s=0.1) as consumer,
    ):
        registry.register(ClientCollector(one, other, consumer))
        for number, producer in enumerate([one, other, other]):
            producer.send(topic, b"%d" % number, partition=f"0-{number % 2}").result(60)
        all_of(consumer, 3)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, labels)

        assert value("metamq_producer_stored_messages_total", topic=topic) == 3
        assert value("metamq_producer_waiting_messages", topic=topic) == 0
        assert value("metamq_producer_obstructed", broker="0") == 0
        assert value("metamq_consumer_partitions", group=group, topic=topic) == 2
        assert value("metamq_consumer_done_offset", group=group, topic=topic) == 3
        assert value("metamq_consumer_lag_messages", group=group, topic=topic) == 0
        assert value("metamq_consumer_lost_messages_total", group=group) == 0
    assert value("metamq_producer_stored_messages_total", topic=topic) == 3


def test_only_clients_are_collected() -> None:
    with pytest.raises(WrongType, match="must be a Producer or a Consumer"):
        ClientCollector("orders")  # type: ignore[arg-type]


def test_a_second_collector_in_a_registry_is_refused_with_the_next_step(shop: Shop) -> None:
    registry = CollectorRegistry()
    first = ClientCollector(shop.producer)
    registry.register(first)
    with pytest.raises(ValueError, match="make one ClientCollector for all clients of a process"):
        registry.register(ClientCollector(shop.producer))
    registry.unregister(first)
    registry.register(ClientCollector(shop.producer))
    CollectorRegistry().register(first)
