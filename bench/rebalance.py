"""Rebalance: the time until all of 100 partitions are owned again, after one of ten members joins, leaves or is killed.

Members are processes that handle messages in up to 10 ms the whole time. The group is *steady* when its plan is for
exactly the present members, and every partition's owner node names the member of the plan. The clock starts

    join    when the member's node exists: its process has started and connected
    leave   when the member gets SIGTERM
    kill    when the member's node is gone: its session has expired, about SESSION_TIMEOUT_MS after the kill
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from metamq import Consumer
from metamq.testing import Cluster, cluster
from metamq.zk.groups.members import owned_partitions, read_members
from metamq.zk.groups.plans import read_plan
from metamq.zk.session.session import Session

MEMBERS = 10
PARTITIONS = 100
HANDLER_S_MAX = 0.010
SESSION_TIMEOUT_MS = 2_000
ROUNDS = 3
GROUP = "bench-rebalance"
TOPIC = "bench-rebalance"
LIMIT_S = 30.0


def member(zookeeper: str, strategy: str) -> None:
    """Handles messages until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Consumer(
        zookeeper, topics=TOPIC, group=GROUP, strategy=strategy, session_timeout_ms=SESSION_TIMEOUT_MS
    ) as consumer:
        for _ in consumer:
            time.sleep(random.random() * HANDLER_S_MAX)


class Group:
    """The member processes, and their state in ZooKeeper."""

    def __init__(self, running: Cluster, strategy: str, session: Session) -> None:
        self._command = [sys.executable, __file__, running.zookeeper, strategy]
        self._session = session
        self.processes: list[subprocess.Popen[bytes]] = []

    async def steady(self, since: float) -> float:
        """Returns the seconds from `since` until the group is steady."""
        while not await self._is_steady():
            if time.perf_counter() - since > LIMIT_S:
                raise RuntimeError(f"the group is not steady after {LIMIT_S:g} s")
            await asyncio.sleep(0.005)
        return time.perf_counter() - since

    async def _is_steady(self) -> bool:
        stored = await read_plan(self._session, GROUP)
        members = await read_members(self._session, GROUP)
        plan = stored and stored.plan
        if plan is None or set(plan.inputs.members) != set(members) or len(members) != len(self.processes):
            return False
        return await owned_partitions(self._session, GROUP) == plan.assignment

    async def _members_are(self, wanted: Callable[[set[int]], bool]) -> float:
        """Waits until the members' process ids are as wanted; returns the time."""
        while True:
            if wanted({one.pid for one in (await read_members(self._session, GROUP)).values()}):
                return time.perf_counter()
            await asyncio.sleep(0.002)

    async def join(self) -> float:
        """Adds a member."""
        process = await asyncio.to_thread(subprocess.Popen, self._command)
        self.processes.append(process)
        return await self.steady(await self._members_are(lambda pids: process.pid in pids))

    async def leave(self) -> float:
        """Stops a member gracefully."""
        process = self.processes.pop(0)
        began = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        took = await self.steady(began)
        await asyncio.to_thread(process.wait, LIMIT_S)
        return took

    async def kill(self) -> float:
        """Kills a member."""
        process = self.processes.pop(0)
        process.kill()
        process.wait()
        return await self.steady(await self._members_are(lambda pids: process.pid not in pids))


async def _measure(running: Cluster, strategy: str, rounds: int, say: Callable[[str], None]) -> dict[str, float]:
    took: dict[str, list[float]] = {"join": [], "leave": [], "kill": []}
    async with await Session.open(running.zookeeper) as session:
        group = Group(running, strategy, session)
        try:
            for _ in range(MEMBERS - 1):
                await group.join()
            for _ in range(rounds):
                for event in ("join", "leave", "join", "kill"):
                    took[event].append(await getattr(group, event)())
        finally:
            for process in group.processes:
                process.kill()
                process.wait()
    for event, seconds in took.items():
        say(f"rebalance, {strategy}: {event} " + ", ".join(f"{one:.3f}" for one in seconds) + " s")
    return {f"{event}_s": statistics.median(seconds) for event, seconds in took.items()}


def measure(say: Callable[[str], None], *, strategy: str = "range", rounds: int = ROUNDS) -> dict[str, float]:
    """Returns the seconds until the group is steady: join_s, leave_s, kill_s, each the median of its rounds."""
    with cluster() as running:
        running.create_topic(TOPIC, PARTITIONS)
        with running.producer() as producer:
            for index in range(PARTITIONS):
                for _ in range(500):
                    producer.send(TOPIC, bytes(100), partition=f"0-{index}")
        return asyncio.run(_measure(running, strategy, rounds, say))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        member(*sys.argv[1:])
    else:
        for name in ("range", "sticky", "round_robin", "consistent_hash"):
            print(name, measure(print, strategy=name))
