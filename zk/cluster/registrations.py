"""The ephemeral nodes of replicas, "master" and "slave<n>": their contents and their owners.

A killed process leaves its node behind until its session expires. A process that holds the same lock as the killed one
knows that this process has ended, and may replace its node at once. A process with a copy of the data folder does not
hold that lock. For any other node, a process waits as long as the node's session may last. If the node is still there
afterwards, two running processes claim one place, which is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from metamq.errors import ConfigError
from metamq.zk.cluster.epochs import KnownState
from metamq.zk.documents import number, read_document, text
from metamq.zk.nodes import Delete, Node, Op

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.zk")

Member = tuple[int, int]
"""(replica, incarnation). A replica that may have lost acknowledged messages comes back as another incarnation."""
Role = Literal["master", "slave"]

ANSWER_S = 0.5
"""Seconds in which a ZooKeeper that is not frozen answers."""
EXPIRY_MARGIN_MS = 2_000
"""Milliseconds by which ZooKeeper may end a session late, since it expires sessions by ticks."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """The address of one replica of a broker id. A `learner` is never in sync."""

    broker_id: int
    replica: int
    role: Role
    host: str
    port: int
    version: str
    incarnation: int = 0
    learner: bool = False
    data: str = ""
    """The path of its data folder on its machine; empty if unknown."""
    epoch: int = 0
    state_version: int = -1
    generation: int = 0
    log_epoch: int = 0
    log_bytes: int = -1
    """See Registration."""
    status: str = ""
    """The address of its status port, as "http://host:8120"; empty if it has none, or if it is not known."""

    @property
    def claim(self) -> KnownState:
        """Its knowledge of the state at the time of its registration."""
        return KnownState(self.replica, self.epoch, self.state_version, self.generation)

    @property
    def address(self) -> str:
        """The address as "host:port"."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Registration:
    """The description of a replica by itself. `folder` identifies its data folder; restarts and copies keep it.

    `lock` names the lock that the process holds on the folder: one file, on one machine, at one of its boots. If a
    process holds a lock and finds a node with the same lock, the writer of that node has ended.
    """

    broker_id: int
    replica: int
    incarnation: int
    folder: str
    lock: str
    host: str
    port: int
    version: str
    learner: bool = False
    data: str = ""
    """The absolute path of the data folder: clients on this machine read no files outside of it."""
    epoch: int = 0
    state_version: int = -1
    generation: int = 0
    """These three fields: see metamq.zk.cluster.epochs.KnownState."""
    is_replaced: bool = False
    """True if its folder is new or an older copy, replaces one with data, and this was not accepted yet."""
    log_epoch: int = 0
    log_bytes: int = -1
    """A slave whose master is gone publishes that master's epoch, and the size of all its logs."""
    status: str = ""
    """See BrokerAddress."""

    @property
    def claim(self) -> KnownState:
        """Its folder's knowledge of the state."""
        return KnownState(self.replica, self.epoch, self.state_version, self.generation)

    @property
    def member(self) -> Member:
        """Its entry in the in-sync set."""
        return self.replica, self.incarnation

    def __str__(self) -> str:
        return f"replica {self.replica} of broker {self.broker_id}"


def replica_json(session: Session, registration: Registration) -> bytes:
    """The data of a master's or a slave's node."""
    document = {
        "replica": registration.replica,
        "incarnation": registration.incarnation,
        "folder": registration.folder,
        "lock": registration.lock,
        "host": registration.host,
        "port": registration.port,
        "version": registration.version,
        "learner": registration.learner,
        "data": registration.data,
        "epoch": registration.epoch,
        "state_version": registration.state_version,
        "generation": registration.generation,
        "log_epoch": registration.log_epoch,
        "log_bytes": registration.log_bytes,
        "status": registration.status,
        "machine": socket.gethostname(),  # for people to read
        "session_timeout_ms": session.negotiated_timeout_ms,
    }
    return json.dumps(document).encode()


def _document(broker_id: int, node: Node, role: Role = "master") -> dict[str, Any]:
    hint = "Restart that replica. If the node stays while the replica is down, delete it: only replicas write there."
    return read_document(f"the {role} node of broker {broker_id} in ZooKeeper", node.data, _checked, hint=hint)


_NUMBERS = (
    "replica", "incarnation", "port", "session_timeout_ms", "epoch", "generation", "state_version", "log_epoch",
    "log_bytes",
)  # fmt: skip


def _checked(document: dict[str, Any]) -> dict[str, Any]:
    missing = {"replica", "incarnation", "folder", "machine", "host", "port", "version"} - document.keys()
    if missing:
        raise ValueError(f"it lacks {sorted(missing)}")
    for name in _NUMBERS:
        number(document.get(name, 0), low=-1)
    for name in ("folder", "lock", "machine", "host", "version", "data", "status"):
        text(document.get(name, ""))
    return document


def address_of(broker_id: int, node: Node, role: Role = "master") -> BrokerAddress:
    """The address in a replica's node. Raises CorruptData."""
    document = _document(broker_id, node, role)
    return BrokerAddress(
        broker_id,
        document["replica"],
        role,
        document["host"],
        document["port"],
        document["version"],
        document["incarnation"],
        bool(document.get("learner")),
        str(document.get("data", "")),
        document.get("epoch", 0),
        document.get("state_version", -1),
        document.get("generation", 0),
        document.get("log_epoch", 0),
        document.get("log_bytes", -1),
        str(document.get("status", "")),
    )


def is_ours(node: Node, session: Session, registration: Registration, role: Role = "master") -> bool:
    """True if this process, or an earlier one that has certainly ended, wrote the node. Raises CorruptData."""
    if node.ephemeral_owner == session.session_id:
        return True
    document = _document(registration.broker_id, node, role)
    former = (document["replica"], document["folder"], document.get("lock"))
    return former == (registration.replica, registration.folder, registration.lock)


async def without_slave_node(session: Session, registration: Registration) -> list[Op]:
    """The operation that removes this replica's node as a slave, if it has one."""
    path = session.paths.slave(registration.broker_id, registration.replica)
    there = await session.get_or_none(path)
    return [Delete(path, there.version)] if there is not None and is_ours(there, session, registration, "slave") else []


async def until_gone(session: Session, registration: Registration, path: str, there: Node, role: Role) -> None:
    """Waits until the node of another process is gone or has changed, or the connection breaks; then read it again.

    Raises ConfigError if it is still there after its session's time-out; ConnectionLost.
    """
    me = registration
    other, document = address_of(me.broker_id, there, role), _document(me.broker_id, there, role)
    gone = asyncio.Event()
    if await session.exists(path, watch=gone.set) is None:
        return
    timeout_s = document.get("session_timeout_ms", session.negotiated_timeout_ms) / 1000
    margin_s = EXPIRY_MARGIN_MS / 1000
    what = str(me) if other.replica == me.replica else f"replica {other.replica}, the master of broker {me.broker_id}"
    log.warning(
        "another process is %s, at %s: waiting %.0f s for its session to end", what, other.address, timeout_s + margin_s
    )
    wait_s, is_certain = timeout_s, False
    while not is_certain:
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await gone.wait()
        if gone.is_set() or await session.exists(path) is None:
            return
        # A frozen ZooKeeper ends no session. So it must serve for the margin, from an answer to an answer.
        is_certain = wait_s == margin_s and time.monotonic() - began < margin_s + ANSWER_S
        wait_s = margin_s
    hint = "Give this one another --replica or --id, or stop the other one."
    if document["folder"] == me.folder:
        hint = (
            "This data folder and the one in use there are copies of each other: never start more than one of"
            " them. A further replica has its own --replica, and begins with an empty folder."
        )
    raise ConfigError(f"{what} runs already, at {other.address}", hint=hint)


async def until_alone(session: Session, registration: Registration) -> None:
    """Waits until no other process is this replica. Raises the errors of until_gone."""
    paths = session.paths
    places: tuple[tuple[str, Role], ...] = (
        (paths.master(registration.broker_id), "master"),
        (paths.slave(registration.broker_id, registration.replica), "slave"),
    )
    for path, role in places:
        while (there := await session.get_or_none(path)) is not None:
            is_other = address_of(registration.broker_id, there, role).replica != registration.replica
            if is_other or is_ours(there, session, registration, role):
                break
            await until_gone(session, registration, path, there, role)
