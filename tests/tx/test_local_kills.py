"""Transactions over two brokers while clients, brokers and ZooKeeper are killed: each is whole, or is not there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq.testing import cluster
from tests.tx.conftest import Shop

ROUNDS = 8
CLIENT = """
import sys
from metamq import Producer
from metamq.errors import MetamqError
zookeeper, topic, name = sys.argv[1:]
with Producer(zookeeper, batch_bytes=200) as producer:
    for number in range(1_000_000):
        body = f"{name}-{number}".encode()
        try:
            with producer.transaction(timeout_s=5):
                for partition in ("0-0", "1-0", "0-1", "1-1"):
                    producer.send(topic, body, partition=partition)
                    if number % 3 == 0:
                        producer.send(topic, bytes(300), partition=partition)
        except MetamqError as error:
            print("unknown" if error.outcome == "unknown" else "failed", body.decode(), flush=True)
        else:
            print("done", body.decode(), flush=True)
"""


@pytest.fixture
def shop() -> Iterator[Shop]:
    with cluster(brokers=2, branch_grace_ms=700) as running:
        made = Shop(running)
        yield made
        made.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clients_and_brokers_killed_at_random(
    shop: Shop, tmp_path: Path, report_figures: Callable[[str], None]
) -> None:
    seed = int(os.environ.get("METAMQ_SEED") or time.time_ns() % 1_000_000)
    print(f"METAMQ_SEED={seed}")
    dice, topic = random.Random(seed), shop.topic()
    told: Counter[str] = Counter()
    outcomes: dict[bytes, str] = {}
    victims = [None, *shop.cluster.brokers, shop.cluster.zookeeper_server] * (ROUNDS // 4)
    dice.shuffle(victims)
    for number in range(ROUNDS):
        output = tmp_path / f"{number}.out"
        with output.open("wb") as file:
            command = [sys.executable, "-c", CLIENT, shop.cluster.zookeeper, topic, str(number)]
            client = subprocess.Popen(command, stdout=file)
        deadline = time.monotonic() + 120
        while b"done" not in output.read_bytes():
            assert time.monotonic() < deadline
            assert client.poll() is None
            time.sleep(0.02)
        server = victims[number]
        time.sleep(dice.random() * 0.5)  # somewhere in its work
        if server is not None:
            server.kill()
            time.sleep(dice.random() * 0.5)
        client.kill()
        client.wait()
        if server is not None:
            server.restart()
        for line in output.read_text().splitlines():
            what, _space, body = line.partition(" ")
            told[what] += 1
            outcomes[body.encode()] = what
    shop.until_ended()
    found = Counter(value for value in shop.seen(topic) if len(value) < 300)
    assert set(found.values()) == {4}, (seed, {body: times for body, times in found.items() if times != 4})
    for body, what in outcomes.items():
        assert what != "done" or body in found, (seed, body)
        assert what != "failed" or body not in found, (seed, body)
    report_figures(f"{ROUNDS} rounds: {len(found):,} committed, {dict(told)}; METAMQ_SEED={seed}")
