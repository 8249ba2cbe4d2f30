"""Which ports `metamq up` takes: the usual ones where they are free, else the next free ones.

Here the usual ones are some that the test has chosen, so that it does not matter what this machine has at 2181.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.cli.commands import up
from metamq.cli.commands.up import PORTS_TRIED, Ports
from metamq.errors import ConfigError
from metamq.zk.server.ports import free_port, is_free
from tests.cli.conftest import unset

HOST = "127.0.0.1"
UP = """
import sys
from metamq.cli import main
from metamq.cli.commands import up
up.ZOOKEEPER_PORT, up.BROKER_PORT, up.HTTP_PORT = map(int, sys.argv[1:4])
sys.argv[1:] = ["up", "--ephemeral", "-o", "json"]
main()
"""


def block(size: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = free_port()
        if first + size < 32768 and all(is_free(HOST, first + more) for more in range(size)):
            return first


@contextlib.contextmanager
def taken(*ports: int) -> Iterator[None]:
    """Somebody listens there."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server((HOST, port)))
        yield


def test_the_usual_one_or_the_next_that_is_free() -> None:
    usual = block(4)
    assert Ports(HOST).take("ZooKeeper", None, usual, "--port") == usual
    with taken(usual):
        assert Ports(HOST).take("ZooKeeper", None, usual, "--port") == usual + 1
        with taken(usual + 1, usual + 2):
            assert Ports(HOST).take("ZooKeeper", None, usual, "--port") == usual + 3
    assert Ports(HOST).take("ZooKeeper", None, usual, "--port") == usual


def test_none_is_given_out_twice_though_nobody_listens_yet() -> None:
    usual = block(4)
    ports = Ports(HOST)
    with taken(usual + 2):
        assert ports.take("the broker", usual, 1, "--broker-port") == usual
        given = [ports.next_free("a slave", usual, "--broker-port") for _ in range(2)]
    assert given == [usual + 1, usual + 3]


def test_one_that_is_wanted_is_taken_or_refused_and_never_replaced() -> None:
    usual = block(2)
    with taken(usual):
        with pytest.raises(ConfigError, match=f"port {usual} of {HOST} is in use: ZooKeeper cannot") as caught:
            Ports(HOST).take("ZooKeeper", usual, usual, "--port")
        assert caught.value.hint == "Choose another --port."
        assert Ports(HOST).take("ZooKeeper", usual + 1, usual, "--port") == usual + 1
        assert Ports(HOST).take("ZooKeeper", 0, usual, "--port") == 0


def test_when_none_is_free_the_range_and_the_option_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PORTS_TRIED >= 10
    monkeypatch.setattr("metamq.cli.commands.up.PORTS_TRIED", 3)
    usual = block(3)
    with taken(usual, usual + 1, usual + 2):
        with pytest.raises(ConfigError, match=f"no port from {usual} to {usual + 2} is free for ZooKeeper") as caught:
            Ports(HOST).take("ZooKeeper", None, usual, "--port")
        assert caught.value.hint == "Choose a port with --port."
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else has it
            stack.enter_context(taken(65535))
        with pytest.raises(ConfigError, match="no port from 65535 to 65535 is free for a slave"):
            Ports(HOST).next_free("a slave", 65535, "--broker-port")


@pytest.mark.parametrize("free", [True, False], ids=["free", "taken"])
def test_places_of_a_master_and_two_slaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: bool) -> None:
    brokers, pages = block(4), block(4)
    monkeypatch.setattr(up, "BROKER_PORT", brokers)
    monkeypatch.setattr(up, "HTTP_PORT", pages)
    with taken(*([] if free else [brokers, pages])):
        places = up._places(tmp_path, 2, None, None)
    first = 0 if free else 1
    assert [(one.port - brokers, one.http_port - pages) for one in places] == [(n, n) for n in range(first, first + 3)]


@pytest.mark.slow
def test_up_beside_what_has_its_usual_ports(tmp_path: Path) -> None:
    """ZooKeeper's usual port and that of /metrics are taken, the broker's is not."""
    usual = block(8)
    zookeeper, broker, pages = usual, usual + 2, usual + 4
    command = [sys.executable, "-W", "error", "-c", UP, str(zookeeper), str(broker), str(pages)]
    settings: dict[str, Any] = {"cwd": tmp_path, "env": unset(os.environ)}
    with taken(zookeeper, pages), subprocess.Popen(command, stdout=subprocess.PIPE, **settings) as running:
        try:
            assert running.stdout is not None
            told = json.loads(running.stdout.readline())
        finally:
            running.terminate()
    assert told["zookeeper"] == f"{HOST}:{zookeeper + 1}"
    assert [one["address"] for one in told["replicas"]] == [f"{HOST}:{broker}", f"{HOST}:{broker + 1}"]
    assert [one["metrics"] for one in told["replicas"]] == [f"http://{HOST}:{pages + n}/metrics" for n in (1, 2)]
    assert running.returncode == 0
