"""A broker's processor time for a PUT, beside servers that only receive and answer.

    ./dev bench --only puts --output bench/results/puts.json

Small services send one message in a request, each on a connection of its own, or many on a shared one. The clients are
one process on another core (bench/put_load.py), and the broker has a core for itself. Other programs may use that core
as well, so seconds of the processor count, not those of the clock. The rate that a core allows follows from them.

The raw limit has the same clients, frames and event loop: a server that counts the frames and answers them, and one
that also writes what it has received to a file, once for each time that it receives.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import psutil
from put_load import Load
from replication import Pair, pair

from metamq.testing import Cluster

LOAD = Path(__file__).with_name("put_load.py")
PARTITIONS = 4
SERVER_CORE = 0
LOAD_CORE = (os.cpu_count() or 1) - 1
RAW = {"echo, asyncio": ("echo", "asyncio"), "echo": ("echo", "uvloop"), "echo and write": ("write", "uvloop")}
"""The raw servers: the arguments of bench/put_load.py. The broker's loop is uvloop."""
SMALL_BYTES = 100


class Shape(NamedTuple):
    """One kind of load. `window`: requests under way on each connection. `messages`: of each request."""

    connections: int
    window: int
    messages: int
    puts: int


SHAPES = (Shape(1, 1, 1, 10_000), Shape(1, 64, 1, 40_000), Shape(100, 1, 1, 40_000), Shape(1000, 1, 1, 40_000))
READ = Shape(100, 1, 1, 40_000)
"""The shape that is also measured while a consumer reads."""
LARGE = Shape(4, 2, 1000, 2000)
"""Large batches, which work for small ones must not slow down."""
MODES: tuple[Literal["async", "sync"], ...] = ("async", "sync")


def _used_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _on_core(pid: int, core: int) -> None:
    """Moves all threads of a process to one core."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {core})


@contextmanager
def _started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(LOAD), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


class _Reader(threading.Thread):
    """A consumer of a topic, in this process."""

    def __init__(self, running: Cluster, topic: str) -> None:
        super().__init__()
        self._running, self._topic = running, topic
        self._stop_soon = threading.Event()
        self.has_read = threading.Event()

    def run(self) -> None:
        with self._running.consumer(topics=[self._topic], idle_timeout_s=1) as consumer:
            while not self._stop_soon.is_set():
                for _batch in consumer.batches():
                    self.has_read.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_soon.set()
        self.join()


def _cost(load: Load, pids: list[int], reader: _Reader | None = None) -> dict[str, float]:
    """Runs the clients; returns microseconds of the processor for a PUT, of each server process, and PUTs a second."""
    with _started("load", json.dumps(asdict(load))) as clients:
        _on_core(clients.pid, LOAD_CORE)
        assert _line(clients) == "ready\n"
        if reader is not None:
            assert reader.has_read.wait(60)
        before = [*map(_used_s, pids)]
        assert clients.stdin is not None
        clients.stdin.write("\n")
        clients.stdin.flush()
        seconds = json.loads(_line(clients))["seconds"]
        used = [_used_s(pid) - was for pid, was in zip(pids, before, strict=True)]
    sent = load.puts // load.connections * load.connections
    names = ("us", "slave_us")
    return {**{name: 1e6 * one / sent for name, one in zip(names, used, strict=False)}, "per_s": sent / seconds}


def _load(shape: Shape, port: int, topic: str = "t", topic_id: str = "0" * 16, *, greets: bool = True) -> Load:
    return Load(port, *shape[:2], shape.puts, shape.messages, SMALL_BYTES, topic, topic_id, PARTITIONS, greets)


def _raw(arguments: tuple[str, str], shape: Shape) -> dict[str, float]:
    with _started(*arguments) as server:
        _on_core(server.pid, SERVER_CORE)
        return _cost(_load(shape, int(_line(server)), greets=False), [server.pid])


def _broker(
    both: Pair, shape: Shape, replication: Literal["async", "sync"], replicas: int, *, is_read: bool = False
) -> dict[str, float]:
    """Sends to a new topic. With `is_read`, a consumer reads it."""
    topic = f"puts-{time.monotonic_ns()}"
    with both.cluster.admin() as admin:
        made = admin.create_topic(topic, partitions=PARTITIONS, replication=replication)
        both.wait_in_sync(admin, replicas)
        for replica, core in zip(both.replicas[:replicas], (SERVER_CORE, LOAD_CORE), strict=False):
            _on_core(replica.pid, core)
        pids = [replica.pid for replica in both.replicas[:replicas]]
        load = _load(shape, both.replicas[0].port, topic, made.id)
        try:
            with _Reader(both.cluster, topic) if is_read else contextlib.nullcontext() as reader:
                return _cost(load, pids, reader)
        finally:
            admin.delete(topic)


def measure(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures all shapes; medians over the rounds."""
    found: dict[tuple[str, Shape], list[dict[str, float]]] = {}

    def note(server: str, shape: Shape, figures: dict[str, float]) -> None:
        found.setdefault((server, shape), []).append(figures)
        say(f"{server}, {shape}: " + ", ".join(f"{name} {figure:,.1f}" for name, figure in figures.items()))

    with pair() as both:
        for _ in range(rounds):
            for shape in (*SHAPES, LARGE):
                for server, arguments in RAW.items():
                    note(server, shape, _raw(arguments, shape))
                note("alone", shape, _broker(both, shape, "async", 1))
            note("read", READ, _broker(both, READ, "async", 1, is_read=True))
        both.replicas[1].start()
        for _ in range(rounds):
            for shape in (*SHAPES, LARGE):
                for mode in MODES:
                    note(mode, shape, _broker(both, shape, mode, 2))
    read_us = statistics.median(one["us"] for one in found["read", READ]) - statistics.median(
        one["us"] for one in found["alone", READ]
    )
    rows = [
        {"server": server, **shape._asdict(), **{n: statistics.median(one[n] for one in all_) for n in all_[0]}}
        for (server, shape), all_ in found.items()
    ]
    return {"rows": rows, "read_us": read_us, "load": os.getloadavg()[0]}
