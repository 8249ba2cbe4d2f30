"""The asyncio Producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, Unpack

from metamq.client.checks import check_callables, check_timeout
from metamq.client.opened_later import OpenedLater
from metamq.client.producer.outgoing import ManyDelivery
from metamq.client.producer.producer_api import ArrowTable, ProducerApi, ProducerSettings, table_tools
from metamq.client.producer.producer_core import FLUSH_TIMEOUT_S, ProducerCore, ProducerOptions
from metamq.client.settings import cluster_access, load
from metamq.client.typevars import T

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import OutgoingBatch
    from metamq.client.schemas.topic import Topic
    from metamq.security.config import SecurityConfig


class BaseProducer(OpenedLater, ProducerApi[T]):
    """Sends messages to topics; see metamq.Producer for the arguments.

    Not thread-safe: use it only in the loop that opens it.

        async with Producer() as producer:
            receipt = await producer.send("flights", b"...")

    `send` and `send_many` are plain functions that never block the loop; their results are awaitable. They raise
    BufferFull if the buffer is full: call `await producer.drain()` now and then, as with asyncio's StreamWriter.
    """

    def __init__(
        self,
        zookeeper: str | None = None,
        *,
        encode: Callable[[T], bytes] | None = None,
        config: str | None = None,
        root: str | None = None,
        security: SecurityConfig | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        check_callables(encode=encode)
        self._options = load(ProducerOptions, "producer", file=config, arguments=settings, others=type(self))
        self._access = cluster_access(zookeeper, root, config, security)
        self._encode = encode
        self._set_transactions(False)
        self._closed = False

    async def open(self) -> Self:
        """Connects to ZooKeeper; `async with` calls it. Raises ConnectError, or ConfigError on the second call."""
        self._open_once()
        self._core = ProducerCore(self._options, asyncio.get_running_loop(), wait_s=0)
        await self._core.open(self._access)
        return self

    async def send_table(self, topic: str | Topic[Any], table: ArrowTable) -> ManyDelivery:
        """Accepts the rows of a table; see metamq.Producer.send_table. Await the result to know that they are stored.

        Waits, as drain() does, while the buffer is full. Another thread reads the table, except in a transaction.
        """
        self._check_usable()
        tools = table_tools()
        name, rows = await asyncio.to_thread(tools.rows_of, topic, table)
        if self._has_transactions:
            sent: ManyDelivery | None = self._send_many_in(name, lambda: tools.messages_in(rows))
            if sent is not None:
                return sent
        config = await self._core.open_topic(name)
        pieces = tools.batches_of(rows, config, self._core.options)
        parts: list[OutgoingBatch] = []
        while (batches := await asyncio.to_thread(next, pieces, None)) is not None:
            await self._core.drain()
            self._core.accumulator.add_batches(name, batches)
            parts += batches
        return ManyDelivery(self._core, parts)

    async def flush(self, timeout: float | None = FLUSH_TIMEOUT_S) -> None:
        """Waits until all accepted messages are stored. Raises the first failure, or Timeout.

        `timeout` is in seconds; None waits without limit.
        """
        self._check_usable()
        check_timeout("timeout", timeout)
        await self._core.flush(timeout)

    async def drain(self) -> None:
        """Waits until the buffer is below half of `buffer_bytes`. Cancel-safe."""
        self._check_usable()
        await self._core.drain()

    async def close(self, timeout: float | None = FLUSH_TIMEOUT_S) -> None:
        """Flushes and closes. Further calls do nothing. Raises as `flush`, after everything is closed."""
        check_timeout("timeout", timeout)
        if self._opened and not self._closed:
            self._closed = True
            await self._core.close(timeout)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()
