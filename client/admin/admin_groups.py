"""The administration of consumer groups: description, reset of offsets, eviction of members, removal of groups.

The data of a group is its folder in ZooKeeper. Offsets that a group keeps elsewhere (a database, a file) are not
visible here: its partitions then show no committed offset, but the kind of storage, and the last progress of their
owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from metamq.client.admin.admin_brokers import Found, ask_offsets, children
from metamq.client.admin.admin_model import (
    GroupDescription,
    GroupExplanation,
    GroupPartition,
    GroupSummary,
    MemberDescription,
    OffsetReset,
    ResetTo,
)
from metamq.client.admin.admin_topics import read_configs
from metamq.client.checks import is_whole, partition_of, wrong_type
from metamq.client.group.rebalance_decisions import why_idle
from metamq.client.group.strategies import explain
from metamq.client.model import requested_time_us
from metamq.errors import ConfigError, MetamqError, NotAuthorized, OffsetOutOfRange, PartitionNotFound
from metamq.security.names import check_name
from metamq.security.rights import ANY_PRINCIPAL
from metamq.wire.commands import EARLIEST, LATEST
from metamq.words import count
from metamq.zk.cluster.node_acls import give_group
from metamq.zk.errors import NoNode, NotEmpty
from metamq.zk.groups import members
from metamq.zk.groups.ownership import CommittedOffset, OffsetRecord, read_offsets, reset_offset
from metamq.zk.groups.plans import Plan, read_plan
from metamq.zk.names import check_consumer, check_node
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.partitions import TopicPartition, partition_order
from metamq.zk.security.owner_key import digest_of, proof_of, read_owner_key
from metamq.zk.session.acls import owner_of

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.zk.cluster.topics import TopicConfig
    from metamq.zk.groups.members import Member
    from metamq.zk.session.session import Session


async def check_exists(session: Session, group: str) -> None:
    """Raises ConfigError, with similar names, unless the group has a folder in ZooKeeper."""
    check_node("group", group)
    if await session.exists(session.paths.group(group)) is not None:
        return
    names = await children(session, session.paths.groups())
    near = difflib.get_close_matches(group, names)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "`metamq group list` shows all groups."
    raise ConfigError(f"there is no group {group!r}", hint=hint)


async def _members(session: Session, group: str) -> dict[str, Member]:
    """Returns the members like members.read_members, but does not create a missing folder for them."""
    if await session.exists(session.paths.members(group)) is None:
        return {}
    return await members.read_members(session, group)


async def all_groups(cluster: ClusterClient) -> dict[str, GroupSummary]:
    """Returns every group by name, in alphabetical order."""
    names = await children(cluster.session, cluster.session.paths.groups())
    found = await asyncio.gather(*(_summary(cluster.session, name) for name in names))
    return {summary.group: summary for summary in found}


async def _summary(session: Session, group: str) -> GroupSummary:
    present = await _members(session, group)
    stored = await read_plan(session, group)
    topics = {topic for member in present.values() for topic in member.topics}
    topics.update(await children(session, session.paths.offset_topics(group)))
    strategy = _strategy(present, stored.plan if stored else None)
    return GroupSummary(group, tuple(present), tuple(sorted(topics)), strategy, await _owner(session, group))


async def _owner(session: Session, group: str) -> str | None:
    try:
        return owner_of(await session.acl(session.paths.group(group)))
    except NoNode:  # deleted meanwhile
        return None


def _strategy(present: Mapping[str, Member], plan: Plan | None) -> str | None:
    if plan is not None:
        return plan.strategy
    return min((member.strategy for member in present.values()), default=None)


async def describe_group(cluster: ClusterClient, group: str) -> GroupDescription:
    """Returns members and partitions of a group. Raises ConfigError for an unknown group, ConnectionLost."""
    session = cluster.session
    await check_exists(session, group)
    present = await _members(session, group)
    stored = await read_plan(session, group)
    owners = await members.owned_partitions(session, group)
    topics = {topic for member in present.values() for topic in member.topics} | {tp.topic for tp in owners}
    topics.update(await children(session, session.paths.offset_topics(group)))
    configs, problems = await read_configs(cluster, topics)
    tps = await _group_partitions(session, group, configs, owners)
    records = await _offsets(session, group, tps)
    configured = {tp: (config.id, LATEST) for config in configs.values() for tp in config.topic_partitions}
    found = await ask_offsets(cluster, configured)
    partitions = [
        _partition(
            tp,
            configs.get(tp.topic),
            problems[tp.topic].problem if tp.topic in problems else "",
            records[tp],
            found.get(tp),
            owners.get(tp),
            present.get(owners.get(tp, "")),
        )
        for tp in tps
    ]
    return GroupDescription(
        group,
        _strategy(present, stored.plan if stored else None),
        stored.plan.generation if stored and stored.plan else None,
        tuple(_member(member, owners, stored.plan if stored else None) for member in present.values()),
        tuple(partitions),
        await _owner(session, group),
    )


async def _offsets(
    session: Session, group: str, tps: Collection[TopicPartition]
) -> dict[TopicPartition, OffsetRecord | None]:
    found = await read_offsets(session, [(group, tp) for tp in tps], "it counts as not committed")
    return dict(zip(tps, found, strict=True))


async def _group_partitions(
    session: Session, group: str, configs: Mapping[str, TopicConfig], owners: Mapping[TopicPartition, str]
) -> list[TopicPartition]:
    """Returns all partitions of the group's topics, and all with nodes of the group, in numeric order."""
    tps = {*owners, *(tp for config in configs.values() for tp in config.topic_partitions)}
    for topic in await children(session, session.paths.offset_topics(group)):
        names = await children(session, session.paths.offsets(group, topic))
        tps.update(TopicPartition(topic, name) for name in names)
    return sorted(tps, key=partition_order)


def _partition(
    tp: TopicPartition,
    config: TopicConfig | None,
    problem: str,
    record: OffsetRecord | None,
    found: Found | None,
    owner: str | None,
    member: Member | None,
) -> GroupPartition:
    """Returns the description of one partition, with its problem."""
    kept_by = record.kept_by if record is not None else ""
    committed = record.committed if record is not None and not kept_by else None
    published = record.published if record is not None and kept_by else None
    if config is None:
        pass
    elif committed is not None and committed.topic_id != config.id:
        problem = f"offset {committed.offset} was committed for a deleted topic of this name"
        committed = None
    elif isinstance(found, MetamqError):
        problem = found.problem
    elif found is not None and committed is not None and committed.offset < found.start_offset:
        problem = f"retention removed {count(found.start_offset - committed.offset, 'message')} before they were read"
    elif found is None:
        problem = "the topic has no such partition"
    answered = found if found is not None and not isinstance(found, MetamqError) else None
    return GroupPartition(
        tp.topic,
        tp.partition,
        committed=committed.offset if committed is not None else None,
        start=answered.start_offset if answered is not None else None,
        end=answered.stable_offset if answered is not None else None,
        owner=owner,
        host=member.host if member is not None else None,
        problem=problem,
        kept_by=kept_by,
        progress=published.offset if published is not None and config and published.topic_id == config.id else None,
    )


def _member(member: Member, owners: Mapping[TopicPartition, str], plan: Plan | None) -> MemberDescription:
    mine = sorted((tp for tp, owner in owners.items() if owner == member.consumer_id), key=partition_order)
    return MemberDescription(
        consumer_id=member.consumer_id,
        host=member.host,
        pid=member.pid,
        version=member.version,
        strategy=member.strategy,
        topics=member.topics,
        partitions=tuple(mine),
        since_ms=member.since_ms,
        progress_age_ms=max(time.time_ns() // 1_000_000 - member.progress_ms, 0),
        idle_reason=why_idle(member.consumer_id, plan) if plan is not None and not mine else "",
    )


async def explain_group(cluster: ClusterClient, group: str) -> GroupExplanation:
    """Explains the current plan. Raises ConfigError for an unknown group or one without a plan."""
    session = cluster.session
    await check_exists(session, group)
    stored = await read_plan(session, group)
    if stored is None or stored.plan is None:
        if stored is not None:
            stored.check_format(group)
        what = "no plan yet" if stored is None else "a plan that cannot be read"
        raise ConfigError(f"group {group!r} has {what}", hint="The next member that joins makes a plan.")
    plan = stored.plan
    owners = await members.owned_partitions(session, group)
    present = await _members(session, group)
    partitions = {topic: given.partition_names for topic, given in plan.inputs.topics.items()}
    words = explain(plan.inputs.members, partitions, plan.strategy, plan.assignment)
    lines = [f"Plan {plan.generation} of group {group}.", words, *_differences(plan, owners, present)]
    return GroupExplanation(
        group, plan.strategy, plan.generation, plan.inputs.members, plan.assignment, owners, "\n".join(lines)
    )


def _differences(plan: Plan, owners: Mapping[TopicPartition, str], present: Mapping[str, Member]) -> list[str]:
    """Describes how the group differs from its plan."""
    if not present:
        return ["", "The group has no members now; the next one to join makes a new plan."]
    lines = []
    gone = sorted(plan.inputs.members.keys() - present.keys())
    if gone:
        lines.append(f"  no longer in the group: {', '.join(gone)}")
    new = sorted(present.keys() - plan.inputs.members.keys())
    if new:
        lines.append(f"  not in the plan yet: {', '.join(new)}")
    for tp in sorted({*plan.assignment, *owners}, key=partition_order):
        planned, owner = plan.assignment.get(tp, "nobody"), owners.get(tp, "nobody")
        if planned != owner:
            lines.append(f"  {tp}: must go to {planned}, {owner} has it")
    return ["", "Not as planned at this moment", *(lines or ["  nothing"])]


async def reset_offsets(
    cluster: ClusterClient, group: str, topic: str, to: ResetTo, *, dry_run: bool
) -> tuple[OffsetReset, ...]:
    """Sets committed offsets. See Admin.reset_offsets."""
    session = cluster.session
    await check_exists(session, group)
    config = await cluster.topics.get(topic)
    await members.check_empty(session, group, "its offsets cannot be reset")
    targets = await _targets(cluster, config, to)
    records = await _offsets(session, group, targets)
    _check_kept_here(group, topic, records.values())
    resets = []
    for tp, (offset, epoch) in targets.items():
        record = records[tp]
        before = record.committed if record is not None else None
        is_current = before is not None and before.topic_id == config.id
        resets.append(OffsetReset(topic, tp.partition, before.offset if before and is_current else None, offset))
        if not dry_run:
            await reset_offset(session, group, tp, CommittedOffset(offset, epoch, config.id))
    return tuple(resets)


def _check_kept_here(group: str, topic: str, records: Iterable[OffsetRecord | None]) -> None:
    """Raises ConfigError if the group does not keep its offsets in ZooKeeper: a reset would have no effect."""
    elsewhere = sorted({record.kept_by for record in records if record is not None and record.kept_by})
    if elsewhere:
        raise ConfigError(
            f"group {group!r} keeps its offsets of topic {topic!r} by {', '.join(elsewhere)}, not in ZooKeeper, where "
            "a reset would write them",
            hint="Set them in that storage, or seek() in the consumer's on_assigned.",
        )


async def _targets(cluster: ClusterClient, config: TopicConfig, to: ResetTo) -> dict[TopicPartition, tuple[int, int]]:
    """Returns partition -> (offset, master's epoch). Raises OffsetOutOfRange, PartitionNotFound, ConnectError."""
    wanted = _wanted(config, to)
    found = await ask_offsets(cluster, {tp: (config.id, _question(to)) for tp in wanted})
    targets = {}
    for tp, explicit in wanted.items():
        answer = found[tp]
        if isinstance(answer, MetamqError):
            raise answer
        offset = answer.offset if explicit is None else explicit
        if not answer.start_offset <= offset <= answer.stable_offset:
            error = OffsetOutOfRange(str(tp), offset, answer.start_offset, answer.stable_offset)
            error.hint = "Give an offset among these, 'earliest', 'latest' or a time."
            raise error
        targets[tp] = (offset, answer.epoch)
    return targets


def _wanted(config: TopicConfig, to: ResetTo) -> dict[TopicPartition, int | None]:
    """Returns the partitions to reset, with their offsets if these are given. Raises ConfigError, PartitionNotFound."""
    if isinstance(to, int) and not isinstance(to, bool):
        return dict.fromkeys(config.topic_partitions, to)
    if isinstance(to, datetime) and to.tzinfo is not None:
        return dict.fromkeys(config.topic_partitions)
    if isinstance(to, str) and to in ("earliest", "latest"):
        return dict.fromkeys(config.topic_partitions)
    if not isinstance(to, Mapping):
        raise ConfigError(
            f"`to` is {to!r}",
            hint="Give 'earliest', 'latest', an aware datetime, an offset, or {TopicPartition: offset}.",
        )
    wanted: dict[TopicPartition, int | None] = {}
    for key, offset in to.items():
        tp = partition_of(key)
        if tp not in config.topic_partitions:
            raise PartitionNotFound(tp.topic, tp.partition, tuple(config.partition_names))
        if not is_whole(offset):
            raise wrong_type(f"the offset of {tp}", "a whole number", offset)
        wanted[tp] = offset
    return wanted


def _question(to: ResetTo) -> int:
    if isinstance(to, datetime):
        return requested_time_us(to)
    return EARLIEST if to == "earliest" else LATEST


async def evict(cluster: ClusterClient, group: str, consumer_id: str) -> tuple[TopicPartition, ...]:
    """Removes a member. See Admin.evict."""
    await check_exists(cluster.session, group)
    check_consumer(consumer_id)
    freed = await members.evict(cluster.session, group, consumer_id)
    return tuple(sorted(freed, key=partition_order))


async def delete_group(cluster: ClusterClient, group: str) -> None:
    """Removes a group's plan and offsets. See Admin.delete_group."""
    session = cluster.session
    await check_exists(session, group)
    await members.check_empty(session, group, "it cannot be deleted")
    try:
        # Without this folder there are no members: a process that joins later creates it, and all nodes below, again.
        with contextlib.suppress(NoNode):
            await session.delete(session.paths.members(group), ANY_VERSION)
        await _delete_tree(session, session.paths.group(group))
    except NotEmpty:
        await members.check_empty(session, group, "it cannot be deleted")
        raise ConfigError(f"group {group!r} is in use again", hint="Stop its members first.") from None


async def set_group_owner(cluster: ClusterClient, group: str, principal: str) -> list[str]:
    """Gives a group to another principal. See Admin.set_group_owner."""
    if principal != ANY_PRINCIPAL:
        check_name(principal)
    session = cluster.session
    if session.security.zookeeper is None:
        raise ConfigError("groups have owners only if ZooKeeper knows its clients by TLS", hint="See docs/security.md.")
    await check_exists(session, group)
    await members.check_empty(session, group, "it cannot be given to another owner")
    digest = ""
    with contextlib.suppress(NotAuthorized):  # only administrators read the key
        digest = digest_of(proof_of(await read_owner_key(session), principal))
    return await give_group(session, group, principal, digest)


async def _delete_tree(session: Session, path: str) -> None:
    for name in await children(session, path):
        await _delete_tree(session, f"{path}/{name}")
    with contextlib.suppress(NoNode):
        await session.delete(path, ANY_VERSION)
