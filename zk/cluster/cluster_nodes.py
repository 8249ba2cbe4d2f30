"""All persistent nodes below the root, read and written as a whole: the export of a cluster, and its restore.

They are the nodes that are not ephemeral and have data, and the marks of brokers that had slaves. Folders are made
together with their contents.

A restore writes many nodes, and may be interrupted between any two. So the node of the cluster's id is its first and
its last write: "restoring:<id>" until everything else is written, then the id. Until then no broker joins, whatever it
finds. The restore may be run again, even with other inputs: it then changes the rest of the tree accordingly.

Clients may run meanwhile. Groups and sinks of Spark make their nodes in any ZooKeeper to which they are connected, so
nodes below these folders are no sign of another cluster. A restore replaces those that it has, and leaves the others.
A group claims partitions of topics only, so topics are written last. A claim in between keeps the offset that it finds.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import metamq
from metamq.errors import ConfigError
from metamq.zk.cluster.brokers import RESTORING, cluster_id_of
from metamq.zk.documents import parse
from metamq.zk.errors import BadVersion, NodeExists, NoNode, NotEmpty
from metamq.zk.nodes import Create, Delete, Node, Op, SetData

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

KIND = "metamq cluster export"
FORMAT = 1
CLUSTER = "/cluster"
HAD_SLAVES = "had-slaves"
CLIENTS = ("/consumers/", "/spark/")
TOPICS = "/config/topics/"
DEFAULTS = "/config/topic-defaults"
SECURITY = "/security/"
DELEGATIONS = "/security/delegations"
_PLAN = re.compile(r"/consumers/[^/]+/plan")
_OFFSET = re.compile(r"/consumers/[^/]+/offsets/[^/]+/[^/]+")
CHUNK_BYTES = 400_000
CHUNK_OPERATIONS = 500
TRIES = 10
NAMED_MAX = 8


@dataclass(frozen=True, slots=True)
class ClusterExport:
    """The persistent nodes of a cluster, by path below its root. `moved` changed during the export: later state."""

    cluster_id: str
    root: str
    exported_ms: int
    nodes: Mapping[str, bytes]
    moved: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the document that `from_json` reads."""
        return {
            "kind": KIND,
            "format": FORMAT,
            "metamq": metamq.__version__,
            "cluster_id": self.cluster_id,
            "root": self.root,
            "exported_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.exported_ms / 1000)),
            "exported_ms": self.exported_ms,
            "changed_meanwhile": list(self.moved),
            "nodes": {path: _as_text(data) for path, data in sorted(self.nodes.items())},
        }

    @classmethod
    def from_json(cls, text: str | bytes, what: str) -> ClusterExport:
        """Reads an export. `what` names it in errors. Raises ConfigError."""
        try:
            document = json.loads(text)
            if (document["kind"], document["format"]) != (KIND, FORMAT):
                raise ValueError("it is of another kind or format")
            nodes = {str(path): _as_bytes(data) for path, data in document["nodes"].items()}
            moved = tuple(map(str, document["changed_meanwhile"]))
            return cls(str(document["cluster_id"]), str(document["root"]), int(document["exported_ms"]), nodes, moved)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            hint = "Make one with `metamq cluster export` of this release or an older one."
            raise ConfigError(f"{what} is not the export of a cluster: {error!r}", hint=hint) from error


def exported_cluster(text: bytes) -> str | None:
    """The id of the cluster in an export file of any format; None if the file is not an export."""
    try:
        document = json.loads(text)
        return str(document["cluster_id"]) if document["kind"] == KIND else None
    except (ValueError, TypeError, KeyError):
        return None


def _as_text(data: bytes) -> object:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"], validate=True)


async def export_cluster(session: Session) -> ClusterExport:
    """Exports all persistent nodes below the root. Raises ConfigError if there is no cluster, ConnectionLost."""
    began = await _read_tree(session)
    exported_ms = time.time_ns() // 1_000_000
    found = await _read_tree(session)
    cluster = found.get(CLUSTER)
    if cluster is None:
        raise ConfigError(
            f"there is no cluster below {session.paths.root} in ZooKeeper at {session.servers}",
            hint="Choose the root with --root or METAMQ_ROOT.",
        )
    nodes = {path: node.data for path, node in found.items() if _lasts(path, node)}
    del nodes[CLUSTER]
    changed = {path for path in began.keys() | found.keys() if _id(began.get(path)) != _id(found.get(path))}
    moved = sorted(
        path for path in changed if any(path in tree and _lasts(path, tree[path]) for tree in (began, found))
    )
    return ClusterExport(cluster_id_of(cluster), session.paths.root, exported_ms, nodes, tuple(moved))


def _id(node: Node | None) -> int:
    return 0 if node is None else node.mzxid


def _lasts(path: str, node: Node) -> bool:
    return bool(node.data) or path.endswith(f"/{HAD_SLAVES}")


async def _read_tree(session: Session) -> dict[str, Node]:
    """Every persistent node below the root, by its path below it; the root itself is ""."""
    root, found = session.paths.root, dict[str, Node]()

    async def walk(path: str) -> None:
        node = await session.get_or_none(path)
        if node is not None and not node.ephemeral_owner:
            found[path.removeprefix(root)] = node
            names = (await session.children_or_none(path) or []) if node.children else []
            await asyncio.gather(*(walk(f"{path}/{name}") for name in names))

    await walk(root)
    return found


@dataclass(frozen=True, slots=True)
class RestoreDiff:
    """The changes that a restore must make. `is_finished`: the cluster exists, and nothing must be done."""

    is_finished: bool
    operations: tuple[Op, ...]


async def compare(session: Session, cluster_id: str, nodes: Mapping[str, bytes]) -> RestoreDiff:
    """Computes the writes that make `nodes` exist below the root. Raises ConfigError if other nodes contradict them."""
    there = await _read_tree(session)
    cluster = there.pop(CLUSTER, None)
    present = cluster.data.decode(errors="replace") if cluster is not None else ""
    where = f"below {session.paths.root} in ZooKeeper at {session.servers}"
    if present and present.removeprefix(RESTORING) != cluster_id:
        raise ConfigError(
            f"there is another cluster {where}: {present}, not {cluster_id}",
            hint="Give the right ZooKeeper and --root. If a broker with an empty folder made it by mistake, stop that "
            "broker and remove the root with ZooKeeper's own `deleteall`, or restore into another --root.",
        )
    if present == cluster_id:
        _check_complete(there, nodes, cluster_id, where)
        return RestoreDiff(True, ())
    foreign = {path for path, node in there.items() if _lasts(path, node) and not path.startswith(CLIENTS)}
    if foreign and not present:
        raise ConfigError(
            f"there are other nodes {where}: {_named(foreign)}",
            hint="A restore writes into an empty root. Give another --root, or remove these nodes.",
        )
    surplus = sorted((path for path in foreign if path not in nodes), reverse=True)
    root = session.paths.root
    operations: list[Op] = [Delete(root + path, there[path].version) for path in surplus]
    for path in _with_parents(nodes):
        data, node = nodes.get(path, b""), there.get(path)
        if node is None:
            operations.append(Create(root + path, data))
        elif path in nodes and not _is_same(path, node.data, data):
            operations.append(SetData(root + path, data, node.version))
    return RestoreDiff(False, tuple(operations))


def _check_complete(there: Mapping[str, Node], nodes: Mapping[str, bytes], cluster_id: str, where: str) -> None:
    missing = {path for path in nodes if path not in there and not path.startswith(CLIENTS)}
    if missing:
        raise ConfigError(
            f"cluster {cluster_id} already exists {where}, but lacks {_named(missing)}",
            hint="A restore writes into an empty root, never into a cluster that may run. To add what is missing, "
            "stop all brokers, export, and restore all folders into another --root.",
        )


def _is_same(path: str, stored: bytes, wanted: bytes) -> bool:
    """True if a node has the wanted data, apart from additions by members of a running group."""
    if stored == wanted or _PLAN.fullmatch(path):
        return True
    if _OFFSET.fullmatch(path) is None:
        return False
    with contextlib.suppress(ValueError, KeyError):
        left, right = parse(stored), parse(wanted)
        return all(left[name] == right[name] for name in ("next", "epoch", "topic_id"))
    return False


def _named(paths: Iterable[str]) -> str:
    known = sorted(paths)
    return ", ".join(known[:NAMED_MAX]) + (f" and {len(known) - NAMED_MAX} more" if len(known) > NAMED_MAX else "")


def _with_parents(paths: Iterable[str]) -> list[str]:
    """The paths and all paths above them, without the root; parents first and topics last."""
    found = set()
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition("/")[0]
    return sorted(found, key=lambda path: (path.startswith(TOPICS), path.count("/"), path))


async def restore_cluster(session: Session, cluster_id: str, nodes: Mapping[str, bytes]) -> bool:
    """Writes a cluster below the root; False if it exists. Raises ConfigError, ConnectionLost (then repeat it)."""
    if (await compare(session, cluster_id, nodes)).is_finished:
        return False
    path, unfinished = session.paths.cluster(), f"{RESTORING}{cluster_id}".encode()
    with contextlib.suppress(NodeExists):  # compare() checks below to which cluster it belongs
        await session.create(path, unfinished, makepath=True)
    for _ in range(TRIES):
        standing = await compare(session, cluster_id, nodes)
        if standing.is_finished:
            return True  # another restore of the same cluster finished it
        try:
            for chunk in _chunks(standing.operations):
                await session.multi(chunk)
            mark = await session.get(path)
            if mark.data == unfinished and not standing.operations:
                await session.set(path, cluster_id.encode(), mark.version)
                return True
        except (BadVersion, NodeExists, NoNode, NotEmpty):
            continue  # a client has just written one of these nodes
    raise ConfigError(
        "the restored nodes change all the time",
        hint="Stop the clients that write below this root, and repeat the restore.",
    )


def _chunks(operations: Iterable[Op]) -> Iterator[list[Op]]:
    """Splits the operations, in order, into chunks that ZooKeeper accepts as one transaction."""
    chunk: list[Op] = []
    size = 0
    for operation in operations:
        added = len(operation.path) + (len(operation.data) if isinstance(operation, Create | SetData) else 0)
        if chunk and (size + added > CHUNK_BYTES or len(chunk) == CHUNK_OPERATIONS):
            yield chunk
            chunk, size = [], 0
        chunk.append(operation)
        size += added
    if chunk:
        yield chunk
