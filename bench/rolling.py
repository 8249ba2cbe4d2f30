"""The latest message in a rolling restart: three broker ids with two replicas each, restarted one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from failover import LIMIT_S, Steady

from metamq import Admin
from metamq.testing import Cluster, cluster

BROKERS = 3
REPLICAS = 2
SESSION_MS = 6000
TOPIC = "steady"


class Sender:
    """Sends one message after the other, to all brokers in turn."""

    def __init__(self, running: Cluster, stack: ExitStack) -> None:
        self._producer = stack.enter_context(running.producer(linger_ms=0))
        self._sent = 0

    def send(self) -> None:
        """Sends a message, and returns when all in-sync replicas have acknowledged it."""
        self._sent += 1
        self._producer.send(TOPIC, b"%d" % self._sent).result(LIMIT_S)


def _wait_in_sync(admin: Admin) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = [each.replicas for each in admin.replicas().values()]
        if [sum(one.holds_all for one in replicas) for replicas in found] == [REPLICAS] * BROKERS:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the replicas are not in sync after {LIMIT_S:g} s")
        time.sleep(0.05)


def measure(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures the longest wait for an acknowledgement in each rolling restart, in seconds."""
    waits: list[float] = []
    with ExitStack() as stack:
        running = stack.enter_context(cluster(brokers=BROKERS, failover="auto", session_timeout_ms=SESSION_MS))
        for broker_id in range(BROKERS):
            running.add_slave(broker_id)
        running.create_topic(TOPIC, partitions=2 * BROKERS, replication="sync")
        admin = stack.enter_context(running.admin())
        with Steady(Sender(running, stack)) as steady:
            for _ in range(rounds):
                before = len(steady.times) - 1
                for process in (*running.brokers, *running.slaves):
                    _wait_in_sync(admin)
                    process.restart()
                _wait_in_sync(admin)
                steady.wait_for_more()
                waits.append(steady.gap_since(before))
                say(f"a rolling restart of {BROKERS * REPLICAS} brokers: {waits[-1]:.2f} s")
    return {"brokers": BROKERS * REPLICAS, "rounds": rounds, "p50_s": statistics.median(waits), "max_s": max(waits)}
