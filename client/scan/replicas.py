"""The replicas of a broker for a task: those that the driver knew. If these fail, the task looks them up again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from metamq.client.net.cluster import MASTER
from metamq.client.net.first_contact import open_session
from metamq.errors import TopicNotFound
from metamq.zk.cluster.brokers import live_brokers
from metamq.zk.cluster.offers import slaves_offering
from metamq.zk.cluster.replicas import live_slaves
from metamq.zk.cluster.topics import TopicStore

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess
    from metamq.zk.cluster.registrations import BrokerAddress


class ReplicaAddress(NamedTuple):
    """The address of one replica. `number` is MASTER for the present master."""

    number: int
    host: str
    port: int
    data: str = ""
    """The data folder on its machine, which has its files; empty: unknown."""


def replicas_of(master: BrokerAddress | None, slaves: Iterable[BrokerAddress]) -> tuple[ReplicaAddress, ...]:
    """Returns the replicas, the master first if there is one."""
    found = [] if master is None else [ReplicaAddress(MASTER, master.host, master.port, master.data)]
    return (*found, *(ReplicaAddress(slave.replica, slave.host, slave.port, slave.data) for slave in slaves))


async def find_replicas(
    access: ClusterAccess, broker_id: int, topic: str, *, with_slaves: bool
) -> tuple[ReplicaAddress, ...]:
    """Returns the registered replicas: the master, and the slaves that have the topic. Raises ConnectError.

    Opens a session for this: a cluster has many tasks, and they need ZooKeeper only if a broker has moved.
    """
    async with await open_session(access, patient=False) as session:
        master = (await live_brokers(session)).get(broker_id)
        if not with_slaves:
            return replicas_of(master, ())
        offering = await slaves_offering(session, topic)
        slaves = (await live_slaves(session)).get(broker_id, {})
        return replicas_of(master, (slave for number, slave in slaves.items() if (broker_id, number) in offering))


async def find_topic_id(access: ClusterAccess, topic: str) -> str | None:
    """Returns the present id of the topic, None if there is no topic of that name. Raises ConnectError."""
    async with await open_session(access, patient=False) as session:
        try:
            return (await TopicStore(session).get(topic)).id
        except TopicNotFound:
            return None
