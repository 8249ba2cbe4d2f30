"""TransactionalCommandProcessor: carries out clients' requests for branches, while this replica is the master.

    request ─▶ one at a time per branch ─▶ ask the store ─▶ write to the journal ─▶ wait, if it must be durable
                                                                                        │
    answer ◀── next verb ◀── apply a commit to its partitions ◀── the state changes ◀───┘

An epoch begins with the journal: the processor reads it, drops branches that were not prepared, and applies the commits
of former masters to the partitions, before it admits any client. The end of the journal may not be on every in-sync
replica yet, and then a promotion may give it up. So requests wait, and the last commits, until every one has it: an
answer that a branch is committed must stay true. If the epoch ends while a request waits for the journal, the answer
is that the outcome is unknown: the next master may or may not find the record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from metamq.broker.log.disk.files import SHORTAGES
from metamq.broker.log_once import LogOnce
from metamq.broker.transactions.branch_page import branch_page
from metamq.broker.transactions.commits import CommitApplier, log_completed
from metamq.broker.transactions.journal import TOPIC, TOPIC_ID, Appender, Follower, JournalStore, Written, read_journal
from metamq.broker.transactions.ownership import check_arrival, check_list, check_verb
from metamq.broker.transactions.term import PROMISES, Figures, SessionConnection, TransactionTerm, TxRequest, check_tx
from metamq.broker.transactions.upkeep import Guards, Upkeep
from metamq.errors import (
    CorruptData,
    DiskFull,
    MessageTooLarge,
    MetamqError,
    NotEnoughReplicas,
    OutcomeUnknown,
    ProtocolError,
    StorageError,
    TopicNotFound,
    TransactionError,
    TryLater,
)
from metamq.tx.store.fold import COMMITS, JournalState, Retained
from metamq.tx.store.records import Add, BodyPlace, Heuristic, Record
from metamq.tx.store.table import LASTING, BranchPhase
from metamq.tx.store.verbs import JournalTransactionStore, TransactionLimits, VerbStep
from metamq.wire import headers, status
from metamq.wire.commands import Branches, PutEntry, Tx, TxReply, TxResult
from metamq.wire.limits import BATCH_BYTES_MAX
from metamq.wire.xa import Verb, XACode, Xid

if TYPE_CHECKING:
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.partition import BatchIds, Partition
    from metamq.broker.data.topics import Topics
    from metamq.tx.store.branch import BranchState
    from metamq.wire.connection import Request

log = logging.getLogger("metamq.broker")

WAITING_MAX = 100
"""Requests of one branch, including the running one. A client sends one or a few requests for a branch at a time."""
GRACE_S = 5.0
"""Seconds for a session to return after its connection is lost; then its unprepared branches are rolled back."""
READ_SLICE_S = 0.02
SETTLE_RETRY_S = 0.2
FIGURES_S = 1.0
ENTRY_BYTES = 8 * 1024 * 1024
"""Bytes of bodies in one entry of the journal; a single body may be larger."""
BODY_BYTES_MAX = BATCH_BYTES_MAX - 64 * 1024
"""Maximum bytes of a body: an entry with one body must fit into a batch."""
BEGINNING = [Verb.START, Verb.SEND, Verb.END]
DECIDES_AGAINST = (Verb.HEURISTIC_ROLLBACK,)

Check = Callable[[PutEntry, memoryview], BodyPlace]


def _is_of_the_disk(error: MetamqError) -> bool:
    """True if the disk failed, and the broker must end. A full disk or a lack of descriptors is not a failure."""
    return isinstance(error, StorageError) and not error.retriable


class TransactionalCommandProcessor:
    """Carries out requests for branches. Only the broker's loop uses it."""

    def __init__(
        self,
        broker_id: int,
        topics: Topics,
        flusher: Flusher,
        ids: BatchIds,
        appender: Appender,
        check: Check,
        failed: Callable[[MetamqError], None],
        current: Callable[[], TransactionTerm | MetamqError],
    ) -> None:
        """`check` verifies a received batch and returns its place. `failed` is called when the broker must end.
        `current` returns the transactions of the present epoch, or the reason why there are none."""
        self.limits = TransactionLimits()
        self.upkeep = Upkeep(topics, flusher)
        self.grace_s = GRACE_S
        self._broker_id = broker_id
        self._topics = topics
        self._ids = ids
        self._appender = appender
        self._check = check
        self._failed = failed
        self._current = current
        self._follower = Follower()
        self._guards = Guards()
        self.figures = Figures()
        """The last figures, at most FIGURES_S old. Any thread."""
        self._figures_due_s = 0.0
        self._spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Future[None]] = asyncio.ensure_future
        self._settling: set[asyncio.Future[None]] = set()

    # -- epochs -------------------------------------------------------------------------------------------------------

    @property
    def _term(self) -> TransactionTerm | None:
        found = self._current()
        return found if isinstance(found, TransactionTerm) else None

    def _journal_partition(self) -> Partition:
        return self._topics.find(TOPIC, TOPIC_ID, 0)

    async def begin_term(self, epoch: int, generation: int) -> TransactionTerm | MetamqError:
        """Takes over from the former master; returns the reason if the journal cannot be read. Meanwhile no client
        reads or writes. Raises StorageError."""
        try:
            return await self._begun(self._journal_partition(), epoch, generation)
        except StorageError:
            raise
        except MetamqError as error:
            self._not_available(error)
            return error

    def _not_available(self, error: MetamqError) -> None:
        if _is_of_the_disk(error):
            self._failed(error)
        log.critical("transactions are not available at broker %d: %s", self._broker_id, error)
        if isinstance(error, CorruptData) and (damaged := self._topics.get(TOPIC, 0)) is not None:
            self._topics.is_damaged(damaged, error)

    async def _begun(self, partition: Partition, epoch: int, generation: int) -> TransactionTerm:
        journal = JournalStore(partition, self._ids, self._appender)
        store = JournalTransactionStore(epoch, self.limits)
        state = store.journal
        await self._in_slices(read_journal(partition), state.apply)
        dropped = state.drop_unprepared()
        partition.needed_offset = state.mark.needed_lsn
        commits = CommitApplier(journal, self._topics, self._appender)
        if state.mark.generation != generation:  # positions may now mean other batches
            state.mark = state.mark._replace(ends=[])
        applied: list[int] = []
        await self._in_slices(commits.redo(state, 0, journal.durable_offset), applied.append)
        log_completed(applied, len(dropped))
        return TransactionTerm(store, journal, commits, self._broker_id, generation)

    def serve(self, term: TransactionTerm) -> None:
        """Carries out requests from now on, as soon as every in-sync replica has the journal as the epoch found it."""
        task = self._spawn(self._settle(term))
        self._settling.add(task)
        task.add_done_callback(self._settling_ended)

    def _settling_ended(self, task: asyncio.Future[None]) -> None:
        self._settling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # else requests would wait without end
            self._failed(MetamqError(f"internal error: {error!r}"))

    async def _settle(self, term: TransactionTerm) -> None:
        """Waits for that, applies the last commits of former masters, and begins with the requests that wait."""
        journal, state, waits = term.journal, term.store.journal, LogOnce()
        applied: list[int] = []
        while True:
            try:
                await self.upkeep.found_is_durable(journal)
                steps = term.commits.redo(state, journal.durable_offset, journal.found_offset)
                await self._in_slices(steps, applied.append)
                break
            except MetamqError as error:
                if term is not self._term or term.refused is not None:  # end_term() has answered
                    return
                if not isinstance(error, SHORTAGES):
                    self._not_available(error)
                    self.give_up_wait(error)
                    return
                waits.failed(f"transactions wait at broker {self._broker_id}", error)
            await asyncio.sleep(SETTLE_RETRY_S)
        if term is not self._term or term.refused is not None:
            return
        waits.worked(f"transactions do not wait any more at broker {self._broker_id}")
        log_completed(applied, 0)
        term.is_settled, term.commits_first = True, frozenset()
        deferred, term.deferred = term.deferred, []
        for request, connection in deferred:
            self._list_branches(term, request, connection)
        await self._in_slices(self._begin_waiting(term))

    def _begin_waiting(self, term: TransactionTerm) -> Iterator[None]:
        """Begins the requests that have waited for the journal. Yields after each branch."""
        for xid in list(term.queues):
            queue = term.queues.get(xid)
            if queue and not queue[0].is_begun:
                self._run(term, queue[0])
            yield

    def give_up_wait(self, reason: MetamqError) -> None:
        """Refuses the requests that wait since the epoch began, and all later ones. Nothing happens after the wait."""
        if (term := self._term) is not None and not term.is_settled:
            term.refused = reason
            self.end_term(term, reason)

    async def _in_slices(self, steps: Any, take: Callable[[Any], object] = lambda step: None) -> None:
        """Consumes an iterator without blocking the loop for long."""
        until = time.monotonic() + READ_SLICE_S
        for step in steps:
            take(step)
            if time.monotonic() > until:
                await asyncio.sleep(0)
                until = time.monotonic() + READ_SLICE_S

    def end_term(self, term: TransactionTerm, reason: MetamqError) -> None:
        """Ends this replica's epoch as master: answers all waiting requests."""
        term.journal.ended = reason
        for work in [work for queue in term.queues.values() for work in queue if not work.is_answered]:
            work.connection.answer_error(work.request, reason.with_unknown_outcome() if work.is_begun else reason)
        for request, connection in term.deferred:
            connection.answer_error(request, reason)
        term.queues, term.deferred = {}, []

    # -- requests -----------------------------------------------------------------------------------------------------

    def tx(self, request: Request, connection: SessionConnection) -> None:
        """Takes a TX. Raises ProtocolError, Fenced, and the error of a bad batch: then nothing has been done."""
        term = self._ready()
        header = headers.unpack(Tx, request.header)
        check_tx(header)
        try:
            work = TxRequest(request, connection, header, Xid.unpack(header.xid))
        except KeyError as error:
            raise ProtocolError(f"a TX with a verb that this broker does not know: {error}") from None
        check_arrival(term, work)
        self._take_bodies(work)
        queue = term.queues.setdefault(work.xid, deque())
        if len(queue) >= WAITING_MAX:
            raise TryLater(work.xid, XACode.RETRY, f"{len(queue)} of its requests already wait, the most allowed")
        term.sessions[work.session] = connection
        queue.append(work)
        if len(queue) == 1 and term.is_settled:
            self._run(term, work)

    def _take_bodies(self, work: TxRequest) -> None:
        entries = headers.unpack_list(PutEntry, work.header.entries)
        body = work.request.body
        sizes = [entry.size for entry in entries]
        if sum(sizes) != len(body) or min(sizes, default=1) <= 0:
            raise ProtocolError(f"the batches' sizes do not add up to the body's {len(body)} bytes")
        places, at = [], 0
        for entry in entries:
            batch = body[at : at + entry.size]
            at += entry.size
            if entry.size > BODY_BYTES_MAX:
                raise MessageTooLarge("a batch of a transaction", entry.size, BODY_BYTES_MAX)
            places.append(self._check(entry, batch))
            work.bodies.append(batch)
        work.verb_request.places = tuple(places)

    def _ready(self) -> TransactionTerm:
        found = self._current()
        error = found.refused if isinstance(found, TransactionTerm) else found
        if error is not None:
            raise error.with_traceback(None)
        assert isinstance(found, TransactionTerm)
        return found

    def _run(self, term: TransactionTerm, work: TxRequest) -> None:
        """Carries out a request, and the requests that wait behind it, up to the first verb that must wait."""
        following: TxRequest | None = work
        while following is not None and self._carried_out(term, following):
            following = self._finish(term, following)

    def _carried_out(self, term: TransactionTerm, work: TxRequest) -> bool:
        """Carries out a request's verbs. Returns False if a verb must wait, or if the epoch has ended."""
        work.is_begun = True
        while work.verbs and term is self._term:
            verb = work.verbs[0]
            try:
                if self._one(term, work, verb):
                    return False
            except TransactionError as error:
                self._refused(work, error)
                break
            except MetamqError as error:
                if _is_of_the_disk(error):
                    self._failed(error)
                self._refused(work, error)
                break
            except Exception as error:  # a bug: the requests behind it must still get their answers
                log.exception("%s of %s failed", verb.name, work.xid)
                self._fault(term, work, error)
                break
            work.verbs.popleft()
        if term is self._term:
            self._write_held(term, work)
        return term is self._term

    def _one(self, term: TransactionTerm, work: TxRequest, verb: Verb) -> bool:
        """Carries out a verb. Returns True if its record is being written, and _durable() follows. Raises its error."""
        verb_request = work.verb_request
        verb_request.verb = verb
        check_verb(term, work)
        if verb in (Verb.START, Verb.SEND) and term.journal.size_bytes > self.limits.journal_bytes:
            raise TryLater(
                work.xid, XACode.RMERR, f"the journal has {term.journal.size_bytes:,} bytes, the most allowed"
            )
        if verb is Verb.START and self._begin_at_once(term, work):
            return False
        step = term.store.ask(verb_request, time.monotonic(), time.time_ns() // 1000)
        if step.error is not None:
            raise step.error
        if isinstance(step.record, Add):
            self._write_bodies(term, work, step.record)
        elif step.record is not None and not step.durable:
            term.store.written(term.journal.append([step.record], []).entry)
        if step.record is None or not step.durable:
            self._done(work, step)
            return False
        branch = term.store.branches[work.xid]
        self._check_durable(term, branch, verb)
        written = self._write_promise(term, work, self._with_ids(term, step.record))
        branch.busy = True
        term.in_flight.add(written.entry.lsn)
        term.journal.when_durable(written, lambda error: self._durable(term, work, step, written, error))
        return True

    def _begin_at_once(self, term: TransactionTerm, work: TxRequest) -> bool:
        """Carries out START, SEND and END together if they come together; END stays in the queue of verbs. Returns
        False, with nothing done, if the store would refuse one of them."""
        if (
            work.header.verbs[:3] != BEGINNING
            or (step := term.store.begin(work.verb_request, time.monotonic())) is None
        ):
            return False
        assert isinstance(step.record, Add)
        self._done(work, step)
        work.verbs.popleft()
        self._write_bodies(term, work, step.record)
        self._done(work, step)
        work.verbs.popleft()
        self._done(work, step)
        return True

    def _write_bodies(self, term: TransactionTerm, work: TxRequest, record: Add) -> None:
        """Writes the bodies, in several entries if necessary. Raises StorageError, CorruptData and ends the branch."""
        places, bodies = list(record.places), work.bodies
        first, size = 0, 0
        try:
            for number, body in enumerate(bodies):
                if number > first and size + len(body) > ENTRY_BYTES:
                    self._write_some(term, record, places, bodies, first, number)
                    first, size = number, 0
                size += len(body)
            self._write_some(term, record, places, bodies, first, len(bodies), hold=work.promise_follows)
        except MetamqError:
            self._not_stored(term, work)
            raise

    def _write_some(
        self,
        term: TransactionTerm,
        record: Add,
        places: list[BodyPlace],
        bodies: list[memoryview],
        start: int,
        end: int,
        *,
        hold: bool = False,
    ) -> None:
        """Writes some bodies as an entry. With `hold`, they go into one entry with the promise that follows."""
        some = record
        if end - start < len(places):
            some = record._replace(first=record.first + start, places=places[start:end])
        sent = bodies[start:end]
        term.store.written(term.journal.hold([some], sent) if hold else term.journal.append([some], sent).entry)

    def _write_promise(self, term: TransactionTerm, work: TxRequest, record: Record) -> Written:
        """Writes a promise, and the held bodies of the same request."""
        held = term.journal.holds
        try:
            return term.journal.append([record], [])
        except MetamqError as error:
            if held and not _is_of_the_disk(error):  # after a disk failure the content of the disk is unknown
                self._not_stored(term, work)
            elif isinstance(error, SHORTAGES):
                raise TryLater(work.xid, XACode.RETRY, str(error)) from error
            raise

    def _write_held(self, term: TransactionTerm, work: TxRequest) -> None:
        """Writes the held bodies of a request whose promise was refused: they stay in the branch."""
        try:
            term.journal.append_held()
        except MetamqError as error:
            self._not_stored(term, work)
            if _is_of_the_disk(error):
                self._failed(error)

    def _fault(self, term: TransactionTerm, work: TxRequest, error: Exception) -> None:
        """Ends a request after an internal error. A promise remains; any other branch is rolled back."""
        branch = term.store.branches.get(work.xid)
        if branch is not None and not branch.busy and branch.state not in LASTING:
            self._not_stored(term, work)
        self._refused(work, OutcomeUnknown(work.xid, XACode.RMFAIL, f"internal error of the broker: {error!r}"))

    def _not_stored(self, term: TransactionTerm, work: TxRequest) -> None:
        branch = term.store.branches.get(work.xid)
        if branch is not None:
            branch.becomes_rollback_only(XACode.RBOTHER, "the broker could not store its messages")

    def _check_durable(self, term: TransactionTerm, branch: BranchState, verb: Verb) -> None:
        """Checks that a promise or a decision can be kept now. Raises TryLater, Fenced: then nothing has changed."""
        promises = verb in PROMISES
        try:
            if verb not in DECIDES_AGAINST:
                for place in {body.place.key for body in branch.bodies}:
                    self._check_served(*place)
            term.journal.admit(branch.bytes if promises else 0)
        except (NotEnoughReplicas, CorruptData, DiskFull) as error:
            raise TryLater(branch.xid, XACode.RETRY, str(error)) from error
        if verb is Verb.PREPARE:  # counted at once: branches prepared before the next tick must fit, too
            self.figures = self.figures._replace(promised_bytes=self.figures.promised_bytes + branch.bytes)

    def _check_served(self, topic: str, topic_id: str, index: int) -> None:
        """Raises CorruptData if a partition is damaged: a commit must wait for a replica that has it intact."""
        try:
            damage = self._topics.find(topic, topic_id, index).closed_by
        except TopicNotFound:
            return
        if isinstance(damage, CorruptData):
            raise damage.with_traceback(None)

    def _with_ids(self, term: TransactionTerm, record: Record) -> Record:
        if isinstance(record, COMMITS) or (isinstance(record, Heuristic) and record.commit):
            bodies = len(term.store.branches[record.branch.xid].bodies)
            return record._replace(first_batch_id=self._ids.reserve(bodies))
        return record

    def _durable(
        self, term: TransactionTerm, work: TxRequest, step: VerbStep, written: Written, error: MetamqError | None
    ) -> None:
        """Handles a durable record, or the error by which this is unknown."""
        term.in_flight.discard(written.entry.lsn)
        if term is not self._term:  # end_term() has answered
            return
        if error is not None and not term.journal.is_durable(written):
            # The branch stays busy: the next master finds its outcome in the journal.
            self._refused(work, OutcomeUnknown(work.xid, XACode.RMFAIL, error.problem))
            self._answer(term, work)  # it stays at the head of its queue
            return
        branch = term.store.branches.get(work.xid)
        if branch is not None:
            branch.busy = False
        term.store.written(written.entry)
        committed = term.store.journal.unmarked.get(written.entry.lsn)
        if committed is not None:
            try:
                term.commits.apply(committed)
            except MetamqError as failure:
                self._failed(failure)
                return
        if error is not None:
            self._refused(work, OutcomeUnknown(work.xid, XACode.RMFAIL, error.problem))
            work.verbs.clear()
        else:
            self._done(work, step)
            work.verbs.popleft()
        self._run(term, work)

    def _done(self, work: TxRequest, step: VerbStep) -> None:
        assert step.answer is not None
        work.verb_request.epoch = step.answer.epoch
        work.results.append(TxResult(status.OK, step.answer.code, step.answer.epoch, None))

    def _refused(self, work: TxRequest, error: MetamqError) -> None:
        code = error.code if isinstance(error, TransactionError) else XACode.RMERR
        number, fields = status.encode_error(error)
        work.results.append(TxResult(number, code, 0, fields))

    def _answer(self, term: TransactionTerm, work: TxRequest) -> None:
        work.is_answered = True
        work.connection.answer(work.request, TxReply(term.history, work.results))

    def _finish(self, term: TransactionTerm, work: TxRequest) -> TxRequest | None:
        """Answers a request; returns the next of its branch."""
        self._answer(term, work)
        queue = term.queues[work.xid]
        queue.popleft()
        if queue:
            return queue[0]
        del term.queues[work.xid]
        return None

    def branches(self, request: Request, connection: SessionConnection) -> None:
        """Answers a BRANCHES: a page of open branches. Raises Fenced, NotAuthorized."""
        term = self._ready()
        check_list(headers.unpack(Branches, request.header), connection.access)
        if term.is_settled:
            self._list_branches(term, request, connection)
        else:
            term.deferred.append((request, connection))

    def _list_branches(self, term: TransactionTerm, request: Request, connection: SessionConnection) -> None:
        query = headers.unpack(Branches, request.header)
        connection.answer(request, branch_page(term, query, connection.access))

    def waiting(self) -> list[BranchState]:
        """The branches that wait for another broker's decision, or that others wait for; none on a slave."""
        term = self._term
        known = term.store.branches.values() if term is not None and term.is_settled else ()
        return [b for b in known if b.state is BranchPhase.DECIDED or (b.state is BranchPhase.PREPARED and b.follows)]

    # -- background work ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the journal short, without end. Raises StorageError."""
        while True:
            await asyncio.sleep(self.upkeep.mark_s)
            if (term := self._term) is None or not term.is_settled:
                continue
            try:
                await self._in_slices(term.commits.retry(term.store.journal))
                if term.store.journal.unmarked:
                    await self.upkeep.mark(term)
                await self.upkeep.shorten(term)
            except MetamqError as error:  # the epoch ended, or replicas are missing: retry later
                if _is_of_the_disk(error):
                    raise
                log.info("the transaction journal is not cut at present: %s", error)

    async def kept(self, partition: Partition, generation: int) -> tuple[int | None, int | None]:
        """(position from which the journal needs the partition, offset below which the journal itself is not needed),
        at any replica. The result is valid now: retention must follow without a pause."""
        is_journal = partition.topic == TOPIC
        try:
            journal = self._journal_partition()
            if journal.closed_by is not None:
                raise journal.closed_by.with_traceback(None)
            if (term := self._term) is not None:
                found: JournalState | Retained = term.store.journal
                needed_lsn, generation = term.needed_lsn, term.generation
            else:
                found = await self._follower.catch_up(journal)
                needed_lsn = found.mark.needed_lsn
        except StorageError:
            raise
        except CorruptData:  # no commit is applied from it: it will be copied again, or given up
            return None, 0 if is_journal else None
        except MetamqError:
            return (None, 0) if is_journal else (0, None)
        if is_journal:
            return None, needed_lsn
        if not found.is_needed(partition.key):
            return None, None
        return self._guards.keep_from(found.mark, partition, generation), None

    def tick(self, now_s: float) -> None:
        """Handles the passing of time: time-outs of branches, and figures."""
        if (term := self._term) is None:
            self.figures, self._figures_due_s = Figures(), 0.0
            return
        for branch in term.store.expire(now_s):
            log.info("branch %s of %s is rolled back: %s", branch.xid, branch.owner, branch.rolled_back_reason)
        if now_s < self._figures_due_s:
            return
        self._figures_due_s = now_s + FIGURES_S
        term.drop_idle_sessions()
        self.figures = term.figures()

    def connection_lost(self, connection: SessionConnection) -> None:
        """Gives the sessions of a lost connection some time to return."""
        term = self._term
        if term is None or connection not in term.sessions.values():
            return
        term.drop_idle_sessions()
        for session in [session for session, known in term.sessions.items() if known is connection]:
            asyncio.get_running_loop().call_later(self.grace_s, self._session_lost, term, session, connection)

    def _session_lost(self, term: TransactionTerm, session: tuple[str, str], connection: SessionConnection) -> None:
        if term is self._term and term.sessions.get(session) is connection:
            del term.sessions[session]
            term.refuse_waiting(connection)
            for branch in term.store.session_lost(*session):
                log.info("branch %s is rolled back: %s", branch.xid, branch.rolled_back_reason)
