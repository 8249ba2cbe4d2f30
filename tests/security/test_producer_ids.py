"""Whoever knows another's producer id and its next number cannot use them."""

from __future__ import annotations

from typing import Any

import pytest

from metamq import Producer
from metamq.errors import NotAuthorized
from metamq.security.certificates import Authority
from metamq.security.rights import NO_RULES, PRODUCER_RANDOM_BITS, UNLIMITED, Access, producer_prefix
from metamq.testing import Cluster
from metamq.wire import status
from metamq.wire.commands import Command, PutEntry, PutResult
from metamq.wire.status import decode_error
from tests.broker.front_door.conftest import batch_of
from tests.parts import SLOW_S, read_to_end, wait_until
from tests.security.raw_client import RawClient, new_topic, of


def test_only_its_own_ids() -> None:
    own, others = (producer_prefix(name) << PRODUCER_RANDOM_BITS | 1 for name in ("etl", "other"))
    access = Access("etl", NO_RULES)
    assert access.producer_prefix == producer_prefix("etl")
    for allowed in (0, own):
        access.check_producer(allowed, "orders")
    for forbidden in (others, 1):
        with pytest.raises(NotAuthorized, match="'etl' may not use this producer id in topic:orders"):
            access.check_producer(forbidden, "orders")
    assert UNLIMITED.producer_prefix == 0
    for free in (UNLIMITED, Access("admin", NO_RULES)):
        free.check_producer(others, "orders")


def queue_of(producer: Producer[Any]) -> Any:
    (queue,) = producer._core.sender._queues.values()
    return queue


def test_a_stranger_cannot_use_up_the_numbers_of_a_producer(secure: Cluster, authority: Authority, name: str) -> None:
    topic, its_id = new_topic(secure, f"numbers-{name}")
    stranger = f"stranger-{name}"
    authority.issue(stranger)
    with (
        secure.admin() as admin,
        Producer(secure.zookeeper, security=of(authority, name), linger_ms=0) as producer,
        RawClient(secure, authority, stranger) as other,
    ):
        admin.add_rules("allow", "*", "write", f"topic:{topic}")
        admin.add_rules("allow", "*", "read", f"topic:{topic}")

        def put(producer_id: int, sequence: int) -> PutResult:
            batch = bytes(batch_of([b"theirs"], producer_id=producer_id, sequence=sequence))
            (result,) = other.ask(Command.PUT, [PutEntry(topic, its_id, 0, len(batch))], batch)
            return PutResult(*result)

        own = producer_prefix(stranger) << PRODUCER_RANDOM_BITS | 1
        wait_until(lambda: put(own, 0).status == status.OK, what="the rule")
        producer.send(topic, b"0").result(SLOW_S)
        queue = queue_of(producer)
        assert queue.producer_id >> PRODUCER_RANDOM_BITS == producer_prefix(name)
        for sequence in range(queue.next_sequence, queue.next_sequence + 5):
            refused = put(queue.producer_id, sequence)
            assert isinstance(decode_error(refused.status, refused.error), NotAuthorized)
        for number in range(1, 6):
            producer.send(topic, b"%d" % number).result(SLOW_S)
        with secure.consumer(topics=[topic], idle_timeout_s=1) as consumer:
            found = [one.value for one in read_to_end(consumer)]
    assert found == [b"theirs"] + [b"%d" % number for number in range(6)]
