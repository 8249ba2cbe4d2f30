"""The dead letters of a group: seen, sent again exactly once, purged: `metamq.aio.DeadLetterQueue`.

The dead-letter topic is a log, so a letter stays in it. A node in ZooKeeper has the offsets that are settled
(metamq.zk.groups.settled_letters). To resend letters is a transaction of two phases:

    prepare   the messages are at their brokers, and no reader sees them
    decide    the letters become settled, and the node names the transaction, by one compare-and-set
    commit    readers see the messages

A process that crashes before the decision leaves a prepared transaction. The next resend changes the node, so a late
decision fails, and rolls that transaction back. After the decision the next resend commits it. So each letter is sent
once. If two processes resend at a time, one loses the compare-and-set, rolls back, and reads the letters again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from metamq.client.admin.admin_brokers import ask_offsets
from metamq.client.checks import wrong_type
from metamq.client.consumer.aio_consumer import Consumer
from metamq.client.handling.dead_letters import ORIGIN_HEADERS, dead_letter_topic
from metamq.client.settings import cluster_access
from metamq.errors import BranchNotKnown, ConfigError, MetamqError, NotAuthorized
from metamq.tx.app.aio_producer import Producer
from metamq.wire.commands import LATEST
from metamq.wire.xa import Xid
from metamq.zk.groups.settled_letters import SettledLetters, read_settled, write_settled
from metamq.zk.names import DEAD_LETTER_SUFFIX

if TYPE_CHECKING:
    from types import TracebackType

    from metamq.client.model import Message
    from metamq.client.net.cluster import ClusterClient
    from metamq.security.config import SecurityConfig
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.client")

CHUNK_LETTERS = 1000
CHUNK_BYTES = 4 * 1024 * 1024
"""A transaction ends at either of them."""
IDLE_S = 10.0
"""Seconds without a letter after which reading ends, for letters that retention has deleted meanwhile."""
PAUSE_S = 0.3
"""The longest pause after a change by another process: so two do not end one another's transactions for long."""
RESENT = "metamq-resent"
"""The header of a message that was sent again: how often. A new dead letter of it keeps the header."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up. `id` is its place in the dead-letter topic, as "0-0:17".

    `topic`, `partition`, `offset` and `sent` are those of the message, `given_up` is the time of its last attempt.
    `headers` are the message's own. `resent`: how often it was sent again before. `traceback`: the end of the error's
    traceback, "" in letters of an older metamq.
    """

    id: str
    given_up: datetime
    topic: str
    partition: str
    offset: int
    sent: datetime
    attempts: int
    error: str
    resent: int
    key: bytes | None
    value: bytes
    headers: dict[str, bytes]
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Selects letters; a field that is not set selects all.

    `error` is a part of the error's text. `since` and `until` (exclusive) are times of the last attempt, aware. A `key`
    of type str is encoded in UTF-8. Raises ConfigError for a wrong value.
    """

    ids: Collection[str] | None = None
    error: str = ""
    key: bytes | str | None = None
    topic: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        if isinstance(self.key, str):
            object.__setattr__(self, "key", self.key.encode())
        for name, wanted, value, kind in (
            ("ids", "a collection of ids", self.ids, (Collection, type(None))),
            ("error", "text", self.error, str),
            ("key", "bytes or text", self.key, (bytes, type(None))),
            ("topic", "text", self.topic, str),
            ("since", "a datetime", self.since, (datetime, type(None))),
            ("until", "a datetime", self.until, (datetime, type(None))),
        ):
            if not isinstance(value, kind) or (name == "ids" and isinstance(value, str)):
                raise wrong_type(f"`{name}`", wanted, value)
        for time in (self.since, self.until):
            if time is not None and time.tzinfo is None:
                raise ConfigError(f"the time {time} has no time zone", hint="Use datetime.now(UTC), for example.")

    def selects(self, letter: DeadLetter) -> bool:
        """True if the letter is selected."""
        return (
            (self.ids is None or letter.id in self.ids)
            and self.error.lower() in letter.error.lower()
            and (self.key is None or self.key == letter.key)
            and (not self.topic or self.topic == letter.topic)
            and (self.since is None or letter.given_up >= self.since)
            and (self.until is None or letter.given_up < self.until)
        )


@dataclass(frozen=True, slots=True)
class LetterSummary:
    """The letters of a group that are not settled. `errors` counts them by the type of their error."""

    group: str
    letters: int
    oldest: datetime | None
    newest: datetime | None
    errors: dict[str, int]


def letter_of(message: Message[bytes]) -> DeadLetter | None:
    """Returns the letter in a message of a dead-letter topic; None if a client sent another message there."""
    given = message.headers
    try:
        return DeadLetter(
            f"{message.partition}:{message.offset}",
            _time(message.timestamp),
            given["metamq-topic"].decode(),
            given["metamq-partition"].decode(),
            int(given["metamq-offset"]),
            _time(int(given["metamq-timestamp"])),
            int(given["metamq-attempts"]),
            given["metamq-error"].decode(errors="replace"),
            _count(given.get(RESENT, b"")),
            message.key,
            message.value,
            {name: value for name, value in given.items() if name not in (*ORIGIN_HEADERS, RESENT)},
            given.get("metamq-traceback", b"").decode(errors="replace"),
        )
    except (KeyError, ValueError, OverflowError):
        return None


def _count(text: bytes) -> int:
    """Returns the number in a header; 0 for anything else, which its producer may have written."""
    return int(text) if text.isdigit() and len(text) < 10 else 0


def _time(timestamp_us: int) -> datetime:
    return datetime.fromtimestamp(timestamp_us / 1e6, UTC)


class DeadLetterQueue:
    """The dead letters of a group. `zookeeper`, `root`, `config` and `security`: see metamq.Admin.

    A group that never gave a message up has no letters. The methods raise ConnectError if ZooKeeper or a broker cannot
    be reached. Messages that are no dead letters are passed over. One call at a time.
    """

    def __init__(
        self,
        group: str,
        zookeeper: str | None = None,
        *,
        root: str | None = None,
        config: str | None = None,
        security: SecurityConfig | None = None,
    ) -> None:
        self.group: str = group
        self.topic: str = dead_letter_topic(group)
        zookeeper, root, security = cluster_access(zookeeper, root, config, security)
        self._access: dict[str, Any] = {"zookeeper": zookeeper, "root": root, "security": security, "config": config}
        self._producer = Producer[bytes](**self._access)
        self._prefix = b"letters-" + hashlib.sha256(group.encode()).digest()[:16]

    async def open(self) -> Self:
        """Connects to ZooKeeper; `async with` calls it."""
        await self._producer.open()
        return self

    async def close(self) -> None:
        """Disconnects."""
        await self._producer.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _cluster(self) -> ClusterClient:
        return self._producer._core.cluster

    async def summary(self) -> LetterSummary:
        """Returns a summary of the letters that are not settled."""
        errors, oldest, newest = Counter[str](), None, None
        async for letter in self.letters():
            errors[letter.error.partition(":")[0]] += 1
            oldest = min(oldest or letter.given_up, letter.given_up)
            newest = max(newest or letter.given_up, letter.given_up)
        return LetterSummary(self.group, errors.total(), oldest, newest, dict(errors.most_common()))

    async def letters(self, selected: LetterFilter = LetterFilter()) -> AsyncGenerator[DeadLetter, None]:
        """Yields the letters that are not settled, up to the present end of the topic."""
        settled, ends = await self._state()
        async with contextlib.aclosing(self._read(settled, ends, selected)) as reading:
            async for letter in reading:
                yield letter

    async def resend(
        self,
        selected: LetterFilter = LetterFilter(),
        *,
        to: str | None = None,
        progress: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Sends the letters that are there now, each exactly once, and returns their number.

        They go to the topics that they came from, or to the topic `to`, with their key, value and headers, and the
        header `metamq-resent`. `progress` gets the number of each transaction; it must not block. After an interrupt or
        an error the next call continues. Raises TopicNotFound for a topic that does not exist any more.
        """
        if to is not None and to.endswith(DEAD_LETTER_SUFFIX):
            raise ConfigError(f"{to!r} is a dead-letter topic: its messages get their headers from listeners")
        settled, ends = await self._recover()
        begin, count = dict[str, int](), 0
        while chunk := await self._next_chunk(settled, ends, begin, selected):
            if await self._resend_chunk(settled, chunk, to):
                count += len(chunk)
                progress(len(chunk))
                begin.update((partition, offset + 1) for partition, offset in map(_place, chunk))
            else:  # another process settles letters, too
                await asyncio.sleep(random.uniform(0, PAUSE_S))
            settled, _ends = await self._recover()
        return count

    async def purge(self, selected: LetterFilter = LetterFilter()) -> int:
        """Settles the letters that are there now without sending them, and returns their number. Retention deletes them
        from the topic."""
        settled, ends = await self._recover()
        while True:
            async with contextlib.aclosing(self._read(settled, ends, selected)) as reading:
                found = [_place(letter) async for letter in reading]
            if not found or await write_settled(self._session, self.group, settled.settle(found, committing="")):
                return len(found)
            settled, _ends = await self._recover()

    @property
    def _session(self) -> Session:
        return self._cluster.session

    async def _state(self) -> tuple[SettledLetters, dict[str, int]]:
        """Returns the settled letters, and the present ends of the partitions that have messages."""
        config = await self._cluster.topics.get_or_none(self.topic)
        if config is None:
            return SettledLetters(), {}
        starts, ends = dict[str, int](), dict[str, int]()
        found = await ask_offsets(self._cluster, dict.fromkeys(config.topic_partitions, (config.id, LATEST)))
        for tp, answer in found.items():
            if isinstance(answer, MetamqError):
                raise answer
            starts[tp.partition] = answer.start_offset
            if answer.stable_offset > answer.start_offset:
                ends[tp.partition] = answer.stable_offset
        settled = await read_settled(self._session, self.group)
        return settled.of_topic(config.id, starts), ends

    async def _read(
        self,
        settled: SettledLetters,
        ends: Mapping[str, int],
        selected: LetterFilter,
        begin: Mapping[str, int] = MappingProxyType({}),
    ) -> AsyncGenerator[DeadLetter, None]:
        """Yields letters from the offsets `begin` to `ends`, by partition."""
        if not isinstance(selected, LetterFilter):
            raise wrong_type("`selected`", "a LetterFilter", selected)
        left = {partition: end for partition, end in ends.items() if begin.get(partition, 0) < end}
        if not left:
            return
        async with Consumer(topics=[self.topic], start="earliest", idle_timeout_s=IDLE_S, **self._access) as consumer:
            for partition in left.keys() & begin.keys():
                await consumer.seek((self.topic, partition), begin[partition])
            async for message in consumer:
                end = left.get(message.partition, 0)
                if message.offset < end and not settled.has(message.partition, message.offset):
                    letter = letter_of(message)
                    if letter is not None and selected.selects(letter):
                        yield letter
                if message.offset >= end - 1:
                    left.pop(message.partition, None)
                if not left:
                    return

    async def _next_chunk(
        self, settled: SettledLetters, ends: Mapping[str, int], begin: Mapping[str, int], selected: LetterFilter
    ) -> list[DeadLetter]:
        """Returns the letters of the next transaction."""
        chunk, size = list[DeadLetter](), 0
        async with contextlib.aclosing(self._read(settled, ends, selected, begin)) as reading:
            async for letter in reading:
                size += len(letter.value) + len(letter.key or b"") + sum(map(len, letter.headers.values()))
                if chunk and (len(chunk) == CHUNK_LETTERS or size > CHUNK_BYTES):
                    break
                chunk.append(letter)
        return chunk

    async def _resend_chunk(self, settled: SettledLetters, chunk: list[DeadLetter], to: str | None) -> bool:
        """Sends letters in a transaction. Returns False if another process has changed the settled letters.

        After another error the transaction is rolled back, or prepared: then the next call of resend() ends it.
        """
        for topic in {to or letter.topic for letter in chunk}:
            await self._cluster.topic(topic)  # before anything is sent
        if (await self._cluster.topics.get(self.topic)).id != settled.topic_id:
            return False  # created again: these are letters of the former topic
        producer, xid = self._producer, Xid.random(self._prefix)
        try:
            await producer.tpc_begin(xid)
            try:
                for letter in chunk:
                    headers = {**letter.headers, RESENT: b"%d" % (letter.resent + 1)}
                    producer.send(to or letter.topic, letter.value, letter.key, headers)
                    await producer.drain()
                await producer.tpc_prepare()
                settled = settled.settle(map(_place, chunk), committing=xid.whole)
                decided = await write_settled(self._session, self.group, settled)
            except MetamqError as error:
                if error.outcome == "not_done":  # else the decision may be made
                    await producer.tpc_rollback()
                raise
            with contextlib.suppress(BranchNotKnown):  # another process has ended it meanwhile, as the node says
                await (producer.tpc_rollback() if decided is None else producer.tpc_commit())
        finally:
            producer._abandon()
        return decided is not None

    async def _recover(self) -> tuple[SettledLetters, dict[str, int]]:
        """Ends the transactions that earlier calls have left; returns what _state() returns then."""
        producer = self._producer
        while True:
            settled, ends = await self._state()
            if settled.committing:
                with contextlib.suppress(BranchNotKnown):  # it is committed
                    await producer.tpc_commit(Xid.parse(settled.committing))
            left = [xid for xid in await producer.tpc_recover() if xid.gtrid.startswith(self._prefix)]
            if not left and not settled.committing:
                return settled, ends
            changed = await write_settled(self._session, self.group, replace(settled, committing=""))
            if changed is None:
                continue
            for xid in left:  # they cannot be decided any more
                await self._roll_back(xid)
            return changed, ends

    async def _roll_back(self, xid: Xid) -> None:
        try:
            await self._producer.tpc_rollback(xid)
        except BranchNotKnown as error:
            if error.finished:  # it was decided, before the group and its node were deleted
                await self._producer.tpc_commit(xid)
        except NotAuthorized as error:
            log.warning("transaction %s stays prepared: %s. `metamq tx rollback` ends it", xid.whole, error)


def _place(letter: DeadLetter) -> tuple[str, int]:
    partition, _, offset = letter.id.rpartition(":")
    return partition, int(offset)
