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
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from metamq.client.admin.admin_brokers import Found, ask_offsets, children
from metamq.client.admin.admin_model import (
    GroupDescription,
    GroupExplanation,
    GroupPartition,
    GroupSummary,
    MemberDescription,
    OffsetChange,
    OffsetReset,
    Place,
    ResetTo,
)
from metamq.client.admin.admin_topics import read_configs
from metamq.client.checks import is_whole, partition_of, wrong_type
from metamq.client.group.rebalance_decisions import topics_by_member, why_idle
from metamq.client.group.strategies import explain
from metamq.client.model import requested_time_us
from metamq.client.offsets.offsets import CommitRequest
from metamq.client.offsets.offsets_database import DatabaseOffsets
from metamq.client.subscriptions import selected
from metamq.errors import ConfigError, MetamqError, NotAuthorized, OffsetOutOfRange, PartitionNotFound
from metamq.security.names import check_name
from metamq.security.rights import ANY_PRINCIPAL
from metamq.wire.commands import EARLIEST, LATEST
from metamq.words import count
from metamq.zk.cluster.node_acls import give_group
from metamq.zk.errors import NoNode, NotEmpty
from metamq.zk.groups import members
from metamq.zk.groups.hold import held
from metamq.zk.groups.ownership import (
    CommittedOffset,
    OffsetRecord,
    clear,
    publish,
    read_offset,
    read_offsets,
    reset_offset,
)
from metamq.zk.groups.plans import Plan, read_plan
from metamq.zk.groups.together import commit_all
from metamq.zk.names import check_consumer, check_node
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.partitions import TopicPartition, partition_order
from metamq.zk.security.owner_key import digest_of, proof_of, read_owner_key
from metamq.zk.session.acls import owner_of

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.client.typevars import T
    from metamq.zk.cluster.topics import TopicConfig
    from metamq.zk.groups.members import Member
    from metamq.zk.session.session import Session

Records = dict[TopicPartition, OffsetRecord | None]


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
    existing = await cluster.topics.names()
    found = await asyncio.gather(*(_summary(cluster.session, name, existing) for name in names))
    return {summary.group: summary for summary in found}


def _read_by(present: Mapping[str, Member], existing: Collection[str]) -> frozenset[str]:
    return selected({one for member in present.values() for one in member.topics}, existing)


async def _summary(session: Session, group: str, existing: Collection[str]) -> GroupSummary:
    present = await _members(session, group)
    stored = await read_plan(session, group)
    read = _read_by(present, existing)
    others = set(await children(session, session.paths.offset_topics(group))) - read
    cleared = _cleared_topics(await _records(session, group, others, 1))
    cleared = _cleared_topics(await _records(session, group, cleared))
    topics = read | others - cleared
    strategy = _strategy(present, stored.plan if stored else None)
    return GroupSummary(group, tuple(present), tuple(sorted(topics)), strategy, await _owner(session, group))


async def _records(session: Session, group: str, topics: Collection[str], limit: int | None = None) -> Records:
    """Reads the offset nodes of these topics: all, or so many of each topic."""
    names = await asyncio.gather(*(children(session, session.paths.offsets(group, topic)) for topic in topics))
    tps = [TopicPartition(topic, name) for topic, found in zip(topics, names, strict=True) for name in found[:limit]]
    return await _offsets(session, group, tps)


def _cleared_topics(records: Records) -> set[str]:
    """Returns the topics of which each offset was cleared: they were deleted."""
    kept = {tp.topic for tp, record in records.items() if record is None or not record.is_cleared}
    return {tp.topic for tp in records} - kept


async def _owner(session: Session, group: str) -> str | None:
    try:
        return owner_of(await session.acl(session.paths.group(group)))
    except NoNode:  # deleted meanwhile
        return None


def _strategy(present: Mapping[str, Member], plan: Plan | None) -> str | None:
    if plan is not None:
        return plan.strategy
    return min((member.strategy for member in present.values()), default=None)


async def describe_group(
    cluster: ClusterClient, group: str, offsets: DatabaseOffsets | None = None
) -> GroupDescription:
    """Returns members and partitions of a group. See Admin.describe_group."""
    session = cluster.session
    await check_exists(session, group)
    present = await _members(session, group)
    stored = await read_plan(session, group)
    owners = await members.owned_partitions(session, group)
    read = _read_by(present, await cluster.topics.names()) | {tp.topic for tp in owners}
    kept = await children(session, session.paths.offset_topics(group))
    records = await _records(session, group, kept)
    in_database = {} if offsets is None else await _read_database(offsets, group, records)
    topics = read.union(kept) - (_cleared_topics(records) - read)
    configs, problems = await read_configs(cluster, topics)
    configured = {tp: (config.id, LATEST) for config in configs.values() for tp in config.topic_partitions}
    tps = sorted({*owners, *configured, *(tp for tp in records if tp.topic in topics)}, key=partition_order)
    found = await ask_offsets(cluster, configured)
    partitions = [
        _partition(
            tp,
            configs.get(tp.topic),
            problems[tp.topic].problem if tp.topic in problems else "",
            in_database.get(tp, records.get(tp)),
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


async def _read_database(offsets: DatabaseOffsets, group: str, records: Records) -> Records:
    """Returns the records with the offsets of the database. Raises ConfigError if the group keeps some elsewhere."""
    for tp, record in records.items():
        _check_storage(group, tp.topic, record, type(offsets).__name__)
    found = await offsets.read(group, list(records))
    return {tp: replace(one, committed=found[tp], published=None) for tp, one in records.items() if one is not None}


async def _offsets(session: Session, group: str, tps: Collection[TopicPartition]) -> Records:
    found = await read_offsets(session, [(group, tp) for tp in tps], "it counts as not committed")
    return dict(zip(tps, found, strict=True))


def _record(stored: tuple[OffsetRecord, int] | None) -> OffsetRecord | None:
    return stored[0] if stored else None


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
    committed = record.committed if record is not None else None
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
    words = explain(topics_by_member(plan.inputs), partitions, plan.strategy, plan.assignment)
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
    cluster: ClusterClient, group: str, topic: str, to: ResetTo, *, dry_run: bool, offsets: DatabaseOffsets | None
) -> tuple[OffsetReset, ...]:
    """Sets committed offsets. See Admin.reset_offsets."""
    if offsets is not None and not isinstance(offsets, DatabaseOffsets):
        raise wrong_type("`offsets`", "a metamq.DatabaseOffsets", offsets)
    session = cluster.session
    await check_exists(session, group)
    config = await cluster.topics.get(topic)
    await members.check_empty(session, group, "its offsets cannot be reset")
    targets = await _targets(cluster, config, to)
    if offsets is not None:
        return await _reset_in_database(session, group, config, targets, offsets, dry_run=dry_run)
    records = await _offsets(session, group, list(targets))
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


async def _reset_in_database(
    session: Session,
    group: str,
    config: TopicConfig,
    targets: Mapping[TopicPartition, tuple[int, int]],
    offsets: DatabaseOffsets,
    *,
    dry_run: bool,
) -> tuple[OffsetReset, ...]:
    """Sets offsets in a database, as an owner would: its claim waits there for the last owner's open transaction."""
    kept_by = type(offsets).__name__
    for record in (await _offsets(session, group, list(targets))).values():
        _check_storage(group, config.topic, record, kept_by)
    before = await offsets.read(group, list(targets))
    if not dry_run:
        wanted = [(tp, config.id) for tp in targets]
        async with held(session, group, wanted, "its offsets cannot be reset", kept_by=kept_by) as claims:
            found = _raise_first(await offsets.claimed(claims))
            before = {tp: found[tp] for tp in targets}
            requests = [CommitRequest(replace(one, committed=found[one.tp]), *targets[one.tp]) for one in claims]
            _raise_first(await offsets.commit(requests))
            for one in claims:
                await publish(session, one, targets[one.tp][0])
    return tuple(
        OffsetReset(config.topic, tp.partition, _current(before[tp], config), offset)
        for tp, (offset, _epoch) in targets.items()
    )


def _raise_first(outcomes: Mapping[TopicPartition, T | MetamqError]) -> dict[TopicPartition, T]:
    found = {}
    for tp, outcome in outcomes.items():
        if isinstance(outcome, MetamqError):
            raise outcome
        found[tp] = outcome
    return found


def _current(committed: CommittedOffset | None, config: TopicConfig) -> int | None:
    """Returns the offset, unless it was committed for a deleted topic of this name."""
    return committed.offset if committed is not None and committed.topic_id == config.id else None


def _check_storage(group: str, topic: str, record: OffsetRecord | None, kept_by: str) -> None:
    """Raises ConfigError if the group keeps its offsets in another storage than this one."""
    if record is None or record.kept_by == kept_by or not (record.kept_by or record.committed):
        return
    raise ConfigError(
        f"group {group!r} keeps its offsets of topic {topic!r} in {record.kept_by or 'ZooKeeper'}, not by {kept_by}",
        hint="`metamq group describe` names the storage. For ZooKeeper leave out `offsets=`, or --database.",
    )


async def delete_offsets(cluster: ClusterClient, group: str, topic: str, *, dry_run: bool) -> tuple[OffsetChange, ...]:
    """Deletes the offsets of a topic. See Admin.delete_offsets."""
    session = cluster.session
    await check_exists(session, group)
    check_node("topic", topic)
    consequence = "its offsets cannot be deleted"
    await _check_unread(session, group, {topic}, consequence)
    tps = [TopicPartition(topic, name) for name in await children(session, session.paths.offsets(group, topic))]
    records = {tp: stored[0] for tp in tps if (stored := await read_offset(session, group, tp)) is not None}
    _check_kept_here(group, topic, records.values())
    left = sorted((tp for tp, record in records.items() if not record.is_cleared), key=partition_order)
    if not left:
        hint = "`metamq group describe` shows its offsets."
        raise ConfigError(f"group {group!r} has no offsets in topic {topic!r}", hint=hint)
    if not dry_run:
        async with held(session, group, [(tp, "") for tp in left], consequence) as claims:
            await asyncio.gather(*(clear(session, one) for one in claims))
    befores = {tp: records[tp].committed for tp in left}
    return tuple(OffsetChange(topic, tp.partition, one.offset if one else None, None) for tp, one in befores.items())


async def _check_unread(session: Session, group: str, topics: Set[str], consequence: str) -> None:
    """Raises ConfigError with the names of the members that read one of the topics."""
    present = await _members(session, group)
    readers = [one for one in present.values() if topics & selected(one.topics, topics)]
    if readers:
        raise ConfigError(
            f"group {group!r} has members that read topic {', '.join(sorted(topics))}, {consequence}: "
            f"{', '.join(f'{one.consumer_id} (process {one.pid} on {one.host})' for one in readers)}",
            hint="Stop them first; `metamq group evict` removes one that is stuck.",
        )


async def copy_offsets(
    cluster: ClusterClient,
    source: str,
    target: str,
    topics: Collection[str] | None,
    *,
    overwrite: bool,
    dry_run: bool,
) -> tuple[OffsetChange, ...]:
    """Copies offsets to another group. See Admin.copy_offsets."""
    session = cluster.session
    await check_exists(session, source)
    check_node("group", target)
    if source == target:
        raise ConfigError(f"group {source!r} is the source and the target", hint="Name two groups.")
    if isinstance(topics, str):
        raise wrong_type("`topics`", "several names of topics", topics)
    wanted = await _to_copy(cluster, source, topics)
    consequence = "no offsets can be copied to it"
    await _check_unread(session, target, {tp.topic for tp in wanted}, consequence)
    records = {tp: _record(await read_offset(session, target, tp)) for tp in wanted}
    for topic in sorted({tp.topic for tp in wanted}):
        _check_kept_here(target, topic, (record for tp, record in records.items() if tp.topic == topic))
    befores = {tp: record.committed if record is not None else None for tp, record in records.items()}
    if not overwrite:
        _check_unset(target, befores, wanted)
    if not dry_run:
        async with held(session, target, [(tp, one.topic_id) for tp, one in wanted.items()], consequence) as claims:
            befores = {one.tp: one.committed for one in claims}
            if not overwrite:
                _check_unset(target, befores, wanted)
            writes = [(one, wanted[one.tp].offset, wanted[one.tp].epoch) for one in claims]
            _raise_first(dict(zip(wanted, await commit_all(session, writes), strict=True)))
    return tuple(
        OffsetChange(*tp, one.offset if (one := befores[tp]) and one.topic_id == new.topic_id else None, new.offset)
        for tp, new in wanted.items()
    )


async def _to_copy(
    cluster: ClusterClient, group: str, topics: Collection[str] | None
) -> dict[TopicPartition, CommittedOffset]:
    """Returns the offsets of a group in these topics, or in all that exist. Raises ConfigError if there are none."""
    session = cluster.session
    names = await children(session, session.paths.offset_topics(group)) if topics is None else sorted({*topics})
    configs, problems = await read_configs(cluster, names)
    for topic in names if topics is not None else ():
        if topic not in configs:
            raise problems[topic]
    found: dict[TopicPartition, CommittedOffset] = {}
    for topic, config in configs.items():
        tps = [TopicPartition(topic, name) for name in await children(session, session.paths.offsets(group, topic))]
        records = {tp: _record(await read_offset(session, group, tp)) for tp in sorted(tps, key=partition_order)}
        _check_kept_here(group, topic, records.values())
        for tp, record in records.items():
            if record is not None and record.committed is not None and record.committed.topic_id == config.id:
                found[tp] = record.committed
    if not found:
        where = "" if topics is None else f" in topic {', '.join(names)}"
        raise ConfigError(f"group {group!r} has no offsets{where} to copy", hint="`metamq group describe` shows them.")
    return found


def _check_unset(
    group: str,
    befores: Mapping[TopicPartition, CommittedOffset | None],
    wanted: Mapping[TopicPartition, CommittedOffset],
) -> None:
    """Raises ConfigError if the group has other offsets for the present topics."""
    others = [
        f"{tp}={one.offset}"
        for tp, new in wanted.items()
        if (one := befores[tp]) is not None and one.topic_id == new.topic_id and one.offset != new.offset
    ]
    if others:
        raise ConfigError(
            f"group {group!r} has offsets of its own: {', '.join(others)}",
            hint="Copy them with overwrite=True, or --overwrite, to replace these.",
        )


def _check_kept_here(group: str, topic: str, records: Iterable[OffsetRecord | None]) -> None:
    """Raises ConfigError if the group does not keep its offsets in ZooKeeper: a reset would have no effect."""
    elsewhere = sorted({record.kept_by for record in records if record is not None and record.kept_by})
    if elsewhere:
        raise ConfigError(
            f"group {group!r} keeps its offsets of topic {topic!r} by {', '.join(elsewhere)}, not in ZooKeeper, where "
            "this would write them",
            hint="Reset those in a database with --database, or offsets=. Or seek() in the consumer's on_assigned.",
        )


async def find_offsets(cluster: ClusterClient, topic: str, at: ResetTo) -> dict[TopicPartition, int]:
    """Returns the offset of each partition at a place. See Admin.offsets."""
    found = await _targets(cluster, await cluster.topics.get(topic), at)
    return {tp: offset for tp, (offset, _epoch) in found.items()}


async def _targets(cluster: ClusterClient, config: TopicConfig, to: ResetTo) -> dict[TopicPartition, tuple[int, int]]:
    """Returns partition -> (offset, master's epoch). Raises OffsetOutOfRange, PartitionNotFound, ConnectError."""
    wanted = wanted_places(config, to)
    found = await ask_offsets(cluster, {tp: (config.id, question(place)) for tp, place in wanted.items()})
    targets = {}
    for tp, place in wanted.items():
        answer = found[tp]
        if isinstance(answer, MetamqError):
            raise answer
        offset = place if isinstance(place, int) else answer.offset
        if not answer.start_offset <= offset <= answer.stable_offset:
            error = OffsetOutOfRange(str(tp), offset, answer.start_offset, answer.stable_offset)
            error.hint = "Give an offset among these, 'earliest', 'latest' or a time."
            raise error
        targets[tp] = (offset, answer.epoch)
    return targets


def wanted_places(config: TopicConfig, to: ResetTo) -> dict[TopicPartition, Place]:
    """Returns the chosen partitions with their places. Raises ConfigError, PartitionNotFound."""
    if not isinstance(to, Mapping):
        if not _is_place(to):
            hint = "Give 'earliest', 'latest', an aware datetime, an offset, or {TopicPartition: one of these}."
            raise ConfigError(f"`to` is {to!r}", hint=hint)
        return dict.fromkeys(config.topic_partitions, to)
    wanted: dict[TopicPartition, Place] = {}
    for key, place in to.items():
        tp = partition_of(key)
        if tp not in config.topic_partitions:
            raise PartitionNotFound(tp.topic, tp.partition, tuple(config.partition_names))
        if not _is_place(place):
            raise wrong_type(f"the offset of {tp}", "a whole number, 'earliest', 'latest' or an aware datetime", place)
        wanted[tp] = place
    return wanted


def _is_place(value: object) -> bool:
    if isinstance(value, datetime):
        return value.tzinfo is not None
    return is_whole(value) or (isinstance(value, str) and value in ("earliest", "latest"))


def question(to: Place) -> int:
    """Returns the time to ask for in an OFFSETS."""
    if isinstance(to, datetime):
        return requested_time_us(to)
    return EARLIEST if to == "earliest" else LATEST


async def evict(cluster: ClusterClient, group: str, consumer_id: str) -> tuple[TopicPartition, ...]:
    """Removes a member. See Admin.evict."""
    await check_exists(cluster.session, group)
    check_consumer(consumer_id)
    return tuple(sorted(await members.evict(cluster.session, group, consumer_id), key=partition_order))


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
