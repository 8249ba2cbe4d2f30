"""A cluster for tests: a ZooKeeper server, brokers and slaves, their clients, and faults.

Theory of operation
-------------------
`cluster(network=True)` puts a network (`network.py`) between all parties. ZooKeeper and each broker are then known
by an address on LINE_HOST, where the network listens on the party's own port. It recognises from which process a
connection comes, so each link between two parties can be cut by itself. The test's own Admin goes past the network.

Each fault has its way back: thaw() after freeze(), heal() after cut(), start_zookeeper() after stop_zookeeper(). Such
a fault also ends with a `with` block. repair() undoes all of them, so that tests can share a cluster.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from metamq.errors import ConfigError, MetamqError, Timeout
from metamq.testing.broker_process import INSECURE, START_TIMEOUT_S, BrokerProcess
from metamq.testing.network import Network, Way
from metamq.testing.temporary_folder import temporary_folder
from metamq.zk.server.embedded import EmbeddedZooKeeper

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import metamq
    from metamq import Admin, Consumer, Producer
    from metamq.security.config import SecurityConfig
    from metamq.testing.workers import WorkerProcess

Party: TypeAlias = "BrokerProcess | Literal['clients', 'zookeeper']"
"""One end of a link. "clients" are all processes that are not brokers of the cluster, this one included."""
CLIENTS: Literal["clients"] = "clients"
ZOOKEEPER: Literal["zookeeper"] = "zookeeper"
LINE_HOST = "127.0.0.9"
"""An address of the loopback interface of Linux that is not its usual one: the ports there are free."""
POLL_S = 0.02
TOPIC_NAME_CHARACTERS = 60


class _LinkedBroker(BrokerProcess):
    """A broker behind a line of the network. While it does not run, its line refuses connections."""

    def __init__(self, network: Network, zookeeper: str, data: Path, broker_id: int, **settings: object) -> None:
        super().__init__(zookeeper, data, broker_id, **{"advertise": LINE_HOST, **settings})
        self._network = network

    def _begins(self) -> None:
        self._network.line(_name(self), LINE_HOST, self.port)

    def _closed(self) -> None:
        super()._closed()
        self._network.refuse(LINE_HOST, self.port)


class Cluster:
    """A running ZooKeeper and its brokers. `zookeeper` is the address for clients."""

    def __init__(
        self,
        zookeeper: EmbeddedZooKeeper | str,
        folder: Path,
        security: SecurityConfig = INSECURE,
        *,
        network: bool = False,
    ) -> None:
        self._zookeeper = zookeeper
        self._zookeeper_frozen = False
        self.folder = folder
        self.security = security
        self.brokers: list[BrokerProcess] = []
        self.slaves: list[BrokerProcess] = []
        self._network = Network(self._pids, CLIENTS) if network else None
        if self._network is not None:
            self._network.line(ZOOKEEPER, LINE_HOST, self.zookeeper_server.port)

    def close(self) -> None:
        """Kills the brokers, and ends the network."""
        for broker in (*self.slaves, *self.brokers):
            broker.kill()
        if self._network is not None:
            self._network.close()

    def _pids(self) -> dict[str, int]:
        """The process of each broker that has one, by its name in the network."""
        return {_name(one): pid for one in self.processes if (pid := one.pid_or_none) is not None}

    @property
    def zookeeper(self) -> str:
        """The "host:port" of the ZooKeeper server, with its chroot if there is one."""
        if self._network is not None:
            return f"{LINE_HOST}:{self.zookeeper_server.port}"
        return self._zookeeper if isinstance(self._zookeeper, str) else self._zookeeper.address

    @property
    def zookeeper_server(self) -> EmbeddedZooKeeper:
        """The server that was started for this cluster. Raises ConfigError if it uses another one."""
        if isinstance(self._zookeeper, str):
            raise ConfigError(
                f"the ZooKeeper at {self._zookeeper} is not one that this cluster started",
                hint="Leave `zookeeper=` out of cluster(), and it starts its own server.",
            )
        return self._zookeeper

    @property
    def broker(self) -> BrokerProcess:
        """The first broker."""
        return self.brokers[0]

    def add_broker(self, **settings: object) -> BrokerProcess:
        """Starts one more broker, with the next broker id."""
        broker_id = len(self.brokers)
        data = self.folder / f"broker-{broker_id}"
        return self._started(self.brokers, data, broker_id, settings)

    def add_slave(self, broker_id: int = 0, **settings: object) -> BrokerProcess:
        """Starts one more replica of a broker, with the broker's settings. `admin().replicas()` shows its sync
        state."""
        first = self.brokers[broker_id]
        number = 1 + sum(slave.broker_id == broker_id for slave in self.slaves)
        folder = first.data.with_name(f"{first.data.name}-replica-{number}")
        merged = {**first.settings, "replica": number, **settings}
        return self._started(self.slaves, folder, broker_id, merged)

    def _started(
        self, kind: list[BrokerProcess], data: Path, broker_id: int, settings: dict[str, object]
    ) -> BrokerProcess:
        if self._network is None:
            broker = BrokerProcess(self.zookeeper, data, broker_id, **settings)
        else:
            broker = _LinkedBroker(self._network, self.zookeeper, data, broker_id, **settings)
        broker.security = self.security
        kind.append(broker)
        broker.start()
        return broker

    @property
    def processes(self) -> list[BrokerProcess]:
        """All brokers and slaves, running or not."""
        return [*self.brokers, *self.slaves]

    # -- clients ------------------------------------------------------------------------------------------------------

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

    def aio_producer(self, **settings: Any) -> metamq.aio.Producer[Any]:
        """Returns an asyncio Producer for this cluster, to be opened by `async with`."""
        import metamq

        settings.setdefault("security", self.security)
        return metamq.aio.Producer(self.zookeeper, **settings)

    def aio_consumer(self, **settings: Any) -> metamq.aio.Consumer[Any]:
        """Returns an asyncio Consumer for this cluster, to be opened by `async with`."""
        import metamq

        settings.setdefault("security", self.security)
        return metamq.aio.Consumer(self.zookeeper, **settings)

    def worker(self, arguments: str | Sequence[str]) -> AbstractContextManager[WorkerProcess]:
        """Runs `metamq worker` for this cluster beside a `with` block, as a process in the present folder.

            with running.worker("billing:bill --group billing --topic orders") as worker: ...

        The block begins when the worker has joined its group. At its end the worker gets SIGTERM, and finishes the
        messages in progress. Raises MetamqError if it ends with an error, except after its kill(); Timeout.
        """
        from metamq.testing.workers import worker

        return worker(self, arguments)

    def admin(self) -> Admin:
        """Returns an Admin for this cluster. No cut separates it from ZooKeeper."""
        from metamq import Admin

        direct = self._zookeeper if isinstance(self._zookeeper, str) else self._zookeeper.address
        return Admin(direct, security=self.security)

    def create_topic(self, topic: str, partitions: int = 4, **settings: Any) -> None:
        """Creates a topic and waits until it accepts messages."""
        with self.admin() as admin:
            admin.create_topic(topic, partitions=partitions, **settings)

    def new_topic(self, name: str = "topic", partitions: int = 4, **settings: Any) -> str:
        """Creates a topic with a unique name that begins with `name`. Returns the name."""
        topic = f"{re.sub('[^A-Za-z0-9_-]+', '-', name)[:TOPIC_NAME_CHARACTERS]}-{uuid.uuid4().hex[:8]}"
        self.create_topic(topic, partitions, **settings)
        return topic

    # -- faults -------------------------------------------------------------------------------------------------------

    def master(self, broker_id: int = 0) -> BrokerProcess:
        """Returns the replica that is the master of a broker id, or was the last one."""
        with self.admin() as admin:
            found = admin.replicas()[broker_id].replicas
        number = next(one.replica for one in found if one.role in ("master", "waiting"))
        return next(one for one in self.processes if (one.broker_id, one.replica) == (broker_id, number))

    def kill_master(self, broker_id: int = 0) -> BrokerProcess:
        """Kills the master of a broker id with SIGKILL, like a crash. Returns it: start() starts it again."""
        master = self.master(broker_id)
        master.kill()
        return master

    def freeze(self, party: Party) -> AbstractContextManager[object]:
        """Stops a process with SIGSTOP: its connections stay open and get no answers, until thaw() or the block's
        end."""
        if isinstance(party, BrokerProcess):
            party.freeze()
        else:
            self._check_zookeeper(party)
            self.zookeeper_server.freeze()
            self._zookeeper_frozen = True
        return _undone_by(lambda: self.thaw(party))

    def thaw(self, party: Party) -> None:
        """Continues a frozen process. Does nothing if it is not frozen."""
        if isinstance(party, BrokerProcess):
            if party.frozen:
                party.thaw()
            return
        self._check_zookeeper(party)
        if self._zookeeper_frozen:
            self.zookeeper_server.thaw()
            self._zookeeper_frozen = False

    def cut(self, one: Party, other: Party) -> AbstractContextManager[object]:
        """Cuts the network between two parties, until heal() or the block's end. Bytes wait as if packets were lost.

        Needs cluster(network=True); raises ConfigError otherwise.
        """
        way = Way(_name(one), _name(other))
        self._cuttable().cut(way, way.back)
        return _undone_by(lambda: self.heal(one, other))

    def heal(self, one: Party, other: Party) -> None:
        """Ends cut()."""
        way = Way(_name(one), _name(other))
        self._cuttable().heal(way, way.back)

    def restart(self, party: Party) -> None:
        """Starts a party again on the same port and data. A broker stops gracefully before that; ZooKeeper is killed,
        as it has no other stop. Undoes a freeze."""
        if isinstance(party, BrokerProcess):
            party.restart()
        else:
            self._check_zookeeper(party)
            self.start_zookeeper()

    def stop_zookeeper(self) -> AbstractContextManager[object]:
        """Kills ZooKeeper with SIGKILL, until start_zookeeper() or the block's end. Its data stays."""
        self.zookeeper_server.kill()
        self._zookeeper_frozen = False
        if self._network is not None:
            self._network.refuse(LINE_HOST, self.zookeeper_server.port)
        return _undone_by(self.start_zookeeper)

    def start_zookeeper(self) -> None:
        """Starts ZooKeeper on the same port and data, and kills it first if it runs."""
        self.zookeeper_server.restart()
        self._zookeeper_frozen = False
        if self._network is not None:
            self._network.accept(LINE_HOST, self.zookeeper_server.port)

    def repair(self) -> None:
        """Undoes every fault, and waits until all replicas are in sync. Does nothing if there is no fault."""
        faults = self._network is not None and self._network.heal_all()
        if self._zookeeper_frozen:
            faults = True
            self.thaw(ZOOKEEPER)
        if isinstance(self._zookeeper, EmbeddedZooKeeper) and self._zookeeper.pid is None:
            faults = True
            self.start_zookeeper()
        for broker in self.processes:
            if broker.frozen:
                faults = True
                broker.thaw()
        ended = [broker for broker in self.processes if not broker.running]
        for broker in ended:
            broker.stop()  # a process that ended by itself leaves its pipes
            broker.start(wait=False)
        for broker in ended:
            broker.wait_ready()
        if ended or faults:
            self.wait_in_sync()

    def wait_in_sync(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until each broker id has a master, and all its replicas are in sync. Raises Timeout."""
        wanted = {(one.broker_id, one.replica) for one in self.processes if not one.settings.get("learner")}
        deadline = time.monotonic() + timeout_s
        missing = wanted
        with self.admin() as admin:
            while missing:
                with contextlib.suppress(MetamqError):  # ZooKeeper or a broker may be about to come back
                    missing = wanted - {
                        (one.broker_id, one.replica)
                        for found in admin.replicas().values()
                        if any(one.role == "master" and one.address and not one.problem for one in found.replicas)
                        for one in found.replicas
                        if one.in_sync
                    }
                if missing and time.monotonic() > deadline:
                    raise Timeout(f"waiting for the replicas (broker id, replica) {sorted(missing)}", timeout_s)
                if missing:
                    time.sleep(POLL_S)

    def _cuttable(self) -> Network:
        if self._network is None:
            raise ConfigError(
                "this cluster has no network that can be cut",
                hint="Use cluster(network=True), cluster_fixture(network=True) or the fixture metamq_pair.",
            )
        return self._network

    def _check_zookeeper(self, party: str) -> None:
        if party != ZOOKEEPER:
            raise ConfigError(f"{party!r} is not a process of the cluster", hint='Give a broker or "zookeeper".')


def _name(party: Party) -> str:
    """Returns the name of a party in the network."""
    if isinstance(party, BrokerProcess):
        return f"broker {party.broker_id} replica {party.replica}"
    if party not in (CLIENTS, ZOOKEEPER):
        raise ConfigError(f"{party!r} is no party of the network", hint='Give a broker, "clients" or "zookeeper".')
    return party


def _undone_by(undo: Any) -> AbstractContextManager[object]:
    """Returns an object for a `with` block that undoes the fault at its end."""
    block = contextlib.ExitStack()
    block.callback(undo)
    return block


@contextlib.contextmanager
def cluster(
    *,
    brokers: int = 1,
    slaves: int = 0,
    network: bool = False,
    folder: Path | None = None,
    zookeeper: str | None = None,
    security: SecurityConfig = INSECURE,
    **settings: object,
) -> Iterator[Cluster]:
    """Runs a cluster for a `with` block.

    folder:    a new or empty folder, which keeps the data; by default the data is removed at the end.
    brokers:   the number of broker ids, each with one master.
    slaves:    the number of slaves of each broker id. The block begins when they are in sync.
    network:   True puts a network between all parties that cut() can cut. Needs Linux.
    zookeeper: the address of a running server, best with a chroot of its own: "host:port/chroot". By default the
               cluster starts a server.
    security:  the security settings of brokers and clients.
    settings:  the settings of metamq.broker.config.BrokerConfig, for all brokers.
    """
    if network and zookeeper is not None:
        raise ConfigError("network=True needs a ZooKeeper of the cluster's own", hint="Leave `zookeeper=` out.")
    with contextlib.ExitStack() as stack:
        place = folder or stack.enter_context(temporary_folder())
        place.mkdir(parents=True, exist_ok=True)
        if any((place / name).exists() for name in ("zookeeper", "broker-0")):
            raise ConfigError(f"the folder {place} has the data of a cluster", hint="Give each cluster a new folder.")
        server = zookeeper or stack.enter_context(EmbeddedZooKeeper(place / "zookeeper", security=security))
        running = Cluster(server, place, security, network=network)
        try:
            for _ in range(brokers):
                broker = running.add_broker(**settings)
                for _ in range(slaves):
                    running.add_slave(broker.broker_id)
            if slaves:
                running.wait_in_sync()
            yield running
        finally:
            running.close()
