"""Brokers in ZooKeeper: the master of a broker id, its epoch, and the replicas in sync with it.

`state` is one persistent node per broker id, changed only by compare-and-set. Every start of a master, restarts
included, raises the epoch in it; metamq.zk.cluster.epochs explains by how much, and why. The ephemeral `master` node
has the master's address. One transaction writes both, so the node of a master proves that its epoch is in force.

Slaves, promotions and changes of the in-sync set are in metamq.zk.cluster.replicas, the offers of brokers in offers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError, CorruptData, Fenced
from metamq.zk.cluster.epochs import Known, KnownState, Reign, highest_epoch, next_epoch, taken_back, with_reign
from metamq.zk.cluster.registrations import (
    BrokerAddress,
    Member,
    Registration,
    address_of,
    is_ours,
    replica_json,
    until_gone,
    without_slave_node,
)
from metamq.zk.documents import broker_numbers, items, number, read_document, skip_unreadable
from metamq.zk.errors import BadVersion, NodeExists, NoNode
from metamq.zk.nodes import Create, Delete, Node, Op, SetData

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

Watcher = Callable[[], None]
REPLACED = "its data folder is new, or an older copy, and replaces one with topics, and no other replica is in sync"

_CLUSTER_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
RESTORING = "restoring:"
"""The prefix of the cluster's id while a restore of the cluster is not finished, see cluster_nodes."""


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The replicated state of one broker id. `insync` has every in-sync member, including the master.

    `generation` rises if messages that readers saw may be lost: by a promotion that accepts loss, and if
    the only member in sync comes back as a new incarnation.
    """

    epoch: int
    master: int
    insync: tuple[Member, ...]
    generation: int
    reigns: tuple[Reign, ...] = field(default=(), compare=False)
    """The earlier masters and their first epochs, see metamq.zk.cluster.epochs."""
    is_restored: bool = field(default=False, compare=False)
    """An operator rebuilt it from the existing data folders: the loss of other data was accepted."""


@dataclass(frozen=True, slots=True)
class Mastership:
    """One epoch of a master. `version` is that of the state node, for the next compare-and-set on it."""

    broker_id: int
    state: BrokerState
    version: int

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self.state.epoch


StateAt = tuple[BrokerState, int]
"""The state of a broker id, and the version of its node."""


def known(stored: StateAt | None) -> Known:
    """The epochs that a state node knows; None: there is no node."""
    return Known(stored[0].epoch, stored[1], stored[0].reigns) if stored is not None else Known()


def next_term(stored: StateAt | None, registration: Registration, claims: Iterable[KnownState] = ()) -> BrokerState:
    """The state under which this replica starts as master. `claims`: the knowledge of other replicas.

    Raises Fenced if ZooKeeper was taken back, if another replica is the master or must be the first one, or if this
    replica is a new incarnation that may lack acknowledged messages: either other replicas are in sync and may have
    these messages, or its data folder was replaced.
    """
    me, claims = registration.member, [registration.claim, *claims]
    if reason := taken_back(known(stored), claims):
        raise Fenced(str(registration), reason)
    if stored is None:
        if registration.replica != 0:
            raise Fenced(str(registration), "replica 0 must be the first master, but was never started")
        epoch = next_epoch(0, 0)
        return BrokerState(epoch, master=0, insync=(me,), generation=1, reigns=with_reign((), epoch, 0))
    state = stored[0]
    if state.master != registration.replica:
        raise Fenced(str(registration), f"replica {state.master} is, since epoch {state.epoch}")
    others = [other for other in state.insync if other[0] != registration.replica]
    is_new = me not in state.insync
    if others and is_new:
        ahead = ", ".join(str(replica) for replica, _ in others)
        raise Fenced(str(registration), f"it may lack messages that it acknowledged, and replica {ahead} may be ahead")
    if is_new and registration.is_replaced and not state.is_restored:
        raise Fenced(str(registration), REPLACED)
    epoch = next_epoch(highest_epoch(state.epoch, claims), registration.replica)
    reigns = with_reign(state.reigns, epoch, state.master)
    return BrokerState(epoch, state.master, tuple(sorted([*others, me])), state.generation + is_new, reigns)


async def become_master(session: Session, registration: Registration, claims: Iterable[KnownState] = ()) -> Mastership:
    """Raises the epoch and registers as master of the broker id. Call it again after every lost session.

    Waits for the session of a former master unless that one has certainly ended. Raises ConfigError if that master is
    still there after its session time-out; Fenced (see `next_term`); ConnectionLost: the outcome is then unknown, and
    another call settles it at the cost of one more epoch.
    """
    paths = session.paths
    master_path, state_path = paths.master(registration.broker_id), paths.broker_state(registration.broker_id)
    claims = list(claims)
    while True:
        stored = await read_state(session, registration.broker_id)
        state = next_term(stored, registration, claims)
        there = await session.get_or_none(master_path)
        if there is not None and not is_ours(there, session, registration):
            # Without a second look it could wait for a replica that took over after the first one.
            if stored == await read_state(session, registration.broker_id):
                await until_gone(session, registration, master_path, there, "master")
            continue
        await session.ensure(paths.broker(registration.broker_id))
        operations: list[Op] = []
        if stored:
            operations.append(SetData(state_path, state_json(state), stored[1]))
        else:
            operations.append(Create(state_path, state_json(state)))
        if there is not None:
            operations.append(Delete(master_path, there.version))
        operations += await without_slave_node(session, registration)
        operations.append(Create(master_path, replica_json(session, registration), ephemeral=True))
        try:
            await session.multi(operations)
        except (BadVersion, NodeExists, NoNode):
            continue
        return Mastership(registration.broker_id, state, stored[1] + 1 if stored else 0)


async def cluster_id(session: Session) -> str:
    """The id of the cluster below this root. The first caller makes it at random; it never changes.

    A data folder stores it: a broker that connects to another cluster must not consider its topics deleted.
    """
    while True:
        known = await known_cluster_id(session)
        if known is not None:
            return known
        with contextlib.suppress(NodeExists):
            await session.create(session.paths.cluster(), secrets.token_hex(8).encode(), makepath=True)


async def known_cluster_id(session: Session) -> str | None:
    """The id of the cluster below this root; None if there is no cluster yet. Makes nothing.

    Raises ConfigError while a restore is not finished.
    """
    node = await session.get_or_none(session.paths.cluster())
    return None if node is None else cluster_id_of(node)


def cluster_id_of(node: Node) -> str:
    """The id in the cluster's node. Raises ConfigError while a restore is not finished, CorruptData."""
    found = node.data.decode(errors="replace")
    if not _CLUSTER_ID.fullmatch(found):
        raise CorruptData("the cluster's node in ZooKeeper", f"{node.data[:60]!r} is not the id of a cluster")
    if found.startswith(RESTORING):
        raise ConfigError(
            f"the restore of cluster {found.removeprefix(RESTORING)} in this ZooKeeper is not finished",
            hint="Run `metamq cluster restore` again: it continues where it stopped.",
        )
    return found


async def read_state(session: Session, broker_id: int, watch: Watcher | None = None) -> tuple[BrokerState, int] | None:
    """The state of a broker id and its node's version; None before its first master."""
    node = await session.get_or_none(session.paths.broker_state(broker_id), watch=watch)
    if node is None:
        return None

    def read(document: dict[str, Any]) -> BrokerState:
        insync = tuple((number(replica), number(incarnation)) for replica, incarnation in items(document["insync"]))
        reigns = tuple((number(epoch), number(master)) for epoch, master in items(document.get("reigns", [])))
        epoch, master, generation = (number(document[name]) for name in ("epoch", "master", "generation"))
        return BrokerState(epoch, master, insync, generation, reigns, bool(document.get("is_restored")))

    hint = "Restore the earlier content from `metamq cluster export` or ZooKeeper's own backup."
    what = f"the state of broker {broker_id} in ZooKeeper ({session.paths.broker_state(broker_id)})"
    return read_document(what, node.data, read, hint=hint), node.version


async def master_of(session: Session, broker_id: int, watch: Watcher | None = None) -> BrokerAddress | None:
    """The address of the master of a broker id; None if there is none. `watch` is called once if that changes."""
    node = await session.get_or_none(session.paths.master(broker_id), watch=watch)
    return None if node is None else address_of(broker_id, node)


async def live_brokers(session: Session, watch: Watcher | None = None) -> dict[int, BrokerAddress]:
    """The registered masters, by broker id. `watch` is called once if any of them changes.

    Skips a master whose node cannot be read.
    """
    names = await session.children_or_none(session.paths.broker_ids(), watch) or []
    masters = await asyncio.gather(*(_readable_master(session, one, watch) for one in broker_numbers(names)))
    return {master.broker_id: master for master in masters if master is not None}


async def _readable_master(session: Session, broker_id: int, watch: Watcher | None) -> BrokerAddress | None:
    with skip_unreadable(f"broker {broker_id} is skipped"):
        return await master_of(session, broker_id, watch)
    return None


def state_json(state: BrokerState) -> bytes:
    """The data of a state node."""
    document = {
        "epoch": state.epoch,
        "master": state.master,
        "insync": [list(member) for member in state.insync],
        "generation": state.generation,
        "reigns": [list(reign) for reign in state.reigns],
    }
    if state.is_restored:
        document["is_restored"] = True
    return json.dumps(document).encode()
