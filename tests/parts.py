"""What tests of brokers and producers share: reading what is stored, waiting, HTTP, a line that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import psutil

from metamq.broker.config import BrokerConfig
from metamq.broker.process.server import Broker
from metamq.client.net.paged_requests import ask_statistics
from metamq.client.net.transport import BrokerConnection
from metamq.client.settings import ClusterAccess
from metamq.errors import ConnectError, DeliveryTimeout, MetamqError
from metamq.security.tls import client_security
from metamq.testing import BrokerProcess
from metamq.testing.broker_process import INSECURE
from metamq.wire import status
from metamq.wire.batch import walk
from metamq.wire.columns import decode
from metamq.wire.commands import Command, Get, GetPartition, GetResult
from metamq.wire.headers import unpack_list
from metamq.zk.session.session import Session

if TYPE_CHECKING:
    from metamq import Consumer, Message
    from metamq.testing import Cluster

FETCH_BYTES = 4 * 1024 * 1024
SLOW_S = 60.0
"""For what takes a moment: so long it may take a machine that is slow, and busy with other tests."""
T = TypeVar("T")


def wait_until(condition: Callable[[], object], limit_s: float = SLOW_S, what: str = "it") -> None:
    """Returns once the condition holds; fails after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s:g} s"
        time.sleep(0.01)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in processes)


def until_answered(ask: Callable[[], T], limit_s: float = SLOW_S) -> T:
    """What is answered. A client does not know at once that a broker is back, which it says by a ConnectError."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return ask()
        except ConnectError:
            assert time.monotonic() < deadline
        time.sleep(0.01)


def is_at_end(consumer: Consumer[Any]) -> bool:
    """Whether it has handled all that its brokers show. False where they do not say."""
    with contextlib.suppress(MetamqError, KeyError):
        lag = consumer.lag()
        return bool(lag) and lag.keys() == consumer.health().partitions.keys() and not any(lag.values())
    return False


def idle_reason(consumer: Consumer[Any]) -> str | None:
    """Why it has no partitions, as its health says."""
    group = consumer.health().group
    return group.idle_reason if group is not None else None


def read_to_end(consumer: Consumer[Any]) -> list[Message[Any]]:
    """All messages up to the end, however slowly they come. For its `idle_timeout_s` it looks for more than that."""
    found = list(consumer)
    deadline = time.monotonic() + SLOW_S
    while not is_at_end(consumer):
        assert time.monotonic() < deadline, f"only {len(found)} messages were read"
        found += consumer
    return found


def values_to_end(consumer: Consumer[Any]) -> list[Any]:
    """The same, of values alone, which takes less time."""
    found = [value for batch in consumer.batches() for value in batch.values]
    deadline = time.monotonic() + SLOW_S
    while not is_at_end(consumer):
        assert time.monotonic() < deadline, f"only {len(found)} messages were read"
        found += [value for batch in consumer.batches() for value in batch.values]
    return found


def timed_out(running: Cluster, topic: str, says: str) -> DeliveryTimeout:
    """The error of a message that cannot be stored, and whose time is over: it names why, once a broker has said so.

    On a slow machine that takes longer than a moment.
    """
    for timeout_s in (0.5, 2, 8, 30):
        with running.producer(delivery_timeout_s=timeout_s) as producer:
            error = producer.send(topic, b"in vain").exception(2 * SLOW_S)
        assert isinstance(error, DeliveryTimeout), error
        if says in str(error):
            return error
    raise AssertionError(f"the reason is not named: {error}")


def make_chroot(servers: str) -> str:
    """Makes the chroot of the address, as the first broker does; returns the address."""

    async def make() -> None:
        await (await Session.open(servers, make_chroot=True)).close()

    asyncio.run(make())
    return servers


def another_boot(broker: BrokerProcess) -> None:
    """As if the broker's host had gone down and come back since the process was killed."""
    path = broker.data / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot_id": "another"}))


class Stored(NamedTuple):
    """One stored message."""

    offset: int
    key: bytes | None
    value: bytes


async def connected(broker: BrokerProcess | LocalBroker, timeout_s: float = SLOW_S) -> BrokerConnection:
    """A connection to the broker, by the security that it has."""
    config = broker.security if isinstance(broker, BrokerProcess) else INSECURE
    security = client_security(config).brokers
    return await BrokerConnection.open("127.0.0.1", broker.port, security=security, timeout_s=timeout_s)


def statistics(broker: BrokerProcess | LocalBroker) -> dict[str, Any]:
    """What the broker answers to STATS."""

    async def ask() -> dict[str, Any]:
        connection = await connected(broker)
        try:
            return await ask_statistics(connection)
        finally:
            await connection.close()

    return asyncio.run(ask())


def read_topic(broker: BrokerProcess | LocalBroker, topic: str, topic_id: str) -> dict[str, list[Stored]]:
    """All that readers can see of a topic's partitions at this broker, both checksums of every batch verified."""

    async def read() -> dict[str, list[Stored]]:
        connection = await connected(broker)
        try:
            answer = await ask_statistics(connection)
            found = [p for p in answer["partitions"] if p["topic"] == topic]
            return {
                f"{broker.broker_id}-{p['partition']}": await _read_partition(connection, topic, topic_id, p)
                for p in sorted(found, key=lambda p: int(p["partition"]))
            }
        finally:
            await connection.close()

    return asyncio.run(read())


async def _read_partition(
    connection: BrokerConnection, topic: str, topic_id: str, partition: dict[str, Any]
) -> list[Stored]:
    index, offset = partition["partition"], partition["start_offset"]
    opened = [GetPartition(index, topic, topic_id, index)]
    messages: list[Stored] = []
    while offset < partition["stable_offset"]:
        poll = Get(1000, 1, FETCH_BYTES, FETCH_BYTES, opened, [(index, offset)], [])
        response = await connection.send(Command.GET, poll)
        assert response.status == status.OK, response
        for result in unpack_list(GetResult, response.header):
            assert result.status == status.OK, result
            for at, header in walk(response.body):
                columns = decode(response.body[at : at + header.size], header)
                values = columns.values.tolist()
                keys = columns.keys.tolist_with_nulls() if columns.keys is not None else [None] * len(values)
                found = [Stored(header.base_offset + i, keys[i], value) for i, value in enumerate(values)]
                messages += [message for message in found if message.offset >= offset]
                offset = header.end_offset
        opened = []
    return messages


def http_get(port: int, path: str) -> tuple[int, str]:
    """(status, text) of a page of a broker's status server."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=SLOW_S) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class Line:
    """A TCP line to a broker that a test can break: it passes on whole chunks, both ways, from threads of its own.

    `swallow()` lets requests through and loses the answers; `cut()` then ends every connection.
    """

    def __init__(self, port: int, broker_host: str) -> None:
        """Listens on 127.0.0.1 at the port that the broker has on its own loopback address."""
        self.target = broker_host, port
        """Where connections go that are made from now on."""
        self._listener = socket.create_server(("127.0.0.1", port))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._swallowing = threading.Event()
        self.swallowed = threading.Event()
        """An answer was lost."""
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs.append((client, broker))
            self._start(self._pass_on, client, broker, False)
            self._start(self._pass_on, broker, client, True)

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and self._swallowing.is_set():
                    self.swallowed.set()
                else:
                    target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """From now on answers are lost."""
        self.swallowed.clear()
        self._swallowing.set()

    def cut(self) -> None:
        """Ends every connection; later ones work."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._swallowing.clear()

    def close(self) -> None:
        """Ends everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(SLOW_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalBroker:
    """A broker in a thread of this process, where a test can look inside."""

    def __init__(self, zookeeper: str, data: Path, **settings: Any) -> None:
        self._config = BrokerConfig(**{"port": 0, "http_port": 0, "data": str(data), **settings})
        self._zookeeper = zookeeper
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @property
    def loop_thread(self) -> threading.Thread:
        """Which nothing is to hold up."""
        return self._thread

    @property
    def port(self) -> int:
        """As BrokerProcess has it."""
        return self.broker.port

    @property
    def broker_id(self) -> int:
        """As BrokerProcess has it."""
        return self._config.id

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            self.broker = Broker(self._config, ClusterAccess(self._zookeeper))
            await self.broker.start()
        except BaseException as error:
            self._problem = error
            return
        finally:
            self._ready.set()
        await self.broker.wait()
        await self.broker.stop()

    def __enter__(self) -> LocalBroker:
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            self._thread.join()
            raise self._problem
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.broker.end)
        self._thread.join(SLOW_S)
        assert not self._thread.is_alive()
