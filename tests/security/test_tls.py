"""TLS on every link: what is refused, with a readable reason, and what continues while certificates change."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq import SecurityConfig
from metamq.client.net.blocking_connection import BlockingConnection
from metamq.client.net.transport import BrokerConnection
from metamq.errors import ConnectError
from metamq.security.certificates import Authority
from metamq.security.tls import ClientSecurity, FreshContext, client_context, client_security
from metamq.security.tls_errors import ENDED, tls_reason
from metamq.testing import Cluster
from metamq.wire.commands import Command
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import HOSTS, client_of, in_days, make_folder, secured

Connect = Callable[[str, int, ClientSecurity | None], None]


def blocking(host: str, port: int, security: ClientSecurity | None) -> None:
    """As a task of Spark."""
    connection = BlockingConnection.open(host, port, security=security, timeout_s=SLOW_S)
    try:
        connection.send(Command.OFFSETS, [], timeout_s=SLOW_S)
        connection.receive(timeout_s=SLOW_S)
    finally:
        connection.abort()


def in_a_loop(host: str, port: int, security: ClientSecurity | None) -> None:
    """As producers, consumers and slaves."""

    async def connect() -> None:
        connection = await BrokerConnection.open(host, port, security=security, timeout_s=SLOW_S)
        try:
            await connection.request(Command.OFFSETS, [], timeout_s=SLOW_S)
        finally:
            await connection.close()

    asyncio.run(connect())


CLOSED = "it closed the connection in the TLS handshake"
FACES = pytest.mark.parametrize("connect", [blocking, in_a_loop])


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[Cluster]:
    with cluster(security=secured(certificates, zookeeper_tls=False)) as running:
        yield running


@pytest.fixture
def authority(certificates: Path, secure: Cluster) -> Iterator[Authority]:
    """The brokers' own one. What a test changes is made good."""
    found = Authority(certificates)
    yield found
    found.issue("brokers", HOSTS)


def other_folder(certificates: Path) -> Path:
    other = certificates.with_name("other")
    if not other.exists():
        make_folder(other)
    return other


def refused(connect: Connect, port: int, security: SecurityConfig, host: str = "127.0.0.1") -> str:
    with pytest.raises(ConnectError) as caught:
        connect(host, port, client_security(security).brokers)
    return str(caught.value)


def is_logged(cluster: Cluster, text: str) -> None:
    """A broker writes to its log while the client already has the refusal."""
    wait_until(lambda: text in cluster.broker.log_path.read_text(), what=text)


@FACES
def test_a_client_with_a_certificate_is_served(secure: Cluster, certificates: Path, connect: Connect) -> None:
    for host in HOSTS:
        connect(host, secure.broker.port, client_security(client_of(certificates, "admin")).brokers)


@FACES
def test_a_client_without_an_identity(secure: Cluster, certificates: Path, connect: Connect) -> None:
    said = refused(connect, secure.broker.port, client_of(certificates))
    assert "it requires a user. Set METAMQ_SECURITY_USER" in said


@FACES
def test_a_client_without_tls(secure: Cluster, connect: Connect) -> None:
    assert "this broker speaks only TLS. Give the client" in refused(connect, secure.broker.port, SecurityConfig())


@FACES
def test_a_broker_without_tls(certificates: Path, secure: Cluster, connect: Connect) -> None:
    with cluster() as plain:
        said = refused(connect, plain.broker.port, client_of(certificates))
    assert "it does not speak TLS. If security is off at the broker," in said


@FACES
def test_another_authority(secure: Cluster, certificates: Path, connect: Connect) -> None:
    other = other_folder(certificates)
    said = refused(connect, secure.broker.port, client_of(other))
    assert "its certificate is rejected: " in said
    assert "METAMQ_SECURITY_CA" in said


@FACES
def test_a_client_with_a_certificate_of_another_authority(
    secure: Cluster, certificates: Path, connect: Connect
) -> None:
    theirs = client_of(other_folder(certificates), "admin")
    security = SecurityConfig(ca=str(certificates / "ca.crt"), certificate=theirs.certificate, key=theirs.key)
    assert CLOSED in refused(connect, secure.broker.port, security)
    is_logged(secure, "its certificate is rejected: unable to get local issuer")


@FACES
@pytest.mark.parametrize(
    ("issue", "problem"),
    [
        (lambda authority: authority.issue("brokers", HOSTS, days=1, now=in_days(-9)), "certificate has expired"),
        (lambda authority: authority.issue("brokers", HOSTS, now=in_days(9)), "certificate is not yet valid"),
        (lambda authority: authority.issue("brokers", ["elsewhere"]), "is not valid for '127.0.0.1'"),
        (lambda authority: authority.issue("brokers"), "unsuitable certificate purpose"),
    ],
)
def test_a_brokers_certificate(
    secure: Cluster, certificates: Path, authority: Authority, connect: Connect, issue: Any, problem: str
) -> None:
    issue(authority)
    assert problem in refused(connect, secure.broker.port, client_of(certificates))


@FACES
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda authority: authority.issue("etl", days=1, now=in_days(-9)), "certificate has expired"),
        (lambda authority: authority.issue("etl", now=in_days(9)), "certificate is not yet valid"),
        (lambda authority: (authority.issue("etl"), authority.revoke("etl")), "certificate revoked"),
    ],
)
def test_a_clients_certificate(
    secure: Cluster, certificates: Path, authority: Authority, connect: Connect, make: Any, problem: str
) -> None:
    make(authority)
    assert CLOSED in refused(connect, secure.broker.port, client_of(certificates, "etl"))
    is_logged(secure, f"is refused: its certificate is rejected: {problem}")
    authority.issue("etl")
    connect("127.0.0.1", secure.broker.port, client_security(client_of(certificates, "etl")).brokers)


@FACES
def test_an_older_tls(secure: Cluster, certificates: Path, connect: Connect) -> None:
    def make(files: Any) -> ssl.SSLContext:
        context = client_context(files)
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        return context

    security = ClientSecurity(FreshContext(client_of(certificates).files(), make), "", "")
    with pytest.raises(ConnectError, match=f"{CLOSED}.* its version of TLS"):
        connect("127.0.0.1", secure.broker.port, security)


@pytest.mark.parametrize("kind", [ssl.SSLEOFError, ssl.SSLZeroReturnError])
def test_each_end_of_a_handshake_has_the_same_words(kind: type[ssl.SSLError]) -> None:
    """The kernel decides if the broker's alert or the end of its stream comes first."""
    assert tls_reason(kind(6, "TLS/SSL connection has been closed (EOF) (_ssl.c:992)")) == ENDED


def test_nothing_is_sent_before_the_handshake(certificates: Path, secure: Cluster) -> None:
    """A server that only listens sees a TLS record, and no byte of the protocol."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        security = client_security(client_of(certificates)).brokers
        with pytest.raises(ConnectError):
            BlockingConnection.open("127.0.0.1", listener.getsockname()[1], security=security, timeout_s=0.2)
        peer, _ = listener.accept()
        with peer:
            received = peer.recv(1 << 16)
    assert received[:1] == b"\x16"
    assert b"metamq" not in received


@pytest.mark.slow
def test_a_connection_that_says_nothing_ends(secure: Cluster) -> None:
    """And neither it nor one in the middle of a handshake keeps others waiting."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", secure.broker.port))) for _ in range(20)]
        for one in silent[:10]:
            one.send(b"\x16\x03\x01")
        with secure.admin() as admin:
            assert admin.topics() is not None
        for one in silent:
            one.settimeout(SLOW_S)
            with contextlib.suppress(ConnectionError):
                while one.recv(1024):
                    pass


@pytest.mark.slow
def test_large_answers_and_requests(secure: Cluster) -> None:
    """A batch of several records of TLS, in both directions, with both kinds of readers."""
    values = [bytes([number % 251]) * 100_000 for number in range(200)]
    secure.create_topic("large", partitions=1)
    with secure.producer() as producer:
        for value in values:
            producer.send("large", value)
    with secure.consumer(topics=["large"], start="earliest", idle_timeout_s=5) as consumer:
        assert [message.value for message in consumer] == values


@pytest.mark.slow
def test_certificates_change_under_load(tmp_path: Path) -> None:
    """New connections use the new ones; nothing is lost, doubled or refused. A replica links with the new one, too."""
    authority = make_folder(tmp_path / "security")
    with cluster(security=secured(tmp_path / "security", zookeeper_tls=False)) as running:
        running.create_topic("t", partitions=2, replication="sync")
        slave = running.add_slave()
        sent = []
        with running.producer(linger_ms=0) as producer, running.admin() as admin:
            for number in range(6):
                authority.issue("brokers", HOSTS, days=30 + number)
                for _ in range(50):
                    sent.append(b"%d" % len(sent))
                    producer.send("t", sent[-1]).result(SLOW_S)
                if number % 2:
                    slave.restart()
                    wait_until(lambda: [one.in_sync for one in admin.replicas()[0].replicas] == [True, True])
        with running.consumer(topics=["t"], start="earliest", idle_timeout_s=5) as consumer:
            assert sorted(message.value for message in consumer) == sorted(sent)
        assert "use the new certificates" in running.broker.log_path.read_text()
