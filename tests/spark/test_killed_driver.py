"""A driver that is killed with -9 again and again, JVM and all, and started anew on its checkpoint."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from metamq.testing import Cluster
from tests.parts import wait_until
from tests.spark.conftest import new_topic, send
from tests.spark.test_exact_sink import open_branches
from tests.spark.test_sink import values
from tests.spark.test_stream_source import numbers

ROOT = Path(__file__).resolve().parent.parent.parent
KILLS = 4
MESSAGES = 2000

PROGRAM = """
import sys
from metamq.spark_consumers import session

place, zookeeper, source, sink = sys.argv[1:]
conf = {"spark.ui.enabled": "false", "spark.sql.warehouse.dir": f"{place}/tables", "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = session("killed", "local[2,4]", conf)
options = {"zookeeper": zookeeper, "subscribe": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 40}
frame = spark.readStream.format("metamq").options(**options).load().select("key", "value")
options = {"zookeeper": zookeeper, "topic": sink, "delivery": "exactly_once"}
writer = frame.writeStream.format("metamq").options(**options).option("checkpointLocation", f"{place}/checkpoint")
query = writer.trigger(availableNow=True).start()
query.awaitTermination()
print("done", flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_at_any_moment_has_written_each_row_once(running: Cluster, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    source, sink = new_topic(running), new_topic(running, 3)
    send(running, source, numbers(0, MESSAGES), keys=numbers(0, MESSAGES))
    for kill in range(KILLS):
        driver = _started(tmp_path, running, source, sink)
        try:
            reached = kill * MESSAGES // (KILLS + 1)
            wait_until(lambda reached=reached: sum(values(running, sink).values()) > reached, 120, "some batches")
            time.sleep(chance.random() * 0.5)  # where in a batch it is killed is not to be known
        finally:
            _kill(driver)
        assert max(values(running, sink).values()) == 1
    last = _started(tmp_path, running, source, sink)
    try:
        out, _ = last.communicate(timeout=300)
    finally:
        _kill(last)
    assert out.endswith("done\n"), out
    assert values(running, sink) == Counter(numbers(0, MESSAGES))
    assert open_branches(running) == []


def _started(place: Path, running: Cluster, source: str, sink: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    arguments = [sys.executable, "-c", PROGRAM, str(place), running.zookeeper, source, sink]
    with (place / "log").open("a") as log:
        return subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )


def _kill(driver: subprocess.Popen[str]) -> None:
    """With its JVM; what that has started ends when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    if driver.stdout is not None:
        driver.stdout.close()
