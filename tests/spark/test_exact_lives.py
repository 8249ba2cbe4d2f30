"""The lives of a query and of batch writes by chance: drivers die, wake up late, and run again what Spark would."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from metamq.spark_consumers.sink.decisions import NotOurs
from metamq.testing import Cluster
from tests.spark.drivers import Attempts, Died, Driver, check, closing_clients, dying, next_name

STEPS = 40
POINTS = ("prepared", "decided", "one committed", "all committed")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    with closing_clients():
        yield


class Paused(NamedTuple):
    """A driver that does not know that its time is over, and what it was about to do."""

    driver: Driver
    batch_id: int
    attempts: Attempts


@pytest.mark.slow
def test_each_row_is_there_once_whatever_becomes_of_the_drivers(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(os.environ.get("METAMQ_SEED", random.randrange(1 << 32)))
    print(f"METAMQ_SEED={seed}")
    chance = random.Random(seed)
    topic, sink = next_name("lives"), next_name("sink")
    two.create_topic(topic, partitions=4)
    driver, batch_id, paused = Driver(two, topic, sink), 0, list[Paused]()
    planned: dict[int, list[str]] = {}
    for _ in range(STEPS):
        values = planned.setdefault(batch_id, [f"{batch_id}.{row}" for row in range(chance.randrange(8))])
        attempts = driver.write(batch_id, chance.sample(values, len(values)), tasks=chance.choice((1, 2, 3)))
        what = chance.choice(("goes well", "goes well", "dies", "is paused", "dies before Spark's log"))
        if what == "dies":
            with monkeypatch.context() as patched, contextlib.suppress(Died):
                committer = dying(driver.committer(), chance.choice(POINTS), patched)
                driver.commit(batch_id, attempts, committer, f"to {batch_id}")
            if chance.random() < 0.5:
                driver.abort(batch_id, attempts)
        elif what != "is paused":
            driver.commit(batch_id, attempts, content=f"to {batch_id}")
        if what == "goes well":
            batch_id += 1
        else:
            paused.append(Paused(driver, batch_id, attempts))
            driver = Driver(two, topic, sink)
        if paused and chance.random() < 0.4:
            _wake(chance, paused)
    driver.commit(batch_id, driver.write(batch_id, planned.setdefault(batch_id, ["last"])), content=f"to {batch_id}")
    driver.commit(batch_id + 1, driver.write(batch_id + 1, ["end"]))
    check(two, topic, sink, [*itertools.chain(*planned.values()), "end"])


def _wake(chance: random.Random, paused: list[Paused]) -> None:
    """It goes on where it was, before the one that has followed it, or after."""
    one = chance.choice(paused)
    if chance.random() < 0.5:
        one.driver.abort(one.batch_id, one.attempts)
        return
    try:
        one.driver.commit(one.batch_id, one.attempts, content=f"to {one.batch_id}")
    except NotOurs:
        one.driver.abort(one.batch_id, one.attempts)
