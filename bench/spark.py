"""Spark compared with its own limits, on one session of `local[2]` with the recommended settings, and one broker:

* a scan, and the ceiling of Spark's path from Python;
* the sink, and the query that makes its rows (bench/spark_sink.py);
* the source, and Kafka's source (bench/spark_kafka.py);
* the latency of a slow stream.

Compared runs alternate within a round; a scan and its ceiling are each first as often as second. Each has a warm-up.
"""

from __future__ import annotations

import logging
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import latency
import spark_kafka
import spark_sink
from flushed import until_flushed
from settle import settle
from spark_rows import PARTITIONS, seconds_of

from metamq import Producer
from metamq.spark_consumers import session
from metamq.testing import Cluster, cluster

Say = Callable[[str], None]

HERE = Path(__file__).parent
BYTES = {100: 2_000_000_000, 1024: 4 * 1024**3}
"""The bytes that a scan reads, by message size: enough for three seconds, so that the start of the query is short."""
BATCH_BYTES = 1024 * 1024
"""The size of the ceiling's Arrow batches: above a thousand rows it makes no difference."""
WARM_UPS = 2
TRICKLE = 20
"""Messages a second."""
TRICKLE_S, TRICKLE_WARM_UP_S = 20.0, 6.0
_STAMP = struct.Struct("<q")


@contextmanager
def sparked(folder: str, jars: Sequence[str] = ()) -> Iterator[Any]:
    """Yields a session of two cores, with additional jars."""
    # The workers import the ceiling's module.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    conf = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.local.dir": folder,
        "spark.sql.warehouse.dir": f"{folder}/tables",
    }
    if jars:
        conf["spark.jars"] = ",".join(jars)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    spark = session("bench", "local[2]", conf)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def fill(running: Cluster, topic: str, size: int) -> int:
    """Makes the topic and its messages; returns their number."""
    running.create_topic(topic, partitions=PARTITIONS)
    count = BYTES[size] // size
    settle(BYTES[size])
    with running.producer() as producer:
        values = [os.urandom(size)] * (count // 10)
        for _ in range(10):
            producer.send_many(topic, values).result()
    until_flushed(running.broker)
    return len(values) * 10


def scans(running: Cluster, spark: Any, size: int, rounds: int, say: Say) -> dict[str, float]:
    """Measures rows per second of a scan with all columns, of a scan that the broker sends, and of the ceiling."""
    topic = f"scan-{size}"
    count = fill(running, topic, size)
    source = {"zookeeper": running.zookeeper, "subscribe": topic}
    ceiling = {"tasks": PARTITIONS, "rows": count // PARTITIONS, "batch": BATCH_BYTES // size, "bytes": size}

    def ours(**options: str) -> float:
        return count / seconds_of(spark.read.format("metamq").options(**source, **options).load())

    def sent() -> float:
        return ours(readFiles="false")

    def limit() -> float:
        return ceiling["rows"] * PARTITIONS / seconds_of(spark.read.format("ceiling").options(**ceiling).load())

    assert spark.read.format("metamq").options(**source).load().count() == count
    for _ in range(WARM_UPS):
        for scan in (ours, sent, limit):
            scan()
    measured = []
    for _ in range(rounds):
        turns: list[tuple[float, ...]] = [(ours(), sent(), limit())]
        reverse = (limit(), sent(), ours())
        turns.append(reverse[::-1])
        for rate, through, most in turns:
            rates = {"rows_per_s": rate, "sent_rows_per_s": through, "ceiling_rows_per_s": most}
            measured.append({**rates, "ratio": rate / most, "sent_ratio": through / most})
        rate, through, most = (statistics.mean(column) / 1e6 for column in zip(*turns, strict=True))
        say(f"scan {size} B: {rate:.2f} M rows/s, sent {through:.2f} M, ceiling {most:.2f} M, {rate / most:.2f}")
    with running.admin() as admin:
        admin.delete(topic)
    found = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    return {"message_bytes": float(size), **found}


def trickle(running: Cluster, spark: Any, folder: str) -> dict[str, float]:
    """Measures the time from `send` in another process until the row is in a streaming query's foreachBatch."""
    topic = f"trickle-{time.monotonic_ns()}"
    running.create_topic(topic, partitions=1)
    samples: list[tuple[int, float]] = []
    lock = threading.Lock()

    def take(frame: Any, _batch: int) -> None:
        rows = frame.collect()
        now = time.monotonic_ns()
        with lock:
            samples.extend((sent := _STAMP.unpack_from(row.value)[0], (now - sent) / 1e9) for row in rows)

    options = {"zookeeper": running.zookeeper, "subscribe": topic, "startingOffsets": "earliest"}
    stream = spark.readStream.format("metamq").options(**options).load().writeStream.foreachBatch(take)
    query = stream.option("checkpointLocation", f"{folder}/{topic}").trigger(processingTime="0 seconds").start()
    try:
        count = int((TRICKLE_WARM_UP_S + TRICKLE_S) * TRICKLE)
        subprocess.run([sys.executable, __file__, running.zookeeper, topic, str(count)], check=True)
        deadline = time.monotonic() + 60
        while len(samples) < count:
            assert time.monotonic() < deadline, f"{len(samples)} of {count} messages arrived"
            assert query.isActive, query.exception()
            time.sleep(0.05)
    finally:
        query.stop()
    steady = sorted(samples)[int(TRICKLE_WARM_UP_S * TRICKLE) :]
    return latency.percentiles([seconds for _sent, seconds in steady])


def _send(zookeeper: str, topic: str, count: int) -> None:
    with Producer[bytes](zookeeper) as producer:
        due = time.monotonic()
        for _ in range(count):
            producer.send(topic, _STAMP.pack(time.monotonic_ns()) + bytes(92)).result()
            due += 1 / TRICKLE
            time.sleep(max(due - time.monotonic(), 0))


def measure(rounds: int, say: Say) -> dict[str, Any]:
    """Runs all measurements of Spark."""
    from spark_ceiling import CeilingSource

    with tempfile.TemporaryDirectory() as folder, cluster(folder=Path(folder) / "cluster") as running:
        jars = spark_kafka.source_jars(Path(folder), say)
        with sparked(folder, jars) as spark:
            spark.dataSource.register(CeilingSource)
            found: dict[str, Any] = {"scans": [scans(running, spark, size, rounds, say) for size in BYTES]}
            found["sink"] = spark_sink.measure(running, spark, rounds, say)
            if jars:
                found["kafka"] = spark_kafka.measure(running, spark, Path(folder), rounds, say)
            measured = [trickle(running, spark, folder) for _ in range(min(rounds, 3))]
    found["trickle"] = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    say("trickle: " + ", ".join(f"{name} {value:.0f}" for name, value in found["trickle"].items()))
    return found


if __name__ == "__main__":
    _send(sys.argv[1], sys.argv[2], int(sys.argv[3]))
