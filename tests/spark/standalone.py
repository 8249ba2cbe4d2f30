"""A standalone cluster of Spark from the jars in the wheel: a master, and workers whose executors are processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from metamq.spark_consumers.spark_session import java_home
from metamq.zk.server.ports import free_port
from tests.parts import wait_until
from tests.spark.conftest import small_session

QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
DEPLOY = "org.apache.spark.deploy"
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


class Standalone:
    """The running cluster; `master` is its address."""

    def __init__(self, place: Path) -> None:
        self.master = f"spark://127.0.0.1:{free_port()}"
        self._place = place
        self._home = _spark_home(place)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, workers: int) -> None:
        """Starts it, each worker with one core; returns once all are there."""
        port = self.master.rpartition(":")[2]
        self._run("master", f"{DEPLOY}.master.Master", "--port", port)
        wait_until(lambda: "I have been elected leader" in self._said("master"), 60, "the master")
        for number in range(workers):
            name = f"worker-{number}"
            options = ["--cores", "1", "--memory", "1500M", "--work-dir", str(self._place / "work")]
            # Each is a host of its own, since Spark runs no task twice at once on one.
            host = f"127.0.0.{number + 1}" if sys.platform == "linux" else "127.0.0.1"
            self._run(name, f"{DEPLOY}.worker.Worker", *options, self.master, host=host)
        for number in range(workers):
            wait_until(partial(self._is_registered, f"worker-{number}"), 60, "a worker")

    def _is_registered(self, worker: str) -> bool:
        return "registered with master" in self._said(worker)

    def _run(self, name: str, main_class: str, *arguments: str, host: str = "127.0.0.1") -> None:
        environment = {
            **os.environ,
            "SPARK_HOME": str(self._home),
            "JAVA_HOME": str(java_home()),
            "SPARK_LOCAL_IP": host,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
        }
        command = [self._home / "bin" / "spark-class", main_class, "--host", host, "--webui-port", "0"]
        with (self._place / f"{name}.log").open("wb") as log:
            started = subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log)
        self._processes.append(started)

    def _said(self, name: str) -> str:
        assert all(process.poll() is None for process in self._processes), "a process of Spark's has ended"
        return (self._place / f"{name}.log").read_text(errors="replace").replace("Successfully ", "")

    def executors(self) -> list[psutil.Process]:
        """The executors' JVMs."""
        found: list[psutil.Process] = []
        for worker in self._processes[1:]:
            for child in psutil.Process(worker.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if EXECUTOR in child.cmdline():
                        found.append(child)
        return found

    def stop(self) -> None:
        """Ends it, executors and all."""
        left = self.executors()
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        for executor in left:
            with contextlib.suppress(psutil.Error):
                executor.kill()


def _spark_home(place: Path) -> Path:
    """A folder of links to the wheel: Spark writes below its home."""
    import pyspark

    installed = Path(pyspark.__file__).parent
    home = place / "home"
    home.mkdir()
    for name in ("bin", "jars", "python", "sbin"):
        (home / name).symlink_to(installed / name)
    return home


@contextlib.contextmanager
def standalone(place: Path, workers: int = 2) -> Iterator[Standalone]:
    """A cluster for the length of a `with` block."""
    cluster = Standalone(place)
    try:
        cluster.start(workers)
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def session_on(cluster: Standalone, place: Path, more: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A session with an executor on each worker, and more settings."""
    from metamq.spark_consumers import session

    conf = {
        **small_session(place),
        "spark.executor.cores": 1,
        "spark.executor.memory": "700m",
        "spark.cores.max": 2,
        "spark.driver.extraJavaOptions": QUICK_JAVA,
        "spark.executor.extraJavaOptions": QUICK_JAVA,
        **(more or {}),
    }
    spark = session("executors", cluster.master, conf)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
