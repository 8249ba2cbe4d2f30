"""What befalls a broker id in the chaos tests: crashes, freezes, cuts of the network, promotions. Nothing of its load.

Faults overlap: some last for a while and end by themselves, so that a promotion may come while a link is cut and
ZooKeeper restarts. What Chaos wants to know it asks the brokers directly, past the network that it cuts.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from metamq.errors import MetamqError
from metamq.testing import BrokerProcess, Cluster
from metamq.zk.embedded import EmbeddedZooKeeper
from tests.broker.ha.test_replication import LAG_MS, SESSION_MS, Group
from tests.network import Network, Way
from tests.parts import statistics, wait_until

REPLICAS = 3
CLIENT = "client"
ZOOKEEPER = "zookeeper"
PROMOTION_S = 6.0
FAULT_S = (0.2, 2 * SESSION_MS / 1000)
"""From a moment to twice the session."""
PAUSE_S = (0.2, 1.2)


class NetworkedGroup(Group):
    """A broker id whose replicas, ZooKeeper and clients are connected by lines that can be cut."""

    def __init__(
        self,
        zookeeper: EmbeddedZooKeeper,
        folder: Path,
        *,
        replicas: int = REPLICAS,
        made_by: type[BrokerProcess] = BrokerProcess,
        **settings: object,
    ) -> None:
        self.network = Network(self.pids, CLIENT)
        self.cluster = Cluster(zookeeper, folder)
        self.replicas = []
        self.zookeeper = self.network.line(ZOOKEEPER, "127.0.0.9", zookeeper.port)
        """For the clients under test: it can be cut. That of `cluster` cannot."""
        for _ in range(replicas):
            self._add(made_by, {"session_timeout_ms": SESSION_MS, "insync_lag_ms": LAG_MS, **settings})

    def _add(self, made_by: type[BrokerProcess], settings: dict[str, object]) -> None:
        number = len(self.replicas)
        folder, advertise = self.cluster.folder / f"replica-{number}", f"127.0.0.{10 + number}"
        replica = made_by(self.zookeeper, folder, 0, replica=number, advertise=advertise, **settings)
        self.replicas.append(replica)
        self.cluster.brokers.append(replica)
        replica.start()
        self.network.line(party(number), advertise, replica.port)

    def pids(self) -> dict[str, int]:
        """The process of each replica that has one."""
        found = {}
        for number, replica in enumerate(self.replicas):
            with contextlib.suppress(AssertionError):
                found[party(number)] = replica.pid
        return found

    def start_again(self, number: int) -> None:
        """Starts what was killed. Nothing that happens here is a reason for a broker to end by itself."""
        replica = self.replicas[number]
        assert party(number) not in self.pids(), f"{party(number)} ended: {replica.log_path.read_text()[-2000:]}"
        replica.start(wait=False)

    def close(self) -> None:
        """Ends all of it."""
        for replica in self.replicas:
            if replica.running:
                replica.thaw()
                replica.kill()
        self.network.close()


def party(number: int) -> str:
    """A replica, to the network."""
    return f"replica {number}"


@contextlib.contextmanager
def networked_group(folder: Path, **settings: Any) -> Iterator[NetworkedGroup]:
    """Replicas, started. `settings` as NetworkedGroup takes them."""
    with EmbeddedZooKeeper(folder / "zookeeper") as zookeeper:
        group = NetworkedGroup(zookeeper, folder, **settings)
        try:
            yield group
        finally:
            group.close()


class Chaos:
    """Does something bad, again and again, and makes good what must be for the cluster to go on."""

    def __init__(self, group: NetworkedGroup, seed: int, *, accept_loss: bool = False) -> None:
        self.group = group
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.frozen: set[int] = set()
        self._accept_loss = accept_loss
        self._passing: dict[str, tuple[float, Callable[[], None]]] = {}
        """What ends by itself: when, and how."""
        self._links = [Way(party(a), party(b)) for a in range(REPLICAS) for b in range(a)]
        self._links += [Way(party(number), ZOOKEEPER) for number in range(REPLICAS)]
        self._links += [Way(CLIENT, party(number)) for number in range(REPLICAS)] + [Way(CLIENT, ZOOKEEPER)]

    def run(self, until: float) -> None:
        """Until then; what lasts is ended."""
        actions = [
            self.kill_master, self.kill_slave, self.hand_over, self.freeze_any, self.freeze_master,
            self.cut_both_ways, self.cut_one_way, self.break_, self.slow_down, self.cut_off_zookeeper,
            self.cut_off_master, self.freeze_zookeeper, self.restart_zookeeper,
        ]  # fmt: skip
        while time.monotonic() < until:
            time.sleep(self.random.uniform(*PAUSE_S))
            self.random.choice(actions)()
            self.mend()
        self.end_all()

    def _did(self, what: str) -> None:
        self.done[what] += 1

    # -- processes ----------------------------------------------------------------------------------------------------

    def _kill(self, number: int) -> None:
        self.group.replicas[number].kill()
        self.frozen.discard(number)

    def kill_master(self) -> None:
        number = self.master()
        if number is not None:
            self._did("master killed")
            self._kill(number)

    def kill_slave(self) -> None:
        master = self.master()
        running = [n for n in range(REPLICAS) if n != master and self.group.replicas[n].running]
        if running:
            self._did("slave killed")
            self._kill(self.random.choice(running))

    def freeze_any(self) -> None:
        responsive = self._responsive()
        if responsive:
            self._freeze(self.random.choice(responsive))

    def freeze_master(self) -> None:
        number = self.master()
        if number is not None:
            self._freeze(number)

    def _freeze(self, number: int) -> None:
        self._did("frozen")
        self.group.replicas[number].freeze()
        self.frozen.add(number)

    def _thaw(self, number: int) -> None:
        self.group.replicas[number].thaw()
        self.frozen.discard(number)

    def _responsive(self) -> list[int]:
        return [n for n in range(REPLICAS) if self.group.replicas[n].running and n not in self.frozen]

    # -- the network --------------------------------------------------------------------------------------------------

    def _for_a_while(self, key: str, end: Callable[[], None]) -> None:
        self._passing[key] = time.monotonic() + self.random.uniform(*FAULT_S), end

    def _cut(self, what: str, *ways: Way) -> None:
        self._did(what)
        self.group.network.cut(*ways)
        broken = self.random.random() < 0.5
        for way in ways:
            self._for_a_while(str(way), lambda way=way: self.group.network.heal(way, broken=broken))  # type: ignore[misc]

    def cut_both_ways(self) -> None:
        way = self.random.choice(self._links)
        self._cut("cut both ways", way, way.back)

    def cut_one_way(self) -> None:
        way = self.random.choice(self._links)
        self._cut("cut one way", self.random.choice([way, way.back]))

    def cut_off_zookeeper(self) -> None:
        """A whole party, a client too: longer than its session, or not."""
        way = Way(self.random.choice([*map(party, range(REPLICAS)), CLIENT]), ZOOKEEPER)
        self._cut("cut off from ZooKeeper", *self.random.choice([(way,), (way.back,), (way, way.back)]))

    def cut_off_master(self) -> None:
        """From its slaves, or from everybody but the clients."""
        number = self.master()
        if number is not None:
            others = [party(n) for n in range(REPLICAS) if n != number]
            if self.random.random() < 0.5:
                others.append(ZOOKEEPER)
            ways = [Way(party(number), other) for other in others]
            self._cut("master cut off", *ways, *(way.back for way in ways))

    def break_(self) -> None:
        self._did("connections broken")
        self.group.network.break_(self.random.choice(self._links))

    def slow_down(self) -> None:
        self._did("slow link")
        way = self.random.choice(self._links)
        self.group.network.slow_down(self.random.uniform(0.01, 0.3), way, way.back)
        self._for_a_while(f"slow {way}", lambda: self.group.network.heal(way, way.back))

    # -- ZooKeeper ----------------------------------------------------------------------------------------------------

    def freeze_zookeeper(self) -> None:
        self._did("ZooKeeper frozen")
        zookeeper = self.group.cluster.zookeeper_server
        zookeeper.freeze()
        self._for_a_while("ZooKeeper", zookeeper.thaw)

    def restart_zookeeper(self) -> None:
        self._did("ZooKeeper restarted")
        self._passing.pop("ZooKeeper", None)
        self.group.cluster.zookeeper_server.restart()

    # -- making good --------------------------------------------------------------------------------------------------

    def master(self) -> int | None:
        """Who says that it is, under the highest epoch."""
        found: list[tuple[int, int]] = []
        for number in self._responsive():
            with contextlib.suppress(MetamqError):
                said = statistics(self.group.replicas[number])
                if said["replication"]["role"] == "master":
                    found.append((said["epoch"], number))
        return max(found)[1] if found else None

    def hand_over(self) -> None:
        self._did("promotion asked for")
        self.promote_any()

    def promote_any(self) -> None:
        """Asks the replicas one after the other; who is not in sync refuses, unless loss is accepted."""
        master = self.master()
        for number in self.random.sample(self._responsive(), len(self._responsive())):
            if number != master:
                with contextlib.suppress(MetamqError):
                    self.group.promote(number, accept_loss=self._accept_loss, timeout_s=PROMOTION_S)
                    self._did("promoted")
                    return

    def mend(self) -> None:
        """Ends what has lasted long enough, brings back what is down, and sees to it that there is a master at last."""
        now = time.monotonic()
        for key, (at, end) in list(self._passing.items()):
            if at <= now:
                del self._passing[key]
                end()
        for number in list(self.frozen):
            if self.random.random() < 0.3:
                self._thaw(number)
        if self.master() is None and self.random.random() < 0.5:
            self.promote_any()
        for number in range(REPLICAS):
            if not self.group.replicas[number].running and self.random.random() < 0.6:
                self.group.start_again(number)

    def end_all(self) -> None:
        for _, end in self._passing.values():
            end()
        self._passing.clear()
        self.group.network.heal(*self._links, *(way.back for way in self._links))
        for number in list(self.frozen):
            self._thaw(number)

    def healed(self) -> None:
        """Waits until every replica is in sync again, and does what a person would have to do."""

        def all_in_sync() -> bool:
            for number in range(REPLICAS):
                if not self.group.replicas[number].running:
                    self.group.start_again(number)
            master = self.master()
            if master is None:
                self.promote_any()
                return False
            with contextlib.suppress(MetamqError):
                return self.group.replication(master).get("insync") == list(range(REPLICAS))
            return False

        wait_until(all_in_sync, limit_s=60, what="all replicas in sync")
