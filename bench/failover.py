"""The time without an acknowledgement when a master ends: metamq, in turns with a real Kafka of three nodes.

Both store each message on three replicas, and acknowledge it when all in-sync ones have it, two at least. Both have the
same session time-out. A producer sends one message after the other. In each round the process of the master ends:

    stop     SIGTERM, as in a rolling restart
    kill     kill -9
    freeze   SIGSTOP for one and a half session time-outs

The gap of a round is the longest time between two acknowledgements, from the fault until all replicas are in sync
again. Maven downloads Kafka's jars from Maven Central; without Maven only metamq is measured.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from spark_kafka import SERVER, jars

from metamq.testing import BrokerProcess, Cluster, cluster
from metamq.zk.server.ports import free_port

Say = Callable[[str], None]

REPLICAS = 3
TOPIC = "steady"
SESSIONS_MS = (6000, 2000)
FAULTS = ("stop", "kill", "freeze")
LIMIT_S = 180.0
CALM_S = 0.5
"""Seconds of acknowledgements before a fault and after its end."""

_SETTINGS = """process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
log.dirs={folder}/data

offsets.topic.replication.factor=3
default.replication.factor=3
min.insync.replicas=2
broker.session.timeout.ms={session_ms}
broker.heartbeat.interval.ms={heartbeat_ms}
"""


class System(Protocol):
    """A running system of three replicas with one topic of one partition."""

    def send(self) -> None:
        """Sends a message, and returns when it is acknowledged."""

    def end_master(self, fault: str, pause_s: float) -> None:
        """Ends the process of the master, and starts or continues it; a frozen one stays so for `pause_s`."""

    def is_whole(self) -> bool:
        """Returns True if all replicas are in sync."""
        ...


class Metamq:
    """One broker id with three replicas and automatic failover."""

    def __init__(self, running: Cluster, stack: ExitStack) -> None:
        for _ in range(REPLICAS - 1):
            running.add_slave()
        self._replicas: list[BrokerProcess] = [running.broker, *running.slaves]
        self._admin = stack.enter_context(running.admin())
        self._admin.create_topic(TOPIC, partitions=1, replication="sync", min_insync=2)
        self._producer = stack.enter_context(running.producer(linger_ms=0))
        self._sent = 0

    def send(self) -> None:
        self._sent += 1
        self._producer.send(TOPIC, b"%d" % self._sent).result(LIMIT_S)

    def end_master(self, fault: str, pause_s: float) -> None:
        found = self._admin.replicas()[0].replicas
        master = self._replicas[next(one.replica for one in found if one.role == "master")]
        if fault == "freeze":
            master.freeze()
            time.sleep(pause_s)
            master.thaw()
        elif fault == "kill":
            master.kill()
            master.start()
        else:
            master.stop()
            master.start()

    def is_whole(self) -> bool:
        found = self._admin.replicas()[0].replicas
        return len(found) == REPLICAS and all(one.holds_all for one in found)


class Kafka:
    """Three nodes, each a broker and a controller; librdkafka's producer, which is asked to notice a change soon."""

    def __init__(self, folder: Path, session_ms: int, stack: ExitStack) -> None:
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        ports = {node: (free_port(), free_port()) for node in range(1, REPLICAS + 1)}
        voters = ",".join(f"{node}@127.0.0.1:{controller}" for node, (_, controller) in ports.items())
        class_path = ":".join(jars(folder / "server", SERVER))
        self._java = ["java", "-Xms512m", "-Xmx512m", "-cp", class_path]
        self._folders: dict[int, Path] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        stack.callback(self._kill_all)
        for node, (port, controller) in ports.items():
            place = self._folders[node] = folder / f"node-{node}"
            place.mkdir()
            settings = _SETTINGS.format(
                node=node, voters=voters, port=port, controller=controller, folder=place,
                session_ms=session_ms, heartbeat_ms=session_ms // 4,
            )  # fmt: skip
            (place / "server.properties").write_text(settings)
            format_it = ["kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c"]
            command = [*self._java, *format_it, str(place / "server.properties")]
            subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
            self._start(node)
        servers = ",".join(f"127.0.0.1:{port}" for port, _ in ports.values())
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        while len(self._admin.list_topics(timeout=LIMIT_S).brokers) < REPLICAS:
            time.sleep(0.1)
        made = self._admin.create_topics([NewTopic(TOPIC, 1, REPLICAS)], operation_timeout=LIMIT_S)
        made[TOPIC].result(LIMIT_S)
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "log_level": 0,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 0,
                "delivery.timeout.ms": round(LIMIT_S * 1000),
                "request.timeout.ms": session_ms,
                "socket.timeout.ms": session_ms,
                "topic.metadata.refresh.interval.ms": 500,
                "retry.backoff.ms": 50,
                "retry.backoff.max.ms": 100,
                "reconnect.backoff.ms": 50,
                "reconnect.backoff.max.ms": 100,
            }
        )
        self._sent = 0

    def _start(self, node: int) -> None:
        place = self._folders[node]
        with (place / "log").open("ab") as output:
            command = [*self._java, "kafka.Kafka", str(place / "server.properties")]
            self._processes[node] = subprocess.Popen(command, stdout=output, stderr=output)

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def send(self) -> None:
        failed: list[Any] = []

        def told(error: Any, _message: Any) -> None:
            if error is not None:
                failed.append(error)

        self._sent += 1
        self._producer.produce(TOPIC, b"%d" % self._sent, on_delivery=told)
        while self._producer.flush(LIMIT_S):
            pass
        assert not failed, failed

    def _partition(self) -> Any:
        return self._admin.list_topics(TOPIC, timeout=LIMIT_S).topics[TOPIC].partitions[0]

    def end_master(self, fault: str, pause_s: float) -> None:
        node = self._partition().leader
        process = self._processes[node]
        if fault == "freeze":
            process.send_signal(signal.SIGSTOP)
            time.sleep(pause_s)
            process.send_signal(signal.SIGCONT)
            return
        process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
        process.wait()
        self._start(node)

    def is_whole(self) -> bool:
        from confluent_kafka import KafkaException

        try:
            return len(self._partition().isrs) == REPLICAS
        except KafkaException:
            return False


class Steady:
    """A thread that sends one message after the other, and notes the time of each acknowledgement."""

    def __init__(self, system: System) -> None:
        self.times = [time.perf_counter()]
        self._system = system
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._system.send()
                self.times.append(time.perf_counter())
                time.sleep(0.002)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Steady:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def wait_for_more(self) -> None:
        """Waits until messages have been acknowledged for CALM_S."""
        before = time.perf_counter()
        while self.times[-1] < before + CALM_S and self._error is None:
            time.sleep(0.01)

    def gap_since(self, number: int) -> float:
        """Returns the longest time between two acknowledgements since that number of them, in seconds."""
        times = self.times[number:]
        return max(later - earlier for earlier, later in pairwise(times))


def _wait_whole(system: System) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not system.is_whole():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{system} is not whole after {LIMIT_S:g} s")
        time.sleep(0.05)


def _round(system: System, steady: Steady, fault: str, session_ms: int) -> float:
    _wait_whole(system)
    steady.wait_for_more()
    before = len(steady.times) - 1
    system.end_master(fault, 1.5 * session_ms / 1000)
    _wait_whole(system)
    steady.wait_for_more()
    return steady.gap_since(before)


@contextmanager
def _systems(folder: Path, session_ms: int, say: Say) -> Iterator[dict[str, System]]:
    with ExitStack() as stack:
        settings = {"session_timeout_ms": session_ms, "failover": "auto", "failover_pause_max_ms": 0}
        running = stack.enter_context(cluster(folder=folder / "metamq", **settings))
        found: dict[str, System] = {"metamq": Metamq(running, stack)}
        if shutil.which("mvn") is None:
            say("Kafka is left out: there is no mvn to download it")
        else:
            found["kafka"] = Kafka(folder, session_ms, stack)
        for system in found.values():
            _wait_whole(system)
        yield found


def measure(rounds: int, say: Say) -> dict[str, Any]:
    """Measures each fault `rounds` times for each system and session time-out, in turns. Returns seconds."""
    rows = []
    for session_ms in SESSIONS_MS:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            systems = stack.enter_context(_systems(Path(folder), session_ms, say))
            producers = {name: stack.enter_context(Steady(system)) for name, system in systems.items()}
            for fault in FAULTS:
                gaps: dict[str, list[float]] = {name: [] for name in systems}
                for _ in range(rounds):
                    for name, system in systems.items():
                        gaps[name].append(_round(system, producers[name], fault, session_ms))
                row: dict[str, Any] = {"session_ms": session_ms, "fault": fault, "rounds": rounds}
                for name, found in gaps.items():
                    row |= {f"{name}_{what}": value for what, value in _summary(found).items()}
                    say(
                        f"{fault}, session {session_ms} ms, {name}: " + ", ".join(f"{one:.2f}" for one in sorted(found))
                    )
                rows.append(row)
    return {"rows": rows, "cores": os.cpu_count()}


def _summary(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"p50_s": statistics.median(ordered), "p99_s": p99, "max_s": ordered[-1]}
