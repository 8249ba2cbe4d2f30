"""The partitions that a replica offers: ephemeral nodes by topic, for writing (topics-pub) and reading (topics-sub).

A master offers under the broker id's name, "0-m", whatever its replica number. A deposed master may not know yet that
it is deposed. It must not replace its successor's node, which would later disappear with its session. So each write of
a master's offer also checks the state node, which the successor has changed.

The first registration of a session and an epoch reads all offers under the replica's name. From then on only this
replica writes them, and ZooKeeper removes them only with the session. So later registrations write only the difference
from the last one, if that one has succeeded. A ZooKeeper that was restored from an older copy may lack offers even in
the same session; its connections break before that. So after a lost connection the caller reads all offers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from metamq.errors import Fenced
from metamq.zk.cluster.brokers import Mastership, Watcher, read_state
from metamq.zk.documents import number, read_document
from metamq.zk.errors import BadVersion, NodeExists, NoNode, NotEmpty
from metamq.zk.nodes import ANY_VERSION, Check, Create, Delete, Op
from metamq.zk.paths import master_offer, slave_of_offer, slave_offer

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

WRITING, READING = "topics-pub", "topics-sub"


async def register_topics(
    session: Session, held: Mastership, offered: Mapping[str, int], before: Mapping[str, int] | None = None
) -> None:
    """Makes the offers of this master in ZooKeeper, for writing and reading, equal to `offered`: topic -> number of
    partitions.

    Call it whenever the offer changes, and after every lost session. `before` is the last argument with which it
    succeeded in this session and epoch: only the differences are written. Without `before`, it withdraws all topics
    that are missing in `offered`, even if a former master offered them. Raises Fenced if another replica is the master
    now.
    """
    name = master_offer(held.broker_id)
    await _register(session, WRITING, name, offered, held, before)
    await _register(session, READING, name, offered, held, before)


async def register_slave_topics(
    session: Session, broker_id: int, replica: int, offered: Mapping[str, int], before: Mapping[str, int] | None = None
) -> None:
    """Makes the offers of this slave for reading equal to `offered`, topic -> number of partitions. See above."""
    await _register(session, READING, slave_offer(broker_id, replica), offered, None, before)


class Offers:
    """The offers of one replica, as ZooKeeper confirmed them last. One make() at a time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._made: tuple[tuple[object, ...], Mapping[str, int]] | None = None
        """The session, role and epoch, and the offers that they have since the last make()."""
        self._may_be_gone = False

    def are_gone(self) -> None:
        """Makes the next make() read all offers: ZooKeeper was taken back, perhaps in the same session."""
        self._made = None

    def may_be_gone(self) -> None:
        """Makes the next make() that changes something read all offers: the connection was lost."""
        self._may_be_gone = True

    async def make(
        self, broker_id: int, replica: int, role: object, offered: Mapping[str, int], held: Mastership | None
    ) -> None:
        """Makes the offers equal to `offered`; `held`: as a master. Raises Fenced if another replica is the master."""
        term = self._session.generation, role, None if held is None else held.epoch
        if (term, offered) == self._made:
            return
        before = self._made[1] if self._made is not None and self._made[0] == term and not self._may_be_gone else None
        self._made, self._may_be_gone = None, False  # until ZooKeeper has confirmed all of it
        if held is None:
            await register_slave_topics(self._session, broker_id, replica, offered, before)
        else:
            if before is None:
                await register_slave_topics(self._session, broker_id, replica, {})
            await register_topics(self._session, held, offered, before)
        self._made = term, offered


async def slaves_offering(session: Session, topic: str, watch: Watcher | None = None) -> set[tuple[int, int]]:
    """The (broker id, replica) of slaves that offer a topic for reading. `watch` is called once if that changes."""
    names = await session.children_or_none(session.paths.offers(READING, topic), watch) or []
    return set(filter(None, map(slave_of_offer, names)))


async def _register(
    session: Session, kind: str, name: str, wanted: Mapping[str, int], held: Mastership | None,
    before: Mapping[str, int] | None,
) -> None:  # fmt: skip
    if before is None:
        folder = session.paths.offered_topics(kind)
        await session.ensure(folder)
        topics = sorted({*await session.children(folder), *wanted})
    else:
        topics = [topic for topic in sorted({*before, *wanted}) if before.get(topic) != wanted.get(topic)]
    is_tidy = bool(wanted)  # else a replica stops or changes its role, and the topics stay
    await asyncio.gather(*(_offer(session, kind, topic, name, wanted.get(topic), held, is_tidy) for topic in topics))


async def _offer(
    session: Session, kind: str, topic: str, name: str, count: int | None, held: Mastership | None, is_tidy: bool
) -> None:
    """Makes one offer equal to `count`. `is_tidy`: removes the topic's folder behind the last offer."""
    path = session.paths.offered_topic(kind, topic, name)
    data = json.dumps({"partitions": count, "broker": name}).encode()
    while True:
        node = await session.get_or_none(path)
        is_ours = node is not None and node.ephemeral_owner == session.session_id
        if node is None and count is None:
            return
        if node is not None and is_ours and count is not None and node.data == data:
            return
        operations = _fence(session, held)
        if node is not None:
            operations.append(Delete(path, ANY_VERSION))
        if count is not None:
            await session.ensure(session.paths.offers(kind, topic))
            operations.append(Create(path, data, ephemeral=True))
        try:
            await session.multi(operations)
        except (BadVersion, NoNode, NodeExists):
            held = await _still_master(session, held)
            continue
        break
    if count is None and is_tidy:
        with contextlib.suppress(NoNode, NotEmpty):  # others offer it
            await session.delete(session.paths.offers(kind, topic), ANY_VERSION)


def offered_partitions(data: bytes) -> int:
    """The number of partitions in an offer. Raises CorruptData."""
    return read_document("an offer of a topic in ZooKeeper", data, lambda document: number(document["partitions"]))


def _fence(session: Session, held: Mastership | None) -> list[Op]:
    return [] if held is None else [Check(session.paths.broker_state(held.broker_id), held.version)]


async def _still_master(session: Session, held: Mastership | None) -> Mastership | None:
    """The present state: another in-sync set, or another epoch of this master. Raises Fenced if it is deposed."""
    if held is None:
        return None
    stored = await read_state(session, held.broker_id)
    if stored is None:
        raise Fenced(f"broker {held.broker_id}", "its state in ZooKeeper was deleted")
    if stored[0].master != held.state.master:
        what = f"replica {held.state.master} of broker {held.broker_id}"
        raise Fenced(what, f"replica {stored[0].master} is, since epoch {stored[0].epoch}")
    return Mastership(held.broker_id, *stored)
