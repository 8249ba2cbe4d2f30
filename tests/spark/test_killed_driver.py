"""A driver that is killed with -9 at each point of a batch, JVM and all, and started anew on its checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from metamq.testing import Cluster
from tests.parts import wait_until
from tests.spark.conftest import new_topic, send
from tests.spark.dying_sink import POINTS
from tests.spark.test_exact_sink import open_branches
from tests.spark.test_sink import values
from tests.spark.test_stream_source import numbers

ROOT = Path(__file__).resolve().parent.parent.parent
A_BATCH = 40
MESSAGES = A_BATCH * (len(POINTS) + 2)

PROGRAM = """
import sys
from metamq.spark_consumers import session
from tests.spark.dying_sink import DyingSource

place, zookeeper, source, sink, a_batch, point, batch = sys.argv[1:]
conf = {"spark.ui.enabled": "false", "spark.sql.warehouse.dir": f"{place}/tables", "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = session("killed", "local[2,4]", conf)
spark.dataSource.register(DyingSource)
options = {"zookeeper": zookeeper, "subscribe": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": a_batch}
frame = spark.readStream.format("metamq").options(**options).load().select("key", "value")
options = {"zookeeper": zookeeper, "topic": sink, "delivery": "exactly_once"}
if point:
    options |= {"point": point, "batch": batch, "mark": f"{place}/{point}"}
writer = frame.writeStream.format("dying" if point else "metamq").options(**options)
query = writer.option("checkpointLocation", f"{place}/checkpoint").trigger(availableNow=True).start()
query.awaitTermination()
print("done", flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_at_each_point_of_a_batch_has_written_each_row_once(
    running: Cluster, tmp_path: Path
) -> None:
    """Each at a batch of its own, behind that which the one before was killed at."""
    source, sink = new_topic(running), new_topic(running, 3)
    send(running, source, numbers(0, MESSAGES), keys=numbers(0, MESSAGES))
    stored = 0
    for number, point in enumerate(POINTS):
        driver = _started(tmp_path, running, source, sink, point, number)
        try:
            wait_until(partial(_is_over, driver, tmp_path / point), 120, point)
            assert (tmp_path / point).exists(), (tmp_path / "log").read_text()[-3000:]
        finally:
            _kill(driver)
        assert len(open_branches(running)) >= (point != "committed")
        found = values(running, sink)
        assert max(found.values(), default=1) == 1
        batches = number + (point == "committed")
        assert abs(sum(found.values()) - A_BATCH * batches) < (A_BATCH if point == "one committed" else 5)
        assert sum(found.values()) >= stored
        stored = sum(found.values())
    last = _started(tmp_path, running, source, sink, "", 0)
    try:
        out, _ = last.communicate(timeout=300)
    finally:
        _kill(last)
    assert out.endswith("done\n"), out
    assert values(running, sink) == Counter(numbers(0, MESSAGES))
    assert open_branches(running) == []


def _started(place: Path, running: Cluster, source: str, sink: str, point: str, batch: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    arguments = [str(place), running.zookeeper, source, sink, str(A_BATCH), point, str(batch)]
    with (place / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip


def _is_over(driver: subprocess.Popen[str], mark: Path) -> bool:
    """Whether it has come to its point, or has ended before."""
    return mark.exists() or driver.poll() is not None


def _kill(driver: subprocess.Popen[str]) -> None:
    """With its JVM; what that has started ends when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    if driver.stdout is not None:
        driver.stdout.close()
