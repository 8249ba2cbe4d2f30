"""What of the format works with one Spark: `python -m tests.spark.faces` in an environment with any Spark from 4.0 on.

It prints a line for each face of the format: `works`, or the error that the user gets.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metamq.testing import Cluster
from tests.one_zookeeper import cluster

COUNT = 40


def tried(spark: Any, running: Cluster, topic: str, place: Path) -> dict[str, str]:
    """Each face: `works`, or the error. The topic has COUNT messages."""
    options = {"zookeeper": running.zookeeper}
    rows = "cast(id AS string) AS key", "cast(cast(id AS string) AS binary) AS value"

    def read() -> None:
        frame = spark.read.format("metamq").options(**options, subscribe=topic, includeHeaders="true").load()
        assert frame.count() == COUNT
        assert len(frame.where("offset >= 0").select("value", "timestamp", "headers").collect()) == COUNT
        assert dict(frame.dtypes)["timestamp"] == "timestamp"

    def write(delivery: str) -> None:
        name = f"{topic}-{delivery}"
        running.create_topic(name, partitions=2)
        written = spark.range(COUNT).selectExpr(*rows).write.format("metamq").mode("append")
        written.options(**options, topic=name, delivery=delivery).save()
        assert spark.read.format("metamq").options(**options, subscribe=name).load().count() == COUNT

    def stream_in() -> None:
        stream = spark.readStream.format("metamq").options(**options, subscribe=topic, startingOffsets="earliest")
        query = stream.load().writeStream.format("memory").queryName("faces").trigger(availableNow=True)
        run(query.option("checkpointLocation", f"{place}/in"))
        assert spark.table("faces").count() == COUNT

    def stream_out(delivery: str) -> None:
        name = f"{topic}-stream-{delivery}"
        running.create_topic(name, partitions=2)
        files = f"{place}/numbers-{delivery}"
        spark.range(COUNT).selectExpr(*rows).write.parquet(files)
        stream = spark.readStream.schema("key string, value binary").parquet(files)
        query = stream.writeStream.format("metamq").options(**options, topic=name, delivery=delivery)
        run(query.option("checkpointLocation", f"{place}/out-{delivery}").trigger(availableNow=True))
        assert spark.read.format("metamq").options(**options, subscribe=name).load().count() == COUNT

    faces: dict[str, Callable[[], None]] = {
        "read": read,
        "write at_least_once": lambda: write("at_least_once"),
        "write exactly_once": lambda: write("exactly_once"),
        "readStream": stream_in,
        "writeStream at_least_once": lambda: stream_out("at_least_once"),
        "writeStream exactly_once": lambda: stream_out("exactly_once"),
    }
    return {name: outcome(face) for name, face in faces.items()}


def run(query: Any) -> None:
    assert query.start().awaitTermination(120)


def outcome(face: Callable[[], None]) -> str:
    try:
        face()
    except Exception as error:
        return str(error)
    return "works"


def main() -> None:
    """A cluster and a session of its own."""
    import pyspark

    from metamq.spark_consumers import session

    with cluster() as running, tempfile.TemporaryDirectory() as place:
        conf = {"spark.ui.enabled": "false", "spark.sql.warehouse.dir": f"{place}/tables"}
        spark = session("faces", "local[2,4]", conf)
        running.create_topic("faces", partitions=2)
        with running.producer() as producer:
            producer.send_many("faces", [b"%d" % number for number in range(COUNT)]).result()
        found = tried(spark, running, "faces", Path(place))
        spark.stop()
    for face, result in found.items():
        said = [line for line in result.splitlines() if "ConfigError: " in line] or [result]
        print(f"Spark {pyspark.__version__}, {face}: {said[0]}")
    sys.exit(any(not (result == "works" or "or later, and this is" in result) for result in found.values()))


if __name__ == "__main__":
    main()
