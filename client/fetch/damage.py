"""Reports of damaged data: a reader notifies the replica that sent it, and the replica verifies its log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from metamq.client.net import paged_requests
from metamq.client.net.transport import BrokerConnection
from metamq.errors import MetamqError
from metamq.wire.commands import LATEST, OffsetsEntry
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient, Source
    from metamq.security.tls import ClientSecurity
    from metamq.zk.cluster.registrations import BrokerAddress
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")


def report_of(tp: TopicPartition, topic_id: str, offset: int) -> OffsetsEntry:
    """Returns the entry of an OFFSETS request that reports the batch with this offset as damaged.

    A broker of an older release answers it as a request for the end; the answer is not used in either case.
    """
    _broker_id, index = parse_partition(tp.partition)
    return OffsetsEntry(tp.topic, topic_id, index, LATEST, damaged=offset)


async def report_to(replica: BrokerAddress, entry: OffsetsEntry, security: ClientSecurity | None) -> None:
    """Sends a report like report_damage(), over a connection of its own."""
    try:
        connection = await BrokerConnection.open(replica.host, replica.port, security=security)
        try:
            await paged_requests.ask_offsets(connection, [entry])
        finally:
            await connection.close()
    except MetamqError as error:
        log.info("%s got no report of its damaged batch at offset %d: %s", replica.address, entry.damaged, error)


async def report_damage(cluster: ClusterClient, source: Source, entry: OffsetsEntry) -> None:
    """Sends a report to the replica. If that fails, the next damaged answer causes a new report."""
    try:
        await paged_requests.ask_offsets(await cluster.connection(*source), [entry])
    except MetamqError as error:
        log.info("%s got no report of its damaged batch at offset %d: %s", source, entry.damaged, error)
