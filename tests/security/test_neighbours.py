"""A client without rights that does its worst: what others notice of it."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from metamq import Admin
from metamq.errors import ProtocolError
from metamq.security.certificates import Authority
from metamq.testing import Cluster
from metamq.wire.commands import (
    LATEST,
    Command,
    Delegate,
    DelegatedRight,
    Get,
    GetPartition,
    OffsetsEntry,
    PutEntry,
    Stats,
    TopicChange,
    Tx,
)
from metamq.wire.limits import REQUEST_ENTRIES_MAX
from metamq.wire.xa import Verb
from tests.broker.front_door.conftest import MEBIBYTE
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import secured
from tests.security.test_fuzz_secure import TlsClient

ROOT = Path(__file__).resolve().parents[2]
EVERY_S = 0.02
P99_S = 1.0
REQUESTS_BYTES = ANSWERS_BYTES = 64 * MEBIBYTE
THREADS = 8
KEPT_MAX = 100
"""Connections that the client leaves open, whatever state they are in."""


class Neighbour:
    """Runs in a process of its own. Each method is one thing that it does on a new connection."""

    def __init__(self, port: int, folder: str, name: str, seed: int) -> None:
        self._port, self._folder, self._name = port, Path(folder), name
        self._chance = random.Random(seed)
        self._kept: list[TlsClient] = []
        self.begun = Counter[str]()

    def run(self, duration_s: float) -> None:
        """Acts in THREADS threads at a time, and prints how often each act was begun."""
        with ThreadPoolExecutor(THREADS) as threads:
            for done in [threads.submit(self._act, time.monotonic() + duration_s) for _ in range(THREADS)]:
                done.result()
        for client in self._kept:
            client.socket.close()
        print(json.dumps(self.begun))

    def _act(self, deadline_s: float) -> None:
        due: list[str] = []
        while time.monotonic() < deadline_s:
            due = due or self._chance.sample(ACTS, len(ACTS))
            self.begun[due[-1]] += 1
            with contextlib.suppress(OSError, EOFError, ProtocolError):
                getattr(self, due.pop())(self._client())

    def _client(self) -> TlsClient:
        client = TlsClient(self._port, self._folder, self._name)
        client.socket.settimeout(2.0)
        self._kept.append(client)
        if len(self._kept) > KEPT_MAX:
            self._kept.pop(self._chance.randrange(KEPT_MAX)).socket.close()
        client.greeted()
        return client

    def act_look_up(self, client: TlsClient) -> None:
        entries = [OffsetsEntry(f"none-{number}", "", 0, LATEST) for number in range(REQUEST_ENTRIES_MAX)]
        for _ in range(3):
            client.ask(Command.OFFSETS, entries)

    def act_look_up_and_read_nothing(self, client: TlsClient) -> None:
        entries = [OffsetsEntry(f"none-{number}", "", 0, LATEST) for number in range(REQUEST_ENTRIES_MAX)]
        client.socket.settimeout(0.5)
        for _ in range(100):
            client.request(Command.OFFSETS, entries)

    def act_put(self, client: TlsClient) -> None:
        body = self._chance.randbytes(16 * MEBIBYTE)
        client.ask(Command.PUT, [PutEntry("honest", "", 0, len(body))], [body])

    def act_put_half(self, client: TlsClient) -> None:
        body = self._chance.randbytes(16 * MEBIBYTE)
        _opaque, frame = client.frame(Command.PUT, [PutEntry("honest", "", 0, len(body))], [body])
        client.send(frame[: len(frame) // 2])

    def act_ask_at_once(self, client: TlsClient) -> None:
        client.send(b"".join(client.frame(Command.STATS, Stats("", 0))[1] for _ in range(1000)))
        for _ in range(1000):
            client.answer()

    def act_begin(self, client: TlsClient) -> None:
        for number in range(100):
            client.ask(Command.TX, Tx([1, b"%d" % number, b"b"], 0, "s", [Verb.START], 86_400_000, 0, 0, []))

    def act_change(self, client: TlsClient) -> None:
        for number in range(50):
            client.ask(Command.TOPIC, TopicChange(f"t-{number}", b"{}" * 10_000, -1))

    def act_delegate(self, client: TlsClient) -> None:
        for number in range(50):
            rights = [DelegatedRight("read", "*")]
            client.ask(Command.DELEGATE, Delegate(f"t-{number}", rights, 60, b"s" * 16, b"a" * 64, b"b" * 64, 4096))

    def act_park(self, client: TlsClient) -> None:
        opened = [GetPartition(handle, f"none-{handle}", "", 0) for handle in range(1, REQUEST_ENTRIES_MAX)]
        client.ask(Command.GET, Get(300_000, 1, MEBIBYTE, MEBIBYTE, opened, [(one.handle, 0) for one in opened], []))

    def act_shake_hands(self, client: TlsClient) -> None:
        for _ in range(20):
            TlsClient(self._port, self._folder, self._name).socket.close()


ACTS = [name for name in vars(Neighbour) if name.startswith("act_")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seconds", "p99_max_s"),
    [pytest.param(20, 10.0, marks=pytest.mark.slow), pytest.param(600, P99_S, marks=pytest.mark.long)],
    ids=["20", "600"],
)
def test_others_hardly_notice_a_client_without_rights(
    authority: Authority, name: str, seconds: int, p99_max_s: float, report_figures: Callable[[str], None]
) -> None:
    """The short run shares the machine with other tests, so it finds only messages that wait their turn too long."""
    seed = random.randrange(2**32)
    security = secured(authority.folder, zookeeper_tls=False)
    with (
        cluster(security=security, request_memory_bytes=REQUESTS_BYTES, answer_memory_bytes=ANSWERS_BYTES) as running,
        running.admin() as admin,
    ):
        running.add_slave()
        running.create_topic("honest", partitions=1, replication="sync")
        wait_until(lambda: in_sync(admin) == [0, 1], what="a slave in sync")
        broker = psutil.Process(running.broker.pid)
        with running.producer(linger_ms=0) as producer, neighbour(running, authority, name, seed, seconds) as process:
            producer.send("honest", b"first").result(SLOW_S)
            rss, peak, latencies_s = broker.memory_info().rss, 0, []
            due_s = time.monotonic()
            while process.poll() is None:
                due_s += EVERY_S
                time.sleep(max(due_s - time.monotonic(), 0))
                producer.send("honest", b"%d" % len(latencies_s)).result(SLOW_S)
                latencies_s.append(time.monotonic() - due_s)
                peak = max(peak, broker.memory_info().rss)
                if len(latencies_s) % 50 == 0:
                    assert in_sync(admin) == [0, 1], f"seed {seed}"
            assert process.stdout is not None
            begun = json.loads(process.stdout.read())
        assert process.returncode == 0, f"seed {seed}"
        assert begun.keys() == {*ACTS}, begun
        log = running.broker.log_path.read_text()
    p99_s = sorted(latencies_s)[len(latencies_s) * 99 // 100]
    grown = (peak - rss) / MEBIBYTE
    report_figures(f"{begun}")
    report_figures(f"seed {seed}: p99 {p99_s * 1000:.0f} ms of {len(latencies_s):,} messages, {grown:.0f} MiB more")
    assert p99_s <= p99_max_s, f"seed {seed}"
    # The budgets, and twice that of answers up to their ceiling; twice all of it, for what malloc does not give back.
    assert peak - rss <= 2 * (REQUESTS_BYTES + 2 * ANSWERS_BYTES), f"seed {seed}"
    assert "now in sync: replica 0\n" not in log
    assert "Traceback" not in log


def in_sync(admin: Admin) -> list[int]:
    (broker,) = admin.replicas().values()
    return [replica.replica for replica in broker.replicas if replica.in_sync]


def neighbour(running: Cluster, authority: Authority, name: str, seed: int, seconds: int) -> subprocess.Popen[bytes]:
    given = running.broker.port, str(authority.folder), name, seed
    program = f"from tests.security.test_neighbours import Neighbour\nNeighbour{given}.run({seconds})"
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
