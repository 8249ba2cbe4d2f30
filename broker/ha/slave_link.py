"""SlaveLink: one link of a slave to its master, from the master's Accept to the end of the link.

Theory of operation
-------------------
Frames are applied in the order in which they arrive. They have whole batches. Each batch is checked against both of its
checksums and against the end of its log. After each piece of input one acknowledgement is sent for all of it, with two
sequence numbers: everything up to the first is written (held), and everything up to the second that must be flushed is
flushed. Fsyncs run beside the loop, each for many batches.

Anything that does not fit (a gap, a wrong epoch, damage) ends the link. The next handshake decides where to continue.
No frame is ever skipped."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from metamq.broker.ha.handshake import level_at_slave
from metamq.broker.log.replicated import CopyDamaged
from metamq.errors import ConnectError, CorruptData, MetamqError, ProtocolError, Timeout
from metamq.wire import sync
from metamq.wire.limits import ENTRIES_TARGET

if TYPE_CHECKING:
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.ha.client import HAClient
    from metamq.client.net.transport import BrokerConnection

log = logging.getLogger("metamq.broker")

ATTACH_AGAIN_S = 0.2
DECIDING_S = 0.02
"""Seconds in one turn of the loop for the master's decisions about partitions."""
HEARTBEATS_MISSED_MAX = 3


class ToAcknowledge:
    """The open acknowledgements of one link: by sequence number for live batches, by position for copies."""

    def __init__(self, handles: Mapping[int, Partition]) -> None:
        """`handles`: the attached partitions. The link changes this mapping."""
        self.held_seq = 0
        self._handles = handles
        self._unflushed: deque[tuple[int, int, int]] = deque()
        """(sequence number, handle, end position) of batches that count only when they are flushed."""
        self._copied: dict[int, None] = {}
        """Handles whose positions the next acknowledgement has."""
        self._unflushed_copies: dict[int, int] = {}
        """End position by handle, of copies that are acknowledged again when they are flushed."""

    def came(self, handle: int, *, flush: bool) -> None:
        """Notes that the entry `held_seq` was appended. It counts when it is flushed, or at once."""
        partition = self._handles[handle]
        if flush:
            self._unflushed.append((self.held_seq, handle, partition.log.end_position))
        elif partition.flushes_before_ack:  # the master did not know that yet when it sent the entry
            self._unflushed_copies[handle] = partition.log.end_position

    def was_copied(self, handle: int, *, flush: bool) -> None:
        """Notes that the log has a new end to acknowledge, with `flush` again when it is flushed."""
        self._copied[handle] = None
        if flush:
            self._unflushed_copies[handle] = self._handles[handle].log.end_position

    def was_flushed(self, handle: int) -> None:
        """Notes that an fsync of the log has ended."""
        end_position = self._unflushed_copies.get(handle)
        if end_position is not None:
            self._copied[handle] = None
            if self._handles[handle].log.flushed_position >= end_position:
                del self._unflushed_copies[handle]

    def forget(self, handle: int) -> None:
        """Removes a detached partition."""
        self._copied.pop(handle, None)
        self._unflushed_copies.pop(handle, None)

    def frames(self, epoch: int) -> Iterator[sync.Ack]:
        """Yields the acknowledgement of all open entries. Without any it is a heartbeat."""
        unflushed = self._unflushed
        while unflushed and self._is_settled(*unflushed[0][1:]):
            unflushed.popleft()
        flushed_seq = unflushed[0][0] - 1 if unflushed else self.held_seq
        copied, self._copied = self._copied, {}
        logs = [(handle, self._handles[handle].log) for handle in copied]
        marks = [(handle, log.end_position, log.flushed_position) for handle, log in logs]
        for start in range(0, max(len(marks), 1), ENTRIES_TARGET):
            yield sync.Ack(sync.ACK, epoch, self.held_seq, flushed_seq, marks[start : start + ENTRIES_TARGET])

    def _is_settled(self, handle: int, end_position: int) -> bool:
        """Returns True if no flush up to this position is pending. A detached partition is not flushed any more: the
        master receives the Detach before this acknowledgement."""
        partition = self._handles.get(handle)
        return partition is None or partition.log.flushed_position >= end_position


class SlaveLink:
    """One link, from ACCEPT to its end."""

    def __init__(self, owner: HAClient, connection: BrokerConnection, topics: Topics, flusher: Flusher) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[MetamqError] = self.loop.create_future()
        self._owner = owner
        self._connection = connection
        self._topics = topics
        self._flusher = flusher
        self._epoch = 0
        self._handles: dict[int, Partition] = {}
        self._numbers: dict[Partition, int] = {}
        self._next_handle = 1
        self._to_acknowledge = ToAcknowledge(self._handles)
        self._generation = 0
        self._undecided: set[int] = set()
        """Handles for which the master has not decided where to continue."""
        self._waiting: set[Partition] = set()
        """Partitions for which the master cannot decide yet."""
        self._deciding: deque[sync.AttachResult] = deque()
        """Decisions of the master that are not carried out yet."""
        self._early: list[tuple[Any, memoryview]] = []
        """Frames that came before the link began, or behind open decisions."""
        self._not_yet_stable: dict[Partition, int] = {}
        """The master's stable position of partitions that end before it."""
        self._ack_soon = False
        self._handed_over: asyncio.Future[sync.HandedOver] | None = None
        self.heard_at = self._spoke_at = self.loop.time()
        self._heartbeat_s = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._incarnation = owner.incarnation
        connection.closed.add_done_callback(lambda gone: self.end(gone.result()))

    def begin(self, accept: sync.Accept) -> None:
        """Begins the link that the master has accepted, and attaches all partitions."""
        self._epoch = accept.epoch
        self._heartbeat_s = accept.heartbeat_ms / 1000
        self._generation = accept.generation
        self._beat()
        self.attach(list(self._topics.partitions()))
        self._receive_early()
        self._all_decided()

    def _receive_early(self) -> None:
        early, self._early = self._early, []
        for header, body in early:
            self.received(header, body)

    def end(self, error: MetamqError) -> None:
        """Ends the link with this error."""
        if not self.ended.done():
            self.ended.set_result(error)
        if self._handed_over is not None and not self._handed_over.done():
            self._handed_over.set_exception(error)
            self._handed_over.exception()

    def close(self) -> None:
        """Stops all work of the link."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for partition in self._numbers:
            partition.flushed_listener = None

    # -- handshake ----------------------------------------------------------------------------------------------------

    def attach(self, partitions: list[Partition]) -> None:
        """Sends the state of these logs to the master. Ends the link if the incarnation has changed since the join."""
        if self._owner.incarnation != self._incarnation:
            self.end(ConnectError("the master", "a log has lost data: this replica joins as another one"))
            return
        attached = []
        for partition in (one for one in partitions if one.closed_by is None):
            try:
                epochs: list[tuple[int, int, int]] = list(partition.log.epochs().entries)
            except CorruptData as error:
                self._topics.is_damaged(partition, error)
                continue
            except MetamqError as error:
                self.end(error)
                return
            partition.freeze()  # this master sends its stable mark again
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._forget(partition)
            self._handles[handle] = partition
            self._numbers[partition] = handle
            self._undecided.add(handle)
            log_ = partition.log
            attached.append(
                sync.AttachPartition(
                    handle, partition.topic, partition.topic_id, partition.index,
                    log_.start_offset, log_.start_position, log_.end_offset, log_.end_position,
                    log_.stable_offset, epochs,
                )
            )  # fmt: skip
        for frame in sync.attach_frames(self._epoch, attached):
            self._push(frame)

    def detach(self, partition: Partition) -> None:
        """Detaches a partition that was closed here."""
        handle = self._forget(partition)
        if handle is not None:
            self._push(sync.Detach(sync.DETACH, self._epoch, [handle]))
            self._acknowledge_soon()  # also what waited for a flush of it
        self._all_decided()

    def _forget(self, partition: Partition) -> int | None:
        self._waiting.discard(partition)
        handle = self._numbers.pop(partition, None)
        if handle is not None:
            self._handles.pop(handle, None)
            self._undecided.discard(handle)
            self._to_acknowledge.forget(handle)
            self._not_yet_stable.pop(partition, None)
        partition.flushed_listener = None
        return handle

    def _decide(self) -> None:
        """Carries out the master's decisions in parts: a cut waits for the disk, and there may be thousands.

        New frames wait in the meantime, most of them unread.
        """
        if self._closed or self.ended.done():
            return
        self.heard_at = self.loop.time()
        try:
            while self._deciding:
                result = self._deciding.popleft()
                self._attached(result)
                self._undecided.discard(result.handle)
                if self._deciding and self.loop.time() - self.heard_at > DECIDING_S:
                    self._connection.pause()
                    self.loop.call_soon(self._decide)
                    return
        except MetamqError as error:
            self.end(error)
            return
        self._connection.resume()
        self._all_decided()
        self._receive_early()

    def _attached(self, result: sync.AttachResult) -> None:
        partition = self._handles.get(result.handle)
        if partition is None:
            return
        decision = sync.SyncDecision(result.decision)
        level = level_at_slave(result, partition.log.start_position, partition.log.end_position)
        log.log(level, "%s: %s", partition.name, result.reason)
        if decision is sync.SyncDecision.WAIT:
            self._forget(partition)
            self._waiting.add(partition)
            self.loop.call_later(ATTACH_AGAIN_S, self._attach_again, partition)
        elif decision is sync.SyncDecision.REFUSE:
            self._forget(partition)
        else:
            if decision is sync.SyncDecision.RESET:
                self._owner.readable.discard(partition)
                self._topics.remove_orphans(partition.reset_to(result.offset, result.position))
            elif result.position < partition.log.end_position:
                self._cut(partition, result)
            partition.flushed_listener = self._flushed
            self._flush(result.handle, partition)

    def flushes_now(self, partition: Partition) -> None:
        """See HAClient.flushes_now."""
        handle = self._numbers.get(partition)
        if handle is not None and handle not in self._undecided and partition.closed_by is None:
            self._flush(handle, partition)

    def _flush(self, handle: int, partition: Partition) -> None:
        """Acknowledges the end of a log, and again after the flush if only flushed messages count."""
        must_flush = partition.flushes_before_ack and partition.log.flushed_position < partition.log.end_position
        self._to_acknowledge.was_copied(handle, flush=must_flush)
        if must_flush:
            self._flusher.replicated(partition, must_flush=True)
        self._acknowledge_soon()

    def _all_decided(self) -> None:
        """Stores the master's broker generation as followed, when all its decisions are carried out.

        Not earlier: a replica gives up messages only for a broker generation newer than the stored one.
        """
        if self._generation and not (self._undecided or self._waiting):
            try:
                self._owner.all_decided(self._generation)
                self._generation = 0
            except MetamqError as error:
                self.end(error)

    def _attach_again(self, partition: Partition) -> None:
        if not self._closed and partition.closed_by is None and partition not in self._numbers:
            self.attach([partition])

    # -- received frames ----------------------------------------------------------------------------------------------

    def received(self, header: Any, body: memoryview) -> None:
        """Applies a frame of the master."""
        if self._closed or self.ended.done():
            return
        if not self._epoch or self._deciding:
            self._early.append((header, body))
            return
        self.heard_at = self.loop.time()
        self._owner.received_bytes += len(body)
        try:
            frame = sync.unpack_from_master(header)
            if frame.epoch != self._epoch:
                raise ProtocolError(f"a {type(frame).__name__} of epoch {frame.epoch} on a link of epoch {self._epoch}")
            if isinstance(frame, sync.Data):
                self._data(frame, body)
            elif isinstance(frame, sync.Copy):
                self._copy(frame, body)
            elif isinstance(frame, sync.Attached):
                self._deciding.extend(frame.results)
                self._decide()
            elif isinstance(frame, sync.Producers):
                if (begun := self._handles.get(frame.handle)) is not None:
                    begun.log.begin_with_producers(bytes(body))
            elif isinstance(frame, sync.Beat):
                self._stable(frame.stable)
            elif isinstance(frame, sync.HandedOver):
                if self._handed_over is not None and not self._handed_over.done():
                    self._handed_over.set_result(frame)
            else:
                raise ProtocolError(f"a {type(frame).__name__} in the middle of a link")
        except MetamqError as error:
            self.end(error)

    def _data(self, frame: sync.Data, body: memoryview) -> None:
        if frame.first_seq != self._to_acknowledge.held_seq + 1:
            raise ProtocolError(f"sequence number {frame.first_seq} came after {self._to_acknowledge.held_seq}")
        for (handle, position, _size, flush), batches in zip(
            frame.entries, sync.bodies(frame.entries, body), strict=True
        ):
            self._to_acknowledge.held_seq += 1
            partition = self._handles.get(handle)
            if partition is None:  # detached, and the master does not know it yet
                continue
            self._append(partition, batches, position)
            self._to_acknowledge.came(handle, flush=bool(flush))
            self._flusher.replicated(partition, must_flush=bool(flush))
        self._stable(frame.stable)
        self._acknowledge_soon()

    def _copy(self, frame: sync.Copy, body: memoryview) -> None:
        for (handle, position, _size, flush), batches in zip(
            frame.entries, sync.bodies(frame.entries, body), strict=True
        ):
            partition = self._handles.get(handle)
            if partition is not None:
                self._append(partition, batches, position)
                self._to_acknowledge.was_copied(handle, flush=bool(flush))
                self._flusher.replicated(partition, must_flush=bool(flush))
        self._stable(frame.stable)
        self._acknowledge_soon()

    def _append(self, partition: Partition, batches: memoryview, position: int) -> None:
        if (full := self._owner.full()) is not None:
            raise full.with_traceback(None)
        try:
            partition.append_replicated(batches, position)
            self._look_if_stable(partition, self._not_yet_stable.get(partition))
        except CopyDamaged as error:
            self._owner.came_damaged(partition, error)
            raise
        except CorruptData as error:
            self._topics.is_damaged(partition, error)
            raise

    def _cut(self, partition: Partition, result: sync.AttachResult) -> None:
        epochs, end_offset = partition.log.epochs().entries, partition.log.end_offset
        try:
            partition.cut(result.position)
        except CorruptData as error:
            self._topics.is_damaged(partition, error)
            raise
        self._owner.was_cut(partition, epochs[-1][0], end_offset - result.offset)

    def _stable(self, marks: list[tuple[int, int, int]]) -> None:
        for handle, offset, position in marks:
            partition = self._handles.get(handle)
            if partition is not None:
                partition.bound(offset, position)
                self._look_if_stable(partition, position)

    def _look_if_stable(self, partition: Partition, stable_position: int | None) -> None:
        """Reports to the client if the partition holds all messages up to the master's stable position."""
        if stable_position is None:
            return
        if partition.log.end_position < stable_position:
            self._not_yet_stable[partition] = stable_position
        else:
            self._not_yet_stable.pop(partition, None)
            self._owner.holds_stable(partition)

    # -- acknowledgements ---------------------------------------------------------------------------------------------

    def _flushed(self, partition: Partition) -> None:
        """Called when an fsync of the partition's log has ended."""
        handle = self._numbers.get(partition)
        if handle is not None:
            self._to_acknowledge.was_flushed(handle)
        self._acknowledge_soon()

    def _acknowledge_soon(self) -> None:
        if not self._ack_soon and not self._closed:
            self._ack_soon = True
            self.loop.call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        self._ack_soon = False
        if self._closed or self.ended.done():
            return
        for frame in self._to_acknowledge.frames(self._epoch):
            self._push(frame)

    def _push(self, frame: tuple[Any, ...]) -> None:
        self._spoke_at = self.loop.time()
        try:
            self._connection.push(frame)
        except MetamqError as error:
            self.end(error)

    def _beat(self) -> None:
        """Sends an acknowledgement each half heartbeat at least; ends the link if the master is silent for three."""
        now = self.loop.time()
        silent_s = now - self.heard_at
        if silent_s > HEARTBEATS_MISSED_MAX * self._heartbeat_s:
            self.end(Timeout(f"a heartbeat of the master at {self._connection.address}", silent_s))
            return
        if now - self._spoke_at >= self._heartbeat_s / 2:
            self._acknowledge()
        self._timer = self.loop.call_later(self._heartbeat_s / 4, self._beat)

    def say_goodbye(self) -> None:
        """See HAClient.say_goodbye."""
        self._push(sync.Leave(sync.LEAVE, self._epoch))

    async def hand_over(self, wait_ms: int) -> None:
        """See HAClient.hand_over."""
        self._handed_over = self.loop.create_future()
        self._push(sync.HandOver(sync.HANDOVER, self._epoch, wait_ms))
        try:
            async with asyncio.timeout(wait_ms / 1000 + self._heartbeat_s):
                answer = await self._handed_over
        except TimeoutError:
            raise Timeout("the hand-over by the master", wait_ms / 1000) from None
        finally:
            self._handed_over = None
        if answer.reason:
            raise MetamqError(f"the master does not hand over: {answer.reason}")
        if answer.end_seq != self._to_acknowledge.held_seq:
            raise ProtocolError(f"handed over at {answer.end_seq}, but held is {self._to_acknowledge.held_seq}")
