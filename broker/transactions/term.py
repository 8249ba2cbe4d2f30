"""What there is of transactions while a replica is the master, and a request on its way."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

from metamq.broker.transactions.commits import CommitApplier
from metamq.broker.transactions.journal import JournalStore
from metamq.errors import MetamqError
from metamq.tx.store.verbs import JournalTransactionStore, VerbRequest
from metamq.wire.connection import Request
from metamq.wire.tx_commands import Tx, TxResult
from metamq.wire.xa import Verb, Xid


class SessionConnection(Protocol):
    """Where a request came from."""

    def answer(self, request: Request, header: Any) -> None:
        """Answers a request."""

    def answer_error(self, request: Request, error: MetamqError) -> None:
        """Answers a request with an error."""


class Figures(NamedTuple):
    """How many branches there are, for metrics and for the disk's reserve."""

    open: int = 0
    """Begun, and not prepared."""
    prepared: int = 0
    heuristic: int = 0
    """Decided by an operator, and not forgotten."""
    oldest_prepared_us: int = 0
    """When the oldest of the prepared ones was prepared, microseconds since 1970; 0: there is none."""
    promised_bytes: int = 0
    """What the prepared ones are going to bring into partitions, if they are committed."""
    journal_bytes: int = 0


_VERBS = {int(verb): verb for verb in Verb}


class TxRequest:
    """A request that is carried out, verb by verb."""

    __slots__ = ("asked", "bodies", "connection", "header", "is_answered", "request", "results", "verbs", "xid")

    def __init__(self, request: Request, connection: SessionConnection, header: Tx, xid: Xid) -> None:
        """Raises KeyError: a verb that is not known."""
        self.request = request
        self.connection = connection
        self.header = header
        self.xid = xid
        self.verbs = deque([_VERBS[number] for number in header.verbs])
        self.asked = VerbRequest(
            self.verbs[0], xid, header.epoch, header.session, header.timeout_ms / 1000, header.messages, header.first,
            owner=header.session, follows=tuple(header.follows), followers=tuple(header.followers),
        )  # fmt: skip
        """The verb that it is at."""
        self.bodies: list[memoryview] = []
        self.results: list[TxResult] = []
        self.is_answered = False


class TransactionTerm:
    """What ends with the term."""

    def __init__(
        self, store: JournalTransactionStore, journal: JournalStore, commits: CommitApplier, generation: int
    ) -> None:
        self.store = store
        self.journal = journal
        self.commits = commits
        self.generation = generation
        self.queues: dict[Xid, deque[TxRequest]] = {}
        """Requests by branch: the first is under way."""
        self.in_flight: set[int] = set()
        """LSNs of entries that are not durable yet."""
        self.sessions: dict[str, SessionConnection] = {}
        """Where each session that works in something was heard of last; and some that worked a moment ago."""
        self.needed_lsn = journal.partition.log.start_offset
        """What lies before it may be removed: a MARK of this term says so, and every in-sync replica has that. One of
        an earlier term may yet be cut, and with it what was written down once more."""
        self.memory_lsn = store.journal.mark.needed_lsn
        """From there on the journal has all that is remembered, once what is there now is durable."""
        self.written_down = 0, -1
        """The journal's size and `needed_lsn` when what is needed of its older half was written down last."""
