"""The format with this Spark, and with one that has less."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import datasource
from pyspark.sql.types import StructType

from metamq.errors import ConfigError
from metamq.spark_consumers.data_source import DefaultSource, RefusedReader
from metamq.spark_consumers.source.spark_versions import file_manager
from metamq.testing import Cluster
from tests.spark import faces
from tests.spark.conftest import new_topic, send

VALUE = StructType.fromJson({"type": "struct", "fields": []}).add("value", "binary")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("timestamps", ["TIMESTAMP_LTZ", "TIMESTAMP_NTZ"])
def test_every_face_works_whatever_type_the_session_gives_timestamps(
    spark: Any, running: Cluster, tmp_path: Path, timestamps: str
) -> None:
    topic = new_topic(running, 2)
    send(running, topic, [b"%d" % number for number in range(faces.COUNT)])
    spark.conf.set("spark.sql.timestampType", timestamps)
    try:
        found = faces.tried(spark, running, topic, tmp_path)
    finally:
        spark.conf.unset("spark.sql.timestampType")
    assert found == dict.fromkeys(found, "works")


def test_a_spark_before_4_2_is_told_that_it_reads_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql.streaming import datasource as of_streams

    monkeypatch.delattr(of_streams, "SupportsTriggerAvailableNow")
    monkeypatch.delitem(sys.modules, "metamq.spark_consumers.driver.stream_reader", raising=False)
    reader = DefaultSource({"zookeeper": "zk:1", "subscribe": "t"}).streamReader(VALUE)
    assert isinstance(reader, RefusedReader)
    with pytest.raises(
        ConfigError, match=r"readStream with metamq needs Spark 4.2 or later, and this is \d.*spark.read"
    ):
        reader.initialOffset()


def test_a_spark_before_4_1_is_told_that_it_writes_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(datasource, "DataSourceStreamArrowWriter")
    for name in ("sink.sink", "sink.exact_sink"):  # what imports it
        monkeypatch.delitem(sys.modules, f"metamq.spark_consumers.{name}", raising=False)
    source = DefaultSource({"zookeeper": "zk:1", "topic": "t"})
    with pytest.raises(ConfigError, match=r"writeStream with metamq needs Spark 4.1 or later.*foreachBatch"):
        source.streamWriter(VALUE, False)
    assert importlib.import_module("metamq.spark_consumers.sink.sink").BatchWriter


def test_a_spark_that_lacks_more_finds_other_formats_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It imports every module of such a name to find a format of any name."""
    monkeypatch.delattr(datasource, "InputPartition")
    for name in ("data_source", "source.partitions"):
        monkeypatch.delitem(sys.modules, f"metamq.spark_consumers.{name}", raising=False)
    monkeypatch.delitem(sys.modules, "pyspark_metamq", raising=False)
    found = importlib.import_module("pyspark_metamq")
    assert not hasattr(found, "DefaultSource")
    assert "the format 'metamq' is not available here: cannot import name 'InputPartition'" in caplog.text
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "pyspark_metamq")
    assert issubclass(importlib.import_module("pyspark_metamq").DefaultSource, datasource.DataSource)


def test_checkpoints_are_kept_by_the_class_that_the_release_has() -> None:
    package = "org.apache.spark.sql.execution.streaming"
    manager = "FileSystemBasedCheckpointFileManager"
    assert file_manager("4.0.5") == f"{package}.{manager}"
    assert {file_manager(version) for version in ("4.1.0", "4.3.0", "5.0.0.dev1")} == {
        f"{package}.checkpointing.{manager}"
    }
