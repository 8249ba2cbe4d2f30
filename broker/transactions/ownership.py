"""The rights of a client on branches: it sends to topics that it may write, and works in branches that it began.

The right `recover cluster` opens all branches. With security off everything is allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metamq.security.rights import RECOVER, WRITE
from metamq.wire.commands import PutEntry
from metamq.wire.headers import unpack
from metamq.wire.xa import Verb

if TYPE_CHECKING:
    from metamq.broker.transactions.term import TransactionTerm, TxRequest
    from metamq.security.rights import Access
    from metamq.wire.commands import Tx

OPERATORS_VERBS = frozenset({Verb.HEURISTIC_COMMIT, Verb.HEURISTIC_ROLLBACK})


def check_request(header: Tx, access: Access) -> None:
    """Raises NotAuthorized for the first topic that the client may not write, and for an operator's decision."""
    if not access.is_limited:
        return
    if not OPERATORS_VERBS.isdisjoint(header.verbs):
        access.check_cluster(RECOVER)
    for entry in header.entries:
        access.check_topic(WRITE, unpack(PutEntry, entry).topic)


def check_verb(term: TransactionTerm, work: TxRequest) -> None:
    """Checks the next verb of a request, which may have waited. Raises NotAuthorized."""
    access, verb = work.connection.access, work.verbs[0]
    if access.is_limited:
        if access is not work.checked:
            check_request(work.header, access)
        branch = term.store.branches.get(work.xid)
        if branch is not None and verb is not Verb.START:  # START says that the id is in use
            access.check_owner(branch.principal)
    if verb in OPERATORS_VERBS:
        work.connection.decided(f"{verb.name} {work.xid}")
