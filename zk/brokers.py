"""Brokers in ZooKeeper: who is master of a broker id, and which partitions brokers offer.

`state` is one persistent node per broker id, changed by compare-and-set only; every master, restarts included, raises
the epoch in it. The ephemeral `master` node says where that master is. Both are written in one transaction, so whoever
sees the node of a master can rely on its epoch being in force.

A broker that was killed leaves its `master` node behind until its session expires. The same data folder proves that
the former process is gone, since its lock is ours now: the node is replaced at once. A node of anybody else is waited
for as long as its session may still live; after that two live masters claim one broker id, which is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from metamq.errors import ConfigError, CorruptData, Fenced
from metamq.zk.errors import BadVersion, NodeExists, NoNode
from metamq.zk.nodes import ANY_VERSION, Create, Delete, Node, Op, SetData
from metamq.zk.paths import master_offer

if TYPE_CHECKING:
    from metamq.zk.session import Session

log = logging.getLogger("metamq.zk")

Watcher = Callable[[], None]
Role = Literal["master", "slave"]

EXPIRY_MARGIN_MS = 2_000
"""ZooKeeper expires sessions by ticks, so a little after their time-out."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where one replica of a broker id listens."""

    broker_id: int
    replica: int
    role: Role
    host: str
    port: int
    version: str

    @property
    def address(self) -> str:
        """ "host:port"."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Registration:
    """What a replica says of itself. `folder` identifies its data folder, and is unchanged by restarts.

    A process that holds the folder's lock and finds a node of the same folder, written on the same machine, knows that
    the node's writer is dead.
    """

    broker_id: int
    replica: int
    incarnation: int
    folder: str
    host: str
    port: int
    version: str


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The replicated truth about one broker id. `insync`: (replica, incarnation) of every in-sync member.

    `generation` is raised when a promotion accepts loss.
    """

    epoch: int
    master: int
    insync: tuple[tuple[int, int], ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Mastership:
    """A term as master. `version` is that of the state node, for the next compare-and-set on it."""

    broker_id: int
    state: BrokerState
    version: int

    @property
    def epoch(self) -> int:
        """The term's number."""
        return self.state.epoch


def next_term(state: BrokerState | None, registration: Registration) -> BrokerState:
    """The state under which this replica starts as master.

    Raises Fenced when another replica is the master, or when this one came back as a new incarnation while others are
    in sync: those may hold acknowledged messages that this one lost.
    """
    member = (registration.replica, registration.incarnation)
    if state is None:
        return BrokerState(epoch=1, master=registration.replica, insync=(member,), generation=1)
    what = f"replica {registration.replica} of broker {registration.broker_id}"
    if state.master != registration.replica:
        raise Fenced(what, f"replica {state.master} is, since epoch {state.epoch}")
    others = [other for other in state.insync if other[0] != registration.replica]
    if others and member not in state.insync:
        ahead = ", ".join(str(replica) for replica, _ in others)
        raise Fenced(what, f"its host stopped without a clean shutdown, and replica {ahead} may be ahead")
    return replace(state, epoch=state.epoch + 1, insync=tuple(sorted([*others, member])))


async def become_master(session: Session, registration: Registration) -> Mastership:
    """Raise the epoch and register as master of the broker id; call it again after every lost session.

    Waits for the session of a former master that cannot be shown to be dead. Raises ConfigError when that one is still
    there after its session time-out, Fenced (see `next_term`), ConnectionLost: whether it took effect is then unknown,
    and calling again settles it at the price of one more epoch.
    """
    paths = session.paths
    deadline: float | None = None
    while True:
        stored = await read_state(session, registration.broker_id)
        state = next_term(stored[0] if stored else None, registration)
        master_path = paths.master(registration.broker_id)
        there = await session.get_or_none(master_path)
        if there is not None and not _is_ours(there, session, registration):
            if deadline is None:
                deadline = time.monotonic() + _patience_s(there, session)
            await _wait_until_gone(session, registration, there, deadline)
            continue
        await session.ensure(paths.broker(registration.broker_id))
        operations: list[Op] = []
        state_path = paths.broker_state(registration.broker_id)
        if stored:
            operations.append(SetData(state_path, _state_json(state), stored[1]))
        else:
            operations.append(Create(state_path, _state_json(state)))
        if there is not None:
            operations.append(Delete(master_path, there.version))
        operations.append(Create(master_path, _master_json(session, registration), ephemeral=True))
        try:
            await session.multi(operations)
        except (BadVersion, NodeExists, NoNode):
            continue
        return Mastership(registration.broker_id, state, stored[1] + 1 if stored else 0)


def _is_ours(node: Node, session: Session, registration: Registration) -> bool:
    if node.ephemeral_owner == session.session_id:
        return True
    document = _master_document(registration.broker_id, node)
    former = (document["replica"], document["folder"], document["machine"])
    return former == (registration.replica, registration.folder, socket.gethostname())


def _patience_s(node: Node, session: Session) -> float:
    timeout_ms = json.loads(node.data).get("session_timeout_ms", session.negotiated_timeout_ms)
    return float(timeout_ms + EXPIRY_MARGIN_MS) / 1000


async def _wait_until_gone(session: Session, registration: Registration, there: Node, deadline: float) -> None:
    other = _address(registration.broker_id, there)
    remaining_s = deadline - time.monotonic()
    gone = asyncio.Event()
    if await session.exists(session.paths.master(registration.broker_id), watch=gone.set) is None:
        return
    log.info("broker %d: waiting for the session of its master at %s to end", registration.broker_id, other.address)
    try:
        async with asyncio.timeout(max(remaining_s, 0)):
            await gone.wait()
    except TimeoutError:
        raise ConfigError(
            f"broker {registration.broker_id} has a live master already: replica {other.replica} at {other.address}",
            hint="Give each broker its own broker id, or stop the other one.",
        ) from None


async def cluster_id(session: Session) -> str:
    """The id of the cluster below this root: made at random by whoever asks first, and never changed.

    A data folder remembers it, so that a broker pointed at another cluster does not take its topics for deleted.
    """
    path = session.paths.cluster()
    while True:
        node = await session.get_or_none(path)
        if node is not None:
            return node.data.decode()
        with contextlib.suppress(NodeExists):
            await session.create(path, secrets.token_hex(8).encode(), makepath=True)


async def read_state(session: Session, broker_id: int, watch: Watcher | None = None) -> tuple[BrokerState, int] | None:
    """The state of a broker id and its node's version; None before its first master."""
    node = await session.get_or_none(session.paths.broker_state(broker_id), watch=watch)
    if node is None:
        return None
    try:
        document = json.loads(node.data)
        insync = tuple((int(replica), int(incarnation)) for replica, incarnation in document["insync"])
        state = BrokerState(document["epoch"], document["master"], insync, document["generation"])
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptData(f"the state of broker {broker_id} in ZooKeeper", f"{error!r}") from error
    return state, node.version


async def master_of(session: Session, broker_id: int, watch: Watcher | None = None) -> BrokerAddress | None:
    """Where the master of a broker id listens; None while it has none. `watch` is called once that changes."""
    node = await session.get_or_none(session.paths.master(broker_id), watch=watch)
    return None if node is None else _address(broker_id, node)


async def live_brokers(session: Session, watch: Watcher | None = None) -> dict[int, BrokerAddress]:
    """The masters that are registered now, by broker id. `watch` is called once any of that changes."""
    folder = session.paths.broker_ids()
    try:
        names = await session.children(folder, watch=watch)
    except NoNode:
        await session.ensure(folder)
        names = await session.children(folder, watch=watch)
    broker_ids = sorted(int(name) for name in names if name.isdecimal())
    masters = await asyncio.gather(*(master_of(session, broker_id, watch) for broker_id in broker_ids))
    return {master.broker_id: master for master in masters if master is not None}


async def register_topics(
    session: Session, broker_id: int, publish: Mapping[str, int], subscribe: Mapping[str, int] | None = None
) -> None:
    """Make what this master offers in ZooKeeper equal to `publish` (for writing) and `subscribe` (for reading).

    Both map topic -> number of partitions; without `subscribe` it is the same as `publish`. To be called whenever the
    offer changes and after every lost session; topics that are missing from the maps are withdrawn.
    """
    offers = [("topics-pub", publish), ("topics-sub", publish if subscribe is None else subscribe)]
    for kind, wanted in offers:
        folder = session.paths.offered_topics(kind)
        await session.ensure(folder)
        topics = sorted({*await session.children(folder), *wanted})
        await asyncio.gather(*(_offer(session, kind, topic, broker_id, wanted.get(topic)) for topic in topics))


async def _offer(session: Session, kind: str, topic: str, broker_id: int, count: int | None) -> None:
    path = session.paths.offered_topic(kind, topic, master_offer(broker_id))
    data = json.dumps({"partitions": count, "broker": master_offer(broker_id)}).encode()
    while True:
        node = await session.get_or_none(path)
        is_ours = node is not None and node.ephemeral_owner == session.session_id
        if node is None and count is None:
            return
        if node is not None and is_ours and count is not None and node.data == data:
            return
        operations: list[Op] = []
        if node is not None:
            operations.append(Delete(path, ANY_VERSION))
        if count is not None:
            await session.ensure(session.paths.offers(kind, topic))
            operations.append(Create(path, data, ephemeral=True))
        try:
            await session.multi(operations)
        except (NoNode, NodeExists):
            continue
        return


def _state_json(state: BrokerState) -> bytes:
    document = {
        "epoch": state.epoch,
        "master": state.master,
        "insync": [list(member) for member in state.insync],
        "generation": state.generation,
    }
    return json.dumps(document).encode()


def _master_json(session: Session, registration: Registration) -> bytes:
    document = {
        "replica": registration.replica,
        "incarnation": registration.incarnation,
        "folder": registration.folder,
        "host": registration.host,
        "port": registration.port,
        "version": registration.version,
        "machine": socket.gethostname(),
        "session_timeout_ms": session.negotiated_timeout_ms,
    }
    return json.dumps(document).encode()


def _master_document(broker_id: int, node: Node) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(node.data)
        missing = {"replica", "folder", "machine", "host", "port", "version"} - document.keys()
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptData(f"the master node of broker {broker_id} in ZooKeeper", f"{error!r}") from error
    if missing:
        raise CorruptData(f"the master node of broker {broker_id} in ZooKeeper", f"it lacks {sorted(missing)}")
    return document


def _address(broker_id: int, node: Node) -> BrokerAddress:
    document = _master_document(broker_id, node)
    return BrokerAddress(
        broker_id, document["replica"], "master", document["host"], document["port"], document["version"]
    )
