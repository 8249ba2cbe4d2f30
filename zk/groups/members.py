"""The members of a consumer group: one ephemeral node each, which also shows the member's progress to other clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError
from metamq.zk.documents import number, read_document, skip_unreadable, text, texts
from metamq.zk.errors import NodeExists, NoNode
from metamq.zk.groups.ownership import drop_owner
from metamq.zk.nodes import ANY_VERSION, Create, Delete, Node, Op, SetData
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

Watcher = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Member:
    """One member by its node. Times are in milliseconds since 1970.

    It last finished a message, or found none, at `progress_ms`. It consumes `assigned` partitions. Its node outlives it
    by `session_timeout_ms`. `joined` orders members by the time of joining.
    """

    consumer_id: str
    topics: tuple[str, ...]
    strategy: str
    host: str
    pid: int
    since_ms: int
    progress_ms: int
    assigned: int
    version: str
    session_timeout_ms: int
    joined: int = 0


async def join(session: Session, group: str, member: Member, *, left: Watcher) -> Member | None:
    """Registers this client's member. Returns None on success; else the member that has the id at present: `left` is
    then called once when that member is gone.

    Raises ConnectionLost; then join again.
    """
    path = session.paths.member(group, member.consumer_id)
    operations: list[Op] = [Create(path, _to_json(member), ephemeral=True)]
    while True:
        try:
            await session.multi(operations)
        except NoNode:
            await session.ensure(session.paths.members(group))
            continue
        except NodeExists:
            node = await session.get_or_none(path, watch=left)
            if node is None:
                continue
            if not session.made(path, node):
                return _from_node(group, member.consumer_id, node)
            # This client made it: the answer of an earlier call was lost, or it had a consumer of this id before.
            operations = [Delete(path, ANY_VERSION), Create(path, _to_json(member), ephemeral=True)]
            continue
        return None


async def beat(session: Session, group: str, member: Member) -> None:
    """Publishes the member's progress. Raises NoNode if it was evicted, ConnectionLost."""
    write = beat_write(session, group, member)
    await session.set(write.path, write.data, write.version)


def beat_write(session: Session, group: str, member: Member) -> SetData:
    """Returns the write of a beat."""
    return SetData(session.paths.member(group, member.consumer_id), _to_json(member), ANY_VERSION)


async def leave(session: Session, group: str, consumer_id: str) -> None:
    """Unregisters this client's member; does nothing if it is gone. Raises ConnectionLost."""
    path = session.paths.member(group, consumer_id)
    node = await session.get_or_none(path)
    if node is not None and session.made(path, node):
        try:
            await session.delete(path, ANY_VERSION)
        except NoNode:
            return


async def read_members(session: Session, group: str, watch: Watcher | None = None) -> dict[str, Member]:
    """The present members, by consumer id. `watch` is called once when one joins or leaves, not when one publishes.

    Skips a member whose node cannot be read: it takes no part, and the others continue.
    """
    names = sorted(await member_names(session, group, watch))
    nodes = await session.nodes([session.paths.member(group, name) for name in names])
    found: dict[str, Member] = {}
    for name, node in zip(names, nodes, strict=True):
        with skip_unreadable(f"group {group}: a member is skipped"):
            if node is not None:
                found[name] = _from_node(group, name, node)
    return found


async def member_names(session: Session, group: str, watch: Watcher | None = None) -> frozenset[str]:
    """The consumer ids of the present members. `watch` is called once when one joins or leaves."""
    folder = session.paths.members(group)
    try:
        return frozenset(await session.children(folder, watch=watch))
    except NoNode:
        await session.ensure(folder)
        return frozenset(await session.children(folder, watch=watch))


async def owned_partitions(session: Session, group: str) -> dict[TopicPartition, str]:
    """The present owners: partition -> consumer id."""
    paths = session.paths
    topics = sorted(await session.children_or_none(paths.owned_topics(group)) or [])
    names = await asyncio.gather(*(session.children_or_none(paths.owners(group, topic)) for topic in topics))
    items = [
        TopicPartition(topic, name) for topic, owned in zip(topics, names, strict=True) for name in sorted(owned or [])
    ]
    nodes = await session.nodes([session.paths.owner(group, *item) for item in items])
    return {
        item: node.data.decode(errors="replace") for item, node in zip(items, nodes, strict=True) if node is not None
    }


async def check_empty(session: Session, group: str, consequence: str) -> None:
    """Raises ConfigError with the names of the members if the group has members."""
    if await session.exists(session.paths.members(group)) is None:
        return
    present = await read_members(session, group)
    if present:
        names = ", ".join(
            f"{member.consumer_id} (process {member.pid} on {member.host})" for member in present.values()
        )
        raise ConfigError(
            f"group {group!r} has members, {consequence}: {names}",
            hint="Stop them first; `metamq group evict` removes one that is stuck.",
        )


async def evict(session: Session, group: str, consumer_id: str) -> list[TopicPartition]:
    """Removes a member with a live session from its group, and frees its partitions, which are returned.

    Messages that it did not commit go to the next owners; its own later commits are refused. Raises ConfigError if the
    group has no such member, ConnectionLost; then evict again.
    """
    present = await owned_partitions(session, group)
    held = [item for item, owner in present.items() if owner == consumer_id]
    try:
        await session.delete(session.paths.member(group, consumer_id), ANY_VERSION)
    except NoNode as error:
        if not held:
            members = sorted(await read_members(session, group))
            known = f"Its members are: {', '.join(members)}." if members else "It has no members."
            raise ConfigError(f"group {group!r} has no member {consumer_id!r}", hint=known) from error
    # A running member sees that it was evicted, and may release them itself first.
    await asyncio.gather(*(drop_owner(session, group, item, consumer_id) for item in held))
    return held


def _to_json(member: Member) -> bytes:
    document = {
        "topics": list(member.topics),
        "strategy": member.strategy,
        "host": member.host,
        "pid": member.pid,
        "since_ms": member.since_ms,
        "progress_ms": member.progress_ms,
        "assigned": member.assigned,
        "version": member.version,
        "session_timeout_ms": member.session_timeout_ms,
    }
    return json.dumps(document).encode()


def _from_node(group: str, consumer_id: str, node: Node) -> Member:
    def read(document: dict[str, Any]) -> Member:
        return Member(
            consumer_id,
            topics=texts(document["topics"]),
            strategy=text(document["strategy"]),
            host=text(document["host"]),
            pid=number(document["pid"]),
            since_ms=number(document["since_ms"]),
            progress_ms=number(document["progress_ms"]),
            assigned=number(document["assigned"]),
            version=text(document["version"]),
            session_timeout_ms=number(document["session_timeout_ms"]),
            joined=node.czxid,
        )

    what = f"the node of member {consumer_id!r} of group {group!r} in ZooKeeper"
    hint = f"`metamq group evict {group} {consumer_id}` removes it."
    return read_document(what, node.data, read, hint=hint)
