"""What a reader tells a replica of whose bytes it got damaged, so that the replica verifies its log."""

from __future__ import annotations

import logging

from metamq.client.net import paged_requests
from metamq.client.net.cluster import ClusterClient, Source
from metamq.client.net.transport import BrokerConnection
from metamq.errors import MetamqError
from metamq.wire.commands import LATEST, OffsetsEntry
from metamq.zk.cluster.brokers import BrokerAddress
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")


def report_of(tp: TopicPartition, topic_id: str, offset: int) -> OffsetsEntry:
    """The entry of an OFFSETS request that says that the batch with this offset came damaged.

    A broker of an older release takes it for a question for the end, and its answer is of no use either way.
    """
    _broker_id, index = parse_partition(tp.partition)
    return OffsetsEntry(tp.topic, topic_id, index, LATEST, damaged=offset)


async def report_to(replica: BrokerAddress, entry: OffsetsEntry) -> None:
    """As report_damage(), over a connection of its own."""
    try:
        connection = await BrokerConnection.open(replica.host, replica.port)
        try:
            await paged_requests.ask_offsets(connection, [entry])
        finally:
            await connection.close()
    except MetamqError as error:
        log.info("%s was not told that its batch at offset %d came damaged: %s", replica.address, entry.damaged, error)


async def report_damage(cluster: ClusterClient, source: Source, entry: OffsetsEntry) -> None:
    """Tells the replica. One that cannot be told now is told when the same bytes come again."""
    try:
        await paged_requests.ask_offsets(await cluster.connection(*source), [entry])
    except MetamqError as error:
        log.info("%s was not told that its batch at offset %d came damaged: %s", source, entry.damaged, error)
