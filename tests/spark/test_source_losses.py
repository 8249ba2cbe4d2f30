"""Streaming queries whose messages go away under them: a log's start that passes the reader, a topic made anew."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import wait_until
from tests.spark.test_stream_source import Query, numbers

PADDING = b" " * 200
RETAINED = 4096


@pytest.fixture(scope="module")
def retaining() -> Iterator[Cluster]:
    """A cluster whose broker looks after retention all the time."""
    with cluster(retention_check_s=0.1) as started:
        yield started


class GatedQuery(Query):
    """Each batch is planned, and read once the gate is open; or read, and the next one planned once it is open."""

    def __init__(self, *arguments: Any, reads_first: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reads_first = reads_first
        self.gate = threading.Event()
        self.planned = threading.Event()

    def _keep(self, frame: Any, batch_id: int) -> None:
        if self._reads_first:
            super()._keep(frame, batch_id)
        self.planned.set()
        assert self.gate.wait(60)
        if not self._reads_first:
            super()._keep(frame, batch_id)

    def numbers(self) -> Counter[bytes]:
        """What it has read, without the padding."""
        return Counter(value.strip() for value in self.seen().elements())


def new_topic(running: Cluster, name: str) -> str:
    """Of small segments, and no retention yet."""
    running.create_topic(name, partitions=1, segment_bytes=1024)
    return name


def fill(running: Cluster, topic: str, first: int, end: int) -> None:
    """Messages one to a batch, so that segments end where they can."""
    with running.producer() as producer:
        for number in range(first, end):
            producer.send(topic, b"%d" % number + PADDING).result(20)


def retained(running: Cluster, topic: str, beyond: int) -> int:
    """Where the log starts, once retention has passed `beyond` and removes no more."""
    with running.admin() as admin:
        admin.alter(topic, retention_bytes=RETAINED)
        looks: list[int] = []

        def is_settled() -> bool:
            looks.append(admin.describe_topic(topic).partitions[0].start_offset or 0)
            return looks[-1] > beyond and len(looks) > 30 and len(set(looks[-30:])) == 1

        wait_until(is_settled, 30, "retention")
    return looks[-1]


@contextlib.contextmanager
def behind_its_first_batch(
    spark: Any, running: Cluster, place: Path, **options: Any
) -> Iterator[tuple[GatedQuery, Any]]:
    """A query that has read ten messages, and plans no other batch before its gate is open."""
    fill(running, options["subscribe"], 0, 10)
    query = GatedQuery(spark, running, place / "checkpoint", reads_first=True, **options)
    active = query.start()
    try:
        wait_until(lambda: query.batches or active.exception() is not None, 60, "the first batch")
        yield query, active
    finally:
        query.gate.set()
        active.stop()


def test_a_log_whose_start_passes_a_batch_that_is_planned(spark: Any, retaining: Cluster, tmp_path: Path) -> None:
    """The tasks find out: an error, or what is left, as the query wants it."""
    topic = new_topic(retaining, "planned")
    fill(retaining, topic, 0, 60)
    query = GatedQuery(spark, retaining, tmp_path / "checkpoint", subscribe=topic)
    active = query.start()
    try:
        wait_until(lambda: query.planned.is_set() or active.exception() is not None, 60, "a batch")
        start = retained(retaining, topic, 5)
        query.gate.set()
        with pytest.raises(Exception, match="failOnDataLoss=false"):
            active.awaitTermination(60)
    finally:
        active.stop()
    assert query.seen() == Counter()
    query.options["failOnDataLoss"] = "false"
    query.run()
    assert query.numbers() == Counter(numbers(start, 60))


@pytest.mark.parametrize("fails", [True, False])
def test_a_log_whose_start_passes_a_query_between_two_batches(
    spark: Any, retaining: Cluster, tmp_path: Path, fails: bool
) -> None:
    """The driver finds out: the query ends, or goes on with what is left."""
    topic = new_topic(retaining, f"between-{fails}")
    with behind_its_first_batch(spark, retaining, tmp_path, subscribe=topic, failOnDataLoss=fails) as (query, active):
        fill(retaining, topic, 10, 80)
        start = retained(retaining, topic, 10)
        query.gate.set()
        if fails:
            with pytest.raises(Exception, match=rf"{start} to 80, not 10(?s:.*)failOnDataLoss=false"):
                active.awaitTermination(60)
            assert query.numbers() == Counter(numbers(0, 10))
        else:
            wait_until(lambda: len(query.batches) == 2 or active.exception() is not None, 60, "what is left")
            assert query.numbers() == Counter(numbers(0, 10) + numbers(start, 80))


@pytest.mark.parametrize("fails", [True, False])
def test_a_topic_that_is_made_anew_under_a_running_query(
    spark: Any, retaining: Cluster, tmp_path: Path, fails: bool
) -> None:
    topic = new_topic(retaining, f"anew-{fails}")
    with behind_its_first_batch(spark, retaining, tmp_path, subscribe=topic, failOnDataLoss=fails) as (query, active):
        with retaining.admin() as admin:
            admin.delete(topic)
        new_topic(retaining, topic)
        fill(retaining, topic, 100, 120)  # past where the query is in its predecessor
        query.gate.set()
        if fails:
            with pytest.raises(Exception, match=f"topic '{topic}' was deleted and created again"):
                active.awaitTermination(60)
            assert query.numbers() == Counter(numbers(0, 10))
        else:
            wait_until(lambda: len(query.batches) == 2 or active.exception() is not None, 60, "the new topic's")
            assert query.numbers() == Counter(numbers(0, 10) + numbers(100, 120))
