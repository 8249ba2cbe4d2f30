"""The access lists of nodes: the owner of each node, if ZooKeeper knows its clients by their certificates.

    nodes                         certificates `brokers`, `admin`    other clients
    /meta/security, and below     all                                nothing
    /meta/consumers, /meta/spark  all                                reads, adds and removes nodes
    below these two               all                                reads; the client that made it: all
    the rest of /meta             all                                reads
    outside of /meta              all                                all

So brokers and administrators own topics, registrations, users and rules, and clients own their groups and the state of
their Spark sinks. ZooKeeper knows a client by its certificate, or by a proof that brokers give users who log in
(metamq.zk.security.owner_key). All clients may change the groups of clients without such an identity; later nodes in
these groups stay open, too. A node gets its list when it is made; `metamq security migrate` gives older nodes theirs,
and `metamq group owner` gives a group to another client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kazoo.security import OPEN_ACL_UNSAFE, Permissions, make_acl

from metamq.security.config import ADMIN, BROKERS
from metamq.security.rights import ANY_PRINCIPAL

if TYPE_CHECKING:
    from metamq.zk.paths import Paths

Acl = list[Any]
"""kazoo's ACLs: the permissions of each client."""
_OWNERS = [make_acl("x509", f"CN={name}", all=True) for name in (BROKERS, ADMIN)]
_PRIVATE: Acl = _OWNERS
_READABLE: Acl = [*_OWNERS, make_acl("world", "anyone", read=True)]
_SHARED: Acl = [*_OWNERS, make_acl("world", "anyone", read=True, create=True, delete=True)]
_OPEN: Acl = OPEN_ACL_UNSAFE
_OF_CREATOR: Acl = [*_READABLE, make_acl("auth", "", all=True)]
"""ZooKeeper replaces `auth` by the name in the creator's certificate."""


def acl_of(paths: Paths, path: str, *, is_owned: bool = False) -> Acl:
    """Returns the access list of a node. `is_owned`: in a group or sink, it belongs to the client that makes it."""
    if _is_in(path, paths.security()):
        return _PRIVATE
    if not _is_in(path, paths.root):
        return _OPEN
    shared = (paths.groups(), paths.sinks())
    if path in shared:
        return _SHARED
    if shared_root(paths, path) is None:
        return _READABLE
    return _OF_CREATOR if is_owned else _OPEN


def shared_root(paths: Paths, path: str) -> str | None:
    """Returns the node of the group or the sink that this node belongs to, as "/meta/consumers/etl"."""
    for folder in (paths.groups(), paths.sinks()):
        if path.startswith(f"{folder}/"):
            return f"{folder}/{path[len(folder) + 1 :].partition('/')[0]}"
    return None


def owned_by(principal: str, digest: str = "") -> Acl:
    """Returns the access list of a node of a group that belongs to a principal; ANY_PRINCIPAL: to all clients.

    `digest`: its identity without a certificate; empty: it needs one.
    """
    if principal == ANY_PRINCIPAL:
        return _OPEN
    by_proof = [make_acl("digest", digest, all=True)] if digest else []
    return [*_READABLE, make_acl("x509", f"CN={principal}", all=True), *by_proof]


def is_open(found: Acl) -> bool:
    """True if each client may change the node."""
    return any(one.id.scheme == "world" and one.perms & Permissions.WRITE for one in found)


def owner_of(found: Acl) -> str | None:
    """Returns the principal that a node of a group belongs to; None: each client may change it."""
    if is_open(found):
        return None
    names = [one.id.id.removeprefix("CN=") for one in found if one.id.scheme == "x509"]
    names += [one.id.id.partition(":")[0] for one in found if one.id.scheme == "digest"]
    return next((name for name in names if name not in (BROKERS, ADMIN)), ADMIN)


def _is_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def differs(found: Acl, wanted: Acl) -> bool:
    """True if a node has another list."""
    return {(one.perms, one.id) for one in found} != {(one.perms, one.id) for one in wanted}
