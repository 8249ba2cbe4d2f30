"""The master's death in the demo: kill -9 while flights are sent, the slave's promotion, the former master's return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from metamq.cli.demo.helpers import Say, wait_for

if TYPE_CHECKING:
    from metamq import Admin
    from metamq.client.producer.outgoing import ManyDelivery
    from metamq.testing import Cluster

LIMIT_S = 30.0
POLL_S = 0.02
BROKER_ID, SLAVE = 0, 1


class FailOver:
    """A slave, and its promotion. `check` is called during waits; an exception that it raises ends the wait."""

    def __init__(self, running: Cluster, say: Say, check: Callable[[], None]) -> None:
        self.master_died = threading.Event()
        self._running = running
        self._say = say
        self._check = check
        self._acknowledged_at = 0.0

    def start_slave(self) -> None:
        """Starts the slave, and waits until it is in sync."""
        slave = self._running.add_slave()
        with self._running.admin() as admin:
            self._until(lambda: _all_in_sync(admin), "the slave in sync")
        self._say(f"its slave, replica {SLAVE}, at 127.0.0.1:{slave.port}: in sync")

    def note(self, delivery: ManyDelivery) -> None:
        """Notes the time when this delivery is acknowledged."""
        delivery.add_done_callback(self._acknowledged)

    def _acknowledged(self, delivery: ManyDelivery) -> None:
        if delivery.exception(0) is None:
            self._acknowledged_at = time.monotonic()

    def run(self, sent: int) -> None:
        """Kills the master, promotes the slave, and starts the former master again. Call it while flights are sent."""
        self._running.broker.kill()
        self.master_died.set()
        self._say(f"[bold red]kill -9 the master[/bold red] after {sent:,} flights: no broker takes flights now")
        with self._running.admin() as admin:
            ordered_at = time.monotonic()
            epoch = admin.promote(BROKER_ID, SLAVE)
            took_s = time.monotonic() - ordered_at
            self._say(f"replica {SLAVE} is promoted in {took_s:.2f} s: the master of epoch {epoch}")
            self._until(lambda: self._acknowledged_at > ordered_at, "an acknowledgement by the new master")
        first_s = self._acknowledged_at - ordered_at
        self._say(f"its first acknowledgement came {first_s:.2f} s after the order to promote it")
        self._running.broker.start(wait=False)

    def wait_for_the_former_master(self) -> None:
        """Waits until the former master is in sync, as a slave."""
        with self._running.admin() as admin:
            self._until(lambda: _all_in_sync(admin), "the former master in sync")
        self._say("the former master was started again, and is in sync: a slave")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, self._check, limit_s=LIMIT_S, poll_s=POLL_S)


def _all_in_sync(admin: Admin) -> bool:
    replicas = admin.replicas()[BROKER_ID].replicas
    return len(replicas) > 1 and all(one.holds_all for one in replicas)
