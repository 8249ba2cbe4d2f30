"""`metamq ha add` and `metamq ha move`, with real replicas: a broker id goes to another machine, and clients go on."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metamq.testing import Cluster
from tests.cli.conftest import Metamq
from tests.one_zookeeper import cluster
from tests.parts import read_topic, wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def own() -> Iterator[Cluster]:
    with cluster(session_timeout_ms=3000, insync_lag_ms=1000) as running:
        yield running


@pytest.fixture
def talk(process: Start, own: Cluster) -> Callable[..., tuple[subprocess.Popen[bytes], list[str]]]:
    """Starts `metamq ha ...`; returns it, and the lines that it prints, as they come."""

    def start(*arguments: object) -> tuple[subprocess.Popen[bytes], list[str]]:
        command = process("ha", *arguments, env={"METAMQ_ZOOKEEPER": own.zookeeper}, stderr=subprocess.STDOUT)
        lines: list[str] = []
        assert command.stdout is not None
        threading.Thread(target=lambda: lines.extend(map(bytes.decode, command.stdout or []))).start()
        return command, lines

    return start


def says(lines: list[str], text: str) -> None:
    try:
        wait_until(lambda: any(text in line for line in lines), what=text)
    except AssertionError as error:
        raise AssertionError(f"{error}; it says {lines}") from None


@pytest.mark.slow
def test_a_replica_is_added(own: Cluster, talk: Any) -> None:
    own.create_topic("t", partitions=1)
    command, lines = talk("add", "--replica", 1)
    says(lines, f"does not run; start it: `metamq broker --id 0 --replica 1 --zookeeper {own.zookeeper} --root /meta")
    own.add_slave()
    assert command.wait(60) == 0
    says(lines, "Replica 1 of broker 0 is in sync.")


@pytest.mark.slow
@pytest.mark.parametrize("is_master", [True, False])
def test_a_broker_id_moves_while_clients_go_on(own: Cluster, talk: Any, is_master: bool) -> None:
    with own.admin() as admin:
        topic = admin.create_topic("t", partitions=1, replication="sync")
        if not is_master:
            own.add_slave()
        admin.set_failover(0, preferred=0 if is_master else 1)
        former, replica = (own.broker, 1) if is_master else (own.slaves[0], 2)
        sent, moved = 0, threading.Event()

        def send() -> None:
            nonlocal sent
            with own.producer(linger_ms=0) as producer:
                while not moved.is_set():
                    producer.send("t", b"%d" % sent).result(60)
                    sent += 1

        sending = threading.Thread(target=send)
        sending.start()
        command, lines = talk("move", "--from", replica - 1, "--to", replica, "--yes")
        own.add_slave()
        says(lines, f"replica {replica - 1} of broker 0 is not needed any more; stop it, at 127.0.0.1:{former.port}")
        former.stop()
        assert command.wait(60) == 0
        assert admin.failover(0).preferred == 1, "the new master, and not the replica that is gone"
        moved.set()
        sending.join()
        state = admin.replicas()[0]
        assert [one.replica for one in state.replicas if one.in_sync] == ([1] if is_master else [0, 2])
        assert not any(one.replica == replica - 1 for one in state.replicas)
    stored = read_topic(own.slaves[0] if is_master else own.broker, "t", topic.id)["0-0"]
    assert [message.value for message in stored] == [b"%d" % number for number in range(sent)]


@pytest.mark.slow
def test_what_cannot_be_moved(own: Cluster, offline: Metamq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAMQ_ZOOKEEPER", own.zookeeper)
    assert offline("ha", "move", "--from", 0, "--to", 0).status == 2
    unknown = offline("ha", "move", "--broker", 7, "--from", 0, "--to", 1, "--yes")
    assert (unknown.status, "there is no broker 7" in unknown.talk) == (1, True)
    late = offline("ha", "add", "--replica", 1, "--limit", "1s")
    assert (late.status, "replica 1 of broker 0 does not run" in late.talk) == (1, True)
    own.add_slave()
    gone = offline("ha", "move", "--from", 7, "--to", 1, "--yes")
    assert (gone.status, "nothing about replica 7" in gone.talk, "taken its place" in gone.talk) == (0, True, False)
    own.add_slave(learner=True)
    learner = offline("ha", "add", "--replica", 2)
    assert (learner.status, "is a learner" in learner.talk) == (1, True)
