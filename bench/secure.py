"""Security beside none, in turns: the cost of TLS, the time of new connections, the share of rights in a PUT."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from flushed import until_flushed
from settle import settle

from metamq import SecurityConfig
from metamq.broker.front_door import authorisation
from metamq.client.net.transport import BrokerConnection
from metamq.security.certificates import make_all
from metamq.security.config import ADMIN
from metamq.security.rights import WRITE, Access, Resource, Rule, RuleTable
from metamq.security.tls import client_security
from metamq.testing import Cluster, cluster
from metamq.wire.commands import Command

BYTES = 512 * 1024 * 1024
VALUE_BYTES = 1024
CONNECTIONS = 1000
OPENING_AT_ONCE = 20
SMALL_PUTS = 3000
RULES = 100
CHECKS = 100_000
USER = "etl"
SIDES = ("broker", "client")


def measure(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures everything. Figures are medians over the rounds; ratios are of one round."""
    with tempfile.TemporaryDirectory() as folder, both(Path(folder)) as (plain, secure, user):
        found: list[dict[str, float]] = []
        for number in range(rounds):
            without, with_tls = traffic(plain), traffic(secure)
            one = {f"plain_{name}": value for name, value in without.items()}
            one |= {f"tls_{name}": value for name, value in with_tls.items()}
            for way in ("produce", "consume"):
                one[f"{way}_ratio"] = with_tls[f"{way}_bytes_per_s"] / without[f"{way}_bytes_per_s"]
                for side in SIDES:
                    name = f"{way}_{side}_s_per_gb"
                    one[f"added_{name}"] = with_tls[name] - without[name]
            one["certificate_connections_s"] = connections(secure, secure.security)
            one["password_connections_s"] = connections(secure, user)
            one["rights_to_put"] = rights_s() / put_s(plain)
            found.append(one)
            say(f"round {number + 1}: " + ", ".join(f"{name} {value:.4g}" for name, value in one.items()))
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


@contextlib.contextmanager
def both(folder: Path) -> Iterator[tuple[Cluster, Cluster, SecurityConfig]]:
    """A cluster without security and one with it, and the settings of a user who logs in by password."""
    make_all(folder / "security", ("localhost", "127.0.0.1"))
    security = SecurityConfig(dir=str(folder / "security"), role=ADMIN)
    password = folder / "password"
    password.write_text("correct horse battery staple\n")
    password.chmod(0o600)
    user = SecurityConfig(ca=str(folder / "security/ca.crt"), user=USER, password_file=str(password))
    with cluster(folder=folder / "plain") as plain, cluster(folder=folder / "secure", security=security) as secure:
        with secure.admin() as admin:
            admin.set_user(USER, password.read_text().strip())
        yield plain, secure, user


def processor_s(pid: int) -> float:
    """Returns the processor seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def traffic(running: Cluster) -> dict[str, float]:
    """Sends and reads BYTES in messages of 1 KiB, in requests of about 1 MiB, through sockets."""
    topic = f"bench-security-{time.monotonic_ns()}"
    running.create_topic(topic, partitions=4)
    some = [os.urandom(VALUE_BYTES) for _ in range(1000)]
    values = [some[number % len(some)] for number in range(BYTES // VALUE_BYTES)]
    found: dict[str, float] = {}
    with running.producer() as producer:
        producer.send(topic, b"warm").result()
        settle(BYTES)
        with measured(running, "produce", found):
            producer.send_many(topic, values).result()
    until_flushed(running.broker)
    left = len(values)
    with running.consumer(topics=[topic], idle_timeout_s=10) as consumer, measured(running, "consume", found):
        for batch in consumer.batches():
            left -= len(batch)
            if left <= 0:
                break
    with running.admin() as admin:
        admin.delete(topic)
    return found


@contextlib.contextmanager
def measured(running: Cluster, what: str, found: dict[str, float]) -> Iterator[None]:
    """Adds bytes per second, and the processor seconds per GB of the broker and of this process."""
    sides = dict(zip(SIDES, (running.broker.pid, os.getpid()), strict=True))
    before = {side: processor_s(pid) for side, pid in sides.items()}
    began = time.perf_counter()
    yield
    found[f"{what}_bytes_per_s"] = BYTES / (time.perf_counter() - began)
    for side, pid in sides.items():
        found[f"{what}_{side}_s_per_gb"] = (processor_s(pid) - before[side]) / (BYTES / 1e9)


def connections(running: Cluster, config: SecurityConfig) -> float:
    """Returns the seconds for CONNECTIONS new connections, some at once, from this one process."""

    async def open_all() -> None:
        slots = asyncio.Semaphore(OPENING_AT_ONCE)
        security = client_security(config).brokers

        async def open_one() -> BrokerConnection:
            async with slots:
                return await BrokerConnection.open("127.0.0.1", running.broker.port, security=security, timeout_s=30)

        for connection in await asyncio.gather(*(open_one() for _ in range(CONNECTIONS))):
            await connection.close()

    began = time.perf_counter()
    asyncio.run(open_all())
    return time.perf_counter() - began


def put_s(running: Cluster) -> float:
    """Returns the broker's processor seconds for a PUT of one small message."""
    topic = f"bench-put-{time.monotonic_ns()}"
    running.create_topic(topic, partitions=1)
    with running.producer(linger_ms=0) as producer:
        producer.send(topic, b"warm").result()
        before = processor_s(running.broker.pid)
        for number in range(SMALL_PUTS):
            producer.send(topic, b"%100d" % number).result()
        return (processor_s(running.broker.pid) - before) / SMALL_PUTS


def rights_s() -> float:
    """Returns the seconds that a broker takes to check the rights of a PUT of one batch, by a hundred rules."""
    rules = [Rule("allow", USER, WRITE, Resource("topic", f"orders-{number}-*")) for number in range(RULES)]
    access = Access(USER, RuleTable(rules))
    topic = f"orders-{RULES - 1}-new"
    began = time.perf_counter()
    for _ in range(CHECKS):
        authorisation.check(Command.PUT, access)
        access.check_topic(WRITE, topic)
        access.check_producer(access.producer_prefix << 40, topic)
    return (time.perf_counter() - began) / CHECKS
