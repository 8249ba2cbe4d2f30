"""Rounds of kills and pauses around a database, a broker and the applications that write to both.

In each round somebody is killed with -9, crashes, or is paused for longer than every time-out, at a random moment of
running transactions; ZooKeeper, too, which may also be restored from an older copy. Two applications are at work, and
two recoverers, which fare no better.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from metamq.testing import BrokerProcess
from metamq.zk.server.embedded import EmbeddedZooKeeper
from tests.parts import wait_until
from tests.postgres import Postgres
from tests.tx.shop import Program, Shop

TIMEOUT_S = 0.6
"""A broker rolls back what is not prepared after so long."""
GRACE_S, EVERY_S = 0.2, 0.1
PAUSE_S = 1.2
"""Past all of these."""
APPLICATIONS, RECOVERERS = 2, 2
WEIGHTS = {
    "application killed": 40, "broker killed": 15, "database crashed": 15, "application paused": 14,
    "recoverer killed": 5, "broker paused": 4, "recoverer paused": 4, "database paused": 3, "zookeeper killed": 4,
    "zookeeper paused": 4, "zookeeper restored": 3,
}  # fmt: skip


class KillLoop:
    """A shop at work. `faults`: see application.py."""

    def __init__(self, shop: Shop, folder: Path, seed: int, faults: list[str] | None = None) -> None:
        self.happened: Counter[str] = Counter()
        self._shop = shop
        self._folder = folder
        self._choice = random.Random(seed)
        self._faults = faults or []
        self._started = 0
        self._told = 0
        self._failed: Counter[str] = Counter()
        self._recoverers = [self._recoverer() for _ in range(RECOVERERS)]
        self._applications = [self._application() for _ in range(APPLICATIONS)]

    def _program(self, **order: object) -> Program:
        self._started += 1
        seed = self._choice.getrandbits(32)
        return Program(self._folder, **self._shop.order(faults=self._faults, seed=seed, **order))

    def _application(self) -> Program:
        return self._program(name=f"application-{self._started}", timeout_s=TIMEOUT_S, dawdles=True)

    def _recoverer(self) -> Program:
        return self._program(name=f"recoverer-{self._started}", recovers=True, grace_s=GRACE_S, every_s=EVERY_S)

    def run(self, rounds: int, only: list[str] | None = None) -> None:
        """So many rounds; `only` of these kinds."""
        names = only or list(WEIGHTS)
        for _ in range(rounds):
            what = self._choice.choices(names, [WEIGHTS[name] for name in names])[0]
            self._wait_at_work()
            time.sleep(self._choice.random() * 0.1)  # the random moment
            self._make_happen(what)
            self.happened[what] += 1

    def _wait_at_work(self) -> None:
        """Until each application has committed something since its start, and one of them after the last round."""
        done = sum(one.done() for one in self._applications)
        wait_until(lambda: all(one.done() for one in self._applications), 120, "the applications at work")
        wait_until(lambda: sum(one.done() for one in self._applications) > done, 120, "the next transaction")

    def _make_happen(self, what: str) -> None:
        who, how = what.split()
        programs = {"application": self._applications, "recoverer": self._recoverers}.get(who)
        if programs is not None:
            number = self._choice.randrange(len(programs))
            if how == "paused":
                program = programs[number]
                self._pause(lambda: program.signal(signal.SIGSTOP), lambda: program.signal(signal.SIGCONT))
                return
            self._end(programs[number])
            programs[number] = self._application() if who == "application" else self._recoverer()
            return
        if who == "zookeeper":
            self._disturb_zookeeper(how)
            return
        server: Postgres | BrokerProcess = self._shop.postgres if who == "database" else self._shop.cluster.broker
        if how == "paused":
            self._pause(server.freeze, server.thaw)
            return
        if isinstance(server, Postgres):
            server.crash()
        else:
            server.kill()
        server.start()

    def _disturb_zookeeper(self, how: str) -> None:
        server = self._shop.cluster.zookeeper_server
        if how == "paused":
            self._pause(server.freeze, server.thaw)
        elif how == "killed":
            server.kill()
            server.restart()
        else:
            self._restore_zookeeper(server)

    def _restore_zookeeper(self, server: EmbeddedZooKeeper) -> None:
        """From before a start of the broker, which knows more, and waits for a person."""
        assert server.data_dir is not None
        data, copy, broker = server.data_dir / "data", self._folder / "yesterday", self._shop.cluster.broker
        server.freeze()
        shutil.copytree(data, copy)
        server.thaw()
        broker.restart()
        broker.kill()
        server.kill()
        shutil.rmtree(data)
        copy.rename(data)
        server.restart()
        broker.start()
        with self._shop.cluster.admin() as admin:
            wait_until(lambda: admin.replicas()[0].taken_back, 120, "that ZooKeeper was taken back")
            admin.promote(0, 0, accept_loss=True)

    def _pause(self, freeze: Callable[[], None], thaw: Callable[[], None]) -> None:
        freeze()
        time.sleep(PAUSE_S)
        thaw()

    def _end(self, program: Program) -> None:
        program.kill()
        self._told += program.done()
        self._failed.update(line.split()[1] for line in program.lines() if line.startswith("failed"))

    def finish(self) -> list[str]:
        """Kills the applications, lets the recoverers finish, and looks: what does not agree."""
        for one in self._applications:
            self._end(one)
        self._shop.wait_settled()
        differences = self._shop.differences()
        self._applications = [self._application() for _ in self._applications]
        return differences

    def close(self) -> None:
        """Ends every program."""
        for one in [*self._applications, *self._recoverers]:
            if one.running:
                one.signal(signal.SIGCONT)
                self._end(one)

    def figures(self) -> str:
        """What has happened, in a line."""
        happened = ", ".join(f"{number} x {what}" for what, number in sorted(self.happened.items()))
        failed = ", ".join(f"{number} {name}" for name, number in sorted(self._failed.items()))
        return f"{happened}; {self._told} transactions committed, and failed: {failed or 'none'}"
