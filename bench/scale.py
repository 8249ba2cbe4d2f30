"""A large cluster as ZooKeeper sees it: brokers, topics and groups without data, see bench/scale_crowd.py.

The sessions, nodes, watches and writes are those of real brokers and consumers. Each event is measured until all of
them have followed it. Two figures in seconds of a processor belong to each event: that of ZooKeeper, and that of the
simulated processes together, of which a part is used by their event loops; kazoo's threads use the rest.

    a topic        from its creation until every replica offers it
    a member       from the start of its session until the group is settled: one plan, and all partitions owned
    a kill         from the end of the killed member's session, about its time-out after the kill, until the same
    a promotion    from the request until all members know the master, and both replicas have renewed their offers
    commits        each member commits each of its partitions again and again
    a restart      from the kill of ZooKeeper until it has answered in every session and all groups are settled
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import scale_crowd
from scale_crowd import GroupView

from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.server.embedded import EmbeddedZooKeeper

LIMIT_S = 900.0
LOOK_S = 0.1
MEMORY_BYTES = 2 << 30
SESSION_MS_DEFAULT = 10_000
"""The time-out of a session of a broker or a consumer, unless it is set."""
_FIGURES = {
    "nodes": (b"mntr", r"^zk_znode_count\s+(\d{1,15})$"),
    "ephemeral_nodes": (b"mntr", r"^zk_ephemerals_count\s+(\d{1,15})$"),
    "watches": (b"mntr", r"^zk_watch_count\s+(\d{1,15})$"),
    "data_bytes": (b"mntr", r"^zk_approximate_data_size\s+(\d{1,18})$"),
    "sessions": (b"mntr", r"^zk_num_alive_connections\s+(\d{1,15})$"),
    "heap_free_mb": (b"envi", r"^os\.memory\.free=(\d{1,9})MB$"),
    "heap_mb": (b"envi", r"^os\.memory\.total=(\d{1,9})MB$"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a simulation. Each topic has the same number of partitions on each broker id.

    `partitions` is the number of all topics together. Each group reads topics of its own. `processes`: those that the
    simulated members share. `session_ms` is the time-out of each session.
    """

    brokers: int = 100
    replicas: int = 2
    topics: int = 50
    partitions: int = 100_000
    groups: int = 10
    consumers: int = 500
    processes: int = 4
    session_ms: int = 30_000
    commit_s: float = 20.0

    def configs(self) -> list[TopicConfig]:
        """Returns the topics."""
        each = max(self.partitions // (self.topics * self.brokers), 1)
        return [
            TopicConfig(f"simulated-topic-{n:04}", dict.fromkeys(range(self.brokers), each)) for n in range(self.topics)
        ]

    def group_of(self, number: int) -> str:
        """Returns the group of a member by its number, or of a topic."""
        return f"simulated-group-{number % self.groups:04}"


class MeasuredZooKeeper(EmbeddedZooKeeper):
    """A ZooKeeper that reports its figures, and takes any number of sessions from one address."""

    def _config(self, folder: Path) -> str:
        return f"{super()._config(folder)}4lw.commands.whitelist=conf,envi,srvr,mntr\nmaxClientCnxns=0\n"

    def figures(self) -> dict[str, float]:
        """Returns its nodes, watches and memory. The heap includes garbage."""
        answers = {word: self._asked(word) for word in (b"mntr", b"envi")}
        found: dict[str, float] = {}
        for name, (word, pattern) in _FIGURES.items():
            match = re.search(pattern, answers[word], re.MULTILINE)
            found[name] = int(match[1]) if match else 0
        found["heap_used_mb"] = found.pop("heap_mb") - found.pop("heap_free_mb")
        return found | {"memory_mb": psutil.Process(self.pid).memory_info().rss / 1e6}

    def cpu_s(self) -> float:
        """Returns the processor seconds of this process of the server."""
        used = psutil.Process(self.pid).cpu_times()
        return float(used.user + used.system)

    def _asked(self, word: bytes) -> str:
        with socket.create_connection((self.host, self.port), LIMIT_S) as connection:
            connection.sendall(word)
            return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode("ascii", "replace")


class CrowdProcess:
    """A process with simulated brokers or members. It ends with this one."""

    def __init__(self, address: str, session_ms: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=scale_crowd.serve, args=(theirs, address, session_ms), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, command: str, *arguments: object) -> None:
        """Sends a command; `answer` waits for its end."""
        self._pipe.send((command, arguments))

    def answer(self) -> Any:
        """Returns the answer. Raises RuntimeError."""
        if not self._pipe.poll(LIMIT_S):
            raise RuntimeError(f"no answer of a simulated process in {LIMIT_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def ask(self, command: str, *arguments: object) -> Any:
        """Sends a command, and returns its answer."""
        self.begin(command, *arguments)
        return self.answer()

    def kill(self) -> None:
        """Kills it, with SIGKILL."""
        self.process.kill()
        self.process.join()


class Simulation:
    """The processes of a simulated cluster, and its events in order."""

    def __init__(self, sizes: Sizes, zookeeper: MeasuredZooKeeper, say: Callable[[str], None]) -> None:
        self._sizes = sizes
        self._zookeeper = zookeeper
        self._say = say
        self._brokers = CrowdProcess(zookeeper.address, sizes.session_ms)
        self._crowds = [CrowdProcess(zookeeper.address, sizes.session_ms) for _ in range(sizes.processes)]
        self._joining = CrowdProcess(zookeeper.address, sizes.session_ms)
        self._configs = sizes.configs()
        self._members = dict.fromkeys(map(sizes.group_of, range(sizes.groups)), 0)
        self._spent_s = 0.0
        self._killed: set[CrowdProcess] = set()
        self.found: dict[str, dict[str, float]] = {}

    def close(self) -> None:
        """Ends all processes."""
        for one in self._processes:
            one.kill()

    @property
    def _processes(self) -> list[CrowdProcess]:
        return [one for one in (self._brokers, *self._crowds, self._joining) if one not in self._killed]

    def _ask_all(self, command: str, *arguments: object) -> list[Any]:
        processes = self._processes
        for one in processes:
            one.begin(command, *arguments)
        return [one.answer() for one in processes]

    @contextmanager
    def _measured(self, event: str) -> Iterator[dict[str, float]]:
        used, server, began = self._used(), self._spent_s + self._zookeeper.cpu_s(), time.perf_counter()
        found: dict[str, float] = {}
        yield found
        found["s"] = time.perf_counter() - began
        after = self._used()
        found["zookeeper_cpu_s"] = self._spent_s + self._zookeeper.cpu_s() - server
        found["processes_cpu_s"], found["loops_cpu_s"] = after[0] - used[0], after[1] - used[1]
        self.found[event] = found
        self._say(f"{event}: " + ", ".join(f"{name} {figure:,.2f}" for name, figure in found.items()))

    def _used(self) -> tuple[float, float]:
        both = self._ask_all("processor")
        return sum(one[0] for one in both), sum(one[1] for one in both)

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not after {LIMIT_S:g} s")
            time.sleep(LOOK_S)

    def _groups(self) -> dict[str, GroupView]:
        found = dict.fromkeys(self._members, GroupView())
        for views in self._ask_all("groups"):
            found |= {group: found[group].with_(view) for group, view in views.items()}
        return found

    def _is_settled(self) -> bool:
        views = self._groups()
        partitions = dict.fromkeys(self._members, 0)
        for number, config in enumerate(self._configs):
            partitions[self._sizes.group_of(number)] += len(config.partition_names)
        return all(
            view.is_settled and len(view.generations) == 1
            and (view.members, view.held) == (self._members[group], partitions[group])
            for group, view in views.items()
        )  # fmt: skip

    # The events

    def brokers(self) -> None:
        """Starts all brokers."""
        with self._measured("brokers"):
            self._brokers.ask("add_brokers", range(self._sizes.brokers), self._sizes.replicas)

    def topics(self) -> None:
        """Makes all topics, the last one alone."""
        *first, last = self._configs
        for event, configs in (("topics", first), ("topic", [last])):
            with self._measured(event):
                self._brokers.ask("create", configs)
                self._until("all offer the topics", partial(self._are_offered, [one.topic for one in configs]))

    def _are_offered(self, topics: list[str]) -> bool:
        offers: int = self._brokers.ask("offering", topics)
        return offers == self._sizes.brokers * self._sizes.replicas * len(topics)

    def members(self) -> None:
        """Starts all members."""
        with self._measured("members"):
            for number, crowd in enumerate(self._crowds):
                crowd.begin("add_members", [self._new() for _ in self._share(number)])
            for crowd in self._crowds:
                crowd.answer()
            self._until("all groups are settled", self._is_settled)

    def _share(self, number: int) -> range:
        return range(number, self._sizes.consumers, self._sizes.processes)

    def _new(self) -> tuple[str, str, list[str]]:
        number = sum(self._members.values())
        group = self._sizes.group_of(number)
        self._members[group] += 1
        topics = [c.topic for n, c in enumerate(self._configs) if self._sizes.group_of(n) == group]
        return group, f"simulated-member-{number:05}", topics

    def join(self) -> None:
        """Adds a member, in a process of its own."""
        with self._measured("join"):
            self._joining.ask("add_members", [self._new()])
            self._until("the group is settled", self._is_settled)

    def kill(self) -> None:
        """Kills the member that has joined."""
        group = self._sizes.group_of(sum(self._members.values()) - 1)
        self._killed.add(self._joining)
        with self._measured("kill") as found:
            self._joining.kill()
            self._members[group] -= 1
            self._until("the group is settled", self._is_settled)
        found["after_session_s"] = found["s"] - self._sizes.session_ms / 1000

    def promotion(self) -> None:
        """Promotes a slave."""
        with self._measured("promotion"):
            self._brokers.ask("promote", 0)
            members = sum(self._members.values())
            self._until("all know the master", lambda: sum(self._ask_all("seeing", 0, 1)) == members)
            self._brokers.ask("offers_made")

    def commits(self) -> None:
        """Commits as fast as members do with an interval of a second."""
        seconds = self._sizes.commit_s
        with self._measured("commits") as found:
            found["commits"] = sum(self._ask_all("commit_for", seconds, 1.0))
        found["per_s"] = found["commits"] / found["s"]

    def idle(self) -> None:
        """Does nothing: the sessions and the leases are renewed."""
        with self._measured("idle"):
            time.sleep(self._sizes.commit_s)

    def constants(self, sessions: float) -> dict[str, float]:
        """Returns the figures from which `metamq plan` computes. `sessions` is their present number."""
        idle, commits = self.found["idle"], self.found["commits"]
        beats = self._sizes.session_ms / SESSION_MS_DEFAULT
        return {
            "commit_us": commits["zookeeper_cpu_s"] / commits["commits"] * 1e6,
            "session_us": idle["zookeeper_cpu_s"] / idle["s"] / sessions * beats * 1e6,
        }

    def restart(self) -> None:
        """Kills ZooKeeper, and starts it again."""
        with self._measured("restart") as found:
            began = time.perf_counter()
            self._spent_s += self._zookeeper.cpu_s()
            self._zookeeper.restart()
            found["serves_s"] = time.perf_counter() - began
            self._ask_all("answered")
            found["answered_s"] = time.perf_counter() - began
            self._until("all groups are settled", self._is_settled)


def measure(sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs every event once, and returns its figures and those of ZooKeeper."""
    say(f"simulating {asdict(sizes)}")
    with MeasuredZooKeeper(memory_bytes=MEMORY_BYTES) as zookeeper, ExitStack() as at_end:
        simulation = Simulation(sizes, zookeeper, say)
        at_end.callback(simulation.close)
        for event in ("brokers", "topics", "members", "join", "kill", "promotion", "commits", "idle"):
            getattr(simulation, event)()
        figures = zookeeper.figures()
        constants = simulation.constants(figures["sessions"])
        say("ZooKeeper: " + ", ".join(f"{name} {figure:,.0f}" for name, figure in figures.items()))
        simulation.restart()
        return {
            "sizes": asdict(sizes), "events": simulation.found, "zookeeper": figures, "constants": constants,
            "load": os.getloadavg()[2],
        }  # fmt: skip
