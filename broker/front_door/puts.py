"""Carries out PUT: batches that arrive in one turn of the loop are stored together.

Theory of operation
-------------------
Small services send one message in a request, and many of them at the same time. So whatever does not depend on the
message is done once for all of them. put() checks a request by itself, when it arrives. At the end of the turn, when
the requests of all connections have arrived, store() takes the batches of one partition after the other:

    once per partition   the role, the lease, the in-sync set, the configuration
    once per *run*       one write to the log, one entry for each slave, one wake-up of the readers, one wait for the
                         acknowledgement
    once per connection  one write of all answers: metamq.broker.front_door.writes

A run is batches that are written together, all or none. If the check of a batch needs the state after an earlier one,
that batch is the first of the next run. So a run has one batch of each producer at most.

Each batch of a PUT succeeds or fails by itself. The PUT is answered when the last of them has its result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from metamq.errors import MetamqError, ProtocolError, StorageError
from metamq.security.rights import WRITE
from metamq.wire import status
from metamq.wire.batch import BatchHeader
from metamq.wire.commands import PutEntry, PutResult
from metamq.wire.headers import unpack_list

if TYPE_CHECKING:
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.partition import Appended
    from metamq.broker.front_door.appends import Admitted, Appends
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.broker.front_door.writes import Writes
    from metamq.wire.connection import Request
    from metamq.zk.cluster.topics import TopicConfig

log = logging.getLogger("metamq.broker")

RUN_BYTES = 64 * 1024
"""The size of a run of several batches, which are copied into one buffer. It is never larger than a segment. A PUT of
this size is stored at once: it gains nothing from others, and its bytes are in the processor's caches now."""


class PendingPut:
    """The results of a PUT. It answers when the last result is there. Only the first result of an entry counts."""

    __slots__ = ("_connection", "_left", "_request", "_results")

    def __init__(self, request: Request, connection: BrokerProtocol, count: int) -> None:
        self._request = request
        self._connection = connection
        self._left = count
        self._results: list[PutResult | None] = [None] * count

    def done(self, number: int, result: PutResult) -> None:
        """Notes the result of an entry."""
        if self._results[number] is None:  # a flush that cannot begin fails an entry that waits for it, or was answered
            self._results[number] = result
            self._left -= 1
            if not self._left:
                self._connection.answer_soon(self._request, self._results)


Arrived = tuple[PendingPut, int, memoryview, BatchHeader]
"""A checked batch: its PUT, its number there, its bytes and its header."""


class Run:
    """Batches that are written together."""

    __slots__ = ("_bytes_max", "_producers", "_size", "batches")

    def __init__(self, config: TopicConfig) -> None:
        self.batches: list[Arrived] = []
        self._bytes_max = min(RUN_BYTES, config.segment_bytes)
        self._size = 0
        self._producers: set[int] = set()

    def takes(self, header: BatchHeader) -> bool:
        """True if a batch may be added, and if its check does not need the state after this run."""
        fits = self._size + header.size <= self._bytes_max and header.producer_id not in self._producers
        return fits or not self.batches

    def add(self, arrived: Arrived) -> None:
        """Adds a new batch."""
        header = arrived[3]
        self.batches.append(arrived)
        self._size += header.size
        if header.producer_id:
            self._producers.add(header.producer_id)

    def data(self) -> memoryview:
        """Returns the bytes of all batches, writable."""
        if len(self.batches) == 1:
            return self.batches[0][2]
        return memoryview(bytearray().join([batch for _put, _number, batch, _header in self.batches]))


@dataclass(eq=False)
class PutProcessor:
    """Carries out PUT. Used by the broker's loop only. `failed` is called if the disk fails: the broker must end."""

    appends: Appends
    flusher: Flusher
    writes: Writes
    failed: Callable[[MetamqError], None]
    _: KW_ONLY
    _arrived: dict[tuple[str, str, int], list[Arrived]] = field(default_factory=dict)
    """The batches of this turn by topic, topic id and partition."""

    def put(self, request: Request, connection: BrokerProtocol) -> None:
        """Checks the batches of a PUT, and stores them soon. Raises ProtocolError if the PUT itself is wrong."""
        entries = unpack_list(PutEntry, request.header)
        if not entries:
            raise ProtocolError("a PUT without a batch")
        sizes = [entry.size for entry in entries]
        if sum(sizes) != len(request.body) or min(sizes) <= 0:
            raise ProtocolError(f"the batches' sizes do not add up to the body's {len(request.body)} bytes")
        put, access, at = PendingPut(request, connection, len(entries)), connection.access, 0
        for number, entry in enumerate(entries):
            batch = request.body[at : at + entry.size]
            at += entry.size
            try:
                access.check_topic(WRITE, entry.topic)
                header = self.appends.checked(entry, batch)
                access.check_producer(header.producer_id, entry.topic)
            except MetamqError as error:
                self._fail([(put, number)], error)
            else:
                self._batches_of(entry[:3]).append((put, number, batch, header))
        if len(request.body) >= RUN_BYTES:
            self.store()

    def _batches_of(self, place: tuple[str, str, int]) -> list[Arrived]:
        batches = self._arrived.get(place)
        if batches is None:
            if not self._arrived:
                asyncio.get_running_loop().call_soon(self.store)
            batches = self._arrived[place] = []
        return batches

    def store(self) -> None:
        """Stores the batches that have arrived, and answers."""
        arrived, self._arrived = self._arrived, {}
        self.writes.hold()
        try:
            for place, batches in arrived.items():
                try:
                    self._store(place, batches)
                except Exception as error:  # a bug here: the clients get an error, the others are served
                    log.exception("batches for %s were not stored", place)
                    self._fail(batches, MetamqError(f"internal error of the broker: {error!r}", outcome="unknown"))
        finally:
            self.writes.flush()

    def _store(self, place: tuple[str, str, int], batches: list[Arrived]) -> None:
        try:
            admitted = self.appends.admitted(*place)
            admitted.master.check_order(admitted.partition)
        except MetamqError as error:
            self._fail(batches, error)
            return
        run = Run(admitted.config)
        for arrived in batches:
            header = arrived[3]
            if not run.takes(header):
                self._write(admitted, run)
                run = Run(admitted.config)
            try:
                admitted.check_size(header)
                before = admitted.partition.stored_before(header)
            except MetamqError as error:
                self._fail([arrived], error)
                continue
            if before is None:
                run.add(arrived)
            else:
                self.appends.counters.repeats += 1
                _answer_later(admitted, [arrived], before)
        self._write(admitted, run)

    def _write(self, admitted: Admitted, run: Run) -> None:
        if not run.batches:
            return
        try:
            headers = [header for *_put, header in run.batches]
            appended = self.appends.store(admitted.master, admitted.partition, run.data(), headers)
        except MetamqError as error:
            self._fail(run.batches, error)
            return
        _answer_later(admitted, run.batches, appended)
        self.flusher.appended(admitted.partition)

    def _fail(self, batches: Iterable[tuple[PendingPut, int, *tuple[object, ...]]], error: MetamqError) -> None:
        if isinstance(error, StorageError) and not error.retriable:
            self.failed(error)
        _refuse(batches, error)


def _refuse(batches: Iterable[tuple[PendingPut, int, *tuple[object, ...]]], error: MetamqError) -> None:
    code, fields = status.encode_error(error)
    result = PutResult(code, -1, -1, fields)
    for put, number, *_rest in batches:
        put.done(number, result)


def _answer_later(admitted: Admitted, batches: list[Arrived], appended: Appended) -> None:
    """Answers stored batches when they may be acknowledged; perhaps at once."""

    def done(error: MetamqError | None) -> None:
        if error is not None:
            _refuse(batches, error)
            return
        offset = appended.base_offset
        for put, number, _batch, header in batches:
            put.done(number, PutResult(status.OK, offset, appended.time_us, None))
            offset += header.count

    admitted.master.transfer.when_acknowledged(admitted.partition, admitted.config, appended.end_offset, done)
