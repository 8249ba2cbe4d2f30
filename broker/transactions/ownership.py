"""The rights of a client on branches: it sends to topics that it may write, and works in branches that it began.

The right `recover cluster` opens all branches. With security off everything is allowed. A broker ends branches by
itself when their client is gone. It does so on behalf of the principal of its own branch, since that client has named
the branches at other brokers that belong to the transaction.
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
    from metamq.wire.commands import Branches, Tx

OPERATORS_VERBS = frozenset({Verb.HEURISTIC_COMMIT, Verb.HEURISTIC_ROLLBACK})
ENDS = frozenset({Verb.COMMIT, Verb.ROLLBACK, Verb.FORGET, Verb.RESOLVE})


def check_request(header: Tx, access: Access) -> None:
    """Raises NotAuthorized for the first topic that the client may not write, and for an operator's decision."""
    if not access.is_limited:
        return
    if not OPERATORS_VERBS.isdisjoint(header.verbs):
        access.check_cluster(RECOVER)
    for entry in header.entries:
        access.check_topic(WRITE, unpack(PutEntry, entry).topic)


def check_list(query: Branches, access: Access) -> None:
    """Raises NotAuthorized if the query is also for the branches of others, and the client does not see them."""
    if query.of_others and not access.may_begin:
        access.check_cluster(RECOVER)


def check_arrival(term: TransactionTerm, work: TxRequest) -> None:
    """Checks a request before it waits behind others of its branch. Raises NotAuthorized."""
    check_request(work.header, work.connection.access)
    _check_owner(term, work)


def check_verb(term: TransactionTerm, work: TxRequest) -> None:
    """Checks the next verb of a request, which may have waited. Raises NotAuthorized."""
    access, verb = work.connection.access, work.verbs[0]
    if access is not work.checked:
        check_request(work.header, access)
    _check_owner(term, work)
    branch = term.store.branches.get(work.xid)
    is_foreign = branch is not None and verb in ENDS and not access.is_owner(branch.principal, work.header.principal)
    if verb in OPERATORS_VERBS or is_foreign:
        work.connection.decided(f"{verb.name} {work.xid}")


def _check_owner(term: TransactionTerm, work: TxRequest) -> None:
    """A client that has lost its last right to write may still end its own branches."""
    branch = term.store.branches.get(work.xid)
    if branch is None or work.verbs[0] is Verb.START:  # START says that the id is in use
        work.connection.access.check_begins()
    else:
        work.connection.access.check_owner(branch.principal, work.header.principal)
