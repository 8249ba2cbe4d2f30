"""The same scan by Spark's own source for Kafka, which runs in the JVM, from a real Kafka: one node, KRaft, defaults.

Maven downloads the jars from Maven Central; without Maven this part is left out, with a message. Maven Central has no
Kafka source of this Spark release yet; its newest one works.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spark_rows import PARTITIONS, ROWS, made, seconds_of

from metamq.testing import Cluster
from metamq.zk.server.ports import free_port

Say = Callable[[str], None]

SERVER = "org.apache.kafka:kafka_2.13:4.3.1 org.slf4j:slf4j-simple:1.7.36"
SOURCE = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
WITH_SPARK = "org.apache.hadoop,org.scala-lang,org.slf4j"
"""Groups of artifacts that Spark already has."""
MAVEN_S = 600
START_S = 60
TOPIC = "scan"
WARM_UPS = 2

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>bench</groupId><artifactId>jars</artifactId><version>1</version>
<dependencies>{}</dependencies></project>"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
_SETTINGS = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
offsets.topic.replication.factor=1
num.partitions={partitions}
"""


def jars(folder: Path, artifacts: str, without: str = "none") -> list[str]:
    """Returns the artifacts' jars with their dependencies. Raises OSError, CalledProcessError if Maven fails."""
    folder.mkdir()
    dependencies = "".join(_DEPENDENCY.format(*one.split(":")) for one in artifacts.split())
    (folder / "pom.xml").write_text(_POM.format(dependencies))
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DexcludeGroupIds={without}"]
    command = ["mvn", "-q", "-B", *goal, f"-DoutputDirectory={folder}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=MAVEN_S)
    return [str(jar) for jar in sorted(folder.glob("*.jar"))]


def source_jars(folder: Path, say: Say) -> list[str]:
    """Returns the jars of Spark's Kafka source; none if they are not available."""
    if shutil.which("mvn") is None:
        say("Spark's Kafka source is left out: there is no mvn to download it")
        return []
    try:
        return jars(folder / "source", SOURCE, WITH_SPARK)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"Spark's Kafka source is left out: {error}")
        return []


@contextmanager
def kafka(folder: Path) -> Iterator[str]:
    """Starts Kafka, and yields its address."""
    java = ["java", "-Xms1g", "-Xmx1g", "-cp", ":".join(jars(folder / "server", SERVER))]
    port, controller = free_port(), free_port()
    settings = folder / "server.properties"
    settings.write_text(_SETTINGS.format(port=port, controller=controller, folder=folder, partitions=PARTITIONS))
    with (folder / "kafka.log").open("w") as output:
        format_it = ["kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", str(settings)]
        subprocess.run([*java, *format_it], check=True, stdout=output, stderr=output)
        process = subprocess.Popen([*java, "kafka.Kafka", str(settings)], stdout=output, stderr=output)
        try:
            _wait_for(port, process)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.1)
    raise RuntimeError("Kafka did not start")


def measure(running: Cluster, spark: Any, folder: Path, rounds: int, say: Say) -> dict[str, float]:
    """Returns rows per second of both sources: the same rows in as many partitions, one source after the other."""
    running.create_topic(TOPIC, partitions=PARTITIONS)
    rows = made(spark)
    rows.write.format("metamq").options(zookeeper=running.zookeeper, topic=TOPIC).mode("append").save()
    with kafka(folder) as address:
        server = {"kafka.bootstrap.servers": address}
        rows.write.format("kafka").options(**server, topic=TOPIC).mode("append").save()
        # Kafka's source cannot read files: the broker sends it all messages.
        source = {"zookeeper": running.zookeeper, "subscribe": TOPIC, "readFiles": "false"}
        frames = {
            "metamq": spark.read.format("metamq").options(**source).load(),
            "kafka": spark.read.format("kafka").options(**server, subscribe=TOPIC).load(),
        }
        for frame in frames.values():
            for _ in range(WARM_UPS):
                assert frame.count() == ROWS
                seconds_of(frame)
        measured = []
        for number in range(rounds):
            order = list(frames) if number % 2 else list(frames)[::-1]
            rates = {name: ROWS / seconds_of(frames[name]) for name in order}
            measured.append({**rates, "ratio": rates["metamq"] / rates["kafka"]})
            say("scan: " + ", ".join(f"{name} {rate / 1e6:.2f} M rows/s" for name, rate in rates.items()))
    with running.admin() as admin:
        admin.delete(TOPIC)
    found = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    return {"partitions": PARTITIONS, **found}
