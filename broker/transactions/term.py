"""The state of transactions during one epoch of a master, and a request that is being carried out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from metamq.tx.store.verbs import JournalTransactionStore, VerbRequest
from metamq.wire.xa import Verb, Xid

if TYPE_CHECKING:
    from metamq.broker.transactions.commits import CommitApplier
    from metamq.broker.transactions.journal import JournalStore
    from metamq.errors import MetamqError
    from metamq.wire.commands import Tx, TxResult
    from metamq.wire.connection import Request


class SessionConnection(Protocol):
    """The connection of a request."""

    def answer(self, request: Request, header: Any) -> None:
        """Answers a request."""

    def answer_error(self, request: Request, error: MetamqError) -> None:
        """Answers a request with an error."""


class Figures(NamedTuple):
    """Numbers of branches, for metrics and for the disk's reserve."""

    open: int = 0
    """Branches that have begun and are not prepared."""
    prepared: int = 0
    heuristic: int = 0
    """Branches that an operator decided, and that are not forgotten."""
    oldest_prepared_us: int = 0
    """Time of the oldest prepare of a prepared branch, microseconds since 1970; 0 if there is none."""
    promised_bytes: int = 0
    """Bytes that the prepared branches add to partitions if they are committed."""
    journal_bytes: int = 0


_VERBS = {int(verb): verb for verb in Verb}


class TxRequest:
    """A request that is carried out verb by verb."""

    __slots__ = ("bodies", "connection", "header", "is_answered", "request", "results", "verb_request", "verbs", "xid")

    def __init__(self, request: Request, connection: SessionConnection, header: Tx, xid: Xid) -> None:
        """Raises KeyError if it has an unknown verb."""
        self.request = request
        self.connection = connection
        self.header = header
        self.xid = xid
        self.verbs = deque([_VERBS[number] for number in header.verbs])
        self.verb_request = VerbRequest(
            self.verbs[0], xid, header.epoch, header.session, header.timeout_ms / 1000, header.messages, header.first,
            owner=header.session, follows=tuple(header.follows), followers=tuple(header.followers),
        )  # fmt: skip
        """The current verb."""
        self.bodies: list[memoryview] = []
        self.results: list[TxResult] = []
        self.is_answered = False


class TransactionTerm:
    """The state of one epoch."""

    def __init__(
        self, store: JournalTransactionStore, journal: JournalStore, commits: CommitApplier, generation: int
    ) -> None:
        self.store = store
        self.journal = journal
        self.commits = commits
        self.generation = generation
        self.queues: dict[Xid, deque[TxRequest]] = {}
        """Requests by branch; the first one is running."""
        self.in_flight: set[int] = set()
        """LSNs of entries that are not durable yet."""
        self.sessions: dict[str, SessionConnection] = {}
        """The last connection of each session with an open branch, and of some recent sessions."""
        self.needed_lsn = journal.partition.log.start_offset
        """Entries below it may be removed: a MARK of this epoch says so, and every in-sync replica has it. A MARK of an
        earlier epoch does not count: it may be cut, together with the rewritten records before it."""
        self.memory_lsn = store.journal.mark.needed_lsn
        """The LSN from which on the journal has all remembered outcomes, when its present entries are durable."""
        self.written_down: tuple[int, int] = 0, -1
        """The journal's size and `needed_lsn` when the needed records of its older half were last rewritten."""
