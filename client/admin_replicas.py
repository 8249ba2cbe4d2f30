"""Replicas, for administration: roles, who is in sync, what a promotion would lose, and the promotion itself."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from metamq.client import in_pieces
from metamq.client.admin_model import BrokerReplicas, PromotionPlan, ReplicaDescription
from metamq.client.cluster import Cluster
from metamq.errors import ConfigError, MetamqError
from metamq.wire.commands import Command, Promote, Promoted, unpack
from metamq.zk.brokers import BrokerAddress, BrokerState, live_brokers, read_state
from metamq.zk.errors import NoNode
from metamq.zk.replicas import slaves_of
from metamq.zk.session import Session

PROMOTE_TIMEOUT_S = 30.0
WAITS = "waits: it came back after its host went down, and others may hold what it lost. Promote one of the replicas"


async def describe_replicas(cluster: Cluster) -> dict[int, BrokerReplicas]:
    """Every broker id's replicas, in order. Raises ConnectionLost; a broker that does not answer is described so."""
    session = cluster.session
    masters = await live_brokers(session)
    try:
        names = await session.children(session.paths.broker_ids())
    except NoNode:
        names = []
    numbers = sorted({*masters, *(int(name) for name in names if name.isdecimal())})
    described = await asyncio.gather(*(_describe(cluster, number, masters.get(number)) for number in numbers))
    return {one.broker_id: one for one in described if one is not None}


async def _describe(cluster: Cluster, broker_id: int, master: BrokerAddress | None) -> BrokerReplicas | None:
    stored = await read_state(cluster.session, broker_id)
    if stored is None:
        return None
    state = stored[0]
    slaves = {slave.replica: slave for slave in await slaves_of(cluster.session, broker_id)}
    links: dict[int, dict[str, Any]] = {}
    problem = ""
    if master is not None:
        try:
            statistics = await _ask(cluster, master)
            links = {int(link["replica"]): link for link in statistics["replication"].get("slaves", [])}
        except MetamqError as error:
            problem = str(error)
        except (KeyError, TypeError, AttributeError) as error:
            problem = f"its statistics make no sense: {error!r}"
    insync = {replica for replica, _ in state.insync}
    is_waiting = master is None and state.master in slaves
    if is_waiting:
        problem = f"replica {state.master} {WAITS}"
    replicas = []
    for number in sorted({state.master, *insync, *slaves, *links}):
        address = master if master is not None and master.replica == number else slaves.get(number)
        link = links.get(number, {})
        replicas.append(
            ReplicaDescription(
                broker_id=broker_id,
                replica=number,
                role="slave" if number != state.master else "waiting" if is_waiting else "master",
                address=address.address if address is not None else None,
                in_sync=_in_sync(state, number, address),
                version=address.version if address is not None else None,
                stage=str(link.get("stage", "")),
                lag_messages=link.get("lag_messages"),
                lag_bytes=link.get("lag_bytes"),
                lag_ms=link.get("lag_ms"),
                problem=problem if number == state.master else "",
            )
        )
    return BrokerReplicas(broker_id, state.epoch, state.generation, tuple(replicas))


def _in_sync(state: BrokerState, replica: int, address: BrokerAddress | None) -> bool:
    """A replica that came back as a new incarnation is not, whatever stands there of the former one."""
    if address is None:
        return replica in {number for number, _ in state.insync}
    return (replica, address.incarnation) in state.insync


async def plan_promotion(cluster: Cluster, broker_id: int, replica: int) -> PromotionPlan:
    """What a promotion would do. Raises ConfigError when there is no such slave."""
    state, slave, master = await _find(cluster.session, broker_id, replica)
    in_sync = _in_sync(state, replica, slave)
    others = [master] if master is not None else []
    others += [one for one in await slaves_of(cluster.session, broker_id) if one.replica != replica]
    lost: dict[str, int] | None = {}
    if not in_sync:
        mine = _ends(await _ask(cluster, slave))
        known: dict[tuple[str, int], int] = defaultdict(int)
        answered = 0
        for other in others:
            try:
                ends = _ends(await _ask(cluster, other))
            except MetamqError:
                continue
            answered += 1
            for place, end in ends.items():
                known[place] = max(known[place], end)
        missing: dict[str, int] = defaultdict(int)
        for (topic, index), end in known.items():
            missing[topic] += max(end - mine.get((topic, index), 0), 0)
        lost = {topic: count for topic, count in sorted(missing.items()) if count} if answered else None
    return PromotionPlan(broker_id, replica, state.master, await _lives(cluster, master), in_sync, lost)


async def _lives(cluster: Cluster, master: BrokerAddress | None) -> bool:
    """Whether a master answers: one that was killed stays registered until its session ends."""
    if master is None:
        return False
    try:
        await _ask(cluster, master)
    except MetamqError:
        return False
    return True


async def promote(cluster: Cluster, broker_id: int, replica: int, accept_loss: bool) -> int:
    """Makes a slave the master; returns the new epoch. Raises ConfigError, Fenced, ConnectError, Timeout."""
    _state, slave, _master = await _find(cluster.session, broker_id, replica)
    connection = await cluster.connections.get(slave.host, slave.port)
    answer = await connection.request(Command.PROMOTE, Promote(accept_loss), timeout_s=PROMOTE_TIMEOUT_S)
    return unpack(Promoted, answer).epoch


async def _find(
    session: Session, broker_id: int, replica: int
) -> tuple[BrokerState, BrokerAddress, BrokerAddress | None]:
    """The state of a broker id, one of its slaves, and its master if that is registered."""
    stored = await read_state(session, broker_id)
    if stored is None:
        raise ConfigError(f"there is no broker {broker_id}", hint="`metamq ha status` lists the brokers.")
    master = (await live_brokers(session)).get(broker_id)
    slaves = {slave.replica: slave for slave in await slaves_of(session, broker_id)}
    if stored[0].master == replica and replica not in slaves:  # one that waits is among them, and may be promoted
        raise ConfigError(f"replica {replica} is the master of broker {broker_id} already")
    if replica not in slaves:
        known = f"Its slaves are: {', '.join(map(str, slaves))}." if slaves else "It has no slave at present."
        raise ConfigError(f"broker {broker_id} has no slave {replica}", hint=known)
    return stored[0], slaves[replica], master


async def _ask(cluster: Cluster, address: BrokerAddress) -> dict[str, Any]:
    connection = await cluster.connections.get(address.host, address.port)
    return await in_pieces.ask_statistics(connection)


def _ends(statistics: dict[str, Any]) -> dict[tuple[str, int], int]:
    return {(entry["topic"], entry["partition"]): entry["end_offset"] for entry in statistics["partitions"]}
