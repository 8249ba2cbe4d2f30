"""`metamq broker --processes`: the supervisor and its workers as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from metamq import Admin, Consumer, Producer
from tests.cli.conftest import COMMAND, Metamq, unset, until
from tests.one_zookeeper import new_chroot
from tests.parts import gone, http_get, values_to_end

LIMIT_S = 90.0


class Many:
    """A running `metamq broker --processes`."""

    def __init__(self, zookeeper: str, data: Path, *arguments: object, **environment: str) -> None:
        self.zookeeper = zookeeper
        self.log_path = data.with_name(f"{data.name}.log")
        command = [*COMMAND, "broker", "--data", data, "--http-port", 0, "-o", "json", *arguments]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [str(one) for one in command],
                env={**unset(os.environ), "METAMQ_ZOOKEEPER": zookeeper, **environment},
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        told = json.loads(line)
        self.http_port, self.brokers = told["http_port"], told["brokers"]

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def page(self, path: str) -> tuple[int, str]:
        return http_get(self.http_port, path)

    def worker(self, broker_id: int) -> psutil.Process:
        """The process of the broker: it listens at the broker's port."""
        port = next(one["port"] for one in self.brokers if one["broker_id"] == broker_id)
        found = [child for child in self.workers() if any(at.laddr.port == port for at in child.net_connections())]
        return found[0]

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def starts(self) -> list[int]:
        """The starts of each worker's process, as /metrics has them."""
        found = re.findall(r'^metamq_worker_starts_total{broker="\d+"} (\d+)', self.page("/metrics")[1], re.MULTILINE)
        return [int(one) for one in found]

    def is_ready(self) -> bool:
        return self.page("/readyz")[0] == 200

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@contextmanager
def many(zookeeper: str, data: Path, *arguments: object, **environment: str) -> Iterator[Many]:
    """A command that serves. It is killed at the end, and so are its workers."""
    running = Many(zookeeper, data, *("--port", 0, "--processes", 2, *arguments), **environment)
    children: list[psutil.Process] = []
    try:
        running.wait_ready()
        yield running
        if running.process.poll() is None:
            children = running.workers()
    finally:
        running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()
        until(lambda: gone(children), "the end of the workers")


def test_one_command_serves_several_brokers(tmp_path: Path, offline: Metamq) -> None:
    zookeeper = new_chroot()
    with many(zookeeper, tmp_path / "d", "--id", 4) as running:
        listed = offline("broker", "list", "-o", "json", "--zookeeper", zookeeper).json
        assert [(one["broker_id"], one["live"]) for one in listed] == [(4, True), (5, True)]
        assert [one["broker_id"] for one in running.brokers] == [4, 5]
        assert sorted(one.name for one in (tmp_path / "d").iterdir()) == ["broker-4", "broker-5"]
        until(running.is_ready, "readiness")
        ready = running.page("/readyz")[1]
        assert re.fullmatch(r"broker 4: epoch 1, 0 topics\nbroker 5: epoch 1, 0 topics\n", ready)
        assert running.page("/healthz")[0] == 200
        metrics = running.page("/metrics")[1]
        assert metrics.count("# TYPE metamq_broker_ready gauge") == 1
        for broker_id in (4, 5):
            assert f'metamq_broker_ready{{broker="{broker_id}"}} 1.0' in metrics
            assert re.search(rf" INFO broker {broker_id} metamq.broker: replica 0 of broker {broker_id}", running.log)
        assert "<td>5<td>serving<td>127.0.0.1:" in running.page("/")[1]
        assert running.page("/settled")[0] == 404, "only the supervisor asks for it"
        workers = running.workers()
        assert running.end() == 0
        assert gone(workers)
        assert "broker 4 has stopped" in running.log
        assert "broker 5 has stopped" in running.log


@pytest.mark.slow
def test_settings_come_from_a_file_and_variables_and_reach_each_broker(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(f'zookeeper = "{new_chroot()}"\n[broker]\nid = 7\nprocesses = 3\nanswer_memory_bytes = 30000000\n')
    command = [*COMMAND, "broker", "--config", file, "--data", tmp_path / "d", "-o", "json"]
    environment = {"METAMQ_BROKER_PORT": "0", "METAMQ_BROKER_HTTP_PORT": "-1", "METAMQ_LOG_FORMAT": "json"}
    log = tmp_path / "log"
    with log.open("wb") as said, subprocess.Popen(
        [str(one) for one in command], env={**unset(os.environ), **environment}, stdout=subprocess.PIPE, stderr=said
    ) as running:  # fmt: skip
        assert running.stdout is not None
        try:
            told = json.loads(running.stdout.readline() or log.read_text())
            own = [one.environ() for one in psutil.Process(running.pid).children()]
        finally:
            running.terminate()
    assert running.returncode == 0
    assert [one["broker_id"] for one in told["brokers"]] == [7, 8, 9]
    assert told["http_port"] == -1
    assert {one["METAMQ_BROKER_ANSWER_MEMORY_BYTES"] for one in own} == {"10000000"}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line.get("broker") for line in lines} == {None, 7, 8, 9}, "the supervisor's own lines have no broker"


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_the_other_goes_on(tmp_path: Path) -> None:
    with many(new_chroot(), tmp_path / "d") as running, Producer(running.zookeeper) as producer:
        with Admin(running.zookeeper) as admin:
            admin.create_topic("t", partitions=2)
        producer.send_many("t", [b"%d" % one for one in range(100)]).result(LIMIT_S)
        other = running.worker(1)
        running.worker(0).kill()
        producer.send_many("t", [b"%d" % one for one in range(100, 200)]).result(LIMIT_S)
        until(lambda: running.starts() == [2, 1] and running.is_ready(), "the second start of broker 0")
        assert other.is_running()
        assert "broker 0 was ended by SIGKILL: it starts again in 1 s" in running.log
        assert "was ended by SIGKILL" in running.page("/")[1]
        assert running.end() == 0
    with many(running.zookeeper, tmp_path / "d"), Consumer(running.zookeeper, topics="t", idle_timeout_s=1) as consumer:
        assert sorted(map(int, values_to_end(consumer))) == list(range(200))


@pytest.mark.slow
def test_a_frozen_worker_makes_the_command_unhealthy(tmp_path: Path) -> None:
    with many(new_chroot(), tmp_path / "d") as running:
        until(running.is_ready, "readiness")
        frozen = running.worker(1)
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            until(lambda: running.page("/healthz")[0] == 503, "the report")
            assert "broker 1: it does not answer\n" in running.page("/readyz")[1]
            metrics = running.page("/metrics")[1]
            assert 'metamq_broker_ready{broker="0"} 1.0' in metrics
            assert 'metamq_broker_ready{broker="1"}' not in metrics
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        until(running.is_ready, "readiness after the thaw")


@pytest.mark.slow
def test_the_workers_of_a_killed_supervisor_end_and_lose_nothing(tmp_path: Path) -> None:
    with many(new_chroot(), tmp_path / "d") as running:
        with Admin(running.zookeeper) as admin:
            admin.create_topic("t", partitions=2)
        with Producer(running.zookeeper) as producer:
            producer.send_many("t", [b"%d" % one for one in range(100)]).result(LIMIT_S)
        workers = running.workers()
        running.process.kill()
        until(lambda: gone(workers), "the end of the workers")
    with many(running.zookeeper, tmp_path / "d"), Consumer(running.zookeeper, topics="t", idle_timeout_s=1) as consumer:
        assert sorted(map(int, values_to_end(consumer))) == list(range(100))


def free_beside_a_taken_one(stack: ExitStack) -> int:
    """Returns a free port; the next one is taken. No other test chooses from this range."""
    for port in range(10_000 + os.getpid() % 4_000 * 2, 20_000, 2):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            stack.enter_context(socket.create_server(("127.0.0.1", port + 1)))
            return port
    raise AssertionError("no two free ports")


@pytest.mark.slow
def test_a_wrong_configuration_of_one_worker_ends_the_command(tmp_path: Path) -> None:
    with ExitStack() as stack:
        port = free_beside_a_taken_one(stack)
        running = Many(new_chroot(), tmp_path / "d", "--port", port, "--processes", 2)
        assert running.process.communicate(timeout=LIMIT_S)[0] == b""
    assert running.process.returncode == 1
    assert f"metamq: broker 1: cannot listen on 127.0.0.1:{port + 1}: Address already in use\n" in running.log
    assert "Choose another --port" in running.log


@pytest.mark.slow
def test_the_folder_of_a_single_broker_is_continued_and_can_be_a_single_one_again(
    tmp_path: Path, offline: Metamq
) -> None:
    zookeeper, data = new_chroot(), tmp_path / "d"

    def single() -> subprocess.Popen[bytes]:
        options = ["--data", data, "--port", 0, "--http-port", -1, "-o", "json", "--zookeeper", zookeeper]
        child = subprocess.Popen(
            [*COMMAND, "broker", *map(str, options)], stdout=subprocess.PIPE, env=unset(os.environ)
        )
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline()
        return child

    with single() as alone:
        assert offline("topic", "create", "t", "--partitions", 1, "--zookeeper", zookeeper).status == 0
        assert offline("produce", "t", "a", "--zookeeper", zookeeper).status == 0
        alone.terminate()
    with many(zookeeper, data) as running:
        spread = ("--partitions", 2, "--broker", 0, "--broker", 1)
        assert offline("topic", "alter", "t", *spread, "--zookeeper", zookeeper).status == 0
        assert offline("produce", "t", "b", "c", "--zookeeper", zookeeper).status == 0
        assert sorted(one.name for one in data.iterdir() if one.is_dir()) == ["broker-1", "topics"]
        assert running.end() == 0
    refused = Many(zookeeper, data, "--id", 1, "--processes", 2)
    refused.process.communicate(timeout=LIMIT_S)
    assert refused.process.returncode == 1
    assert "belongs to broker 0, but --id 1 --processes 2 runs the brokers 1 to 2" in refused.log
    with many(zookeeper, data):
        read = offline("consume", "t", "-e", "--zookeeper", zookeeper)
        assert sorted(read.text.split()) == ["a", "b", "c"]


class Sending:
    """A thread that sends messages one after the other, and notes those that were stored."""

    def __init__(self, zookeeper: str) -> None:
        self.stored: list[int] = []
        self.errors: list[BaseException] = []
        self._ended = threading.Event()
        self._producer = Producer(zookeeper, linger_ms=0)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            try:
                self._producer.send("t", b"%d" % number).result(LIMIT_S)
                self.stored.append(number)
            except Exception as error:
                self.errors.append(error)
            number += 1

    def __enter__(self) -> Sending:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._producer.close()


def in_sync(zookeeper: str) -> list[int]:
    """The replicas of each broker id that are in sync and registered."""
    with Admin(zookeeper) as admin:
        return [sum(one.in_sync and one.address is not None for one in broker.replicas)
                for broker in admin.replicas().values()]  # fmt: skip


@pytest.mark.slow
def test_a_rolling_restart_loses_no_message_and_waits_for_each_replica(tmp_path: Path) -> None:
    """The commands of two machines: a master and a slave of each broker id."""
    with ExitStack() as stack:
        first = stack.enter_context(many(new_chroot(), tmp_path / "a", "--failover", "auto"))
        second = stack.enter_context(many(first.zookeeper, tmp_path / "b", "--replica", 1, "--failover", "auto"))
        with Admin(first.zookeeper) as admin:
            admin.create_topic("t", partitions=4, replication="sync")
        until(lambda: in_sync(first.zookeeper) == [2, 2], "slaves in sync")
        with Sending(first.zookeeper) as sending:
            until(lambda: sending.stored, "the first message")
            for machine in (second, first):
                machine.process.send_signal(signal.SIGUSR1)
                until(lambda at=machine: "the rolling restart is done" in at.log, "the end of the rolling restart")
                assert machine.starts() == [2, 2]
                assert in_sync(first.zookeeper) == [2, 2]
            before = len(sending.stored)
            until(lambda: len(sending.stored) > before + 10, "messages after the restart")
        assert sending.errors == []
        order = [line for line in first.log.splitlines() if "has stopped" in line or "is up at" in line][-4:]
        assert re.findall(r" broker (\d) metamq", "\n".join(order)) == ["0", "0", "1", "1"]
        with Consumer(first.zookeeper, topics="t", idle_timeout_s=1) as consumer:
            assert sorted(map(int, values_to_end(consumer))) == sending.stored


@pytest.mark.slow
def test_a_rolling_restart_waits_while_a_worker_is_not_ready(tmp_path: Path) -> None:
    with many(new_chroot(), tmp_path / "d") as running:
        until(running.is_ready, "readiness")
        frozen = running.worker(1)
        os.kill(frozen.pid, signal.SIGSTOP)
        running.process.send_signal(signal.SIGUSR1)
        until(lambda: "the rolling restart waits: broker 1: it does not answer" in running.log, "the wait")
        assert running.starts() == [1, 1]
        os.kill(frozen.pid, signal.SIGCONT)
        until(lambda: "the rolling restart is done" in running.log, "the end of the rolling restart")
        assert running.starts() == [2, 2]
