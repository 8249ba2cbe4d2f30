"""ZooKeeper: its servers, and the number and size of metamq's nodes. The content of a node goes nowhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from metamq.cli.support.parcel import in_thread
from metamq.errors import NotAuthorized
from metamq.zk.cluster.brokers import known_cluster_id
from metamq.zk.nodes import Node
from metamq.zk.server.load import ask, load_of
from metamq.zk.servers import parse_servers

if TYPE_CHECKING:
    from metamq.cli.support.parcel import Parcel
    from metamq.client.settings import ClusterAccess
    from metamq.zk.nodes import Stat
    from metamq.zk.session.session import Session

ANSWER_S = 3.0
AT_ONCE = 400
"""Nodes of one step of the walk."""
LARGEST_MAX = 20


async def servers(access: ClusterAccess, parcel: Parcel) -> None:
    """The answers of ZooKeeper's servers to `srvr`, which have no name and no path of a client."""
    found: dict[str, Any] = {}
    parcel.files["zookeeper/servers.json"] = found
    is_plain = not (access.security.is_on and access.security.zookeeper_tls)

    async def one(host: str, port: int) -> None:
        name = f"{host}:{port}"
        if not is_plain:
            found[name] = "not asked: with TLS it does not answer"
            return
        try:
            report = await in_thread(partial(ask, host, port, b"srvr", ANSWER_S))
            load = await in_thread(partial(load_of, host, port, ANSWER_S))
            found[name] = {"srvr": report.splitlines(), "load": None if load is None else asdict(load)}
        except OSError as error:
            parcel.missing(f"ZooKeeper server {name}", str(error.strerror or error))

    await asyncio.gather(*(one(host, port) for host, port in parse_servers(access.zookeeper)[0]))


@dataclass(slots=True)
class NodeCount:
    """The nodes of one kind. Sizes are of their data, in bytes."""

    nodes: int = 0
    ephemeral: int = 0
    bytes: int = 0
    largest: int = 0
    largest_path: str = ""

    def add(self, path: str, stat: Stat, size: int) -> None:
        """Counts a node."""
        self.nodes += 1
        self.ephemeral += bool(stat.ephemeral_owner)
        self.bytes += size
        if size > self.largest:
            self.largest, self.largest_path = size, path


async def nodes(session: Session, parcel: Parcel) -> None:
    """The number and the size of the nodes below the root, by kind, and of the largest groups."""
    walk = _Walk(session, parcel)
    document: dict[str, Any] = {"cluster_id": None, "root": session.paths.root, "counts": walk.counts}
    parcel.files["zookeeper/nodes.json"] = document
    await walk.run()
    document["largest_groups"] = walk.largest_groups()
    document["session_timeout_ms"] = session.negotiated_timeout_ms
    document["cluster_id"] = await known_cluster_id(session)


class _Walk:
    """Reads the tree, one level after the other."""

    def __init__(self, session: Session, parcel: Parcel) -> None:
        self._session = session
        self._parcel = parcel
        self._groups = defaultdict[str, NodeCount](NodeCount)
        self.counts = defaultdict[str, NodeCount](NodeCount)
        """By the kind of the nodes, as "consumers/*/offsets"."""

    async def run(self) -> None:
        """Counts all nodes. Raises ConnectionLost."""
        level = [self._session.paths.root]
        while level:
            below = []
            for first in range(0, len(level), AT_ONCE):
                below += await self._step(level[first : first + AT_ONCE])
            level = below

    def largest_groups(self) -> dict[str, NodeCount]:
        """Returns the groups with the most nodes."""
        found = sorted(self._groups.items(), key=lambda one: one[1].nodes, reverse=True)
        return dict(found[:LARGEST_MAX])

    async def _step(self, paths: Sequence[str]) -> list[str]:
        """Counts these nodes; returns the paths of their children."""
        parents = []
        for path, stat in zip(paths, await self._read(paths), strict=True):
            if stat is not None:
                self._count(path, stat)
                parents += [path] if stat.children else []
        found = await asyncio.gather(*map(self._children, parents))
        return [f"{path}/{name}" for path, names in zip(parents, found, strict=True) for name in names]

    async def _read(self, paths: Sequence[str]) -> Sequence[Stat | None]:
        """Returns the nodes. Of the folder with secrets, and of nodes that this client may not read, only the stat."""
        secret = self._session.paths.security()
        if not any(path.startswith(secret) for path in paths):
            with contextlib.suppress(NotAuthorized):
                return await self._session.nodes(paths)
        return await asyncio.gather(*map(self._session.exists, paths))

    async def _children(self, path: str) -> list[str]:
        try:
            return await self._session.children_or_none(path) or []
        except NotAuthorized as error:
            self._parcel.missing(f"the nodes below {path}", error)
            return []

    def _count(self, path: str, stat: Stat) -> None:
        size = len(stat.data) if isinstance(stat, Node) else 0
        parts = path.removeprefix(self._session.paths.root).split("/")[1:]
        is_of_group = parts[:1] == ["consumers"] and len(parts) > 1
        kind = ["consumers", "*", *parts[2:3]] if is_of_group else parts[:2]
        self.counts["/".join(kind) or "/"].add(path, stat, size)
        if is_of_group:
            self._groups[parts[1]].add(path, stat, size)
