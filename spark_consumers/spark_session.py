"""A SparkSession with the settings that metamq runs well with, and these settings for a session of one's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError
from metamq.spark_consumers.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_MASTER = "local[*,4]"
"""All cores; a task is tried up to four times, which `local[*]` does not."""


def recommended_conf(*, local_checkpoints: bool = False) -> dict[str, str]:
    """Settings to start Spark with; most have no effect on a session that runs already.

    `local_checkpoints`: checkpoints are in a file system of this machine, where a rename is atomic. Their files are
    then written in place of by commands in processes of their own.
    """
    conf = {
        # Over TCP, each Python task waits 40 ms for a delayed acknowledgement.
        "spark.python.unix.domain.socket.enabled": "true",
        # Without it Spark refuses a source with the option pushdown=true.
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    if local_checkpoints:
        package = "org.apache.spark.sql.execution.streaming.checkpointing"
        conf["spark.sql.streaming.checkpointFileManagerClass"] = f"{package}.FileSystemBasedCheckpointFileManager"
    return conf


def session(
    app_name: str = "metamq", master: str | None = None, conf: Mapping[str, object] | None = None
) -> SparkSession:
    """A SparkSession with recommended_conf(), this Python for its workers, a Java, and the format `metamq`.

    `conf` is further configuration, and outranks what is recommended. Without `master` it is that of `conf`, of
    $MASTER, or all cores of this machine. Raises ConfigError without pyspark, and without a Java of 17 or later.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigError("Spark is not installed", hint="Install it with: pip install 'metamq[spark]'") from None
    from metamq.spark_consumers.data_source import DefaultSource

    settings = {name: str(value) for name, value in (conf or {}).items()}
    master = master or settings.get("spark.master") or os.environ.get("MASTER") or LOCAL_MASTER
    is_local = master.partition("[")[0] == "local"
    # The workers' Python is not in the configuration but here; `python3` of the PATH may be another one.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if SparkSession.getActiveSession() is None:
        os.environ["JAVA_HOME"] = str(java_home())
    builder: Any = SparkSession.builder.appName(app_name).master(master)
    for name, value in {**recommended_conf(local_checkpoints=is_local), **settings}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(DefaultSource)  # an editable install is not found by itself
    return spark
