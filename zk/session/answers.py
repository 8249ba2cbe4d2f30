"""Converts kazoo's answers and exceptions into values and errors of metamq. Pure: no connection, no loop."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kazoo import exceptions as kazoo_errors

from metamq.errors import NotAuthorized
from metamq.zk.errors import BadVersion, ConnectionLost, NodeExists, NoNode, NotEmpty, SessionExpired, ZooKeeperError
from metamq.zk.nodes import Check, Create, Delete, Node, Op, SetData, Stat

if TYPE_CHECKING:
    from metamq.errors import MetamqError
    from metamq.zk.session.acls import Acl

_REFUSALS: dict[type[Exception], type[ZooKeeperError]] = {
    kazoo_errors.NoNodeError: NoNode,
    kazoo_errors.NodeExistsError: NodeExists,
    kazoo_errors.BadVersionError: BadVersion,
    kazoo_errors.NotEmptyError: NotEmpty,
}

# In kazoo ConnectionClosedError is a SessionExpiredError; here it says nothing about the session.
_UNKNOWN_OUTCOMES = (
    kazoo_errors.ConnectionLoss,
    kazoo_errors.ConnectionClosedError,
    kazoo_errors.OperationTimeoutError,
    kazoo_errors.RequestTimeoutError,
    kazoo_errors.SessionMovedError,
    kazoo_errors.SystemZookeeperError,
    kazoo_errors.RuntimeInconsistency,
    kazoo_errors.DataInconsistency,
)

# In the answer to a transaction: the results before and after the failed operation.
_NOT_THE_CAUSE = (kazoo_errors.RolledBackError, kazoo_errors.RuntimeInconsistency)
_OWNERS_HINT = (
    "Only the certificates `brokers` and `admin` may. An administrator sets METAMQ_SECURITY_ROLE=admin. If this "
    "process has one of them: ZooKeeper must ask for certificates, ssl.clientAuth=want."
)
_SHARED = re.compile(r"/(consumers|spark)/[^/]")
_SHARED_HINT = (
    "This group or sink belongs to the user or certificate that made it. Take another name. An administrator can give "
    "a group to another owner: `metamq group owner`."
)
_NO_X509_HINT = "Set ssl.clientAuth=want in ZooKeeper, or connect without TLS: METAMQ_SECURITY_ZOOKEEPER_TLS=false."


def error_of(error: BaseException, servers: str, path: str, index: int | None = None) -> MetamqError:
    """The error of metamq for a kazoo exception about `path`, or about operation `index` of a transaction."""
    for theirs, ours in _REFUSALS.items():
        if isinstance(error, theirs):
            return ours(path, index)
    if isinstance(error, kazoo_errors.SessionExpiredError) and not isinstance(error, _UNKNOWN_OUTCOMES):
        return SessionExpired(servers, "the session expired before an answer came")
    if isinstance(error, kazoo_errors.NoAuthError):
        hint = _SHARED_HINT if _SHARED.search(path) else _OWNERS_HINT
        return NotAuthorized("this client", "access", f"znode {path}", hint=hint)
    if isinstance(error, kazoo_errors.InvalidACLError):
        return ZooKeeperError(path, index, reason="ZooKeeper does not know clients by certificates", hint=_NO_X509_HINT)
    if isinstance(error, kazoo_errors.ZookeeperError) and not isinstance(error, _UNKNOWN_OUTCOMES):
        return ZooKeeperError(path, index, reason=f"ZooKeeper answered {type(error).__name__} {error}".rstrip())
    return ConnectionLost(servers, f"the connection broke before an answer came ({type(error).__name__})")


def stat_of(stat: Any) -> Stat:
    """Converts kazoo's ZnodeStat into a Stat."""
    return Stat(stat.version, stat.czxid, stat.mzxid, stat.ephemeralOwner, stat.ctime, stat.mtime, stat.numChildren)


def node_of(data: bytes | None, stat: Any) -> Node:
    """Converts a node's data and kazoo's ZnodeStat into a Node."""
    return Node(
        stat.version, stat.czxid, stat.mzxid, stat.ephemeralOwner, stat.ctime, stat.mtime, stat.numChildren, data or b""
    )


def create_node(full: str, data: bytes, acl: Acl | None, ephemeral: bool, client: Any) -> Any:
    """Passes the creation of a node to kazoo's `client`."""
    return client.create_async(full, data, acl, ephemeral=ephemeral, include_data=True)


def commit(operations: Sequence[tuple[Op, str]], acls: Mapping[str, Acl | None], client: Any) -> Any:
    """Passes a transaction of (operation, path below the root of ZooKeeper) to kazoo's `client`. `acls` has the access
    list of each new node."""
    transaction = client.transaction()
    for operation, full in operations:
        match operation:
            case Create(data=data, ephemeral=ephemeral):
                transaction.create(full, data, acls[operation.path], ephemeral=ephemeral)
            case SetData(data=data, version=version):
                transaction.set_data(full, data, version)
            case Delete(version=version):
                transaction.delete(full, version)
            case Check(version=version):
                transaction.check(full, version)
    return transaction.commit_async()


def failure_of(results: Sequence[Any]) -> tuple[int, Exception] | None:
    """The index of the operation that made a transaction fail, and kazoo's exception; None if it succeeded."""
    failures = [(index, result) for index, result in enumerate(results) if isinstance(result, Exception)]
    causes = [failure for failure in failures if not isinstance(failure[1], _NOT_THE_CAUSE)]
    return next(iter(causes or failures), None)


def version_after(operation: Op, result: Any) -> int | None:
    """The version of the node after an operation of a successful transaction; None for other operations."""
    if isinstance(operation, Create):
        return 0
    return int(result.version) if isinstance(operation, SetData) else None
