"""The administration of automatic failover: the mode of each broker id, its switches, and its next successor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from metamq.errors import ConfigError
from metamq.zk.cluster.brokers import read_state
from metamq.zk.cluster.epochs import CLASSES
from metamq.zk.cluster.failover import Failover, change_failover, check_mode, read_failover

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import ReplicaDescription
    from metamq.client.net.cluster import ClusterClient

NO_PREFERENCE = -1


async def failover_of(cluster: ClusterClient, broker_id: int) -> Failover:
    """Returns the failover of a broker id. Raises ConfigError if there is no such broker id."""
    await _check_known(cluster, broker_id)
    return await read_failover(cluster.session, broker_id)


async def set_failover(
    cluster: ClusterClient, broker_id: int, mode: str | None, paused: bool | None, preferred: int | None
) -> Failover:
    """Changes the given settings. See Admin.set_failover."""
    await _check_known(cluster, broker_id)
    checked = None if mode is None else check_mode(mode)
    if preferred is not None and not NO_PREFERENCE <= preferred < CLASSES:
        raise ConfigError(f"there is no replica {preferred}", hint=f"Replicas have the numbers 0 to {CLASSES - 1}.")

    def change(stored: Failover) -> Failover:
        wanted = replace(stored, mode=checked or stored.mode, paused=stored.paused if paused is None else paused)
        if preferred is None:
            return wanted
        return replace(wanted, preferred=None if preferred == NO_PREFERENCE else preferred)

    return await change_failover(cluster.session, broker_id, change)


async def _check_known(cluster: ClusterClient, broker_id: int) -> None:
    if await read_state(cluster.session, broker_id) is None:
        raise ConfigError(f"there is no broker {broker_id}", hint="`metamq ha status` lists the brokers.")


def successor_of(failover: Failover, replicas: Iterable[ReplicaDescription]) -> tuple[int | None, str]:
    """Returns the replica that would take over if the master ended now, and "". Or None, and the reason."""
    if failover.mode == "manual":
        return None, "failover is manual"
    if failover.paused:
        return None, "failover is paused"
    ready = [one.replica for one in replicas if one.role == "slave" and one.in_sync and one.address and not one.problem]
    if not ready:
        return None, "no other replica is in sync"
    return min(ready, key=lambda one: (one != failover.preferred, one)), ""
