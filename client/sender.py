"""Sends a producer's batches: which go into the next PUT, what an answer means, what is sent again.

Theory of operation
-------------------
Each partition has a queue of batches in order. A batch gets the next sequence number of the partition's producer id
when it is first encoded, and keeps both for every repetition: the broker stores it once, however often it comes, and
refuses one that comes before its predecessor. Up to INFLIGHT_BATCHES of a partition are under way at once, which is
as many as a broker remembers. So order holds and nothing is doubled, through lost connections and lost answers.

    answer                        what is done
    stored                        the batch is complete
    SequenceGap                   back into the queue; if it is still the first when all others are back, then its
                                  predecessor failed for good and was never stored, so nothing after it was: a new
                                  producer id starts at 0
    retriable error, lost link    back into the queue, in order; sent again when all others are back
    any other error               the batch fails
    none within its time          the batch fails with DeliveryTimeout

Everything here runs in the producer's loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from metamq.client.cluster import Cluster
from metamq.client.outgoing import OutgoingBatch
from metamq.client.transport import BrokerConnection
from metamq.errors import DeliveryTimeout, MetamqError, SequenceGap, TopicNotFound
from metamq.wire import status
from metamq.wire.commands import Command, PutEntry, PutResult, unpack_list
from metamq.wire.compression import Codec
from metamq.wire.connection import Response

log = logging.getLogger("metamq.client")

INFLIGHT_BATCHES = 5
"""Of one partition; brokers remember as many of a producer's last batches."""
INFLIGHT_REQUESTS = 8
"""On one connection."""
PUT_BYTES = 2 * 1024 * 1024
"""A PUT takes no further batch above this."""
RETRY_PAUSE_S = 0.1
TICK_S = 0.1


class PartitionQueue:
    """The batches of one partition: waiting, in order, and under way, in order."""

    __slots__ = (
        "broker_id", "index", "inflight", "next_sequence", "paused_until", "producer_id", "recovering", "topic",
        "topic_id", "waiting",
    )  # fmt: skip

    def __init__(self, topic: str, topic_id: str, broker_id: int, index: int) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.broker_id = broker_id
        self.index = index
        self.waiting: deque[OutgoingBatch] = deque()
        self.inflight: deque[OutgoingBatch] = deque()
        self.paused_until = 0.0
        self.recovering = False
        """A batch came back: nothing is sent until all that are under way are back or stored."""
        self.producer_id = _new_producer_id()
        self.next_sequence = 0

    def sendable(self, now: float) -> bool:
        """Whether a batch may be sent now."""
        if self.recovering and not self.inflight:
            self._recover()
        free = len(self.inflight) < INFLIGHT_BATCHES and not self.recovering
        return free and bool(self.waiting) and now >= self.paused_until

    def next_batch(self, codec: Codec) -> OutgoingBatch:
        """Moves the first waiting batch to those under way, encoded."""
        batch = self.waiting.popleft()
        self.inflight.append(batch)
        if batch.encoded is None:
            batch.encode(codec, self.producer_id, self.next_sequence)
            self.next_sequence += 1
        batch.attempts += 1
        return batch

    def put_back(self, batch: OutgoingBatch) -> None:
        """Returns a batch that was under way to the queue, in its place."""
        self.inflight.remove(batch)
        self.recovering = True
        place = 0
        while place < len(self.waiting) and 0 <= self.waiting[place].sequence < batch.sequence:
            place += 1
        self.waiting.insert(place, batch)

    def _recover(self) -> None:
        """All that was under way is back. A gap before the very first: its predecessor was never stored."""
        self.recovering = False
        if self.waiting and self.waiting[0].gapped:
            self.producer_id = _new_producer_id()
            self.next_sequence = 0
            for batch in self.waiting:
                batch.encoded = None
                batch.sequence = -1
        for batch in self.waiting:
            batch.gapped = False


def _new_producer_id() -> int:
    return secrets.randbits(63) | 1


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """One PUT under way."""

    batches: list[tuple[PartitionQueue, OutgoingBatch]]
    sent_at: float
    connection: BrokerConnection


class BrokerSender:
    """The PUTs to one broker id."""

    def __init__(self, broker_id: int, sender: Sender) -> None:
        self.broker_id = broker_id
        self._sender = sender
        self._ready: dict[PartitionQueue, None] = {}
        self._sent: dict[_Sent, None] = {}
        self._connection: BrokerConnection | None = None
        self._connecting = False
        self.last_error: MetamqError | None = None

    @property
    def congested(self) -> bool:
        """Whether batches wait here: then open ones may as well grow."""
        return bool(self._ready)

    def enqueue(self, queue: PartitionQueue) -> None:
        """The queue has something to send."""
        self._ready[queue] = None

    def pump(self) -> None:
        """Sends what can be sent now."""
        if not self._ready or len(self._sent) >= INFLIGHT_REQUESTS:
            return
        if self._connection is not None and self._connection.alive:
            while len(self._sent) < INFLIGHT_REQUESTS and self._send_one(self._connection):
                pass
        elif not self._connecting:
            self._connecting = True
            self._sender.spawn(self._connect())

    async def _connect(self) -> None:
        try:
            self._connection = await self._sender.cluster.connection(self.broker_id)
        except MetamqError as error:
            self.last_error = error  # the tick tries again; the connections keep their own pauses
        finally:
            self._connecting = False
        if self._connection is not None and self._connection.alive:
            self.pump()

    def _send_one(self, connection: BrokerConnection) -> bool:
        """Sends one PUT; False when there is nothing that may be sent."""
        now = time.monotonic()
        batches = self._pick(now)
        if not batches:
            return False
        sent = _Sent(batches, now, connection)
        self._sent[sent] = None
        entries: list[PutEntry] = []
        bodies: list[bytes | bytearray | memoryview] = []
        for queue, batch in batches:
            assert batch.encoded is not None
            entries.append(PutEntry(queue.topic, queue.topic_id, queue.index, len(batch.encoded)))
            bodies.append(batch.encoded)
        try:
            future = connection.send(Command.PUT, entries, bodies)
        except MetamqError as error:
            self._lost(sent, error)
            return False
        future.add_done_callback(lambda done: self._answered(sent, done))
        return True

    def _pick(self, now: float) -> list[tuple[PartitionQueue, OutgoingBatch]]:
        """The batches of the next PUT, from the partitions in turn."""
        picked: list[tuple[PartitionQueue, OutgoingBatch]] = []
        size = 0
        for queue in list(self._ready):
            del self._ready[queue]
            while size < PUT_BYTES and queue.sendable(now):
                try:
                    batch = queue.next_batch(self._sender.codec)
                except MetamqError as error:  # the batch is over a limit only its encoding shows
                    self._sender.settle(queue, queue.inflight[-1], error)
                    continue
                picked.append((queue, batch))
                size += len(batch.encoded or b"")
            if queue.waiting:
                self._ready[queue] = None
            if size >= PUT_BYTES:
                break
        return picked

    def _answered(self, sent: _Sent, done: asyncio.Future[Response]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            assert isinstance(error, MetamqError)
            self._lost(sent, error)
            return
        del self._sent[sent]
        response = done.result()
        if response.status != status.OK:
            self._each(sent, [status.decode_error(response.status, response.header)] * len(sent.batches))
        else:
            self._each(sent, unpack_list(PutResult, response.header))
        self._sender.on_answer()

    def _each(self, sent: _Sent, results: Sequence[PutResult | MetamqError]) -> None:
        for (queue, batch), result in zip(sent.batches, results, strict=True):
            if isinstance(result, MetamqError):
                self._sender.failed(queue, batch, result)
            elif result.status == status.OK:
                self._sender.stored(queue, batch, result)
            else:
                self._sender.failed(queue, batch, status.decode_error(result.status, result.error))

    def _lost(self, sent: _Sent, error: MetamqError) -> None:
        """The connection broke: everything under way on it goes back, in order."""
        self._sent.pop(sent, None)
        self.last_error = error
        for queue, batch in sent.batches:
            queue.put_back(batch)
            self.enqueue(queue)

    def tick(self, now: float, request_timeout_s: float) -> None:
        """Gives up on a connection that does not answer, and tries again what waits."""
        for sent in list(self._sent):
            if now - sent.sent_at > request_timeout_s:
                log.warning(
                    "broker %d did not answer a PUT within %g s: reconnecting", self.broker_id, request_timeout_s
                )
                sent.connection.abort()
                break
        self.pump()


def _nothing(*_: object) -> None:
    pass


class Sender:
    """Brings batches to the brokers. Its owner sets the three callbacks."""

    def __init__(self, cluster: Cluster, codec: Codec, *, delivery_timeout_s: float, request_timeout_s: float) -> None:
        self.cluster = cluster
        self.codec = codec
        self._delivery_timeout_s = delivery_timeout_s
        self._request_timeout_s = request_timeout_s
        self._queues: dict[tuple[str, str, int, int], PartitionQueue] = {}
        self._brokers: dict[int, BrokerSender] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._rotation: dict[str, int] = {}
        self.on_done: Callable[[OutgoingBatch], None] = _nothing
        """A batch is stored or has failed for good."""
        self.on_answer: Callable[[], None] = _nothing
        """A broker answered: there may be room for more."""
        self.on_topic_lost: Callable[[str], None] = _nothing
        """A topic is not there any more, or is another one now."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine as a task of the sender's."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def congested(self) -> bool:
        """Whether batches wait to be sent."""
        return any(broker.congested for broker in self._brokers.values())

    def add(self, batches: list[OutgoingBatch]) -> None:
        """Queues batches; those without a partition take turns over the topic's."""
        for batch in batches:
            config = self.cluster.configs.get(batch.topic)
            if config is None:
                self._finish(batch, -1, TopicNotFound(batch.topic))
                continue
            if batch.partition < 0:
                places = [(b, i) for b in sorted(config.partitions) for i in range(config.partitions[b])]
                number = self._rotation.get(batch.topic, secrets.randbelow(len(places)))
                self._rotation[batch.topic] = number + 1
                batch.broker_id, batch.partition = places[number % len(places)]
            key = batch.topic, config.id, batch.broker_id, batch.partition
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = PartitionQueue(batch.topic, config.id, batch.broker_id, batch.partition)
            queue.waiting.append(batch)
            self._requeue(queue)

    def pump(self) -> None:
        """Sends what can be sent."""
        for broker in self._brokers.values():
            broker.pump()

    def stored(self, queue: PartitionQueue, batch: OutgoingBatch, result: PutResult) -> None:
        """The broker has the batch."""
        queue.inflight.remove(batch)
        self._finish(batch, result.base_offset, None)
        self._requeue(queue)

    def failed(self, queue: PartitionQueue, batch: OutgoingBatch, error: MetamqError) -> None:
        """The broker refused the batch: again, or never."""
        if isinstance(error, SequenceGap):
            batch.gapped = True
            queue.put_back(batch)
        elif isinstance(error, TopicNotFound) or error.retriable:
            queue.put_back(batch)
            queue.paused_until = time.monotonic() + RETRY_PAUSE_S
            self._brokers[queue.broker_id].last_error = error
            if isinstance(error, TopicNotFound):
                self.spawn(self._check_topic(queue, error))
        else:
            self.settle(queue, batch, error)
        self._requeue(queue)

    def settle(self, queue: PartitionQueue, batch: OutgoingBatch, error: MetamqError) -> None:
        """The batch failed for good."""
        queue.inflight.remove(batch)
        self._finish(batch, -1, error)

    async def _check_topic(self, queue: PartitionQueue, error: TopicNotFound) -> None:
        """The broker does not know the topic: it lags behind ZooKeeper, or the topic is gone or another one."""
        try:
            config = await self.cluster.topics.get_or_none(queue.topic)
        except MetamqError:
            return  # it is asked again after the pause
        if config is None or config.id != queue.topic_id:
            self.on_topic_lost(queue.topic)
            while queue.waiting:
                self._finish(queue.waiting.popleft(), -1, error)

    def _requeue(self, queue: PartitionQueue) -> None:
        if queue.waiting:
            broker = self._brokers.get(queue.broker_id)
            if broker is None:
                broker = self._brokers[queue.broker_id] = BrokerSender(queue.broker_id, self)
            broker.enqueue(queue)

    def _finish(self, batch: OutgoingBatch, base_offset: int, error: MetamqError | None) -> None:
        batch.complete(base_offset, error)
        self.on_done(batch)

    async def run(self) -> None:
        """Time-outs and retries, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            self._expire(time.time_ns())
            now = time.monotonic()
            for broker in list(self._brokers.values()):
                broker.tick(now, self._request_timeout_s)

    def _expire(self, now_ns: int) -> None:
        oldest_ns = now_ns - int(self._delivery_timeout_s * 1e9)
        for queue in self._queues.values():
            while queue.waiting and queue.waiting[0].created_ns < oldest_ns:
                batch = queue.waiting.popleft()
                self._finish(batch, -1, self._timeout(queue, batch))

    def _timeout(self, queue: PartitionQueue, batch: OutgoingBatch) -> DeliveryTimeout:
        last_error = self._brokers[queue.broker_id].last_error
        return DeliveryTimeout(
            f"a batch of {len(batch.values)} messages for {batch.name}",
            self._delivery_timeout_s,
            last_error.problem if last_error else "",
            outcome="unknown" if batch.attempts else "not_done",
        )

    async def close(self) -> None:
        """Ends the sender's tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
