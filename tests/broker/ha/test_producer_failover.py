"""A producer whose master is replaced: what was under way goes to the new one at once, in order, and once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.ha.test_replication import Group, a_sync_topic, replica_group


@pytest.fixture
def group() -> Iterator[Group]:
    with replica_group() as made:
        yield made


@pytest.mark.slow
def test_a_master_that_hangs_is_left_as_soon_as_another_is_promoted(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1)
    group.add_slave()
    group.wait_insync(0, 1)
    values = [b"%d" % number for number in range(60)]
    # Who waited for an answer of the former master would do so for longer than this test.
    with group.cluster.producer(linger_ms=0, request_timeout_s=300, delivery_timeout_s=600) as producer:
        for value in values[:10]:
            producer.send(topic, value).result(60)
        group.lose_master(group.replicas[0].freeze, 1)
        deliveries = [producer.send(topic, value) for value in values[10:40]]
        group.promote(1)
        for delivery in deliveries:
            delivery.result(60)
        group.replicas[0].thaw()
        for value in values[40:]:
            producer.send(topic, value).result(60)
    group.wait_insync(0, 1, master=1)
    assert group.read(topic) == values
    group.wait_equal(0, 1)
