"""The latency of a steady producer beside work that needs the disk or the loop, and the rate of a cold scan.

`cold` removes the log from the page cache, then a consumer reads it. The raw disk reads the same files in between, by
system calls alone. Client, brokers and measurement share the cores, so each figure beside a disturber has a figure
without one of the same minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import latency
from replication import Pair, pair
from settle import settle

from metamq import Consumer, Producer
from metamq.testing import Cluster, cluster
from metamq.wire.commands import Command, Get, GetPartition, Hello
from metamq.wire.frames import encode_frame

Say = Callable[[str], None]

SCAN_BYTES = 1024 * 1024 * 1024
RETAINED_BYTES = 10 * 1024 * 1024 * 1024
SEGMENT_BYTES = 256 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024
READERS = 9_900
WAKE_EVERY_S = 2.0
LOW_PRIORITY = 19
RATE = 1_000
SECONDS = 6.0
PARTITIONS = 4


def fill(running: Cluster, topic: str, size: int) -> None:
    """Makes a topic with this many bytes."""
    running.create_topic(topic, partitions=PARTITIONS, segment_bytes=SEGMENT_BYTES)
    values = [os.urandom(1024) for _ in range(1024)] * 64
    with running.producer() as producer:
        for _ in range(size // (1024 * len(values))):
            producer.send_many(topic, values).result()


def logs(data: Path, topic: str) -> list[Path]:
    """The segments of a topic."""
    return sorted(data.glob(f"topics/{topic}@*/*/*.log"))


def make_cold(paths: list[Path]) -> None:
    """Removes the files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_read(paths: list[Path]) -> float:
    """Reads cold files with system calls; returns bytes per second."""
    make_cold(paths)
    view, total = bytearray(CHUNK_BYTES), 0
    began = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while count := file.readinto(view):
                total += count
    return total / (time.perf_counter() - began)


def scan(running: Cluster, topic: str, size: int) -> float:
    """Reads a topic from its beginning with `batches()`; returns bytes per second."""
    left = size
    with running.consumer(topics=[topic], idle_timeout_s=20) as consumer:
        began = time.perf_counter()
        for batch in consumer.batches():
            left -= 1024 * len(batch)
            if left <= 0:
                break
        return size / (time.perf_counter() - began)


def cold_scan(running: Cluster, rounds: int, say: Say) -> dict[str, float]:
    """Measures the raw disk, a cold scan and a warm one, in turns."""
    topic = "scanned"
    prefer(running.broker.pid)
    prefer(os.getpid())  # the raw disk needs little of the processor, a scan much
    fill(running, topic, SCAN_BYTES)
    found: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        paths = logs(running.broker.data, topic)
        settle(SCAN_BYTES)
        raw = raw_read(paths)
        make_cold(paths)
        cold = scan(running, topic, SCAN_BYTES)
        found.append((raw, cold, scan(running, topic, SCAN_BYTES)))
        say("raw {:,.0f} MB/s, cold {:,.0f}, warm {:,.0f}".format(*(rate / 1e6 for rate in found[-1])))
    prefer(os.getpid(), os.SCHED_OTHER)
    raw, cold, warm = (statistics.median(one[n] for one in found) for n in range(3))
    ratio = statistics.median(one[1] / one[0] for one in found)
    return {"raw_bytes_per_s": raw, "cold_bytes_per_s": cold, "warm_bytes_per_s": warm, "ratio": ratio}


def prefer(pid: int, policy: int = os.SCHED_RR) -> None:
    """Runs the threads of a process before those of other programs, if the system allows: a machine may be shared."""
    with contextlib.suppress(PermissionError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), policy, os.sched_param(int(policy != os.SCHED_OTHER)))


def produced(running: Cluster, topic: str) -> dict[str, float]:
    """Sends 1,000 messages of 100 bytes per second from a process; returns percentiles of send to acknowledgement."""
    command = [sys.executable, __file__, running.zookeeper, topic, str(SECONDS)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return latency.percentiles([float(line) for line in output.split()])


def _produce(zookeeper: str, topic: str, seconds: float) -> None:
    prefer(os.getpid())
    samples: list[float] = []
    with Producer[bytes](zookeeper) as producer:
        producer.send(topic, bytes(100)).result()
        due = time.perf_counter()
        end = due + seconds
        while due < end:
            due += 1 / RATE
            while (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            began = time.perf_counter()
            delivery = producer.send(topic, bytes(100))
            delivery.add_done_callback(lambda _, began=began: samples.append(time.perf_counter() - began))
        producer.flush()
    print("\n".join(map(str, samples)))


@contextmanager
def apart(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs this file in a process of low priority: clients and slaves have machines of their own."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    os.setpriority(os.PRIO_PROCESS, process.pid, LOW_PRIORITY)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _scan_on(zookeeper: str, topic: str, data: str) -> None:
    while True:
        make_cold(logs(Path(data), topic))
        with Consumer[bytes](zookeeper, topics=[topic], idle_timeout_s=1) as consumer:
            for _batch in consumer.batches():
                pass


@contextmanager
def scanning(running: Cluster, topic: str) -> Iterator[None]:
    """A consumer reads a cold topic again and again."""
    with apart("scan", running.zookeeper, topic, str(running.broker.data)):
        yield


@contextmanager
def catching_up(both: Pair, topic: str) -> Iterator[None]:
    """A slave without data copies a cold topic, and whatever else there is."""
    slave = both.replicas[1]
    make_cold(logs(both.cluster.broker.data, topic))
    slave.start()
    os.setpriority(os.PRIO_PROCESS, slave.pid, LOW_PRIORITY)
    try:
        yield
    finally:
        slave.kill()
        shutil.rmtree(slave.data)


@contextmanager
def removing(running: Cluster, topic: str) -> Iterator[None]:
    """Retention removes a topic's segments."""
    with running.admin() as admin:
        admin.alter(topic, retention_bytes=1)
    yield
    deadline = time.monotonic() + 120
    while sum(path.stat().st_size for path in logs(running.broker.data, topic)) > PARTITIONS * SEGMENT_BYTES:
        assert time.monotonic() < deadline, "retention takes too long"
        time.sleep(0.1)


@contextmanager
def waking(running: Cluster, topic: str, readers: int) -> Iterator[None]:
    """One message in a while wakes thousands of waiting readers, which are all connections of one process."""
    running.create_topic(topic, partitions=1)
    with running.admin() as admin:
        topic_id = admin.topics()[topic].id
    stop = threading.Event()

    def run() -> None:
        with running.producer() as producer:
            while not stop.wait(WAKE_EVERY_S):
                producer.send(topic, b"wake up").result()

    with apart("wait", str(running.broker.port), topic, topic_id, str(readers)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "all wait\n"
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


class Waiting(asyncio.Protocol):
    """A reader that waits for the next message again and again. An answer is a few hundred bytes: one piece."""

    def __init__(self, topic: str, topic_id: str, greeted: Callable[[], None]) -> None:
        self._opened = [GetPartition(1, topic, topic_id, 0)]
        self._greeted = greeted
        self._offset = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send(Command.HELLO, Hello(1, 1, "bench"))

    def data_received(self, data: bytes) -> None:
        self._offset += 1
        opened = [] if self._offset else self._opened
        self._send(Command.GET, Get(300_000, 1, 1 << 20, 1 << 20, opened, [(1, self._offset)], []))
        if opened:
            self._greeted()

    def _send(self, command: int, header: Any) -> None:
        self._transport.write(b"".join(encode_frame(1, command, 0, self._offset + 1, header)))  # type: ignore[attr-defined]


async def _wait(port: int, topic: str, topic_id: str, readers: int) -> None:
    prefer(os.getpid())  # a real reader does not wait for thousands of others before it asks again
    loop = asyncio.get_running_loop()
    for _ in range(readers):
        greeted = asyncio.Event()
        await loop.create_connection(partial(Waiting, topic, topic_id, greeted.set), "127.0.0.1", port)
        await greeted.wait()
    print("all wait", flush=True)
    await asyncio.sleep(3600)


def latencies(both: Pair, rounds: int, say: Say) -> list[dict[str, Any]]:
    """Measures a producer of 1,000 messages per second alone and beside each disturber, in turns; retention once."""
    running = both.cluster
    running.create_topic("steady", partitions=1)
    prefer(running.broker.pid)
    fill(running, "scanned", SCAN_BYTES)
    disturbers: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "nothing": nullcontext,
        "scan": lambda: scanning(running, "scanned"),
        "slave": lambda: catching_up(both, "scanned"),
        "readers": lambda: waking(running, f"woken-{time.monotonic_ns()}", READERS),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in [*disturbers, "retention"]}
    for _ in range(rounds):
        for name, disturber in disturbers.items():
            settle(SCAN_BYTES)
            with disturber():
                found[name].append(produced(running, "steady"))
            say(f"beside {name}: " + ", ".join(f"{k} {v:.2f}" for k, v in found[name][-1].items()))
    fill(running, topic := "removed", RETAINED_BYTES)
    os.sync()
    with removing(running, topic):
        found["retention"].append(produced(running, "steady"))
    say("beside retention: " + ", ".join(f"{k} {v:.2f}" for k, v in found["retention"][-1].items()))
    return [
        {"beside": name, **{key: statistics.median(one[key] for one in each) for key in each[0]}}
        for name, each in found.items()
    ]


def measure(rounds: int, say: Say) -> dict[str, Any]:
    """Runs all measurements of the disk and the loop."""
    with tempfile.TemporaryDirectory() as folder, cluster(folder=Path(folder)) as running:
        scans = cold_scan(running, rounds, say)
    with pair(retention_check_s=1.0) as both:
        return {"scan": scans, "latency": latencies(both, rounds, say)}


if __name__ == "__main__":
    if sys.argv[1] == "scan":
        _scan_on(*sys.argv[2:])
    elif sys.argv[1] == "wait":
        asyncio.run(_wait(int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])))
    else:
        _produce(sys.argv[1], sys.argv[2], float(sys.argv[3]))
