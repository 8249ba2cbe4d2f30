"""The state of a producer, the result of `producer.health()`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import OutgoingBatch
    from metamq.client.producer.sender import Sender


@dataclass(frozen=True, slots=True)
class TopicHealth:
    """The messages of one topic. Messages of transactions are not counted."""

    waiting: int
    """Messages that are accepted and not acknowledged."""
    oldest_s: float
    """Seconds since the oldest of them was accepted; 0: none waits."""
    stored: int
    """Messages that were stored since the start of the producer."""
    failed: int
    last_error: str
    """The error of the last batch that failed, or ""."""


@dataclass(frozen=True, slots=True)
class BrokerHealth:
    """The requests to one broker id."""

    unanswered: int
    """PUT requests without an answer."""
    slowest_s: float
    """Seconds since the oldest of them was sent; 0: none."""
    last_error: str
    """The reason that batches wait, or "". It is empty again when a batch is stored."""


@dataclass(frozen=True, slots=True)
class ProducerHealth:
    """The state of one producer."""

    topics: Mapping[str, TopicHealth]
    brokers: Mapping[int, BrokerHealth]
    """By broker id; the brokers that batches were sent to."""
    buffered_bytes: int
    """Bytes of closed batches that are not acknowledged; `buffer_bytes` is the limit."""


@dataclass(slots=True)
class Outcomes:
    """The messages of one topic that are stored or have failed."""

    stored: int = 0
    failed: int = 0
    last_error: str = ""

    def count(self, batch: OutgoingBatch) -> None:
        """Counts a batch that is done."""
        if batch.error is None:
            self.stored += batch.count
        else:
            self.failed += batch.count or 1  # at least: messages without a partition do not know their number
            self.last_error = str(batch.error)


def health_of(
    waiting: Sequence[OutgoingBatch], outcomes: Mapping[str, Outcomes], buffered_bytes: int, sender: Sender | None
) -> ProducerHealth:
    """Returns the state from the batches that are not done, and the totals by topic."""
    messages: dict[str, int] = {}
    begun_ns: dict[str, int] = {}
    for batch in waiting:
        messages[batch.topic] = messages.get(batch.topic, 0) + batch.messages
        begun_ns[batch.topic] = min(begun_ns.get(batch.topic, batch.created_ns), batch.created_ns)
    now_ns, now_s = time.monotonic_ns(), time.monotonic()
    topics = {
        topic: TopicHealth(
            waiting=messages.get(topic, 0),
            oldest_s=(now_ns - begun_ns[topic]) / 1e9 if topic in begun_ns else 0.0,
            stored=known.stored,
            failed=known.failed,
            last_error=known.last_error,
        )
        for topic in sorted({*outcomes, *messages})
        for known in (outcomes.get(topic, Outcomes()),)
    }
    brokers: dict[int, BrokerHealth] = {}
    for broker_id, broker in sorted((sender.brokers if sender is not None else {}).items()):
        since_s = broker.unanswered_since_s
        brokers[broker_id] = BrokerHealth(
            unanswered=len(since_s), slowest_s=now_s - min(since_s, default=now_s), last_error=broker.problem
        )
    return ProducerHealth(topics, brokers, buffered_bytes)
