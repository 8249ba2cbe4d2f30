"""Carries out OFFSETS: the ends of partitions, and the first message at or after a time.

The log's files are searched for the time. The cost depends on the data of producers. So the search runs in slices
(metamq.broker.front_door.limits.slices), and one request has `search_timeout_s` of the loop's time for all its
searches. A search that is not finished by then ends with a Timeout. The log remembers its progress: the same request
continues from there. A search that needs bytes which are not in memory pauses while a thread reads them
(metamq.broker.log.disk.cold); that time does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from metamq.broker.front_door.fetch_session import ReplicaReadRole, parted
from metamq.broker.front_door.limits.slices import SlicedWork, Slices
from metamq.broker.log.disk.cold import ColdReader
from metamq.errors import MetamqError, Timeout
from metamq.security.rights import READ
from metamq.wire import status
from metamq.wire.commands import EARLIEST, LATEST, OffsetsEntry, OffsetsResult
from metamq.wire.headers import unpack_list
from metamq.zk.names import OWN

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.wire.connection import Request

log = logging.getLogger("metamq.broker")

EPOCHS_MAX = 16
"""Epochs of one partition in an answer."""


@dataclass(eq=False)
class LookUps:
    """Answers OFFSETS. Used by the broker's loop only."""

    topics: Topics
    role: ReplicaReadRole
    report: Callable[[Partition, int], None]
    """Called with each batch that came damaged to a reader or a slave, and with its offset."""
    slices: Slices
    search_timeout_s: float

    def offsets(self, request: Request, connection: BrokerProtocol) -> None:
        """Answers the request, now or later. Raises ProtocolError."""
        entries = unpack_list(OffsetsEntry, request.header)
        work = SlicedWork()
        work.steps = self._answer(request, connection, entries, work)
        self.slices.add(connection, work)

    def _answer(
        self, request: Request, connection: BrokerProtocol, entries: list[OffsetsEntry], work: SlicedWork
    ) -> Generator[None, None, None]:
        try:
            results = []
            for entry in entries:
                results.append((yield from self._look_up(entry, connection, work)))
                yield
            connection.answer(request, results)
        except Exception as error:  # a bug here must not block the work of other connections
            log.exception("request %d of %s, OFFSETS, failed", request.opaque, connection.peer)
            connection.answer_error(request, MetamqError(f"internal error of the broker: {error!r}"))

    def _look_up(
        self, entry: OffsetsEntry, connection: BrokerProtocol, work: SlicedWork
    ) -> Generator[None, None, OffsetsResult]:
        role = self.role
        try:
            connection.access.check_topic(READ, entry.topic)
            if entry.topic.startswith(OWN):
                connection.access.check_is_broker()
            if entry.damaged >= 0:  # also in the broker's own topics, which a slave copies
                self.report(self.topics.find(entry.topic, entry.topic_id, entry.partition), entry.damaged)
            partition = role.find(entry.topic, entry.topic_id, entry.partition)
            if entry.offset >= 0:  # the reader continues from there, so only the master answers
                _is_sure, error = parted(partition, entry.offset, entry.epoch, role)
                if error is not None:
                    raise error
                if not role.is_master:
                    raise role.not_master()
            log_ = partition.log
            found = None
            if entry.timestamp_us not in (EARLIEST, LATEST):
                found = yield from self._search(partition, entry.timestamp_us, connection, work)
            start, end, epochs = log_.begin_offset, log_.stable_offset, log_.epochs()
            offset, timestamp_us = found or (start if entry.timestamp_us == EARLIEST else end, -1)
            following = epochs.after(entry.offset, end)[:EPOCHS_MAX] if entry.offset >= 0 else []
            epoch = epochs.epoch_of_reader(offset)
            return OffsetsResult(status.OK, offset, timestamp_us, start, end, epoch, None, following)
        except MetamqError as error:
            number, fields = status.encode_error(error)
            return OffsetsResult(number, -1, -1, -1, -1, 0, fields, [])

    def _search(
        self, partition: Partition, timestamp_us: int, connection: BrokerProtocol, work: SlicedWork
    ) -> Generator[None, None, tuple[int, int] | None]:
        """Searches while the request has time left. Raises Timeout, and as the search."""
        search, cold = partition.offset_at_time(timestamp_us), ColdReader()
        try:
            while True:
                try:
                    with partition.log.without_waiting(cold):
                        missing = next(search)
                except StopIteration as end:
                    found: tuple[int, int] | None = end.value
                    return found
                self.role.cold_reads.read_ahead(cold)
                if missing is not None:
                    work.is_paused = True
                    self.role.cold_reads.start(work, cold, missing, partial(self.slices.resume, connection, work))
                else:
                    cold.clear()
                    self._check_time(work)
                yield
        finally:
            self.role.cold_reads.drop(work)

    def _check_time(self, work: SlicedWork) -> None:
        if work.used_s > self.search_timeout_s:
            hint = "Ask again: the search continues where it was. Or raise `search_timeout_s` of the broker."
            raise Timeout("the search for a time", self.search_timeout_s, hint=hint)
