"""The failover in the demo: kill -9 of the master while flights are sent, the take-over, the former master's return."""

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
    """A slave that takes over by itself. `check` is called during waits; an exception that it raises ends the wait."""

    def __init__(self, running: Cluster, say: Say, check: Callable[[], None]) -> None:
        self.master_died = threading.Event()
        self._running = running
        self._say = say
        self._check = check
        self._sent, self._answered = 0, 0
        self._acknowledged_at = 0.0
        self._gap_s = 0.0
        """The longest time without an acknowledgement that ended after the master was killed."""

    def start_slave(self) -> None:
        """Starts the slave, and waits until it is in sync."""
        slave = self._running.add_slave()
        with self._running.admin() as admin:
            self._until(lambda: _all_in_sync(admin), "the slave in sync")
        self._say(f"its slave, replica {SLAVE}, at 127.0.0.1:{slave.port}: in sync")

    def note(self, delivery: ManyDelivery) -> None:
        """Notes the time when this delivery is acknowledged."""
        if not self._sent:  # the time without an acknowledgement begins here
            self._acknowledged_at = time.monotonic()
        self._sent += 1
        delivery.add_done_callback(self._acknowledged)

    def _acknowledged(self, delivery: ManyDelivery) -> None:
        self._answered += 1
        if delivery.exception(0) is None:
            now = time.monotonic()
            if self.master_died.is_set():
                self._gap_s = max(self._gap_s, now - self._acknowledged_at)
            self._acknowledged_at = now

    def run(self, sent: int) -> None:
        """Kills the master, and starts it again once the slave has taken over. Call it while flights are sent."""
        self._running.broker.kill()
        self.master_died.set()
        self._say(f"[bold red]kill -9 the master[/bold red] after {sent:,} flights: no broker takes flights now")
        with self._running.admin() as admin:
            self._until(lambda: _master(admin) == SLAVE, "the slave the master")
            since = time.monotonic()
            self._until(lambda: self._is_served(since), "an acknowledgement by the new master")
        self._say(f"replica {SLAVE} has taken over by itself: {self._gap_s:.2f} s without an acknowledgement")
        self._running.broker.start(wait=False)

    def _is_served(self, since: float) -> bool:
        return self._acknowledged_at > since or self._answered == self._sent

    def wait_for_the_former_master(self) -> None:
        """Waits until the former master is in sync, as a slave."""
        with self._running.admin() as admin:
            self._until(lambda: _all_in_sync(admin), "the former master in sync")
        self._say("the former master was started again, and is in sync: a slave")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, self._check, limit_s=LIMIT_S, poll_s=POLL_S)


def _master(admin: Admin) -> int | None:
    return next((one.replica for one in admin.replicas()[BROKER_ID].replicas if one.role == "master"), None)


def _all_in_sync(admin: Admin) -> bool:
    replicas = admin.replicas()[BROKER_ID].replicas
    return len(replicas) > 1 and all(one.holds_all for one in replicas)
