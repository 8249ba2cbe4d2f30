"""The connection for one thread: answers in pieces, answers that do not come, and a broker that goes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
import threading
from collections.abc import Iterator

import pytest

from metamq.client.net.blocking_connection import RECEIVE_BUFFER_BYTES, BlockingConnection
from metamq.client.net.transport import WAKE_BYTES, BrokerConnection
from metamq.errors import ConnectError, Timeout
from metamq.testing import BrokerProcess
from metamq.wire.commands import Command
from metamq.zk.server.ports import free_port
from tests.client.test_large_answers import ASK, BODY, Peer
from tests.one_zookeeper import cluster
from tests.parts import wait_until


@contextlib.contextmanager
def connected(cuts: list[int], *, ends: bool = False) -> Iterator[BlockingConnection]:
    """To a Peer, whose loop runs in another thread."""
    ready, done = threading.Event(), threading.Event()
    port = 0

    async def serve() -> None:
        nonlocal port
        peer = Peer(cuts, ends=ends)
        async with await asyncio.start_server(peer.serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            ready.set()
            await asyncio.to_thread(done.wait)
            await peer.served.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    connection = BlockingConnection.open("127.0.0.1", port)
    try:
        yield connection
    finally:
        connection.abort()
        done.set()
        thread.join()


@pytest.mark.parametrize("last", [1, 100, WAKE_BYTES - 1, WAKE_BYTES, WAKE_BYTES + 1])
def test_an_answer_may_come_in_any_pieces(last: int) -> None:
    with connected([1, 1000, 70_000, 70_001, -last - 3 * WAKE_BYTES, -last]) as connection:
        for _ in range(2):
            assert connection.is_idle
            connection.send(Command.GET, ASK, timeout_s=20)
            assert connection.receive(timeout_s=20).body == BODY


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a way to make room in a socket before bytes come")
def test_an_answer_that_nobody_waits_for_finds_room() -> None:
    with connected([]) as connection:
        connection.send(Command.GET, ASK, timeout_s=20)
        wait_until(lambda: unread_bytes(connection) > RECEIVE_BUFFER_BYTES * 3 // 4, what="data in the kernel buffer")
        assert connection.receive(timeout_s=20).body == BODY


def unread_bytes(connection: BlockingConnection) -> int:
    count = fcntl.ioctl(connection._socket, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)


def test_an_answer_that_is_cut_off_is_told() -> None:
    with connected([100_000], ends=True) as connection:
        connection.send(Command.GET, ASK, timeout_s=20)
        with pytest.raises(ConnectError, match="closed") as failure:
            connection.receive(timeout_s=20)
        assert failure.value.outcome == "unknown"
        assert not connection.is_idle
        with pytest.raises(ConnectError, match="closed"):
            connection.send(Command.GET, ASK, timeout_s=20)


def test_a_frozen_broker_is_a_timeout_and_one_that_has_gone_is_seen() -> None:
    with cluster() as running:
        frozen_and_gone(running.broker)


def frozen_and_gone(broker: BrokerProcess) -> None:
    asking, idle = (BlockingConnection.open("127.0.0.1", broker.port) for _ in range(2))
    broker.freeze()
    try:
        asking.send(Command.GET, ASK, timeout_s=20)
        with pytest.raises(Timeout, match=f"{broker.port}"):
            asking.receive(timeout_s=0.3)
        assert not asking.is_idle
        assert idle.is_idle
        with pytest.raises(ConnectError, match=r"no answer within 0.3 s"):
            BlockingConnection.open("127.0.0.1", broker.port, timeout_s=0.3)
    finally:
        broker.thaw()
    broker.kill()
    wait_until(lambda: not idle.is_idle, what="the end of the connection")
    idle.abort()


def test_a_peer_that_drips_does_not_stretch_the_greeting() -> None:
    """Each byte of a frame's start comes in time; all of them together do not."""
    done = threading.Event()

    def drip(listening: socket.socket) -> None:
        peer, _address = listening.accept()
        with peer, contextlib.suppress(OSError):
            peer.sendall((200).to_bytes(4, "little"))
            while not done.wait(0.05):
                peer.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        try:
            with pytest.raises(ConnectError, match=r"no answer within 0\.5 s"):
                BlockingConnection.open("127.0.0.1", listening.getsockname()[1], timeout_s=0.5)
        finally:
            done.set()
            thread.join()


def test_each_host_is_tried() -> None:
    port = free_port()
    with pytest.raises(ConnectError) as failure:
        BlockingConnection.open("127.0.0.99,127.0.0.1", port)
    assert "127.0.0.99: " in failure.value.reason
    assert "127.0.0.1: " in failure.value.reason
    with pytest.raises(ConnectError, match="metamq doctor"):
        BlockingConnection.open("127.0.0.1", port)


@pytest.mark.parametrize("silent", [False, True])
def test_several_hosts_refuse_only_if_each_does(silent: bool) -> None:
    """A slave takes the refusal of all hosts for the end of its master's process."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        if silent:  # it accepts, and never answers, as a frozen process
            stack.enter_context(socket.create_server(("127.0.0.2", port)))
        with pytest.raises(ConnectError) as failure:
            asyncio.run(BrokerConnection.open("127.0.0.2,127.0.0.1", port))
    assert isinstance(failure.value.__cause__, ConnectionRefusedError) is not silent
