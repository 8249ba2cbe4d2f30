"""HAClient: the slave's side of replication.

    READY       no link: connects to the master when its address is known, with growing pauses
    HANDSHAKE   joined: sends the ends and epochs of its logs, and the master decides where each goes on
    TRANSFER    applies frames and acknowledges them
    SHUTDOWN    stopped

Theory of operation
-------------------
Frames are applied in the order in which they arrive. They have whole batches. Each batch is checked against both of its
checksums and against the end of its log. After each piece of input one acknowledgement is sent for all of it, with two
sequence numbers: everything up to the first is written (held), and everything up to the second that must be flushed is
flushed. Fsyncs run beside the loop, each for many batches.

Anything that does not fit (a gap, a wrong epoch, damage) ends the link. The next handshake decides where to go on. No
frame is ever skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from metamq.broker.data.flusher import Flusher
from metamq.broker.data.partition import Partition
from metamq.broker.data.topics import Topics
from metamq.broker.ha.attempts import HAState, LinkAttempts
from metamq.broker.ha.handshake import level_at_slave
from metamq.broker.ha.to_acknowledge import ToAcknowledge
from metamq.broker.log.replicated import CopyDamaged
from metamq.broker.trouble import Trouble
from metamq.client.fetch.damage import report_to
from metamq.client.net.transport import BrokerConnection
from metamq.errors import ConnectError, CorruptData, DiskFull, Fenced, MetamqError, ProtocolError, StorageError, Timeout
from metamq.wire import sync
from metamq.wire.commands import LATEST, OffsetsEntry
from metamq.zk.cluster.brokers import BrokerAddress, Registration

log = logging.getLogger("metamq.broker")

JOIN_TIMEOUT_S = 5.0
ATTACH_AGAIN_S = 0.2
DECIDING_S = 0.02
"""Seconds in one turn of the loop for the master's decisions about partitions."""
HEARTBEATS_MISSED_MAX = 3


class HAClient:
    """The link of this replica to its master. Used by the broker's loop only.

    follow() sets the master; run() keeps a link to it until it is cancelled. `failed` is called when the disk fails:
    the broker must end.
    """

    def __init__(
        self,
        registration: Callable[[], Registration],
        topics: Topics,
        flusher: Flusher,
        *,
        learner: bool,
        generation: Callable[[], int],
        known_epoch: Callable[[], int],
        begun: Callable[[int], None],
        followed: Callable[[int], None],
        readable_changed: Callable[[], None],
        full: Callable[[], DiskFull | None],
        failed: Callable[[MetamqError], None],
    ) -> None:
        """`known_epoch` returns the highest epoch that this replica knows, `begun` stores a newer one.

        `full` returns the reason why nothing can be stored now. On a full disk there is no link: retention or an
        operator must free space first. `followed` stores a generation when all logs have followed to it.
        """
        self.state = HAState.READY
        self.epoch = 0
        self.received_bytes = 0
        """Bytes of logs received since this replica became a slave."""
        self._registration = registration
        self._topics = topics
        self._flusher = flusher
        self._learner = learner
        self._generation = generation
        self._known_epoch = known_epoch
        self._begun = begun
        self.followed = followed
        self._readable_changed = readable_changed
        self.full = full
        self._failed = failed
        self.master: BrokerAddress | None = None
        """The master to follow, or None."""
        self.readable: set[Partition] = set()
        """Partitions that have held all stable messages at some time on a link. They may be offered to readers."""
        self._changed = asyncio.Event()
        self.attempts = LinkAttempts()
        self._link: _Link | None = None
        self._trouble = Trouble()
        self._damaged: OffsetsEntry | None = None
        """A batch that came damaged and is not reported to the master yet."""

    @property
    def incarnation(self) -> int:
        """The present incarnation of this replica."""
        return self._registration().incarnation

    def follow(self, master: BrokerAddress | None) -> None:
        """Sets the master to follow, or None."""
        if master != self.master:
            self.master = master
            self._changed.set()
            self.attempts.hurry()
            if self._link is not None:
                self._link.end(ConnectError("the master", "it is another one now"))

    async def run(self) -> None:
        """Links to the master again and again, until cancelled."""
        try:
            while True:
                self._changed.clear()
                self.attempts.begin()
                master = self.master
                if master is None or master.replica == self._registration().replica:
                    await self._changed.wait()
                    continue
                try:
                    if (full := self.full()) is not None:
                        raise full.with_traceback(None)
                    error = await self._serve_while_it_is(master)
                except MetamqError as never_began:
                    error = never_began
                    self.attempts.failed(error)
                if isinstance(error, StorageError) and not error.retriable:
                    self._failed(error)
                    return
                self._trouble.lasts(f"no link to the master at {master.address}", error)
                await self._report_damage(master)
                self.state = HAState.READY
                await self.attempts.pause()
        finally:
            self.state = HAState.SHUTDOWN

    async def _serve_while_it_is(self, master: BrokerAddress) -> MetamqError:
        """Runs _serve(), and ends it when the master changes, also in the middle of a handshake: a former master that
        hangs, or is cut off from ZooKeeper, must not keep this slave."""
        serving = asyncio.ensure_future(self._serve(master))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({serving, changed}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return serving.result()
            return ConnectError("the master", "it is another one now")
        finally:
            serving.cancel()
            changed.cancel()
            await asyncio.gather(serving, changed, return_exceptions=True)

    async def _serve(self, master: BrokerAddress) -> MetamqError:
        """Runs one link; returns the reason for its end. Raises the error if the link did not begin."""
        self.state = HAState.HANDSHAKE
        connection = await BrokerConnection.open(master.host, master.port)
        link = _Link(self, connection, self._topics, self._flusher)
        try:
            me = self._registration()
            accept = await connection.stream(
                sync.Join(
                    sync.JOIN, self._known_epoch(), sync.MAGIC, me.broker_id, me.replica, me.incarnation, me.folder,
                    self._learner, self._generation(),
                ),
                link.received,
                timeout_s=JOIN_TIMEOUT_S,
            )  # fmt: skip
            frame = sync.unpack_from_master(accept)
            if not isinstance(frame, sync.Accept):
                raise ProtocolError(f"{master.address} answered a Join with {type(frame).__name__}")
            if frame.epoch < self._known_epoch():  # it would cut messages of a later master
                what = f"replica {master.replica} of broker {me.broker_id}"
                reason = f"it is in epoch {frame.epoch}, and this replica has seen epoch {self._known_epoch()}"
                raise Fenced(what, reason)
            self._begun(frame.epoch)  # durably, before a frame of the epoch is applied
            self.epoch = frame.epoch
            self._link = link
            self._trouble.is_over(f"linked to the master at {master.address} again")
            link.begin(frame)
            self.state = HAState.TRANSFER
            self.attempts.linked()
            return await link.ended
        finally:
            self._link = None
            link.close()
            await connection.close()

    # -- events in the broker -----------------------------------------------------------------------------------------

    def opened(self, partition: Partition) -> None:
        """Attaches a partition that was opened here: its topic was created or enlarged."""
        if self._link is not None:
            self._link.attach([partition])

    def closed(self, partition: Partition) -> None:
        """Detaches a partition that was closed here: its topic was deleted."""
        self.readable.discard(partition)
        if self._link is not None:
            self._link.detach(partition)

    def flushes_now(self, partition: Partition) -> None:
        """Flushes a partition: from now on only its flushed messages count, also of those that it has."""
        if self._link is not None:
            self._link.flushes_now(partition)

    def holds_stable(self, partition: Partition) -> None:
        """Notes that a partition holds all messages that are stable at the master."""
        if partition not in self.readable:
            self.readable.add(partition)
            self._readable_changed()

    def came_damaged(self, partition: Partition, damage: CopyDamaged) -> None:
        """Notes a batch that came damaged: on the way, or in the master's log."""
        place = partition.topic, partition.topic_id, partition.index
        self._damaged = OffsetsEntry(*place, LATEST, damaged=damage.offset)

    async def _report_damage(self, master: BrokerAddress) -> None:
        """Reports the damaged batch, so that the master verifies its log. Else the next link may end the same way."""
        entry, self._damaged = self._damaged, None
        if entry is not None:
            await report_to(master, entry)

    @property
    def linked(self) -> bool:
        """True if the master has accepted this replica."""
        return self._link is not None

    def say_goodbye(self) -> None:
        """Informs the master that this replica stops: it must not wait for this replica."""
        if self._link is not None:
            self._link.say_goodbye()

    async def hand_over(self, wait_ms: int) -> None:
        """Asks the master to stop writing, and waits until this replica holds all its messages.

        Raises ConnectError without a link, Timeout, NotEnoughReplicas or Fenced with the master's reason.
        """
        if self._link is None:
            raise ConnectError("the master", "there is no link to it")
        await self._link.hand_over(wait_ms)


class _Link:
    """One link, from ACCEPT to its end."""

    def __init__(self, client: HAClient, connection: BrokerConnection, topics: Topics, flusher: Flusher) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[MetamqError] = self.loop.create_future()
        self._client = client
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
        """Handles for which the master has not said where to go on."""
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
        self._heard_at = self._spoke_at = self.loop.time()
        self._heartbeat_s = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._incarnation = client.incarnation
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
        if self._client.incarnation != self._incarnation:
            self.end(ConnectError("the master", "a log lacks what it had: this replica joins as another one"))
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
        self._heard_at = self.loop.time()
        try:
            while self._deciding:
                result = self._deciding.popleft()
                self._attached(result)
                self._undecided.discard(result.handle)
                if self._deciding and self.loop.time() - self._heard_at > DECIDING_S:
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
                self._client.readable.discard(partition)
                self._topics.remove_orphans(partition.reset_to(result.offset, result.position))
            elif result.position < partition.log.end_position:
                self._cut(partition, result.position)
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
        """Stores the master's generation as followed, when all its decisions are carried out.

        Not earlier: a replica gives up messages for a newer generation only before it has followed to it.
        """
        if self._generation and not (self._undecided or self._waiting):
            try:
                self._client.followed(self._generation)
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
        self._heard_at = self.loop.time()
        self._client.received_bytes += len(body)
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
        if (full := self._client.full()) is not None:
            raise full.with_traceback(None)
        try:
            partition.append_replicated(batches, position)
            self._look_if_stable(partition, self._not_yet_stable.get(partition))
        except CopyDamaged as error:
            self._client.came_damaged(partition, error)
            raise
        except CorruptData as error:
            self._topics.is_damaged(partition, error)
            raise

    def _cut(self, partition: Partition, position: int) -> None:
        try:
            partition.cut(position)
        except CorruptData as error:
            self._topics.is_damaged(partition, error)
            raise

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
            self._client.holds_stable(partition)

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
        silent_s = now - self._heard_at
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
