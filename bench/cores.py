"""A command with one and with two broker processes: small PUTs and large fetches, and the processor time of each side.

    ./dev bench --only cores

The clients are processes, too, and share the cores with the brokers. On a machine with few cores the clients are the
limit, and the ratio of the rates says little. So the ratio of the brokers' processor time per message is measured, too:
times the number of brokers, it is the ratio that free cores allow.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from metamq import Admin, Consumer, Producer
from metamq.client.net.transport import BrokerConnection
from metamq.wire import status
from metamq.wire.columns import encode
from metamq.wire.commands import Command, PutEntry, PutResult
from metamq.wire.headers import unpack_list
from metamq.zk.server.embedded import EmbeddedZooKeeper

TOPIC = "t"
CLIENTS = 2
WINDOW = 64
"""Requests that a client process has under way. They go past `Producer`, which takes more processor than a broker."""
PUT_S = 6.0
FETCHED = 800_000
SIZE = 1024


async def _put(topic_id: str, ports: list[int]) -> int:
    """Sends PUTs of one message to all brokers, WINDOW of them at a time, and counts the answers."""
    batch = encode([b"x" * 100], base_timestamp_us=1)
    header = [PutEntry(TOPIC, topic_id, 0, len(batch))]
    stop, done = time.monotonic() + PUT_S, 0

    async def send(connection: BrokerConnection) -> None:
        nonlocal done
        while time.monotonic() < stop:
            answers = [connection.send(Command.PUT, header, [batch]) for _ in range(WINDOW // len(ports))]
            for answer in await asyncio.gather(*answers):
                (result,) = unpack_list(PutResult, answer.header)
                assert result.status == status.OK, result
            done += len(answers)

    connections = [await BrokerConnection.open("127.0.0.1", port, timeout_s=60) for port in ports]
    await asyncio.gather(*map(send, connections))
    for connection in connections:
        await connection.close()
    return done


def _fetch(zookeeper: str) -> int:
    """Reads FETCHED messages or more in large fetches."""
    found = 0
    with Consumer(zookeeper, topics=TOPIC, idle_timeout_s=10) as consumer:
        for batch in consumer.batches():
            found += len(batch)
            if found >= FETCHED:
                break
    return found


@contextmanager
def _brokers(zookeeper: str, folder: Path, processes: int) -> Iterator[tuple[list[psutil.Process], list[int]]]:
    """The broker processes of a command, ready, and their ports."""
    command = [sys.executable, "-m", "metamq.cli", "broker", "--processes", str(processes), "--port", "0"]
    command += ["--http-port", "-1", "--zookeeper", zookeeper, "--data", str(folder), "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        try:
            assert running.stdout is not None
            told = json.loads(running.stdout.readline())
            own = psutil.Process(running.pid)
            yield own.children() or [own], [one["port"] for one in told.get("brokers", [told])]
        finally:
            running.terminate()


def _used_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(brokers: list[psutil.Process], way: str, *arguments: str) -> dict[str, float]:
    """Runs the clients; returns messages per second, and microseconds of processors per message of both sides."""
    command = [sys.executable, __file__, way, *arguments]
    brokers_before, clients_before, began = _used_s(brokers), _children_s(), time.perf_counter()
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(CLIENTS)]
    told = [json.loads(client.communicate()[0]) for client in clients]
    count = sum(one["count"] for one in told)
    seconds = max(one["seconds"] for one in told)
    broker_s = _used_s(brokers) - brokers_before
    return {
        "per_s": count / seconds,
        "broker_us": 1e6 * broker_s / count,
        "client_us": 1e6 * (_children_s() - clients_before) / count,
        "broker_cores": broker_s / (time.perf_counter() - began),
    }


def _measure(processes: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedZooKeeper(Path(folder) / "zookeeper") as server:
        zookeeper = server.address
        with _brokers(zookeeper, Path(folder) / "data", processes) as (brokers, ports):
            with Admin(zookeeper) as admin:
                topic_id = admin.create_topic(TOPIC, partitions=4).id
            put = _run(brokers, "put", topic_id, *map(str, ports))
            with Producer(zookeeper) as producer:
                producer.send_many(TOPIC, [os.urandom(SIZE)] * FETCHED).result()
            return {"put": put, "fetch": _run(brokers, "fetch", zookeeper)}


def measure(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures one and two processes in turn; medians over the rounds."""
    measured: dict[int, list[dict[str, dict[str, float]]]] = {1: [], 2: []}
    for _ in range(rounds):
        for processes, found in measured.items():
            found.append(_measure(processes))
            for way, figures in found[-1].items():
                say(f"{processes} processes, {way}: " + ", ".join(f"{k} {v:,.2f}" for k, v in figures.items()))
    result: dict[str, Any] = {"cores": os.cpu_count(), "clients": CLIENTS, "rounds": rounds}
    for way in ("put", "fetch"):
        one, two = (
            {name: statistics.median(each[way][name] for each in found) for name in found[0][way]}
            for found in measured.values()
        )
        possible = 2 * one["broker_us"] / two["broker_us"]
        result[way] = {"1": one, "2": two, "rate_ratio": two["per_s"] / one["per_s"], "possible_ratio": possible}
    return result


def _main(way: str, first: str, *ports: str) -> None:
    began = time.perf_counter()
    count = asyncio.run(_put(first, list(map(int, ports)))) if way == "put" else _fetch(first)
    print(json.dumps({"count": count, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
