"""The node of a broker id's delayed messages (metamq.zk.cluster.delays), as one master uses it. For one loop.

INVARIANT: a message is behind its log's offset in the node exactly if a transaction that moves it is decided. A decided
transaction is named in the node until each broker has committed it. One that was prepared and not decided before a
change of the node never will be; only then it may be rolled back. So each message is moved once, whatever crashes, and
if two replicas take themselves for the master, one loses the compare-and-set.

So a master first asks a broker for prepared transactions, then changes the node, then rolls back those that the node
does not name. A broker that does not answer is asked again, and each one from time to time: a request to prepare may
have been on its way.

A log without an offset in the node is read from its begin. So the node keeps the offset of a log, open here or not,
until ZooKeeper has no topic with its id. The topics are read after a sync, so they are not older than the node. An id
never comes back. But this broker may still open a deleted topic, by an older view of ZooKeeper. So a log without an
offset is read only once ZooKeeper was found to have its topic: see `readable`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metamq.client.net.branches import Branch, TxClient, new_session
from metamq.errors import BranchNotKnown, MetamqError
from metamq.security.config import BROKERS
from metamq.security.rights import DELAYED_SUFFIX, LEVEL_PREFIX
from metamq.wire.xa import FORMAT_ID, Verb, Xid
from metamq.zk.cluster.delays import MovedDelays, read_moved, write_moved
from metamq.zk.cluster.topics import TopicConfig

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition
    from metamq.broker.log_once import LogOnce
    from metamq.client.net.cluster import ClusterClient
    from metamq.tx.app.work import GlobalTransaction
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

RETRY_S = 0.5
ANSWER_S = 1.0
ASK_SOON_S, ASK_AGAIN_S = 10.0, 600.0
"""Seconds until a broker is asked again for prepared transactions: after no answer, and after one."""
FORGET_S = 60.0
"""Seconds between two looks for deleted topics, while the node has logs that are not open."""


def is_of_delays(topic: str) -> bool:
    """True for a topic in which delayed messages wait."""
    return topic.endswith(DELAYED_SUFFIX) or topic.startswith(LEVEL_PREFIX)


def gtrid_prefix(broker_id: int) -> bytes:
    """Returns the begin of the gtrids of a broker id's transactions that move messages."""
    return b"delay-" + hashlib.sha256(b"%d" % broker_id).digest()[:8]


def log_name(partition: Partition) -> str:
    """Returns the name of a log in the node: a topic that is made again has another one."""
    return f"{partition.topic_id}/{partition.index}"


class MovedNode:
    """The node, during the work of one master. After any error another one must begin: the outcome is in ZooKeeper."""

    def __init__(self, session: Session, cluster: ClusterClient, broker_id: int, log_once: LogOnce) -> None:
        self._session = session
        self._cluster = cluster
        self._broker_id = broker_id
        self._prefix = gtrid_prefix(broker_id)
        self._log_once = log_once
        self._client = TxClient(cluster)
        self._moved = MovedDelays()
        self._ask_s: dict[int, float] = {}
        """Broker id -> the time at which it is asked again for prepared transactions."""
        self._finished_s = 0.0
        """The time of the last try to commit decided transactions."""
        self._looked_s = time.monotonic()
        """The time of the last look for deleted topics."""

    async def begin(self) -> None:
        """Changes the node: what another master has not decided never will be. Raises MetamqError."""
        self._moved = await self._change(await read_moved(self._session, self._broker_id))

    async def _change(self, moved: MovedDelays, work: GlobalTransaction | None = None) -> MovedDelays:
        changed = await write_moved(self._session, self._broker_id, moved)
        if changed is None:
            if work is not None:
                await work.rollback()
            raise MetamqError(f"another replica of broker {self._broker_id} moves its delayed messages")
        return changed

    # -- offsets ------------------------------------------------------------------------------------------------------

    def place(self, partition: Partition) -> tuple[int, int]:
        """Returns the first offset of a log that is not moved, and the epoch of the message before it."""
        return self._moved.offsets.get(log_name(partition), (0, -1))

    async def readable(self, partitions: Collection[Partition]) -> list[Partition]:
        """Returns those of these logs that may be read: see the module. Raises MetamqError."""
        unnamed = {one.topic for one in partitions if log_name(one) not in self._moved.offsets}
        configs = await self._cluster.topics.get_all(unnamed) if unnamed else {}

        def has_topic(one: Partition) -> bool:
            config = configs.get(one.topic)
            return isinstance(config, TopicConfig) and config.id == one.topic_id

        return [one for one in partitions if log_name(one) in self._moved.offsets or has_topic(one)]

    async def forget_deleted(self, open_logs: Iterable[str]) -> None:
        """Removes the offsets of deleted topics, once a minute. Raises MetamqError."""
        closed = self._moved.offsets.keys() - set(open_logs)
        if not closed or time.monotonic() - self._looked_s < FORGET_S:
            return
        self._looked_s = time.monotonic()
        await self._session.sync()
        names = [name for name in await self._cluster.topics.names() if is_of_delays(name)]
        configs = (await self._cluster.topics.get_all(names)).values()
        if any(isinstance(config, MetamqError) for config in configs):
            return  # the id of a topic is not known
        ids = {config.id for config in configs if isinstance(config, TopicConfig)}
        if gone := {name for name in closed if name.partition("/")[0] not in ids}:
            kept = {name: place for name, place in self._moved.offsets.items() if name not in gone}
            self._moved = await self._change(replace(self._moved, offsets=kept))

    # -- transactions -------------------------------------------------------------------------------------------------

    async def decide(self, ends: Mapping[str, tuple[int, int]], work: GlobalTransaction) -> None:
        """Decides a prepared transaction, which moves the messages before these places of logs. Raises MetamqError."""
        committing = dict(self._moved.committing)
        if work.prepared:
            committing[work.gtrid.hex()] = tuple(work.prepared)
        offsets = {**self._moved.offsets, **ends}  # also those of logs that are not open at present
        self._moved = await self._change(replace(self._moved, offsets=offsets, committing=committing), work)

    async def roll_back_undecided(self) -> None:
        """Rolls back transactions that are prepared, and not decided: see the module. Raises MetamqError."""
        now_s = time.monotonic()
        due = [one for one in await self._cluster.refresh_brokers() if self._ask_s.get(one, 0.0) <= now_s]
        left = list[tuple[int, bytes]]()
        for broker_id, found in zip(due, await asyncio.gather(*map(self._prepared_at, due)), strict=True):
            self._ask_s[broker_id] = now_s + (ASK_SOON_S if found is None else ASK_AGAIN_S)
            left += [(broker_id, gtrid) for gtrid in found or () if gtrid.hex() not in self._moved.committing]
        if left:
            self._moved = await self._change(self._moved)
        for broker_id, gtrid in left:
            try:
                await self._end(gtrid, broker_id, Verb.ROLLBACK)
            except MetamqError as error:
                log.info("delayed messages: broker %d has a transaction without a decision: %s", broker_id, error)
                self._ask_s[broker_id] = now_s + ASK_SOON_S

    async def _prepared_at(self, broker_id: int) -> list[bytes] | None:
        """Returns the gtrids that are prepared at a broker, of this broker id's; None: it does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._client.branches(broker_id)
        except (MetamqError, TimeoutError) as error:
            log.info("delayed messages: broker %d is not asked for transactions now: %s", broker_id, error)
            return None
        return [one.xid.gtrid for one in found if one.xid.gtrid.startswith(self._prefix)]

    async def finish_later(self) -> None:
        """Commits the decided transactions that are left, once in RETRY_S."""
        if self._moved.committing and time.monotonic() - self._finished_s > RETRY_S:
            await self.finish()

    async def finish(self, work: GlobalTransaction | None = None) -> None:
        """Commits the decided transactions, at each broker in their order.

        The next change of the node leaves out those that are committed.
        """
        left, behind = dict[str, tuple[int, ...]](), set[int]()
        for gtrid, brokers in self._moved.committing.items():
            if work is not None and gtrid == work.gtrid.hex() and not behind and not await work.commit():
                continue
            open_at = [one for one in brokers if one in behind or not await self._is_committed(gtrid, one)]
            behind.update(open_at)  # a later transaction waits there, so messages keep their order
            if open_at:
                left[gtrid] = tuple(open_at)
        self._moved = replace(self._moved, committing=left)
        self._finished_s = time.monotonic()

    async def _is_committed(self, gtrid: str, broker_id: int) -> bool:
        try:
            await self._end(bytes.fromhex(gtrid), broker_id, Verb.COMMIT)
        except MetamqError as error:
            self._log_once.failed(f"delayed messages are not readable at broker {broker_id} yet", error)
            return False
        return True

    async def _end(self, gtrid: bytes, broker_id: int, verb: Verb) -> None:
        """Ends a branch. Raises MetamqError if its broker does not answer soon."""
        branch = Branch(Xid(FORMAT_ID, gtrid, str(broker_id).encode()), broker_id, new_session(), principal=BROKERS)
        try:
            await self._client.ask(branch, [verb], timeout_s=RETRY_S)
        except BranchNotKnown:
            return  # it is ended already
