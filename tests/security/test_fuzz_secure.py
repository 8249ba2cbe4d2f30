"""Frames of any content to a secure broker, before a login, in the middle of one, and after it.

Nothing is served before the login; afterwards nothing without a right; and the broker's memory stays as it was.
"""

from __future__ import annotations

import random
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from metamq.security.certificates import Authority
from metamq.security.login import ClientLogin
from metamq.testing import Cluster
from metamq.wire import status
from metamq.wire.commands import Authenticate, Authenticated, Command, HelloReply, PutResult
from metamq.wire.frames import Frame
from metamq.wire.headers import unpack, unpack_list
from tests.broker.front_door.conftest import MEBIBYTE, RawClient, hello
from tests.broker.front_door.test_fuzz_grammar import OVER_SOCKETS, REQUESTS, Grammar

CONNECTIONS = 60
FRAMES = 6
QUIET_S = 0.2
"""A broker that waits for the rest of a frame says nothing."""
BEFORE = REQUESTS | {Command.AUTHENTICATE: Authenticate}


class TlsClient(RawClient):
    """Frames over TLS, with a certificate or without."""

    def __init__(self, port: int, folder: Path, name: str = "") -> None:
        super().__init__(port, greet=False)
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        if name:
            context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
        self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")

    def greeted(self) -> HelloReply:
        self.send(hello())
        return unpack(HelloReply, self.answer().header)


def before_tls(running: Cluster, folder: Path) -> RawClient:
    return RawClient(running.broker.port, greet=False)


def before_hello(running: Cluster, folder: Path) -> RawClient:
    return TlsClient(running.broker.port, folder)


def before_a_login(running: Cluster, folder: Path) -> RawClient:
    client = TlsClient(running.broker.port, folder)
    assert client.greeted().mechanisms
    return client


def in_a_login(running: Cluster, folder: Path) -> RawClient:
    client = TlsClient(running.broker.port, folder)
    offered = client.greeted().mechanisms
    assert isinstance(client.socket, ssl.SSLSocket)
    first = ClientLogin("broker", "etl", "wrong", client.socket).first(offered)
    answer = client.ask(Command.AUTHENTICATE, Authenticate(*first))
    assert not unpack(Authenticated, answer.header).is_done
    return client


def answers(client: RawClient) -> list[Frame]:
    """All that the broker sends until it is quiet, or ends the connection."""
    client.socket.settimeout(QUIET_S)
    found: list[Frame] = []
    try:
        while True:
            found.append(client.answer())
    except (EOFError, OSError):
        return found


def check_health(running: Cluster, rss: int, seed: int) -> None:
    with running.admin() as admin:
        admin.statistics(0)
    assert psutil.Process(running.broker.pid).memory_info().rss - rss < 64 * MEBIBYTE, f"seed {seed}"
    log = running.broker.log_path.read_text()
    assert "Traceback" not in log
    assert "internal error" not in log


@pytest.mark.slow
@pytest.mark.parametrize("opened", [before_tls, before_hello, before_a_login, in_a_login], ids=lambda one: one.__name__)
def test_before_its_login_no_client_gets_anything(
    secure: Cluster, authority: Authority, opened: Callable[[Cluster, Path], RawClient]
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    grammar, said = Grammar(random.Random(seed)), Counter[str]()
    rss = psutil.Process(secure.broker.pid).memory_info().rss
    for _ in range(CONNECTIONS):
        with opened(secure, authority.folder) as client:
            data = b"".join(grammar.spoilt(grammar.frame(BEFORE, opaque)) for opaque in range(FRAMES))
            try:
                client.send(data)
            except OSError:
                said["closed at once"] += 1
            for frame in answers(client):
                is_served = frame.status == status.OK and frame.command not in (Command.HELLO, Command.AUTHENTICATE)
                assert not is_served, f"seed {seed}: {frame}"
                if frame.command == Command.AUTHENTICATE and frame.status == status.OK:
                    assert not unpack(Authenticated, frame.header).is_done, f"seed {seed}"
                said["greeted" if frame.status == status.OK else "refused"] += 1
    print(dict(said))
    check_health(secure, rss, seed)


@pytest.mark.slow
def test_after_its_login_a_client_without_rights_gets_only_refusals(
    secure: Cluster, authority: Authority, name: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    grammar, said = Grammar(random.Random(seed)), Counter[str]()
    secure.create_topic("fuzz", partitions=4)
    rss = psutil.Process(secure.broker.pid).memory_info().rss
    for _ in range(CONNECTIONS):
        with TlsClient(secure.broker.port, authority.folder, name) as client:
            assert client.greeted().mechanisms == []
            for opaque in range(1, FRAMES + 1):
                command = grammar.chance.choice([*OVER_SOCKETS, Command.TOPIC])
                header = grammar.header(OVER_SOCKETS.get(command, REQUESTS[command]))
                if command == Command.GET and isinstance(header, list) and header:
                    header[0] = 0
                client.send(grammar.frame_of(command, header, opaque))
            for frame in answers(client):
                is_ok = frame.status == status.OK
                said[f"{Command(frame.command).name} {'OK' if is_ok else 'refused'}"] += 1
                if is_ok and frame.command == Command.PUT:
                    assert all(one.status != status.OK for one in unpack_list(PutResult, frame.header)), f"seed {seed}"
                assert not (is_ok and frame.command in (Command.STATS, Command.PROMOTE, Command.TOPIC)), f"seed {seed}"
    print(dict(said))
    assert said["TOPIC refused"] > 0
    assert said["STATS refused"] > 0
    check_health(secure, rss, seed)
    with secure.admin() as admin:
        assert "fuzz" in admin.topics()
