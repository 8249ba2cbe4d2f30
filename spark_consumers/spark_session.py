"""A SparkSession with the settings that metamq needs to run well, and these settings for a session of the user."""

from __future__ import annotations

import contextlib
import os
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError
from metamq.spark_consumers.java import java_home
from metamq.spark_consumers.source.spark_versions import file_manager

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_MASTER = "local[*,4]"
"""All cores; a task is tried up to four times. With `local[*]` it is tried once."""

FILE_SYSTEMS = "spark.hadoop.fs."
"""The prefix of settings of file systems: if the user has any, checkpoints may be in another place."""


def recommended_conf(*, local_checkpoints: bool = False) -> dict[str, str]:
    """Returns settings for the start of Spark; most have no effect on a session that runs already.

    `local_checkpoints`: checkpoints are in a file system of this machine, where a rename is atomic. Then Spark writes
    their files directly, and not by commands in processes of their own.
    """
    conf = {
        # Over TCP, each Python task waits 40 ms for a delayed acknowledgement.
        "spark.python.unix.domain.socket.enabled": "true",
    }
    if local_checkpoints:
        import pyspark

        conf["spark.sql.streaming.checkpointFileManagerClass"] = file_manager(pyspark.__version__)
    return conf


def settings(master: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that a session is started with."""
    is_local = master.partition("[")[0] == "local"
    local_checkpoints = is_local and not any(name.startswith(FILE_SYSTEMS) for name in given)
    return {**recommended_conf(local_checkpoints=local_checkpoints), **given}


def session(
    app_name: str = "metamq", master: str | None = None, conf: Mapping[str, object] | None = None
) -> SparkSession:
    """Returns a SparkSession with recommended_conf(), this Python for its workers, a Java, and the format `metamq`.

    `conf` has more settings, and overrides the recommended ones. Without `master`, the master is that of `conf`, of
    $MASTER, or all cores of this machine. With a local master, checkpoints are assumed to be local files, unless `conf`
    has settings of a file system. Raises ConfigError without pyspark, and without a Java of 17 or later.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigError("Spark is not installed", hint="Install it with: pip install 'metamq[spark]'") from None
    from metamq.spark_consumers.data_source import DefaultSource

    given = {name: str(value) for name, value in (conf or {}).items()}
    master = master or given.get("spark.master") or os.environ.get("MASTER") or LOCAL_MASTER
    # The workers' Python is set here, not in the configuration; `python3` of the PATH may be another one.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder.appName(app_name).master(master)
    for name, value in settings(master, given).items():
        builder = builder.config(name, value)
    with contextlib.nullcontext() if _has_jvm() else _java():
        spark: SparkSession = builder.getOrCreate()
    if not is_discovered():
        _register(spark, DefaultSource)
    return spark


def _register(spark: SparkSession, source: Any) -> None:
    from pyspark.errors import AnalysisException

    try:
        spark.dataSource.register(source)
    except AnalysisException as error:  # Spark 4.0 has found it although is_discovered() said no
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def _has_jvm() -> bool:
    from pyspark import SparkContext

    return getattr(SparkContext, "_gateway", None) is not None


@contextlib.contextmanager
def _java() -> Iterator[None]:
    """Sets JAVA_HOME for a moment: Spark's launcher reads it from the environment."""
    before = os.environ.get("JAVA_HOME")
    os.environ["JAVA_HOME"] = str(java_home())
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAVA_HOME"]
        else:
            os.environ["JAVA_HOME"] = before


def is_discovered() -> bool:
    """True if Spark finds the format by itself: its workers see the module in a folder that Python starts with.

    An editable install has no such folder. Registering a found format, too, is harmless, but Spark warns each time.
    """
    if os.environ.get("PYSPARK_PYTHON") != sys.executable:  # the modules of another Python are unknown
        return False
    folders = [*site.getsitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return any(folder and Path(folder, "pyspark_metamq.py").is_file() for folder in folders)
