"""Drivers of an exactly-once sink, and their tasks, as Spark would call them; without Spark."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest

from metamq.client.producer.batching import Batcher
from metamq.spark_consumers.sink.committing import Committer
from metamq.spark_consumers.sink.decision_store import SinkOwner
from metamq.spark_consumers.sink.decisions import JOB, BranchName, name_of, new_attempt, new_job
from metamq.spark_consumers.sink.sink_client import SinkClient
from metamq.spark_consumers.sink.sink_options import parse_sink_options
from metamq.testing import Cluster
from metamq.wire.xa import Verb
from tests.parts import values_to_end

QUERY = "3b5bd2a1-8e9a-4b52-9d63-6f2c5d0b7a11"
_numbers = itertools.count()
_clients: list[SinkClient] = []

Attempts = dict[str, Mapping[int, str]]


def next_name(prefix: str) -> str:
    """That nobody has had."""
    return f"{prefix}-{next(_numbers)}"


@contextlib.contextmanager
def closing_clients() -> Iterator[None]:
    """Those of drivers that are made in the block."""
    try:
        yield
    finally:
        while _clients:
            _clients.pop().close()


class Died(Exception):
    """The driver does nothing more."""


class Driver:
    """A driver and its tasks, as Spark would call them."""

    def __init__(self, running: Cluster, topic: str, sink: str, identity: str = QUERY, **options: str) -> None:
        given = {"zookeeper": running.zookeeper, "topic": topic, "delivery": "exactly_once", **options}
        self.client = SinkClient(parse_sink_options(given, streaming=True))
        _clients.append(self.client)
        self.sink = sink
        self.is_job = sink.startswith(JOB)
        self.owner = SinkOwner(sink) if self.is_job else SinkOwner(identity, f"run-{next(_numbers)}")

    def write(self, batch_id: int, values: list[str], tasks: int = 2) -> Attempts:
        """What successful tasks hand to the driver."""
        committer = self.committer()
        self.client.background.run(committer.touch() if self.is_job else committer.claim())
        attempts: Attempts = {}
        for task in range(tasks):
            name = BranchName(self.sink, batch_id, new_attempt(task, 0))
            branches = self.client.background.run(self.client.branches(name))
            batcher = Batcher(self.client.options.topic, self.client.topic)
            some = pa.array(values[task::tasks], pa.string())
            rows = pa.record_batch({"value": some, "key": some})
            branches.add((one, self.client.topic(one.target.topic)) for one in [*batcher.add(rows), *batcher.rest()])
            histories = self.client.background.run(branches.prepare())
            if histories:
                attempts[name.attempt] = histories
        return attempts

    def committer(self) -> Committer:
        return self.client.committer(self.sink, self.owner)

    def begin_job(self) -> None:
        self.client.background.run(self.committer().begin_job())

    def commit(self, batch_id: int, attempts: Attempts, committer: Committer | None = None, content: str = "") -> None:
        self.client.background.run((committer or self.committer()).commit(batch_id, attempts, content))

    def abort(self, batch_id: int, attempts: Attempts) -> None:
        self.client.background.run(self.committer().abort(batch_id, attempts))


def texts(first: int, end: int, tag: str = "") -> list[str]:
    return [f"{tag}{number}" for number in range(first, end)]


def seen(running: Cluster, topic: str) -> Counter[str]:
    with running.consumer(topics=[topic], start="earliest", idle_timeout_s=0.1) as consumer:
        return Counter(value.decode() for value in values_to_end(consumer))


def check(running: Cluster, topic: str, sink: str, values: list[str]) -> None:
    """Each once, and no branch of the sink is left."""
    found, wanted = seen(running, topic), Counter(values)
    assert found == wanted, f"missing: {dict(wanted - found)}, too many: {dict(found - wanted)}"
    assert left_open(running, sink) == []


def dying(committer: Committer, point: str, monkeypatch: pytest.MonkeyPatch) -> Committer:
    """It dies at a point of commit()."""
    decide, client = committer.store.decide, "metamq.spark_consumers.sink.branch_ends.TxClient"

    async def dying_decide(*arguments: Any) -> Any:
        if point == "prepared":
            raise Died
        await decide(*arguments)
        raise Died

    from metamq.client.net.branches import TxClient

    class DyingClient(TxClient):
        commits = 0

        async def ask(self, branch: Any, verbs: Any, *rest: Any, **fields: Any) -> Any:
            if verbs[-1] is Verb.COMMIT:
                DyingClient.commits += 1
                if DyingClient.commits > 1:
                    raise Died
            return await super().ask(branch, verbs, *rest, **fields)

        async def branches(self, broker_id: int, **_which: bool) -> Any:
            raise Died

    class DyingAtTheSweep(TxClient):
        branches = DyingClient.branches

    if point in ("prepared", "decided"):
        monkeypatch.setattr(committer.store, "decide", dying_decide)
    elif point in ("one committed", "all committed"):
        monkeypatch.setattr(client, DyingClient if point == "one committed" else DyingAtTheSweep)
    return committer


def new_jobs(running: Cluster, topic: str, count: int, **options: str) -> list[Driver]:
    jobs = [Driver(running, topic, new_job(), **options) for _ in range(count)]
    for one in jobs:
        one.begin_job()
    return jobs


def nodes(driver: Driver) -> list[str]:
    return driver.client.background.run(driver.committer().store.jobs())


def left_open(running: Cluster, sink: str) -> list[Any]:
    with running.admin() as admin:
        return [one for one in admin.transactions().branches if (name_of(one.xid) or ("",))[0] == sink]
