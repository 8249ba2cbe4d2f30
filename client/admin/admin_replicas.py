"""The administration of replicas: roles, the in-sync set, promotion and what it loses, and automatic failover."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from metamq.client.admin import balance
from metamq.client.admin.admin_model import BrokerReplicas, PromotionPlan, ReplicaDescription
from metamq.client.admin.promotion_plan import Has, Loss, loss_of
from metamq.client.net import paged_requests
from metamq.errors import ConfigError, ConnectError, CorruptData, MetamqError, NotAuthorized
from metamq.wire.commands import Command, Promote, Promoted, Stats
from metamq.wire.headers import unpack
from metamq.zk.cluster.brokers import BrokerState, StateAt, known, master_of, read_state
from metamq.zk.cluster.epochs import CLASSES, highest_epoch, taken_back
from metamq.zk.cluster.failover import Failover, change_failover, check_mode, read_failover
from metamq.zk.cluster.replicas import slaves_of

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import MasterPlace
    from metamq.client.net.cluster import ClusterClient
    from metamq.client.net.transport import BrokerConnection
    from metamq.zk.cluster.registrations import BrokerAddress
    from metamq.zk.session.session import Session

PROMOTE_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 3.0
NO_PREFERENCE = -1


async def describe_replicas(cluster: ClusterClient) -> dict[int, BrokerReplicas]:
    """Returns every broker id's replicas, in order, also without an answer of the broker. Raises ConnectionLost."""
    described = await asyncio.gather(*(describe_broker(cluster, number) for number in await cluster.broker_ids()))
    return {one.broker_id: one for one in described if one is not None}


async def plan_balance(cluster: ClusterClient) -> list[MasterPlace]:
    """Returns the place of each master. See Admin.plan_balance."""
    return balance.plan_balance(await describe_replicas(cluster))


async def describe_broker(cluster: ClusterClient, broker_id: int) -> BrokerReplicas | None:
    """Returns the replicas of one broker id; None before its first master. Raises as describe_replicas() does."""
    stored = await read_state(cluster.session, broker_id)
    if stored is None:
        return None
    state, was_taken_back = await _state_to_go_by(cluster.session, broker_id, stored)
    master = await master_of(cluster.session, broker_id)
    slaves = {slave.replica: slave for slave in await slaves_of(cluster.session, broker_id)}
    links: dict[int, dict[str, Any]] = {}
    problems: dict[int, str] = {}
    damaged: dict[int, tuple[int, tuple[str, ...]]] = {}
    reports: dict[int, dict[str, Any]] = {}
    if master is not None:
        try:
            answer = await _ask_twice(cluster, master)
            reports[state.master] = answer["replication"]
            links = {int(link["replica"]): link for link in answer["replication"].get("slaves", [])}
            damaged[master.replica] = answer.get("damaged_count", 0), tuple(answer.get("damaged", ()))
        except NotAuthorized:  # nothing is known about the replicas
            raise
        except MetamqError as error:
            problems[state.master] = error.problem
        except (KeyError, TypeError, AttributeError) as error:
            problems[state.master] = f"its statistics have the wrong structure: {error!r}"
    # The master reports on replicas that have a link, or had one a moment ago.
    unlinked = [
        slave
        for number, slave in slaves.items()
        if number not in links and (problems or master is None or not _in_sync(state, number, slave))
    ]
    answers = await asyncio.gather(*(_why_apart(cluster, slave) for slave in unlinked))
    for slave, (reason, its) in zip(unlinked, answers, strict=True):
        problems[slave.replica], reports[slave.replica] = reason, its
    heard_ms = [ms for its in reports.values() if isinstance(ms := its.get("master_silent_ms"), int)]
    addresses = slaves if master is None else {**slaves, master.replica: master}
    numbers = sorted({state.master, *(replica for replica, _ in state.insync), *slaves, *links})
    replicas = [
        _replica(state, broker_id, n, addresses.get(n), links.get(n, {}), problems.get(n, ""), reports.get(n, {}))
        for n in numbers
    ]
    for place, one in enumerate(replicas):
        damaged_count, reasons = damaged.get(one.replica, (0, ()))
        replicas[place] = replace(one, damaged_count=damaged_count, damaged=reasons)
        if one.state == "silent" and heard_ms:
            replicas[place] = replace(replicas[place], silent_s=min(heard_ms) / 1000)
    try:
        failover = await read_failover(cluster.session, broker_id)
        mode: str = "paused" if failover.paused else failover.mode
        successor, reason = successor_of(failover, replicas)
    except CorruptData as error:
        mode, successor, reason = "unknown", None, error.problem
    waits = "" if successor is None else str(reports.get(successor, {}).get("failover_waits", ""))
    return BrokerReplicas(
        broker_id, state.epoch, state.generation, tuple(replicas), was_taken_back, mode, successor, reason, waits
    )


async def _state_to_go_by(session: Session, broker_id: int, stored: StateAt) -> tuple[BrokerState, str]:
    """Returns the state and "". If ZooKeeper was taken back, the state without its in-sync set, and the reason."""
    claims = [slave.claim for slave in await slaves_of(session, broker_id)]
    if not taken_back(known(stored), claims):
        return stored[0], ""
    stored = await read_state(session, broker_id) or stored  # the slaves may have seen a newer state
    reason = taken_back(known(stored), claims)
    return replace(stored[0], insync=()) if reason else stored[0], reason


def _replica(
    state: BrokerState,
    broker_id: int,
    number: int,
    address: BrokerAddress | None,
    link: dict[str, Any],
    problem: str,
    reports: dict[str, Any],
) -> ReplicaDescription:
    is_waiting = address is not None and address.role == "slave"
    in_sync, lag_bytes, bytes_s = _in_sync(state, number, address), link.get("lag_bytes"), link.get("bytes_s")
    return ReplicaDescription(
        broker_id=broker_id,
        replica=number,
        role="slave" if number != state.master else "waiting" if is_waiting else "master",
        address=address.address if address is not None else None,
        in_sync=in_sync,
        version=address.version if address is not None else None,
        stage=str(link.get("stage", "")),
        copying=link.get("copying"),
        lag_messages=link.get("lag_messages"),
        lag_bytes=lag_bytes,
        lag_ms=link.get("lag_ms"),
        problem=problem,
        learner=address.learner if address is not None else bool(link.get("learner")),
        refused=tuple(map(str, reports.get("refused", ()))),
        catch_up_s=lag_bytes / bytes_s if lag_bytes and bytes_s and not in_sync else None,
        status=(address.status or None) if address is not None else None,
    )


async def _ask_briefly(cluster: ClusterClient, address: BrokerAddress) -> dict[str, Any]:
    """Returns the first page of the statistics. The wait is short, because the replica may hang."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            connection = await cluster.connections.get(address)
            answer: dict[str, Any] = await connection.request(Command.STATS, Stats("", 0), timeout_s=ASK_TIMEOUT_S)
            return answer
    except TimeoutError:
        raise ConnectError(address.address, f"no answer within {ASK_TIMEOUT_S:g} s") from None


async def _ask_twice(cluster: ClusterClient, master: BrokerAddress) -> dict[str, Any]:
    """Asks twice: if a slow master looks like a hanging one, an operator may promote another replica."""
    with contextlib.suppress(MetamqError):
        return await _ask_briefly(cluster, master)
    return await _ask_briefly(cluster, master)


async def _why_apart(cluster: ClusterClient, slave: BrokerAddress) -> tuple[str, dict[str, Any]]:
    """Returns the reason that a replica has no link to its master, or waits; and its report on its replication."""
    try:
        answer = await _ask_briefly(cluster, slave)
    except MetamqError as error:
        return error.problem, {}
    its = answer.get("replication")
    its = its if isinstance(its, dict) else {}
    if its.get("role") == "waiting":
        return f"waits: {its.get('reason')}", its
    return str(answer.get("writes_refused") or ""), its


def _in_sync(state: BrokerState, replica: int, address: BrokerAddress | None) -> bool:
    """Returns False for a replica with a new incarnation, even if the former incarnation is in the in-sync set."""
    if address is None:
        return replica in {number for number, _ in state.insync}
    return (replica, address.incarnation) in state.insync


async def plan_promotion(cluster: ClusterClient, broker_id: int, replica: int) -> PromotionPlan:
    """Returns the effects of a promotion. Raises ConfigError if there is no such slave."""
    stored, slave, master = await _find(cluster.session, broker_id, replica)
    state, _reason = await _state_to_go_by(cluster.session, broker_id, stored)
    in_sync = _in_sync(state, replica, slave)
    others = [master] if master is not None else []
    others += [one for one in await slaves_of(cluster.session, broker_id) if one.replica != replica]
    lives = await _lives(cluster, master)
    loss = Loss({})
    if not in_sync:
        mine, has = await _has(cluster, state, slave), []
        for other in others:
            with contextlib.suppress(MetamqError):
                has.append(await _has(cluster, state, other))
        loss = loss_of(mine, has, known(stored), highest_epoch(0, [one.claim for one in others]))
    running = {one.replica for one in others}
    down = tuple(number for number, _ in stored[0].insync if number != replica and number not in running)
    return PromotionPlan(
        broker_id, replica, state.master, lives, in_sync, loss.lost, slave.learner, down, loss.unknown,
        loss.promote_instead,
    )  # fmt: skip


async def _has(cluster: ClusterClient, state: BrokerState, replica: BrokerAddress) -> Has:
    """Returns a replica's log ends. `state`: from _state_to_go_by(). Raises MetamqError without a valid answer."""
    answer = await _ask(cluster, replica)
    try:
        epoch = max(replica.epoch, int(answer["replication"].get("known_epoch", 0)))
        ends = {(entry["topic"], entry["partition"]): entry["end_offset"] for entry in answer["partitions"]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"the statistics of the broker at {replica.address} have the wrong structure: {error!r}"
        raise MetamqError(problem, hint="It may run another metamq release: see `metamq doctor`.") from error
    return Has(replica.replica, epoch, ends, _in_sync(state, replica.replica, replica))


async def _lives(cluster: ClusterClient, master: BrokerAddress | None) -> bool:
    """Returns True if a master answers. A killed master stays registered until its session ends."""
    if master is None:
        return False
    try:
        await _ask_twice(cluster, master)
    except NotAuthorized:
        raise
    except MetamqError:
        return False
    return True


async def promote(cluster: ClusterClient, broker_id: int, replica: int, accept_loss: bool) -> int:
    """Makes a slave the master. Returns the new epoch. Raises ConfigError, Fenced, ConnectError, Timeout."""
    _stored, slave, _master = await _find(cluster.session, broker_id, replica)
    connection = await _connected(cluster, slave)
    answer = await connection.request(Command.PROMOTE, Promote(accept_loss), timeout_s=PROMOTE_TIMEOUT_S)
    return unpack(Promoted, answer).epoch


async def _find(session: Session, broker_id: int, replica: int) -> tuple[StateAt, BrokerAddress, BrokerAddress | None]:
    """Returns the state of a broker id, one of its slaves, and its master if that is registered."""
    stored = await read_state(session, broker_id)
    if stored is None:
        raise ConfigError(f"there is no broker {broker_id}", hint="`metamq ha status` lists the brokers.")
    master = await master_of(session, broker_id)
    slaves = {slave.replica: slave for slave in await slaves_of(session, broker_id)}
    if replica not in slaves:  # a waiting replica is among them, and may be promoted
        if master is not None and master.replica == replica:
            raise ConfigError(f"replica {replica} is the master of broker {broker_id} already")
        if replica in {stored[0].master, *(number for number, _ in stored[0].insync)}:
            hint = "Start it: only a running replica can be promoted."
            if replica == stored[0].master:
                hint = "Start it, and it is the master again; or promote another replica, see `metamq ha status`."
            raise ConfigError(f"replica {replica} of broker {broker_id} is down", hint=hint)
        known = f"Its slaves are: {', '.join(map(str, slaves))}." if slaves else "It has no slave at present."
        raise ConfigError(f"broker {broker_id} has no slave {replica}", hint=known)
    return stored, slaves[replica], master


async def _connected(cluster: ClusterClient, replica: BrokerAddress) -> BrokerConnection:
    try:
        return await cluster.connections.get(replica)
    except ConnectError as error:
        error.hint = f"Nothing was done. Check if replica {replica.replica} runs or hangs: `metamq ha status`."
        raise


async def _ask(cluster: ClusterClient, address: BrokerAddress) -> dict[str, Any]:
    return await paged_requests.ask_statistics(await _connected(cluster, address))


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
