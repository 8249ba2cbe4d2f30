"""Where a task finds the replicas of a broker: as the driver knew them, and looked up again when that is of no use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from metamq.client.cluster import MASTER
from metamq.client.first_contact import open_session
from metamq.zk.brokers import live_brokers
from metamq.zk.offers import slaves_offering
from metamq.zk.registrations import BrokerAddress
from metamq.zk.replicas import live_slaves


class Replica(NamedTuple):
    """One replica's address. `number` is MASTER for whichever is the master."""

    number: int
    host: str
    port: int


def replicas_of(master: BrokerAddress | None, slaves: Iterable[BrokerAddress]) -> tuple[Replica, ...]:
    """The master first, if there is one."""
    found = [] if master is None else [Replica(MASTER, master.host, master.port)]
    return (*found, *(Replica(slave.replica, slave.host, slave.port) for slave in slaves))


async def find_replicas(
    zookeeper: str, root: str, broker_id: int, topic: str, *, with_slaves: bool
) -> tuple[Replica, ...]:
    """Those that are registered now: the master, and the slaves that have the topic. Raises ConnectError.

    In a session of its own: a cluster has many tasks, and they need ZooKeeper only when a broker is not where it was.
    """
    session = await open_session(zookeeper, root=root)
    try:
        master = (await live_brokers(session)).get(broker_id)
        if not with_slaves:
            return replicas_of(master, ())
        offering = await slaves_offering(session, topic)
        slaves = (await live_slaves(session)).get(broker_id, {})
        return replicas_of(master, (slave for number, slave in slaves.items() if (broker_id, number) in offering))
    finally:
        await session.close()
