"""The login by password: both ends against each other, without I/O, and what a third one may try."""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from metamq.errors import AuthenticationFailed, ConfigError
from metamq.security import login
from metamq.security.login import (
    MECHANISMS,
    BrokerLogin,
    ClientLogin,
    ServerIdentity,
    Verifiers,
    make_verifiers,
    read_secret,
    server_identity,
)
from metamq.zk.security.users import USERS_MAX, _decoded, users_json, with_user, without_user
from tests.security.certificate_folder import make_folder

PASSWORD = "correct horse battery"


class Server(NamedTuple):
    """A server's certificate, and the identity that it has by it."""

    pem: str
    identity: ServerIdentity


class Certificate:
    """Stands for a connection with this certificate at the other end; scramp asks it for nothing else."""

    def __init__(self, server: Server) -> None:
        self._der = base64.b64decode("".join(server.pem.splitlines()[1:-1]))

    def getpeercert(self, binary_form: bool) -> bytes:
        return self._der


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("certificates")
    make_folder(folder)
    return {
        name: Server(
            (folder / f"{name}.crt").read_text(), server_identity(folder / f"{name}.crt", folder / f"{name}.key")
        )
        for name in ("brokers", "zookeeper")
    }


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], Any]:
    """What a client sees of a certificate."""
    monkeypatch.setattr("scramp.core.SSLObject", Certificate)
    return Certificate


@pytest.fixture(scope="module")
def users() -> dict[str, Verifiers]:
    return {"etl": make_verifiers(PASSWORD)}


def both(
    seen: Any, server: Server, users: dict[str, Verifiers], user: str = "etl", password: str = PASSWORD
) -> tuple[ClientLogin, BrokerLogin]:
    """Both ends of one connection."""
    return ClientLogin("b", user, password, seen(server)), BrokerLogin("c", users.get, server.identity)


def log_in(client: ClientLogin, broker: BrokerLogin, offered: tuple[str, ...] = MECHANISMS) -> str:
    """Returns the user whom the broker accepts."""
    mechanism, data = client.first(offered)
    while True:
        answer, is_done = broker.next(mechanism, data)
        data = client.next(answer)
        assert is_done == (not data)
        if is_done:
            return broker.user


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_right_password(mechanism: str, pems: Any, seen: Any, users: Any) -> None:
    client = ClientLogin("b", "etl", PASSWORD, seen(pems["brokers"]))
    assert log_in(client, BrokerLogin("c", users.get, pems["brokers"].identity), (mechanism,)) == "etl"


@pytest.mark.parametrize(
    ("user", "password"), [("etl", "wrong horse battery"), ("nobody", PASSWORD), ("nob,=dy", "x" * 9)]
)
def test_a_wrong_password_and_an_unknown_user_look_alike(
    user: str, password: str, pems: Any, seen: Any, users: Any
) -> None:
    client, broker = (
        ClientLogin("b", user, password, seen(pems["brokers"])),
        BrokerLogin("c", users.get, pems["brokers"].identity),
    )
    mechanism, data = client.first(MECHANISMS)
    answer, _ = broker.next(mechanism, data)
    with pytest.raises(AuthenticationFailed) as caught:
        broker.next(mechanism, client.next(answer))
    assert caught.value.reason == "the user name or the password is wrong"


def test_a_made_up_salt_is_the_same_each_time(pems: Any, users: Any) -> None:
    found = {login._made_up("nobody", MECHANISMS[0], b"secret") for _ in range(3)}
    assert len(found) == 1
    assert login._made_up("other", MECHANISMS[0], b"secret") not in found
    assert len(found.pop().salt) == len(users["etl"][MECHANISMS[0]].salt)


def test_one_in_between_cannot_pass_a_login_on(pems: Any, seen: Any, users: Any) -> None:
    """The client sees the certificate of the one in between."""
    client = ClientLogin("b", "etl", PASSWORD, seen(pems["zookeeper"]))
    with pytest.raises(AuthenticationFailed):
        log_in(client, BrokerLogin("c", users.get, pems["brokers"].identity))


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-1-PLUS", "PLAIN", "", "x" * 5000])
def test_other_mechanisms_are_refused(mechanism: str, pems: Any, seen: Any, users: Any) -> None:
    with pytest.raises(AuthenticationFailed, match="is not one of SCRAM-SHA-512-PLUS"):
        BrokerLogin("c", users.get, pems["brokers"].identity).next(mechanism, b"n,,n=etl,r=abcdefgh")
    if mechanism:
        with pytest.raises(AuthenticationFailed, match="it offers"):
            ClientLogin("b", "etl", PASSWORD, seen(pems["brokers"])).first([mechanism])


@pytest.mark.parametrize("header", ["n,,", "y,,", "p=tls-unique,,"])
def test_a_login_without_the_binding_is_refused(header: str, pems: Any, users: Any) -> None:
    broker = BrokerLogin("c", users.get, pems["brokers"].identity)
    with pytest.raises(AuthenticationFailed):
        broker.next(MECHANISMS[0], f"{header}n=etl,r=abcdefghijklmnop".encode())


def test_a_recorded_login_is_of_no_use(pems: Any, seen: Any, users: Any) -> None:
    client, broker = (
        ClientLogin("b", "etl", PASSWORD, seen(pems["brokers"])),
        BrokerLogin("c", users.get, pems["brokers"].identity),
    )
    mechanism, first = client.first(MECHANISMS)
    final = client.next(broker.next(mechanism, first)[0])
    assert broker.next(mechanism, final)[1]
    again = BrokerLogin("c", users.get, pems["brokers"].identity)
    again.next(mechanism, first)
    with pytest.raises(AuthenticationFailed):
        again.next(mechanism, final)
    with pytest.raises(AuthenticationFailed):
        broker.next(mechanism, final)


def test_a_broker_that_does_not_know_the_user_is_refused(pems: Any, seen: Any, users: Any) -> None:
    """One bit of its proof is wrong."""
    client, broker = (
        ClientLogin("b", "etl", PASSWORD, seen(pems["brokers"])),
        BrokerLogin("c", users.get, pems["brokers"].identity),
    )
    mechanism, first = client.first(MECHANISMS)
    answer, _ = broker.next(mechanism, client.next(broker.next(mechanism, first)[0]))
    proof = bytearray(base64.b64decode(answer[2:]))
    proof[0] ^= 1
    with pytest.raises(AuthenticationFailed, match="does not prove that it has the user's verifier"):
        client.next(b"v=" + base64.b64encode(proof))


@pytest.mark.parametrize("data", [b"", b"\xff", b"n", b"p=tls-server-end-point,,n=etl", b"a" * 4000, b"v=,", b"e=x"])
def test_any_bytes_give_one_error(data: bytes, pems: Any, seen: Any, users: Any) -> None:
    with pytest.raises(AuthenticationFailed):
        BrokerLogin("c", users.get, pems["brokers"].identity).next(MECHANISMS[0], data)
    client = ClientLogin("b", "etl", PASSWORD, seen(pems["brokers"]))
    client.first(MECHANISMS)
    with pytest.raises(AuthenticationFailed):
        client.next(data)


def test_nothing_shows_the_password(pems: Any, seen: Any) -> None:
    client = ClientLogin("b", "etl", PASSWORD, seen(pems["brokers"]))
    assert PASSWORD not in repr(client) + users_json({"etl": make_verifiers(PASSWORD)}).decode()
    client.first(MECHANISMS)
    with pytest.raises(AuthenticationFailed) as caught:
        client.next(b"nonsense")
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("password", ["", "short", "x" * 1025, "tab\x07tab-and-more", "\u200b" * 8])
def test_what_cannot_be_a_password(password: str) -> None:
    with pytest.raises(ConfigError, match="password"):
        make_verifiers(password)


def test_a_password_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    for content, problem in ((b"", "is empty"), (b"\n", "is empty"), (b"\xff\xfe", "is not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            read_secret(str(path), "password")
    path.write_text("secret word\nignored\n")
    assert read_secret(str(path), "password") == "secret word"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "none"), "password")


def test_users_are_stored_and_read_back(users: Any) -> None:
    import json

    assert _decoded(json.loads(users_json(users))) == users
    with pytest.raises(ConfigError, match="is the name of a certificate"):
        with_user({}, "brokers", users["etl"])
    with pytest.raises(ConfigError, match="there is no user 'x'"):
        without_user(users, "x")
    many = {str(number): users["etl"] for number in range(USERS_MAX)}
    with pytest.raises(ConfigError, match="1,000 users already"):
        with_user(many, "one-more", users["etl"])
    assert with_user(many, "7", {}) == {**many, "7": {}}


def test_an_unknown_user_takes_the_same_time(pems: Any, seen: Any, users: Any) -> None:
    """The medians of both differ by less than a fifth. Each login has its own random numbers."""

    def times(user: str) -> list[float]:
        found = []
        for _ in range(60):
            broker = BrokerLogin("c", users.get, pems["brokers"].identity)
            first = f"p=tls-server-end-point,,n={user},r=abcdefghijklmnop".encode()
            began = time.perf_counter()
            broker.next(MECHANISMS[0], first)
            found.append(time.perf_counter() - began)
        return found

    for _ in range(10):
        known, unknown = statistics.median(times("etl")), statistics.median(times("nob"))
        if abs(known - unknown) < max(known, unknown) / 5:
            return
    raise AssertionError(f"{known * 1e6:.0f} and {unknown * 1e6:.0f} µs")
