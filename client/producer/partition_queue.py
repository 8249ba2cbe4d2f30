"""The batches of one partition on their way to its broker: their order, their numbers, their repetitions.

Theory of operation
-------------------
This module has no I/O and no clock: the sender reports each event with its time.

A batch gets the queue's producer id and the next sequence number when it is first sent, and keeps both for every
repetition. The broker stores it once, however often it is sent, and refuses a batch whose predecessor is missing
(SequenceGap). Answers come in any order, and a broker remembers where it stored the last INFLIGHT_BATCHES of an id: the
queue uses no number that is so far from the oldest one without an outcome. A batch that is refused or has no answer
goes back to its place in the queue, and nothing is sent until all batches in flight are back or stored. So the order
holds, no batch is stored twice, and each offset is known, through refusals, lost connections and lost answers.

Four cases could break that, and each has its rule:

*A new id.* A broker accepts any sequence of an id that it does not know. If number 0 were refused for a moment and
number 1 accepted, number 0 would count as a repetition: acknowledged, but not stored. So until a batch of an id is
stored on this connection, only one batch is in flight. An id that was idle for long is not used again, because a
broker may have forgotten it.

*An abandoned connection.* A batch that was sent on it may still be in the broker's receive buffer and be stored later,
under the old id. A batch whose number is void gets a new one only when that cannot happen any more: when its
predecessor was never stored, because then the broker always refuses the batch under the old id.

*A batch whose time is over.* If an attempt has no answer, the batch may be stored, now or later: it is reported as
failed with outcome unknown. It keeps its place here while batches with later numbers are not done, because the broker
would not accept them without it. It is then a ghost: `done`, and still sent. If every attempt was refused, the batch is
certainly not stored; it is removed, and the batches after the gap get new numbers. If there was no attempt, it is just
removed.

*Numbers end.* Sequences have 32 bits; the queue replaces an id half way there.
"""

from __future__ import annotations

import secrets
from collections import deque
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from metamq.security.rights import PRODUCER_RANDOM_BITS

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import OutgoingBatch
    from metamq.errors import MetamqError
    from metamq.wire.compression import Codec

INFLIGHT_BATCHES = 5
SEQUENCES_MAX = 1 << 31
PRODUCER_ID_IDLE_S = 3600.0
"""Seconds after which an idle producer id is replaced. Brokers forget an id after days without a batch."""


def new_producer_id(prefix: int) -> int:
    """Returns the prefix and 40 random bits; without a prefix, which is 0, 63 random bits. Never returns 0."""
    return prefix << PRODUCER_RANDOM_BITS | secrets.randbits(PRODUCER_RANDOM_BITS if prefix else 63) | 1


class PartitionQueue:
    """One partition's batches: `waiting`, in order, and `inflight`. Not thread-safe: for one loop."""

    __slots__ = (
        "_prefix",
        "broker_id",
        "established",
        "index",
        "inflight",
        "last_stored_s",
        "lost_by",
        "next_sequence",
        "paused_until_s",
        "producer_id",
        "recovering",
        "topic",
        "topic_id",
        "waiting",
    )  # fmt: skip

    def __init__(self, topic: str, topic_id: str, broker_id: int, index: int) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.broker_id = broker_id
        self.index = index
        self.waiting: deque[OutgoingBatch] = deque()
        """The batches that have a number and came back, then the batches that were never sent."""
        self.inflight: deque[OutgoingBatch] = deque()
        self.paused_until_s = 0.0
        self.recovering = False
        """True after a batch came back: nothing is sent until all batches in flight are back or stored."""
        self.lost_by: MetamqError | None = None
        """The error by which the partition was lost, or None."""
        self._prefix = 0
        self._renew()

    def _renew(self) -> None:
        """Takes a new producer id. No waiting batch can be stored under the old id any more."""
        self.producer_id = new_producer_id(self._prefix)
        self.next_sequence = 0
        self.established = False
        """True if a batch of this id was stored since the last lost connection: the broker knows the next number."""
        self.last_stored_s = 0.0

    def sendable(self, now_s: float) -> bool:
        """Returns True if next_batch() may be called."""
        if self.recovering and not self.inflight:
            self._recover()
        if not self.waiting or self.recovering or now_s < self.paused_until_s:
            return False
        if not self.inflight:
            return True
        following = self.waiting[0].sequence
        if following < 0:
            following = self.next_sequence
            if following >= SEQUENCES_MAX:
                return False
        return self.established and following - self.inflight[0].sequence < INFLIGHT_BATCHES

    def next_batch(self, codec: Codec, now_s: float, producer_prefix: int = 0) -> OutgoingBatch:
        """Moves the first waiting batch to those in flight, encoded. `producer_prefix` is that of the connection.

        Raises the errors of encoding; then the batch is still the first, and the caller must drop it.
        """
        batch = self.waiting[0]
        if batch.encoded is None:
            idle_s = now_s - self.last_stored_s
            if not self.inflight and self.established and idle_s > PRODUCER_ID_IDLE_S:
                self._renew()
            if self.next_sequence >= SEQUENCES_MAX:
                self._renew()
            if producer_prefix != self._prefix and not self.inflight:
                self._prefix = producer_prefix
                self._renew()
            batch.encode(codec, self.producer_id, self.next_sequence)
            self.next_sequence += 1
        self.inflight.append(self.waiting.popleft())
        batch.attempts += 1
        return batch

    def stored(self, batch: OutgoingBatch, now_s: float) -> None:
        """Notes that the broker has stored the batch."""
        self.inflight.remove(batch)
        self.established = True
        self.last_stored_s = now_s

    def put_back(self, batch: OutgoingBatch, *, unsure: bool) -> None:
        """Takes back a batch that was refused for now, or, if `unsure`, whose outcome is unknown."""
        self.inflight.remove(batch)
        if unsure:
            batch.unsure = True
            self.established = False
        self.recovering = True
        place = 0
        while place < len(self.waiting) and 0 <= self.waiting[place].sequence < batch.sequence:
            place += 1
        self.waiting.insert(place, batch)

    def drop(self, batch: OutgoingBatch) -> None:
        """Removes a batch that was refused permanently, or could not be encoded."""
        (self.inflight if batch in self.inflight else self.waiting).remove(batch)

    def _recover(self) -> None:
        """Prepares the queue for sending after all batches in flight are back or stored."""
        self.recovering = False
        sent = list(takewhile(lambda batch: batch.sequence >= 0, self.waiting))
        if not sent:
            return
        if all(batch.done for batch in sent):
            self.waiting = deque(batch for batch in self.waiting if not batch.done)
            self._renew()
        elif sent[0].gapped:
            self._renumber()
        for batch in sent:
            batch.gapped = False

    def _renumber(self) -> None:
        """Numbers the batches again: the first one's predecessor was never stored, so the old id can store none of
        them."""
        self.waiting = deque(batch for batch in self.waiting if not batch.done)
        self._renew()
        for batch in self.waiting:
            if batch.sequence < 0:
                break
            batch.encoded = None
            batch.sequence = -1
            batch.unsure = False

    def expire(self, before_ns: int) -> list[OutgoingBatch]:
        """Returns the batches begun before `before_ns` that were not reported yet. Removes those that cannot be stored.

        `unsure` of a batch is True if it may be stored nevertheless.
        """
        live = (batch for batch in chain(self.inflight, self.waiting) if not batch.done)
        late = list(takewhile(lambda batch: batch.created_ns < before_ns, live))
        for batch in self.inflight:
            batch.unsure = batch.unsure or batch.created_ns < before_ns
        if any(not batch.unsure for batch in late):
            gone = {batch for batch in late if not batch.unsure}
            self.waiting = deque(batch for batch in self.waiting if batch not in gone)
        return late

    def clear(self) -> list[OutgoingBatch]:
        """Removes the waiting batches. Returns those that were not reported yet."""
        waiting, self.waiting = self.waiting, deque()
        return [batch for batch in waiting if not batch.done]
