"""A log of delayed messages, read from its first message that is not moved. Only the broker's loop uses it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.delays.levels import left_after_us, ready_us
from metamq.broker.log_once import LogOnce
from metamq.client.delayed import DELAY_MAX_S, DUE, LEFT, PARTITION
from metamq.client.fetch.message_batch import MessageBatch
from metamq.errors import MetamqError, UndecodableBatch
from metamq.security.rights import DELAYED_SUFFIX
from metamq.wire.batch import walk
from metamq.zk.names import is_partition, partition_name
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from metamq.broker.data.partition import Partition
    from metamq.broker.log.store import FilePart
    from metamq.client.model import Message

TOPIC = "metamq-topic"
"""The header with a message's topic, at a level."""
TOPIC_ID = "metamq-topic-id"
"""The header with the id of that topic, at a level: a new topic of its name does not get the message. A message of a
former version has none."""
READ_BYTES = 256 * 1024
_DIGITS = 17


class WaitingMessage(NamedTuple):
    """A delayed message. `ready_us`: the time at which it leaves its log, in microseconds since 1970."""

    offset: int
    ready_us: int
    due_us: int
    left_us: int
    """Microseconds of its delay for which it waits at further levels."""
    topic: str
    topic_id: str | None
    """None in a topic that takes messages; "" if it is not known."""
    partition: str | None
    """The partition that its producer named."""
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]
    """The producer's own."""


class WaitingLog:
    """The log of a level, or of a topic that takes delayed messages: its messages leave it at once."""

    def __init__(
        self, partition: Partition, broker_id: int, level: int | None, offset: int, refused: Callable[[str], None]
    ) -> None:
        """`level`: None for a topic that takes messages. `offset`: the first message that is not moved. `refused` is
        called with the reason why a message is passed over."""
        self.partition = partition
        self.level = level
        self.offset = offset
        self._tp = TopicPartition(partition.topic, partition_name(broker_id, partition.index))
        self._refused = refused
        self.log_once = LogOnce()
        self._read_to = offset
        self._ready: deque[WaitingMessage] = deque()

    @property
    def waiting(self) -> int:
        """The number of messages that wait in it."""
        return max(0, self.partition.log.stable_offset - self.offset)

    async def head(self) -> WaitingMessage | None:
        """Returns the first message; None if there is none. Raises MetamqError, OSError."""
        log = self.partition.log
        while not self._ready and self._read_to < log.stable_offset:
            if self._read_to < log.begin_offset:
                self._refused(
                    f"{self._tp}: messages before offset {log.begin_offset} were removed before they were due"
                )
                self._read_to = log.begin_offset
            part = log.locate(self._read_to, READ_BYTES)
            if part is None:
                break
            before = self._read_to
            await asyncio.to_thread(self._decode, part)
            if self._read_to == before:
                raise MetamqError(f"{self._tp} offset {before} cannot be read")
        return self._ready[0] if self._ready else None

    def take(self, now_us: int, count: int, size_bytes: int) -> list[WaitingMessage]:
        """Removes and returns messages that leave it now, of those that head() has read; at most so many."""
        taken = list[WaitingMessage]()
        while self._ready and self._ready[0].ready_us <= now_us and len(taken) < count and size_bytes > 0:
            taken.append(self._ready.popleft())
            size_bytes -= len(taken[-1].value)
        return taken

    @property
    def end(self) -> int:
        """The offset after the taken messages, and after those that are passed over before the next one."""
        return self._ready[0].offset if self._ready else self._read_to

    def _decode(self, part: FilePart) -> None:
        """Reads the next batches, in a thread: it takes long. Only the first one may be larger than READ_BYTES."""
        before = self._read_to
        for size in (min(part.size, READ_BYTES), part.size):
            self._decode_batches(_read(part, size))
            if self._read_to != before:
                return

    def _decode_batches(self, data: memoryview) -> None:
        for at, header in walk(data):
            batch = MessageBatch[bytes](self._tp, header, data[at : at + header.size], self._read_to)
            try:
                for message in batch:
                    found = self._waiting_message(message, header.append_time_us)
                    if found is not None:
                        self._ready.append(found)
            except UndecodableBatch as error:
                self._refused(str(error))
            self._read_to = header.end_offset
            if at >= READ_BYTES:
                return

    def _waiting_message(self, message: Message[bytes], put_us: int) -> WaitingMessage | None:
        """Returns the message; None, after a call of `refused`, if its headers are wrong: a client may send any."""
        headers = dict(message.headers)
        due, left, topic, topic_id, partition = (
            headers.pop(name, b"").decode(errors="replace") for name in (DUE, LEFT, TOPIC, TOPIC_ID, PARTITION)
        )
        if self.level is None:
            topic = message.topic.removesuffix(DELAYED_SUFFIX)
        if not _is_number(due) or (partition and not is_partition(partition)):
            self._refused(f"{self._tp} offset {message.offset} is no delayed message")
            return None
        due_us, leaves_us = int(due), 0
        left_us = min(int(left), DELAY_MAX_S * 1_000_000) if _is_number(left) else max(0, due_us - put_us)
        if self.level is not None:
            left_us = left_after_us(self.level, left_us)
            leaves_us = ready_us(self.level, put_us, due_us, left_us)
        return WaitingMessage(
            message.offset, leaves_us, due_us, left_us, topic, None if self.level is None else topic_id,
            partition or None, message.key, message.value, headers,
        )  # fmt: skip


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def _read(part: FilePart, size: int) -> memoryview:
    with open(part.path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), size, part.at)
    if len(data) < size:
        raise MetamqError(f"{part.path} ends early")
    return memoryview(data)
