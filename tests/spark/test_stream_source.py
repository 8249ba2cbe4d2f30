"""The streaming source, with Spark, ZooKeeper and a broker."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq.testing import Cluster
from tests.parts import wait_until
from tests.spark.conftest import new_topic, send


class Query:
    """A streaming query that keeps what it read, batch by batch; it can be run again on its checkpoint."""

    def __init__(self, spark: Any, running: Cluster, place: Path, **options: Any) -> None:
        self.batches: list[list[bytes]] = []
        self._spark = spark
        self._place = place
        self.options = {"zookeeper": running.zookeeper, "startingOffsets": "earliest", **options}

    def _keep(self, frame: Any, _batch_id: int) -> None:
        self.batches.append([bytes(row.value) for row in frame.select("value").collect()])

    def start(self, **trigger: Any) -> Any:
        frame = self._spark.readStream.format("metamq").options(**self.options).load()
        writer = frame.writeStream.foreachBatch(self._keep).option("checkpointLocation", str(self._place))
        return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()

    def run(self, **trigger: Any) -> None:
        query = self.start(**(trigger or {"availableNow": True}))
        assert query.awaitTermination(100)

    def seen(self) -> Counter[bytes]:
        return Counter(value for batch in self.batches for value in batch)

    def forget_commit(self) -> None:
        """As if the driver had been killed before the last batch was noted as done."""
        last = max((self._place / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        last.unlink()
        for beside in (last.parent / f".{last.name}.crc",):
            beside.unlink(missing_ok=True)


@pytest.fixture
def make_query(spark: Any, running: Cluster, tmp_path: Path) -> Callable[..., Query]:
    return lambda **options: Query(spark, running, tmp_path / "checkpoint", **options)


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def test_available_now_reads_what_there_is_in_bounded_batches_and_goes_on_later(
    running: Cluster, topic: str, make_query: Callable[..., Query]
) -> None:
    send(running, topic, numbers(0, 1000))
    query = make_query(subscribe=topic, maxOffsetsPerTrigger=400, groupId=f"now-{topic}")
    query.run()
    assert query.seen() == Counter(numbers(0, 1000))
    with running.admin() as admin:
        assert {one.lag for one in admin.describe_group(f"now-{topic}").partitions} == {0}, "published by its end"
    assert len(query.batches) == 3
    assert max(map(len, query.batches)) <= 402
    send(running, topic, numbers(1000, 1100))
    query.run()
    assert query.seen() == Counter(numbers(0, 1100))


def test_a_batch_that_is_run_again_is_the_same(running: Cluster, topic: str, make_query: Callable[..., Query]) -> None:
    """Also the first one of a query that begins at the end, which has moved on meanwhile."""
    send(running, topic, numbers(0, 10))
    query = make_query(subscribe=topic, startingOffsets="latest")
    query.run()
    assert query.seen() == Counter()
    query.forget_commit()
    send(running, topic, numbers(10, 30))
    query.run(once=True)
    query.run()
    assert query.seen() == Counter(numbers(10, 30))
    before = [sorted(batch) for batch in query.batches if batch]
    query.forget_commit()
    send(running, topic, numbers(30, 40))
    query.run()
    after = [sorted(batch) for batch in query.batches if batch]
    assert after[len(before) : len(before) + 1] == before[-1:]
    assert query.seen() == Counter(numbers(10, 40)) + Counter(before[-1])


def test_a_running_query_follows_new_messages_and_partitions_and_shows_its_lag(
    running: Cluster, topic: str, make_query: Callable[..., Query]
) -> None:
    send(running, topic, numbers(0, 10))
    query = make_query(subscribe=topic, groupId=f"query-{topic}")
    active = query.start()
    try:
        wait_until(lambda: query.seen() == Counter(numbers(0, 10)), 60)
        with running.admin() as admin:
            admin.alter(topic, partitions=4)
        send(running, topic, numbers(10, 200))
        wait_until(lambda: query.seen() == Counter(numbers(0, 200)) or active.exception() is not None, 60)
        assert active.exception() is None
        send(running, topic, numbers(200, 201))
        wait_until(lambda: query.seen() == Counter(numbers(0, 201)), 60)

        def published() -> bool:
            with running.admin() as admin:
                found = admin.describe_group(f"query-{topic}").partitions
            return sum(one.committed or 0 for one in found) == 201 and len(found) == 4

        wait_until(published, 30, "the published progress")
        (source,) = active.lastProgress["sources"]
        assert sum(json.loads(source["latestOffset"])[topic].values()) == 201
    finally:
        active.stop()


def test_a_listener_tells_how_far_a_query_is_behind(spark: Any, running: Cluster, tmp_path: Path) -> None:
    from metamq.spark_consumers import LagListener, QueryLag  # an ordinary run imports this file without pyspark

    topic = new_topic(running, 1)
    send(running, topic, numbers(0, 100))
    told: list[QueryLag] = []
    listener = LagListener(on_lag=told.append)
    spark.streams.addListener(listener)
    try:
        query = Query(spark, running, tmp_path / "checkpoint", subscribe=topic, maxOffsetsPerTrigger=40)
        query.run()
        wait_until(lambda: len(told) >= 3, what="the progress of three batches")
        assert [lag.messages for lag in told[:3]] == [60, 20, 0]
        assert [lag.batch_id for lag in told[:3]] == [0, 1, 2]
        assert told[0].partitions == {(topic, "0-0"): 60}
        wait_until(lambda: listener.queries() == [], what="the word that the query has ended")
        active = query.start()
        try:
            send(running, topic, numbers(100, 110))
            wait_until(lambda: any(lag.run_id == str(active.runId) for lag in listener.queries()), 60)
            (lag,) = listener.queries()
            assert (lag.query_id, lag.messages) == (told[0].query_id, 0)
        finally:
            active.stop()
    finally:
        spark.streams.removeListener(listener)


def test_a_wrong_option_is_told_before_anything_runs(topic: str, make_query: Callable[..., Query]) -> None:
    with pytest.raises(Exception, match=r"option 'endingOffsets' is for batch queries") as refused:
        make_query(subscribe=topic, endingOffsets="latest").run()
    assert "UnboundLocalError" not in str(refused.value)
    with pytest.raises(Exception, match="topic 'no-such-topic' does not exist"):
        make_query(subscribe="no-such-topic").run()
