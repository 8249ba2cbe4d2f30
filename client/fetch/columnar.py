"""Stores messages that come as columns: whole batches for chosen partitions, or for any, without a look at a message.

What `send` of a Producer does for single messages, gathering them and finding their partitions, the caller has done:
see metamq.spark_consumers.sink.batching. From here on they go the way of every batch, see
metamq.client.producer.sender: once, in order, whatever is repeated. `send` and a Shipment's methods are for any thread
but the loop's, the rest for the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from metamq.client.net.cluster import ClusterClient
from metamq.client.producer.outgoing import OutgoingBatch
from metamq.client.producer.sender import Sender
from metamq.errors import MetamqError, closed_client
from metamq.wire.columns import ReadyColumns
from metamq.wire.compression import Codec

BUFFER_BYTES = 32 * 1024 * 1024


class ColumnarBatch(OutgoingBatch):
    """Messages whose columns are made already. `place`: (broker id, index) of their partition; None: any."""

    __slots__ = ("columns",)

    def __init__(self, topic: str, columns: ReadyColumns, size: int, place: tuple[int, int] | None) -> None:
        super().__init__(topic)
        self.columns = columns
        self.size = size
        if place is not None:
            self.broker_id, self.partition = place

    @property
    def messages(self) -> int:
        """As of every batch."""
        return self.columns.messages

    def encode(self, codec: Codec, producer_id: int, sequence: int) -> bytearray:
        """As of every batch."""
        self.sequence = sequence
        self.encoded = self.columns.encode(
            base_timestamp_us=self.timestamp_us, codec=codec, producer_id=producer_id, sequence=sequence
        )
        return self.encoded


class Shipment:
    """The batches of one caller: all of them are stored in the end, or it raises what became of the first that is not.

    What is repeated on the way is stored once; a second shipment of the same messages stores them again.
    """

    def __init__(self, sender: ColumnarSender) -> None:
        self._sender = sender
        self._pending = 0
        self._error: MetamqError | None = None

    def send(self, batches: Sequence[ColumnarBatch]) -> None:
        """Takes batches; waits while too much is under way. Raises what an earlier one failed with."""
        sender = self._sender
        with sender.changed:
            sender.changed.wait_for(lambda: self._is_over() or sender.buffered_bytes < sender.buffer_bytes)
            self._check()
            self._pending += len(batches)
            sender.buffered_bytes += sum(batch.size for batch in batches)
        sender.loop.call_soon_threadsafe(sender.take, self, batches)

    def wait(self) -> None:
        """Returns once all are stored. Raises the first error; then others may be stored, or be on their way."""
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
        """One is stored or has failed; under the sender's lock."""
        self._pending -= 1
        self._error = self._error or batch.error


class ColumnarSender:
    """Brings batches to their brokers, for any number of shipments."""

    def __init__(
        self,
        cluster: ClusterClient,
        codec: Codec,
        *,
        delivery_timeout_s: float,
        request_timeout_s: float = 10.0,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """In the loop. `cluster` is to call changed_cluster() when brokers come or go."""
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
        """Brokers have come or gone."""
        self._sender.follow()
        self._sender.pump()

    def take(self, shipment: Shipment, batches: Sequence[ColumnarBatch]) -> None:
        """Batches that a shipment has counted."""
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
        """Whoever waits gets ClosedError; what is not stored may never be."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        await self._sender.close()
