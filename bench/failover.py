"""The time without an acknowledgement when a master ends: metamq, in turns with a real Kafka of three nodes.

Both store each message on three replicas, and acknowledge it when all in-sync ones have it, two at least. Both have the
same session time-out. A producer sends one message after the other. In each round the process of the master ends:

    stop     SIGTERM, as in a rolling restart
    kill     kill -9
    freeze   SIGSTOP for one and a half session time-outs
    cut      its network is cut off for one and a half session time-outs; needs root, for network namespaces

The gap of a round is the longest time between two acknowledgements, from the fault until all replicas are in sync
again. kill has all rounds, the other faults and Kafka have a share of them. Maven downloads Kafka's jars from Maven
Central; without Maven only metamq is measured.
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

from network import Machine, Network, can_cut
from spark_kafka import SERVER, jars

from metamq import Admin, Producer
from metamq.testing import BrokerProcess
from metamq.zk.server.embedded import EmbeddedZooKeeper

Say = Callable[[str], None]

REPLICAS = 3
TOPIC = "steady"
SESSIONS_MS = (6000, 2000)
FAULTS = {"stop": 0.25, "kill": 1.0, "freeze": 0.1, "cut": 0.1}
"""The faults, and the share of the rounds that each has."""
LASTING_SESSIONS = 1.5
KAFKA_EVERY = 8
"""Kafka has one round in so many."""
PROGRESS_EVERY = 10
LIMIT_S = 180.0
CALM_S = 0.5
"""Seconds of acknowledgements before a fault and after its end."""

_SETTINGS = """process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAINTEXT://{address}:9092,CONTROLLER://{address}:9093
controller.listener.names=CONTROLLER
log.dirs={folder}/data

offsets.topic.replication.factor=3
default.replication.factor=3
min.insync.replicas=2
broker.session.timeout.ms={session_ms}
broker.heartbeat.interval.ms={heartbeat_ms}
"""


class Sends(Protocol):
    """Sends messages one after the other."""

    def send(self) -> None:
        """Sends a message, and returns when it is acknowledged."""


class Node(Protocol):
    """One process of a system, and its machine."""

    machine: Machine

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; one that ends the process waits for its end, and starts it again."""


class System(Sends, Protocol):
    """A running system of three replicas with one topic of one partition."""

    def master(self) -> Node:
        """Returns the node that is the master."""
        ...

    def is_whole(self) -> bool:
        """Returns True if all replicas are in sync."""
        ...


class Replica:
    """A replica of metamq."""

    def __init__(self, broker: BrokerProcess, machine: Machine) -> None:
        self.broker, self.machine = broker, machine
        self.start()

    def start(self) -> None:
        with self.machine.inside():
            self.broker.start(wait=False)
        self.broker.wait_ready()

    def signal(self, number: signal.Signals) -> None:
        if number in (signal.SIGKILL, signal.SIGTERM):
            (self.broker.kill if number == signal.SIGKILL else self.broker.stop)()
            self.start()
        else:
            (self.broker.freeze if number == signal.SIGSTOP else self.broker.thaw)()


class Metamq:
    """One broker id with three replicas and automatic failover."""

    def __init__(self, folder: Path, network: Network, session_ms: int, stack: ExitStack) -> None:
        zookeeper = stack.enter_context(EmbeddedZooKeeper(folder / "zookeeper", host=network.address))
        settings: dict[str, Any] = {"session_timeout_ms": session_ms, "failover": "auto", "failover_pause_max_ms": 0}
        self._replicas: list[Replica] = []
        for number in range(REPLICAS):
            machine = network.machine()
            broker = BrokerProcess(
                zookeeper.address, folder / f"replica-{number}", replica=number, host=machine.address, **settings
            )
            stack.callback(broker.kill)
            self._replicas.append(Replica(broker, machine))
        self._admin = stack.enter_context(Admin(zookeeper.address))
        self._admin.create_topic(TOPIC, partitions=1, replication="sync", min_insync=2)
        self._producer = stack.enter_context(Producer(zookeeper.address, linger_ms=0))
        self._sent = 0

    def send(self) -> None:
        self._sent += 1
        self._producer.send(TOPIC, b"%d" % self._sent).result(LIMIT_S)

    def master(self) -> Node:
        found = self._admin.replicas()[0].replicas
        number = next(one.replica for one in found if one.role == "master")
        return self._replicas[number]

    def is_whole(self) -> bool:
        found = self._admin.replicas()[0].replicas
        return len(found) == REPLICAS and all(one.holds_all for one in found)


class KafkaNode:
    """A node that is a broker and a controller."""

    def __init__(self, command: list[str], settings: Path, machine: Machine) -> None:
        self.machine = machine
        self._command, self._settings = command, settings
        format_it = ["kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", str(settings)]
        subprocess.run([*command, *format_it], check=True, capture_output=True, timeout=LIMIT_S)
        self._start()

    def _start(self) -> None:
        with (self._settings.parent / "log").open("ab") as output, self.machine.inside():
            command = [*self._command, "kafka.Kafka", str(self._settings)]
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._process.wait()
            self._start()

    def kill(self) -> None:
        """Ends the process for good."""
        self._process.kill()
        self._process.wait()


class Kafka:
    """Three nodes, and librdkafka's producer, which is asked to notice a change soon."""

    def __init__(self, folder: Path, network: Network, session_ms: int, stack: ExitStack) -> None:
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        machines = {node: network.machine() for node in range(1, REPLICAS + 1)}
        voters = ",".join(f"{node}@{machine.address}:9093" for node, machine in machines.items())
        class_path = ":".join(jars(folder / "server", SERVER))
        command = ["java", "-Xms512m", "-Xmx512m", "-cp", class_path]
        self._nodes: dict[int, KafkaNode] = {}
        for node, machine in machines.items():
            place = folder / f"node-{node}"
            place.mkdir()
            settings = place / "server.properties"
            settings.write_text(
                _SETTINGS.format(
                    node=node, voters=voters, address=machine.address, folder=place,
                    session_ms=session_ms, heartbeat_ms=session_ms // 4,
                )
            )  # fmt: skip
            self._nodes[node] = KafkaNode(command, settings, machine)
            stack.callback(self._nodes[node].kill)
        servers = ",".join(f"{machine.address}:9092" for machine in machines.values())
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

    def master(self) -> Node:
        return self._nodes[self._partition().leader]

    def is_whole(self) -> bool:
        from confluent_kafka import KafkaException

        try:
            return len(self._partition().isrs) == REPLICAS
        except KafkaException:
            return False


class Steady:
    """A thread that sends one message after the other, and notes the time of each acknowledgement."""

    def __init__(self, system: Sends) -> None:
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
        while self.times[-1] < before + CALM_S:
            if self._error is not None:
                raise self._error
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


def _inflict(fault: str, node: Node, lasting_s: float) -> None:
    if fault == "cut":
        node.machine.cut()
        try:
            time.sleep(lasting_s)
        finally:
            node.machine.mend()
    elif fault == "freeze":
        node.signal(signal.SIGSTOP)
        try:
            time.sleep(lasting_s)
        finally:
            node.signal(signal.SIGCONT)
    else:
        node.signal(signal.SIGKILL if fault == "kill" else signal.SIGTERM)


def _round(system: System, steady: Steady, fault: str, session_ms: int) -> float:
    _wait_whole(system)
    steady.wait_for_more()
    before = len(steady.times) - 1
    _inflict(fault, system.master(), LASTING_SESSIONS * session_ms / 1000)
    _wait_whole(system)
    steady.wait_for_more()
    return steady.gap_since(before)


@contextmanager
def _systems(folder: Path, session_ms: int, say: Say) -> Iterator[dict[str, System]]:
    with ExitStack() as stack:
        network = Network(stack, SESSIONS_MS.index(session_ms))
        found: dict[str, System] = {"metamq": Metamq(folder / "metamq", network, session_ms, stack)}
        if shutil.which("mvn") is None:
            say("Kafka is left out: there is no mvn to download it")
        else:
            found["kafka"] = Kafka(folder, network, session_ms, stack)
        for system in found.values():
            _wait_whole(system)
        yield found


def _measure_fault(
    fault: str, rounds: int, systems: dict[str, System], producers: dict[str, Steady], session_ms: int, say: Say
) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds):
        for name, system in systems.items():
            if name == "metamq" or number % KAFKA_EVERY == 0:
                gaps[name].append(_round(system, producers[name], fault, session_ms))
        if number % PROGRESS_EVERY == PROGRESS_EVERY - 1 or number == rounds - 1:
            so_far = ", ".join(f"{name} {statistics.median(found):.2f} s" for name, found in gaps.items())
            say(f"{fault}, session {session_ms} ms, {number + 1} of {rounds} rounds: {so_far}")
    row: dict[str, Any] = {"session_ms": session_ms, "fault": fault}
    for name, found in gaps.items():
        row |= {f"{name}_{what}": value for what, value in _summary(found).items()}
    return row


def measure(rounds: int, say: Say) -> dict[str, Any]:
    """Measures each fault for each system and session time-out, in turns. Returns seconds."""
    rows = []
    for session_ms in SESSIONS_MS:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            systems = stack.enter_context(_systems(Path(folder), session_ms, say))
            producers = {name: stack.enter_context(Steady(system)) for name, system in systems.items()}
            for fault, share in FAULTS.items():
                if fault == "cut" and not can_cut():
                    say("cut is left out: it needs root and the command ip")
                    continue
                count = max(1, round(rounds * share))
                rows.append(_measure_fault(fault, count, systems, producers, session_ms, say))
    return {"rows": rows, "cores": os.cpu_count()}


def _summary(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"rounds": len(ordered), "p50_s": statistics.median(ordered), "p99_s": p99, "max_s": ordered[-1]}
