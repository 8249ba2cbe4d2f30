"""A client's view of the cluster: the topics' configurations and the brokers' addresses, kept current by watches.

The addresses are those of the masters. A client that also reads from slaves has the addresses of the slaves that offer
its topics, too. A watch marks its value as stale; the next use, or the refresh that the watch starts, reads the value
again. Without ZooKeeper a client continues with its last values: brokers still serve it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from metamq.client.net.transport import BrokerConnection, Connections
from metamq.errors import ConnectError, MetamqError, NotAuthorized, ServerBusy
from metamq.wire.commands import Command, TopicChange, TopicChanged
from metamq.wire.headers import unpack
from metamq.zk.cluster.brokers import live_brokers
from metamq.zk.cluster.offers import slaves_offering
from metamq.zk.cluster.replicas import live_slaves
from metamq.zk.cluster.topics import TopicConfig, TopicStore

if TYPE_CHECKING:
    from metamq.zk.cluster.registrations import BrokerAddress
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.client")

RETRY_S = 0.5
TOPIC_TIMEOUT_S = 10.0
BUSY_PAUSE_S = 0.05
MASTER = -1
"""The value that stands for the master in the place of a replica's number."""


class Source(NamedTuple):
    """A replica of a broker id, from which a partition is read."""

    broker_id: int
    replica: int = MASTER


class ClusterClient:
    """A client's view of topics and brokers, and its connections. Not thread-safe: use it within one loop only."""

    def __init__(
        self, session: Session, changed: Callable[[], None] | None = None, *, with_slaves: bool = False
    ) -> None:
        self.session = session
        self.topics = TopicStore(session, self._ask_for_topic)
        self.connections = Connections(session.security.brokers)
        self.configs: dict[str, TopicConfig] = {}
        self.brokers: dict[int, BrokerAddress] = {}
        """The masters, by broker id."""
        self.slaves: dict[int, dict[int, BrokerAddress]] = {}
        """The slaves by broker id and replica, for a client that reads from slaves."""
        self._with_slaves = with_slaves
        self._offering: dict[str, set[tuple[int, int]]] = {}
        """The (broker id, replica) of the slaves that have a topic, by topic."""
        self._fresh_offers: set[str] = set()
        self._changed = changed or (lambda: None)
        self._fresh_topics: set[str] = set()
        self._brokers_fresh = False
        self._addresses: dict[int, BrokerAddress] = {}
        """The last address of each broker; a broker that is down is not registered any more."""
        self._reading: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._refreshes: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        brokers = session.security.brokers
        if (
            session.security.zookeeper is not None
            and brokers is not None
            and (brokers.user or brokers.token_file or brokers.delegated is not None)
        ):
            session.prover = self._zookeeper_proof

    async def _zookeeper_proof(self) -> str:
        """Returns this client's proof of identity for ZooKeeper, which a broker makes.

        Raises ConnectError, and NotAuthorized for a token of a delegation, which owns nothing.
        """
        brokers = self.session.security.brokers
        if brokers is not None and brokers.delegated is not None:
            hint = "Such a token is for reading and sending. Log in as a user, or with a certificate."
            raise NotAuthorized(f"token {brokers.delegated.token_id}", "write", "groups and sinks", hint=hint)
        failure: MetamqError = ConnectError("a broker", "none runs, and only brokers identify users to ZooKeeper")
        for broker_id in list(await self.refresh_brokers()):
            try:
                return (await self.connection(broker_id)).zookeeper_proof
            except ConnectError as error:
                failure = error
        raise failure

    async def topic(self, name: str) -> TopicConfig:
        """Returns the topic's configuration. Raises TopicNotFound, or ConnectionLost if it was never read before."""
        if name in self._fresh_topics and not self._reading[name].locked():
            return self.configs[name]
        try:
            return await self._read_topic(name)
        except ConnectError:
            if name not in self.configs:
                raise
            return self.configs[name]

    async def _read_topic(self, name: str) -> TopicConfig:
        async with self._reading[name]:  # a task that comes during a read waits for the same answer
            if name in self._fresh_topics:
                return self.configs[name]
            try:
                self._fresh_topics.add(name)  # before the answer: the watch may fire before it is here
                self.configs[name] = await self.topics.get(name, lambda: self._topic_stale(name))
            except BaseException as error:
                self._fresh_topics.discard(name)
                if isinstance(error, MetamqError) and not isinstance(error, ConnectError):
                    self.configs.pop(name, None)
                raise
            return self.configs[name]

    def _topic_stale(self, name: str) -> None:
        self._fresh_topics.discard(name)
        if name in self.configs:
            self._refresh(
                f"topic {name}",
                partial(self._read_topic, name),
                lambda: name in self._fresh_topics or name not in self.configs,
            )

    async def _ask_for_topic(self, topic: str, document: bytes, version: int) -> bool:
        """Has a broker change a topic: see TopicStore.write. Raises the broker's error, ConnectError, Timeout."""
        deadline = time.monotonic() + TOPIC_TIMEOUT_S
        while True:
            try:
                return await self._ask_any(topic, TopicChange(topic, document, version))
            except ServerBusy:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(BUSY_PAUSE_S)

    async def _ask_any(self, topic: str, request: TopicChange) -> bool:
        """Sends the request to one broker after another, until one may have done it."""
        failure: MetamqError = ConnectError("a broker", f"none runs, and only brokers may change topic {topic!r}")
        broker_ids = list(await self.refresh_brokers())
        for broker_id in random.sample(broker_ids, len(broker_ids)):  # so a broker that hangs is not always the first
            try:
                connection = await self.connection(broker_id)
                header = await connection.request(Command.TOPIC, request, timeout_s=TOPIC_TIMEOUT_S)
                return unpack(TopicChanged, header).is_done
            except MetamqError as error:
                failure = error
                if not error.retriable or error.outcome != "not_done":
                    raise
        raise failure

    async def broker_ids(self) -> list[int]:
        """Returns every broker id that ever had a master, in order. Raises ConnectionLost."""
        names = await self.session.children_or_none(self.session.paths.broker_ids()) or []
        return sorted(int(name) for name in names if name.isdecimal())

    async def refresh_brokers(self) -> dict[int, BrokerAddress]:
        """Returns the masters by broker id; without ZooKeeper, the last known ones."""
        try:
            await self._read_brokers()
        except MetamqError:
            if not self.brokers:
                raise
        return self.brokers

    async def _read_brokers(self) -> None:
        async with self._reading["/brokers"]:
            if not self._brokers_fresh:
                self._brokers_fresh = True
                try:
                    brokers = await live_brokers(self.session, self._brokers_stale)
                    if self._with_slaves:
                        self.slaves = await live_slaves(self.session, self._brokers_stale)
                    self.brokers = brokers
                except BaseException:
                    self._brokers_fresh = False
                    raise

    async def look_again(self) -> None:
        """Reads the masters again now, even if no watch has fired. Raises ConnectError."""
        await self.session.sync()
        async with self._reading["/brokers"]:
            self.brokers = await live_brokers(self.session)

    def _brokers_stale(self) -> None:
        self._brokers_fresh = False
        self._refresh("brokers", self._read_brokers, lambda: self._brokers_fresh)

    async def _refresh_offers(self, topic: str) -> None:
        """Reads the slaves that have a topic. Without ZooKeeper the last known ones stay."""
        async with self._reading[f"/offers/{topic}"]:
            if topic not in self._fresh_offers:
                self._fresh_offers.add(topic)
                try:
                    watch = partial(self._offers_stale, topic)
                    self._offering[topic] = await slaves_offering(self.session, topic, watch)
                except BaseException:
                    self._fresh_offers.discard(topic)
                    raise

    def _offers_stale(self, topic: str) -> None:
        self._fresh_offers.discard(topic)
        self.follow_slaves(topic)

    def follow_slaves(self, topic: str) -> None:
        """Keeps the topic's slaves current for `slaves_with`, if the client reads from slaves."""
        if self._with_slaves and topic not in self._fresh_offers:
            read = partial(self._refresh_offers, topic)
            self._refresh(f"slaves with {topic}", read, lambda: topic in self._fresh_offers)

    async def know_slaves(self, topic: str) -> None:
        """Reads the topic's slaves for `slaves_with`. Without ZooKeeper the last known ones stay."""
        if self._with_slaves:
            with contextlib.suppress(ConnectError):
                await self._refresh_offers(topic)

    def slaves_with(self, broker_id: int, topic: str) -> list[int]:
        """Returns the known slaves of a broker id that have a topic."""
        known = self.slaves.get(broker_id, {})
        return sorted(r for b, r in self._offering.get(topic, ()) if b == broker_id and r in known)

    def _refresh(self, what: str, read: Callable[[], Awaitable[object]], is_fresh: Callable[[], bool]) -> None:
        if not self._closed and what not in self._refreshes:
            task = asyncio.ensure_future(self._read_until_known(what, read, is_fresh))
            self._refreshes[what] = task
            task.add_done_callback(lambda _task: self._refreshes.pop(what, None))

    async def _read_until_known(
        self, what: str, read: Callable[[], Awaitable[object]], is_fresh: Callable[[], bool]
    ) -> None:
        while True:
            try:
                await read()
            except MetamqError as error:
                if not isinstance(error, ConnectError):
                    log.info("%s: %s", what, error)
                if not is_fresh():
                    await asyncio.sleep(RETRY_S)
                    continue
            self._changed()
            if is_fresh():  # a watch that fires during a refresh does not start another one
                return

    async def connection(self, broker_id: int, replica: int = MASTER) -> BrokerConnection:
        """Returns a connection to the master of a broker id, or to a slave. Raises ConnectError if there is none now.

        A replica that changes its role gets another connection: each connection has its own fetch session.
        """
        if not self._brokers_fresh or self._reading["/brokers"].locked():
            await self.refresh_brokers()
        address = self._address(broker_id, replica)
        if replica != MASTER:
            if address is None:
                raise ConnectError(f"slave {replica} of broker {broker_id}", "it is not registered in ZooKeeper")
            return await self.connections.get(address, purpose="reading from a slave")
        if address is None:
            raise ConnectError(f"broker {broker_id}", "it is not registered in ZooKeeper", hint="Check that it runs.")
        self._addresses[broker_id] = address
        return await self.connections.get(address)

    async def reading_connection(self, broker_id: int, topics: Iterable[str]) -> tuple[BrokerConnection, int]:
        """Returns a connection to the master and MASTER, or a connection to a slave and the slave's number.

        The slave is used while the master cannot be reached, if the client reads from slaves and the slave has these
        topics.
        """
        try:
            return await self.connection(broker_id), MASTER
        except ConnectError:
            if not self._with_slaves:
                raise
            topics = set(topics)
            for topic in topics:
                await self._refresh_offers(topic)
            for replica in sorted(self.slaves.get(broker_id, {})):
                if all(replica in self.slaves_with(broker_id, topic) for topic in topics):
                    with contextlib.suppress(ConnectError):
                        return await self.connection(broker_id, replica), replica
            raise

    def _address(self, broker_id: int, replica: int) -> BrokerAddress | None:
        return self.brokers.get(broker_id) if replica == MASTER else self.slaves.get(broker_id, {}).get(replica)

    def is_current(self, source: Source, address: str) -> bool:
        """Returns False if the source has another address now, and True if it is not registered: it may still be
        there."""
        known = self._address(*source)
        return known is None or known.address == address

    def broker_name(self, broker_id: int) -> str:
        """Returns the broker's name for messages, with the address of the last connection to it."""
        address = self._addresses.get(broker_id)
        return f"broker {broker_id} at {address.host}:{address.port}" if address else f"broker {broker_id}"

    async def close(self) -> None:
        """Ends the refreshes and closes the connections. The session belongs to its owner and stays open."""
        self._closed = True
        tasks = list(self._refreshes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.connections.close()
