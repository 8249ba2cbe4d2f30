"""What a client knows of the cluster: topics' configurations and where the masters are, followed by watches.

A watch marks what it was set on as stale; the next use, or the refresh it starts, reads it again. Cut off from
ZooKeeper, a client goes on with what it knows: brokers serve it all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

from metamq.client.transport import BrokerConnection, Connections
from metamq.errors import ConnectError, MetamqError
from metamq.zk.brokers import BrokerAddress, live_brokers
from metamq.zk.session import Session
from metamq.zk.topics import TopicConfig, TopicStore

log = logging.getLogger("metamq.client")

RETRY_S = 0.5


class Cluster:
    """Topics and brokers as a client sees them, and its connections. Use within one loop only."""

    def __init__(self, session: Session, changed: Callable[[], None] | None = None) -> None:
        self.session = session
        self.topics = TopicStore(session)
        self.connections = Connections()
        self.configs: dict[str, TopicConfig] = {}
        self.brokers: dict[int, BrokerAddress] = {}
        self._changed = changed or (lambda: None)
        self._fresh_topics: set[str] = set()
        self._brokers_fresh = False
        self._addresses: dict[int, str] = {}
        """Where each broker was last; one that is down is not registered any more."""
        self._reading: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._refreshes: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def topic(self, name: str) -> TopicConfig:
        """The topic's configuration. Raises TopicNotFound; ConnectionLost only when it was never known."""
        async with self._reading[name]:  # who comes while it is being read waits for the answer, too
            if name in self._fresh_topics:
                return self.configs[name]
            try:
                self._fresh_topics.add(name)  # before the answer: the watch may fire before it is here
                self.configs[name] = await self.topics.get(name, lambda: self._topic_stale(name))
            except BaseException as error:
                self._fresh_topics.discard(name)
                if isinstance(error, ConnectError) and name in self.configs:
                    return self.configs[name]
                if isinstance(error, MetamqError) and not isinstance(error, ConnectError):
                    self.configs.pop(name, None)
                raise
            return self.configs[name]

    def _topic_stale(self, name: str) -> None:
        self._fresh_topics.discard(name)
        if name in self.configs:
            self._refresh(f"topic {name}", self.topic, name)

    async def refresh_brokers(self) -> dict[int, BrokerAddress]:
        """The masters by broker id; the last known while ZooKeeper is away."""
        async with self._reading["/brokers"]:
            if not self._brokers_fresh:
                self._brokers_fresh = True
                try:
                    self.brokers = await live_brokers(self.session, self._brokers_stale)
                except BaseException as error:
                    self._brokers_fresh = False
                    if not isinstance(error, MetamqError) or not self.brokers:
                        raise
            return self.brokers

    def _brokers_stale(self) -> None:
        self._brokers_fresh = False
        self._refresh("brokers", self.refresh_brokers)

    def _refresh(self, what: str, read: Callable[..., object], *args: str) -> None:
        if not self._closed and what not in self._refreshes:
            task = asyncio.ensure_future(self._read_until_known(what, read, *args))
            self._refreshes[what] = task
            task.add_done_callback(lambda _task: self._refreshes.pop(what, None))

    async def _read_until_known(self, what: str, read: Callable[..., object], *args: str) -> None:
        while True:
            try:
                await read(*args)  # type: ignore[misc]
            except ConnectError:
                await asyncio.sleep(RETRY_S)
                continue
            except MetamqError as error:
                log.info("%s: %s", what, error)
            self._changed()
            if self._is_fresh(args):
                return

    def _is_fresh(self, args: tuple[str, ...]) -> bool:
        """Whether no watch has fired since: one that fires during a refresh starts none."""
        return self._brokers_fresh if not args else args[0] in self._fresh_topics or args[0] not in self.configs

    async def connection(self, broker_id: int) -> BrokerConnection:
        """A connection to the master of a broker id. Raises ConnectError when there is none at present."""
        brokers = await self.refresh_brokers()
        address = brokers.get(broker_id)
        if address is None:
            raise ConnectError(f"broker {broker_id}", "it is not registered in ZooKeeper", hint="Is it running?")
        self._addresses[broker_id] = f"{address.host}:{address.port}"
        return await self.connections.get(address.host, address.port)

    def broker_name(self, broker_id: int) -> str:
        """The broker, with the address that it was last connected to at."""
        address = self._addresses.get(broker_id)
        return f"broker {broker_id} at {address}" if address else f"broker {broker_id}"

    async def close(self) -> None:
        """Ends refreshes and closes the connections; the session is its owner's."""
        self._closed = True
        tasks = list(self._refreshes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.connections.close()
