"""Administrative requests to the brokers: offsets and statistics. An error of one broker does not fail the others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from metamq.client.admin.admin_model import BrokerDescription, BrokerStatistics, PartitionStatistics
from metamq.client.net import paged_requests
from metamq.client.net.cluster import MASTER, ClusterClient
from metamq.errors import ConfigError, MetamqError
from metamq.wire import status
from metamq.wire.commands import OffsetsEntry, OffsetsResult
from metamq.zk.cluster.brokers import live_brokers, read_state
from metamq.zk.names import parse_partition, partition_name
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

Found = OffsetsResult | MetamqError


async def children(session: Session, path: str) -> list[str]:
    """Returns the names below a node, sorted; none if the node does not exist."""
    return sorted(await session.children_or_none(path) or [])


async def describe_brokers(cluster: ClusterClient) -> dict[int, BrokerDescription]:
    """Returns every broker id that ever had a master, in order. Raises ConnectionLost."""
    masters = await live_brokers(cluster.session)
    described = {}
    for broker_id in sorted({*masters, *await cluster.broker_ids()}):
        stored = await read_state(cluster.session, broker_id)
        master = masters.get(broker_id)
        if stored is None and master is None:
            continue
        epoch = stored[0].epoch if stored else 0
        if master is None:
            described[broker_id] = BrokerDescription(broker_id, epoch, live=False)
        else:
            described[broker_id] = BrokerDescription(
                broker_id, epoch, True, master.host, master.port, master.replica, master.version, master.status or None
            )
    return described


async def ask_offsets(
    cluster: ClusterClient,
    requests: Mapping[TopicPartition, tuple[str, int]],
    come_to: Mapping[TopicPartition, tuple[int, int]] = MappingProxyType({}),
) -> dict[TopicPartition, Found]:
    """Sends OFFSETS for partition -> (topic id, time in microseconds or EARLIEST, LATEST). Returns answers or errors.

    `come_to`: partition -> (the offset up to which it was read, the epoch of the message before that).
    """
    by_broker: dict[int, list[TopicPartition]] = defaultdict(list)
    for tp in requests:
        by_broker[parse_partition(tp.partition)[0]].append(tp)
    answers = await asyncio.gather(
        *(
            _ask_one(cluster, broker_id, {tp: requests[tp] for tp in tps}, come_to)
            for broker_id, tps in by_broker.items()
        )
    )
    return {tp: found for answer in answers for tp, found in answer.items()}


async def ask_slaves(
    cluster: ClusterClient, requests: Mapping[TopicPartition, tuple[str, int]]
) -> dict[TopicPartition, OffsetsResult]:
    """Asks the slaves of brokers without a master, like ask_offsets(); the highest answer for each partition counts.

    Partitions without an answer are left out. A slave shows the stable offset that it has from its master: the last
    acknowledged messages may be missing. Raises ConnectError if nothing is known of the brokers yet.
    """
    masters = await cluster.refresh_brokers()
    for topic in {tp.topic for tp in requests}:
        await cluster.know_slaves(topic)
    by_slave: dict[tuple[int, int], list[TopicPartition]] = defaultdict(list)
    for tp in requests:
        broker_id, _index = parse_partition(tp.partition)
        for replica in [] if broker_id in masters else cluster.slaves_with(broker_id, tp.topic):
            by_slave[broker_id, replica].append(tp)
    answers = await asyncio.gather(
        *(
            _ask_one(cluster, slave[0], {tp: requests[tp] for tp in tps}, {}, slave[1])
            for slave, tps in by_slave.items()
        )
    )
    best: dict[TopicPartition, OffsetsResult] = {}
    for tp, found in (item for answer in answers for item in answer.items()):
        if isinstance(found, OffsetsResult) and (tp not in best or found.stable_offset > best[tp].stable_offset):
            best[tp] = found
    return best


async def _ask_one(
    cluster: ClusterClient,
    broker_id: int,
    requests: Mapping[TopicPartition, tuple[str, int]],
    come_to: Mapping[TopicPartition, tuple[int, int]],
    replica: int = MASTER,
) -> dict[TopicPartition, Found]:
    entries = [
        OffsetsEntry(tp.topic, topic_id, parse_partition(tp.partition)[1], timestamp_us, *come_to.get(tp, (-1, -1)))
        for tp, (topic_id, timestamp_us) in requests.items()
    ]
    try:
        results = await paged_requests.ask_offsets(await cluster.connection(broker_id, replica), entries)
    except MetamqError as error:
        return dict.fromkeys(requests, error)
    return {
        tp: result if result.status == status.OK else status.decode_error(result.status, result.error)
        for tp, result in zip(requests, results, strict=True)
    }


async def broker_statistics(cluster: ClusterClient, broker_id: int) -> BrokerStatistics:
    """Returns a broker's counters. Raises ConfigError if there is no such broker, ConnectError, Timeout."""
    described = await describe_brokers(cluster)
    if broker_id not in described:
        known = f"There are: {', '.join(map(str, described))}." if described else "There is none yet."
        raise ConfigError(f"there is no broker {broker_id!r}", hint=known)
    connection = await cluster.connection(broker_id)
    return _statistics(connection.address, await paged_requests.ask_statistics(connection))


def _statistics(address: str, header: Any) -> BrokerStatistics:
    try:
        counters = header["counters"]
        delayed = header.get("delayed", {"waiting": 0, "next_us": 0})  # a former release has none
        partitions = [
            PartitionStatistics(
                entry["topic"],
                partition_name(header["broker_id"], entry["partition"]),
                entry["start_offset"],
                entry["stable_offset"],
                entry["end_offset"],
                entry["size_bytes"],
                entry["last_append_us"],
            )
            for entry in header["partitions"]
        ]
        return BrokerStatistics(
            broker_id=header["broker_id"],
            epoch=header["epoch"],
            version=header["version"],
            time_ms=header["time_ms"],
            writes_refused=header["writes_refused"],
            replica=header["replica"],
            incarnation=header["incarnation"],
            partitions=tuple(partitions),
            delayed=delayed["waiting"],
            next_delayed_us=delayed["next_us"],
            **{name: counters[name] for name in _COUNTERS},
        )
    except (KeyError, TypeError) as error:
        problem = f"the statistics of the broker at {address} have the wrong structure: {error!r}"
        raise MetamqError(problem, hint="It may run another metamq release: see `metamq doctor`.") from error


_COUNTERS = ("messages_in", "bytes_in", "batches_in", "bytes_out", "fetches", "repeats")


async def partition_statistics(
    cluster: ClusterClient, broker_ids: list[int]
) -> dict[TopicPartition, PartitionStatistics]:
    """Returns the figures of every partition of these brokers. Brokers that do not answer are left out."""

    async def ask(broker_id: int) -> tuple[PartitionStatistics, ...]:
        try:
            connection = await cluster.connection(broker_id)
            return _statistics(connection.address, await paged_requests.ask_statistics(connection)).partitions
        except MetamqError:
            return ()

    answers = await asyncio.gather(*map(ask, broker_ids))
    return {TopicPartition(one.topic, one.partition): one for answer in answers for one in answer}
