"""TLS to ZooKeeper: brokers, clients, and the servers of an ensemble among each other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq import SecurityConfig
from metamq.errors import ConnectError
from metamq.security.tls import client_security
from metamq.testing import Cluster, cluster
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.ensemble import Ensemble
from metamq.zk.server.ports import free_port
from metamq.zk.session.session import Session, SessionState
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import HOSTS, client_of, in_days, make_folder, secured


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[Cluster]:
    with cluster(security=secured(certificates)) as running:
        yield running


async def opened(address: str, security: SecurityConfig, timeout_s: float = SLOW_S) -> Session:
    return await Session.open(address, security=client_security(security), connect_timeout_s=timeout_s, patient=False)


def refused(address: str, security: SecurityConfig) -> str:
    with pytest.raises(ConnectError) as caught:
        asyncio.run(opened(address, security, 3.0))
    return str(caught.value)


@pytest.mark.slow
def test_messages_go_through_a_cluster_that_speaks_only_tls(secure: Cluster) -> None:
    secure.create_topic("t", partitions=2)
    with secure.producer() as producer:
        producer.send_many("t", [b"%d" % number for number in range(100)])
    with secure.consumer(topics=["t"], group="g", start="earliest", idle_timeout_s=5) as consumer:
        assert len(list(consumer)) == 100


def test_many_answers_at_once_are_all_read(secure: Cluster, certificates: Path) -> None:
    """Several answers may come in one record of TLS."""

    async def ask() -> list[bytes]:
        async with await opened(secure.zookeeper, client_of(certificates)) as session:
            await asyncio.gather(*(session.create(f"/many-{n}", b"%d" % n) for n in range(300)))
            found = [node.data for node in await asyncio.gather(*(session.get(f"/many-{n}") for n in range(300)))]
            await asyncio.gather(*(session.delete(f"/many-{n}", ANY_VERSION) for n in range(300)))
            return found

    assert asyncio.run(asyncio.wait_for(ask(), SLOW_S)) == [b"%d" % n for n in range(300)]


@pytest.mark.slow
def test_a_client_without_tls_gets_no_answer(secure: Cluster) -> None:
    with socket.create_connection(("127.0.0.1", secure.zookeeper_server.port), 10) as plain:
        plain.sendall(b"conf" * 100)
        plain.settimeout(10)
        assert b"dataDir" not in plain.recv(1 << 16)
    assert "it closed the connection" in refused(secure.zookeeper, SecurityConfig())


@pytest.mark.slow
def test_what_is_refused_says_why(secure: Cluster, certificates: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "other")
    assert "its certificate is rejected: " in refused(secure.zookeeper, client_of(tmp_path / "other"))
    with EmbeddedZooKeeper() as plain:
        assert "it closed the connection in the TLS handshake" in refused(plain.address, client_of(certificates))


@pytest.mark.slow
def test_a_certificate_for_another_host(tmp_path: Path) -> None:
    authority = make_folder(tmp_path / "security")
    authority.issue("zookeeper", ["localhost", "127.0.0.2"])
    security = SecurityConfig(dir=str(tmp_path / "security"))
    with EmbeddedZooKeeper(tmp_path / "zk", security=security, host="127.0.0.2") as server:
        authority.issue("zookeeper", ["elsewhere"])
        server.renew()
        wait_until(lambda: "is not valid for" in refused(server.address, client_of(tmp_path / "security")))


@pytest.mark.slow
def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    authority = make_folder(tmp_path / "security")
    authority.issue("zookeeper", HOSTS, days=1, now=in_days(-0))
    with EmbeddedZooKeeper(tmp_path / "zk", security=SecurityConfig(dir=str(tmp_path / "security"))) as server:
        before = certificate_of(server)
        authority.issue("zookeeper", HOSTS)
        server.renew()
        wait_until(lambda: certificate_of(server) != before, what="the new certificate")


def certificate_of(server: EmbeddedZooKeeper) -> bytes | None:
    tls = server._tls
    assert tls is not None
    with tls.wrapped(socket.create_connection(("127.0.0.1", server.port), 10)) as connection:
        return connection.getpeercert(binary_form=True)


@pytest.mark.slow
def test_an_ensemble(tmp_path: Path, certificates: Path) -> None:
    """Its servers speak TLS among each other, too; it continues without its leader."""
    places = ",".join(f"127.0.0.1:{free_port()}:{free_port()}" for _ in range(3))
    security = SecurityConfig(dir=str(certificates))
    with contextlib.ExitStack() as stack:
        servers = [
            EmbeddedZooKeeper(tmp_path / str(number), ensemble=Ensemble.parse(number, places), security=security)
            for number in (1, 2, 3)
        ]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.start(), servers))
        for server in servers:
            stack.callback(server.stop)

        async def use(address: str) -> bytes:
            async with await opened(address, client_of(certificates), 60) as session:
                if await session.exists("/x") is None:
                    await session.create("/x", b"stored")
                return (await session.get("/x")).data

        address = ",".join(server.address for server in servers)
        assert asyncio.run(use(address)) == b"stored"
        for server in servers[:2]:
            server.kill()
            assert asyncio.run(use(address)) == b"stored"
            server.restart()


@pytest.mark.slow
def test_a_zookeeper_that_was_replaced_is_recognised(tmp_path: Path, certificates: Path) -> None:
    """It refuses the session permanently, without a message: the client begins another one."""
    security, port = SecurityConfig(dir=str(certificates)), free_port()
    servers = [EmbeddedZooKeeper(tmp_path / name, port, security=security) for name in ("former", "new")]

    async def run() -> None:
        await asyncio.to_thread(servers[0].start)
        async with await opened(servers[0].address, client_of(certificates, "admin")) as session:
            for number in range(20):
                await session.create(f"/of-the-former-{number}")
            before, lost = session.session_id, asyncio.Event()
            session.on_state(lambda state: lost.set() if state is SessionState.LOST else None)
            await asyncio.to_thread(servers[0].stop)
            await asyncio.to_thread(servers[1].start)
            async with asyncio.timeout(SLOW_S):
                await lost.wait()
                await session.connected()
            assert session.session_id != before
            assert await session.exists("/of-the-former-1") is None

    try:
        asyncio.run(run())
    finally:
        for server in servers:
            server.stop()
