"""The messages of a branch before they go to its broker: gathered into batches by partition. No I/O."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from metamq.client.branches import Encoded
from metamq.client.outgoing import OutgoingBatch
from metamq.client.partitioner import Partitioner
from metamq.client.topic_buffer import TopicBuffer, add_message, size_of, too_large
from metamq.errors import ConfigError
from metamq.wire.columns import encode
from metamq.wire.commands import PutEntry
from metamq.wire.compression import Codec
from metamq.wire.limits import BATCH_COUNT_MAX
from metamq.zk.names import partition_name
from metamq.zk.topics import TopicConfig

Place = tuple[str, str, int, int]
"""Topic, topic id, broker id, index."""


class Message(NamedTuple):
    """A message as it was checked."""

    value: bytes
    key: bytes | None = None
    headers: Mapping[str, bytes] | None = None
    partition: str | None = None
    timestamp_us: int | None = None


class Staging:
    """What was sent in the branches of one transaction and is not at its broker yet.

    `only`: the broker ids that it may go to; None: any. Messages without a key take turns over the partitions there.
    """

    def __init__(
        self,
        batch_bytes: int,
        message_bytes_max: int,
        partitioner: Partitioner,
        codec: Codec,
        only: Collection[int] | None,
    ) -> None:
        self._batch_bytes = batch_bytes
        self._message_bytes_max = message_bytes_max
        self._partitioner = partitioner
        self._codec = codec
        self._only = only
        self._open: dict[Place, OutgoingBatch] = {}
        self._full: dict[int, list[tuple[Place, OutgoingBatch]]] = {}
        self._turn: dict[str, int] = {}
        self.taken: Counter[int] = Counter()
        """Messages by broker id. Each is to arrive: PREPARE tells how many, so that one that was lost is noticed."""
        self._topics: dict[str, TopicBuffer] = {}
        """What is known of where their messages go."""

    def add(self, config: TopicConfig, message: Message) -> int:
        """Takes a message; returns the broker id that it goes to, whose batches are then to be looked at.

        Raises MessageTooLarge, PartitionNotFound, and ConfigError when its partition is at another broker.
        """
        buffer = self._topics.get(config.topic)
        if buffer is None or buffer.config is not config:
            buffer = self._topics[config.topic] = TopicBuffer(config.topic, self._message_bytes_max)
            buffer.configure(config, self._message_bytes_max)
        size = size_of(message.value, message.key, message.headers)
        if size > buffer.limit_bytes:
            raise too_large(buffer, size)
        number = buffer.number_of(message.key, message.partition, self._partitioner)
        broker_id, index = buffer.places[number] if number is not None else self._next(buffer)
        if self._only is not None and broker_id not in self._only:
            raise ConfigError(
                f"partition {partition_name(broker_id, index)} of {config.topic!r} is not at broker {min(self._only)}",
                hint="A branch is at one broker. `producer.transaction()` spans as many as it takes.",
            )
        place = config.topic, config.id, broker_id, index
        batch = self._open.get(place)
        if batch is None:
            batch = self._open[place] = OutgoingBatch(config.topic)
        self.taken[broker_id] += 1
        add_message(batch, message.value, message.key, message.headers, message.timestamp_us, size)
        if batch.size >= self._batch_bytes or len(batch.values) >= BATCH_COUNT_MAX:
            self._full.setdefault(broker_id, []).append((place, self._open.pop(place)))
        return broker_id

    def _next(self, buffer: TopicBuffer) -> tuple[int, int]:
        """The partition whose turn it is; it changes with each batch, not with each message."""
        places = [place for place in buffer.places if self._only is None or place[0] in self._only]
        if not places:
            return buffer.places[0]
        turn = self._turn.get(buffer.topic)
        if turn is None:  # somewhere: most transactions are small, and would all go to the same partition
            turn = self._turn[buffer.topic] = random.randrange(len(places))
        place = places[turn % len(places)]
        if (buffer.topic, buffer.config.id if buffer.config else "", *place) not in self._open:
            self._turn[buffer.topic] = turn + 1
            place = places[(turn + 1) % len(places)]
        return place

    def full(self, broker_id: int) -> list[Encoded]:
        """The batches for a broker that are full, in order. Raises MessageTooLarge."""
        return [self._encoded(place, batch) for place, batch in self._full.pop(broker_id, [])]

    def rest(self, broker_id: int) -> list[Encoded]:
        """All that is left for a broker. Raises MessageTooLarge."""
        found = self.full(broker_id)
        for place in [place for place in self._open if place[2] == broker_id]:
            found.append(self._encoded(place, self._open.pop(place)))
        return found

    def _encoded(self, place: Place, batch: OutgoingBatch) -> Encoded:
        topic, topic_id, _broker_id, index = place
        encoded = encode(
            batch.values, base_timestamp_us=batch.timestamp_us, keys=batch.keys, timestamps_us=batch.timestamps,
            headers=batch.headers, codec=self._codec,
        )  # fmt: skip
        return Encoded(PutEntry(topic, topic_id, index, len(encoded)), encoded, len(batch.values))
