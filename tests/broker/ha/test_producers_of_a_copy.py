"""A slave whose log begins where retention has left its master's: what producers sent before that is still known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from metamq.client.net.transport import BrokerConnection
from metamq.client.producer.outgoing import OutgoingBatch
from metamq.testing import BrokerProcess
from metamq.wire import status
from metamq.wire.commands import Command, PutEntry, PutResult
from metamq.wire.compression import Codec
from metamq.wire.headers import unpack_list
from tests.broker.ha.test_replication import Group, a_sync_topic, replica_group
from tests.parts import statistics, wait_until

SEGMENT_BYTES = 1024 * 1024


@pytest.fixture
def group() -> Iterator[Group]:
    with replica_group(retention_check_s=0.1) as made:
        yield made


def put(broker: BrokerProcess, topic: str, topic_id: str, batch: bytes) -> PutResult:
    async def ask() -> PutResult:
        connection = await BrokerConnection.open("127.0.0.1", broker.port)
        try:
            entry = PutEntry(topic, topic_id, 0, len(batch))
            response = await connection.send(Command.PUT, [entry], [bytearray(batch)])
            (result,) = unpack_list(PutResult, response.header)
            return result
        finally:
            await connection.close()

    return asyncio.run(ask())


def log_of(broker: BrokerProcess) -> dict[str, Any]:
    (found,) = statistics(broker)["partitions"]
    return dict(found)


def test_a_repeat_is_known_after_a_promotion_although_its_batch_was_never_copied(group: Group) -> None:
    topic = a_sync_topic(group, partitions=1, segment_bytes=SEGMENT_BYTES, retention_bytes=SEGMENT_BYTES)
    with group.cluster.admin() as admin:
        topic_id = admin.describe_topic(topic).config.id
    once = OutgoingBatch(topic)
    once.values = [b"once"]
    once.encode(Codec.NONE, 4711, 0)
    assert once.encoded is not None
    batch = bytes(once.encoded)
    assert put(group.cluster.broker, topic, topic_id, batch).base_offset == 0
    with group.cluster.producer(compression=None) as producer:
        for _ in range(4):
            producer.send_many(topic, [b"%01000d" % 1] * 700).result(60)
    wait_until(lambda: log_of(group.cluster.broker)["start_offset"] > 0, what="retention")
    slave = group.add_slave()
    group.wait_insync(0, 1)
    assert log_of(slave)["start_offset"] > 0
    slave.kill()  # what it was told is on its disk
    slave.start()
    group.wait_insync(0, 1)
    group.lose_master(group.cluster.broker.kill, 1)
    group.promote(1)
    end = log_of(slave)["end_offset"]
    result = put(slave, topic, topic_id, batch)
    assert (result.status, result.base_offset) == (status.OK, 0)
    assert log_of(slave)["end_offset"] == end, "it is stored once"
