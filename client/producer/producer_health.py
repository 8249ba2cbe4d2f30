"""The state of a producer, the result of `producer.health()`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import OutgoingBatch
    from metamq.client.producer.sender import Sender


@dataclass(frozen=True, slots=True)
class TopicHealth:
    """The messages of one topic: those of `send`, or those of dbtx blocks."""

    waiting: int
    """Messages that are accepted and not acknowledged. Of dbtx: those of open blocks."""
    oldest_s: float
    """Seconds since the oldest of them was accepted; 0: none waits. Of dbtx: since its block began."""
    stored: int
    """Messages that were stored since the start of the producer. Of dbtx: those of blocks that committed."""
    failed: int
    """Messages that were not stored. Of dbtx: those of blocks that raised, whatever the error was."""
    last_error: str
    """The error of the last batch or block that failed, or ""."""
    stored_bytes: int = 0
    """Bytes of the stored messages before compression, as `buffer_bytes` counts them."""


@dataclass(frozen=True, slots=True)
class BrokerHealth:
    """The requests to one broker id."""

    unanswered: int
    """PUT requests without an answer."""
    slowest_s: float
    """Seconds since the oldest of them was sent; 0: none."""
    last_error: str
    """The reason that batches wait, or that dbtx blocks fail, or "". It is empty again when a batch is stored. After a
    block that failed, the producer asks the broker each second, and it is empty again when the broker answers."""


@dataclass(frozen=True, slots=True)
class ProducerHealth:
    """The state of one producer."""

    topics: Mapping[str, TopicHealth]
    """The messages of `send`. Those of transaction() and tpc_begin() are not counted."""
    brokers: Mapping[int, BrokerHealth]
    """By broker id; the brokers that batches were sent to."""
    buffered_bytes: int
    """Bytes of closed batches that are not acknowledged; `buffer_bytes` is the limit."""
    dbtx: Mapping[str, TopicHealth] = field(default_factory=dict)
    """The messages of dbtx blocks, by topic."""


@dataclass(slots=True)
class Outcomes:
    """The messages of one topic that are stored or have failed."""

    stored: int = 0
    failed: int = 0
    last_error: str = ""
    stored_bytes: int = 0

    def count(self, batch: OutgoingBatch) -> None:
        """Counts a batch that is done."""
        if batch.error is None:
            self.stored += batch.count
            self.stored_bytes += batch.size
        else:
            self.failed += batch.count or 1  # at least: messages without a partition do not know their number
            self.last_error = str(batch.error)

    def health(self, waiting: int, begun_ns: int | None) -> TopicHealth:
        """Returns the state of the topic. `begun_ns`: the monotonic time of the oldest message that waits."""
        oldest_s = 0.0 if begun_ns is None else (time.monotonic_ns() - begun_ns) / 1e9
        return TopicHealth(waiting, oldest_s, self.stored, self.failed, self.last_error, self.stored_bytes)


class Staged(Protocol):
    """The messages of one dbtx block."""

    began_ns: int
    """The monotonic time of its begin."""

    def by_topic(self) -> Mapping[str, tuple[int, int]]:
        """Returns the number of messages, and their bytes. Any thread."""
        ...


class BlockFigures:
    """The messages of a producer's dbtx blocks, by topic. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call health() in a thread that has it
        self._outcomes: dict[str, Outcomes] = {}
        self._open: dict[Staged, None] = {}

    def begin(self, staged: Staged) -> None:
        """Notes a block that begins."""
        with self._lock:
            self._open[staged] = None

    def end(self, staged: Staged, error: BaseException | None) -> None:
        """Counts a block that has committed, or has failed. Only the first call for a block counts."""
        with self._lock:
            if staged not in self._open:
                return
            del self._open[staged]
            for topic, (messages, size) in staged.by_topic().items():
                outcomes = self._outcomes.setdefault(topic, Outcomes())
                if error is None:
                    outcomes.stored += messages
                    outcomes.stored_bytes += size
                else:
                    outcomes.failed += messages
                    outcomes.last_error = str(error) or type(error).__name__

    def health(self) -> dict[str, TopicHealth]:
        """Returns the state of each topic."""
        waiting: dict[str, int] = {}
        begun_ns: dict[str, int] = {}
        with self._lock:
            for staged in self._open:
                for topic, (messages, _size) in staged.by_topic().items():
                    waiting[topic] = waiting.get(topic, 0) + messages
                    begun_ns[topic] = min(begun_ns.get(topic, staged.began_ns), staged.began_ns)
            return {
                topic: self._outcomes.get(topic, Outcomes()).health(waiting.get(topic, 0), begun_ns.get(topic))
                for topic in sorted({*self._outcomes, *waiting})
            }


def health_of(
    waiting: Sequence[OutgoingBatch],
    outcomes: Mapping[str, Outcomes],
    buffered_bytes: int,
    sender: Sender | None,
    blocks: BlockFigures,
    unreached: Mapping[int, str],
) -> ProducerHealth:
    """Returns the state from the batches that are not done, the totals by topic, and the dbtx blocks. `unreached`: the
    broker ids that requests of blocks were sent to, with the reason that one does not answer."""
    messages: dict[str, int] = {}
    begun_ns: dict[str, int] = {}
    for batch in waiting:
        messages[batch.topic] = messages.get(batch.topic, 0) + batch.messages
        begun_ns[batch.topic] = min(begun_ns.get(batch.topic, batch.created_ns), batch.created_ns)
    topics = {
        topic: outcomes.get(topic, Outcomes()).health(messages.get(topic, 0), begun_ns.get(topic))
        for topic in sorted({*outcomes, *messages})
    }
    now_s = time.monotonic()
    brokers = {broker_id: BrokerHealth(0, 0.0, problem) for broker_id, problem in unreached.items()}
    for broker_id, broker in (sender.brokers if sender is not None else {}).items():
        since_s = broker.unanswered_since_s
        brokers[broker_id] = BrokerHealth(
            unanswered=len(since_s),
            slowest_s=now_s - min(since_s, default=now_s),
            last_error=broker.problem or unreached.get(broker_id, ""),
        )
    return ProducerHealth(topics, dict(sorted(brokers.items())), buffered_bytes, blocks.health())
