"""The Spark service of docker-compose.yml: it comes up, and has Spark, metamq and the brokers in reach."""

from __future__ import annotations

from tests.containers.conftest import CONTAINERS, Composition

pytestmark = CONTAINERS

JOB = """
from pyspark.sql import SparkSession
from metamq import Admin
spark = SparkSession.builder.master("local[2]").getOrCreate()
even = spark.range(100).mapInPandas(lambda frames: (frame[frame.id % 2 == 0] for frame in frames), "id long")
with Admin() as admin:
    print("brokers", sorted(admin.brokers()), "sum", even.groupBy().sum("id").collect()[0][0])
"""


def test_a_job_runs_in_the_spark_service_with_the_brokers_in_reach(composition: Composition, spark_image: str) -> None:
    composition.compose("--profile", "spark", "up", "-d", "--no-build", "spark")
    assert composition.container("spark").attrs["Config"]["Image"] == spark_image
    done = composition.container("spark").exec_run(["python", "-W", "ignore", "-c", JOB])
    assert done.exit_code == 0, done.output.decode()
    assert done.output.decode().splitlines()[-1] == f"brokers [0, 1] sum {sum(range(0, 100, 2))}"
