"""The state of transactions during one epoch of a master, and a request that is being carried out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from metamq.errors import MetamqError, ProtocolError, TryLater
from metamq.tx.store.table import BranchPhase
from metamq.tx.store.verbs import JournalTransactionStore, VerbRequest
from metamq.wire.limits import FOLLOWERS_MAX, VERBS_MAX
from metamq.wire.xa import Verb, XACode, Xid

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition
    from metamq.broker.transactions.commits import CommitApplier
    from metamq.broker.transactions.journal import JournalStore
    from metamq.security.rights import Access
    from metamq.wire.commands import Tx, TxResult
    from metamq.wire.connection import Request


class SessionConnection(Protocol):
    """The connection of a request."""

    access: Access
    """The rights of its client, by the present rules."""

    def answer(self, request: Request, header: Any) -> None:
        """Answers a request."""

    def decided(self, what: str) -> None:
        """Notes an operator's decision in the audit log."""

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
    """Bytes that the prepared branches, and those with a record that is not durable yet, may add to partitions."""
    journal_bytes: int = 0


class CommitsFirst(MetamqError):
    """A partition takes no message outside branches while it lacks commits that were answered."""

    retriable = True

    def __init__(self, partition: str) -> None:
        super().__init__(
            f"{partition} takes no messages at present: earlier commits come first",
            hint="Send again a little later.",
        )
        self.partition = partition


Session = tuple[str, str]
"""Principal, and the name that the client chose."""
SESSION_CHARS_MAX = 64
PROMISES = (Verb.PREPARE, Verb.COMMIT_ONE_PHASE, Verb.DECIDE)
_VERBS = {int(verb): verb for verb in Verb}


class TxRequest:
    """A request that is carried out verb by verb."""

    __slots__ = (
        "bodies", "checked", "connection", "header", "is_answered", "is_begun", "request", "results", "verb_request",
        "verbs", "xid",
    )  # fmt: skip

    def __init__(self, request: Request, connection: SessionConnection, header: Tx, xid: Xid) -> None:
        """Raises KeyError if it has an unknown verb."""
        self.request = request
        self.connection = connection
        self.checked = connection.access
        """The rights that allowed it."""
        self.header = header
        self.xid = xid
        self.verbs = deque([_VERBS[number] for number in header.verbs])
        self.verb_request = VerbRequest(
            self.verbs[0], xid, header.epoch, header.session, header.timeout_ms / 1000, header.messages, header.first,
            owner=header.session, principal=self.checked.principal, follows=tuple(header.follows),
            followers=tuple(header.followers),
        )  # fmt: skip
        """The current verb."""
        self.bodies: list[memoryview] = []
        self.results: list[TxResult] = []
        self.is_begun = False
        """True once its records may be in the journal."""
        self.is_answered = False

    @property
    def session(self) -> Session:
        """The session that it belongs to."""
        return self.checked.principal, self.header.session

    @property
    def promise_follows(self) -> bool:
        """True if it continues after SEND with END and a promise, without another request in between."""
        return len(self.verbs) == 3 and self.verbs[1] is Verb.END and self.verbs[2] in PROMISES


def check_tx(header: Tx) -> None:
    """Checks the verbs and the numbers of a TX. Raises ProtocolError."""
    if not 0 < len(header.verbs) <= VERBS_MAX or len(header.session) > SESSION_CHARS_MAX:
        raise ProtocolError(f"a TX has 1 to {VERBS_MAX} verbs, and a session of at most {SESSION_CHARS_MAX} characters")
    if header.verbs.count(Verb.SEND) > 1 or bool(header.entries) != (Verb.SEND in header.verbs):
        raise ProtocolError("a TX has one SEND with batches, or no SEND and no batches")
    numbers = [*header.follows, *header.followers]
    if numbers and not 0 <= min(numbers) <= max(numbers) < 1 << 63:
        raise ProtocolError("the decider and the followers of a branch must be numbers from 0 to 2^63 - 1")
    if len(header.follows) not in (0, 3) or len(header.followers) % 2 or len(numbers) > FOLLOWERS_MAX:
        raise ProtocolError(
            f"a branch with {len(header.follows)} numbers for its decider and {len(header.followers)} for its followers"
        )
    if not (0 <= header.timeout_ms < 1 << 53 and header.first >= 0 and header.messages >= -1):
        raise ProtocolError("a TX with a negative number, or too large a time-out")


class TransactionTerm:
    """The state of one epoch."""

    def __init__(
        self,
        store: JournalTransactionStore,
        journal: JournalStore,
        commits: CommitApplier,
        broker_id: int,
        generation: int,
    ) -> None:
        self.store = store
        self.journal = journal
        self.commits = commits
        self.generation = generation
        self.history = f"{broker_id}:{generation}"
        """Answers have it: in another one, branches and positions may be others."""
        self.queues: dict[Xid, deque[TxRequest]] = {}
        """Requests by branch; the first one is running."""
        self.is_settled = False
        """True once every in-sync replica has the journal as this epoch found it. Before, no request is carried out and
        nothing rests on its end, which a promotion could give up."""
        self.refused: MetamqError | None = None
        """The reason why this never happens; None: it may."""
        last = [one for lsn, one in store.journal.unmarked.items() if lsn >= journal.durable_offset]
        self.commits_first = frozenset(body.place.key for committed in last for body in committed.bodies.values())
        """The partitions with commits that are applied as soon as the epoch is settled."""
        self.deferred: list[tuple[Request, SessionConnection]] = []
        """Requests for a list of branches that wait for that."""
        self.in_flight: set[int] = set()
        """LSNs of entries that are not durable yet."""
        self.sessions: dict[Session, SessionConnection] = {}
        """The last connection of each session with an open branch, and of some recent sessions."""
        self.needed_lsn = journal.partition.log.start_offset
        """Entries below it may be removed: a MARK of this epoch says so, and every in-sync replica has it. A MARK of an
        earlier epoch does not count: it may be cut, together with the rewritten records before it."""
        self.memory_lsn = store.journal.mark.needed_lsn
        """The LSN from which on the journal has all remembered outcomes, when its present entries are durable."""
        self.written_down: tuple[int, int] = 0, -1
        """The journal's size and `needed_lsn` when the needed records of its older half were last rewritten."""

    def check_order(self, partition: Partition) -> None:
        """Raises CommitsFirst if the partition lacks commits: a message that is stored now would overtake them.

        A damaged journal stops only transactions: its commits cannot be read.
        """
        lacks_commits = partition.key in self.commits_first or partition.key in self.commits.lacking
        if lacks_commits and self.refused is None and self.journal.partition.closed_by is None:
            raise CommitsFirst(partition.name)

    def figures(self) -> Figures:
        """Numbers of the branches now."""
        known = self.store.branches.values()
        prepared = [branch for branch in known if branch.state is BranchPhase.PREPARED]
        return Figures(
            open=sum(branch.state in (BranchPhase.ACTIVE, BranchPhase.IDLE) for branch in known),
            prepared=len(prepared),
            heuristic=sum(branch.state is BranchPhase.HEURISTIC for branch in known),
            oldest_prepared_us=min((branch.prepared_us for branch in prepared), default=0),
            promised_bytes=sum(branch.bytes for branch in known if branch.state is BranchPhase.PREPARED or branch.busy),
            journal_bytes=self.journal.size_bytes,
        )

    def refuse_waiting(self, connection: SessionConnection) -> None:
        """Refuses the requests of a lost connection that are not begun. The answers give their memory back."""
        for xid, queue in list(self.queues.items()):
            lost = [work for work in queue if work.connection is connection and not work.is_begun]
            for work in lost:
                queue.remove(work)
                connection.answer_error(work.request, TryLater(xid, XACode.RETRY, "its connection is lost"))
            if not queue:
                del self.queues[xid]

    def drop_idle_sessions(self) -> None:
        """Forgets sessions without an open branch. Runs from time to time: other sessions may end its branches."""
        working = {work.session for queue in self.queues.values() for work in queue}
        for branch in self.store.branches.values():
            if branch.state in (BranchPhase.ACTIVE, BranchPhase.IDLE):
                working.update((branch.principal, name) for name in (*branch.sessions, branch.owner))
        self.sessions = {session: known for session, known in self.sessions.items() if session in working}
