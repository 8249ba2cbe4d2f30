"""The answers of ZooKeeper as errors of metamq. They stay inside the package; public APIs translate them.

    MetamqError
    ├── ZooKeeperError        ZooKeeper refused the operation: nothing was done
    │   ├── NoNode            the node (of a create: its parent) does not exist
    │   ├── NodeExists        the node already exists
    │   ├── BadVersion        the node has another version: another client has changed it
    │   └── NotEmpty          the node to delete has children
    └── ConnectError
        └── ConnectionLost    no answer came: the outcome is unknown, or nothing was sent, see `.outcome`
            └── SessionExpired    the session is over, and its ephemeral nodes are gone

`path` is the node. `index` is the place of the operation in a `multi`, None for other calls.
"""

from __future__ import annotations

from metamq.errors import ConnectError, MetamqError, Outcome


class ZooKeeperError(MetamqError):
    """ZooKeeper refused an operation on `path`; nothing was done."""

    reason = "the operation was refused"

    def __init__(self, path: str, index: int | None = None, *, reason: str = "", hint: str | None = None) -> None:
        place = f" (operation {index} of the transaction)" if index is not None else ""
        super().__init__(f"znode {path}: {reason or self.reason}{place}", hint=hint)
        self.path = path
        self.index = index


class NoNode(ZooKeeperError):
    """The node, or the parent of a node to be created, does not exist."""

    reason = "it, or its parent, does not exist"


class NodeExists(ZooKeeperError):
    """The node already exists."""

    reason = "it already exists"


class BadVersion(ZooKeeperError):
    """The node has another version than expected: another client has changed it meanwhile."""

    reason = "another client has changed it meanwhile"


class NotEmpty(ZooKeeperError):
    """The node has children, so it cannot be deleted."""

    reason = "it has children"


class ConnectionLost(ConnectError):
    """No answer. If `.outcome` is "unknown", read before you decide; if it is "not_done", nothing was sent."""

    def __init__(self, servers: str, reason: str, *, outcome: Outcome = "unknown") -> None:
        super().__init__(f"ZooKeeper at {servers}", reason, outcome=outcome)


class SessionExpired(ConnectionLost):
    """The session is over and its ephemeral nodes are gone. A new session follows automatically."""
