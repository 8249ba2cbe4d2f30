"""Sends words, counts them in a batch query of Spark, and copies them in a streaming query into another topic.

On this machine:             METAMQ_ZOOKEEPER=… python examples/count_spark.py
On a cluster:                MASTER=spark://host:7077 …, with metamq installed where the executors run
With docker-compose.yml:     docker compose exec -T spark python - <examples/count_spark.py
"""

import json
import os
import tempfile
import uuid

from metamq import Admin, Producer
from metamq.spark_consumers import session

WORDS = ["a", "message", "queue", "for", "python", "and", "spark", "and", "a", "message"] * 1000
CHECKPOINTS = os.environ.get("CHECKPOINTS") or tempfile.mkdtemp()
"""The checkpoints' folder. On a cluster whose tasks keep state, all machines must see it; the tasks here keep none."""


def main() -> None:
    """Prints both counts."""
    run = uuid.uuid4().hex[:8]
    words, copies = f"words-{run}", f"copies-{run}"
    with Admin() as admin, Producer() as producer:
        for topic in (words, copies):
            admin.create_topic(topic, partitions=4)
        producer.send_many(words, [word.encode() for word in WORDS]).result()
    spark = session("count", conf={"spark.cores.max": 2, "spark.executor.memory": "1g"})
    read = spark.read.format("metamq").option("subscribe", words).load()
    counts = read.selectExpr("cast(value as string) AS word").groupBy("word").count().collect()
    print(json.dumps({row["word"]: row["count"] for row in counts}, sort_keys=True))

    stream = spark.readStream.format("metamq").options(subscribe=words, startingOffsets="earliest").load()
    writer = stream.selectExpr("value AS key", "upper(cast(value as string)) AS value").writeStream.format("metamq")
    writer.options(topic=copies, checkpointLocation=CHECKPOINTS).trigger(availableNow=True).start().awaitTermination()
    with Admin() as admin:
        print(admin.describe_topic(copies).messages, "messages in the other topic")
    print("on", spark.sparkContext.master)
    spark.stop()


if __name__ == "__main__":
    main()
