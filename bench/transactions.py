"""The cost of transactions: commits per second, their latency and the disk's, memory, recovery.

A transaction here is ten messages of 1 KiB to one partition of four. Clients are producers with their own connections,
in one process; this process and the broker share the cores.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import uvloop
from flushed import flushes, until_flushed
from settle import settle

from metamq import aio
from metamq.testing import BrokerProcess, Cluster, cluster
from metamq.tx import Coordinator, XAResource, Xid, create_outcome_table, dbtx

Say = Callable[[str], None]

TOPIC, PARTITIONS = "booked", 4
CLIENTS = 16
VALUES = [os.urandom(1024)] * 10
SECONDS = 5.0
SINGLE = 500
"""Commits of a single client."""
KINDS = 150
"""Transactions of each kind."""
FSYNCS_S = 1.0
MILLION = 1_000_000
SMALL_BATCH_BYTES = 11_000
"""The size of about a hundred messages: a broker keeps only the positions of a branch's batches in memory."""
JOURNAL_BYTES, BRANCH_BYTES = 1024**3, 16 * 1024**2
OPEN_BRANCHES = 1000
SENT_BYTES = 512 * 1024**2


def fsyncs(folder: str, size: int) -> list[float]:
    """Returns the seconds of each append of `size` bytes to a file, with its flush."""
    samples = []
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        piece = os.urandom(size)
        until = time.perf_counter() + FSYNCS_S
        while (began := time.perf_counter()) < until:
            file.write(piece)
            os.fdatasync(file.fileno())
            samples.append(time.perf_counter() - began)
    return samples


async def one_phase(producer: aio.Producer[bytes], number: int) -> None:
    """Commits one transaction without a prepare."""
    async with producer.transaction():
        producer.send_many(TOPIC, VALUES)


async def two_phase(producer: aio.Producer[bytes], number: int) -> None:
    """Prepares and commits one transaction, as a coordinator does."""
    await producer.tpc_begin(producer.xid(1, b"%d-%d" % (number, time.perf_counter_ns())))
    producer.send_many(TOPIC, VALUES)
    await producer.tpc_prepare()
    await producer.tpc_commit()


Way = Callable[[aio.Producer[bytes], int], Coroutine[Any, Any, None]]


async def _rate(running: Cluster, way: Way) -> tuple[float, float]:
    """Returns (transactions per second, transactions per fsync) of all clients together."""
    done = 0
    async with AsyncExitStack() as stack:
        producers = [await stack.enter_async_context(aio.Producer[bytes](running.zookeeper)) for _ in range(CLIENTS)]

        async def client(number: int, until: float) -> None:
            nonlocal done
            while time.perf_counter() < until:
                await way(producers[number], number)
                done += 1

        async def clients(seconds: float) -> float:
            began = time.perf_counter()
            await asyncio.gather(*(client(number, began + seconds) for number in range(CLIENTS)))
            return time.perf_counter() - began

        await clients(0.5)
        done, before = 0, flushes(running.broker)
        took_s = await clients(SECONDS)
        return done / took_s, done / max(flushes(running.broker) - before, 1)


async def _latency(running: Cluster) -> list[float]:
    """Returns the seconds of each commit of a single client."""
    samples = []
    async with aio.Producer[bytes](running.zookeeper) as producer:
        for _ in range(SINGLE):
            began = time.perf_counter()
            await one_phase(producer, 0)
            samples.append(time.perf_counter() - began)
    return samples[20:]


def commits(rounds: int, say: Say) -> dict[str, float]:
    """Measures rates and latency, each directly after the disk's own figures."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, cluster(folder=Path(folder)) as running:
        running.create_topic(TOPIC, partitions=PARTITIONS)
        for _ in range(rounds):
            settle(256 * 1024**2)
            small, group = fsyncs(folder, 10 * 1024), fsyncs(folder, CLIENTS * 10 * 1024)
            one, one_grouped = _run(_rate(running, one_phase))
            two, _two_grouped = _run(_rate(running, two_phase))
            waits = _run(_latency(running))
            found.append({
                "fsyncs_per_s": len(group) / sum(group),
                "fsync_p50_ms": statistics.median(small) * 1000,
                "one_phase_per_s": one,
                "per_fsync": one_grouped,
                "two_phase_per_s": two,
                "two_to_one": two / one,
                "single_p50_ms": statistics.median(waits) * 1000,
                "over_two_fsyncs_ms": (statistics.median(waits) - 2 * statistics.median(small)) * 1000,
            })  # fmt: skip
            say(", ".join(f"{name} {value:,.2f}" for name, value in found[-1].items()))
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def _run(work: Awaitable[Any]) -> Any:
    async def awaited() -> Any:
        return await work

    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(awaited())


def _own_mb(broker: BrokerProcess) -> float:
    """Returns the process's own memory in MB, without shared memory and files."""
    return float(psutil.Process(broker.pid).memory_full_info().uss) / 1e6


def open_branch(say: Say) -> dict[str, float]:
    """Measures the broker's memory for a branch with a million messages in small batches, until it is prepared."""
    with cluster() as running:
        running.create_topic(TOPIC, partitions=PARTITIONS)
        with running.producer(batch_bytes=SMALL_BATCH_BYTES) as producer:
            with producer.transaction():  # the first transaction loads modules, which are not the branch's memory
                producer.send_many(TOPIC, [bytes(100)] * 10_000)
            before_mb = _own_mb(running.broker)
            producer.tpc_begin(producer.xid(1, b"large"))
            most_mb = 0.0
            for _ in range(MILLION // 10_000):
                producer.send_many(TOPIC, [bytes(100)] * 10_000)
                most_mb = max(most_mb, _own_mb(running.broker))
            producer.tpc_prepare()
            most_mb = max(most_mb, _own_mb(running.broker))
            producer.tpc_commit()
    say(f"a branch with a million messages takes up to {most_mb - before_mb:.1f} MB in the broker")
    return {"messages": MILLION, "mb": most_mb - before_mb}


def recovery(say: Say) -> dict[str, float]:
    """Measures the start of a broker that was killed with a journal of 1 GB, all of it prepared."""
    with cluster() as running:
        running.create_topic(TOPIC, partitions=PARTITIONS)
        count = JOURNAL_BYTES // BRANCH_BYTES
        with XAResource(0, running.zookeeper) as mq:
            for _ in range(count):
                xid = Xid.random()
                mq.start(xid)
                for _ in range(BRANCH_BYTES // (64 * 1024)):
                    mq.send(TOPIC, bytes(64 * 1024))
                mq.end(xid)
                mq.prepare(xid)
        running.broker.kill()
        began = time.perf_counter()
        running.broker.start()
        with XAResource(0, running.zookeeper) as mq:
            assert len(mq.recover()) == count
        took_s = time.perf_counter() - began
    say(f"a journal of {JOURNAL_BYTES / 1e9:.2f} GB is recovered in {took_s:.2f} s")
    return {"journal_bytes": float(JOURNAL_BYTES), "branches": float(count), "s": took_s}


@contextmanager
def _branches_open(running: Cluster) -> Iterator[None]:
    with XAResource(0, running.zookeeper) as mq:
        xids = [Xid.random() for _ in range(OPEN_BRANCHES)]
        for xid in xids:
            mq.start(xid, timeout_s=3600)
            mq.send(TOPIC, VALUES[0])
            mq.end(xid)
        yield
        for xid in xids:
            mq.rollback(xid)


def beside(rounds: int, say: Say) -> dict[str, float]:
    """Measures `send_many` of 1 KiB without transactions, with and without 1,000 open branches, within a minute."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    with cluster() as running:
        running.create_topic(TOPIC, partitions=PARTITIONS)

        def rate() -> float:
            topic = f"plain-{time.monotonic_ns()}"
            running.create_topic(topic, partitions=PARTITIONS)
            values = [VALUES[0]] * (SENT_BYTES // 1024)
            with running.producer() as producer:
                producer.send(topic, b"warm").result()
                until_flushed(running.broker)
                settle(2 * SENT_BYTES)
                began = time.perf_counter()
                producer.send_many(topic, values).result()
                took_s = time.perf_counter() - began
            with running.admin() as admin:
                admin.delete(topic)
            return len(values) / took_s

        rate()  # a warm-up
        for number in range(2 * max((rounds + 1) // 2, 2)):  # each is first as often as second
            for name in ("without", "with")[:: -1 if number % 2 else 1]:
                with _branches_open(running) if name == "with" else nullcontext():
                    found[name].append(rate())
            say(", ".join(f"{name} open branches {rates[-1]:,.0f}/s" for name, rates in found.items()))
    ratio = statistics.median(w / wo for w, wo in zip(found["with"], found["without"], strict=True))
    return {**{name: statistics.median(rates) for name, rates in found.items()}, "ratio": ratio}


def kinds(say: Say) -> dict[str, float]:
    """Measures the median milliseconds of a single client's transaction, for each kind; the kinds alternate."""
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(brokers=2, folder=Path(folder)) as running,
        running.producer() as producer,
        running.producer() as second,
        Coordinator(f"{folder}/decisions", {"first": producer, "second": second}) as coordinator,
        closing(sqlite3.connect(f"{folder}/own.db")) as database,
    ):
        running.create_topic("first", partitions=1, brokers=[0])
        running.create_topic("second", partitions=1, brokers=[1])
        database.execute("CREATE TABLE booked (id INTEGER)")
        create_outcome_table(database)
        half = len(VALUES) // 2

        def one_broker() -> None:
            with producer.transaction():
                producer.send_many("first", VALUES)

        def two_brokers() -> None:
            with producer.transaction():
                producer.send_many("first", VALUES[:half])
                producer.send_many("second", VALUES[half:])

        def with_sqlite3() -> None:
            with dbtx(database, producer) as tx:
                database.execute("INSERT INTO booked VALUES (1)")
                tx.send_many("first", VALUES)

        def coordinated() -> None:
            with coordinator.begin() as tx:
                tx["first"].send_many("first", VALUES[:half])
                tx["second"].send_many("second", VALUES[half:])

        samples: dict[str, list[float]] = {}
        for _ in range(KINDS):
            for kind in (one_broker, two_brokers, with_sqlite3, coordinated):
                began = time.perf_counter()
                kind()
                samples.setdefault(f"{kind.__name__}_ms", []).append((time.perf_counter() - began) * 1000)
    found = {name: statistics.median(each[20:]) for name, each in samples.items()}
    say(", ".join(f"{name} {value:,.2f}" for name, value in found.items()))
    return found


def measure(rounds: int, say: Say) -> dict[str, Any]:
    """Runs all measurements of transactions."""
    return {
        "commits": commits(rounds, say),
        "kinds": kinds(say),
        "open_branch": open_branch(say),
        "recovery": recovery(say),
        "beside": beside(rounds, say),
    }


if __name__ == "__main__":
    measure(1, print)
