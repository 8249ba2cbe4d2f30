"""Real parts for tests: an embedded ZooKeeper and broker processes that run as long as a test.

    def test_orders(metamq_cluster):                       # the pytest fixture: one cluster per session
        metamq_cluster.create_topic("orders")
        with metamq_cluster.producer() as producer:
            producer.send("orders", b"1").result()

    with cluster() as running:                             # without pytest
        ...

Nothing is faked: a test that passes here passes against a real cluster.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metamq.errors import MetamqError, Timeout
from metamq.security.config import SecurityConfig
from metamq.zk.server.embedded import EmbeddedZooKeeper, freeze
from metamq.zk.server.ports import HeldPort

if TYPE_CHECKING:
    from metamq import Admin, Consumer, Producer

__all__ = ["BrokerProcess", "Cluster", "cluster", "metamq_cluster"]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
LOG_CHARACTERS = 2000
INSECURE = SecurityConfig()


class BrokerProcess:
    """One broker as a process of its own, on a port that stays the same over restarts. It ends with this process."""

    command: tuple[str, ...] = (sys.executable, "-m", "metamq.broker")
    popen: Callable[..., Any] = staticmethod(subprocess.Popen)

    def __init__(self, zookeeper: str, data: Path, broker_id: int = 0, **settings: object) -> None:
        """`settings` are the settings of metamq.broker.config.BrokerConfig."""
        self.broker_id = broker_id
        self.data = data
        self.port: int = 0
        self._held: HeldPort | None = None
        self.http_port: int = 0
        self.log_path: Path = data.with_name(f"{data.name}.log")
        self._zookeeper = zookeeper
        self.security = INSECURE
        """Its security settings. A change takes effect at the next start."""
        self.settings: dict[str, object] = {"disk_reserve_bytes": 64 * 1024 * 1024, "http_port": 0, **settings}
        self._process: subprocess.Popen[str] | None = None

    def start(self, *, wait: bool = True, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts the process, and waits until it serves, unless `wait` is False. Raises the errors of wait_ready()."""
        assert self._process is None
        # The system must not choose the port: while the broker is down, the system could give the port to a connection.
        if not self.port:
            self._held = HeldPort(str(self.settings.get("host", "127.0.0.1")))
            self.port = self._held.number
        settings = {**self.settings, "id": self.broker_id, "data": self.data, "port": self.port}
        environment = {f"METAMQ_BROKER_{name.upper()}": str(value) for name, value in settings.items()}
        environment["METAMQ_ZOOKEEPER"] = self._zookeeper
        environment |= {f"METAMQ_SECURITY_{name.upper()}": str(one) for name, one in asdict(self.security).items()}
        with self.log_path.open("a") as log:
            self._process = self.popen(
                [*self.command, "--with-parent"],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C signals the whole foreground group, but only the tests decide when their brokers end.
                start_new_session=True,
            )
        if wait:
            self.wait_ready(timeout_s)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until a started process serves. Raises MetamqError if it ends, and Timeout after `timeout_s`: then the
        process is killed. Both errors have the end of its log."""
        assert self._process is not None
        assert self._process.stdout is not None
        answer = select.poll()
        answer.register(self._process.stdout, select.POLLIN)
        if not answer.poll(timeout_s * 1000):
            self.kill()
            raise Timeout(f"the start of broker {self.broker_id}", timeout_s, hint=self._end_of_log())
        words = self._process.stdout.readline().split()
        if not words:
            status = self._process.wait()
            self._closed()
            raise MetamqError(
                f"broker {self.broker_id} ended with status {status} instead of serving", hint=self._end_of_log()
            )
        self.port, self.http_port = int(words[1]), int(words[2])

    def _end_of_log(self) -> str:
        return f"Its log {self.log_path} ends:\n{self.log_path.read_text()[-LOG_CHARACTERS:]}"

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if the process exists, frozen or not."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int:
        """Sends SIGTERM, which stops the broker gracefully. Returns the exit status; 0 if it was not running."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, which is like a crash."""
        self._end(signal.SIGKILL)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits for a process that ends by itself. Returns its exit status."""
        assert self._process is not None
        status = self._process.wait(timeout_s)
        self._closed()
        return status

    def freeze(self) -> None:
        """Sends SIGSTOP. The process has stopped when this call returns."""
        freeze(self.pid)

    def thaw(self) -> None:
        """Sends SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Stops the broker gracefully, and starts it on the same port and data."""
        self.stop()
        self.start()

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        if process is None:
            return 0
        process.send_signal(number)
        if number == signal.SIGTERM:
            process.send_signal(signal.SIGCONT)
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._closed()
            raise MetamqError(f"broker {self.broker_id} did not stop within {STOP_TIMEOUT_S:g} s") from None
        self._closed()
        return status

    def _closed(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process = None


class Cluster:
    """A running ZooKeeper and its brokers. `zookeeper` is the address for clients."""

    def __init__(self, zookeeper: EmbeddedZooKeeper | str, folder: Path, security: SecurityConfig = INSECURE) -> None:
        self._zookeeper = zookeeper
        self.folder = folder
        self.security = security
        self.brokers: list[BrokerProcess] = []
        self.slaves: list[BrokerProcess] = []

    @property
    def zookeeper(self) -> str:
        """The "host:port" of the ZooKeeper server, with its chroot if there is one."""
        return self._zookeeper if isinstance(self._zookeeper, str) else self._zookeeper.address

    @property
    def zookeeper_server(self) -> EmbeddedZooKeeper:
        """The server that was started for this cluster."""
        assert not isinstance(self._zookeeper, str), "the cluster uses a server that it did not start"
        return self._zookeeper

    @property
    def broker(self) -> BrokerProcess:
        """The first broker."""
        return self.brokers[0]

    def add_broker(self, **settings: object) -> BrokerProcess:
        """Starts one more broker, with the next broker id."""
        broker_id = len(self.brokers)
        data = self.folder / f"broker-{broker_id}"
        broker = BrokerProcess(self.zookeeper, data, broker_id, **settings)
        broker.security = self.security
        self.brokers.append(broker)
        broker.start()
        return broker

    def add_slave(self, broker_id: int = 0, **settings: object) -> BrokerProcess:
        """Starts one more replica of a broker, with the broker's settings. `admin().replicas()` shows its sync
        state."""
        first = self.brokers[broker_id]
        number = 1 + sum(slave.broker_id == broker_id for slave in self.slaves)
        folder = first.data.with_name(f"{first.data.name}-replica-{number}")
        merged = {**first.settings, "replica": number, **settings}
        slave = BrokerProcess(self.zookeeper, folder, broker_id, **merged)
        slave.security = self.security
        self.slaves.append(slave)
        slave.start()
        return slave

    def producer(self, **settings: Any) -> Producer[Any]:
        """Returns a Producer for this cluster."""
        from metamq import Producer

        settings.setdefault("security", self.security)
        return Producer(self.zookeeper, **settings)

    def consumer(self, **settings: Any) -> Consumer[Any]:
        """Returns a Consumer for this cluster."""
        from metamq import Consumer

        settings.setdefault("security", self.security)
        return Consumer(self.zookeeper, **settings)

    def admin(self) -> Admin:
        """Returns an Admin for this cluster."""
        from metamq import Admin

        return Admin(self.zookeeper, security=self.security)

    def create_topic(self, topic: str, partitions: int = 4, **settings: Any) -> None:
        """Creates a topic and waits until it accepts messages."""
        with self.admin() as admin:
            admin.create_topic(topic, partitions=partitions, **settings)


@contextlib.contextmanager
def cluster(
    *,
    brokers: int = 1,
    folder: Path | None = None,
    zookeeper: str | None = None,
    security: SecurityConfig = INSECURE,
    **settings: object,
) -> Iterator[Cluster]:
    """Runs a cluster for a `with` block. `folder` keeps its data; by default the data is removed at the end.

    `zookeeper` is the address of a running server, best with a chroot of its own: "host:port/chroot". By default the
    cluster starts a server. `security` has the security settings of brokers and clients. `settings` are the settings of
    metamq.broker.config.BrokerConfig, for all brokers.
    """
    own = Path(tempfile.mkdtemp(prefix="metamq-")) if folder is None else None
    place = own or folder
    assert place is not None
    place.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack:
            server = zookeeper or stack.enter_context(EmbeddedZooKeeper(place / "zookeeper", security=security))
            running = Cluster(server, place, security)
            try:
                for _ in range(brokers):
                    running.add_broker(**settings)
                yield running
            finally:
                for broker in (*running.slaves, *running.brokers):
                    broker.kill()
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _fixture() -> Any:
    try:
        import pytest
    except ImportError:  # the cluster is useful without pytest
        return None

    @pytest.fixture(scope="session", name="metamq_cluster")
    def running_cluster() -> Iterator[Cluster]:
        """A ZooKeeper and one broker for the test session."""
        with cluster() as running:
            yield running

    return running_cluster


metamq_cluster = _fixture()
