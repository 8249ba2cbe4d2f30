"""A real broker, and a client that sends whatever bytes a test wants."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgpack
import psutil
import pytest

from metamq.testing import Cluster
from metamq.wire import status
from metamq.wire.batch import walk
from metamq.wire.columns import decode, encode
from metamq.wire.commands import (
    LATEST,
    Command,
    Get,
    GetPartition,
    GetResult,
    Hello,
    OffsetsEntry,
    OffsetsResult,
    PutEntry,
    PutResult,
)
from metamq.wire.frames import PREFIX_BYTES, Buffer, Frame, FrameReader, encode_frame
from metamq.wire.headers import unpack, unpack_list
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker

MEBIBYTE = 1024 * 1024
TIMEOUT_S = 60.0


class RawClient:
    """A blocking socket that speaks frames, and anything else. `frame_sizes` has the size of each frame received."""

    def __init__(self, port: int, *, greet: bool = True, receive_buffer: int = 0) -> None:
        """Without `greet` the first frame is the test's; a small `receive_buffer` leaves more to the broker's."""
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(("127.0.0.1", port))
        self.frame_sizes: list[int] = []
        self._reader = FrameReader(header_bytes_max=16 * MEBIBYTE, initial_bytes=MEBIBYTE)
        self._frames: list[Frame] = []
        self._opaque = 0
        if greet:
            self.send(hello())
            assert self.answer().status == status.OK

    def send(self, data: bytes | list[Buffer]) -> None:
        self.socket.sendall(data if isinstance(data, bytes) else b"".join(data))

    def frame(self, command: int, header: Any, bodies: list[Buffer] | None = None) -> tuple[int, bytes]:
        self._opaque += 1
        return self._opaque, b"".join(encode_frame(1, command, 0, self._opaque, header, bodies))

    def request(self, command: int, header: Any, bodies: list[Buffer] | None = None) -> int:
        """Sends a request; returns its number."""
        opaque, data = self.frame(command, header, bodies)
        self.send(data)
        return opaque

    def answer(self) -> Frame:
        """The next frame. Raises EOFError at the end of the stream."""
        while not self._frames:
            buffer = self._reader.next_buffer()
            count = self.socket.recv_into(buffer)
            if not count:
                raise EOFError
            for frame in self._reader.received(count):
                self._frames.append(frame)
                self.frame_sizes.append(PREFIX_BYTES + len(msgpack.packb(frame.header)) + len(frame.body))
        return self._frames.pop(0)

    def ask(self, command: int, header: Any, bodies: list[Buffer] | None = None) -> Frame:
        """A request's own answer."""
        opaque = self.request(command, header, bodies)
        answer = self.answer()
        assert (answer.opaque, answer.command) == (opaque, command)
        return answer

    def ended(self) -> bool:
        """Waits for the end of the stream; what comes before it is dropped. False for a reset."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def hello(version_min: int = 1, version_max: int = 1) -> bytes:
    return b"".join(encode_frame(1, Command.HELLO, 0, 0, Hello(version_min, version_max, "raw")))


def batch_of(values: list[bytes], **columns: Any) -> bytearray:
    return encode(values, base_timestamp_us=1_000_000, **columns)


def get(
    *,
    wait_ms: int = 5000,
    bytes_min: int = 1,
    bytes_max: int = 4 * MEBIBYTE,
    partition_bytes_max: int = MEBIBYTE,
    opened: list[GetPartition] | None = None,
    armed: list[tuple[int, int]] | None = None,
    closed: list[int] | None = None,
) -> Get:
    return Get(wait_ms, bytes_min, bytes_max, partition_bytes_max, opened or [], armed or [], closed or [])


def values_in(data: memoryview) -> list[bytes]:
    """The values of all whole batches."""
    found: list[bytes] = []
    for position, header in walk(data):
        found += decode(data[position : position + header.size], header).values.tolist()
    return found


def error_of(answer: Frame) -> Exception:
    assert answer.status != status.OK
    return status.decode_error(answer.status, answer.header)


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)


class Front:
    """The broker under test, topics made as tests need them, and the helpers that tests share."""

    batch = staticmethod(batch_of)
    get = staticmethod(get)
    values_in = staticmethod(values_in)
    error_of = staticmethod(error_of)
    until = staticmethod(until)

    def __init__(self, running: Cluster) -> None:
        self.cluster = running
        self.port = running.broker.port
        self.slow = [SlowHello(self.port, pause_s) for pause_s in (0.6, 20)]
        """Started with the broker, for the test that comes last: the time they need passes with the others."""
        self.patient = RawClient(self.port)
        """Greeted at the beginning, and silent since then."""
        self.rude = RawClient(self.port)
        """Refused at the beginning, and still sending."""
        self.rude.send(bytes(16))
        self._ids: dict[str, str] = {}
        self._clients: list[RawClient] = []

    def connect(self, **options: Any) -> RawClient:
        """A client that is closed when the test ends."""
        client = RawClient(self.port, **options)
        self._clients.append(client)
        return client

    def close_clients(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def topic(self, name: str, partitions: int = 1, **settings: Any) -> str:
        """The id of a topic, made on first use."""
        if name not in self._ids:
            self.cluster.create_topic(name, partitions=partitions, **settings)
            with self.cluster.admin() as admin:
                self._ids[name] = admin.topics()[name].id
        return self._ids[name]

    def delete(self, name: str) -> None:
        """Deletes a topic that would be a load on the broker for as long as it runs."""
        del self._ids[name]
        with self.cluster.admin() as admin:
            admin.delete(name)

    def put(self, client: RawClient, topic: str, batches: list[tuple[int, bytes | bytearray]]) -> list[PutResult]:
        """Sends (partition, batch) pairs in one PUT."""
        entries = [PutEntry(topic, self.topic(topic), index, len(batch)) for index, batch in batches]
        answer = client.ask(Command.PUT, entries, [batch for _index, batch in batches])
        assert answer.status == status.OK, answer.header
        return unpack_list(PutResult, answer.header)

    def fill(self, topic: str, partition: int, values: list[bytes]) -> None:
        """Stores one batch."""
        with RawClient(self.port) as client:
            (result,) = self.put(client, topic, [(partition, self.batch(values))])
        assert result.status == status.OK, result.error

    def offset(self, topic: str, partition: int = 0, at: int = LATEST) -> int:
        """The partition's latest offset."""
        with RawClient(self.port) as client:
            answer = client.ask(Command.OFFSETS, [OffsetsEntry(topic, self.topic(topic), partition, at)])
        return unpack(OffsetsResult, answer.header[0]).offset

    def still_serves(self) -> None:
        """A client that comes now writes a message and reads it back."""
        value = b"still here at %d" % time.monotonic_ns()
        topic_id = self.topic("pulse")
        with RawClient(self.port) as client:
            (stored,) = self.put(client, "pulse", [(0, self.batch([value]))])
            assert stored.status == status.OK
            opened = [GetPartition(1, "pulse", topic_id, 0)]
            answer = client.ask(Command.GET, self.get(opened=opened, armed=[(1, stored.base_offset)]))
            (result,) = unpack_list(GetResult, answer.header)
            assert self.values_in(answer.body[: result.size]) == [value]

    def rss(self) -> int:
        """The broker's memory, in bytes."""
        rss: int = psutil.Process(self.cluster.broker.pid).memory_info().rss
        return rss


class SlowHello(threading.Thread):
    """A stranger who sends a byte of a HELLO now and then, until the broker hangs up after `lasted_s`."""

    def __init__(self, port: int, pause_s: float) -> None:
        super().__init__(daemon=True)
        self.lasted_s = 0.0
        self.hung_up = False
        self._port = port
        self._pause_s = pause_s

    def run(self) -> None:
        began = time.monotonic()
        with RawClient(self._port, greet=False) as client:
            client.socket.settimeout(self._pause_s)
            for byte in hello():
                try:
                    client.send(bytes([byte]))
                    ended = not client.socket.recv(1)
                except TimeoutError:
                    continue
                except ConnectionError:
                    ended = True
                if ended:
                    self.hung_up = True
                    break
        self.lasted_s = time.monotonic() - began


@contextmanager
def many_files(count: int) -> Iterator[None]:
    """Room for so many descriptors in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def sweep(local: LocalBroker) -> None:
    """Has the broker look at its clients now."""
    done = threading.Event()

    def run() -> None:
        for connection in list(local.broker._connections):
            connection.sweep()
        done.set()

    local.loop.call_soon_threadsafe(run)
    assert done.wait(60)


@pytest.fixture
def connect_to() -> Iterator[Callable[..., RawClient]]:
    """Connects to a broker of the test's own, by its port."""
    clients: list[RawClient] = []

    def connect(port: int, **options: Any) -> RawClient:
        clients.append(RawClient(port, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def running() -> Iterator[Front]:
    """One broker for all tests here."""
    with many_files(4096), cluster() as made:
        front = Front(made)
        for slow in front.slow:
            slow.start()
        yield front
        front.patient.close()
        front.rude.close()


@pytest.fixture
def front(running: Front) -> Iterator[Front]:
    """The broker; after the test it must still be the same process, and serve."""
    pid = running.cluster.broker.pid
    yield running
    running.close_clients()
    assert running.cluster.broker.running
    assert running.cluster.broker.pid == pid
    running.still_serves()
