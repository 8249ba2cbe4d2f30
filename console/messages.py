"""The messages of a topic, and the dead letters of a group, for a page: some of them, within a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import metamq
from metamq.cli.messages.decoding import decoded_message
from metamq.cli.show.terminal import escaped
from metamq.client.schemas.documents import TopicDocuments
from metamq.errors import ConfigError
from metamq.zk.names import DEAD_LETTER_SUFFIX
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import PartitionDescription, TopicDescription
    from metamq.client.admin.aio_admin import Admin
    from metamq.client.consumer.aio_consumer import Consumer
    from metamq.client.model import Message
    from metamq.tx.app.aio_dead_letters import DeadLetter, LetterSummary

READ_S = 3.0
IDLE_S = 0.3
COUNT = 50
LETTERS_MAX = 100
ROWS = 100
"""The rows of an Arrow value that a page decodes."""
SHOWN_BYTES = 4000
"""The bytes of a value that a page shows."""
Decode = Callable[["Message[bytes]"], "Message[bytes]"]
INDENTED_CHARS_MAX = 4 * SHOWN_BYTES
"""JSON that is longer with indentation is shown without: nesting would make it any length."""


@dataclass(frozen=True, slots=True)
class Question:
    """The wanted messages. `place`: the first one in each partition, as `metamq consume --from` takes it; -N is the
    newest N of all. `partition`: empty for all."""

    topic: str
    partition: str
    place: str | int | datetime
    matches: Callable[[Message[bytes]], bool] | None

    @property
    def is_newest(self) -> bool:
        """True if the last messages are wanted."""
        return isinstance(self.place, int) and self.place < 0

    @property
    def count(self) -> int:
        """The largest number of messages of the answer."""
        return min(-self.place, COUNT) if isinstance(self.place, int) and self.place < 0 else COUNT


@dataclass(frozen=True, slots=True)
class Found:
    """The answer: the newest message first if the newest were wanted. `is_cut`: READ_S were too short for more."""

    messages: list[Message[bytes]]
    is_cut: bool


def decoder_of(described: TopicDescription) -> Decode | None:
    """Returns the decoder of a typed topic's messages; None for another topic, and without its schema's library."""
    with contextlib.suppress(ConfigError):
        documents = TopicDocuments(described.topic, described.config.schemas)
        return lambda message: decoded_message(message, documents, rows_max=ROWS)
    return None


async def read_messages(client: dict[str, Any], described: TopicDescription, question: Question) -> Found:
    """Returns the messages up to the present ends. Raises MetamqError."""
    wanted = {TopicPartition(question.topic, part.partition): part for part in _partitions(described, question)}
    if not wanted:
        return Found([], False)
    found: dict[str, deque[Message[bytes]]] = defaultdict(partial(deque, maxlen=question.count))
    count, is_cut = 0, False
    consumer: Consumer[bytes] = metamq.aio.Consumer(
        **client, topics=question.topic, start="latest", auto_commit=False, idle_timeout_s=IDLE_S
    )
    async with consumer:
        ends = await _seek(consumer, wanted, question)
        try:
            async with asyncio.timeout(READ_S), contextlib.aclosing(consumer.__aiter__()) as messages:
                async for message in messages:
                    if _take(message, ends, question):
                        found[message.partition].append(message)
                        count += 1
                    if message.offset + 1 >= ends.get(tp := TopicPartition(message.topic, message.partition), 0):
                        ends.pop(tp, None)
                        consumer.pause(tp)
                    if not ends or (count == question.count and not question.is_newest):
                        break
        except TimeoutError:
            is_cut = True
    order = sorted(itertools.chain(*found.values()), key=lambda one: (one.timestamp, one.partition, one.offset))
    return Found(order[: -question.count - 1 : -1] if question.is_newest else order, is_cut)


def _partitions(described: TopicDescription, question: Question) -> list[PartitionDescription]:
    """Returns the partitions to read. Without a filter each of them has a message at the place, and they are no more
    than the messages of the answer: the newest N messages are in the N partitions with the last appends."""
    found = [
        part
        for part in described.partitions
        if question.partition in ("", part.partition) and _first(part, question) != part.stable_offset
    ]
    if question.matches is not None or isinstance(question.place, datetime):
        return found
    if question.is_newest:
        found.sort(key=lambda part: math.inf if part.last_append_us is None else part.last_append_us, reverse=True)
    return found[: question.count]


def _first(part: PartitionDescription, question: Question) -> int | datetime | None:
    """Returns the place of the first message to read: an offset or a time; the end if there is none."""
    start, end, place = part.start_offset, part.stable_offset, question.place
    if start is None or end is None or start == end or place == "latest":
        return end
    if isinstance(place, datetime):
        return place
    if not isinstance(place, int):
        return start
    if question.matches is None:
        place = max(place, -COUNT)
    return min(max(end + place if place < 0 else place, start), end)


def _take(message: Message[bytes], ends: dict[TopicPartition, int], question: Question) -> bool:
    in_range = message.offset < ends.get(TopicPartition(message.topic, message.partition), 0)
    return in_range and (question.matches is None or question.matches(message))


async def _seek(
    consumer: Consumer[bytes], wanted: dict[TopicPartition, PartitionDescription], question: Question
) -> dict[TopicPartition, int]:
    """Seeks to the place. Returns the end of each partition with messages to read; the others are paused."""
    assigned = consumer.assignment
    if others := [tp for tp in assigned if tp not in wanted]:
        consumer.pause(*others)
    ends = {tp: part.stable_offset for tp in assigned if (part := wanted.get(tp)) and part.stable_offset is not None}
    await asyncio.gather(*(consumer.seek(tp, _first(wanted[tp], question)) for tp in ends))  # type: ignore[arg-type]
    return ends


async def decoded_messages(messages: list[Message[bytes]], decode: Decode) -> list[Message[bytes]]:
    """Returns the messages with JSON as their values. A thread decodes: large values take long."""
    return await asyncio.to_thread(lambda: [decode(message) for message in messages])


def plain_text(text: str) -> str:
    """Returns text that any page can contain: with escapes for control characters and for halves of characters."""
    return escaped(text.encode("utf-8", "backslashreplace").decode())


def raw_text(data: bytes) -> str:
    """Returns bytes as text, with escapes for those that are no text; and the size if it is cut."""
    text = plain_text(data[:SHOWN_BYTES].decode("utf-8", "backslashreplace"))
    return text if len(data) <= SHOWN_BYTES else f"{text}… ({len(data):,} bytes)"


def body_text(data: bytes | None) -> str:
    """Returns bytes for people: JSON on several lines, other text as it is, with escapes; and the size if it is cut."""
    if data is None:
        return "–"
    if len(data) > SHOWN_BYTES:
        return raw_text(data)
    text = data.decode("utf-8", "backslashreplace")
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(text)
        lines = json.dumps(document, indent=2, ensure_ascii=False) if isinstance(document, dict | list) else text
        if len(lines) <= INDENTED_CHARS_MAX:
            return plain_text(lines)
    return plain_text(text)


async def letter_summaries(client: dict[str, Any], admin: Admin) -> tuple[list[LetterSummary], list[str]]:
    """Returns a summary for each group that has a dead-letter topic, and the groups for which READ_S were too short.

    Raises MetamqError.
    """
    topics = sorted(name for name in await admin.topics() if name.endswith(DEAD_LETTER_SUFFIX))
    groups = [name.removesuffix(DEAD_LETTER_SUFFIX) for name in topics]
    found: list[LetterSummary] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READ_S):
            for group in groups:
                async with metamq.aio.DeadLetterQueue(group, **client) as queue:
                    found.append(await queue.summary())
    return found, groups[len(found) :]


async def letters_of(client: dict[str, Any], group: str) -> tuple[list[DeadLetter], bool]:
    """Returns the first letters of a group, and True if there are more. Raises MetamqError."""
    found: list[DeadLetter] = []
    async with metamq.aio.DeadLetterQueue(group, **client) as queue, contextlib.aclosing(queue.letters()) as letters:
        async for letter in letters:
            if len(found) == LETTERS_MAX:
                return found, True
            found.append(letter)
    return found, False
