"""The format `metamq` by way of Spark Connect: a client of its own, and Declarative Pipelines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from metamq.spark_consumers.spark_session import java_home
from metamq.testing import Cluster
from tests.spark.conftest import new_topic, send
from tests.spark.test_sink import values
from tests.spark.test_stream_source import numbers

CLIENT = """
import sys, time
from pyspark.sql import SparkSession
from metamq.spark_consumers import LagListener

remote, zookeeper, topic, to, copy, place = sys.argv[1:]
exactly = {"zookeeper": zookeeper, "delivery": "exactly_once"}
spark = SparkSession.builder.remote(remote).getOrCreate()
assert "connect" in type(spark).__module__
options = {"zookeeper": zookeeper, "subscribe": topic, "startingOffsets": "earliest"}
found = [spark.read.format("metamq").options(**options).load().count()]
spark.sql(f"CREATE TEMPORARY VIEW messages USING metamq OPTIONS (zookeeper '{zookeeper}', subscribe '{topic}')")
found.append(spark.sql("SELECT count(value) FROM messages").collect()[0][0])
frame = spark.range(7).selectExpr("cast(id as string) AS value")
frame.write.format("metamq").options(**exactly, topic=to).mode("append").save()
found.append(spark.read.format("metamq").options(zookeeper=zookeeper, subscribe=to).load().count())
told = []
listener = LagListener(on_lag=told.append)
spark.streams.addListener(listener)
stream = spark.readStream.format("metamq").options(**options, maxOffsetsPerTrigger=30).load()
writer = stream.select("key", "value").writeStream.format("metamq").options(**exactly, topic=copy)
query = writer.option("checkpointLocation", place + "/checkpoint").trigger(availableNow=True).start()
assert query.awaitTermination(100)
found.append(spark.read.format("metamq").options(zookeeper=zookeeper, subscribe=copy).load().count())
deadline = time.monotonic() + 30
while len(told) < 4 and time.monotonic() < deadline:
    time.sleep(0.05)
spark.streams.removeListener(listener)  # while there is one, pyspark's thread for it keeps the process
print("found", found, [lag.messages for lag in told])
try:
    spark.read.format("metamq").options(**options, startingOffset="latest").load().schema
except Exception as error:
    print("Did you mean 'startingOffsets'" in str(error))
"""

SPECIFICATION = """
name: messages
storage: file://{place}/storage
libraries:
  - glob:
      include: flows.py
"""

FLOWS = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

options = {options}
spark = SparkSession.active()

@dp.materialized_view
def all_messages():
    return spark.read.format("metamq").options(**options).load()

@dp.table
def each_message():
    return spark.readStream.format("metamq").options(**options).load()

dp.create_sink("copies", "metamq", {copies})

@dp.append_flow(target="copies")
def copied():
    return spark.readStream.format("metamq").options(**options).load().select("key", "value")

@dp.materialized_view
def how_many():
    return spark.read.table("each_message").groupBy("partition").count()
"""


def run(command: list[str], place: Path) -> str:
    environment = {**os.environ, "JAVA_HOME": str(java_home())}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_a_client_of_spark_connect_reads_and_writes_by_sql_too_and_as_a_stream(
    connect: str, running: Cluster, tmp_path: Path
) -> None:
    topic, to, copy = (new_topic(running, 1) for _ in range(3))
    send(running, topic, numbers(0, 100))
    said = run([sys.executable, "-c", CLIENT, connect, running.zookeeper, topic, to, copy, str(tmp_path)], tmp_path)
    assert said.splitlines()[-2:] == ["found [100, 100, 7, 100] [70, 40, 10, 0]", "True"]
    assert values(running, to) == Counter(numbers(0, 7))
    assert values(running, copy) == Counter(numbers(0, 100))


@pytest.mark.timeout(240)
def test_a_declarative_pipeline_reads_in_batch_and_as_a_stream_and_writes(
    spark: Any, connect: str, running: Cluster, tmp_path: Path
) -> None:
    """Run twice: the streaming table goes on where it was, the materialized view is made anew."""
    import pyspark

    topic, to = new_topic(running), new_topic(running)
    copies = {"zookeeper": running.zookeeper, "topic": to}
    options = {"zookeeper": running.zookeeper, "subscribe": topic, "startingOffsets": "earliest"}
    (tmp_path / "spark-pipeline.yml").write_text(SPECIFICATION.format(place=tmp_path))
    (tmp_path / "flows.py").write_text(FLOWS.format(options=options, copies=copies))
    program = str(Path(pyspark.__file__).parent / "bin" / "spark-pipelines")
    for first, end in ((0, 100), (100, 150)):
        send(running, topic, [b"%d" % number for number in range(first, end)])
        run([program, "run", "--remote", connect], tmp_path)
        for table in ("all_messages", "each_message"):
            spark.catalog.refreshTable(table)  # its files are known to this session, and were made anew by the other
            found = sorted(int(row.value) for row in spark.table(table).select("value").collect())
            assert found == list(range(end))
    assert values(running, to) == Counter(numbers(0, 150))
    spark.catalog.refreshTable("how_many")
    assert sum(row["count"] for row in spark.table("how_many").collect()) == 150
