"""The demo's application with Spark, as a process of its own: it can be killed with its JVM.

It aggregates all flights in a batch query. Then it runs a streaming query: per hour of departure, counts and delays go
into another topic. After a kill it continues from the query's checkpoint.

    python -m metamq.cli.demo.spark_application ZOOKEEPER FOLDER FLIGHTS_PER_BATCH ENDS
                                                            ends with its standard input; with ENDS = 1 also when all
                                                            flights are aggregated, with 0 the query waits for more
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from metamq.broker.process.parent import follow_parent
from metamq.spark_consumers import session

FLIGHTS, DELAYS = "flights", "delays"
FIELDS = "carrier string, dep_delay int, year int, month int, day int, hour int"
LATE = "10 days"
"""The watermark's delay. Partitions are read at about the same pace: flights this far apart keep their order."""
BY_CARRIER = "by-carrier.json"


def conf(folder: Path) -> dict[str, object]:
    """Returns Spark's settings: few tasks for little data, and all files in the demo's folder."""
    return {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": folder / "spark",
        "spark.sql.warehouse.dir": folder / "tables",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": 2,
        "spark.log.level": "ERROR",
    }


def departures(frame: Any) -> Any:
    """Returns the flights of a frame of messages: carrier, delay, and the hour of departure in New York's own time."""
    from pyspark.sql import functions as f

    flight = f.from_json(f.col("value").cast("string"), FIELDS)
    parts = [flight[name] for name in ("year", "month", "day", "hour")]
    return frame.select(
        flight["carrier"].alias("carrier"),
        flight["dep_delay"].alias("dep_delay"),
        f.make_timestamp(*parts, f.lit(0), f.lit(0)).alias("departure"),
    )


def tallied(grouped: Any) -> Any:
    """Counts flights, flights that left, and their delay in minutes."""
    from pyspark.sql import functions as f

    return grouped.agg(
        f.count("*").alias("flights"),
        f.count("dep_delay").alias("delayed"),
        f.coalesce(f.sum("dep_delay"), f.lit(0)).alias("delay_minutes"),
    )


def by_carrier(spark: Any, zookeeper: str) -> list[dict[str, Any]]:
    """Runs a batch query over the whole topic."""
    read = spark.read.format("metamq").options(zookeeper=zookeeper, subscribe=FLIGHTS).load()
    rows = tallied(departures(read).where("carrier IS NOT NULL").groupBy("carrier")).collect()
    return [row.asDict() for row in rows]


def by_hour(spark: Any, zookeeper: str, folder: Path, each: int, *, ends: bool) -> None:
    """Runs the streaming query: without end, or until it has read the flights that exist at its start."""
    from pyspark.sql import functions as f

    source = {"zookeeper": zookeeper, "subscribe": FLIGHTS, "startingOffsets": "earliest", "maxOffsetsPerTrigger": each}
    stream = departures(spark.readStream.format("metamq").options(**source).load()).withWatermark("departure", LATE)
    hours = tallied(stream.groupBy(f.window("departure", "1 hour")))
    hour = f.date_format(f.col("window.start"), "yyyy-MM-dd HH")
    rows = hours.select(
        hour.alias("key"), f.to_json(f.struct(hour.alias("hour"), "flights", "delayed", "delay_minutes")).alias("value")
    )
    sink = {"zookeeper": zookeeper, "topic": DELAYS, "delivery": "exactly_once"}
    query = rows.writeStream.format("metamq").options(**sink, checkpointLocation=str(folder / "checkpoint"))
    (query.trigger(availableNow=True) if ends else query).start().awaitTermination()


def work(zookeeper: str, folder: Path, each: int, *, ends: bool) -> None:
    """Runs both queries; the first one only if it has no result yet."""
    spark = session("demo", "local[2,4]", conf(folder))
    result = folder / BY_CARRIER
    if not result.exists():
        rows = by_carrier(spark, zookeeper)
        result.with_suffix(".new").write_text(json.dumps(rows))
        result.with_suffix(".new").rename(result)
    by_hour(spark, zookeeper, folder, each, ends=ends)
    spark.stop()


if __name__ == "__main__":
    follow_parent(sys.stdin.fileno())
    work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), ends=sys.argv[4] == "1")
