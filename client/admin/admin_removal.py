"""The removal of a broker id, or of a replica, that is gone permanently, from ZooKeeper; and the loss of the removal.

A broker id is removed in three steps, each of which may be repeated: its state, so a broker that comes back
nevertheless is refused and keeps its data; its partitions in the topics; the groups' offsets in these partitions. A
registered broker or replica is not removed, and a broker that registers meanwhile stops the first step.

Messages are removed by a trim in the topic's configuration (metamq.zk.cluster.trims), which each replica carries out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metamq.client.admin.admin_brokers import ask_offsets, children, partition_statistics
from metamq.client.admin.admin_groups import question, wanted_places
from metamq.client.admin.admin_model import PartitionTrim, RemovalPlan
from metamq.client.admin.admin_topics import wait_for
from metamq.client.checks import check_seconds
from metamq.client.net import paged_requests
from metamq.errors import ConfigError, CorruptData, MetamqError, NotAuthorized, OffsetOutOfRange, TopicNotFound
from metamq.words import count
from metamq.zk.cluster.brokers import BrokerState, master_of, read_state, state_json
from metamq.zk.cluster.epochs import CLASSES
from metamq.zk.cluster.replicas import had_slaves, slaves_of
from metamq.zk.cluster.topics import TopicConfig, from_json, to_json
from metamq.zk.cluster.trims import Trim
from metamq.zk.errors import BadVersion, NoNode, NotEmpty
from metamq.zk.groups.members import owned_partitions
from metamq.zk.groups.plans import read_plan
from metamq.zk.names import parse_partition, partition_name
from metamq.zk.nodes import ANY_VERSION, Check, Delete, Op, SetData
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import TrimBefore
    from metamq.client.net.cluster import ClusterClient
    from metamq.zk.cluster.registrations import BrokerAddress
    from metamq.zk.session.session import Session

RELEASE_S = 10.0
LOOK_AGAIN_S = 0.05
REPLICA_S = 3.0
"""Seconds for the answer of one replica."""
ACCEPT_HINT = "`--accept-loss`, in Python `accept_loss=True`, removes it nevertheless."


async def plan_removal(cluster: ClusterClient, broker_id: int, replica: int | None) -> RemovalPlan:
    """Returns the effects of a removal. See Admin.plan_removal."""
    if replica is None:
        return await _plan_broker(cluster, broker_id)
    return (await _plan_replica(cluster.session, broker_id, replica))[0]


async def remove(cluster: ClusterClient, broker_id: int, replica: int | None, accept_loss: bool) -> RemovalPlan:
    """Removes a broker id or a replica. See Admin.remove_broker and Admin.remove_replica."""
    if replica is None:
        return await _remove_broker(cluster, broker_id, accept_loss)
    return await _remove_replica(cluster.session, broker_id, replica, accept_loss)


def _check_loss(plan: RemovalPlan, accept_loss: bool) -> None:
    if plan.loss and not accept_loss:
        raise ConfigError(f"{plan.who} is not removed: {plan.loss}", hint=ACCEPT_HINT)


async def _registered(session: Session, broker_id: int) -> dict[int, BrokerAddress]:
    master = await master_of(session, broker_id)
    if await session.exists(session.paths.broker(broker_id)) is None:
        return {}
    found = {slave.replica: slave for slave in await slaves_of(session, broker_id)}
    return found if master is None else {**found, master.replica: master}


def _runs(address: BrokerAddress) -> ConfigError:
    return ConfigError(
        f"replica {address.replica} of broker {address.broker_id} is registered, at {address.address}",
        hint="A registered replica is not removed: stop it. A killed one stays registered until its session ends.",
    )


# -- a replica --------------------------------------------------------------------------------------------------------


async def _plan_replica(session: Session, broker_id: int, replica: int) -> tuple[RemovalPlan, list[Op]]:
    if not 0 <= replica < CLASSES:
        raise ConfigError(f"there is no replica {replica}", hint=f"Replicas have the numbers 0 to {CLASSES - 1}.")
    stored = await read_state(session, broker_id)
    if stored is None:
        raise ConfigError(f"there is no broker {broker_id}", hint="`metamq ha status` lists the brokers.")
    state, version = stored
    present = await _registered(session, broker_id)
    if replica == state.master:
        raise _is_master(broker_id, state, present)
    if replica in present:
        raise _runs(present[replica])
    rest = tuple(member for member in state.insync if member[0] != replica)
    in_sync = rest != state.insync
    lacking = [
        number for number, incarnation in rest if number in present and present[number].incarnation != incarnation
    ]
    loss = ""
    if in_sync and len(lacking) == len(rest):
        loss = "it is the only replica that is known to have all acknowledged messages"
    is_last = len(rest) <= 1 and not present.keys() - {state.master}
    forgets = is_last and await had_slaves(session, broker_id)
    if not in_sync and not forgets:
        raise ConfigError(
            f"ZooKeeper has nothing about replica {replica} of broker {broker_id}",
            hint=_nothing_to_remove({*present, *(number for number, _ in rest)} - {state.master}),
        )
    path = session.paths.broker_state(broker_id)
    operations: list[Op] = [Check(path, version)]
    if in_sync:
        operations = [SetData(path, state_json(replace(state, insync=rest)), version)]
    if forgets:
        operations.append(Delete(session.paths.had_slaves(broker_id), ANY_VERSION))
    return RemovalPlan(broker_id, replica, in_sync, forgets, {}, (), 0, loss), operations


def _is_master(broker_id: int, state: BrokerState, present: Mapping[int, BrokerAddress]) -> ConfigError:
    others = {number for number, _ in state.insync} - {state.master}
    ready = sorted(others & present.keys()) or sorted(others | present.keys() - {state.master})
    if ready:
        hint = f"Promote another one first: `metamq ha promote --broker {broker_id} --slave {ready[0]}`."
    else:
        hint = (
            f"It is the only replica. `metamq cluster remove-broker {broker_id}` removes the broker id, with its "
            "partitions."
        )
    return ConfigError(f"replica {state.master} is the master of broker {broker_id}", hint=hint)


def _nothing_to_remove(slaves: Iterable[int]) -> str:
    others = ", ".join(str(number) for number in sorted(slaves))
    has = f"Its slaves are: {others}." if others else "The broker has no slave."
    return f"It was removed before, or never started, or is down and not in sync: there is nothing to remove. {has}"


async def _remove_replica(session: Session, broker_id: int, replica: int, accept_loss: bool) -> RemovalPlan:
    while True:
        plan, operations = await _plan_replica(session, broker_id, replica)
        _check_loss(plan, accept_loss)
        try:
            await session.multi(operations)
        except (BadVersion, NoNode, NotEmpty):
            continue
        if plan.forgets_slaves and await slaves_of(session, broker_id):  # it came between the check and the removal
            await session.ensure(session.paths.had_slaves(broker_id))
        return plan


# -- a broker id ------------------------------------------------------------------------------------------------------


async def _plan_broker(cluster: ClusterClient, broker_id: int) -> RemovalPlan:
    session = cluster.session
    for _replica, address in sorted((await _registered(session, broker_id)).items()):
        raise _runs(address)
    partitions, emptied = {}, []
    for topic in await cluster.topics.names():
        with contextlib.suppress(CorruptData, ConfigError):  # no broker has partitions of such a topic
            config = await cluster.topics.get_or_none(topic)
            if config is not None and broker_id in config.partitions:
                partitions[topic] = config.partitions[broker_id]
                if len(config.partitions) == 1:
                    emptied.append(topic)
    offsets = len(await _offsets(session, broker_id))
    if await read_state(session, broker_id) is None and not partitions and not offsets:
        raise ConfigError(f"there is no broker {broker_id}", hint="`metamq ha status` lists the brokers.")
    lost = ", ".join(f"{count(number, 'partition')} of {topic}" for topic, number in partitions.items())
    loss = f"the messages in {lost} are lost" if lost else ""
    return RemovalPlan(broker_id, None, False, False, partitions, tuple(emptied), offsets, loss)


async def _remove_broker(cluster: ClusterClient, broker_id: int, accept_loss: bool) -> RemovalPlan:
    session = cluster.session
    plan = await _plan_broker(cluster, broker_id)
    _check_loss(plan, accept_loss)
    await _delete_state(session, broker_id)
    for topic in plan.partitions:
        await _take_from(session, topic, broker_id)
    await _until_released(session, broker_id)
    for path in await _offsets(session, broker_id):
        with contextlib.suppress(NoNode):
            await session.delete(path, ANY_VERSION)
    return plan


async def _until_released(session: Session, broker_id: int) -> None:
    """Waits until no member holds or plans a partition of the broker: it would create the offset's node again.

    Waits at most RELEASE_S: a member that hangs leaves an offset that no process uses.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RELEASE_S):
            groups = await children(session, session.paths.groups())
            while groups:
                held = await asyncio.gather(*(_is_held(session, group, broker_id) for group in groups))
                groups = [group for group, is_held in zip(groups, held, strict=True) if is_held]
                await asyncio.sleep(LOOK_AGAIN_S if groups else 0)


async def _is_held(session: Session, group: str, broker_id: int) -> bool:
    held = [tp.partition for tp in await owned_partitions(session, group)]
    if await children(session, session.paths.members(group)):
        stored = await read_plan(session, group)
        if stored is not None and stored.plan is not None:
            held += [tp.partition for tp in stored.plan.assignment]
    return any(_is_of(name, broker_id) for name in held)


async def _delete_state(session: Session, broker_id: int) -> None:
    paths = session.paths
    while True:
        folder = await children(session, paths.broker(broker_id))
        for _replica, address in sorted((await _registered(session, broker_id)).items()):
            raise _runs(address)
        if not folder and await session.exists(paths.broker(broker_id)) is None:
            return
        nodes = [f"{paths.broker(broker_id)}/{name}" for name in folder]
        try:
            await session.multi([Delete(path, ANY_VERSION) for path in [*nodes, paths.broker(broker_id)]])
        except (NoNode, NotEmpty, BadVersion):
            continue
        return


async def _take_from(session: Session, topic: str, broker_id: int) -> None:
    """Removes a broker's partitions from a topic. A topic without other partitions is deleted."""
    path = session.paths.topic_config(topic)
    while True:
        node = await session.get_or_none(path)
        if node is None:
            return
        config: TopicConfig = from_json(topic, node.data)
        left = {number: partitions for number, partitions in config.partitions.items() if number != broker_id}
        try:
            if left == config.partitions:
                return
            if left:
                trims = {name: one for name, one in config.trims.items() if not _is_of(name, broker_id)}
                await session.set(path, to_json(replace(config, partitions=left, trims=trims)), node.version)
            else:
                await session.delete(path, node.version)
        except (BadVersion, NoNode):
            continue
        return


async def _offsets(session: Session, broker_id: int) -> list[str]:
    """Returns the nodes of the groups' committed offsets in a broker's partitions."""
    paths = session.paths

    async def of_topic(group: str, topic: str) -> list[str]:
        names = await children(session, paths.offsets(group, topic))
        return [paths.offset(group, topic, name) for name in names if _is_of(name, broker_id)]

    async def of_group(group: str) -> list[str]:
        topics = await children(session, paths.offset_topics(group))
        found = await asyncio.gather(*(of_topic(group, topic) for topic in topics))
        return [path for one in found for path in one]

    found = await asyncio.gather(*map(of_group, await children(session, paths.groups())))
    return [path for one in found for path in one]


def _is_of(name: str, broker_id: int) -> bool:
    try:
        return parse_partition(name)[0] == broker_id
    except MetamqError:
        return False


# -- messages: see Admin.trim -----------------------------------------------------------------------------------------


async def trim(
    cluster: ClusterClient, topic: str, before: TrimBefore, *, dry_run: bool, timeout_s: float
) -> tuple[PartitionTrim, ...]:
    """Deletes the messages before an offset or a time. See Admin.trim."""
    check_seconds("timeout_s", timeout_s)
    config = await cluster.topics.get(topic)
    planned = await _plan_trims(cluster, config, before)
    if dry_run:
        return tuple(plan for plan, _trim in planned.values())

    def change(present: TopicConfig) -> TopicConfig:
        if present.id != config.id:
            raise TopicNotFound.made_anew(topic, present.id, config.id)
        trims = dict(present.trims)
        for tp, (plan, new) in planned.items():
            there = trims.get(tp.partition)
            is_newer = there is not None and there != config.trims.get(tp.partition) and there.offset >= new.offset
            is_done = there is not None and new.offset <= plan.begin_before
            if new.epoch >= 0 and not is_newer and not is_done:
                trims[tp.partition] = new
        return replace(present, trims=trims)

    await cluster.topics.alter(topic, change)
    starts: dict[TopicPartition, int] = {}
    hint = "The deletion is stored: each replica carries it out when it can. Repeat the command to see it done."

    async def missing() -> str:
        starts.clear()
        present = await cluster.topics.get(topic)  # with later trims of others
        wanted = {tp: there for tp in planned if (there := present.trims.get(tp.partition)) is not None}
        return await _untrimmed(cluster, wanted, starts)

    await wait_for(f"the deletion in topic {topic!r}", timeout_s, missing, hint)
    return tuple(
        replace(plan, kept_on_disk=max(plan.begin - starts.get(tp, plan.begin), 0))
        for tp, (plan, _trim) in planned.items()
    )


async def _plan_trims(
    cluster: ClusterClient, config: TopicConfig, before: TrimBefore
) -> dict[TopicPartition, tuple[PartitionTrim, Trim]]:
    """Returns the effect on each partition. Raises OffsetOutOfRange, PartitionNotFound, ConnectError, ConfigError."""
    wanted = wanted_places(config, before)
    if "earliest" in wanted.values():
        raise ConfigError("`before` is 'earliest'", hint="Give 'latest', an aware datetime, or offsets.")
    found = await ask_offsets(cluster, {tp: (config.id, question(place)) for tp, place in wanted.items()})
    figures = await partition_statistics(cluster, sorted({parse_partition(tp.partition)[0] for tp in wanted}))
    planned = {}
    for tp, place in wanted.items():
        answer = found[tp]
        if isinstance(answer, MetamqError):
            raise answer
        offset = place if isinstance(place, int) else answer.offset
        start, end = answer.start_offset, answer.stable_offset
        if not 0 <= offset <= end:
            error = OffsetOutOfRange(str(tp), offset, start, end)
            error.hint = f"Give an offset up to {end:,}, a time or 'latest'."
            raise error
        messages = max(offset - start, 0)
        size = figures[tp].size_bytes if tp in figures else None
        share = None if size is None else round(size * messages / max(end - start, 1))
        plan = PartitionTrim(tp.topic, tp.partition, start, max(offset, start), messages, share)
        planned[tp] = plan, Trim(offset, answer.epoch)
    return planned


async def _untrimmed(
    cluster: ClusterClient, wanted: Mapping[TopicPartition, Trim], starts: dict[TopicPartition, int]
) -> str:
    """Returns a replica that still has deleted messages on its disk, in words, or "". Notes the starts of the logs."""
    for broker_id in sorted({parse_partition(tp.partition)[0] for tp in wanted}):
        replicas = await _registered(cluster.session, broker_id)
        if not any(one.role == "master" for one in replicas.values()):
            return f"broker {broker_id} has no master at present"
        its = {tp: trim_ for tp, trim_ in wanted.items() if parse_partition(tp.partition)[0] == broker_id}
        for address in replicas.values():
            try:
                async with asyncio.timeout(REPLICA_S):
                    problem = await _untrimmed_at(cluster, address, its, starts)
            except NotAuthorized:
                raise
            except MetamqError as error:
                problem = f"does not answer: {error.problem}"
            except TimeoutError:
                problem = "does not answer"
            if problem:
                return f"replica {address.replica} of broker {broker_id} at {address.address} {problem}"
    return ""


async def _untrimmed_at(
    cluster: ClusterClient,
    address: BrokerAddress,
    wanted: Mapping[TopicPartition, Trim],
    starts: dict[TopicPartition, int],
) -> str:
    connection = await cluster.connections.get(address)
    found = (await paged_requests.ask_statistics(connection))["partitions"]
    entries = {TopicPartition(one["topic"], partition_name(address.broker_id, one["partition"])): one for one in found}
    for tp, trim_ in wanted.items():
        entry = entries.get(tp, {})
        if "trimmed" not in entry:
            return f"does not serve {tp}, or its metamq {address.version} knows no trims"
        if tuple(entry["trimmed"]) != trim_:
            return f"still has deleted messages of {tp} on its disk"
        starts[tp] = min(entry["start_offset"], starts.get(tp, entry["start_offset"]))
    return ""
