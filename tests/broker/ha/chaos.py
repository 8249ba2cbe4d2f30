"""What befalls a broker id in the chaos tests: crashes, freezes, cuts of the network, promotions. Nothing of its load.

Faults overlap: some last for a while and end by themselves, so that a promotion may come while a link is cut and
ZooKeeper restarts. What Chaos wants to know it asks the brokers directly, past the network that it cuts.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from metamq.broker.roles.succession import NO_PROCESS
from metamq.errors import MetamqError
from metamq.security.config import SecurityConfig
from metamq.testing import BrokerProcess, Cluster
from metamq.testing.broker_process import INSECURE
from metamq.testing.network import Network, Way
from metamq.zk.server.embedded import EmbeddedZooKeeper
from tests import zygote
from tests.broker.ha.chaos_storage import NO_ROOM, SCRUB, TAKEN_BACK, WAITED, StorageFaults, temporary_disk
from tests.broker.ha.test_replication import LAG_MS, SESSION_MS, Group
from tests.ensemble import ALL_THERE, Servers
from tests.parts import statistics, wait_until


def party(number: int) -> str:
    """A replica, to the network."""
    return f"replica {number}"


def advertised(number: int) -> str:
    """The address of a replica's line."""
    return f"127.0.0.{10 + number}"


REPLICAS = 3
CLIENT = "client"
ZOOKEEPER = "zookeeper"
PROMOTION_S = 6.0
FAULT_S = (0.2, 2 * SESSION_MS / 1000)
"""From a moment to twice the session."""
PAUSE_S = (0.2, 1.2)
FAR_BEHIND_BYTES = 2000
"""So a reader that is a moment behind is sent to a slave."""
SLAVES_READ = "slaves read from"
ALONE = "master cut off from its slaves, gone with what they lack"
EXPIRED = "a replica's session expired"
CUT = "a log cut at the point of agreement"
BY_ITSELF = "a slave took over by itself"
AT_ONCE = "a slave took over at once from a killed master"
OF_DAMAGE = "a damaged master handed over"
SAID = {EXPIRED: re.compile("the session expired"), CUT: re.compile(r"replica \d, .*: it is cut from offset")}
"""So a broker's log says it, the master's for what is cut."""
SAID_IF_AUTO = {
    BY_ITSELF: re.compile(r"WARNING .* is the master instead of replica \d, after"),
    AT_ONCE: re.compile(rf"is the master instead of replica \d, after .*{NO_PROCESS}"),
}
SAID_BY_CHANCE = {OF_DAMAGE: re.compile(r"is the master instead of replica \d, after .* a log is damaged")}
LOST = "promoted, with a loss"
IN_CALM = "promoted, nothing else amiss"
ALIVE = "promoted amid faults, the master alive"
DEAD = "promoted, the master dead or frozen"
ASKED, ASKED_IN_CALM = "promotion asked for", "promotion asked for, nothing else amiss"
LEADS_TO = {
    ASKED: {ALIVE, NO_ROOM},
    ASKED_IN_CALM: {IN_CALM},
    ALONE: {CUT, DEAD},
    "cut off from ZooKeeper": {EXPIRED},
    "master killed": {AT_ONCE, BY_ITSELF, NO_ROOM},
    "master stopped": {NO_ROOM},
    TAKEN_BACK: {WAITED},
}
"""What comes of actions, by chance. A disk is full only while its replica is a slave: a change of master may help."""
OVERTIME_S = 240.0
"""For so long only that is done which has not happened yet, or may lead to it: there may be two slow cores."""

LINKS = {
    "replicas": [Way(party(a), party(b)) for a in range(REPLICAS) for b in range(a)],
    "a replica and ZooKeeper": [Way(party(number), ZOOKEEPER) for number in range(REPLICAS)],
    "a client and a replica": [Way(CLIENT, party(number)) for number in range(REPLICAS)],
    "a client and ZooKeeper": [Way(CLIENT, ZOOKEEPER)],
}
ALL_LINKS = [way for ways in LINKS.values() for way in ways]


class NetworkedGroup(Group):
    """A broker id whose replicas, ZooKeeper and clients are connected by lines that can be cut."""

    def __init__(
        self,
        zookeeper: EmbeddedZooKeeper | Servers,
        folder: Path,
        *,
        replicas: int = REPLICAS,
        with_disk: bool = False,
        made_by: type[BrokerProcess] = BrokerProcess,
        security: SecurityConfig = INSECURE,
        **settings: object,
    ) -> None:
        self.disk = temporary_disk(folder / f"replica-{replicas - 1}-disk") if with_disk else None
        """Of the last replica; None where none can be mounted."""
        self._last = replicas - 1
        self.network = Network(self.pids, CLIENT)
        self.ensemble = zookeeper if isinstance(zookeeper, Servers) else None
        servers = [zookeeper] if isinstance(zookeeper, EmbeddedZooKeeper) else list(zookeeper.by_number.values())
        own = zookeeper if isinstance(zookeeper, EmbeddedZooKeeper) else zookeeper.address
        self.cluster = Cluster(own, folder, security)
        self.replicas = []
        self.zookeeper = ",".join(self.network.line(ZOOKEEPER, "127.0.0.9", server.port) for server in servers)
        """For the clients under test: it can be cut. That of `cluster` cannot."""
        for _ in range(replicas):
            self._add(made_by, {"session_timeout_ms": SESSION_MS, "insync_lag_ms": LAG_MS, **SCRUB, **settings})

    def _add(self, made_by: type[BrokerProcess], settings: dict[str, object]) -> None:
        number = len(self.replicas)
        place = self.disk.folder if self.disk is not None and number == self._last else self.cluster.folder
        folder, advertise = place / f"replica-{number}", advertised(number)
        replica = made_by(self.zookeeper, folder, 0, replica=number, advertise=advertise, **settings)
        replica.security = self.cluster.security
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

    def end(self, number: int, how: Callable[[], object]) -> None:
        """Ends a process. Then its machine refuses connections."""
        how()
        self.network.refuse(advertised(number), self.replicas[number].port)

    def start_again(self, number: int) -> None:
        """Starts what was killed. Nothing that happens here is a reason for a broker to end by itself."""
        replica = self.replicas[number]
        assert party(number) not in self.pids(), f"{party(number)} ended: {replica.log_path.read_text()[-2000:]}"
        self.network.accept(advertised(number), replica.port)
        replica.start(wait=False)

    def close(self) -> None:
        """Ends all of it."""
        for replica in self.replicas:
            if replica.running:
                replica.thaw()
                replica.kill()
        self.network.close()
        if self.disk is not None:
            self.disk.close()


@contextlib.contextmanager
def networked_group(
    folder: Path, *, with_ensemble: bool = False, security: SecurityConfig = INSECURE, **settings: Any
) -> Iterator[NetworkedGroup]:
    """Replicas, started. `settings` as NetworkedGroup takes them."""
    with ExitStack() as stack:
        zookeeper: EmbeddedZooKeeper | Servers
        if with_ensemble:
            zookeeper = Servers(folder, stack)
        else:
            zookeeper = stack.enter_context(EmbeddedZooKeeper(folder / "zookeeper", security=security))
        group = NetworkedGroup(zookeeper, folder, security=security, **settings)
        try:
            yield group
        finally:
            group.close()


class Chaos:
    """Does something bad, again and again, and makes good what must be for the cluster to go on."""

    def __init__(self, group: NetworkedGroup, seed: int, *, is_auto: bool = False) -> None:
        """`is_auto`: chaos promotes only after ZooKeeper was taken back, which an operator does."""
        self.group = group
        self._is_auto = is_auto
        self._said = {**SAID, **SAID_IF_AUTO} if is_auto else SAID
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        """What came of it."""
        self.frozen: set[int] = set()
        self.storage = StorageFaults(self)
        self._accept_loss = False
        self._passing: dict[str, tuple[float, Callable[[], None]]] = {}
        """What ends by itself: when, and how."""
        self._slaves_sent: dict[tuple[int, int, int], int] = {}
        """By replica, process and the epoch that it follows, the bytes that it had sent to readers before."""

    def _actions(self) -> dict[str, Callable[[], None]]:
        """By what they leave in `done`."""
        cuts = {
            f"cut {name}, {kind}": partial(cut, f"cut {name}, {kind}", ways)
            for kind, ways in LINKS.items()
            for name, cut in (("both ways", self.cut_both_ways), ("one way", self.cut_one_way))
        }
        asked = {ASKED: self.hand_over, ASKED_IN_CALM: self.hand_over_in_calm}
        return {
            "master killed": self.kill_master,
            "slave killed": self.kill_slave,
            "all killed": self.kill_all,
            **({"master stopped": self.stop_master} if self._is_auto else asked),
            **({"clock jumped": self.jump_clock} if BrokerProcess.popen is zygote.popen else {}),
            "frozen": self.freeze_any,
            "master frozen": self.freeze_master,
            "connections broken": self.break_,
            "slow link": self.slow_down,
            "cut off from ZooKeeper": self.cut_off_zookeeper,
            "master cut off": self.cut_off_master,
            ALONE: self.leave_alone,
            **(self._zookeeper_actions() if self.group.ensemble is None else self._ensemble_actions()),
            **cuts,
            **({LOST: self.lose} if self._accept_loss else self.storage.actions()),
        }

    def _zookeeper_actions(self) -> dict[str, Callable[[], None]]:
        return {"ZooKeeper frozen": self.freeze_zookeeper, "ZooKeeper restarted": self.restart_zookeeper}

    def _ensemble_actions(self) -> dict[str, Callable[[], None]]:
        return {
            f"ZooKeeper's {mode} {what}": partial(self.disturb_ensemble, mode, what)
            for mode in ("leader", "follower")
            for what in ("killed", "frozen")
        }

    @property
    def missing(self) -> set[str]:
        """What happens in a run that is long enough, and has not happened yet."""
        kinds = {*self._actions(), *self._said}
        kinds |= (
            set() if self._is_auto else {SLAVES_READ, IN_CALM, ALIVE, DEAD}
        )  # a failover is over before they are read
        kinds |= set() if self._accept_loss or self.group.ensemble is not None else {WAITED}
        return kinds - (+self.done).keys() - (+self.seen).keys()

    def run(
        self, duration_s: float, *, accept_loss: bool = False, is_enough: Callable[[], object] = lambda: True
    ) -> None:
        """For so long, and until that is enough, within reason; what lasts is ended."""
        until = time.monotonic() + duration_s
        self._accept_loss = accept_loss
        due: list[Callable[[], None]] = []
        in_vain = 0
        """How many of what is due were tried since something was done last."""
        while time.monotonic() < until or not (is_enough() or time.monotonic() > until + OVERTIME_S):
            if in_vain >= len(due):  # all of them, in any order: none is left out for long
                in_vain = 0
                due = self._actions_for(self.missing if time.monotonic() > until else set())
                self.random.shuffle(due)
            time.sleep(self.random.uniform(*PAUSE_S))
            action, before = due.pop(), self.done.total()
            action()
            if self.done.total() == before:  # there was no master, or whatever it takes
                due.insert(0, action)
                in_vain += 1
            else:
                in_vain = 0
            self.mend()
        self.end_all()
        self._accept_loss = False

    def _actions_for(self, wanted: set[str]) -> list[Callable[[], None]]:
        """Those that may lead to what is wanted; all of them, when that is nothing or anything leads there."""
        actions = self._actions()
        some = [do for name, do in actions.items() if {name, *LEADS_TO.get(name, ())} & wanted]
        return some or list(actions.values())

    def _did(self, what: str) -> None:
        self.done[what] += 1

    # -- processes ----------------------------------------------------------------------------------------------------

    def _kill(self, number: int) -> None:
        self.group.end(number, self.group.replicas[number].kill)
        self.frozen.discard(number)

    def kill_master(self) -> None:
        number = self.master()
        if number is not None:
            self._did("master killed")
            self._kill(number)

    def stop_master(self) -> None:
        """In good order: it hands over first."""
        number = self.master()
        if number is not None:
            self._did("master stopped")
            self.group.end(number, self.group.replicas[number].stop)

    def kill_slave(self) -> None:
        master = self.master()
        running = [n for n in range(REPLICAS) if n != master and self.group.replicas[n].running]
        if running:
            self._did("slave killed")
            self._kill(self.random.choice(running))

    def jump_clock(self) -> None:
        """The wall clock of one replica, by an hour."""
        responsive = self._responsive()
        if responsive:
            self._did("clock jumped")
            pid = self.group.replicas[self.random.choice(responsive)].pid
            os.kill(pid, self.random.choice(list(zygote.CLOCK_JUMPS_S)))

    def kill_all(self) -> None:
        """One shortly after the other; they come back in any order."""
        self._did("all killed")
        for number in self.random.sample(range(REPLICAS), REPLICAS):
            if self.group.replicas[number].running:
                self._kill(number)
                time.sleep(self.random.uniform(0, 0.5))

    def freeze_any(self) -> None:
        responsive = self._responsive()
        if responsive:
            self._did("frozen")
            self._freeze(self.random.choice(responsive))

    def freeze_master(self) -> None:
        number = self.master()
        if number is not None:
            self._did("master frozen")
            self._freeze(number)

    def _freeze(self, number: int) -> None:
        self.group.replicas[number].freeze()
        self.frozen.add(number)

    def _thaw(self, number: int) -> None:
        self.group.replicas[number].thaw()
        self.frozen.discard(number)

    def _responsive(self) -> list[int]:
        return [n for n in range(REPLICAS) if self.group.replicas[n].running and n not in self.frozen]

    # -- the network --------------------------------------------------------------------------------------------------

    def for_a_while(self, key: str, end: Callable[[], None]) -> None:
        self._passing[key] = time.monotonic() + self.random.uniform(*FAULT_S), end

    def _cut(self, what: str, *ways: Way) -> None:
        self._did(what)
        self.group.network.cut(*ways)
        broken = self.random.random() < 0.5
        for way in ways:
            self.for_a_while(str(way), lambda way=way: self.group.network.heal(way, broken=broken))  # type: ignore[misc]

    def cut_both_ways(self, what: str, ways: Sequence[Way]) -> None:
        way = self.random.choice(ways)
        self._cut(what, way, way.back)

    def cut_one_way(self, what: str, ways: Sequence[Way]) -> None:
        way = self.random.choice(ways)
        self._cut(what, self.random.choice([way, way.back]))

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
        self.group.network.break_(self.random.choice(ALL_LINKS))

    def slow_down(self) -> None:
        self._did("slow link")
        way = self.random.choice(ALL_LINKS)
        self.group.network.slow_down(self.random.uniform(0.01, 0.3), way, way.back)
        self.for_a_while(f"slow {way}", lambda: self.group.network.heal(way, way.back))

    # -- ZooKeeper ----------------------------------------------------------------------------------------------------

    def freeze_zookeeper(self) -> None:
        self._did("ZooKeeper frozen")
        zookeeper = self.group.cluster.zookeeper_server
        zookeeper.freeze()
        self.for_a_while("ZooKeeper", zookeeper.thaw)

    def restart_zookeeper(self) -> None:
        self._did("ZooKeeper restarted")
        self._passing.pop("ZooKeeper", None)
        self.group.cluster.zookeeper_server.restart()

    def disturb_ensemble(self, mode: str, what: str) -> None:
        """One server at a time."""
        servers = self.group.ensemble
        assert servers is not None
        modes = servers.modes()
        if "ZooKeeper" in self._passing or sorted(modes.values()) != ALL_THERE:
            return
        server = servers.by_number[next(number for number, found in modes.items() if found == mode)]
        self._did(f"ZooKeeper's {mode} {what}")
        if what == "killed":
            server.kill()
            self.for_a_while("ZooKeeper", server.restart)
        else:
            server.freeze()
            self.for_a_while("ZooKeeper", server.thaw)

    # -- making good --------------------------------------------------------------------------------------------------

    def master(self) -> int | None:
        """Who says that it is, under the highest epoch."""
        found: list[tuple[int, int]] = []
        for number in self._responsive():
            with contextlib.suppress(MetamqError):
                said = statistics(self.group.replicas[number])
                if said["replication"]["role"] == "master":
                    found.append((said["epoch"], number))
                elif said["replication"]["role"] == "slave":
                    term = number, self.group.replicas[number].pid, said["replication"]["epoch"]
                    sent = said["counters"]["bytes_out"]
                    self.seen[SLAVES_READ] += sent > self._slaves_sent.get(term, sent)
                    self._slaves_sent[term] = sent
        return max(found)[1] if found else None

    def hand_over(self) -> None:
        """In the middle of whatever goes on."""
        self._did(ASKED)
        self.promote_any()

    def hand_over_in_calm(self) -> None:
        """Once there is somebody to hand over to."""
        self._did(ASKED_IN_CALM)
        if self._calm_down() is not None:
            self.promote_any(IN_CALM)

    def _calm_down(self) -> int | None:
        """Ends what lasts; returns the master, if there is one soon, with a slave in sync."""
        self.end_all()
        master = self.master()
        if master is None:
            return None
        with contextlib.suppress(AssertionError, MetamqError, KeyError):
            wait_until(lambda: len(self.group.replication(master)["insync"]) > 1, 5 * LAG_MS / 1000)
            return master
        return None

    def leave_alone(self) -> None:
        """The master takes what its slaves do not get, and dies or hangs; one of them is promoted, and it comes back.

        Who acknowledges early, or cuts in the wrong place, does harm here. By chance it hardly ever comes to this: a
        slave is a moment behind, and leaves the in-sync set when it is more.
        """
        master = self._calm_down()
        if master is None:
            return
        ways = [Way(party(master), party(number)) for number in range(REPLICAS) if number != master]
        ways += [way.back for way in ways] if self.random.random() < 0.5 else []
        self.group.network.cut(*ways)
        with contextlib.suppress(AssertionError, MetamqError):
            ends = self.group.ends(master)
            wait_until(lambda: self.group.ends(master) != ends, LAG_MS / 1000)
            self._did(ALONE)
            end = self.random.choice([self._kill, self._freeze])
            end(master)
        self.group.network.heal(*ways, broken=self.random.random() < 0.5)
        if not self._is_auto:
            self.promote_any()

    def promote_any(self, what: str = "") -> None:
        """Asks the replicas one after the other; who is not in sync refuses, unless loss is accepted."""
        master = self.master()
        for number in self.random.sample(self._responsive(), len(self._responsive())):
            if number != master:
                with contextlib.suppress(MetamqError):
                    self.group.promote_once(number, accept_loss=self._accept_loss, timeout_s=PROMOTION_S)
                    self._did(what or (DEAD if master is None else ALIVE))
                    return

    def lose(self) -> None:
        """A slave is cut off until it has left the set, and the master has more; then it is promoted all the same."""
        self.end_all()
        master = self.master()
        slaves = [number for number in self._responsive() if number != master]
        if master is None or not slaves:
            return
        slave = self.random.choice(slaves)
        with contextlib.suppress(AssertionError, MetamqError, KeyError):
            generation = self.group.state().generation
            link = Way(party(slave), party(master))
            self.group.network.cut(link, link.back)
            wait_until(lambda: slave not in self.group.replication(master)["insync"], 5 * LAG_MS / 1000)
            stable = sum(self.group.stable(master).values())
            wait_until(lambda: sum(self.group.stable(master).values()) > stable, SESSION_MS / 1000)
            if self.random.random() < 0.5:
                self._kill(master)
            self.group.promote_once(slave, accept_loss=True, timeout_s=PROMOTION_S)
            if self.group.state().generation > generation:
                self._did(LOST)
        self.end_all()

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
        self.repair()
        for number in range(REPLICAS):
            if not self.group.replicas[number].running and self.random.random() < 0.6:
                self.group.start_again(number)
        logs = [replica.log_path.read_text() for replica in self.group.replicas]
        for what, said in (self._said | SAID_BY_CHANCE).items():
            self.seen[what] = sum(len(said.findall(log)) for log in logs)

    def repair(self) -> None:
        """What a person would do: promotes another one than a damaged master; by the plan, if ZooKeeper went back."""
        master = self.master()
        with contextlib.suppress(MetamqError):
            if master is None:
                wants_another = not self.storage.decide() and not self._is_auto and self.random.random() < 0.5
            else:
                wants_another = not self._is_auto and statistics(self.group.replicas[master])["damaged_count"] > 0
            if wants_another:
                self.promote_any()

    def end_all(self) -> None:
        for _, end in self._passing.values():
            end()
        self._passing.clear()
        self.group.network.heal(*ALL_LINKS, *(way.back for way in ALL_LINKS))
        for number in list(self.frozen):
            self._thaw(number)

    def healed(self, limit_s: float = 120) -> None:
        """Waits until every replica is in sync and linked, and does what a person would have to do."""

        def all_in_sync() -> bool:
            for number in range(REPLICAS):
                if not self.group.replicas[number].running:
                    self.group.start_again(number)
            self.repair()
            master = self.master()
            if master is None or not self.storage.is_mended:
                return False
            with contextlib.suppress(MetamqError):
                linked = [self.group.replication(n).get("link") == "transfer" for n in range(REPLICAS) if n != master]
                insync = self.group.replication(master).get("insync")
                return all(linked) and insync == list(range(REPLICAS)) and self.storage.is_decided
            return False

        try:
            wait_until(all_in_sync, limit_s=limit_s, what="all replicas in sync")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._shown()}") from None

    def _shown(self) -> str:
        """The state of each replica, and the end of its log."""
        mended = self.storage.is_mended, self.storage.is_decided
        lines = [f"master {self.master()}; is mended, is decided: {mended}"]
        for number, replica in enumerate(self.group.replicas):
            try:
                found: object = self.group.replication(number)
            except MetamqError as error:
                found = error
            log = "\n    ".join(replica.log_path.read_text().splitlines()[-20:])
            lines.append(f"replica {number}, running: {replica.running}: {found}\n    {log}")
        return "\n".join(lines)
