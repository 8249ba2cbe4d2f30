"""`metamq up`, `metamq broker` and `metamq zookeeper` as processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from metamq.zk.errors import ConnectionLost
from metamq.zk.nodes import Create
from metamq.zk.server.ports import free_port
from metamq.zk.session.session import Session
from tests.parts import gone

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]
Until = Callable[..., None]


class Up:
    """A running `metamq up`, and what it printed."""

    def __init__(self, start: Start, folder: Path, *arguments: object, **environment: str) -> None:
        self.process = start("up", *arguments, cwd=folder, stderr=subprocess.STDOUT, env=environment)
        assert self.process.stdout is not None
        self.talk = ""
        match = None
        while match is None:
            line = self.process.stdout.readline().decode()
            assert line, self.talk
            self.talk += line
            match = re.fullmatch(r"export METAMQ_ZOOKEEPER=(\S+)\n", line)
        self.zookeeper = match[1]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        self.process.send_signal(number)
        data, _ = self.process.communicate(timeout=90)
        return self.process.returncode, data.decode()


def free_ports() -> list[object]:
    """So that a cluster of the developer's own is left alone."""
    flags = ("--port", "--broker-port", "--http-port", "--console-port")
    return [part for flag in flags for part in (flag, free_port())]


@pytest.mark.slow
def test_up_keeps_data_whatever_ends_it_and_its_folder_for_itself(
    process: Start, offline: Metamq, tmp_path: Path, until: Until
) -> None:
    first = Up(process, tmp_path, *free_ports())
    assert "Ctrl-C stops all." in first.talk
    assert f"ZooKeeper serves at {first.zookeeper}, broker 0 has 2 replicas:\n  master (replica 0) at" in first.talk
    assert "  slave (replica 1) at 127.0.0.1:" in first.talk
    assert max(map(len, first.talk.splitlines())) <= 80
    here = ("--zookeeper", first.zookeeper)
    assert offline("topic", "create", "flights", "--flush", "ack", *here).status == 0
    assert offline("produce", "flights", "a", "b", *here).status == 0
    refused = process("up", cwd=tmp_path)
    _, talk = refused.communicate(timeout=90)
    assert refused.returncode == 1
    assert f"`metamq up` already runs on metamq-data, as process {first.process.pid}".encode() in talk
    children = first.children()
    assert len(children) >= 2
    until(lambda: in_sync(offline, first.zookeeper) == {0: True, 1: True}, "a slave in sync")
    assert first.end(signal.SIGINT) == (0, "Stopping.\n")
    until(lambda: gone(children), "the end of all children")

    second = Up(process, tmp_path, *free_ports())
    assert "  master (replica 0) at" in second.talk, "no slave takes over when all stop"
    assert offline("produce", "flights", "c", "--zookeeper", second.zookeeper).status == 0
    children = second.children()
    second.process.kill()
    second.process.wait()
    third = Up(process, tmp_path, *free_ports())
    until(lambda: gone(children), "the end of the children of a killed parent")
    read = offline("consume", "flights", "-e", "--zookeeper", third.zookeeper)
    assert sorted(read.text.split()) == ["a", "b", "c"]
    assert third.end(signal.SIGTERM) == (0, "Stopping.\n")


@pytest.mark.slow
def test_up_tells_programs_where_everything_is(process: Start, offline: Metamq, tmp_path: Path) -> None:
    child = process("up", *free_ports(), "-o", "json", cwd=tmp_path)
    assert child.stdout is not None
    told = json.loads(child.stdout.readline())
    assert told.keys() == {"zookeeper", "replicas", "console", "data"}
    with urllib.request.urlopen(f"{told['console']}brokers", timeout=60) as page:
        assert b"master" in page.read()
    assert [(one["replica"], one["role"]) for one in told["replicas"]] == [(0, "master"), (1, "slave")]
    assert len({one["address"] for one in told["replicas"]}) == 2
    assert offline("topic", "list", "-o", "json", "--zookeeper", told["zookeeper"]).json == []
    assert told["data"] == str(tmp_path / "metamq-data")
    for one in told["replicas"]:
        with urllib.request.urlopen(one["metrics"], timeout=60) as page:
            assert b"metamq_broker_ready" in page.read()
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=90) == (b"", b"Stopping.\n")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(told["console"], timeout=60)


@pytest.mark.slow
def test_up_without_a_console(process: Start, tmp_path: Path) -> None:
    ports = [*free_ports()[:6], "--console-port", -1]
    child = process("up", *ports, "-o", "json", "--slaves", 0, cwd=tmp_path)
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["console"] is None
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=90) == (b"", b"Stopping.\n")


def broker_process(running: Up, replica: int) -> psutil.Process:
    return next(child for child in running.children() if f"--replica={replica}" in child.cmdline())


def in_sync(offline: Metamq, zookeeper: str) -> dict[int, bool]:
    (broker,) = offline("ha", "status", "-o", "json", "--zookeeper", zookeeper).json
    return {one["replica"]: one["in_sync"] and one["address"] is not None for one in broker["replicas"]}


def master(offline: Metamq, zookeeper: str) -> int | None:
    (broker,) = offline("ha", "status", "-o", "json", "--zookeeper", zookeeper).json
    return next((one["replica"] for one in broker["replicas"] if one["role"] == "master"), None)


def mode(offline: Metamq, zookeeper: str) -> str:
    (broker,) = offline("ha", "failover", "-o", "json", "--zookeeper", zookeeper).json
    return str(broker["mode"])


@pytest.mark.slow
@pytest.mark.parametrize("failover", ["auto", "manual"])
def test_a_replica_that_ends_is_told_and_the_other_goes_on(
    process: Start, offline: Metamq, tmp_path: Path, until: Until, failover: str
) -> None:
    """A folder of one broker only, as an earlier `metamq up --slaves 0` left it, gets a slave that copies it."""
    environment = {"METAMQ_BROKER_FAILOVER": failover} if failover == "manual" else {}
    alone = Up(process, tmp_path, "--slaves", 0, *free_ports(), **environment)
    here = ("--zookeeper", alone.zookeeper)
    assert "broker 0 has 1 replica:" in alone.talk
    assert offline("topic", "create", "flights", "--replication", "sync", *here).status == 0
    assert offline("produce", "flights", "a", *here).status == 0
    assert alone.end() == (0, "Stopping.\n")

    running = Up(process, tmp_path, *free_ports(), **environment)
    here = ("--zookeeper", running.zookeeper)
    until(lambda: in_sync(offline, running.zookeeper) == {0: True, 1: True}, "a slave in sync")
    former = broker_process(running, 0)
    said = running.process.stdout
    assert said is not None
    former.kill()
    ended, follows = said.readline().decode(), said.readline().decode()
    assert re.fullmatch(r"Replica 0(, the master,)? was ended by SIGKILL\. The others continue\.\n", ended)
    again = said.readline().decode().removeprefix("To start it again: metamq ").split()
    if failover == "manual":
        promote = follows.removeprefix("To make a slave the master: metamq ").split()
        assert offline(*promote, "--yes", *here).status == 0
    else:
        assert follows in ("Replica 1 takes over by itself.\n", "Replica 1 is the master.\n")
    assert offline("produce", "flights", "b", *here).status == 0
    read = offline("consume", "flights", "-e", *here)
    assert sorted(read.text.split()) == ["a", "b"]

    by_hand = process(*again, cwd=tmp_path)
    until(lambda: in_sync(offline, running.zookeeper) == {0: True, 1: True}, "the former master in sync")
    broker_process(running, 1).kill()  # the last process of its own: the one started by hand needs ZooKeeper
    left = "was ended by SIGKILL. No replica started here is left; ZooKeeper runs until Ctrl-C."
    ended, follows = said.readline().decode(), said.readline().decode()
    assert ended in (f"Replica 1, the master, {left}\n", f"Replica 1 {left}\n")
    if failover == "manual":
        assert follows == "To make a slave the master: metamq ha promote --broker 0 --slave 0\n"
    else:
        assert follows in ("Replica 0 takes over by itself.\n", "Replica 0 is the master.\n")
    assert said.readline().startswith(b"To start it again: metamq broker --replica 1 --port ")
    assert mode(offline, running.zookeeper) == failover
    if failover == "auto":
        until(lambda: master(offline, running.zookeeper) == 0, "the replica that was started by hand the master")
    until(lambda: in_sync(offline, running.zookeeper)[0], "the other one in sync")
    by_hand.send_signal(signal.SIGTERM)
    assert by_hand.wait(60) == 0
    assert running.end() == (0, "Stopping.\n")

    if failover == "auto":
        return
    refused = process("up", "--slaves", 0, *free_ports(), cwd=tmp_path)
    _, talk = refused.communicate(timeout=90)
    assert refused.returncode == 1
    assert b"replica 1 is the master of broker 0, but this command does not start it" in talk


@pytest.mark.slow
def test_after_its_machine_went_down_it_says_how_to_go_on(
    process: Start, offline: Metamq, tmp_path: Path, until: Until
) -> None:
    running = Up(process, tmp_path, *free_ports())
    here = ("--zookeeper", running.zookeeper)
    assert offline("topic", "create", "flights", "--replication", "sync", *here).status == 0
    until(lambda: in_sync(offline, running.zookeeper) == {0: True, 1: True}, "a slave in sync")
    assert offline("produce", "flights", "a", *here).status == 0
    for child in [broker_process(running, 1), broker_process(running, 0)]:  # a slave would take over
        child.kill()
        child.wait(60)
    assert running.end()[0] == 0
    for meta in (tmp_path / "metamq-data").glob("*/meta.json"):
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"boot_id": "another"}))

    again = Up(process, tmp_path, *free_ports())
    assert "  waiting (replica 0) at 127.0.0.1:" in again.talk
    assert "Replica 0 waits: it may lack messages that it acknowledged" in again.talk
    (command,) = re.findall("^To make it the master: metamq (.*)$", again.talk, re.MULTILINE)
    here = ("--zookeeper", again.zookeeper)
    assert offline(*command.split(), "--yes", *here).status == 0
    assert offline("consume", "flights", "-e", *here).text.split() == ["a"]


@pytest.mark.slow
def test_a_lone_broker_that_ends_takes_all_down_and_is_named(process: Start, tmp_path: Path, until: Until) -> None:
    running = Up(process, tmp_path, "--ephemeral", "--slaves", 0, *free_ports())
    assert not (tmp_path / "metamq-data").exists()
    children = running.children()
    broker_process(running, 0).kill()
    talk, _ = running.process.communicate(timeout=90)
    assert running.process.returncode == 1
    assert b"metamq: the broker was ended by SIGKILL\n" in talk
    assert b"broker.log" not in talk
    until(lambda: gone(children), "the end of all children")


@pytest.mark.slow
def test_a_zookeeper_that_ends_is_named_without_java_s_stack_traces(process: Start, tmp_path: Path) -> None:
    running = Up(process, tmp_path, *free_ports())
    server = next(child for child in running.children() if "QuorumPeerMain" in " ".join(child.cmdline()))
    server.kill()
    talk, _ = running.process.communicate(timeout=90)
    assert running.process.returncode == 1
    log = (tmp_path / "metamq-data" / "zookeeper" / "zookeeper.log").resolve()
    assert talk.decode() == f"metamq: ZooKeeper was ended by SIGKILL\n  Its log is {log}.\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["up", "zookeeper"])
def test_zookeeper_s_memory_is_a_setting_and_its_end_is_named(process: Start, tmp_path: Path, command: str) -> None:
    zookeeper = f"127.0.0.1:{(port := free_port())}"
    arguments = {
        "up": ("up", "--slaves", 0, "--port", port, "--broker-port", 0, "--http-port", -1, "-o", "json"),
        "zookeeper": ("zookeeper", "--data", tmp_path / "zookeeper", "--port", port, "-o", "json"),
    }
    child = process(*arguments[command], cwd=tmp_path, env={"METAMQ_ZOOKEEPER_MEMORY": "33MiB"}, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["zookeeper"] == zookeeper

    async def fill() -> None:
        async with await Session.open(zookeeper) as session:
            with contextlib.suppress(ConnectionLost):
                for number in range(0, 100_000, 10):
                    await session.multi([Create(f"/n{number + of_ten}", b"x" * 10_000) for of_ten in range(10)])

    asyncio.run(fill())
    _, talk = child.communicate(timeout=90)
    assert child.returncode == 1
    assert "metamq: ZooKeeper ended: its data needs more memory than its 33 MiB\n" in talk.decode()
    assert "METAMQ_ZOOKEEPER_MEMORY=66MiB: `metamq zookeeper --memory`, `metamq up --zookeeper-memory`" in " ".join(
        talk.decode().split()
    )


@pytest.mark.parametrize("text", ["lots", "1000", "31MiB", "2TiB"])
@pytest.mark.parametrize("command", [("up", "--zookeeper-memory"), ("zookeeper", "--memory")], ids=" ".join)
def test_a_memory_that_cannot_be_is_named_with_examples(offline: Metamq, command: tuple[str, str], text: str) -> None:
    refused = offline(*command, text)
    assert refused.status == 2
    assert f"'{text}' is not a size for ZooKeeper's memory: write it like 512MiB or 2GiB" in " ".join(
        refused.talk.split()
    )


@pytest.mark.slow
def test_a_broker_that_refuses_to_start_is_heard(process: Start, tmp_path: Path) -> None:
    (tmp_path / "metamq-data").mkdir()
    (tmp_path / "metamq-data" / "broker").write_text("a file")
    (tmp_path / "metamq-data" / "broker.log").write_text("metamq: said by an earlier one\n")
    child = process("up", "--slaves", 0, *free_ports(), cwd=tmp_path)
    _, talk = child.communicate(timeout=90)
    assert child.returncode == 1
    first, second, *said = talk.decode().splitlines()
    assert first == "metamq: the broker ended with status 1 before it served"
    assert second == "  Its log metamq-data/broker.log ends:"
    assert said[0].startswith("    metamq: ")
    assert "metamq-data/broker" in said[0]
    assert len(said) <= 2


def test_up_refuses_a_zookeeper_as_it_starts_its_own(offline: Metamq) -> None:
    refused = offline("up", "--zookeeper", "127.0.0.1:2181")
    assert refused.status == 2
    assert "`metamq up` starts a ZooKeeper of its own" in refused.talk


@pytest.mark.slow
def test_a_port_that_is_taken(process: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag, what in (("--port", b"ZooKeeper"), ("--broker-port", b"the broker")):
            child = process("up", "--ephemeral", flag, port, cwd=tmp_path)
            _, talk = child.communicate(timeout=90)
            assert child.returncode == 1
            assert b"port %d of 127.0.0.1 is in use: %s cannot listen there" % (port, what) in talk


def test_fetched_jars_serve_on_a_machine_without_a_network(
    process: Start, offline: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = offline("zookeeper", "--fetch-jars", "-o", "json").json
    shutil.copytree(told["jars"], tmp_path / "jars")
    monkeypatch.delenv("METAMQ_ZOOKEEPER_JARS", raising=False)
    assert "METAMQ_ZOOKEEPER_JARS" in offline("zookeeper", "--fetch-jars").talk
    nowhere = {"METAMQ_MAVEN": "http://127.0.0.1:1/nothing", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    server = process(
        "zookeeper", "--data", tmp_path / "zookeeper", "--port", free_port(), "-o", "json", cwd=tmp_path,
        env={**nowhere, "METAMQ_ZOOKEEPER_JARS": str(tmp_path / "jars")},
    )  # fmt: skip
    assert server.stdout is not None
    assert "zookeeper" in json.loads(server.stdout.readline())


@pytest.mark.slow
def test_broker_and_zookeeper_in_the_foreground(process: Start, offline: Metamq, tmp_path: Path, until: Until) -> None:
    flags = free_ports()
    server = process("zookeeper", "--data", tmp_path / "zookeeper", "--port", flags[1], "-o", "json")
    assert server.stdout is not None
    zookeeper = f"127.0.0.1:{flags[1]}"
    assert json.loads(server.stdout.readline()) == {"zookeeper": zookeeper}
    broker = process(
        "broker", "--id", 3, "--port", 0, "--http-port", -1, "--data", tmp_path / "broker", "--disk-reserve", "64MiB",
        env={"METAMQ_ZOOKEEPER": zookeeper},
    )  # fmt: skip
    assert broker.stderr is not None
    lines = iter(broker.stderr.readline, b"")
    assert any(line.startswith(b"Replica 0 of broker 3 (the master, epoch 1) serves at 127.0.0.1:") for line in lines)
    created = offline("topic", "create", "flights", "-p", 1, "--zookeeper", zookeeper)
    assert created.talk == "Topic flights has 1 partition (1 on broker 3).\n"
    other = process("broker", "--id", 4, "--port", 0, "--http-port", 0, "--data", tmp_path / "other", "-o", "json",
                    env={"METAMQ_ZOOKEEPER": zookeeper})  # fmt: skip
    assert other.stdout is not None
    told = json.loads(other.stdout.readline())
    assert told == {"broker_id": 4, "host": "127.0.0.1", "port": told["port"], "http_port": told["http_port"]}
    assert told["port"] > 0 < told["http_port"]
    for child, number in ((broker, signal.SIGINT), (other, signal.SIGTERM), (server, signal.SIGTERM)):
        child.send_signal(number)
        data, _ = child.communicate(timeout=90)
        assert (child.returncode, data) == (0, b"")


@pytest.mark.parametrize("command", [["broker", "--retention-check", "1ms"], ["broker", "--id", "-1"]], ids=" ".join)
def test_settings_out_of_their_limits(offline: Metamq, command: list[str]) -> None:
    ended = offline(*command)
    assert ended.status == 1
    assert re.search("must be a (whole )?number", ended.talk)
