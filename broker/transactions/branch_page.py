"""The answer to BRANCHES: a page of the open branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metamq.tx.store.table import BranchPhase
from metamq.wire.commands import Branches, BranchesReply, BranchInfo

if TYPE_CHECKING:
    from metamq.broker.transactions.term import TransactionTerm

PAGE = 1000
"""Branches per answer."""


def branch_page(term: TransactionTerm, query: Branches, history: str) -> BranchesReply:
    """Returns the branches after the epoch of the query, in the order of their epochs."""
    promised = (BranchPhase.PREPARED, BranchPhase.HEURISTIC)
    behind = [branch for branch in term.store.branches.values() if branch.epoch > query.after_epoch]
    wanted = sorted((b for b in behind if query.all or b.state in promised), key=lambda branch: branch.epoch)
    page = [
        BranchInfo(
            [*b.xid], b.epoch, b.state.value, b.owner, b.messages, b.bytes, b.prepared_us, [*b.follows], [*b.followers],
        )
        for b in wanted[:PAGE]
    ]  # fmt: skip
    return BranchesReply(history, page, len(wanted) > PAGE)
