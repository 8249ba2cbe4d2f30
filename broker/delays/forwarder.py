"""Moves delayed messages when they are due: to their topics, or to the next level (metamq.broker.delays.levels).

The master of a broker id moves the messages that wait in its own logs. One transaction moves messages of all its logs:

    prepare   the messages are at their brokers, and no reader sees them
    decide    a compare-and-set of the node of this broker id: the offsets rise, and the node names the transaction
    commit    readers see the messages

A master begins with a change of the node. After any error it begins again: it does not know what was done. See
metamq.broker.delays.moved_node for the invariant.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.delays.holds import Holds
from metamq.broker.delays.levels import LEVELS, level_of, retention_ms
from metamq.broker.delays.moved_node import MovedNode, gtrid_prefix, log_name
from metamq.broker.delays.waiting import TOPIC, TOPIC_ID, WaitingLog, WaitingMessage
from metamq.broker.log_once import LogOnce
from metamq.broker.roles.role import MasterRole
from metamq.client.admin.admin_model import TopicSettings
from metamq.client.admin.admin_topics import create_topic
from metamq.client.delayed import DUE, LEFT, PARTITION
from metamq.client.net.cluster import ClusterClient
from metamq.client.producer.outgoing import CheckedMessage, size_of
from metamq.client.producer.partitioner import by_key_hash
from metamq.errors import ConfigError, CorruptData, MetamqError, TopicNotFound
from metamq.security.config import BROKERS
from metamq.security.rights import DELAYED_SUFFIX, LEVEL_PREFIX
from metamq.tx.app.staging import Routes, Staging
from metamq.tx.app.work import GlobalTransaction
from metamq.wire.compression import Codec
from metamq.wire.limits import BATCH_TARGET_BYTES, MESSAGE_BYTES_MAX
from metamq.wire.xa import Xid

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.zk.cluster.topics import TopicConfig
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

EVERY_S = 0.05
"""Seconds between two transactions: so one moves what has become due meanwhile."""
RETRY_S = 0.5
LOOK_S = 0.2
"""Seconds between two looks for new logs."""
ANSWER_S = 5.0
TOPIC_WAIT_S = 10.0
CHUNK_MESSAGES = 1000
CHUNK_BYTES = 4 * 1024 * 1024


def now_us() -> int:
    """Returns the time by this machine's clock, in microseconds since 1970."""
    return time.time_ns() // 1000


def _is_due(message: WaitingMessage) -> bool:
    """True if a message goes to its topic now, and not to a further level."""
    return not message.left_us and message.due_us <= now_us()


def _is_of_another(message: WaitingMessage, config: TopicConfig) -> bool:
    """True if a message was sent to an earlier topic of this name."""
    return message.topic_id not in (None, "", config.id)


class DelayFigures(NamedTuple):
    """The figures for metrics and for STATS."""

    waiting: int = 0
    """Messages that wait at this master."""
    next_us: int = 0
    """The time at which the next one that was read is due, in microseconds since 1970; 0: none is known."""
    delivered: int = 0
    """Messages that were delivered to their topics since the start."""
    refused: int = 0
    """Messages that could not be delivered since the start."""


@dataclass(eq=False)
class _Term:
    """The work of one master."""

    role: MasterRole
    node: MovedNode
    logs: dict[str, WaitingLog] = field(default_factory=dict)
    looked_s: float = -math.inf


class DelayForwarder:
    """Moves the delayed messages of one broker id. Only the broker's loop uses it; any thread may get `figures`."""

    def __init__(self, broker_id: int, session: Session, topics: Topics, status: ReplicaStatus) -> None:
        self.figures = DelayFigures()
        self._broker_id = broker_id
        self._session = session
        self._topics = topics
        self._status = status
        self._levels = f"{LEVEL_PREFIX}{broker_id}."
        self._routes = Routes(BATCH_TARGET_BYTES, MESSAGE_BYTES_MAX, by_key_hash, Codec.NONE, None)
        self._holds = Holds()
        self._log_once = LogOnce()
        self._refusals = LogOnce()
        self._deleted_ids = set[str | None]()
        """Ids of deleted topics whose messages were still due. An id never comes back."""
        self._term: _Term | None = None

    async def run(self) -> None:
        """Moves messages until cancelled."""
        self._cluster = ClusterClient(self._session)
        try:
            while True:
                pause_s = EVERY_S
                try:
                    if await self._round():
                        pause_s = 0.0
                    self._log_once.worked("delayed messages are moved again")
                except (MetamqError, OSError) as error:
                    known = error if isinstance(error, MetamqError) else MetamqError(str(error))
                    self._log_once.failed("delayed messages are not moved now", known)
                    self._term, pause_s = None, RETRY_S
                except Exception:  # they must not end a broker
                    log.exception("delayed messages cannot be moved")
                    self._term, pause_s = None, RETRY_S
                await asyncio.sleep(pause_s)
        finally:
            await self._cluster.close()

    async def _round(self) -> bool:
        """Moves some messages. Returns True if more may be ready."""
        role = self._status.role
        if not isinstance(role, MasterRole) or self._status.writes_refused is not None:
            self._term = None
            self.figures = self.figures._replace(waiting=0, next_us=0)
            return False
        if self._term is not None and self._term.role is not role:
            self._term = None
        if self._term is None:
            if next(self._own_logs(), None) is None:
                await asyncio.sleep(LOOK_S)
                return False
            node = MovedNode(self._session, self._cluster, self._broker_id, self._log_once)
            await node.begin()
            self._term = _Term(role, node)
        term = self._term
        await term.node.roll_back_undecided()
        await term.node.finish_later()
        await self._look(term)
        await term.node.forget_deleted(term.logs)
        chunk = await self._ready(term)
        if any(one.end > one.offset for one in term.logs.values()):  # some may be passed over only
            await self._move(term, chunk)
        return len(chunk) >= CHUNK_MESSAGES

    # -- the logs -----------------------------------------------------------------------------------------------------

    def _own_logs(self) -> Iterator[tuple[Partition, int | None]]:
        """Yields each log of delayed messages with its level; None for a topic that takes them."""
        for topic, partitions in list(self._topics.open.items()):
            if topic.endswith(DELAYED_SUFFIX):
                yield from ((partition, None) for partition in partitions.values())
            elif topic.startswith(self._levels) and topic.removeprefix(self._levels).isdecimal():
                level = int(topic.removeprefix(self._levels))
                yield from ((partition, level) for partition in partitions.values() if level < LEVELS)

    async def _look(self, term: _Term) -> None:
        """Finds new logs, and leaves out those of deleted topics."""
        now_s = time.monotonic()
        if now_s - term.looked_s < LOOK_S:
            return
        term.looked_s = now_s
        levels = dict(self._own_logs())
        found = {name: one for name, one in term.logs.items() if one.partition in levels}
        known = {one.partition for one in found.values()}
        for partition in await term.node.readable([one for one in levels if one not in known]):
            log_, (offset, epoch) = partition.log, term.node.place(partition)
            with contextlib.suppress(CorruptData):  # the log is reported as damaged, and waits
                agreed = log_.epochs().agrees_with_reader(offset, epoch, log_.begin_offset, log_.end_offset)
                level = levels[partition]
                found[log_name(partition)] = WaitingLog(partition, self._broker_id, level, agreed, self._refuse)
        # What may be due comes first: a topic that takes many messages does not hold it up.
        term.logs = dict(sorted(found.items(), key=lambda one: LEVELS if one[1].level is None else one[1].level))

    def _refuse(self, reason: str) -> None:
        self.figures = self.figures._replace(refused=self.figures.refused + 1)
        self._refusals.failed("a delayed message is not delivered", MetamqError(reason))

    async def _ready(self, term: _Term) -> list[WaitingMessage]:
        """Returns the messages that leave their logs now."""
        chunk, size, heads = list[WaitingMessage](), 0, list[int]()
        for one in term.logs.values():
            try:
                if await one.head() is not None:
                    taken = one.take(now_us(), CHUNK_MESSAGES - len(chunk), CHUNK_BYTES - size)
                    size += sum(len(message.value) for message in taken)
                    heads += [message.due_us for message in taken]
                    chunk += taken
                if (head := await one.head()) is not None:
                    heads.append(head.due_us)
                one.log_once.worked(f"delayed messages of {one.partition.name} are read again")
            except (MetamqError, OSError) as error:  # the other logs continue
                known = error if isinstance(error, MetamqError) else MetamqError(str(error))
                one.log_once.failed(f"delayed messages of {one.partition.name} wait", known)
        waiting = sum(one.waiting for one in term.logs.values())
        self.figures = self.figures._replace(waiting=waiting, next_us=min(heads, default=0))
        return chunk

    # -- a transaction ------------------------------------------------------------------------------------------------

    async def _move(self, term: _Term, chunk: list[WaitingMessage]) -> None:
        """Moves messages in a transaction. After an error the outcome is in the node."""
        self._holds.try_next(time.monotonic(), {one.topic for one in chunk if _is_due(one)})
        sends = defaultdict[str, list[CheckedMessage]](list)
        finals = set[str]()
        if any(one.topic_id is None for one in chunk):
            await self._session.sync()  # the ids are those of the topics that there are now, or later ones
        for message in sorted(chunk, key=lambda one: one.due_us):
            topic, sent = await self._route(message)
            if topic:
                sends[topic].append(sent)
                finals |= {topic} if topic == message.topic else set()
        work = GlobalTransaction(
            self._cluster, Staging(self._routes), Xid.random(gtrid_prefix(self._broker_id)).gtrid,
            branch_timeout_s=0, answer_s=ANSWER_S, principal=BROKERS,
        )  # fmt: skip
        try:
            for topic, messages in sends.items():
                await work.send_many(topic, messages)
            await work.prepare()
        except MetamqError:
            self._holds.failed(finals, time.monotonic())
            await work.rollback()  # of what is reached: the rest is rolled back when this begins again
            raise
        ends = {name: (one.end, one.partition.log.epochs().epoch_of_reader(one.end)) for name, one in term.logs.items()}
        await term.node.decide(ends, work)
        for name, one in term.logs.items():
            one.offset = ends[name][0]
        self._holds.worked(finals)
        delivered = sum(len(messages) for topic, messages in sends.items() if topic in finals)
        self.figures = self.figures._replace(delivered=self.figures.delivered + delivered)
        await term.node.finish(work)

    async def _route(self, message: WaitingMessage) -> tuple[str, CheckedMessage]:
        """Returns the topic for a message, and the message as it is sent there; no topic if it cannot be delivered."""
        due_us, left_us = message.due_us, message.left_us
        if _is_due(message):
            if not self._holds.pause_s(message.topic, time.monotonic()):
                try:
                    return await self._final(message)
                except (ConfigError, CorruptData) as error:  # the configuration of its topic cannot be read
                    self._refusals.failed("delayed messages of a topic wait", error)
                    self._holds.failed([message.topic], time.monotonic())
            due_us = now_us() + int(self._holds.pause_s(message.topic, time.monotonic()) * 1e6)
        left_us = left_us or max(1, due_us - now_us())  # its topic is held, or a clock differs
        topic = await self._level(level_of(left_us))
        headers = {**message.headers, DUE: b"%d" % due_us, LEFT: b"%d" % left_us, TOPIC: message.topic.encode()}
        if topic_id := message.topic_id if message.topic_id is not None else await self._topic_id(message.topic):
            headers[TOPIC_ID] = topic_id.encode()
        if message.partition is not None:
            headers[PARTITION] = message.partition.encode()
        sent = CheckedMessage(message.value, message.key, headers)
        if (size := size_of(*sent[:3])) > MESSAGE_BYTES_MAX:
            self._refuse(f"with the headers of a delayed message it has {size:,} bytes, {MESSAGE_BYTES_MAX:,} at most")
            return "", sent
        return topic, sent

    async def _topic_id(self, topic: str) -> str:
        """Returns the id of the topic; "" if there is none. Raises MetamqError."""
        try:
            return (await self._cluster.topic(topic)).id
        except (TopicNotFound, ConfigError, CorruptData):
            return ""

    async def _final(self, message: WaitingMessage) -> tuple[str, CheckedMessage]:
        sent = CheckedMessage(message.value, message.key, message.headers or None, message.partition)
        try:
            config = await self._cluster.topic(message.topic)
            if _is_of_another(message, config) and message.topic_id not in self._deleted_ids:
                await self._session.sync()  # the id may be newer than this broker's view of the topic
                config = await self._cluster.topic(message.topic)
        except TopicNotFound as error:
            self._refuse(str(error))
            return "", sent
        if _is_of_another(message, config):
            self._deleted_ids.add(message.topic_id)
            self._refuse(f"it was sent to an earlier topic {message.topic!r}, which was deleted")
            return "", sent
        if sent.partition is not None and sent.partition not in config.partition_names:
            sent = sent._replace(partition=None)
        if (size := size_of(*sent[:3])) > config.max_message_bytes:
            self._refuse(f"it has {size:,} bytes, and topic {message.topic!r} takes {config.max_message_bytes:,}")
            return "", sent
        return message.topic, sent

    async def _level(self, level: int) -> str:
        """Returns the topic of a level, which is made when it is used first."""
        topic = f"{self._levels}{level}"
        if topic not in self._topics.open:
            settings = TopicSettings(  # all that decide what is lost: the defaults of the cluster do not count here
                retention_ms=retention_ms(level), retention_bytes=None, cleanup="delete", min_insync=1,
                replication="sync", max_message_bytes=MESSAGE_BYTES_MAX,
            )  # fmt: skip
            await create_topic(self._cluster, topic, 1, [self._broker_id], True, TOPIC_WAIT_S, settings)
            if self._term is not None:
                self._term.looked_s = -math.inf  # the next round counts what waits there
        return topic
