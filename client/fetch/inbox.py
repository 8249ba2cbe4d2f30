"""The interface between fetching and processing: per partition the fetched, the in-flight and the done messages.

Theory of operation
-------------------
The loop puts fetched batches in. A handler (the application's own thread, a pool of threads, or a task) takes one batch
at a time. While a batch of a partition is in flight, the partition gives no other one, so a partition's messages are
processed in order, whichever handler processes them. Partitions take turns.

A message is done when the handler asks for the next one. Work for each message would be too slow, so nothing counts
messages: an InFlightBatch holds the C iterator of its batch's offsets, whose length hint shows how many were delivered.
To take a batch back in the middle (a revoked partition, a seek, an ended lease), the inbox empties its gate, a list
that the iterator reads first. Then the last delivered message stays, and no further one is delivered. The loop may do
that late, for example in a process that was frozen, so the iterator itself checks the lease, once per slice of a batch.

    in the log   ...│ done          │ in flight │ buffered, or being fetched │ not fetched
                    ^ committed     ^ done_offset                            ^ request.offset

A handler may release a batch before its end: it failed, or its loop ended early. The messages that are not done must be
delivered again. So the buffered batches behind them are dropped, and no further batch is put in. The loop fetches from
where the handler stopped (`rewinding`, until the loop calls `rewind`).

With `run(order="key")` the in-flight batch is a KeyWindow (metamq.client.fetch.key_window): it takes further batches
while its messages are processed side by side.

A seek, or the loss of the partition, may also detach a batch from its handler. Then its messages do not count any more,
but the handler may still process one: until it releases the batch, no other message of that partition is delivered.

One lock guards all of it. The loop and the handlers hold it for moments only. A signal handler may run in such a moment
in the thread that has the lock: it may read, so the lock is re-entrant, but it must not wait for the loop.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from metamq.client.fetch.joined_batch import JoinedBatch, joinable
from metamq.client.fetch.message_batch import SLICE_MESSAGES, VALUES_AT, MessageBatch
from metamq.client.signal import LateCondition
from metamq.errors import DecodeError, MetamqError

if TYPE_CHECKING:
    from metamq.client.fetch.key_window import KeyWindow
    from metamq.client.model import Message
    from metamq.client.telemetry import Processing
    from metamq.zk.groups.ownership import Ownership
    from metamq.zk.partitions import TopicPartition


@dataclass(eq=False, repr=False, slots=True)
class PartitionState:
    """One partition that is consumed. Guarded by the inbox's lock."""

    tp: TopicPartition
    claim: Ownership | None
    next_offset: int  # the next offset to deliver, while no batch is in flight
    start: tuple[int, int] | None = None
    """The start offset and the epoch before it. None if the group had an offset."""
    commit_tried: bool = False  # True after any commit: it may have succeeded, although its answer was lost
    committed_offset: int | None = None
    floor_offset: int = 0
    """The offset of the last commit since the assignment or the last seek. What is done commits no lower one: the
    application may have committed a message that its handler still has."""
    assumed_offset: int | None = None
    """The offset that a transaction of the application has committed. The transaction may have failed."""
    lowest_offset: int = 0
    reached_offset: int = 0
    """No offset that was delivered between the assignment and the last seek is outside of `lowest_offset` to this one.
    Some inside may not have been delivered."""
    handled_offset: int = 0  # after the last message whose listener returned; set without the lock, by the handler
    sought_offset: int | None = None
    """The target of the application's last seek, until the next commit in a transaction of its own."""
    seeks: int = 0  # the number of seeks
    epoch: int = -1
    """The epoch of the message before `next_offset`; -1: not known."""
    buffered: deque[MessageBatch[Any]] = field(default_factory=deque)
    buffered_bytes: int = 0
    """The bytes of the buffered and in-flight batches."""
    in_flight: InFlightBatch | None = None
    paused: bool = False
    starting: bool = True
    """True while the application is notified of the partition: it is not fetched yet."""
    closing: bool = False
    """True while the partition is released: it is not fetched any more."""
    rewinding: bool = False
    """True while the data that is being fetched is not the next data to deliver."""
    released: Callable[[], object] | None = None
    """Called, in any thread, when no batch is in flight any more; for a task that releases the partition."""
    start_offset: int = -1
    stable_offset: int = -1

    def done_offset(self, *, last_done: bool = False) -> int:
        """Returns the offset after the last done message. With `last_done` the last delivered message counts as
        done."""
        return self.next_offset if self.in_flight is None else self.in_flight.done_offset(last_done=last_done)

    def begin_at(self, offset: int, epoch: int = -1) -> None:
        """Sets the next offset to deliver, after an assignment or a seek, and the epoch of the message before it."""
        if self.next_offset < 0:
            self.lowest_offset = self.reached_offset = offset
        else:
            self.reached_offset = max(self.reached_offset, self.done_offset(last_done=True))
            self.lowest_offset, self.handled_offset = min(self.lowest_offset, offset), min(self.handled_offset, offset)
        self.next_offset, self.epoch, self.floor_offset = offset, epoch, 0

    def epoch_before(self, offset: int) -> int:
        """Returns the epoch of the message before an offset; -1: not known."""
        if self.in_flight is not None and offset > self.in_flight.batch.offset:
            return self.in_flight.batch.epoch
        return self.epoch if offset == self.next_offset else -1

    def has_delivered(self, end_offset: int) -> bool:
        """Returns True if the message before `end_offset` was delivered since the partition was assigned."""
        return self.lowest_offset < end_offset <= max(self.reached_offset, self.done_offset(last_done=True))

    def due_commit(self) -> tuple[int, int] | None:
        """Returns the offset to commit and its epoch, or None if it or a later one is committed. Before the first
        message is done, it is the place where the consumer began: so the lag is known when messages come."""
        done, epoch = self.done_offset(), self.epoch
        if self.in_flight is not None and done > self.in_flight.batch.offset:
            epoch = self.in_flight.batch.epoch
        return None if done < self.floor_offset or done == self.committed_offset else (done, epoch)

    def last_commit(self, *, auto_commit: bool) -> tuple[int, int] | None:
        """Returns the offset that the release commits, and its epoch. Without `auto_commit` it is the start, if the
        application has committed nothing."""
        if auto_commit:
            return self.due_commit()
        return None if self.commit_tried else self.start

    def lag(self) -> int | None:
        """Returns the number of messages that are stored and not done, or None before the first answer."""
        return None if self.stable_offset < 0 else max(self.stable_offset - self.done_offset(), 0)


@dataclass(frozen=True, slots=True)
class RunningMessage:
    """A message that `run()` processes now, and the seconds since its listener was called first: with all attempts, and
    the pauses between them."""

    offset: int
    key: bytes | None
    running_s: float


@dataclass(eq=False, repr=False, slots=True)
class InFlightBatch:
    """A batch that a handler has: `whole`, or message by message through `iterate()`."""

    state: PartitionState
    batch: MessageBatch[Any]
    may_deliver: Callable[[], bool]
    _: KW_ONLY
    whole: bool
    _offsets: Iterator[int] | None = None
    _columns: tuple[Iterator[Any], ...] = ()
    rejected: DecodeError | None = None
    """The error of `decode=` for the last delivered message."""
    _gate: list[str] = field(default_factory=list)
    taken_back: bool = False
    """True if the rest must not be delivered here: it goes to another owner, or is delivered again."""
    processing: Processing | None = None
    """The telemetry of this batch until the handler releases it."""
    retrying: dict[int, str] = field(default_factory=dict)
    """The last errors of the messages that run() tries again, by offset. The handlers write it, any thread reads it."""
    calling: tuple[float, Message[Any]] | None = None
    """With run() in the order of partitions: the monotonic time of the last message's first call, and the message."""

    def iterate(self) -> Iterator[tuple[Any, ...]]:
        """Iterates over the messages' fields. Ends early if the rest is taken back, or after a slice if the lease is
        over.

        Raises UndecodableBatch, or DecodeError for a message that `decode=` rejects, which then counts as delivered. A
        further call continues after the last delivered message.
        """
        return chain.from_iterable(self.slices())

    def slices(self) -> Iterator[Iterator[tuple[Any, ...]]]:
        """Iterates over slices of the messages' fields. The next slice continues where the last one was left."""
        if self._offsets is None:
            offsets = iter(self.batch.offsets)
            self._columns = self.batch._after_topic(offsets)
            self._offsets = offsets
        return self._slices()

    def _slices(self) -> Iterator[Iterator[tuple[Any, ...]]]:
        batch, columns = self.batch, self._columns
        while self.delivered_offset() < batch.end_offset and self.may_deliver():
            self._gate.clear()
            if batch.decodes:
                values = self._decoded()
                columns = (*columns[:VALUES_AT], iter(values), *columns[VALUES_AT + 1 :])
                self._gate = [batch.topic] * len(values)
            else:
                self._gate = [batch.topic] * SLICE_MESSAGES
            if self.taken_back:  # perhaps before the new gate was there to be emptied
                return
            yield zip(self._gate, *columns)  # noqa: B905, the gate may be shorter by then

    def _decoded(self) -> list[Any]:
        """Returns the values of the next slice. If the first one is rejected, the DecodeError delivers its message."""
        try:
            return self.batch._decoded(self.delivered_offset(), SLICE_MESSAGES)
        except DecodeError as error:
            self.rejected = error
            for column in self._columns:
                next(column)
            raise

    @property
    def is_rejected(self) -> bool:
        """True if `decode=` rejects the last delivered message, or the whole batch."""
        return self.rejected is not None or (self.whole and self.batch.is_rejected)

    def takes(self, batch: MessageBatch[Any]) -> bool:
        """Returns True if the next batch of the partition may be added to this one now."""
        return False

    def processing_of(self, offset: int) -> Processing | None:
        """Returns the telemetry of a message."""
        return self.processing

    def end_processing(self) -> None:
        """Ends the telemetry. A second call does nothing."""
        processing, self.processing = self.processing, None
        if processing is not None:
            processing.end(self.delivered_offset() - self.batch.offset)

    @property
    def is_over(self) -> bool:
        """True if no handler has the batch any more, so the inbox must release it."""
        return False

    @property
    def first_unfinished(self) -> int | None:
        """The offset that no commit may pass, if messages are processed side by side."""
        return None

    @property
    def running(self) -> list[RunningMessage]:
        """The messages that run() processes now, the longest first."""
        if (calling := self.calling) is None:
            return []
        began_s, message = calling
        return [RunningMessage(message.offset, message.key, time.monotonic() - began_s)]

    def cut(self, offset: int) -> None:
        """Stops the delivery of messages from `offset` on, because the log has lost them."""
        self.take_back()

    def take_back(self, *, at_once: bool = False) -> None:
        """Stops the delivery of further messages of this batch."""
        self.taken_back = True
        self._gate.clear()

    def delivered_offset(self) -> int:
        """Returns the offset after the last delivered message."""
        if self.whole:
            return self.batch.end_offset
        if self._offsets is None:
            return self.batch.offset
        left: int = self._offsets.__length_hint__()  # type: ignore[attr-defined]
        return self.batch.end_offset - left

    def done_offset(self, *, last_done: bool) -> int:
        """Returns the offset after the last done message. A message that `decode=` rejects is never done."""
        if last_done and self.rejected is None:
            return self.delivered_offset()
        if self.whole:
            return self.batch.offset
        return max(self.delivered_offset() - 1, self.batch.offset)

    def resume_offset(self) -> int:
        """Returns the offset of the next message after this batch, or after its delivered part if it was taken back."""
        return self.delivered_offset() if self.taken_back else self.batch.end_offset


OpenWindow = Callable[[PartitionState, MessageBatch[Any], Callable[[], bool]], "KeyWindow"]
"""Makes a KeyWindow with its first batch and `may_deliver`."""


class Inbox:
    """The fetched batches of all partitions. Thread-safe.

    `may_deliver` is called before each batch and once per slice: it returns False while the lease is over. `notify` is
    called, under the lock, when there may be a batch to take.
    """

    def __init__(self, may_deliver: Callable[[], bool]) -> None:
        self._make_lock()
        self.states: dict[TopicPartition, PartitionState] = {}
        self.buffered_bytes = 0
        self.error: BaseException | None = None
        self.stopped = self.closed = False
        """`stopped` is True if handlers get no further batch."""
        self.notify: Callable[[], None] = self.filled.notify_all
        self.may_grow: Callable[[PartitionState], bool] = lambda state: True
        """Returns False if no more is fetched for a partition until some of its messages are done."""
        self.due_at: float | None = None
        """The monotonic time at which a batch that waits for more messages is due, after a take() without a result."""
        self._may_deliver = may_deliver
        self._ready: dict[PartitionState, None] = {}
        self._detached: dict[TopicPartition, InFlightBatch] = {}

    def _make_lock(self) -> None:
        self.lock = threading.RLock()
        self.filled = LateCondition(self.lock)
        self.is_inside: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # as Condition does
        """Returns True if this thread has the lock already: a signal handler interrupts it inside of this module."""

    def add(self, state: PartitionState) -> None:
        """Adds a partition."""
        with self.lock:
            self.states[state.tp] = state

    def put(self, state: PartitionState, batches: list[MessageBatch[Any]]) -> None:
        """Puts fetched batches in, in order."""
        with self.lock:
            if state.rewinding:
                return
            arrived_s = time.monotonic()
            for batch in batches:
                batch._arrived_s = arrived_s
            state.buffered.extend(batches)
            self._count(state, sum(batch.size_bytes for batch in batches))
            self._offer(state)

    def take(
        self,
        *,
        whole: bool,
        taken: list[InFlightBatch] | None = None,
        max_messages: int = 0,
        within_s: float = 0.0,
    ) -> InFlightBatch | None:
        """Takes a batch of the next partition, or returns None. Called under the lock. Raises the error set by fail().

        `max_messages`: buffered batches that follow one another are joined up to so many messages. `within_s`: they
        wait for more of them, up to so many seconds from the arrival of the first one on; then `due_at` is the next
        such time. The batch is appended to `taken` before it counts as taken, so that finish() can repair the state
        after a Ctrl-C in this method.
        """
        self.due_at = None
        if self.error is not None:
            raise self.error
        if not self._ready or not self._may_deliver():
            return None
        state = next(iter(self._ready)) if not within_s else self._next_full(max_messages, within_s)
        if state is None:
            return None
        parts = joinable(state.buffered, max_messages)
        in_flight = InFlightBatch(
            state, parts[0] if len(parts) == 1 else JoinedBatch(parts), self._may_deliver, whole=whole
        )
        if taken is not None:
            taken.append(in_flight)
        state.in_flight = in_flight
        for _ in parts:
            state.buffered.popleft()
        del self._ready[state]
        return in_flight

    def _next_full(self, max_messages: int, within_s: float) -> PartitionState | None:
        """Returns a partition that has so many messages, whose time is over, or that gets no more. Otherwise notes the
        time at which the first one is over."""
        now, due_at = time.monotonic(), math.inf
        for state in self._ready:
            first, last = state.buffered[0], state.buffered[-1]
            state_due_at = first._arrived_s + within_s
            if last.end_offset - first.offset >= max_messages or state_due_at <= now or not self.may_grow(state):
                return state
            due_at = min(due_at, state_due_at)
        self.due_at = due_at
        return None

    def take_window(self, open_window: OpenWindow) -> KeyWindow | None:
        """Adds a batch to the window of its partition, which `open_window` makes if there is none. Returns the window,
        or None if there is no batch. Called under the lock. Raises like take(), and UndecodableBatch."""
        self.due_at = None
        if self.error is not None:
            raise self.error
        while self._ready and self._may_deliver():
            state = next(iter(self._ready))
            del self._ready[state]
            if state.in_flight is None:
                window = open_window(state, state.buffered.popleft(), self._may_deliver)
                state.in_flight = window
                window.open()
            elif state.in_flight.takes(state.buffered[0]):
                window = cast("KeyWindow", state.in_flight)
                if not window.add(state.buffered[0]):
                    continue
                state.buffered.popleft()
            else:
                continue
            self._offer(state)
            return window
        return None

    def advance(self, window: KeyWindow) -> bool:
        """Drops the finished batches of a window. Returns True if that freed memory. Called under the lock."""
        freed_bytes = window.drop_finished()
        if window.state.in_flight is not window:  # detached: its bytes do not count any more
            return False
        self._count(window.state, -freed_bytes)
        self._offer(window.state)
        return freed_bytes > 0

    def finish(self, in_flight: InFlightBatch, *, last_done: bool = True) -> bool:
        """Releases a batch. Returns True if some messages must be delivered again: then the loop must call `rewind`.

        `last_done`: True if the last delivered message counts as done. May be called again, for example after a Ctrl-C.
        """
        state = in_flight.state
        released: Callable[[], object] | None = None
        with self.lock:
            if state.in_flight is in_flight:
                self._release(in_flight, last_done)
            else:
                self._release_detached(in_flight)
            self._offer(state)
            if state.in_flight is None and state.tp not in self._detached:
                released, state.released = state.released, None
        if released is not None:
            released()
        in_flight.end_processing()
        return state.rewinding and not self.closed

    def _release(self, in_flight: InFlightBatch, last_done: bool) -> None:
        state = in_flight.state
        state.next_offset = in_flight.done_offset(last_done=last_done)
        state.rewinding = state.next_offset != in_flight.resume_offset()
        if state.next_offset > in_flight.batch.offset:
            state.epoch = in_flight.batch.epoch
        if state.rewinding:
            self._drop_buffered(state)
        state.in_flight = None
        self._count(state, -in_flight.batch.size_bytes)

    def _release_detached(self, in_flight: InFlightBatch) -> None:
        tp = in_flight.state.tp
        if self._detached.get(tp) is in_flight:
            del self._detached[tp]
            state = self.states.get(tp)
            if state is not None:
                self._offer(state)
                if state.released is not None:
                    state.released()
                    state.released = None

    def rewind(self, state: PartitionState, next_offset: int | None = None, epoch: int = -1) -> int:
        """Drops the buffered batches and takes back the messages that are not delivered. Returns the offset to fetch
        from.

        With `next_offset`, as for a seek, that is the offset to fetch from, to deliver next and to commit.
        """
        with self.lock:
            self._drop_buffered(state)
            state.rewinding = False
            if next_offset is not None:
                state.begin_at(next_offset, epoch)
                self._detach(state)
            elif state.in_flight is not None:
                in_flight = state.in_flight
                in_flight.take_back(at_once=self.closed)
                if not in_flight.is_over:
                    return in_flight.delivered_offset()
                self._release(in_flight, last_done=True)
                state.rewinding = False
            return state.next_offset

    def skip_to(self, state: PartitionState, offset: int) -> None:
        """Skips the removed messages up to `offset`. The messages that were fetched before stay valid."""
        with self.lock:
            state.floor_offset = 0  # it may have been committed in the log of before
            if state.in_flight is None and not state.buffered:
                state.next_offset, state.epoch = offset, -1

    def drop_from(self, state: PartitionState, offset: int) -> None:
        """Drops buffered and in-flight messages from `offset` on, as whole batches, because the log has lost them."""
        with self.lock:
            if state.in_flight is not None and state.in_flight.batch.end_offset > offset:
                state.in_flight.cut(offset)
                if state.in_flight.is_over:
                    self.finish(state.in_flight)
            while state.buffered and state.buffered[-1].offset >= offset:
                self._count(state, -state.buffered.pop().size_bytes)
            if not state.buffered:
                self._ready.pop(state, None)

    def take_back_to(self, state: PartitionState, agreed: int, epoch: int) -> int:
        """Drops the messages from `agreed` on, because the log has others there. Returns the offset to fetch from."""
        with self.lock:
            in_flight = state.in_flight
            goes_on = state.next_offset if in_flight is None else in_flight.delivered_offset()
            first_unfinished = None if in_flight is None else in_flight.first_unfinished
        if goes_on <= agreed:
            return self.rewind(state)
        if first_unfinished is not None and first_unfinished < agreed:
            return self.rewind(state, first_unfinished)
        return self.rewind(state, agreed, epoch)

    def remove(self, state: PartitionState) -> None:
        """Removes a partition that is not assigned any more. Its in-flight messages do not count."""
        with self.lock:
            self._drop_buffered(state)
            self._detach(state)
            self.states.pop(state.tp, None)
            released, state.released = state.released, None
        if released is not None:
            released()

    def _detach(self, state: PartitionState) -> None:
        in_flight = state.in_flight
        if in_flight is not None:
            in_flight.take_back(at_once=True)
            self._count(state, -in_flight.batch.size_bytes)
            state.in_flight = None
            if not self.closed and not in_flight.is_over:
                self._detached[state.tp] = in_flight

    def _drop_buffered(self, state: PartitionState) -> None:
        self._count(state, -sum(batch.size_bytes for batch in state.buffered))
        state.buffered.clear()
        self._ready.pop(state, None)

    def _offer(self, state: PartitionState) -> None:
        is_free = state.in_flight is None and state.tp not in self._detached
        if state.buffered and (is_free or (state.in_flight is not None and state.in_flight.takes(state.buffered[0]))):
            self._ready[state] = None
            self.notify()

    def _count(self, state: PartitionState, size_bytes: int) -> None:
        state.buffered_bytes += size_bytes
        self.buffered_bytes += size_bytes

    def when_released(self, state: PartitionState, released: Callable[[], object]) -> None:
        """Calls `released`, in any thread, once no batch of the partition is in flight; immediately if none is.

        It may be called under the lock.
        """
        with self.lock:
            if state.in_flight is not None or state.tp in self._detached:
                state.released = released
                return
        released()

    def fail(self, error: BaseException) -> None:
        """Raises this error in the handlers from now on."""
        with self.lock:
            self.error = error
            self.notify()

    def stop(self) -> None:
        """Ends the delivery. Handlers finish the messages that they have, which count as done then."""
        with self.lock:
            self.stopped = True
            for state in self.states.values():
                self.rewind(state)
            self.notify()

    def close(self, *, last_done: bool) -> None:
        """Ends the delivery without waiting for handlers. `last_done`: True if their last messages count as done."""
        with self.lock:
            self.stopped = self.closed = True
            for detached in self._detached.values():  # their loops may never release them
                detached.end_processing()
            self._detached.clear()
            states = list(self.states.values())
            self.notify()
        for state in states:
            self.rewind(state)
            in_flight, released = state.in_flight, state.released  # a handler may be releasing it at this moment
            if in_flight is not None:
                self.finish(in_flight, last_done=last_done and not in_flight.is_rejected)
            elif released is not None:
                released()

    def forked(self, error: MetamqError) -> None:
        """Ends the copy in a fork's child, which has one thread: handlers get `error` at once."""
        self._make_lock()
        self.notify = self.filled.notify_all
        for state in self.states.values():
            if state.in_flight is not None:
                state.in_flight.take_back()
        self.error = error

    def poke(self) -> None:
        """Makes the handlers check again, for example when the lease is valid again."""
        with self.lock:
            self.notify()
