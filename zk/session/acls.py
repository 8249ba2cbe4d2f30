"""The access lists of nodes: what is whose in ZooKeeper, if it knows its clients by their certificates.

    nodes                         certificates `brokers`, `admin`    other clients
    /meta/security, and below     all                                nothing
    /meta/consumers, /meta/spark  all                                reads, adds and removes nodes
    below these two               all                                all
    the rest of /meta             all                                reads
    outside of /meta              all                                all

So brokers and administrators own topics, registrations, users and rules, and clients own groups and the state of
Spark's sinks. A node gets its list when it is made; `metamq security migrate` gives older nodes theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kazoo.security import OPEN_ACL_UNSAFE, make_acl

from metamq.security.config import ADMIN, BROKERS

if TYPE_CHECKING:
    from metamq.zk.paths import Paths

Acl = list[Any]
"""kazoo's ACLs: who has which permissions."""
_OWNERS = [make_acl("x509", f"CN={name}", all=True) for name in (BROKERS, ADMIN)]
_PRIVATE: Acl = _OWNERS
_READABLE: Acl = [*_OWNERS, make_acl("world", "anyone", read=True)]
_SHARED: Acl = [*_OWNERS, make_acl("world", "anyone", read=True, create=True, delete=True)]
_OPEN: Acl = OPEN_ACL_UNSAFE


def acl_of(paths: Paths, path: str) -> Acl:
    """Returns the access list of a node."""
    if _is_in(path, paths.security()):
        return _PRIVATE
    if not _is_in(path, paths.root):
        return _OPEN
    shared = (paths.groups(), paths.sinks())
    if path in shared:
        return _SHARED
    return _OPEN if any(_is_in(path, one) for one in shared) else _READABLE


def _is_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def differs(found: Acl, wanted: Acl) -> bool:
    """True if a node's list is another one."""
    return {(one.perms, one.id) for one in found} != {(one.perms, one.id) for one in wanted}
