"""Nodes of ZooKeeper, and the operations of a transaction, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ANY_VERSION = -1
"""Any version of the node. Correct only if no other client writes the node."""


@dataclass(frozen=True, slots=True)
class Stat:
    """A znode without its data. `ephemeral_owner` is the session id of an ephemeral node's owner, else 0.

    `czxid` and `mzxid` are the transactions that created and last changed it. Times are ZooKeeper's. `children` is the
    number of its children.
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


class Listing(NamedTuple):
    """The names of a node's children, unordered. `version` rises with each child that is created or deleted."""

    names: list[str]
    version: int


@dataclass(frozen=True, slots=True)
class Create:
    """Creates a node; its parent must exist."""

    path: str
    data: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class SetData:
    """Writes a node that has `version`."""

    path: str
    data: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a node that has `version` and no children."""

    path: str
    version: int


@dataclass(frozen=True, slots=True)
class Check:
    """Makes the transaction fail unless the node has `version`."""

    path: str
    version: int


Op = Create | SetData | Delete | Check
