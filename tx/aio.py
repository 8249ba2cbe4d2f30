"""Transactions for asyncio: the same names as `metamq.tx`, on any asyncio loop."""

from metamq.client.net.branches import BranchDescription
from metamq.tx.app.aio_xa_resource import XAResource
from metamq.tx.app.resource import TM, Vote
from metamq.tx.database.aio_coordinator import AsyncioTpcConnection, CoordinatedTransaction, Coordinator
from metamq.tx.database.aio_dbtx import create_outcome_table, dbtx
from metamq.tx.database.coordinator_core import Settled
from metamq.wire.xa import XACode, Xid

__all__ = [
    "TM",
    "AsyncioTpcConnection",
    "BranchDescription",
    "CoordinatedTransaction",
    "Coordinator",
    "Settled",
    "Vote",
    "XACode",
    "XAResource",
    "Xid",
    "create_outcome_table",
    "dbtx",
]
