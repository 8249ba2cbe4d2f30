"""XA transactions: the broker's transaction journal and store, and the APIs for applications."""

if __name__ != "metamq.tx":
    raise ImportError(f"import metamq.tx, not {__name__}: a bare import makes a second copy of every class")

from metamq.client.net.branches import BranchDescription
from metamq.tx.app.resource import TM, Vote
from metamq.tx.app.transactions import RecoveredXid
from metamq.tx.app.xa_resource import XAResource, XASettings
from metamq.tx.database.coordinator import CoordinatedTransaction, Coordinator, TpcConnection
from metamq.tx.database.coordinator_core import Settled
from metamq.tx.database.dbtx import create_outcome_table, dbtx
from metamq.tx.database.manager import DataManager, Savepoint, join_transaction
from metamq.tx.database.recoverer import Recovered, Recoverer, RecoveryProblem
from metamq.wire.xa import XACode, Xid

__all__ = [
    "TM",
    "BranchDescription",
    "CoordinatedTransaction",
    "Coordinator",
    "DataManager",
    "Recovered",
    "RecoveredXid",
    "Recoverer",
    "RecoveryProblem",
    "Savepoint",
    "Settled",
    "TpcConnection",
    "Vote",
    "XACode",
    "XAResource",
    "XASettings",
    "Xid",
    "create_outcome_table",
    "dbtx",
    "join_transaction",
]
