"""What is sent in a transaction and does not fit into the producer's buffer waits for room, and none of it is lost."""

from __future__ import annotations

from metamq.testing import Cluster, cluster


def send_more_than_fits(running: Cluster, topic: str) -> None:
    with running.producer(buffer_bytes=50_000) as producer, producer.transaction():
        for number in range(100):
            producer.send_many(topic, [b"%05d" % number] * 1000)
            producer.send(topic, b"%05d" % number)


def test_lists_larger_than_the_buffer() -> None:
    with cluster() as running:
        running.create_topic("large", partitions=1)
        send_more_than_fits(running, "large")
        with running.consumer(topics=["large"], idle_timeout_s=0.3) as consumer:
            found = [value for batch in consumer.batches() for value in batch.values]
    assert found == [b"%05d" % (number // 1001) for number in range(100 * 1001)]
