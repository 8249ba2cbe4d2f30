"""Between fetching and handling: what is fetched per partition, what is in hand, and what is done.

Theory of operation
-------------------
The loop puts fetched batches in; a handler, which is the application's own thread, a pool of them or a task, takes
one batch at a time. While a batch is in hand its partition gives no other one, so a partition's messages are handled
in order, whoever handles them. Partitions take turns.

A message is done when the next one is asked for. Nothing may be done per message, so nobody counts: a Hand holds the
C iterator of its batch's offsets, whose length hint tells how many were handed out. And to take a batch back in the
middle (a revoked partition, a seek, an ended lease) the Hand's gate is emptied, a list that the iterator asks first:
the message in hand stays, the next is not handed out. The loop may be late to do that, as in a process that was frozen,
so the iterator itself looks at the lease, once for each slice of a batch.

    in the log   ...│ done          │ in hand │ buffered, or being fetched │ not fetched
                    ^ committed     ^ done_offset                          ^ request.offset

A handler may let go of a batch before its end: it failed, or its loop was left for another one. What it has not done
is to come again, so what is buffered behind it is dropped, nothing more is taken in, and the loop fetches from where
the handler stopped (`rewinding`, until the loop calls `rewind`).

A batch may also be taken from under a handler, by a seek or with the partition. What is in its hand then counts no
more, but the handler may still be busy with it: until it lets go, nobody gets another message of that partition.

One lock guards all of it. The loop and the handlers hold it for moments only. A signal handler may run in such a moment
in the thread that has the lock: it may look, so the lock is a re-entrant one, but not wait for the loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from metamq.client.fetch.joined_batch import JoinedBatch, joinable
from metamq.client.fetch.message_batch import SLICE_MESSAGES, VALUES_AT, MessageBatch
from metamq.errors import DecodeError, MetamqError
from metamq.zk.groups.ownership import Ownership
from metamq.zk.partitions import TopicPartition


class PartitionState:
    """One partition that is being consumed. Guarded by the inbox's lock."""

    __slots__ = (
        "assumed_offset", "buffered", "buffered_bytes", "claim", "closing", "committed_offset", "epoch",
        "first_offset", "hand", "lowest_offset", "next_offset", "paused", "reached_offset", "released", "rewinding",
        "seeks", "sought_offset", "stable_offset", "start_offset", "starting", "tp",
    )  # fmt: skip

    def __init__(self, tp: TopicPartition, claim: Ownership | None, next_offset: int) -> None:
        self.tp = tp
        self.claim = claim
        self.next_offset = next_offset
        """The next to be handed out, as long as nothing is in hand."""
        self.first_offset: int | None = None
        """Where it began without a committed offset."""
        self.committed_offset: int | None = None
        self.assumed_offset: int | None = None
        """What was committed in a transaction of the application's, which may or may not have ended well."""
        self.lowest_offset = 0
        self.reached_offset = 0
        """Between these two is what was handed out since the partition is ours, before the last seek."""
        self.sought_offset: int | None = None
        """Where the application went by a seek, until the next commit in a transaction of its own."""
        self.seeks = 0
        """How often it went anywhere."""
        self.epoch = -1
        """The master's term that wrote the message before `next_offset`; -1: not known."""
        self.buffered: deque[MessageBatch[Any]] = deque()
        self.buffered_bytes = 0
        """What is buffered and in hand."""
        self.hand: Hand | None = None
        self.paused = False
        self.starting = True
        """The application is being told of it: nothing is fetched yet."""
        self.closing = False
        """It is being given away: nothing is fetched any more."""
        self.rewinding = False
        """What is being fetched is not what comes next."""
        self.released: Callable[[], None] | None = None
        """Called, in any thread, when the hand is empty; for who waits to give the partition away."""
        self.start_offset = -1
        self.stable_offset = -1

    def done_offset(self, *, in_hand: bool = False) -> int:
        """The offset after the last message that is done; `in_hand` counts the one in hand as done."""
        return self.next_offset if self.hand is None else self.hand.done_offset(in_hand=in_hand)

    def begin_at(self, offset: int, epoch: int = -1) -> None:
        """Where the partition begins, for it has just become ours, or for a seek; and the message before it was of."""
        if self.next_offset < 0:
            self.lowest_offset = self.reached_offset = offset
        else:
            self.reached_offset = max(self.reached_offset, self.done_offset(in_hand=True))
            self.lowest_offset = min(self.lowest_offset, offset)
        self.next_offset, self.epoch = offset, epoch

    def epoch_before(self, offset: int) -> int:
        """The epoch of the message before an offset; -1: not known."""
        if self.hand is not None and offset > self.hand.batch.offset:
            return self.hand.batch.epoch
        return self.epoch if offset == self.next_offset else -1

    def has_handed_out(self, end_offset: int) -> bool:
        """Whether the message before `end_offset` was handed out since the partition is ours."""
        return self.lowest_offset < end_offset <= max(self.reached_offset, self.done_offset(in_hand=True))

    def due_commit(self) -> tuple[int, int] | None:
        """The offset to commit and its epoch, None when it is committed, or nothing was done since it began."""
        done, epoch = self.done_offset(), self.epoch
        if self.hand is not None and done > self.hand.batch.offset:
            epoch = self.hand.batch.epoch
        untouched = self.first_offset if self.committed_offset is None else self.committed_offset
        return None if done < 0 or done == untouched else (done, epoch)

    def lag(self) -> int | None:
        """Messages that are stored and not done; None before the first answer."""
        return None if self.stable_offset < 0 else max(self.stable_offset - self.done_offset(), 0)


class Hand:
    """A batch that a handler has: `whole`, or message by message through `iterate()`."""

    __slots__ = ("_columns", "_gate", "_may_deliver", "_offsets", "batch", "rejected", "state", "taken_back", "whole")

    def __init__(
        self, state: PartitionState, batch: MessageBatch[Any], may_deliver: Callable[[], bool], *, whole: bool
    ) -> None:
        self.state = state
        self.batch = batch
        self.whole = whole
        self._may_deliver = may_deliver
        self._offsets: Iterator[int] | None = None
        self._columns: tuple[Iterator[Any], ...] = ()
        self.rejected: DecodeError | None = None
        """Why `decode=` rejects the message that is in hand."""
        self._gate: list[str] = []
        self.taken_back = False
        """The rest is not to be handed out: it goes to another owner, or comes again."""

    def iterate(self) -> Iterator[tuple[Any, ...]]:
        """The messages' fields; ends early when the rest is taken back, or at a slice's end when the lease is over.

        Raises UndecodableBatch; DecodeError for a message that `decode=` rejects, which then is in hand. A further call
        goes on behind what was handed out.
        """
        return chain.from_iterable(self.slices())

    def slices(self) -> Iterator[Iterator[tuple[Any, ...]]]:
        """The same in slices; the next one goes on where this one was left."""
        if self._offsets is None:
            offsets = iter(self.batch.offsets)
            self._columns = self.batch._after_topic(offsets)
            self._offsets = offsets
        return self._slices()

    def _slices(self) -> Iterator[Iterator[tuple[Any, ...]]]:
        batch, columns = self.batch, self._columns
        while self.handed_out() < batch.end_offset and self._may_deliver():
            self._gate.clear()
            if batch.decodes:
                values = self._decoded()
                columns = (*columns[:VALUES_AT], iter(values), *columns[VALUES_AT + 1 :])
                self._gate = [batch.topic] * len(values)
            else:
                self._gate = [batch.topic] * SLICE_MESSAGES
            if self.taken_back:  # perhaps before this gate was there to be emptied
                return
            yield zip(self._gate, *columns)  # noqa: B905, the gate may be shorter by then

    def _decoded(self) -> list[Any]:
        """The next slice's values. Where the first is rejected, its message is handed out by the DecodeError."""
        try:
            return self.batch._decoded(self.handed_out(), SLICE_MESSAGES)
        except DecodeError as error:
            self.rejected = error
            for column in self._columns:
                next(column)
            raise

    @property
    def is_rejected(self) -> bool:
        """Whether `decode=` rejects what is in hand."""
        return self.rejected is not None or (self.whole and self.batch.is_rejected)

    def take_back(self) -> None:
        """No further message of this batch is handed out."""
        self.taken_back = True
        self._gate.clear()

    def handed_out(self) -> int:
        """The offset after the last message that was handed out."""
        if self.whole:
            return self.batch.end_offset
        if self._offsets is None:
            return self.batch.offset
        left: int = self._offsets.__length_hint__()  # type: ignore[attr-defined]
        return self.batch.end_offset - left

    def done_offset(self, *, in_hand: bool) -> int:
        """The offset after the last message that is done; one that `decode=` rejects is not, whoever says so."""
        if in_hand and self.rejected is None:
            return self.handed_out()
        if self.whole:
            return self.batch.offset
        return max(self.handed_out() - 1, self.batch.offset)

    def goes_on_at(self) -> int:
        """The offset of the first message that is to come after this batch, or after what was handed out of it."""
        return self.handed_out() if self.taken_back else self.batch.end_offset


class Inbox:
    """The fetched batches of all partitions. Thread-safe.

    `may_deliver` is asked before a batch is given out, and once a slice: it is False while the lease is over. `notify`
    is called, under the lock, when there may be something to take.
    """

    def __init__(self, may_deliver: Callable[[], bool]) -> None:
        self._make_lock()
        self.states: dict[TopicPartition, PartitionState] = {}
        self.buffered_bytes = 0
        self.error: BaseException | None = None
        self.closed = False
        self.notify: Callable[[], None] = self.filled.notify_all
        self._may_deliver = may_deliver
        self._ready: dict[PartitionState, None] = {}
        self._detached: dict[TopicPartition, Hand] = {}

    def _make_lock(self) -> None:
        self.lock = threading.RLock()
        self.filled = threading.Condition(self.lock)
        self.is_inside: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # as Condition does
        """Whether this thread has the lock: it is in here, and was interrupted by a signal handler."""

    def add(self, state: PartitionState) -> None:
        """Starts to keep batches for a partition."""
        with self.lock:
            self.states[state.tp] = state

    def put(self, state: PartitionState, batches: list[MessageBatch[Any]]) -> None:
        """Fetched batches, in order."""
        with self.lock:
            if state.rewinding:
                return
            state.buffered.extend(batches)
            self._count(state, sum(batch.size_bytes for batch in batches))
            self._offer(state)

    def take(self, *, whole: bool, taken: list[Hand] | None = None, max_messages: int = 0) -> Hand | None:
        """A batch of the partition whose turn it is, or None. Under the lock. Raises the error set by fail().

        `max_messages`: batches that are there and follow one another are joined up to so many. It is put into `taken`
        before it counts as taken: a Ctrl-C in here leaves nothing that finish() cannot mend.
        """
        if self.error is not None:
            raise self.error
        if not self._ready or not self._may_deliver():
            return None
        state = next(iter(self._ready))
        parts = joinable(state.buffered, max_messages)
        hand = Hand(state, parts[0] if len(parts) == 1 else JoinedBatch(parts), self._may_deliver, whole=whole)
        if taken is not None:
            taken.append(hand)
        state.hand = hand
        for _ in parts:
            state.buffered.popleft()
        del self._ready[state]
        return hand

    def finish(self, hand: Hand, *, in_hand: bool = True) -> bool:
        """The handler lets go of its batch. True when some of it is to come again: the loop is to call `rewind`.

        `in_hand`: whether the last message handed out counts as done. May be called again, as after a Ctrl-C.
        """
        state = hand.state
        released: Callable[[], None] | None = None
        with self.lock:
            if state.hand is hand:
                self._let_go(hand, in_hand)
            else:
                self._let_go_of_detached(hand)
            self._offer(state)
            if state.hand is None and state.tp not in self._detached:
                released, state.released = state.released, None
        if released is not None:
            released()
        return state.rewinding and not self.closed

    def _let_go(self, hand: Hand, in_hand: bool) -> None:
        state = hand.state
        state.next_offset = hand.done_offset(in_hand=in_hand)
        state.rewinding = state.next_offset != hand.goes_on_at()
        if state.next_offset > hand.batch.offset:
            state.epoch = hand.batch.epoch
        if state.rewinding:
            self._drop_buffered(state)
        state.hand = None
        self._count(state, -hand.batch.size_bytes)

    def _let_go_of_detached(self, hand: Hand) -> None:
        tp = hand.state.tp
        if self._detached.get(tp) is hand:
            del self._detached[tp]
            state = self.states.get(tp)
            if state is not None:
                self._offer(state)
                if state.released is not None:
                    state.released()
                    state.released = None

    def rewind(self, state: PartitionState, next_offset: int | None = None, epoch: int = -1) -> int:
        """Drops what is buffered and takes back what is not handed out; returns where to fetch from.

        With `next_offset`, as for a seek, that is the place; it is the next to be handed out and what is committed.
        """
        with self.lock:
            self._drop_buffered(state)
            state.rewinding = False
            if next_offset is not None:
                state.begin_at(next_offset, epoch)
                self._detach_hand(state)
            elif state.hand is not None:
                state.hand.take_back()
                return state.hand.handed_out()
            return state.next_offset

    def skip_to(self, state: PartitionState, offset: int) -> None:
        """The messages from the last one fetched up to `offset` are gone; what was fetched before is still good."""
        with self.lock:
            if state.hand is None and not state.buffered:
                state.next_offset, state.epoch = offset, -1

    def drop_from(self, state: PartitionState, offset: int) -> None:
        """What is buffered, or in hand, from there on was given up. A batch is given up as a whole."""
        with self.lock:
            if state.hand is not None and state.hand.batch.end_offset > offset:
                state.hand.take_back()
            while state.buffered and state.buffered[-1].offset >= offset:
                self._count(state, -state.buffered.pop().size_bytes)
            if not state.buffered:
                self._ready.pop(state, None)

    def take_back_to(self, state: PartitionState, agreed: int, epoch: int) -> int:
        """The log has something else from `agreed` on: drops what is buffered, and what is in hand of that. Returns
        where to fetch from."""
        with self.lock:
            goes_on = state.next_offset if state.hand is None else state.hand.handed_out()
        return self.rewind(state) if goes_on <= agreed else self.rewind(state, agreed, epoch)

    def remove(self, state: PartitionState) -> None:
        """The partition is not ours any more; what is in hand does not count."""
        with self.lock:
            self._drop_buffered(state)
            self._detach_hand(state)
            self.states.pop(state.tp, None)
            released, state.released = state.released, None
        if released is not None:
            released()

    def _detach_hand(self, state: PartitionState) -> None:
        hand = state.hand
        if hand is not None:
            hand.take_back()
            self._count(state, -hand.batch.size_bytes)
            state.hand = None
            if not self.closed:
                self._detached[state.tp] = hand

    def _drop_buffered(self, state: PartitionState) -> None:
        self._count(state, -sum(batch.size_bytes for batch in state.buffered))
        state.buffered.clear()
        self._ready.pop(state, None)

    def _offer(self, state: PartitionState) -> None:
        if state.buffered and state.hand is None and state.tp not in self._detached:
            self._ready[state] = None
            self.notify()

    def _count(self, state: PartitionState, size_bytes: int) -> None:
        state.buffered_bytes += size_bytes
        self.buffered_bytes += size_bytes

    def when_released(self, state: PartitionState, released: Callable[[], None]) -> None:
        """Calls `released`, in any thread, once nothing of the partition is in hand; at once when nothing is.

        It may be called under the lock.
        """
        with self.lock:
            if state.hand is not None or state.tp in self._detached:
                state.released = released
                return
        released()

    def fail(self, error: BaseException) -> None:
        """Handlers get this error from now on."""
        with self.lock:
            self.error = error
            self.notify()

    def close(self, *, in_hand_done: bool) -> None:
        """Handlers get nothing any more, and are not waited for: `in_hand_done` says what counts of what they have."""
        with self.lock:
            self.closed = True
            self._detached.clear()
            states = list(self.states.values())
            self.notify()
        for state in states:
            self.rewind(state)
            hand, released = state.hand, state.released  # a handler may be letting go of it at this moment
            if hand is not None:
                self.finish(hand, in_hand=in_hand_done and not hand.is_rejected)
            elif released is not None:
                released()

    def forked(self, error: MetamqError) -> None:
        """In a fork's child, which has one thread: handlers get `error`, at once."""
        self._make_lock()
        self.notify = self.filled.notify_all
        for state in self.states.values():
            if state.hand is not None:
                state.hand.take_back()
        self.error = error

    def poke(self) -> None:
        """Lets handlers look again, as when the lease is valid again."""
        with self.lock:
            self.notify()
