"""The messages of a branch before they go to its broker: batches by partition. No I/O."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from metamq.client.net.branches import Encoded
from metamq.client.producer.outgoing import MESSAGE_OVERHEAD_BYTES, CheckedMessage, OutgoingBatch, codec_of, size_of
from metamq.client.producer.topic_buffer import TopicBuffer, add_message, too_large
from metamq.errors import ConfigError
from metamq.wire.columns import encode
from metamq.wire.commands import PutEntry
from metamq.wire.limits import BATCH_COUNT_MAX, ENTRIES_TARGET
from metamq.zk.names import partition_name

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import AnyMessage
    from metamq.client.producer.partitioner import Partitioner
    from metamq.wire.compression import Codec
    from metamq.zk.cluster.topics import TopicConfig

Place = tuple[str, str, int, int]
"""Topic, topic id, broker id, index."""


OPEN_BYTES_MAX = 16 * 1024 * 1024
"""Limit on the bytes of batches that are not full. With many partitions they could exceed a frame, and use much memory.
Their number has a limit, too: each is an entry in a header."""


class _Route(NamedTuple):
    """The partitions for the messages of one topic."""

    topic: TopicBuffer
    places: list[Place]
    """All partitions, by their numbers in the topic."""
    free: list[Place]
    """The partitions that messages without a key use in turns."""


@dataclass(eq=False)
class Routes:
    """A producer's settings and the partitions of its topics: made once per configuration, not per transaction.

    `only`: the broker ids that messages may go to; None: all.
    """

    batch_bytes: int
    message_bytes_max: int
    partitioner: Partitioner
    codec: Codec
    only: Collection[int] | None
    _known: dict[str, _Route] = field(default_factory=dict, init=False)

    def of(self, config: TopicConfig) -> _Route:
        """Returns the topic's route."""
        known = self._known.get(config.topic)
        if known is not None and known.topic.config is config:
            return known
        topic = TopicBuffer(config.topic, self.message_bytes_max)
        topic.configure(config, self.message_bytes_max)
        places = [(config.topic, config.id, *place) for place in topic.places]
        free = [place for place in places if self.only is None or place[2] in self.only]
        made = self._known[config.topic] = _Route(topic, places, free or places[:1])
        return made


class Staging:
    """The messages of one transaction that its brokers do not have yet. For one loop."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._open: dict[Place, OutgoingBatch] = {}
        self._open_bytes = 0
        self._full: dict[int, list[tuple[Place, OutgoingBatch]]] = {}
        self._turn: dict[str, int] = {}
        self.taken: Counter[int] = Counter()
        """Messages by broker id. PREPARE sends the number: the broker notices a lost message."""
        self.began_ns = time.monotonic_ns()
        self._given: dict[str, tuple[int, int]] = {}
        """By topic: the messages that were given to brokers, and their bytes."""

    def by_topic(self) -> dict[str, tuple[int, int]]:
        """Returns the number of messages of each topic, and their bytes before compression. Any thread; while the
        transaction is open, a batch that moves may be missing."""
        found = dict(self._given)
        full = [batch for batches in list(self._full.values()) for _place, batch in list(batches)]
        for batch in [*list(self._open.values()), *full]:
            found[batch.topic] = _added(found.get(batch.topic), batch)
        return found

    def add_many(self, config: TopicConfig, messages: Sequence[AnyMessage], start: int) -> int:
        """Takes messages from `start` on, up to one that fills a batch; returns the index of the next.

        Raises the errors of add().
        """
        route = self._routes.of(config)
        if start == 0 and self._add_values(route, messages):
            return len(messages)
        for index in range(start, len(messages)):
            if self._add(route, messages[index]) in self._full:
                return index + 1
        return len(messages)

    def add(self, config: TopicConfig, message: AnyMessage) -> int:
        """Takes a message; returns the id of the broker that it goes to: the caller then sends its full batches.

        Raises MessageTooLarge, PartitionNotFound, and ConfigError if the partition is at another broker.
        """
        return self._add(self._routes.of(config), message)

    def _add(self, route: _Route, message: AnyMessage) -> int:
        value, key, headers, partition, timestamp_us = (
            CheckedMessage(message) if isinstance(message, bytes) else message
        )
        size = size_of(value, key, headers)
        if size > route.topic.limit_bytes:
            raise too_large(route.topic, size)
        number = route.topic.number_of(key, partition, self._routes.partitioner)
        place = route.places[number] if number is not None else self._next(route)
        topic, _topic_id, broker_id, index = place
        if self._routes.only is not None and broker_id not in self._routes.only:
            raise ConfigError(
                f"partition {partition_name(broker_id, index)} of {topic!r} is not at broker {min(self._routes.only)}",
                hint="A branch is at one broker. `producer.transaction()` spans any number of brokers.",
            )
        batch = self._open.get(place)
        if batch is None:
            batch = self._open[place] = OutgoingBatch(topic)
        self.taken[broker_id] += 1
        before = batch.size
        add_message(batch, value, key, headers, timestamp_us, size)
        self._grown(batch.size - before)
        if self._is_full(batch.size, len(batch.values)):
            self._close([place])
        return broker_id

    def _add_values(self, route: _Route, messages: Sequence[AnyMessage]) -> bool:
        """Takes all of the messages if they have only values and fill no batch. Returns False if it takes none."""
        values = [one for one in messages if isinstance(one, bytes)]
        if not values or len(values) < len(messages) or self._routes.only is not None:
            return False
        sizes = list(map(len, values))
        if max(sizes) + MESSAGE_OVERHEAD_BYTES > route.topic.limit_bytes:
            return False
        place = self._next(route)
        batch = self._open.get(place)
        if batch is None:  # it gets a message in any case: from here on _add() takes all of them
            batch = self._open[place] = OutgoingBatch(place[0])
        size = sum(sizes) + MESSAGE_OVERHEAD_BYTES * len(values)
        has_columns = any(column is not None for column in (batch.keys, batch.headers, batch.timestamps))
        if has_columns or self._is_full(batch.size + size, len(batch.values) + len(values)):
            return False
        self.taken[place[2]] += len(values)
        batch.values.extend(values)  # type: ignore[attr-defined]  # as in add_message()
        batch.size += size
        self._grown(size)
        return True

    def _grown(self, size: int) -> None:
        self._open_bytes += size
        if self._open_bytes >= OPEN_BYTES_MAX or len(self._open) >= ENTRIES_TARGET:
            self._close(list(self._open))

    def _close(self, places: Iterable[Place]) -> None:
        """Moves these batches to the full ones; some may be there already."""
        for place in places:
            batch = self._open.pop(place, None)
            if batch is not None:
                self._open_bytes -= batch.size
                self._full.setdefault(place[2], []).append((place, batch))

    def _is_full(self, size: int, messages: int) -> bool:
        return size >= self._routes.batch_bytes or messages >= BATCH_COUNT_MAX

    def _next(self, route: _Route) -> Place:
        """Returns the partition whose turn it is; it changes with each batch, not with each message."""
        free, topic = route.free, route.topic.topic
        turn = self._turn.get(topic)
        if turn is None:  # a random start: most transactions are small, and would all go to the first partition
            turn = random.randrange(len(free))
        elif free[turn % len(free)] not in self._open:
            turn += 1
        self._turn[topic] = turn
        return free[turn % len(free)]

    @property
    def full_at(self) -> list[int]:
        """The broker ids that have a full batch."""
        return list(self._full)

    def full(self, broker_id: int) -> list[Encoded]:
        """Returns and removes the full batches for a broker, in order. Raises MessageTooLarge."""
        return [self._encoded(place, batch) for place, batch in self._full.pop(broker_id, [])]

    def rest(self, broker_id: int) -> list[Encoded]:
        """Returns and removes all batches for a broker: they fit one request. Raises MessageTooLarge."""
        self._close([place for place in self._open if place[2] == broker_id])
        return self.full(broker_id)

    def _encoded(self, place: Place, batch: OutgoingBatch) -> Encoded:
        topic, topic_id, _broker_id, index = place
        self._given[topic] = _added(self._given.get(topic), batch)
        encoded = encode(
            batch.values, base_timestamp_us=batch.timestamp_us, keys=batch.keys, timestamps_us=batch.timestamps,
            headers=batch.headers, codec=codec_of(topic, self._routes.codec),
        )  # fmt: skip
        return Encoded(PutEntry(topic, topic_id, index, len(encoded)), encoded, len(batch.values))


def _added(known: tuple[int, int] | None, batch: OutgoingBatch) -> tuple[int, int]:
    messages, size = known or (0, 0)
    return messages + batch.messages, size + batch.size
