"""The sink that is exactly once, with Spark: retried tasks, failed writes, and a commit() that dies."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq.errors import ConfigError
from metamq.spark_consumers.sink.checkpoint import JUST_S, checkpoint_id
from metamq.spark_consumers.sink.decision_store import DecisionStore, SinkOwner
from metamq.spark_consumers.sink.exact_sink import refuse_half_done
from metamq.spark_consumers.sink.sink_client import SinkClient, sink_client
from metamq.spark_consumers.sink.sink_options import parse_sink_options
from metamq.testing import Cluster
from tests.spark.conftest import new_topic, send
from tests.spark.drivers import Driver, closing_clients, next_name
from tests.spark.dying_sink import DyingSource
from tests.spark.test_sink import _failing_once, values, write
from tests.spark.test_stream_source import numbers

EXACTLY = {"delivery": "exactly_once"}


def open_branches(running: Cluster) -> list[Any]:
    with running.admin() as admin:
        return list(admin.transactions().branches)


def test_a_task_that_fails_behind_its_rows_is_run_again_and_each_row_is_there_once(
    spark: Any, running: Cluster, topic: str, tmp_path: Path
) -> None:
    frame = spark.range(0, 40_000, 1, 2).mapInArrow(_failing_once(str(tmp_path / "mark"), 1), "id long")
    write(frame.selectExpr("cast(id as string) value", "cast(id % 9 as string) key"), running, topic=topic, **EXACTLY)
    assert (tmp_path / "mark").exists()
    assert values(running, topic) == Counter(numbers(0, 40_000))
    assert open_branches(running) == []


def test_a_write_that_fails_has_written_nothing(spark: Any, running: Cluster, topic: str) -> None:
    frame = spark.range(0, 10, 1, 2).selectExpr("if(id = 9, null, cast(id as string)) value")
    with pytest.raises(Exception, match="the column 'value' is null in 1 rows"):
        write(frame, running, topic=topic, **EXACTLY)
    assert values(running, topic) == Counter()
    assert open_branches(running) == []
    assert _asked(running, lambda store: store.jobs()) == []


@pytest.mark.timeout(240)
def test_a_query_whose_commit_dies_behind_the_decision_has_written_each_row_once(
    spark: Any, running: Cluster, topic: str, tmp_path: Path
) -> None:
    """The driver's Python worker dies, and Spark calls abort(). See test_killed_driver.py for the driver itself."""
    spark.dataSource.register(DyingSource)
    to = new_topic(running, 3)
    source = spark.readStream.format("metamq").options(
        zookeeper=running.zookeeper, subscribe=topic, startingOffsets="earliest"
    )
    frame = source.load().selectExpr("key", "value")

    def run(format_: str, **options: str) -> None:
        writer = frame.writeStream.format(format_).options(
            zookeeper=running.zookeeper, topic=to, checkpointLocation=str(tmp_path / "checkpoint"), **EXACTLY, **options
        )
        assert writer.trigger(availableNow=True).start().awaitTermination(100)

    send(running, topic, numbers(0, 100), keys=numbers(0, 100))
    mark = tmp_path / "mark"
    with pytest.raises(Exception, match=r"crashed|EOF|exited|Python"):
        run("dying", point="decided", batch="0", worker="dies", mark=str(mark))
    assert mark.exists()
    assert values(running, to) == Counter()
    run("metamq")
    assert values(running, to) == Counter(numbers(0, 100))
    assert open_branches(running) == []


def test_whose_a_batch_is_by_its_checkpoint(spark: Any, running: Cluster, topic: str, tmp_path: Path) -> None:
    """S1-8 e: without a checkpoint batches are counted from 0 again, and read again. One from a backup is behind."""
    to = new_topic(running)
    source = spark.readStream.format("metamq").options(
        zookeeper=running.zookeeper, subscribe=topic, startingOffsets="earliest"
    )

    def run(checkpoint: str, sink_id: str | None) -> None:
        options = {"zookeeper": running.zookeeper, "topic": to}
        if sink_id is not None:
            options |= {"sinkId": sink_id, **EXACTLY}
        writer = source.load().select("value").writeStream.format("metamq").options(**options)
        query = writer.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True).start()
        assert query.awaitTermination(100)

    send(running, topic, numbers(0, 10))
    run("first", f"into-{to}")
    shutil.copytree(tmp_path / "first", tmp_path / "backup")
    send(running, topic, numbers(10, 20))
    run("first", f"into-{to}")
    shutil.copytree(tmp_path / "first", tmp_path / "in-flight")
    (tmp_path / "in-flight" / "commits" / "1").unlink()
    with pytest.raises(Exception, match="batch 1 of this query was written exactly once"):
        run("in-flight", None)
    run("in-flight", f"renamed-{to}")
    assert values(running, to) == Counter(numbers(0, 20)), "another sinkId is no other sink"
    send(running, topic, numbers(20, 30))
    for checkpoint, said in (("second", "was its checkpoint deleted"), ("backup", "decided with other offsets")):
        with pytest.raises(Exception, match=said):
            run(checkpoint, f"into-{to}")
        assert values(running, to) == Counter(numbers(0, 20))
    assert open_branches(running) == []
    assert len(set(_runs(running, checkpoint_id(str(tmp_path / "first"))))) == 4, "of the query, but for 'second'"
    for sink_id, end in ((None, 40), (f"into-{to}", 50), (None, 60)):  # delivery is changed, and changed back
        send(running, topic, numbers(end - 10, end))
        run("first", sink_id)
        assert values(running, to) == Counter(numbers(0, end))
    assert open_branches(running) == []


def _runs(running: Cluster, sink: str) -> tuple[str, ...]:
    known = _asked(running, lambda store: store.sink(sink))
    return tuple(known.state.runs)


def _asked(running: Cluster, ask: Callable[[DecisionStore], Any]) -> Any:
    """What ZooKeeper has of sinks."""
    client = SinkClient(parse_sink_options({"zookeeper": running.zookeeper, **EXACTLY}, streaming=True))
    try:
        return client.background.run(ask(client.committer("any", SinkOwner("any")).store))
    finally:
        client.close()


def test_a_worker_that_is_kept_looks_again_when_a_batch_comes_again(
    running: Cluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least once, then exactly once, then at least once, in one session: that nothing was decided is old then."""
    monkeypatch.setattr("metamq.spark_consumers.sink.sink_client._connected", {})
    query, planned = next_name("query"), tmp_path / "offsets" / "0"
    planned.parent.mkdir()
    planned.touch()
    (tmp_path / "metadata").write_text(f'{{"id":"{query}"}}')
    options = parse_sink_options({"zookeeper": running.zookeeper, "topic": topic}, streaming=True)
    with closing_clients():
        refuse_half_done(options, str(tmp_path))
        driver = Driver(running, topic, query, query)
        driver.commit(0, driver.write(0, ["0"]))
        long_ago_s = time.time() - 2 * JUST_S
        os.utime(planned, times=(long_ago_s, long_ago_s))
        with pytest.raises(ConfigError, match="batch 0 of this query was written exactly once"):
            refuse_half_done(options, str(tmp_path))
    sink_client(options).close()
