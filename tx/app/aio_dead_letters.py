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

import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from metamq.client.admin.admin_topics import describe_topic
from metamq.client.consumer.aio_consumer import Consumer
from metamq.client.consumer.dead_letters import ORIGIN_HEADERS, dead_letter_topic
from metamq.client.settings import cluster_access
from metamq.errors import BranchNotKnown, ConfigError
from metamq.tx.app.aio_producer import Producer
from metamq.wire.xa import Xid
from metamq.zk.groups.settled_letters import SettledLetters, read_settled, write_settled

if TYPE_CHECKING:
    from types import TracebackType

    from metamq.client.model import Message
    from metamq.client.net.cluster import ClusterClient
    from metamq.security.config import SecurityConfig

CHUNK_LETTERS = 1000
CHUNK_BYTES = 4 * 1024 * 1024
"""A transaction ends at either of them."""
IDLE_S = 10.0
"""Seconds without a letter after which reading ends, for letters that retention has deleted meanwhile."""
RESENT = "metamq-resent"
"""The header of a message that was sent again: how often. A new dead letter of it keeps the header."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up. `id` is its place in the dead-letter topic, as "0-0:17".

    `topic`, `partition`, `offset` and `sent` are those of the message, `given_up` is the time of its last attempt.
    `headers` are the message's own. `resent`: how often it was sent again before.
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


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Selects letters; a field that is not set selects all.

    `error` is a part of the error's text. `since` and `until` (exclusive) are times of the last attempt, aware.
    """

    ids: Collection[str] = ()
    error: str = ""
    key: bytes | None = None
    topic: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        for time in (self.since, self.until):
            if time is not None and time.tzinfo is None:
                raise ConfigError(f"the time {time} has no time zone", hint="Use datetime.now(UTC), for example.")

    def selects(self, letter: DeadLetter) -> bool:
        """True if the letter is selected."""
        return (
            (not self.ids or letter.id in self.ids)
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


def letter_of(message: Message[bytes]) -> DeadLetter:
    """Returns the letter in a message of a dead-letter topic. Raises ConfigError if it is none."""
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
            int(given.get(RESENT, b"0")),
            message.key,
            message.value,
            {name: value for name, value in given.items() if name not in (*ORIGIN_HEADERS, RESENT)},
        )
    except (KeyError, ValueError) as error:
        place = f"{message.topic}/{message.partition} at offset {message.offset}"
        raise ConfigError(f"the message in {place} is no dead letter: {error!r}", hint="Who sent it there?") from None


def _time(timestamp_us: int) -> datetime:
    return datetime.fromtimestamp(timestamp_us / 1e6, UTC)


class DeadLetterQueue:
    """The dead letters of a group. `zookeeper`, `root`, `config` and `security`: see metamq.Admin.

    Raises ConnectError if ZooKeeper cannot be reached, and TopicNotFound if the group never gave a message up.
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
        self._access = cluster_access(zookeeper, root, config, security)
        self._producer = Producer[bytes](self._access.zookeeper, root=self._access.root, security=self._access.security)
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
        """Returns what waits."""
        letters, times, errors = 0, list[datetime](), Counter[str]()
        async for letter in self.letters():
            letters += 1
            times = [min([letter.given_up, *times[:1]]), max([letter.given_up, *times[1:]])]
            errors[letter.error.partition(":")[0]] += 1
        oldest, newest = times or (None, None)
        return LetterSummary(self.group, letters, oldest, newest, dict(errors.most_common()))

    async def letters(self, selected: LetterFilter = LetterFilter()) -> AsyncGenerator[DeadLetter, None]:
        """Yields the letters that are not settled, up to the present end of the topic."""
        _described, settled = await self._state()
        async for letter in self._read(settled, selected):
            yield letter

    async def resend(
        self,
        selected: LetterFilter = LetterFilter(),
        *,
        to: str | None = None,
        progress: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Sends letters again, each exactly once, and returns their number.

        They go to the topics that they came from, or to the topic `to`, with their key, value and headers, and the
        header `metamq-resent`. `progress` gets the number of each transaction. Interrupted, it continues when called
        again. Raises TopicNotFound for a topic that is gone.
        """
        count = 0
        while True:
            settled = await self._recover()
            chunk, is_last = await self._next_chunk(settled, selected)
            if not chunk:
                return count
            if await self._resend_chunk(settled, chunk, to):
                count += len(chunk)
                progress(len(chunk))
                if is_last:
                    await self._recover()
                    return count

    async def purge(self, selected: LetterFilter = LetterFilter()) -> int:
        """Settles letters without sending them, and returns their number. Retention deletes them from the topic."""
        while True:
            settled = await self._recover()
            found = [_place(letter.id) async for letter in self._read(settled, selected)]
            if not found or await write_settled(self._session, self.group, settled.settle(found, committing="")):
                return len(found)

    @property
    def _session(self) -> Any:
        return self._cluster.session

    async def _state(self) -> tuple[dict[str, int], SettledLetters]:
        """Returns the ends of the partitions of the topic, and its settled letters."""
        described = await describe_topic(self._cluster, self.topic)
        silent = [one for one in described.partitions if one.stable_offset is None]
        if silent:
            raise ConfigError(f"{self.topic}/{silent[0].partition} does not answer: {silent[0].problem}")
        filled = (one for one in described.partitions if one.stable_offset != one.start_offset)
        ends = {one.partition: one.stable_offset or 0 for one in filled}
        settled = await read_settled(self._session, self.group)
        return ends, settled.of_topic(described.config.id)

    async def _read(self, settled: SettledLetters, selected: LetterFilter) -> AsyncGenerator[DeadLetter, None]:
        ends, _settled = await self._state()
        if not ends:
            return
        zookeeper, root, security = self._access
        async with Consumer(
            zookeeper, topics=[self.topic], start="earliest", idle_timeout_s=IDLE_S, root=root, security=security
        ) as consumer:
            async for message in consumer:
                if message.partition in ends and message.offset < ends[message.partition]:
                    letter = letter_of(message)
                    if not settled.has(message.partition, message.offset) and selected.selects(letter):
                        yield letter
                if message.offset >= ends.get(message.partition, 0) - 1:
                    ends.pop(message.partition, None)
                if not ends:
                    return

    async def _next_chunk(self, settled: SettledLetters, selected: LetterFilter) -> tuple[list[DeadLetter], bool]:
        """Returns the letters of the next transaction, and if they are the last ones."""
        chunk, size = list[DeadLetter](), 0
        reading = self._read(settled, selected)
        async with contextlib.aclosing(reading):
            async for letter in reading:
                if chunk and (len(chunk) == CHUNK_LETTERS or size + len(letter.value) > CHUNK_BYTES):
                    return chunk, False
                chunk.append(letter)
                size += len(letter.value)
        return chunk, True

    async def _resend_chunk(self, settled: SettledLetters, chunk: list[DeadLetter], to: str | None) -> bool:
        """Sends letters in a transaction. Returns False if another process has changed the settled letters.

        After any other error before the decision nothing is sent; after it, the next call commits.
        """
        for topic in {to or letter.topic for letter in chunk}:
            await self._cluster.topic(topic)  # before anything is sent
        producer, xid = self._producer, Xid.random(self._prefix)
        await producer.tpc_begin(xid)
        try:
            for letter in chunk:
                headers = {**letter.headers, RESENT: b"%d" % (letter.resent + 1)}
                producer.send(to or letter.topic, letter.value, letter.key, headers)
                await producer.drain()
            await producer.tpc_prepare()
        except BaseException:
            await producer.tpc_rollback()
            raise
        places = [_place(letter.id) for letter in chunk]
        decided = await write_settled(self._session, self.group, settled.settle(places, committing=xid.whole))
        with contextlib.suppress(BranchNotKnown):  # another process has ended it meanwhile, as the node says
            await (producer.tpc_rollback() if decided is None else producer.tpc_commit())
        return decided is not None

    async def _recover(self) -> SettledLetters:
        """Ends the transactions that earlier calls have left, and returns the settled letters then."""
        while True:
            _ends, settled = await self._state()
            left = [xid for xid in await self._producer.tpc_recover() if xid.gtrid.startswith(self._prefix)]
            if not left and not settled.committing:
                return settled
            for xid in left:
                if xid.whole == settled.committing:
                    await self._end(self._producer.tpc_commit, xid)
            changed = await write_settled(self._session, self.group, replace(settled, committing=""))
            if changed is None:
                continue
            for xid in left:
                if xid.whole != settled.committing:
                    await self._end(self._producer.tpc_rollback, xid)
            return changed

    async def _end(self, end: Callable[[Xid], Any], xid: Xid) -> None:
        with contextlib.suppress(BranchNotKnown):  # another process has ended it meanwhile
            await end(xid)


def _place(letter_id: str) -> tuple[str, int]:
    partition, _, offset = letter_id.rpartition(":")
    return partition, int(offset)
