"""What a reader leaves behind in a Python worker of Spark's."""

from __future__ import annotations

import pickle
import subprocess
import sys

from metamq.testing import Cluster
from tests.spark.conftest import new_topic, send
from tests.spark.test_fetch import planned

PROGRAM = """
import gc, pickle, sys
from pyspark.sql.types import BinaryType, StructField, StructType
from metamq.spark_consumers.source.partitions import RangePartition, read_partition

partition = RangePartition(pickle.loads(bytes.fromhex(sys.argv[1])))
schema = StructType([StructField("value", BinaryType())])
for _ in range(2):
    rows = sum(batch.num_rows for batch in read_partition(partition, schema))
    print(rows, gc.get_freeze_count())
"""


def test_a_worker_that_has_read_is_not_looked_through_by_the_collector_after_each_task(running: Cluster) -> None:
    topic = new_topic(running, partitions=1)
    send(running, topic, [b"1", b"2"])
    (task,) = planned(running, topic)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, pickle.dumps(task).hex()], capture_output=True, text=True, check=True
    )
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first[0] == second[0] == "2"
    assert int(first[1]) > 10_000
    assert int(second[1]) <= int(first[1]), "once only: what becomes garbage later is collected"
