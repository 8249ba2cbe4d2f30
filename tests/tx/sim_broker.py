"""A broker's transactions over a modelled disk: the real logs, journal, store, commits and upkeep, and no network.

What the broker's loop and threads do in their own time, a test does here step by step: `flush` is an fsync of a log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from metamq.broker.data.partition import BatchIds, Done, Partition
from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.steps import FLUSH, Steps
from metamq.broker.log.trim import TrimmedLog
from metamq.broker.transactions.journal import TOPIC as JOURNAL
from metamq.broker.transactions.journal import TOPIC_ID as JOURNAL_ID
from metamq.broker.transactions.processor import TransactionalCommandProcessor
from metamq.broker.transactions.term import TransactionTerm
from metamq.errors import CorruptData, Fenced, MetamqError, StorageError, TopicNotFound
from metamq.security.rights import NO_RULES, Access
from metamq.tx.store.records import BodyPlace
from metamq.wire import status
from metamq.wire.batch import BatchHeader, read_header, walk
from metamq.wire.columns import decode, encode
from metamq.wire.commands import PutEntry, Tx, TxReply
from metamq.wire.connection import Request
from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.sim_disk import Disk, DiskOs

TOPIC, TOPIC_ID = "t", "0123456789abcdef"
PARTS = 2
PRINCIPAL = "etl"
JOURNAL_LOG = LogConfig(segment_bytes=700, flush=FlushPolicy(before_ack=True, every_ms=None))
TOPIC_LOG = LogConfig(segment_bytes=500, flush=FlushPolicy(every_ms=None))
Key = tuple[str, str, int]
LOOP = asyncio.new_event_loop()


class Connection:
    """Keeps what is answered."""

    access = Access(PRINCIPAL, NO_RULES, is_secure=False)

    def __init__(self) -> None:
        self.answers: dict[int, TxReply | MetamqError] = {}

    def answer(self, request: Request, header: Any) -> None:
        self.answers[request.opaque] = header

    def decided(self, what: str) -> None:
        """An operator's decision."""

    def answer_error(self, request: Request, error: MetamqError) -> None:
        self.answers[request.opaque] = error

    def codes(self, opaque: int) -> list[XACode] | None:
        """What each verb was answered with; None while there is no answer, [] when the whole was refused."""
        found = self.answers.get(opaque)
        if found is None:
            return None
        return [XACode(result.code) for result in found.results] if isinstance(found, TxReply) else []


class Logs:
    """The open logs of one replica, in the place of metamq.broker.data.topics.Topics."""

    def __init__(self, own: DiskOs, machine: str, journal_log: LogConfig, topic_log: LogConfig, parts: int) -> None:
        self.files = FileCache(64, write=own.pwrite, sync=lambda fd: own.sync_of_caches(fd))
        self.open: dict[Key, Partition] = {}
        self.broken: dict[Key, CorruptData] = {}
        self.losses: list[str] = []
        places: list[tuple[Key, LogConfig]] = [((JOURNAL, JOURNAL_ID, 0), journal_log)]
        places += [((TOPIC, TOPIC_ID, index), topic_log) for index in range(parts)]
        for (topic, topic_id, index), config in places:
            folder = f"/{machine}/{topic.strip('~')}{index}"
            try:
                log = TrimmedLog.open(
                    folder, f"{topic}/{index}", config, self.files, now_us=0, on_loss=self.losses.append
                )
            except CorruptData as error:
                self.broken[topic, topic_id, index] = error
                continue
            self.open[topic, topic_id, index] = Partition(topic, topic_id, index, log)

    def find(self, topic: str, topic_id: str, index: int) -> Partition:
        if (topic, topic_id, index) in self.broken:
            raise self.broken[topic, topic_id, index]
        if (topic, topic_id, index) not in self.open:
            raise TopicNotFound(topic)
        return self.open[topic, topic_id, index]

    def partitions(self) -> list[Partition]:
        return list(self.open.values())

    def get(self, topic: str, index: int) -> Partition | None:
        return next((partition for key, partition in self.open.items() if (key[0], key[2]) == (topic, index)), None)

    def is_damaged(self, partition: Partition, error: CorruptData) -> None:
        partition.close(error, clean=False)

    def is_gone(self, topic: str, topic_id: str) -> bool:
        return topic != TOPIC


class Flusher:
    """fsyncs here and now, in the place of metamq.broker.data.flusher.Flusher."""

    async def settle(self, partition: Partition) -> None:
        flush(partition)


def flush(partition: Partition) -> None:
    """All that is there now: one flush takes a bounded number of files. Raises StorageError."""
    while (ticket := partition.start_flush(0)) is not None:
        with contextlib.suppress(StorageError):
            ticket.sync()
        partition.finish_flush(ticket)
        if ticket.whole:
            return


def let_tasks_go_on() -> None:
    """Runs the loop for as long as its tasks wait for nothing else."""
    if not LOOP.is_running():
        LOOP.run_until_complete(_some_turns())


async def _some_turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def _in_loop(work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    task = LOOP.create_task(work)
    let_tasks_go_on()
    return task


class Replica:
    """One process of a broker id; it is the master once a term has begun."""

    def __init__(
        self,
        own: DiskOs,
        machine: str,
        *,
        journal_log: LogConfig = JOURNAL_LOG,
        topic_log: LogConfig = TOPIC_LOG,
        parts: int = PARTS,
    ) -> None:
        self.own = own
        self.machine = machine
        self.logs = Logs(own, machine, journal_log, topic_log, parts)
        self.ids = BatchIds(0)
        self.failures: list[MetamqError] = []
        self.appended: Callable[[Partition, bytes, int], None] = lambda partition, batch, position: None
        """Called with each batch that was appended, and where."""
        self.current: TransactionTerm | MetamqError = Fenced("broker 0", "it is starting")
        self.transactions = TransactionalCommandProcessor(
            0, self.logs, Flusher(), self.ids, self, self._check, self._fail, lambda: self.current  # type: ignore[arg-type]
        )  # fmt: skip
        self.transactions.upkeep.cut_bytes = 0
        self.connection = Connection()
        self._opaque = 0
        self._sent: dict[tuple[Xid, str], int] = {}
        self.dead = False

    def _fail(self, error: MetamqError) -> None:
        """The broker ends: nothing is done or answered any more."""
        self.failures.append(error)
        self.dead = True
        self.connection = Connection()

    @property
    def journal(self) -> Partition:
        return self.logs.find(JOURNAL, JOURNAL_ID, 0)

    def part(self, index: int) -> Partition:
        return self.logs.find(TOPIC, TOPIC_ID, index)

    def begin_term(self, epoch: int, generation: int = 1, *, alone: bool = True) -> None:
        self.ids.start_epoch(epoch)
        self.current = LOOP.run_until_complete(self.transactions.begin_term(epoch, generation))
        if alone:
            for partition in self.logs.partitions():
                partition.unbound()
        self.transactions._spawn = _in_loop
        if isinstance(self.current, TransactionTerm):
            self.transactions.serve(self.current)

    # -- what the processor is given --------------------------------------------------------------------------------

    def _check(self, entry: PutEntry, batch: memoryview) -> BodyPlace:
        partition = self.logs.find(entry.topic, entry.topic_id, entry.partition)
        return BodyPlace(partition.topic, partition.topic_id, partition.index, read_header(batch).count)

    def append(self, partition: Partition, batch: memoryview, header: BatchHeader, batch_id: int | None) -> int:
        position = partition.log.end_position
        found = partition.append(batch, [header], self.ids, batch_id)
        self.appended(partition, bytes(batch), position)
        return found.end_offset

    def when_durable(self, partition: Partition, end_offset: int, done: Done) -> None:
        if partition.when_stable(end_offset, done):
            done(None)

    def admit(self, partition: Partition, promised_bytes: int) -> None:
        """Enough replicas are in sync."""

    # -- what a test does ----------------------------------------------------------------------------------------------

    def put(self, index: int, value: bytes) -> None:
        """A message outside of any transaction; not flushed. Raises CommitsFirst."""
        batch = memoryview(encode([value], base_timestamp_us=0))
        if isinstance(self.current, TransactionTerm):
            self.current.check_order(self.part(index))
        self.append(self.part(index), batch, read_header(batch), None)

    def ask(self, xid: Xid, *verbs: Verb, sends: list[tuple[int, bytes]] | None = None, session: str = "s") -> int:
        """A TX; returns what its answer is found by. `sends`: (partition, value) of each batch of one message."""
        batches = [encode([value], base_timestamp_us=0) for _index, value in sends or []]
        entries = [[TOPIC, TOPIC_ID, index, len(batch)] for (index, _), batch in zip(sends or [], batches, strict=True)]
        first = self._sent.get((xid, session), 0)
        self._sent[xid, session] = first + len(batches)
        self._opaque += 1
        header = Tx([*xid], 0, session, [*map(int, verbs)], 0, -1, first, entries)
        request = Request(9, self._opaque, [*header], memoryview(b"".join(batches)))
        try:
            self.transactions.tx(request, self.connection)
        except MetamqError as error:
            self.connection.answer_error(request, error)
        return self._opaque

    def flush(self, partition: Partition) -> None:
        try:
            flush(partition)
        except MetamqError as error:
            self._fail(error)

    def do(self, xid: Xid, *verbs: Verb, sends: list[tuple[int, bytes]] | None = None) -> list[XACode]:
        """A TX, the fsync that it may wait for, and its answer."""
        opaque = self.ask(xid, *verbs, sends=sends)
        if self.connection.codes(opaque) is None:
            self.flush(self.journal)
        return self.connection.codes(opaque) or []

    @property
    def term(self) -> TransactionTerm:
        term = self.transactions._term
        assert term is not None
        return term

    def shorten(self) -> None:
        """Marks, moves, and what a broker then removes of its journal."""
        LOOP.run_until_complete(self._with_flushes(self.transactions.upkeep.shorten(self.term)))

    def mark(self) -> None:
        LOOP.run_until_complete(self._with_flushes(self.transactions.upkeep.mark(self.term)))

    async def _with_flushes(self, upkeep: Coroutine[Any, Any, None]) -> None:
        work = asyncio.ensure_future(upkeep)
        try:
            while not work.done():
                await asyncio.sleep(0)
                if self.journal.log.flushed_position < self.journal.log.end_position:
                    flush(self.journal)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        work.result()

    def retain(self, now_us: int = 0, generation: int = 1) -> None:
        """A round of housekeeping."""
        for partition in self.logs.partitions():
            kept = LOOP.run_until_complete(self.transactions.kept(partition, generation))
            carry_out(partition, partition.log.retain(now_us, *kept))

    def end_term(self) -> None:
        former, self.current = self.current, Fenced("broker 0", "a test ends it")
        if isinstance(former, TransactionTerm):
            self.transactions.end_term(former, self.current)

    # -- what there is -------------------------------------------------------------------------------------------------

    def stored(self, index: int) -> list[bytes]:
        """The values of a partition, whether or not readers see them."""
        log = self.part(index).log
        return [value for value, _id in stored(log)]

    def seen(self, index: int) -> list[bytes]:
        """What readers see."""
        log = self.part(index).log
        return [value for value, end in _with_ends(log) if end <= log.stable_position]

    def states(self) -> dict[Xid, str]:
        return {xid: branch.state.value for xid, branch in self.term.store.branches.items()}


def carry_out(partition: Partition, steps: Steps[Any]) -> Any:
    """The steps of a log's housekeeping, here and now. Raises StorageError."""
    result: Any = None
    error: OSError | None = None
    while True:
        try:
            step = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        result = error = None
        if step == FLUSH:
            flush(partition)
            continue
        try:
            result = step()
        except OSError as raised:
            error = raised


def _with_ends(log: TrimmedLog) -> Iterator[tuple[bytes, int]]:
    position = log.start_position
    while position < log.end_position:
        run = log.read_position(position, 1 << 20)
        for at, header in walk(run.data):
            for value in decode(run.data[at : at + header.size], header).values.tolist():
                yield value, position + at + header.size
        position = run.end_position


def stored(log: TrimmedLog) -> list[tuple[bytes, int]]:
    """Each value of a log, and its batch's id."""
    found = []
    position = log.start_position
    while position < log.end_position:
        run = log.read_position(position, 1 << 20)
        for at, header in walk(run.data):
            found += [
                (value, header.batch_id) for value in decode(run.data[at : at + header.size], header).values.tolist()
            ]
        position = run.end_position
    return found


def new_replica(own: DiskOs, machine: str, **settings: Any) -> Replica:
    """On an empty disk."""
    own.disks[machine] = Disk()
    return Replica(own, machine, **settings)


__all__ = ["LOOP", "PARTS", "Connection", "Replica", "carry_out", "flush", "new_replica", "status", "stored"]
