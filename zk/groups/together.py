"""Claims, commits and releases of many partitions, and beats of many members, in transactions of up to a hundred
operations.

A transaction costs ZooKeeper one write to its disk, as one operation does: so a hundred commits cost little more than
one. The conditions are those of `metamq.zk.groups.ownership`. If one of them does not hold, ZooKeeper refuses the whole
transaction and changes nothing. Then its partitions are written one by one, and each has its own outcome. If an answer
is lost, all partitions of that transaction have this outcome.

All functions return the outcomes in the order of their arguments. An error of metamq is an outcome of its partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from metamq.errors import ConnectError, MetamqError
from metamq.zk.groups import members, ownership

if TYPE_CHECKING:
    from metamq.zk.groups.members import Member
    from metamq.zk.groups.ownership import NotYet, Ownership
    from metamq.zk.nodes import Node, Op
    from metamq.zk.partitions import TopicPartition
    from metamq.zk.session.session import Session

OPERATIONS_MAX = 100
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Step(Generic[T]):
    """The step of one partition. Its `operations` lead to `after`; `alone` does the same in its own transaction."""

    operations: Sequence[Op]
    after: T
    alone: Callable[[], Awaitable[T]]


async def claim_all(
    session: Session,
    group: str,
    wanted: Sequence[tuple[TopicPartition, str]],
    consumer_id: str,
    *,
    freed: Callable[[TopicPartition], None],
    kept_by: str = "",
) -> list[Ownership | NotYet | MetamqError]:
    """Claims (partition, topic's id); see ownership.claim(). The folders must exist, see ownership.prepare()."""
    try:
        owned = await _owned(session, group, {tp.topic for tp, _ in wanted})
        nodes = await session.nodes([session.paths.offset(group, *tp) for tp, _ in wanted])
    except MetamqError as error:
        return [error for _ in wanted]
    work = [
        _claim_step(session, group, *one, consumer_id, freed, kept_by, owned, node)
        for one, node in zip(wanted, nodes, strict=True)
    ]
    prepared = await asyncio.gather(*map(_outcome, work))
    steps: list[_Step[Ownership | NotYet | MetamqError]] = [step for step in prepared if isinstance(step, _Step)]
    outcomes = iter(await _carry_out(session, steps))
    return [next(outcomes) if isinstance(step, _Step) else step for step in prepared]


async def _owned(session: Session, group: str, topics: set[str]) -> set[tuple[str, str]]:
    """The (topic, partition) that have an owner. Without them, a transaction of free partitions succeeds."""
    names = await asyncio.gather(*(session.children_or_none(session.paths.owners(group, topic)) for topic in topics))
    return {(topic, name) for topic, found in zip(topics, names, strict=True) for name in found or ()}


async def _claim_step(
    session: Session,
    group: str,
    tp: TopicPartition,
    topic_id: str,
    consumer_id: str,
    freed: Callable[[TopicPartition], None],
    kept_by: str,
    owned: set[tuple[str, str]],
    node: Node | None,
) -> _Step[Ownership | NotYet | MetamqError] | Ownership | NotYet:
    alone = partial(
        ownership.claim, session, group, tp, topic_id, consumer_id, freed=partial(freed, tp), kept_by=kept_by
    )
    if tp in owned:
        return await alone()
    stored = ownership.stored_offset(group, tp, node)
    return _Step(*ownership.claim_writes(session, group, tp, topic_id, consumer_id, stored, kept_by), alone)


async def commit_all(session: Session, commits: Sequence[tuple[Ownership, int, int]]) -> list[Ownership | MetamqError]:
    """Commits (claim, offset, epoch), at most one per partition; see ownership.commit()."""
    steps: list[_Step[Ownership]] = []
    for one in commits:
        write, after = ownership.commit_write(session, *one)
        steps.append(_Step([write], after, partial(ownership.commit, session, *one)))
    return await _carry_out(session, steps)


async def release_all(
    session: Session, releases: Sequence[tuple[Ownership, tuple[int, int] | None]]
) -> list[MetamqError | None]:
    """Releases (claim, its last offset and epoch, or None); see ownership.release()."""
    steps: list[_Step[None]] = [
        _Step(ownership.release_writes(session, *one), None, partial(ownership.release, session, *one))
        for one in releases
    ]
    return await _carry_out(session, steps)


async def beat_all(session: Session, beats: Sequence[tuple[str, Member]]) -> list[MetamqError | None]:
    """Publishes the progress of (group, member), at most one per member; see members.beat()."""
    steps: list[_Step[None]] = [
        _Step([members.beat_write(session, *one)], None, partial(members.beat, session, *one)) for one in beats
    ]
    return await _carry_out(session, steps)


async def _carry_out(session: Session, steps: Sequence[_Step[T]]) -> list[T | MetamqError]:
    size = OPERATIONS_MAX // max((len(step.operations) for step in steps), default=1)
    transactions = [steps[first : first + size] for first in range(0, len(steps), size)]
    outcomes = await asyncio.gather(*(_transaction(session, some) for some in transactions))
    return [outcome for some in outcomes for outcome in some]


async def _transaction(session: Session, steps: Sequence[_Step[T]]) -> list[T | MetamqError]:
    if len(steps) > 1:
        try:
            await session.multi([operation for step in steps for operation in step.operations])
        except ConnectError as error:
            return [error for _ in steps]
        except MetamqError:  # a condition of one partition does not hold
            pass
        else:
            return [step.after for step in steps]
    return await asyncio.gather(*(_outcome(step.alone()) for step in steps))


async def _outcome(work: Awaitable[T]) -> T | MetamqError:
    try:
        return await work
    except MetamqError as error:
        return error
