"""The PUTs to one broker id: which batches go into the next, and what comes back when the connection breaks.

What an answer means for a batch is the sender's business (metamq.client.sender), and so is where it goes then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metamq.client.outgoing import OutgoingBatch
from metamq.client.partition_queue import PartitionQueue
from metamq.client.transport import BrokerConnection
from metamq.errors import MetamqError, ProtocolError
from metamq.wire import status
from metamq.wire.commands import Command, PutEntry, PutResult, unpack_list
from metamq.wire.connection import Response

if TYPE_CHECKING:
    from metamq.client.sender import Sender

log = logging.getLogger("metamq.client")

INFLIGHT_REQUESTS = 8
"""On one connection."""
PUT_BYTES = 2 * 1024 * 1024
"""A PUT takes no further batch above this."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """One PUT under way."""

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
        self._connecting = False
        self.last_error: MetamqError | None = None

    @property
    def blocked(self) -> bool:
        """Whether nothing can be sent now, to whichever partition."""
        if len(self._sent) >= INFLIGHT_REQUESTS:
            return True
        return bool(self._ready) and (self._connection is None or not self._connection.alive)

    @property
    def backed_up(self) -> Iterable[PartitionQueue]:
        """The queues with batches that cannot be sent yet."""
        return self._ready

    def enqueue(self, queue: PartitionQueue) -> None:
        """The queue has something to send."""
        self._ready[queue] = None

    def look_up(self) -> None:
        """Another one may be the master now."""
        self._connection = None

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
        now_s = time.monotonic()
        batches = self._pick(now_s)
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

    def _pick(self, now_s: float) -> list[tuple[PartitionQueue, OutgoingBatch]]:
        """The batches of the next PUT, from the partitions in turn."""
        picked: list[tuple[PartitionQueue, OutgoingBatch]] = []
        size = 0
        for queue in list(self._ready):
            del self._ready[queue]
            while size < PUT_BYTES and queue.sendable(now_s):
                try:
                    batch = queue.next_batch(self._sender.codec, now_s)
                except MetamqError as error:  # such as a limit that only the encoded batch is seen to exceed
                    self._sender.settle(queue, queue.waiting[0], error)
                    continue
                except Exception as error:  # of a codec, or no memory: this batch's alone
                    self._sender.settle(queue, queue.waiting[0], MetamqError(f"a batch cannot be encoded: {error!r}"))
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
        response = done.result()
        try:
            results = _results(response, len(sent.batches))
        except ProtocolError as protocol_error:
            log.warning("broker %d: %s", self.broker_id, protocol_error)
            sent.connection.abort()
            self._lost(sent, protocol_error)
            return
        del self._sent[sent]
        for (queue, batch), result in zip(sent.batches, results, strict=True):
            if isinstance(result, MetamqError):
                self._sender.refused(queue, batch, result)
            else:
                self._sender.stored(queue, batch, result)
        self._sender.on_room()

    def _lost(self, sent: _Sent, error: MetamqError) -> None:
        """The connection broke: everything under way on it goes back, in order."""
        self._sent.pop(sent, None)
        self.last_error = error
        for queue, batch in sent.batches:
            # A connection that breaks whenever it is written to is not to keep us busy.
            queue.pause(sent.sent_at_s)
            self._sender.back(queue, batch, unsure=True)

    def tick(self, now_s: float, request_timeout_s: float) -> None:
        """Gives up on a connection that does not answer, and tries again what waits."""
        for sent in list(self._sent):
            if now_s - sent.sent_at_s > request_timeout_s:
                log.warning(
                    "broker %d did not answer a PUT within %g s: reconnecting", self.broker_id, request_timeout_s
                )
                sent.connection.abort()
                break
        self.pump()


def _results(response: Response, count: int) -> list[PutResult | MetamqError]:
    """What became of each batch of a PUT. Raises ProtocolError."""
    if response.status != status.OK:
        return [status.decode_error(response.status, response.header)] * count
    results = unpack_list(PutResult, response.header)
    if len(results) != count:
        raise ProtocolError(f"a PUT of {count} batches was answered with {len(results)} results")
    return [
        result if result.status == status.OK else status.decode_error(result.status, result.error) for result in results
    ]
