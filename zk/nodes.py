"""What is read from ZooKeeper, and the operations of a transaction, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

ANY_VERSION = -1
"""Given as a version: whatever version the node has. Right only where nobody else writes the node."""


@dataclass(frozen=True, slots=True)
class Stat:
    """A znode without its data. `ephemeral_owner` is the session id of an ephemeral node's owner, else 0.

    `czxid` and `mzxid` are the transactions that created and last changed it, times are ZooKeeper's clock, `children`
    is how many it has.
    """

    version: int
    czxid: int
    mzxid: int
    ephemeral_owner: int
    ctime_ms: int
    mtime_ms: int
    children: int


@dataclass(frozen=True, slots=True)
class Node(Stat):
    """A znode with its data."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Create:
    """Create a node; its parent has to exist."""

    path: str
    data: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class SetData:
    """Write a node that has `version`."""

    path: str
    data: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a node that has `version` and no children."""

    path: str
    version: int


@dataclass(frozen=True, slots=True)
class Check:
    """Let the transaction fail unless the node has `version`."""

    path: str
    version: int


Op = Create | SetData | Delete | Check
