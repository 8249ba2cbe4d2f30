"""Ports that are chosen and kept: nobody else is given one while the server it was chosen for is down."""

from __future__ import annotations

import gc
import socket
import sys
from pathlib import Path

import pytest

from metamq.errors import ConfigError
from metamq.testing import BrokerProcess
from metamq.zk.server import ports
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.ports import HeldPort, free_port


@pytest.fixture
def one_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The only one there is to choose."""
    number = free_port()
    monkeypatch.setattr(ports, "PORTS", range(number, number + 1))
    return number


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a server bind beside the socket that keeps a port")
def test_a_held_port_is_nobody_elses_until_it_is_let_go(one_port: int) -> None:
    held = HeldPort("127.0.0.1")
    assert held.number == one_port
    for choose in (HeldPort, free_port):
        with pytest.raises(ConfigError, match=f"no free port among {one_port} to {one_port} on 127.0.0.1"):
            choose("127.0.0.1")
    with socket.create_server(("127.0.0.1", one_port)):
        pass  # its own server may listen, as often as it likes
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", one_port))
    with socket.create_server(("127.0.0.1", one_port)):
        pass
    del held
    gc.collect()
    assert free_port() == one_port


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a server bind beside the socket that keeps a port")
def test_servers_that_are_down_keep_their_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as zookeeper:
        broker = BrokerProcess(zookeeper.address, tmp_path / "broker")
        broker.start()
        broker.kill()
        zookeeper.kill()
        for taken in (broker.port, zookeeper.port):
            monkeypatch.setattr(ports, "PORTS", range(taken, taken + 1))
            with pytest.raises(ConfigError, match=f"no free port among {taken}"):
                free_port()
        zookeeper.restart()
        before = broker.port
        broker.start()
        assert broker.port == before
        broker.stop()


def test_a_host_that_is_none_of_this_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        free_port("192.0.2.1")
