"""Logins by password at real brokers: accepted, refused, rotated; and what a client may do before one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin, Consumer, Producer, SecurityConfig
from metamq.client.net import transport
from metamq.client.net.blocking_connection import BlockingConnection
from metamq.client.net.transport import BrokerConnection
from metamq.errors import AuthenticationFailed, ConnectError, NotAuthorized
from metamq.security.login import MECHANISMS
from metamq.security.tls import ClientSecurity, client_context, client_security
from metamq.testing import Cluster
from metamq.wire.commands import Authenticate, Command
from metamq.wire.connection import ClientConnection
from metamq.wire.frames import FrameReader, encode_frame
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import client_of, make_folder, secured

PASSWORD = "correct horse battery"
Open = Callable[[int, ClientSecurity | None], None]


def blocking(port: int, security: ClientSecurity | None) -> None:
    connection = BlockingConnection.open("127.0.0.1", port, security=security, timeout_s=SLOW_S)
    try:
        connection.send(Command.OFFSETS, [], timeout_s=SLOW_S)
        connection.receive(timeout_s=SLOW_S)
    finally:
        connection.abort()


def in_a_loop(port: int, security: ClientSecurity | None) -> None:
    async def connect() -> None:
        connection = await BrokerConnection.open("127.0.0.1", port, security=security, timeout_s=SLOW_S)
        try:
            await connection.request(Command.OFFSETS, [], timeout_s=SLOW_S)
        finally:
            await connection.close()

    asyncio.run(connect())


FACES = pytest.mark.parametrize("connect", [blocking, in_a_loop])


@pytest.fixture(scope="module")
def folder(certificates: Path) -> Path:
    folder = certificates
    (folder / "password").write_text(f"{PASSWORD}\n")
    (folder / "wrong").write_text("something else\n")
    return folder


@pytest.fixture(scope="module")
def secure(folder: Path) -> Iterator[Cluster]:
    with cluster(security=secured(folder, zookeeper_tls=False)) as running, running.admin() as admin:
        admin.set_user("etl", PASSWORD)
        wait_until(lambda: works(running, folder, "etl", "password"), what="the user")
        for verb in ("read", "write"):
            admin.add_rules("allow", "*", verb, "topic:*")
        running.create_topic("first", partitions=1)
        with Producer(running.zookeeper, security=of_user(folder, "etl")) as producer:
            wait_until(lambda: is_allowed(producer), what="the rules")
        yield running


def is_allowed(producer: Producer) -> bool:
    with contextlib.suppress(NotAuthorized):
        producer.send("first", b"x").result(SLOW_S)
        return True
    return False


def of_user(folder: Path, user: str, password: str = "password") -> SecurityConfig:
    return SecurityConfig(
        ca=str(folder / "ca.crt"), user=user, password_file=str(folder / password), zookeeper_tls=False
    )


def works(running: Cluster, folder: Path, user: str, password: str) -> bool:
    with contextlib.suppress(AuthenticationFailed):
        blocking(running.broker.port, client_security(of_user(folder, user, password)).brokers)
        return True
    return False


def test_a_producer_with_a_wrong_password_fails_soon(
    secure: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages do not wait for `delivery_timeout_s`: no broker has ever accepted this client."""
    monkeypatch.setattr(transport, "LOGIN_PAUSE_S", 0.5)
    with Producer(secure.zookeeper, security=of_user(folder, "etl", "wrong"), delivery_timeout_s=3600) as producer:
        sent = [producer.send("first", b"x") for _ in range(3)]
        for delivery in sent:
            with pytest.raises(AuthenticationFailed, match=r"the user name or the password is wrong"):
                delivery.result(SLOW_S)


@FACES
def test_the_right_password(secure: Cluster, folder: Path, connect: Open) -> None:
    connect(secure.broker.port, client_security(of_user(folder, "etl")).brokers)


@FACES
@pytest.mark.parametrize(("user", "password"), [("etl", "wrong"), ("nobody", "password")])
def test_a_wrong_one(secure: Cluster, folder: Path, connect: Open, user: str, password: str) -> None:
    with pytest.raises(
        AuthenticationFailed, match=r"the user name or the password is wrong\. See METAMQ_SECURITY_USER"
    ):
        connect(secure.broker.port, client_security(of_user(folder, user, password)).brokers)


@pytest.mark.slow
def test_messages_of_a_user(secure: Cluster, folder: Path) -> None:
    security = of_user(folder, "etl")
    secure.create_topic("of-a-user", partitions=1)
    with Producer(secure.zookeeper, security=security) as producer:
        producer.send("of-a-user", b"x").result(SLOW_S)
    with Consumer(
        secure.zookeeper, topics=["of-a-user"], start="earliest", idle_timeout_s=5, security=security
    ) as consumer:
        assert [message.value for message in consumer] == [b"x"]


def test_passwords_change_and_users_go_within_a_second(secure: Cluster, folder: Path, tmp_path: Path) -> None:
    """Open connections stay; a client that connects again reads its file again."""
    own = tmp_path / "own"
    own.write_text("the first password")
    security = SecurityConfig(ca=str(folder / "ca.crt"), user="own", password_file=str(own), zookeeper_tls=False)
    with secure.admin() as admin:
        admin.set_user("own", "the first password")
        wait_until(lambda: "own" in admin.users())
        secure.create_topic("rotated", partitions=1)
        with Producer(secure.zookeeper, security=security, linger_ms=0) as producer:
            wait_until(lambda: works(secure, folder, "own", str(own)))
            producer.send("rotated", b"1").result(SLOW_S)
            admin.set_user("own", "the second password")
            wait_until(lambda: not works(secure, folder, "own", str(own)))
            own.write_text("the second password")
            producer.send("rotated", b"2").result(SLOW_S)
            secure.broker.restart()
            producer.send("rotated", b"3").result(SLOW_S)
        admin.remove_user("own")
        wait_until(lambda: not works(secure, folder, "own", str(own)))


def test_too_many_failures_make_a_user_wait(folder: Path) -> None:
    """Also with the right password; others do not wait."""
    with cluster(security=secured(folder, zookeeper_tls=False)) as running, running.admin() as admin:
        admin.set_user("etl", PASSWORD)
        wait_until(lambda: works(running, folder, "etl", "password"))
        wrong = client_security(of_user(folder, "etl", "wrong")).brokers
        said = []
        for _ in range(20):
            with pytest.raises(AuthenticationFailed) as caught:
                blocking(running.broker.port, wrong)
            said.append(caught.value.reason)
        assert "too many logins have failed" in said
        with pytest.raises(AuthenticationFailed, match="too many logins have failed"):
            blocking(running.broker.port, client_security(of_user(folder, "etl")).brokers)
        blocking(running.broker.port, client_security(client_of(folder, "admin")).brokers)
        admin.set_user("other", PASSWORD)
        wait_until(lambda: works(running, folder, "other", "password"))
        refusal = "is refused as the user 'etl': the user name or the password is wrong"
        wait_until(lambda: refusal in running.broker.log_path.read_text(), what=refusal)
        assert PASSWORD not in running.broker.log_path.read_text()


class Raw:
    """A client that sends any frames, over TLS."""

    def __init__(self, port: int, folder: Path) -> None:
        context = client_context(client_of(folder).files())
        self.socket = context.wrap_socket(
            socket.create_connection(("127.0.0.1", port), SLOW_S), server_hostname="127.0.0.1"
        )

    def __enter__(self) -> Raw:
        for buffer in ClientConnection("x", "raw").hello():
            self.socket.sendall(buffer)
        (hello,) = self.frames(1)
        assert hello.header[7] == list(MECHANISMS)
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send(self, command: int, header: object, opaque: int = 7) -> None:
        for buffer in encode_frame(1, command, 0, opaque, header):
            self.socket.sendall(buffer)

    def frames(self, count: int = 1 << 30) -> list[Any]:
        """Up to so many frames, or until the end of the connection."""
        reader, found = FrameReader(initial_bytes=1 << 16), []
        while len(found) < count:
            buffer = reader.next_buffer()
            received = self.socket.recv_into(buffer)
            if not received:
                break
            found += list(reader.received(received))
        return found


@pytest.mark.parametrize("command", [Command.PUT, Command.GET, Command.STATS, Command.SYNC, Command.PROMOTE, 99])
def test_a_request_before_the_login_ends_the_connection(secure: Cluster, folder: Path, command: int) -> None:
    with Raw(secure.broker.port, folder) as raw:
        raw.send(command, ["", 0])
        (answer,) = raw.frames()
        assert "came before the login" in answer.header["problem"]


def test_a_login_that_is_left_out_or_repeated(secure: Cluster, folder: Path) -> None:
    """A login takes two messages; more, or another HELLO, end the connection."""
    for headers in ([["SCRAM-SHA-256", b"n,,n=etl,r=abcdefgh"]], [["SCRAM-SHA-256-PLUS", b"x"]], [["", b""]]):
        with Raw(secure.broker.port, folder) as raw:
            for header in headers:
                raw.send(Command.AUTHENTICATE, header)
            answers = raw.frames()
            assert answers[0].status != 0
    with Raw(secure.broker.port, folder) as raw:
        raw.send(Command.HELLO, [1, 1, "again"])
        assert "came before the login" in raw.frames()[-1].header["problem"]


def test_a_large_frame_before_the_login_ends_the_connection(secure: Cluster, folder: Path) -> None:
    with Raw(secure.broker.port, folder) as raw, contextlib.suppress(ConnectionError, ssl.SSLError):
        raw.send(Command.AUTHENTICATE, Authenticate("SCRAM-SHA-256-PLUS", b"x" * 5000))
        assert "login" not in raw.frames()[-1].header["problem"]
    with secure.admin() as admin:
        assert "etl" in admin.users()


@pytest.mark.slow
def test_a_silent_client_is_closed(folder: Path, secure: Cluster) -> None:
    """After ten seconds, as before HELLO."""
    with Raw(secure.broker.port, folder) as raw:
        assert raw.frames() == []


def test_without_security_nobody_is_asked(tmp_path: Path) -> None:
    with cluster() as open_to_all, Admin(open_to_all.zookeeper) as admin:
        admin.set_user("etl", PASSWORD)
        assert admin.users() == ["etl"]
        blocking(open_to_all.broker.port, None)
        security = client_security(client_of(make_folder(tmp_path).folder)).brokers
        with pytest.raises(ConnectError, match="it does not speak TLS"):
            blocking(open_to_all.broker.port, security)


@pytest.mark.slow
def test_passwords_change_under_load(secure: Cluster, folder: Path) -> None:
    """The producer reads the file again when it connects again; nothing is lost, doubled or refused."""
    secure.create_topic("under-load", partitions=2)
    sent = []
    with secure.admin() as admin, contextlib.ExitStack() as opened:
        for number in range(4):
            password = f"password number {number}"
            (folder / "rotated").write_text(f"{password}\n")
            admin.set_user("rotating", password)
            wait_until(lambda: works(secure, folder, "rotating", "rotated"), what="the password")
            if number == 0:
                security = of_user(folder, "rotating", "rotated")
                producer = opened.enter_context(Producer(secure.zookeeper, security=security, linger_ms=0))
            else:
                secure.broker.restart()
            for _ in range(50):
                sent.append(b"%d" % len(sent))
                producer.send("under-load", sent[-1]).result(SLOW_S)
    with secure.consumer(topics=["under-load"], start="earliest", idle_timeout_s=5) as consumer:
        assert sorted(message.value for message in consumer) == sorted(sent)
