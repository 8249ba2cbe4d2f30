"""KeyWindow: the messages of one partition that `run(order="key")` processes side by side, in order within each key.

Theory of operation
-------------------
The window takes the place of the in-flight batch of its partition, and grows at its end:

    │ finished      │ running, waiting or finished        │ not given to handlers yet       │ buffered
    start           low                                   queued <= low + span              batch.end_offset

A message is free if no earlier message of its key is unfinished; a message without a key is always free. The window
gives each free message to `start`, once. A handler calls `begin`, processes the message, and calls `end`, which returns
the next message of the same key. `low` is the first unfinished message, and the offset to commit.

No message is begun `span` or more offsets above `low`. So a message that takes long stops its partition in the end, and
a crash repeats fewer than `span` messages beyond those that are not committed yet. Batches below `low` are dropped, so
a window that is never empty uses little memory.

A window that is taken back (its partition is paused, or goes to another member) begins no message above those that it
has begun. It still processes the ones below, so no finished message is delivered again. A seek, the
end of the lease, an error, or a message that waits for its next attempt stops it at once: it begins nothing more, and
all messages from `low` on are delivered again.

The lock of the inbox guards all of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from metamq.client.fetch.inbox import InFlightBatch, RunningMessage
from metamq.client.fetch.joined_batch import JoinedBatch
from metamq.errors import UndecodableBatch
from metamq.wire.limits import BATCH_BYTES_MAX

if TYPE_CHECKING:
    from metamq.client.fetch.inbox import PartitionState
    from metamq.client.fetch.message_batch import MessageBatch
    from metamq.client.model import Message
    from metamq.client.telemetry import Processing


PLAIN_BYTES_MAX = BATCH_BYTES_MAX
"""The decompressed bytes of a window's batches. One batch is always taken, whatever its size."""


class KeyWindow(InFlightBatch):
    """The unfinished messages of one partition, by key. Guarded by the inbox's lock."""

    batch: JoinedBatch[Any]

    def __init__(
        self,
        state: PartitionState,
        batch: MessageBatch[Any],
        may_deliver: Callable[[], bool],
        start: Callable[[KeyWindow, Message[bytes]], None],
        span: int,
        report: Callable[[MessageBatch[Any]], Processing | None],
    ) -> None:
        """`start` gets each free message, with its value as it is stored. `span`: see the theory above. `report`
        returns the telemetry of a batch."""
        super().__init__(state, JoinedBatch([batch]), may_deliver, whole=False)
        self.low = self._queued = self._begun = batch.offset
        self._start = start
        self._span = span
        self._report = report
        self._reported: list[tuple[range, Processing]] = []
        """The offsets and the telemetry of the batches that are not finished."""
        self._plain_bytes = batch.plain_bytes
        self._refuses = False
        """True if the next batch cannot be decoded: it gets a window of its own, whose error is raised."""
        self._is_cut = False
        self._limit = inf
        """No message from this offset on is begun."""
        self._resume_offset: int | None = None
        self._finished: set[int] = set()
        """The finished messages above `low`."""
        self._running: dict[int, tuple[bytes | None, float]] = {}
        self._keys: dict[bytes, deque[Message[bytes]]] = {}
        """For each key with an unfinished message: the messages that wait behind it."""
        self._first = batch
        self._messages: Iterator[Message[bytes]] = iter(())

    def takes(self, batch: MessageBatch[Any]) -> bool:
        """Returns True if the batch may be added now: it is the next one, and there is room."""
        is_next = batch.offset == self.batch.end_offset == self._queued and batch.epoch == self.batch.epoch
        has_room = self._queued < self.low + self._span and self._plain_bytes + batch.plain_bytes <= PLAIN_BYTES_MAX
        return is_next and has_room and not self.taken_back and not self._refuses

    def add(self, batch: MessageBatch[Any]) -> bool:
        """Adds a batch at the end. Returns False if it cannot be decoded: then the window takes no further batch."""
        try:
            messages = batch.undecoded_messages()
        except UndecodableBatch:
            self._refuses = True
            return False
        self.batch.add(batch)
        self._plain_bytes += batch.plain_bytes
        self._read(batch, messages)
        self.fill()
        return True

    def open(self) -> None:
        """Starts the messages of the first batch. Raises UndecodableBatch."""
        first = self._first
        self._read(first, first.undecoded_messages())
        self.fill()

    def _read(self, batch: MessageBatch[Any], messages: Iterator[Message[bytes]]) -> None:
        self._messages = messages
        if (processing := self._report(batch)) is not None:
            self._reported.append((batch.offsets, processing))

    def fill(self) -> None:
        """Starts the messages for which there is room, as far as they are free."""
        if self.taken_back and not self._is_cut:
            return
        end = int(min(self.low + self._span, self._limit, self.batch.end_offset))
        for message in islice(self._messages, max(end - self._queued, 0)):
            self._queued = message.offset + 1
            if message.key is None:
                self._start(self, message)
            elif message.key in self._keys:
                self._keys[message.key].append(message)
            else:
                self._keys[message.key] = deque()
                self._start(self, message)

    def begin(self, message: Message[bytes]) -> bool:
        """Returns True if a handler may process the message now, and then must call end()."""
        if message.offset >= self._limit:
            return False
        if not self.may_deliver():
            self.take_back(at_once=True)
            return False
        assert self.low <= message.offset < self.low + self._span
        self._begun = max(self._begun, message.offset + 1)
        self._running[message.offset] = message.key, time.monotonic()
        return True

    def end(self, message: Message[bytes], *, done: bool) -> Message[bytes] | None:
        """Notes the end of a message that was begun. Returns the next message of its key."""
        del self._running[message.offset]
        if not done:
            self.take_back(at_once=True)
            return None
        self._finished.add(message.offset)
        while self.low in self._finished:
            self._finished.remove(self.low)
            self.low += 1
        while self._reported and self._reported[0][0].stop <= self.low:
            offsets, processing = self._reported.pop(0)
            processing.end(len(offsets))
        following = self._following(message.key)
        self.fill()
        return following

    def _following(self, key: bytes | None) -> Message[bytes] | None:
        if key is None:
            return None
        waiting = self._keys[key]
        if waiting:
            return waiting.popleft()
        del self._keys[key]
        return None

    def take_back(self, *, at_once: bool = False) -> None:
        """Begins no message above those that were begun, after which the loop fetches again. `at_once`: begins none at
        all, and the loop does not know of it."""
        self.taken_back = True
        if at_once:
            self._limit = -1
        else:
            self._limit = min(self._limit, self._begun)
            self._resume_offset, self._is_cut = self._begun, False

    def cut(self, offset: int) -> None:
        """Begins no message from `offset` on, because the log has lost them; the messages below are processed."""
        self.taken_back = self._is_cut = True
        self._limit = min(self._limit, offset)

    def drop_finished(self) -> int:
        """Drops the batches below `low`. Returns the bytes that they had in the store."""
        dropped = self.batch.drop_before(self.low)
        self._plain_bytes -= sum(part.plain_bytes for part in dropped)
        return sum(part.size_bytes for part in dropped)

    @property
    def is_over(self) -> bool:
        """True if no message is running, and none will be begun."""
        return not self._running and self.low >= min(self._limit, self.batch.end_offset)

    @property
    def first_unfinished(self) -> int:
        """`low`: no commit may pass it."""
        return self.low

    @property
    def running(self) -> list[RunningMessage]:
        """The messages that are processed now, the longest first."""
        now_s = time.monotonic()
        return [RunningMessage(offset, key, now_s - began_s) for offset, (key, began_s) in self._running.items()]

    def processing_of(self, offset: int) -> Processing | None:
        """Returns the telemetry of the message's batch. It does not end while the message is running."""
        return next((processing for offsets, processing in self._reported if offset in offsets), None)

    def end_processing(self) -> None:
        """Ends the telemetry of the batches that are not finished."""
        while self._reported:
            offsets, processing = self._reported.pop(0)
            processing.end(sum(offset < self.low or offset in self._finished for offset in offsets))

    def delivered_offset(self) -> int:
        """Returns the offset after the highest message that was begun."""
        return self._begun

    def resume_offset(self) -> int:
        """Returns the offset of the next message that the inbox has or gets, behind this window."""
        if self._is_cut:
            return self.low  # nothing comes but the error about the lost messages
        return self.batch.end_offset if self._resume_offset is None else self._resume_offset

    def done_offset(self, *, last_done: bool) -> int:
        """Returns `low`: a running message is not done, whatever `last_done` is."""
        return self.low
