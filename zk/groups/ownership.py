"""The owner of a partition in a group, and its committed offset: every commit is fenced.

There are two nodes per partition. The ephemeral *owner* node names the consumer; ZooKeeper removes it with the owner's
session. The persistent *offset* node has the committed offset and the generation of the last claim.

    claim     one transaction: create the owner node, write the offset node with a new generation
    commit    write the offset node, if it still has the version of our claim, or of our last commit
    release   one transaction: the last offset (or a check of the version), delete the owner node

A former owner fails on the version, since the next claim has written the node. A check of the owner node would be no
fence: the node that the next owner makes has the same version as the old one.

A lost answer decides nothing. After a lost connection the write may have been done, and the version is then one higher
than known. So a write that meets another version reads the node. Only the claim with a generation writes that
generation. If the generation is still ours, our own lost write made that version, and we continue from it.

Generations grow by at least one and are at least the clock's milliseconds. So they also grow if the offset nodes are
deleted while a database, whose rows are fenced by the same generation, keeps its rows.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError, OwnershipLost
from metamq.zk.documents import number, read_document, skip_unreadable, text
from metamq.zk.errors import BadVersion, NodeExists, NoNode
from metamq.zk.nodes import ANY_VERSION, Check, Create, Delete, Node, Op, SetData

if TYPE_CHECKING:
    from metamq.zk.partitions import TopicPartition
    from metamq.zk.session.session import Session

Watcher = Callable[[], None]


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A committed position: `offset` is the next message to read, `epoch` that of the message before it.

    `topic_id` is the topic's id at the commit; if the topic has another id now, it was made again.
    """

    offset: int
    epoch: int
    topic_id: str


@dataclass(frozen=True, slots=True)
class OffsetRecord:
    """The content of an offset node. `consumer` made the claim with `generation`, even if it is no longer the owner.

    `kept_by` names the store of the group's offset if it is not this node: "DatabaseOffsets". Then `published` is the
    owner's last position for other clients to see: no consumer begins there.
    """

    generation: int
    consumer: str
    committed: CommittedOffset | None
    kept_by: str = ""
    published: CommittedOffset | None = None

    @property
    def is_cleared(self) -> bool:
        """True if the offset was deleted, and no consumer has claimed the partition since."""
        return not self.consumer and self.committed is None and not self.kept_by


@dataclass(frozen=True, slots=True)
class Ownership:
    """The ownership of one partition. `version` is that of the offset node after our last write to it.

    `committed` is the committed position; on a claim it may have another topic id than `topic_id`, the present one.
    """

    group: str
    tp: TopicPartition
    topic_id: str
    consumer_id: str
    generation: int
    version: int
    committed: CommittedOffset | None
    kept_by: str = ""


@dataclass(frozen=True, slots=True)
class NotYet:
    """The result if another client holds the partition; `owner` is its consumer id."""

    tp: TopicPartition
    owner: str


def next_generation(previous: int, now_ms: int) -> int:
    """Returns the generation of the claim after `previous`."""
    return max(previous + 1, now_ms)


async def claim(
    session: Session,
    group: str,
    tp: TopicPartition,
    topic_id: str,
    consumer_id: str,
    *,
    freed: Watcher,
    kept_by: str = "",
) -> Ownership | NotYet:
    """Claims the partition if no other client owns it. On NotYet, `freed` is called once when it may be free.

    Takes over a node of our own, which is from a claim whose answer was lost. A node of another client is never taken
    over, even if the two share a session. Raises ConnectionLost: the claim may then exist, so claim again. Raises
    KeptElsewhere.
    """
    owner_path = session.paths.owner(group, *tp)
    left_behind: Node | None = None
    while True:
        stored = await read_offset(session, group, tp)
        operations, claimed = claim_writes(session, group, tp, topic_id, consumer_id, stored, kept_by)
        if left_behind is not None:
            operations.insert(0, Delete(owner_path, left_behind.version))
        try:
            await session.multi(operations)
        except (BadVersion, NodeExists, NoNode):
            left_behind = await session.get_or_none(owner_path)
            if left_behind is None:
                await prepare(session, group, tp.topic)
            elif not session.made(owner_path, left_behind):
                if await session.exists(owner_path, watch=freed):
                    return NotYet(tp, left_behind.data.decode(errors="replace"))
                left_behind = None
            continue
        return claimed


def claim_writes(
    session: Session,
    group: str,
    tp: TopicPartition,
    topic_id: str,
    consumer_id: str,
    stored: tuple[OffsetRecord, int] | None,
    kept_by: str,
) -> tuple[list[Op], Ownership]:
    """Returns the writes of a claim of a free partition, and the claim after them. `stored` is from read_offset().

    Raises KeptElsewhere.
    """
    if stored is not None:
        _check_storage(group, tp, topic_id, stored[0], kept_by)
    record = replace(_next_record(stored[0] if stored else None, consumer_id), kept_by=kept_by)
    path, data = session.paths.offset(group, *tp), _to_json(record)
    write = Create(path, data) if stored is None else SetData(path, data, stored[1])
    version = stored[1] + 1 if stored else 0
    claimed = Ownership(group, tp, topic_id, consumer_id, record.generation, version, record.committed, kept_by)
    return [Create(session.paths.owner(group, *tp), consumer_id.encode(), ephemeral=True), write], claimed


class KeptElsewhere(ConfigError):
    """The group keeps its offsets in another storage: a member with its own would read everything again."""


def _check_storage(group: str, tp: TopicPartition, topic_id: str, record: OffsetRecord, kept_by: str) -> None:
    place = record.published if record.kept_by else record.committed
    if record.kept_by == kept_by or place is None or place.topic_id != topic_id:
        return
    raise KeptElsewhere(
        f"group {group!r} keeps its offsets of {tp} in {record.kept_by or 'ZooKeeper'}, and this consumer in "
        f"{kept_by or 'ZooKeeper'}",
        hint="Give it the same `offsets=`, or another group. After `metamq group delete` the group begins again.",
    )


async def prepare(session: Session, group: str, topic: str) -> None:
    """Makes the folders for claims of the topic's partitions. `claim` also makes them, once per partition."""
    await session.ensure(session.paths.owners(group, topic))
    await session.ensure(session.paths.offsets(group, topic))


def _next_record(before: OffsetRecord | None, consumer_id: str) -> OffsetRecord:
    generation = next_generation(before.generation if before else 0, time.time_ns() // 1_000_000)
    if before is None:
        return OffsetRecord(generation, consumer_id, None)
    return replace(before, generation=generation, consumer=consumer_id)


async def commit(session: Session, held: Ownership, offset: int, epoch: int) -> Ownership:
    """Commits `offset`, the next message to read, and returns the new state of the claim.

    Raises OwnershipLost if the partition has been claimed since. Raises ConnectionLost if it is unknown whether the
    commit was done: then commit again, the same or a later offset, with the old claim. One call at a time
    per partition.
    """
    while True:
        write, committed = commit_write(session, held, offset, epoch)
        try:
            await session.set(write.path, write.data, write.version)
        except (BadVersion, NoNode):
            held = await _still_ours(session, held)
            continue
        return committed


def commit_write(session: Session, held: Ownership, offset: int, epoch: int) -> tuple[SetData, Ownership]:
    """Returns the write of a commit, and the claim after it."""
    committed = CommittedOffset(offset, epoch, held.topic_id)
    data = _to_json(OffsetRecord(held.generation, held.consumer_id, committed, held.kept_by))
    write = SetData(session.paths.offset(held.group, *held.tp), data, held.version)
    return write, replace(held, version=held.version + 1, committed=committed)


async def clear(session: Session, held: Ownership) -> None:
    """Removes the committed offset, as if nothing had been committed. The claim ends: nothing else may be written.

    The node stays: its version and generation refuse the writes of former owners. Raises OwnershipLost if the partition
    has been claimed since, ConnectionLost if the outcome is unknown.
    """
    data = _to_json(OffsetRecord(held.generation, "", None))
    while True:
        try:
            await session.set(session.paths.offset(held.group, *held.tp), data, held.version)
        except (BadVersion, NoNode):
            held = await _still_ours(session, held)
            continue
        return


async def publish(session: Session, held: Ownership, offset: int) -> None:
    """Publishes the owner's position, if the offset is kept elsewhere. Does nothing if the claim is not the last one.

    The claim's next write then meets another version, and finds that the claim is still its own. Raises ConnectionLost.
    """
    stored = await read_offset(session, held.group, held.tp)
    if stored is None or (stored[0].generation, stored[0].consumer) != (held.generation, held.consumer_id):
        return
    record = replace(stored[0], published=CommittedOffset(offset, -1, held.topic_id))
    with contextlib.suppress(BadVersion, NoNode):  # a newer write has a newer position
        await session.set(session.paths.offset(held.group, *held.tp), _to_json(record), stored[1])


async def release(session: Session, held: Ownership, final: tuple[int, int] | None = None) -> None:
    """Releases the partition, and commits `final` (offset, epoch) in the same transaction.

    Raises OwnershipLost if it has been claimed since, ConnectionLost if the outcome is unknown: then release again.
    """
    owner_path = session.paths.owner(held.group, *held.tp)
    while True:
        try:
            await session.multi(release_writes(session, held, final))
        except BadVersion:
            held = await _still_ours(session, held)
        except NoNode:
            # The offset node is gone, which _still_ours reports, or the owner node is gone: released or evicted.
            held = await _still_ours(session, held)
            if await session.exists(owner_path) is None:
                if final is not None:
                    await commit(session, held, *final)
                return
        else:
            return


def release_writes(session: Session, held: Ownership, final: tuple[int, int] | None) -> list[Op]:
    """Returns the writes of a release."""
    if final is None:
        last: Op = Check(session.paths.offset(held.group, *held.tp), held.version)
    else:
        last = commit_write(session, held, *final)[0]
    return [last, Delete(session.paths.owner(held.group, *held.tp), ANY_VERSION)]


async def _still_ours(session: Session, held: Ownership) -> Ownership:
    """The claim with the present version of its offset node. Raises OwnershipLost if there is a later claim."""
    stored = await read_offset(session, held.group, held.tp)
    if stored is None:
        raise OwnershipLost(*held.tp, reason=f"the offsets of group {held.group!r} were deleted")
    record, version = stored
    if (record.generation, record.consumer) != (held.generation, held.consumer_id):
        who = f"{record.consumer} claimed it" if record.consumer else "its offset was set from outside,"
        reason = f"{who} with generation {record.generation}, ours is {held.generation}"
        raise OwnershipLost(*held.tp, reason=reason)
    return replace(held, version=version, committed=record.committed)


async def read_offset(session: Session, group: str, tp: TopicPartition) -> tuple[OffsetRecord, int] | None:
    """The content of the offset node, and its version; None if the group never claimed the partition."""
    return stored_offset(group, tp, await session.get_or_none(session.paths.offset(group, *tp)))


def stored_offset(group: str, tp: TopicPartition, node: Node | None) -> tuple[OffsetRecord, int] | None:
    """The content of this offset node, and its version. Raises CorruptData."""
    return None if node is None else (_from_json(group, tp, node.data), node.version)


async def read_offsets(
    session: Session, places: Sequence[tuple[str, TopicPartition]], consequence: str
) -> list[OffsetRecord | None]:
    """The offset node's content for each (group, partition), None if there is none. One that cannot be read is
    skipped, with a warning that has the consequence."""
    nodes = await session.nodes([session.paths.offset(group, *tp) for group, tp in places])
    found: list[OffsetRecord | None] = []
    for node, (group, tp) in zip(nodes, places, strict=True):
        record = None
        with skip_unreadable(consequence):
            record = None if node is None else _from_json(group, tp, node.data)
        found.append(record)
    return found


async def reset_offset(session: Session, group: str, tp: TopicPartition, committed: CommittedOffset | None) -> None:
    """Sets the committed position from outside (None: as if never committed). An owner's next commit is refused.

    Raises ConnectionLost; repeating it is harmless.
    """
    path = session.paths.offset(group, *tp)
    while True:
        node = await session.get_or_none(path)
        before = None
        with skip_unreadable("it is overwritten"):
            before = None if node is None else _from_json(group, tp, node.data)
        record = replace(_next_record(before, consumer_id=""), committed=committed)
        try:
            if node is not None:
                await session.set(path, _to_json(record), node.version)
            else:
                await session.create(path, _to_json(record), makepath=True)
        except (BadVersion, NodeExists, NoNode):
            continue
        return


async def drop_owner(session: Session, group: str, tp: TopicPartition, consumer_id: str) -> bool:
    """Takes the partition away from a member that does not release it; True if the member had it.

    The offset node is read first and checked: a new owner's node must not be deleted.
    """
    owner_path = session.paths.owner(group, *tp)
    offset_path = session.paths.offset(group, *tp)
    while True:
        offset = await session.get_or_none(offset_path)
        owner = await session.get_or_none(owner_path)
        if owner is None or owner.data.decode(errors="replace") != consumer_id:
            return False
        unchanged: Op
        if offset is not None:
            unchanged = Check(offset_path, offset.version)
        else:
            await prepare(session, group, tp.topic)
            unchanged = Create(offset_path, _to_json(_next_record(None, consumer_id="")))
        try:
            await session.multi([unchanged, Delete(owner_path, owner.version)])
        except (BadVersion, NodeExists, NoNode):
            continue
        return True


def _to_json(record: OffsetRecord) -> bytes:
    committed = record.committed
    document: dict[str, object] = {
        "next": committed.offset if committed else None,
        "epoch": committed.epoch if committed else None,
        "topic_id": committed.topic_id if committed else None,
        "generation": record.generation,
        "consumer": record.consumer,
    }
    if record.kept_by:
        document["kept_by"] = record.kept_by
        if record.published is not None:
            document["published"] = [record.published.offset, record.published.topic_id]
    return json.dumps(document).encode()


def _from_json(group: str, tp: TopicPartition, data: bytes) -> OffsetRecord:
    def read(document: dict[str, Any]) -> OffsetRecord:
        committed = None
        if document["next"] is not None:
            epoch = number(document["epoch"], low=-1)  # -1: set from outside, and unknown
            committed = CommittedOffset(number(document["next"]), epoch, text(document["topic_id"]))
        kept_by = text(document.get("kept_by", ""))
        published = document.get("published")
        if published is not None:
            published = CommittedOffset(number(published[0]), -1, text(published[1]))
        return OffsetRecord(number(document["generation"]), text(document["consumer"]), committed, kept_by, published)

    hint = "`metamq group reset` writes it again."
    return read_document(f"the offset of group {group!r} for {tp} in ZooKeeper", data, read, hint=hint)
