"""Idle clients: what each producer and each consumer of one process costs that process, the broker and ZooKeeper.

Each consumer is the only member of its group, and owns the one partition of a topic without messages. A task waits for
the first message of each asyncio consumer. Each producer has sent one message. The first client of a process is not
counted: it loads modules, begins the session, and starts the threads. Memory is what only this process uses (USS).
Processor is a part of one core, for each client, after the clients have been idle for a while.

    python bench/idle.py blocking|asyncio producer|consumer COUNT LIMIT_S ADDRESS     prints the figures of the process

The measured process is one with these arguments. `measure` starts it, and reads the processor of the servers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from metamq import Consumer, Producer, aio
from metamq.testing import Cluster, cluster

COUNT = 1_000
OPEN_S = 900.0
"""The time in which the clients of a process are opened. With less than all of them, those are measured."""
SETTLE_S = 10.0
IDLE_S = 20.0
AT_ONCE = 20
TOPICS = {"producer": "idle-producers", "consumer": "idle-consumers"}
CASES = (("blocking", "producer"), ("asyncio", "producer"), ("blocking", "consumer"), ("asyncio", "consumer"))


def _state(address: str) -> dict[str, int]:
    gc.collect()
    me, port = psutil.Process(), int(address.rpartition(":")[2])
    to_zookeeper = [one for one in me.net_connections("tcp") if one.raddr and one.raddr.port == port]
    return {
        "bytes": me.memory_full_info().uss,
        "threads": me.num_threads(),
        "files": me.num_fds(),
        "sessions": len(to_zookeeper),
    }


def _tell(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


def _report(before: dict[str, int], address: str, count: int, open_cpu_s: float) -> None:
    """Prints the figures while all clients are idle. The other process then measures the processor until it answers."""
    after = _state(address)
    _tell({
        "clients": count,
        "kb": (after["bytes"] - before["bytes"]) / count / 1e3,
        "files": (after["files"] - before["files"]) / count,
        "threads": after["threads"],
        "sessions": after["sessions"],
        "open_cpu_ms": open_cpu_s / count * 1e3,
    })  # fmt: skip


def _wait_for_answers(clients: Sequence[Any]) -> None:
    """Waits until brokers have answered each consumer, and then until all are idle."""
    for client in clients:
        while not hasattr(client, "send") and client.health().last_fetch_s is None:
            time.sleep(0.01)
    time.sleep(SETTLE_S)


def _blocking(kind: str, count: int, limit_s: float, address: str) -> None:
    """Opens blocking clients, and waits until its input ends."""

    def opened(number: int) -> Producer[Any] | Consumer[Any] | None:
        if time.monotonic() > deadline:
            return None
        if kind == "consumer":
            return Consumer(address, topics=TOPICS[kind], group=f"blocking-{os.getpid()}-{number}")
        producer: Producer[Any] = Producer(address)
        producer.send(TOPICS[kind], b"1").result()
        return producer

    deadline = time.monotonic() + limit_s
    clients = [opened(-1)]
    before, used_s = _state(address), time.process_time()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        clients += [client for client in pool.map(opened, range(count)) if client is not None]
    used_s = time.process_time() - used_s
    _wait_for_answers(clients)
    _report(before, address, len(clients) - 1, used_s)
    sys.stdin.read()


async def _asyncio(kind: str, count: int, limit_s: float, address: str) -> None:
    """Opens asyncio clients, and waits until its input ends."""
    clients: list[Any] = []
    tasks = []
    deadline = time.monotonic() + limit_s

    async def read(consumer: aio.Consumer[Any]) -> None:
        async for _ in consumer:
            pass

    async def open_some(numbers: Iterator[int]) -> None:
        for number in numbers:
            if time.monotonic() > deadline:
                return
            if kind == "consumer":
                group = f"asyncio-{os.getpid()}-{number}"
                consumer = await aio.Consumer(address, topics=TOPICS[kind], group=group).open()
                tasks.append(asyncio.create_task(read(consumer)))
                clients.append(consumer)
            else:
                producer = await aio.Producer[bytes](address).open()
                await producer.send(TOPICS[kind], b"1")
                clients.append(producer)

    await open_some(iter([-1]))
    before, used_s = _state(address), time.process_time()
    numbers = iter(range(count))
    await asyncio.gather(*(open_some(numbers) for _ in range(AT_ONCE)))
    used_s = time.process_time() - used_s
    await asyncio.to_thread(_wait_for_answers, clients)
    _report(before, address, len(clients) - 1, used_s)
    await asyncio.to_thread(sys.stdin.read)


def _cpu_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def _measured(running: Cluster, api: str, kind: str, count: int, limit_s: float) -> dict[str, Any]:
    command = [sys.executable, __file__, api, kind, str(count), str(limit_s), running.zookeeper]
    broker = psutil.Process(running.broker.pid)
    broker_bytes = broker.memory_full_info().uss
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found: dict[str, Any] = {"api": api, "kind": kind, **json.loads(process.stdout.readline())}
        found["broker_kb"] = (broker.memory_full_info().uss - broker_bytes) / found["clients"] / 1e3
        pids = {"client": process.pid, "broker": running.broker.pid, "zookeeper": running.zookeeper_server.pid or 0}
        before, began_s = {name: _cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
        time.sleep(IDLE_S)
        idle_s = time.monotonic() - began_s
        for name, pid in pids.items():
            found[f"{name}_percent"] = 100 * (_cpu_s(pid) - before[name]) / idle_s / found["clients"]
        process.kill()
    return found


def measure(say: Callable[[str], None], most: int) -> dict[str, Any]:
    """Measures COUNT clients of each kind, then `most` consumers, if that is above 0."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = []
    try:
        with cluster() as running:
            for topic in TOPICS.values():
                running.create_topic(topic, partitions=1)
            cases = [(*case, COUNT) for case in CASES] + [(*CASES[-1], most)] * (most > 0)
            for api, kind, count in cases:
                rows.append(_measured(running, api, kind, count, OPEN_S))
                say(", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return {"rows": rows}


def main(api: str, kind: str, count: int, limit_s: float, address: str) -> None:
    """The measured process."""
    if api == "blocking":
        _blocking(kind, count, limit_s, address)
    else:
        asyncio.run(_asyncio(kind, count, limit_s, address))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
