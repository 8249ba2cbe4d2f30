"""The load that a real ZooKeeper server reports, and the doctor's finding on it."""

from __future__ import annotations

import asyncio
import socket
import threading

from metamq.cli.commands.doctor import memory_finding
from metamq.zk.nodes import Create
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.load import ServerLoad, load_of
from metamq.zk.session.session import Session


async def make_nodes(servers: str, many: int) -> None:
    async with await Session.open(servers) as session:
        await session.create("/many")
        for first in range(0, many, 1000):
            await session.multi([Create(f"/many/{number}") for number in range(first, first + 1000)])


def test_nodes_that_fill_half_of_the_memory_are_a_warning() -> None:
    with EmbeddedZooKeeper(memory_bytes=32 << 20) as server:
        host, _, port = server.address.partition(":")
        before = load_of(host, int(port), 10.0)
        assert before is not None
        assert before.nodes < 10
        assert before.memory_bytes_max is not None
        assert 24 << 20 < before.memory_bytes_max <= 32 << 20
        assert memory_finding("it", "listens", before).status == "ok"
        asyncio.run(make_nodes(server.address, 20_000))
        after = load_of(host, int(port), 10.0)
        assert after is not None
        assert 20_000 <= after.nodes < 20_010
        finding = memory_finding("it", "listens", after)
        assert (finding.status, finding.detail[:31]) == ("warning", f"listens, {after.nodes:,} nodes, about 17"[:31])
        assert "metamq zookeeper --memory" in finding.hint


def test_a_server_that_does_not_report_its_memory() -> None:
    finding = memory_finding("it", "listens", ServerLoad(1, None))
    assert (finding.status, finding.detail) == ("ok", "listens, 1 node")


def test_a_port_that_is_no_zookeeper() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(16)
                connection.sendall(b"\xff\x00HTTP/1.1 400 Bad Request")

        thread = threading.Thread(target=answer)
        thread.start()
        assert load_of("127.0.0.1", listener.getsockname()[1], 10.0) is None
        thread.join()
