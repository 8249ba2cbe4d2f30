"""The blocking Producer."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from metamq.client.background import background
from metamq.client.checks import check_callables, check_seconds, check_timeout
from metamq.client.producer.outgoing import ManyDelivery
from metamq.client.producer.producer_api import ArrowTable, ProducerApi, ProducerSettings, table_tools
from metamq.client.producer.producer_core import FLUSH_TIMEOUT_S, ProducerCore, ProducerOptions
from metamq.client.settings import cluster_access, load
from metamq.client.typevars import T
from metamq.errors import ConfigError, ForkedError

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import OutgoingBatch
    from metamq.client.schemas.topic import Topic
    from metamq.security.config import SecurityConfig

log = logging.getLogger("metamq.client")


AT_EXIT_FLUSH_S = 5.0


class BaseProducer(ProducerApi[T]):
    """Sends messages to topics. Thread-safe: one Producer serves a whole process.

    zookeeper:  "host:port,host:port/chroot"; the default is $METAMQ_ZOOKEEPER, the TOML file, then 127.0.0.1:2181.
    root:       the root znode of metamq; the default is $METAMQ_ROOT, the TOML file, then /meta.
    encode:     converts a value to bytes; without it values are bytes.
    on_full:    the action of `send` if the buffer is full: "block" (for `full_timeout_s` seconds, None means without
                limit) or "raise" BufferFull.
    config:     a TOML file; its [producer] section has the settings below.
    settings:   linger_ms, batch_bytes, buffer_bytes, max_message_bytes, compression, partitioner, delivery_timeout_s,
                request_timeout_s; see metamq.types.ProducerOptions.

    Every message is stored once, also if a request is repeated. Messages with a key, and those sent to a partition by
    name, are stored in the order of `send` within their partition, and so within a key. Messages with neither go to any
    partition, a batch at a time: the order is kept within a batch, but not between the batches of a partition.
    Leave the `with` block, or call close(), to be sure that all is stored; both raise the errors of failed messages.
    Raises ConnectError if ZooKeeper cannot be reached, and ConfigError for a wrong setting.
    """

    def __init__(
        self,
        zookeeper: str | None = None,
        *,
        encode: Callable[[T], bytes] | None = None,
        on_full: Literal["block", "raise"] = "block",
        full_timeout_s: float | None = None,
        config: str | None = None,
        root: str | None = None,
        security: SecurityConfig | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        if on_full not in ("block", "raise"):
            raise ConfigError(f"`on_full` is {on_full!r}", hint="Choose 'block' or 'raise'.")
        check_callables(encode=encode)
        check_seconds("full_timeout_s", full_timeout_s)
        options = load(ProducerOptions, "producer", file=config, arguments=settings, others=type(self))
        self._encode = encode
        self._set_transactions(False)
        self._closed = True
        self._background = background()
        wait_s = 0.0 if on_full == "raise" else full_timeout_s
        self._core = ProducerCore(options, self._background.loop, wait_s=wait_s)
        self._background.run(self._core.open(cluster_access(zookeeper, root, config, security)))
        self._closed = False
        _unclosed.add(self)

    def send_table(self, topic: str | Topic[Any], table: ArrowTable) -> ManyDelivery:
        """Accepts the rows of a table: of Arrow, Polars, pandas, DuckDB, or a metamq.scan(). Thread-safe.

        Its columns are those of metamq.scan(): `value`, and optionally `key`, `headers`, `timestamp` and `partition`. A
        null means the same as no column. `topic` and `offset` are ignored; any other column is an error. `encode=` is
        not applied. The partitioner is called once for each different key. With a Topic of Arrow the columns are the
        fields of its schema, and a message has many rows.

        The table is read while the buffer has capacity, so it may be larger than the memory; this waits for capacity,
        whatever `on_full` is. In a transaction all rows are in memory. Raises ConfigError for a wrong column,
        TopicNotFound, PartitionNotFound, MessageTooLarge; earlier rows may be stored then.
        """
        self._check_usable()
        self._core.check_not_inside()
        tools = table_tools()
        name, rows = tools.rows_of(topic, table)
        if self._has_transactions:
            sent: ManyDelivery | None = self._send_many_in(name, lambda: tools.messages_in(rows))
            if sent is not None:
                return sent
        config = self._background.run(self._core.open_topic(name))
        parts: list[OutgoingBatch] = []
        for batches in tools.batches_of(rows, config, self._core.options):
            self._background.run(self._core.drain())
            self._core.accumulator.add_batches(name, batches)
            parts += batches
        return ManyDelivery(self._core, parts)

    def flush(self, timeout: float | None = FLUSH_TIMEOUT_S) -> None:
        """Waits until all accepted messages are stored. Thread-safe.

        Raises the first failure since the last flush, with notes of others, or Timeout after `timeout` seconds. Raises
        ConfigError in a signal handler that interrupts a send(): the wait would never end. close() and
        Delivery.result() do the same.
        """
        self._check_usable()
        check_timeout("timeout", timeout)
        self._core.check_not_inside()
        self._background.run(self._core.flush(timeout))

    def close(self, timeout: float | None = FLUSH_TIMEOUT_S) -> None:
        """Flushes and closes. Further calls do nothing. Raises as `flush`, after everything is closed. Thread-safe."""
        check_timeout("timeout", timeout)
        if self._closed:
            return
        self._core.check_not_inside()
        self._closed = True
        _unclosed.discard(self)
        if isinstance(self._core.accumulator.closed_by, ForkedError):
            raise self._core.accumulator.closed_by
        self._background.run(self._core.close(timeout))

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(self._core.accumulator.closed_by, ForkedError):
            return  # a child process that leaves its parent's block
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            with contextlib.suppress(Exception):  # the caller must see the interrupt
                self.close(AT_EXIT_FLUSH_S)
            return
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or isinstance(self._core.accumulator.closed_by, ForkedError):
            return
        try:
            _warn_unclosed(self)
        finally:  # the warning may be raised as an error
            core = self._core
            self._background.call_soon(lambda: _closing.add(asyncio.ensure_future(_close_quietly(core))))


def _warn_unclosed(producer: BaseProducer[Any]) -> None:
    warnings.warn("a Producer was not closed: use `with` or close()", ResourceWarning, source=producer, stacklevel=3)


_closing: set[asyncio.Future[None]] = set()
"""References to the tasks that close producers; no other object refers to them."""


async def _close_quietly(core: ProducerCore) -> None:
    try:
        await core.close(AT_EXIT_FLUSH_S)
    except Exception as error:
        log.error("messages of a Producer that was not closed were not stored: %s", _reasons(error))


_unclosed: weakref.WeakSet[BaseProducer[Any]] = weakref.WeakSet()


@atexit.register
def _flush_unclosed() -> None:
    for producer in list(_unclosed):
        if isinstance(producer._core.accumulator.closed_by, ForkedError):
            continue
        try:
            _warn_unclosed(producer)
        except ResourceWarning as warning:  # warnings are errors in this process; the messages must be stored anyway
            log.error("%s", warning)
        try:
            producer.close(AT_EXIT_FLUSH_S)
        except Exception as error:
            log.error("messages were not stored before the process ended: %s", _reasons(error))


def _reasons(error: Exception) -> str:
    return "; ".join([str(error), *getattr(error, "__notes__", ())])
