"""Stores messages that come as columns: whole batches for chosen partitions, or for any, without work per message.

The caller has done the work of a Producer's `send` for single messages: it has formed batches and chosen partitions, as
metamq.spark_consumers.sink does. After that the batches take the normal way, see metamq.client.producer.sender: each is
stored once, in order, whatever is repeated. `send` and the methods of Shipment are for any thread except the loop's;
the rest is for the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from metamq.client.producer.sender import Sender
from metamq.errors import MetamqError, closed_client

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.client.producer.batching import ColumnarBatch
    from metamq.client.producer.outgoing import OutgoingBatch
    from metamq.wire.compression import Codec

BUFFER_BYTES = 32 * 1024 * 1024


class Shipment:
    """The batches of one caller. Either all of them are stored in the end, or the first error is raised.

    Repetitions on the way are stored once. A second shipment of the same messages stores them again.
    """

    def __init__(self, sender: ColumnarSender) -> None:
        self._sender = sender
        self._pending = 0
        self._error: MetamqError | None = None

    def send(self, batches: Sequence[ColumnarBatch]) -> None:
        """Accepts batches. Waits while too many bytes are not acknowledged. Raises the error of an earlier batch."""
        sender = self._sender
        with sender.changed:
            sender.changed.wait_for(lambda: self._is_over() or sender.buffered_bytes < sender.buffer_bytes)
            self._check()
            self._pending += len(batches)
            sender.buffered_bytes += sum(batch.size for batch in batches)
        sender.loop.call_soon_threadsafe(sender.take, self, batches)

    def wait(self) -> None:
        """Returns once all batches are stored. Raises the first error; other batches may still be stored."""
        with self._sender.changed:
            self._sender.changed.wait_for(lambda: self._is_over() or not self._pending)
            self._check()

    def _is_over(self) -> bool:
        return self._error is not None or self._sender.closed

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._sender.closed:
            raise closed_client("producer")

    def done(self, batch: OutgoingBatch) -> None:
        """Notes that a batch is stored or has failed. The caller holds the sender's lock."""
        self._pending -= 1
        self._error = self._error or batch.error


class ColumnarSender:
    """Sends batches to their brokers, for any number of shipments."""

    def __init__(
        self,
        cluster: ClusterClient,
        codec: Codec,
        *,
        delivery_timeout_s: float,
        request_timeout_s: float = 10.0,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Created in the loop. `cluster` must call changed_cluster() when brokers join or leave."""
        self.loop = asyncio.get_running_loop()
        self.buffer_bytes = buffer_bytes
        self.buffered_bytes = 0
        self.closed = False
        self.changed = threading.Condition()
        self._shipments: dict[OutgoingBatch, Shipment] = {}
        self._sender = Sender(
            cluster, codec, delivery_timeout_s=delivery_timeout_s, request_timeout_s=request_timeout_s
        )
        self._sender.on_done = self._done
        self._sender.on_capacity = self._sender.pump
        self._ticker = asyncio.ensure_future(self._sender.run())

    def changed_cluster(self) -> None:
        """Checks the connections after brokers have joined or left."""
        self._sender.follow()
        self._sender.pump()

    def take(self, shipment: Shipment, batches: Sequence[ColumnarBatch]) -> None:
        """Queues batches that a shipment has counted."""
        self._shipments |= dict.fromkeys(batches, shipment)
        self._sender.add(list(batches))
        self._sender.pump()

    def _done(self, batch: OutgoingBatch) -> None:
        shipment = self._shipments.pop(batch)
        with self.changed:
            self.buffered_bytes -= batch.size
            shipment.done(batch)
            self.changed.notify_all()

    async def close(self) -> None:
        """Closes the sender. Waiting callers get ClosedError; batches that are not stored may never be."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        await self._sender.close()
