"""A SparkSession with the settings that metamq runs well with, and these settings for a session of one's own."""

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
"""All cores; a task is tried up to four times, which `local[*]` does not."""

FILE_SYSTEMS = "spark.hadoop.fs."
"""Who configures file systems may have checkpoints elsewhere."""


def recommended_conf(*, local_checkpoints: bool = False) -> dict[str, str]:
    """Settings to start Spark with; most have no effect on a session that runs already.

    `local_checkpoints`: checkpoints are in a file system of this machine, where a rename is atomic. Their files are
    then written in place of by commands in processes of their own.
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
    """What a session is started with."""
    is_local = master.partition("[")[0] == "local"
    local_checkpoints = is_local and not any(name.startswith(FILE_SYSTEMS) for name in given)
    return {**recommended_conf(local_checkpoints=local_checkpoints), **given}


def session(
    app_name: str = "metamq", master: str | None = None, conf: Mapping[str, object] | None = None
) -> SparkSession:
    """A SparkSession with recommended_conf(), this Python for its workers, a Java, and the format `metamq`.

    `conf` is further configuration, and outranks what is recommended. Without `master` it is that of `conf`, of
    $MASTER, or all cores of this machine; with a local one, checkpoints are taken for local files, unless `conf` has
    settings of a file system. Raises ConfigError without pyspark, and without a Java of 17 or later.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigError("Spark is not installed", hint="Install it with: pip install 'metamq[spark]'") from None
    from metamq.spark_consumers.data_source import DefaultSource

    given = {name: str(value) for name, value in (conf or {}).items()}
    master = master or given.get("spark.master") or os.environ.get("MASTER") or LOCAL_MASTER
    # The workers' Python is not in the configuration but here; `python3` of the PATH may be another one.
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
    except AnalysisException as error:  # Spark 4.0, where it was found after all
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def _has_jvm() -> bool:
    from pyspark import SparkContext

    return getattr(SparkContext, "_gateway", None) is not None


@contextlib.contextmanager
def _java() -> Iterator[None]:
    """Spark's launcher finds its Java in the environment."""
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
    """Whether Spark finds the format by itself: its workers see a module in a folder that Python starts with.

    An editable install is none. To register what is found as well is harmless, but Spark warns of it each time.
    """
    if os.environ.get("PYSPARK_PYTHON") != sys.executable:  # what is installed there is not known
        return False
    folders = [*site.getsitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return any(folder and Path(folder, "pyspark_metamq.py").is_file() for folder in folders)
