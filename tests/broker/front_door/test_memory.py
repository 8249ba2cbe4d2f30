"""Memory is bounded over all connections, and who holds it without making progress is closed."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from metamq.broker.front_door import protocol
from metamq.broker.process import server
from metamq.testing import Cluster
from metamq.wire import status
from metamq.wire.commands import Command, Get, GetPartition, PutEntry
from metamq.wire.frames import PREFIX, encode_frame
from metamq.wire.limits import FRAME_BYTES_MAX
from tests.broker.front_door.conftest import sweep
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker, http_get, wait_until

MEBIBYTE = 1024 * 1024
Connect = Callable[..., Any]


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    """A broker with as little memory for requests as it can have."""
    with cluster(request_memory_bytes=FRAME_BYTES_MAX) as running:
        running.create_topic("t", partitions=1)
        yield running


@pytest.fixture
def impatient(small: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBroker]:
    """One that waits for a stalled client for a moment only."""
    monkeypatch.setattr(server, "STALL_S", 0.2)
    with LocalBroker(small.zookeeper, tmp_path / "b", id=1, request_memory_bytes=FRAME_BYTES_MAX) as local:
        yield local


@pytest.fixture
def swept(small: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBroker]:
    """One that looks at its clients when the test says so: sweep()."""
    monkeypatch.setattr(server, "STALL_S", 3600)
    with LocalBroker(small.zookeeper, tmp_path / "b", id=2, request_memory_bytes=FRAME_BYTES_MAX) as local:
        yield local


def received_bytes(local: LocalBroker) -> int:
    """Since the last sweep."""
    return sum(connection._received_bytes for connection in list(local.broker._connections))


def put(size: int, opaque: int = 1) -> bytes:
    """A PUT of so many bytes to a topic that is not there."""
    entry = PutEntry("none", "0" * 16, 0, size)
    return b"".join(encode_frame(1, Command.PUT, 0, opaque, [entry], [bytes(size)]))


def metric(port: int, name: str) -> float:
    found = re.search(rf'^{name}{{broker="\d+"}} (\S+)$', http_get(port, "/metrics")[1], re.MULTILINE)
    assert found is not None, name
    return float(found[1])


class Sender(threading.Thread):
    """Sends data, which may take until the broker reads it; from the pause on when it may `go_on`."""

    def __init__(self, client: Any, data: bytes, *, pause: int = 0) -> None:
        super().__init__(daemon=True)
        self._client, self._data, self._pause = client, data, pause
        self.go_on = threading.Event()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # the broker may close it, the test too
            if self._pause:
                self._client.send(self._data[: self._pause])
                assert self.go_on.wait(110)
            self._client.send(self._data[self._pause :])


def test_large_frames_of_many_connections_are_read_in_turn(small: Cluster, connect_to: Connect) -> None:
    """Half of a frame from each, the other half later: the broker holds what it may, and answers all in the end."""
    broker, count, size = small.broker, 20, 16 * MEBIBYTE
    clients = [connect_to(broker.port) for _ in range(count)]
    data = put(size)
    process = psutil.Process(broker.pid)
    before = process.memory_info().rss
    senders = [Sender(client, data, pause=size // 2) for client in clients]
    room = FRAME_BYTES_MAX // 2 // len(data)  # the share of one address
    wait_until(lambda: metric(broker.http_port, "metamq_broker_requests_held_back") == count - room)
    assert metric(broker.http_port, "metamq_broker_request_bytes") == room * len(data)
    with small.producer() as producer:
        for _ in range(20):
            producer.send("t", b"small ones pass").result(60)
    grown = process.memory_info().rss - before
    print(f"{count} halves of {size / MEBIBYTE:.0f} MiB: the broker grew by {grown / MEBIBYTE:.1f} MiB")
    assert grown < FRAME_BYTES_MAX + 32 * MEBIBYTE
    for sender in senders:
        sender.go_on.set()
    for client in clients:
        answer = client.answer()
        assert (answer.command, answer.status, answer.header[0][0] != status.OK) == (Command.PUT, status.OK, True)
    wait_until(lambda: metric(broker.http_port, "metamq_broker_request_bytes") == 0)
    assert metric(broker.http_port, "metamq_broker_requests_held_back") == 0


def test_what_connections_leave_behind_goes_to_those_in_line(small: Cluster, connect_to: Connect) -> None:
    broker = small.broker
    hogs = [connect_to(broker.port) for _ in range(4)]
    data = put(30 * MEBIBYTE)
    for hog in hogs:
        hog.send(data[:100_000])
    wait_until(lambda: metric(broker.http_port, "metamq_broker_requests_held_back") == 3)
    client = connect_to(broker.port)
    sender = Sender(client, put(40 * MEBIBYTE))
    wait_until(lambda: metric(broker.http_port, "metamq_broker_requests_held_back") == 4)
    for hog in reversed(hogs):  # those in line first
        hog.close()
    assert client.answer().status == status.OK
    sender.join(60)
    wait_until(lambda: metric(broker.http_port, "metamq_broker_request_bytes") == 0)


def test_a_client_that_is_gone_leaves_the_queue(swept: LocalBroker, connect_to: Connect) -> None:
    """The broker reads nothing of a connection that waits, not even its end."""
    hog, waiting = connect_to(swept.broker.port), connect_to(swept.broker.port)
    hog.send(put(40 * MEBIBYTE)[:100_000])
    wait_until(lambda: metric(swept.broker.http_port, "metamq_broker_request_bytes") > 0)
    waiting.send(put(MEBIBYTE)[:100_000])
    wait_until(lambda: metric(swept.broker.http_port, "metamq_broker_requests_held_back") == 1)
    waiting.close()
    sweep(swept)
    wait_until(lambda: metric(swept.broker.http_port, "metamq_broker_requests_held_back") == 0)
    assert len(swept.broker._connections) == 1


@pytest.mark.parametrize("sent", [1, PREFIX.size - 1, 1000, 100_000])
def test_half_a_frame_and_then_nothing(impatient: LocalBroker, connect_to: Connect, sent: int) -> None:
    port = impatient.broker.port
    patient = connect_to(port)
    assert patient.ask(Command.STATS, None).status == status.OK
    stalled = connect_to(port)
    stalled.send(put(MEBIBYTE)[:sent])
    assert stalled.ended() in (True, False)
    wait_until(lambda: metric(impatient.broker.http_port, "metamq_broker_request_bytes") == 0)
    assert patient.ask(Command.STATS, None).status == status.OK, "who owes nothing may be silent"


def test_a_slow_frame_that_goes_on_is_waited_for(
    swept: LocalBroker, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "STALL_BYTES", 20)
    client = connect_to(swept.broker.port)
    data = put(100)
    for at in range(0, len(data), 20):
        sweep(swept)
        piece = data[at : at + 20]
        client.send(piece)
        wait_until(lambda piece=piece: received_bytes(swept) == len(piece))  # type: ignore[misc]
    sweep(swept)
    assert client.answer().status == status.OK


def test_a_trickle_is_not_progress(impatient: LocalBroker, connect_to: Connect) -> None:
    client = connect_to(impatient.broker.port)
    ended: list[bool] = []
    watching = threading.Thread(target=lambda: ended.append(client.ended()))
    watching.start()
    client.send(put(MEBIBYTE)[:100_000])

    def trickle() -> bool:
        try:
            client.send(b"x")
        except OSError:
            return True
        return bool(ended)

    wait_until(trickle)
    watching.join(60)


def test_who_stalls_does_not_keep_the_others_in_line(swept: LocalBroker, connect_to: Connect) -> None:
    """Nor does anybody in line count as stalled, however long it takes."""
    broker = swept.broker
    data = put(FRAME_BYTES_MAX - MEBIBYTE)
    for waiting in range(3):
        connect_to(broker.port).send(data[:100_000])
        wait_until(lambda n=waiting: broker._memory.waiting == n)  # type: ignore[misc]
    client = connect_to(broker.port)
    sender = Sender(client, data)
    wait_until(lambda: broker._memory.waiting == 3)
    for left in (3, 2, 1):
        while len(broker._connections) > left:
            sweep(swept)
        wait_until(lambda n=left: broker._memory.waiting == n - 1)  # type: ignore[misc]
    assert client.answer().status == status.OK
    sender.join(60)


def test_a_client_with_requests_that_never_reads_is_let_go(
    small: Cluster, impatient: LocalBroker, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its PUT is not read on until it has read its answers, and would hold memory for ever."""
    with small.admin() as admin:
        topic = admin.create_topic("big", partitions=1, brokers=[1])
    with small.producer() as producer:
        producer.send("big", bytes(MEBIBYTE - 1000)).result(60)
    client = connect_to(impatient.broker.port, receive_buffer=64 * 1024)
    opened = [GetPartition(1, "big", topic.id, 0)]
    gets = [Get(0, 1, MEBIBYTE, MEBIBYTE, [] if n else opened, [(1, 0)], []) for n in range(20)]
    frames = b"".join(b"".join(encode_frame(1, Command.GET, 0, n, get)) for n, get in enumerate(gets))
    reserve, reserved = impatient.broker._memory.reserve, list[int]()

    def noted(size: int, asker: Any) -> bool:  # it may be there for a moment only
        reserved.append(size)
        return reserve(size, asker)

    monkeypatch.setattr(impatient.broker._memory, "reserve", noted, raising=False)
    Sender(client, frames + put(8 * MEBIBYTE))
    wait_until(lambda: max(reserved, default=0) > 8 * MEBIBYTE)
    wait_until(lambda: metric(impatient.broker.http_port, "metamq_broker_connections") == 0)
    assert metric(impatient.broker.http_port, "metamq_broker_request_bytes") == 0
