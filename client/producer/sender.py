"""Sends a producer's batches: chooses the batches of the next PUT, and interprets the answers.

    answer                        action; partition_queue explains why no batch is lost or stored twice
    stored                        the batch is complete
    SequenceGap                   back into the queue; new numbers if its predecessor failed permanently
    TopicNotFound                 back into the queue, and ZooKeeper is read: the broker lags, or the topic is deleted
    Fenced                        back into the queue, and the master is looked up
    retriable, unknown outcome,   back into the queue, in order; sent again when all others are back
    broker stops, broken link
    any other error               the batch fails
    none within its time          the batch fails with DeliveryTimeout

Once ZooKeeper names another master, the sender does not wait for answers of the previous one: it may hang, and its
answers may be void. The unanswered batches go to the new master, which recognizes the batches that it has by their
numbers.

A partition or a broker for which batches wait, because they cannot be sent now, is *busy*: open batches for it may wait
and grow, and messages without a key go to other partitions. All code of this module runs in the producer's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Set
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from metamq.client.net.cluster import ClusterClient, Source
from metamq.client.producer.outgoing import Busy
from metamq.client.producer.partition_queue import PartitionQueue
from metamq.errors import (
    AuthenticationFailed,
    ClosedError,
    DeliveryTimeout,
    Fenced,
    MetamqError,
    PartitionNotFound,
    ProtocolError,
    SequenceGap,
    TopicNotFound,
)
from metamq.wire import status
from metamq.wire.commands import Command, PutEntry, PutResult
from metamq.wire.headers import unpack_list
from metamq.wire.limits import ENTRIES_TARGET
from metamq.words import count

if TYPE_CHECKING:
    from metamq.client.net.transport import BrokerConnection
    from metamq.client.producer.outgoing import OutgoingBatch
    from metamq.wire.compression import Codec
    from metamq.wire.connection import Response
    from metamq.zk.cluster.topics import TopicConfig

log = logging.getLogger("metamq.client")

INFLIGHT_REQUESTS = 8
"""The highest number of unanswered requests on one connection."""
PUT_BYTES = 2 * 1024 * 1024
"""A PUT of this size in bytes takes no further batch."""
RETRY_PAUSE_S = 0.1
TICK_S = 0.1
IDLE_TICK_S = 1.0
WARN_AFTER_S = 1.0


class RefusalVerdict(Enum):
    """The meaning of a refusal for the batch."""

    GAP = "its predecessor is missing"
    LOOK = "again, after a check that the topic exists"
    MOVE = "again, at the current master"
    AGAIN = "again, since it was not stored"
    UNSURE = "again, since it may be stored or not"
    NEVER = "it failed permanently"


_VERDICTS: tuple[tuple[type[MetamqError], RefusalVerdict], ...] = (
    (SequenceGap, RefusalVerdict.GAP),
    (TopicNotFound, RefusalVerdict.LOOK),
    (Fenced, RefusalVerdict.MOVE),
    (ClosedError, RefusalVerdict.UNSURE),  # the broker stops: batches that wait for a flush then are probably stored
)


def verdict_on(error: MetamqError) -> RefusalVerdict:
    """Returns the next step for a batch that a broker answered with `error`."""
    for kind, verdict in _VERDICTS:
        if isinstance(error, kind):
            return verdict
    if error.outcome == "unknown":
        return RefusalVerdict.UNSURE
    return RefusalVerdict.AGAIN if error.retriable else RefusalVerdict.NEVER


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """One unanswered PUT."""

    batches: list[tuple[PartitionQueue, OutgoingBatch]]
    sent_at_s: float
    connection: BrokerConnection


class BrokerSender:
    """The PUTs to one broker id."""

    def __init__(self, broker_id: int, sender: Sender) -> None:
        self.broker_id = broker_id
        self._sender = sender
        self._ready: dict[PartitionQueue, None] = {}
        self._sent: dict[_Sent, None] = {}
        self._connection: BrokerConnection | None = None
        self._last_connection: BrokerConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.last_error: MetamqError | None = None
        """The last error since a batch was stored."""
        self._failing_since_s: float | None = None
        self._warned = False

    @property
    def problem(self) -> str:
        """The reason that batches wait, or ""."""
        if self.last_error is not None:
            return self.last_error.problem
        delays = None if self._connection is None else self._connection.delays
        return delays.reason if delays is not None and delays.left_s else ""

    @property
    def unanswered_since_s(self) -> list[float]:
        """The times (time.monotonic) at which the unanswered PUTs were sent. Any thread."""
        return [sent.sent_at_s for sent in list(self._sent)]

    @property
    def blocked(self) -> bool:
        """True if nothing can be sent now, to any partition."""
        if len(self._sent) >= INFLIGHT_REQUESTS:
            return True
        return bool(self._ready) and (self._connection is None or not self._connection.alive)

    @property
    def backed_up(self) -> Iterable[PartitionQueue]:
        """The queues with batches that cannot be sent yet."""
        return self._ready

    def enqueue(self, queue: PartitionQueue) -> None:
        """Adds a queue that has batches to send."""
        self._ready[queue] = None

    def look_up(self) -> None:
        """Drops the connection, because another broker may be the master now."""
        self._connection = None

    def follow(self) -> None:
        """Checks the connections after brokers have joined or left."""
        for connection in {sent.connection for sent in self._sent}:
            if not self._is_current(connection):
                log.info("broker %d is not at %s any more", self.broker_id, connection.address)
                connection.abort()
        if self._connection is not None and not self._is_current(self._connection):
            self._connection = None
        if self._connecting is not None:  # the connection attempt may be to a broker that hangs
            self._connecting.cancel()
            self._connecting = None

    def _is_current(self, connection: BrokerConnection) -> bool:
        return self._sender.cluster.is_current(Source(self.broker_id), connection.address)

    def pump(self) -> None:
        """Sends the batches that can be sent now."""
        if not self._ready or len(self._sent) >= INFLIGHT_REQUESTS:
            return
        if self._connection is not None and self._connection.alive:
            while len(self._sent) < INFLIGHT_REQUESTS and self._send_one(self._connection):
                pass
        elif self._connecting is None:
            self._connecting = self._sender.spawn(self._connect())

    async def _connect(self) -> None:
        try:
            self._connection = await self._sender.cluster.connection(self.broker_id)
        except MetamqError as error:
            self.last_error = error  # the tick tries again; the connections have their own pauses
            if isinstance(error, AuthenticationFailed) and self._sender.cluster.connections.is_rejected:
                self._fail_waiting(error)
        self._connecting = None
        if self._connection is not self._last_connection:
            self._last_connection = self._connection
            self._sender.connection_changed(self.broker_id)
        if self._connection is not None and self._connection.alive:
            self.pump()

    def _fail_waiting(self, error: MetamqError) -> None:
        for queue in list(self._ready):
            while queue.waiting:
                self._sender.settle(queue, queue.waiting[0], error)
        self._ready.clear()

    def _send_one(self, connection: BrokerConnection) -> bool:
        """Sends one PUT. Returns False if no batch may be sent."""
        now_s = time.monotonic()
        batches = self._pick(now_s, connection.producer_prefix)
        if not batches:
            return False
        sent = _Sent(batches, now_s, connection)
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

    def _pick(self, now_s: float, producer_prefix: int) -> list[tuple[PartitionQueue, OutgoingBatch]]:
        """Returns the batches of the next PUT, taken from the partitions one after another."""
        picked: list[tuple[PartitionQueue, OutgoingBatch]] = []
        size = 0
        for queue in list(self._ready):
            del self._ready[queue]
            while size < PUT_BYTES and len(picked) < ENTRIES_TARGET and queue.sendable(now_s):
                try:
                    batch = queue.next_batch(self._sender.codec, now_s, producer_prefix)
                except MetamqError as error:  # for example a limit that only the encoded batch exceeds
                    self._sender.settle(queue, queue.waiting[0], error)
                    continue
                except Exception as error:  # a codec's error, or no memory: only this batch fails
                    self._sender.settle(queue, queue.waiting[0], MetamqError(f"a batch cannot be encoded: {error!r}"))
                    continue
                picked.append((queue, batch))
                size += len(batch.encoded or b"")
            if queue.waiting:
                self._ready[queue] = None
            if size >= PUT_BYTES or len(picked) >= ENTRIES_TARGET:
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
        response = done.result()
        try:
            results = _results(response, len(sent.batches))
        except ProtocolError as protocol_error:
            log.warning("broker %d: %s", self.broker_id, protocol_error, extra={"broker": self.broker_id})
            sent.connection.abort()
            self._lost(sent, protocol_error)
            return
        del self._sent[sent]
        for (queue, batch), result in zip(sent.batches, results, strict=True):
            if isinstance(result, MetamqError):
                self._sender.refused(queue, batch, result)
            else:
                self._sender.stored(queue, batch, result)
        self._sender.on_capacity()

    def _lost(self, sent: _Sent, error: MetamqError) -> None:
        """Puts all unanswered batches of a broken connection back, in order."""
        self._sent.pop(sent, None)
        self.last_error = error
        for queue, batch in sent.batches:
            # The pause limits the CPU time if a connection breaks at each write.
            queue.paused_until_s = max(queue.paused_until_s, sent.sent_at_s + RETRY_PAUSE_S)
            self._sender.back(queue, batch, unsure=True)

    @property
    def is_at_work(self) -> bool:
        """True if a PUT is unanswered, or batches wait for one."""
        return bool(self._sent or self._ready)

    def tick(self, now_s: float, request_timeout_s: float) -> None:
        """Closes a connection that does not answer, and tries again to send the waiting batches."""
        for sent in list(self._sent):
            if now_s - max(sent.sent_at_s, sent.connection.delays.ends_at_s) > request_timeout_s:
                problem = "broker %d did not answer a PUT within %g s: reconnecting"
                log.warning(problem, self.broker_id, request_timeout_s, extra={"broker": self.broker_id})
                sent.connection.abort()
                break
        self._warn(now_s)
        self.pump()

    def _warn(self, now_s: float) -> None:
        """Logs a broker that has failed for WARN_AFTER_S, long before the messages' time-out would report it."""
        if self.last_error is None or not self._ready:
            self._failing_since_s, self._warned = None, False
            return
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if not self._warned and now_s - self._failing_since_s >= WARN_AFTER_S:
            self._warned = True
            counts: Counter[str] = Counter()
            for queue in self._ready:
                counts[queue.topic] += sum(batch.messages for batch in queue.waiting)
            what = ", ".join(f"{count(number, 'message')} for topic {topic!r}" for topic, number in counts.items())
            fields = {"broker": self.broker_id, "topics": sorted(counts)}
            log.warning("broker %d: %s; %s wait", self.broker_id, self.last_error.problem, what, extra=fields)


def _results(response: Response, count: int) -> list[PutResult | MetamqError]:
    """Returns the result of each batch of a PUT. Raises ProtocolError."""
    if response.status != status.OK:
        return [status.decode_error(response.status, response.header)] * count
    results = unpack_list(PutResult, response.header)
    if len(results) != count:
        raise ProtocolError(f"a PUT of {count} batches was answered with {len(results)} results")
    return [
        result if result.status == status.OK else status.decode_error(result.status, result.error) for result in results
    ]


def _nothing(*_: object) -> None:
    pass


class Sender:
    """Sends batches to the brokers. Its owner sets the three callbacks."""

    def __init__(
        self, cluster: ClusterClient, codec: Codec, *, delivery_timeout_s: float, request_timeout_s: float
    ) -> None:
        self.cluster = cluster
        self.codec = codec
        self._delivery_timeout_s = delivery_timeout_s
        self._request_timeout_s = request_timeout_s
        self._queues: dict[tuple[str, str, int, int], PartitionQueue] = {}
        self._brokers: dict[int, BrokerSender] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._places: dict[str, tuple[TopicConfig, list[tuple[int, int]]]] = {}
        self._rotation: dict[str, int] = {}
        self._looking_at: set[str] = set()
        self._has_work = asyncio.Event()
        """Set while batches wait or are not answered; cleared late, by the next tick."""
        self.on_done: Callable[[OutgoingBatch], None] = _nothing
        """Called when a batch is stored or has failed."""
        self.on_capacity: Callable[[], None] = _nothing
        """Called when more may be sent: a broker has answered, or some time has passed."""
        self.on_topic_lost: Callable[[str, str, TopicNotFound], None] = _nothing
        """Called when the topic with this id does not exist any more."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine as a task that the sender owns."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def follow(self) -> None:
        """Checks the connections after brokers have joined or left."""
        for broker in self._brokers.values():
            broker.follow()

    def connection_changed(self, broker_id: int) -> None:
        """Notes a new connection to a broker id, perhaps to another replica, which may not know the producer ids."""
        for queue in self._queues.values():
            if queue.broker_id == broker_id:
                queue.established = False

    def busy(self) -> Busy:
        """Returns the places for which batches wait."""
        places: dict[str, set[tuple[int, int]]] = {}
        for broker in self._brokers.values():
            for queue in broker.backed_up:
                places.setdefault(queue.topic, set()).add((queue.broker_id, queue.index))
        return Busy({broker_id for broker_id, broker in self._brokers.items() if broker.blocked}, places)

    def add(self, batches: list[OutgoingBatch]) -> None:
        """Queues batches. Batches without a partition rotate over the topic's partitions."""
        for batch in batches:
            config = self.cluster.configs.get(batch.topic)
            if config is None:
                self._finish(batch, -1, TopicNotFound(batch.topic))
                continue
            if batch.partition < 0:
                batch.broker_id, batch.partition = self._next_place(config)
            key = batch.topic, config.id, batch.broker_id, batch.partition
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = PartitionQueue(batch.topic, config.id, batch.broker_id, batch.partition)
            queue.waiting.append(batch)
            self._has_work.set()
            self._requeue(queue)

    def _next_place(self, config: TopicConfig) -> tuple[int, int]:
        """Returns the next partition in the rotation without waiting batches, or just the next one."""
        known = self._places.get(config.topic)
        if known is None or known[0] is not config:
            places = [(b, i) for b in sorted(config.partitions) for i in range(config.partitions[b])]
            known = self._places[config.topic] = config, places
            self._rotation.setdefault(config.topic, secrets.randbelow(len(places)))
        places = known[1]
        first = number = self._rotation[config.topic]
        blocked = {broker_id for broker_id, broker in self._brokers.items() if broker.blocked}
        if not config.partitions.keys() <= blocked:  # otherwise no place is better, and there may be thousands
            in_turn = range(first, first + len(places))
            number = next((n for n in in_turn if self._is_free(config, places[n % len(places)], blocked)), first)
        self._rotation[config.topic] = number + 1
        return places[number % len(places)]

    def _is_free(self, config: TopicConfig, place: tuple[int, int], blocked: Set[int]) -> bool:
        queue = self._queues.get((config.topic, config.id, *place))
        return place[0] not in blocked and (queue is None or not queue.waiting)

    def pump(self) -> None:
        """Sends the batches that can be sent now."""
        for broker in list(self._brokers.values()):
            broker.pump()

    def stored(self, queue: PartitionQueue, batch: OutgoingBatch, result: PutResult) -> None:
        """Completes a batch that the broker has stored."""
        queue.stored(batch, time.monotonic())
        self._brokers[queue.broker_id].last_error = None
        self._finish(batch, result.base_offset, None)
        self._requeue(queue)

    def refused(self, queue: PartitionQueue, batch: OutgoingBatch, error: MetamqError) -> None:
        """Decides about a refused batch: it is sent again, or fails."""
        verdict = verdict_on(error)
        if verdict is RefusalVerdict.NEVER:
            self.settle(queue, batch, error)
            return
        if verdict is RefusalVerdict.GAP:
            batch.gapped = True
            self.back(queue, batch, unsure=False)
            return
        broker = self._brokers[queue.broker_id]
        broker.last_error = error
        queue.paused_until_s = time.monotonic() + RETRY_PAUSE_S
        self.back(queue, batch, unsure=verdict is RefusalVerdict.UNSURE or error.outcome == "unknown")
        if verdict is RefusalVerdict.MOVE:
            broker.look_up()
        elif verdict is RefusalVerdict.LOOK and queue.topic not in self._looking_at:
            self._looking_at.add(queue.topic)
            self.spawn(self._look(queue, error))

    def back(self, queue: PartitionQueue, batch: OutgoingBatch, *, unsure: bool) -> None:
        """Puts a batch back into its queue, or fails it if the partition is lost."""
        if queue.lost_by is not None:
            self.settle(queue, batch, queue.lost_by)
        else:
            queue.put_back(batch, unsure=unsure)
            self._requeue(queue)

    def settle(self, queue: PartitionQueue, batch: OutgoingBatch, error: MetamqError) -> None:
        """Fails a batch permanently."""
        queue.drop(batch)
        self._finish(batch, -1, error)
        if queue.lost_by is not None:
            self._forget_empty(queue)
        self._requeue(queue)

    async def _look(self, queue: PartitionQueue, error: MetamqError) -> None:
        """Checks in ZooKeeper why the broker does not know the topic: the broker lags, or the topic was deleted."""
        try:
            config = await self.cluster.topics.get_or_none(queue.topic)
        except MetamqError:
            return  # the check is repeated after the pause
        finally:
            self._looking_at.discard(queue.topic)
        if config is None or config.id != queue.topic_id:
            lost = TopicNotFound(
                queue.topic,
                hint="It was deleted, or created again, while messages for it were on their way. Send them again.",
            )
            for other in list(self._queues.values()):
                if (other.topic, other.topic_id) == (queue.topic, queue.topic_id):
                    self._lose(other, lost)
            self.on_topic_lost(queue.topic, queue.topic_id, lost)
        elif isinstance(error, PartitionNotFound) and queue.index >= config.partitions.get(queue.broker_id, 0):
            self._lose(queue, error)

    def _lose(self, queue: PartitionQueue, error: TopicNotFound) -> None:
        queue.lost_by = error
        for batch in queue.clear():
            self._finish(batch, -1, error)
        self._forget_empty(queue)

    def _forget_empty(self, queue: PartitionQueue) -> None:
        if not queue.inflight:
            self._queues.pop((queue.topic, queue.topic_id, queue.broker_id, queue.index), None)

    def _requeue(self, queue: PartitionQueue) -> None:
        if queue.waiting:
            broker = self._brokers.get(queue.broker_id)
            if broker is None:
                broker = self._brokers[queue.broker_id] = BrokerSender(queue.broker_id, self)
            broker.enqueue(queue)

    def _finish(
        self, batch: OutgoingBatch, base_offset: int, error: MetamqError | None, *, ghost: bool = False
    ) -> None:
        if batch.done:  # it was reported earlier, when its time was over
            batch.encoded = None
            if error is None:
                log.warning(
                    "%s: stored after the delivery had timed out: %s", batch.name, count(batch.count, "message")
                )
            return
        if error is not None and batch.unsure:  # an earlier attempt may have stored it
            error = error.with_unknown_outcome()
        batch.complete(base_offset, error, keep_encoded=ghost)
        self.on_done(batch)

    async def run(self) -> None:
        """Handles time-outs and retries until the task is cancelled. Without batches there are none."""
        while True:
            with contextlib.suppress(TimeoutError):  # a Ctrl-C may have interrupted the call that wakes the producer
                async with asyncio.timeout(IDLE_TICK_S):
                    await self._has_work.wait()
            await asyncio.sleep(TICK_S)
            try:
                self._tick()
            except Exception:  # a bug in metamq: without time-outs and retries callers would wait without end
                log.exception("the producer's time-outs and retries failed; they continue")

    def _tick(self) -> None:
        self._expire(time.monotonic_ns())
        now_s = time.monotonic()
        for broker in list(self._brokers.values()):
            broker.tick(now_s, self._request_timeout_s)
        self.on_capacity()
        if not self._at_work() and not any(broker.is_at_work for broker in self._brokers.values()):
            self._has_work.clear()

    def _at_work(self) -> list[PartitionQueue]:
        return [queue for queue in self._queues.values() if queue.inflight or queue.waiting]

    def _expire(self, now_ns: int) -> None:
        before_ns = now_ns - int(self._delivery_timeout_s * 1e9)
        for queue in self._at_work():
            for batch in queue.expire(before_ns):
                self._finish(batch, -1, self._timeout(queue, batch), ghost=batch.unsure)

    def _timeout(self, queue: PartitionQueue, batch: OutgoingBatch) -> DeliveryTimeout:
        broker = self._brokers.get(queue.broker_id)
        reason = broker.problem if broker is not None else ""
        is_quota = broker is not None and broker.last_error is None and reason
        return DeliveryTimeout(
            f"a batch of {count(batch.messages, 'message')} for {batch.name}",
            self._delivery_timeout_s,
            reason,
            hint="Raise `delivery_timeout_s`, or let an administrator raise the quota." if is_quota else "",
            outcome="unknown" if batch.unsure else "not_done",
        )

    @property
    def brokers(self) -> dict[int, BrokerSender]:
        """The brokers that batches were sent to. Any thread."""
        return dict(self._brokers)

    def problems(self) -> set[str]:
        """Returns the problems that prevent batches from being stored now."""
        return {broker.problem for broker in self._brokers.values()} - {""}

    async def close(self) -> None:
        """Ends the sender's tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
