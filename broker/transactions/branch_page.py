"""The answer to BRANCHES: a page of the open branches.

A client without `recover cluster` sees its own branches. If it may write to any topic, it also sees the ids and states
of branches of others that are prepared, or decided by an operator, without their size and session. It cannot end them,
and their ids are not secret: a recoverer forgets a decision once no broker has a prepared branch of the transaction. If
the recoverer has another user now and did not see a branch, that branch would lose its decision.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from metamq.tx.store.table import BranchPhase
from metamq.wire.commands import Branches, BranchesReply, BranchInfo

if TYPE_CHECKING:
    from metamq.broker.transactions.term import TransactionTerm
    from metamq.security.rights import Access
    from metamq.tx.store.branch import BranchState

PAGE = 1000
"""Branches per answer."""
PROMISED = (BranchPhase.PREPARED, BranchPhase.HEURISTIC)


def branch_page(term: TransactionTerm, query: Branches, access: Access) -> BranchesReply:
    """Returns the branches after the epoch of the query, in the order of their epochs."""
    sees_all = access.may_recover

    def is_open(branch: BranchState) -> bool:
        return sees_all or branch.principal == access.principal

    behind = [branch for branch in term.store.branches.values() if branch.epoch > query.after_epoch]
    shown = PROMISED if access.may_begin else ()
    found = [b for b in behind if b.state in shown or (is_open(b) and (query.all or b.state in PROMISED))]
    found.sort(key=lambda branch: branch.epoch)
    page = [_info(branch) if is_open(branch) else _only_id(branch) for branch in found[:PAGE]]
    return BranchesReply(term.history, page, len(found) > PAGE)


def _info(branch: BranchState) -> BranchInfo:
    return BranchInfo(
        [*branch.xid], branch.epoch, branch.state.value, branch.owner, branch.messages, branch.bytes,
        branch.prepared_us, [*branch.follows], [*branch.followers], _age_ms(branch),
    )  # fmt: skip


def _age_ms(branch: BranchState) -> int:
    """Returns the age by this broker's clock; -1 before the prepare. After a change of the master, of two clocks."""
    return max(time.time_ns() // 1000 - branch.prepared_us, 0) // 1000 if branch.prepared_us else -1


def _only_id(branch: BranchState) -> BranchInfo:
    return _info(branch)._replace(owner="", messages=0, bytes=0)
