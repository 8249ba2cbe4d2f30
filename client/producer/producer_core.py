"""The implementation of the producer: accepts messages from any thread, sends them from one loop.

The blocking and the asyncio Producer are thin APIs over this core; so both have every feature.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metamq.client.checks import check_ranges
from metamq.client.forks import register_for_forks
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.first_contact import open_client_session
from metamq.client.net.inboxes import topic_or_inbox
from metamq.client.producer.accumulator import Accumulator
from metamq.client.producer.outgoing import OutgoingBatch, forget_locks
from metamq.client.producer.partitioner import Partitioner, partitioner_named
from metamq.client.producer.producer_health import BlockFigures, Outcomes, ProducerHealth, health_of
from metamq.client.producer.sender import Sender
from metamq.errors import ClosedError, ConnectError, ForkedError, MetamqError, Timeout, TopicNotFound
from metamq.wire.commands import Command
from metamq.wire.compression import codec_named
from metamq.wire.limits import BATCH_BYTES_MAX, BATCH_TARGET_BYTES, MESSAGE_BYTES_MAX
from metamq.words import count

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess
    from metamq.zk.cluster.topics import TopicConfig
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.client")

FLUSH_TIMEOUT_S = 35.0
"""The default timeout of flush() and close(), in seconds. With the default of `delivery_timeout_s`, messages fail
first."""
FAILURES_MAX = 1000
RESOLVE_RETRY_S = 0.2
ASK_AGAIN_S = 1.0
"""Seconds between two questions to a broker that did not answer a dbtx block."""
ASK_TIMEOUT_S = 5.0
_DOCTOR = "Check that the brokers are up with `metamq doctor`."
BUSY_LINGER_NS = 50_000_000
"""Nanoseconds that a batch grows, with or without linger, while other batches wait to be sent."""


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """A producer's settings. The constructor validates them."""

    linger_ms: float = 0
    """Milliseconds that a batch waits for more messages. With 0, batches still grow while others are in flight."""
    batch_bytes: int = BATCH_TARGET_BYTES
    """The size in bytes at which a batch is closed."""
    buffer_bytes: int = 64 * 1024 * 1024
    """The most bytes of messages that are accepted and not acknowledged. Above it `send` waits or raises BufferFull."""
    max_message_bytes: int = MESSAGE_BYTES_MAX
    """The largest message in bytes; above it `send` raises MessageTooLarge. The topic's own limit applies, too."""
    compression: str | None = None
    """The codec: None, "lz4" or "zstd"."""
    partitioner: str | Partitioner = "key_hash"
    """The choice of a partition: "key_hash", "round_robin", or a callable (topic, key, partition count) -> index."""
    delivery_timeout_s: float = 30.0
    """Seconds after which a message that is not acknowledged fails with DeliveryTimeout."""
    request_timeout_s: float = 10.0
    """Seconds after which the producer reconnects to a broker that does not answer."""

    def __post_init__(self) -> None:
        limits = {
            "linger_ms": (0, 60_000),
            "batch_bytes": (1, BATCH_BYTES_MAX // 2),
            "buffer_bytes": (1024, 1 << 40),
            "max_message_bytes": (1, MESSAGE_BYTES_MAX),
            "delivery_timeout_s": (0.001, 86_400),
            "request_timeout_s": (0.05, 3_600),
        }
        check_ranges("producer", self, limits, real="linger_ms delivery_timeout_s request_timeout_s")
        codec_named(self.compression)
        partitioner_named(self.partitioner)


class ProducerCore:
    """The core of one producer. `send` and `send_many` of its accumulator are thread-safe; the rest is for the loop."""

    def __init__(self, options: ProducerOptions, loop: asyncio.AbstractEventLoop, *, wait_s: float | None) -> None:
        self.loop = loop
        self.wait_s = wait_s
        """Seconds that `send` waits for capacity in the buffer; None means without limit."""
        self.options = options
        self._thread = threading.get_ident()
        self._awake = False
        self._hurried_ns = 0
        self._lingering = False
        """True while a timer runs for the oldest open batch."""
        self._forked = False
        self._failures: list[OutgoingBatch] = []
        self._outcomes: dict[str, Outcomes] = {}
        self.blocks = BlockFigures()
        """The messages of dbtx blocks."""
        self._unreached: dict[int, str] = {}
        """The broker ids that requests of dbtx blocks were sent to; with the reason that one does not answer, or ""."""
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._drained: list[asyncio.Future[None]] = []
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._session: Session | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._codec = codec_named(options.compression)
        self.accumulator = Accumulator(
            batch_bytes=options.batch_bytes,
            buffer_bytes=options.buffer_bytes,
            message_bytes_max=options.max_message_bytes,
            partitioner=partitioner_named(options.partitioner),
            wake=self.wake,
            wait_s=wait_s,
            owner=self,
        )
        register_for_forks(self)

    async def open(self, access: ClusterAccess) -> None:
        """Connects to ZooKeeper. Raises ConnectError."""
        self._thread = threading.get_ident()
        self._session = await open_client_session(access)
        self.cluster = ClusterClient(self._session, changed=self._cluster_changed)
        self.sender = Sender(
            self.cluster,
            self._codec,
            delivery_timeout_s=self.options.delivery_timeout_s,
            request_timeout_s=self.options.request_timeout_s,
        )
        self.sender.on_done = self._done
        self.sender.on_capacity = self._pump
        self.sender.on_topic_lost = self._topic_lost
        self._ticker = asyncio.ensure_future(self.sender.run())

    def _cluster_changed(self) -> None:
        self.sender.follow()
        self.wake()

    def wake(self) -> None:
        """Schedules the sending of new messages. Thread-safe, also under the accumulator's lock."""
        if not self._awake:
            self._awake = True
            self.in_loop(self._pump)

    def hurry(self) -> None:
        """Sends without lingering, because a caller waits for a delivery. Thread-safe."""
        if self.options.linger_ms:
            self._hurried_ns = time.monotonic_ns() + 1
            self.wake()

    def is_loop_thread(self) -> bool:
        """Returns True in the thread of the producer's loop."""
        return threading.get_ident() == self._thread

    def check_not_inside(self) -> None:
        """Raises ConfigError in code that interrupts a `send` of this thread (a signal handler) and must not wait."""
        self.accumulator.check_not_inside()

    def in_loop(self, callback: Callable[..., object], *args: object) -> None:
        """Runs a callback in the loop. Thread-safe. Raises ForkedError in a fork."""
        if self._forked:
            raise ForkedError("producer")
        if threading.get_ident() == self._thread:
            self.loop.call_soon(callback, *args)
        else:
            self.loop.call_soon_threadsafe(callback, *args)

    def _pump(self) -> None:
        self._awake = False
        for topic in self.accumulator.unresolved():
            if topic not in self._resolving:
                self._resolving[topic] = asyncio.ensure_future(self._resolve(topic))
        self._refresh_resolved()
        begun_before_ns = self._begun_before_ns()
        busy_before_ns = min(begun_before_ns, time.monotonic_ns() - BUSY_LINGER_NS)
        taken = self.accumulator.take(
            begun_before_ns=begun_before_ns, busy=self.sender.busy(), busy_before_ns=busy_before_ns
        )
        self.sender.add(taken)
        self.sender.pump()

    def _begun_before_ns(self) -> int:
        """Returns the time before which a batch to take must have begun: its linger is over, or a caller waits."""
        now_ns = time.monotonic_ns() + 1
        if not self.options.linger_ms:
            return now_ns
        linger_ns = int(self.options.linger_ms * 1e6)
        first_ns = self.accumulator.first_open_ns()
        if first_ns is not None and first_ns + linger_ns > now_ns and not self._lingering:
            self._lingering = True
            self.loop.call_later((first_ns + linger_ns - now_ns) / 1e9 + 0.0001, self._lingered)
        return max(now_ns - linger_ns, self._hurried_ns)

    def _lingered(self) -> None:
        self._lingering = False
        self._pump()

    def _refresh_resolved(self) -> None:
        """Passes changed configurations, for example with added partitions, to the accumulator."""
        for topic, buffer in list(self.accumulator.buffers.items()):
            config = self.cluster.configs.get(topic)
            if buffer.config is None or buffer.config is config:
                continue
            if config is None:  # deleted; it may be created again, so the next message reads it again
                self._drop(topic, TopicNotFound(topic))
            elif config.id == buffer.config.id:
                self._failed(self.accumulator.resolved(config))
            else:
                self._drop(topic, _recreated(topic))

    async def open_topic(self, topic: str) -> TopicConfig:
        """Returns the configuration of a topic, after earlier messages for it have their partitions. Raises
        TopicNotFound, ConnectError."""
        config = await topic_or_inbox(self.cluster, topic)
        self._failed(self.accumulator.open_topic(config))
        return config

    async def _resolve(self, topic: str) -> None:
        deadline = self.loop.time() + self.options.delivery_timeout_s
        try:
            while True:
                try:
                    self._failed(self.accumulator.resolved(await topic_or_inbox(self.cluster, topic)))
                    break
                except ConnectError as error:
                    if self.loop.time() > deadline:
                        self._drop(topic, error)
                        return
                    await asyncio.sleep(RESOLVE_RETRY_S)
                except MetamqError as error:
                    self._drop(topic, error)
                    return
        finally:
            del self._resolving[topic]
        self._pump()

    def _drop(self, topic: str, error: MetamqError) -> None:
        """Fails the messages of a topic that were accepted and not passed to the sender."""
        for batch in self.accumulator.forget(topic):
            batch.complete(-1, error)
            self._done(batch)

    def _topic_lost(self, topic: str, topic_id: str, error: TopicNotFound) -> None:
        buffer = self.accumulator.buffers.get(topic)
        if buffer is not None and buffer.config is not None and buffer.config.id == topic_id:
            self._drop(topic, error)

    def _done(self, batch: OutgoingBatch) -> None:
        self.accumulator.finished(batch)
        if batch.error is not None:
            self._failed([batch])
        else:
            self._count(batch)
        if self._drained and self._is_drained():
            for waiting in self._drained:
                if not waiting.done():
                    waiting.set_result(None)
            self._drained.clear()

    def _failed(self, batches: list[OutgoingBatch]) -> None:
        """Keeps the failures for the next flush() to raise. Logs only those that exceed FAILURES_MAX."""
        for batch in batches:
            self._count(batch)
            if len(self._failures) >= FAILURES_MAX:
                self._failures = [failed for failed in self._failures if not failed.seen]
            if len(self._failures) < FAILURES_MAX:
                self._failures.append(batch)
            else:
                what = count(batch.count, "message")
                log.error("not stored: %s for %s: %s", what, batch.name, batch.error, extra={"topic": batch.topic})

    def _count(self, batch: OutgoingBatch) -> None:
        self._outcomes.setdefault(batch.topic, Outcomes()).count(batch)

    async def flush(self, timeout_s: float | None) -> None:
        """Waits until all messages that were accepted before are stored or have failed.

        Raises Timeout, or the first failure since the last flush that no Delivery has reported. Its notes name other
        failures.
        """
        try:
            async with asyncio.timeout(timeout_s):
                batches = self._outstanding()
                await self._wait_for(batches)
                if any(not batch.count for batch in batches):  # placeholders: their messages are in other batches now
                    await self._wait_for(self._outstanding())
        except TimeoutError:
            raise Timeout(f"flush() of {self._waiting()}", timeout_s or 0, hint=_DOCTOR) from None
        failed, self._failures = self._failures, []
        errors = [batch.error for batch in failed if batch.error is not None and not batch.seen]
        if errors:
            first = errors[0]
            for text in dict.fromkeys(map(str, errors[1:])):
                if text != str(first):
                    first.add_note(f"Also not stored: {text}")
            raise first

    def _outstanding(self) -> list[OutgoingBatch]:
        with self.accumulator.lock:
            return [batch for batch in self.accumulator.outstanding if not batch.done]

    def health(self) -> ProducerHealth:
        """Returns the state of the producer, without requests. Thread-safe."""
        return health_of(
            self._outstanding(),
            dict(self._outcomes),
            self.accumulator.buffered_bytes,
            self.sender,
            self.blocks,
            dict(self._unreached),
        )

    def note_answer(self, broker_id: int, problem: str) -> None:
        """Notes that a broker has answered a dbtx block, or the reason that it has not: then it is asked again until it
        answers. A service that is not ready begins no block that would find that out. In the loop."""
        self._unreached[broker_id] = problem
        if problem and broker_id not in self._asking and self._session is not None:
            asking = self._asking[broker_id] = asyncio.ensure_future(self._ask_until_answered(broker_id))
            asking.add_done_callback(lambda _asking: self._asking.pop(broker_id, None))

    async def _ask_until_answered(self, broker_id: int) -> None:
        while self._unreached[broker_id]:
            await asyncio.sleep(ASK_AGAIN_S)
            with contextlib.suppress(MetamqError):
                connection = await self.cluster.connection(broker_id)
                await connection.request(Command.OFFSETS, [], timeout_s=ASK_TIMEOUT_S)  # about no partition
                self._unreached[broker_id] = ""

    def _waiting(self) -> str:
        """Describes the messages that are not stored yet, and the last errors."""
        counts: Counter[str] = Counter()
        for batch in self._outstanding():
            counts[batch.topic] += batch.messages
        what = ", ".join(f"{count(number, 'message')} for topic {topic!r}" for topic, number in counts.items())
        reasons = "; ".join(sorted(self.sender.problems()))
        return what + (f" (last error: {reasons})" if reasons else "")

    async def _wait_for(self, batches: list[OutgoingBatch]) -> None:
        left = len(batches)
        if not left:
            return
        all_done: asyncio.Future[None] = self.loop.create_future()

        def one_done(_batch: OutgoingBatch) -> None:
            nonlocal left
            left -= 1
            if left == 0 and not all_done.done():
                all_done.set_result(None)

        for batch in batches:
            batch.add_callback(one_done)
        self._hurried_ns = time.monotonic_ns() + 1
        self._pump()
        try:
            await all_done
        finally:
            for batch in batches:
                if batch.callbacks is not None and one_done in batch.callbacks:
                    batch.callbacks.remove(one_done)

    def _is_drained(self) -> bool:
        return self.accumulator.buffered_bytes <= self.options.buffer_bytes // 2

    async def drain(self) -> None:
        """Waits until the buffer is below half of its limit."""
        if not self._is_drained():
            waiting: asyncio.Future[None] = self.loop.create_future()
            self._drained.append(waiting)
            self._hurried_ns = time.monotonic_ns() + 1
            self._pump()
            await waiting

    async def close(self, timeout_s: float | None) -> None:
        """Refuses further messages, flushes, closes. Messages that are not stored by then fail with ClosedError."""
        if self._session is None:
            return
        self.accumulator.close()
        try:
            await self.flush(timeout_s)
        finally:
            session, self._session = self._session, None
            if session is not None:
                await self._shut_down(session)

    async def _shut_down(self, session: Session) -> None:
        for batch in self._outstanding():
            error = ClosedError("producer", "its messages were not acknowledged in time")
            batch.complete(-1, error.with_unknown_outcome() if batch.attempts else error)
            self._done(batch)
        tasks = [self._ticker, *self._resolving.values(), *self._asking.values()]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        await self.sender.close()
        await self.cluster.close()
        await session.close()

    def forked(self) -> None:
        """Closes the copy in a fork's child: it cannot be used any more."""
        forget_locks()
        self._forked = True
        self._session = None
        self.blocks = BlockFigures()  # the lock of the former one may be held
        self.accumulator.forked(ForkedError("producer"))


def _recreated(topic: str) -> TopicNotFound:
    return TopicNotFound(
        topic, hint="It was deleted and created again while messages for it waited to be sent. Send them again."
    )
