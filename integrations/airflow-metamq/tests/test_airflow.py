"""The trigger in real processes of Airflow, with a real cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from metamq.testing import Cluster

LIMIT_S = 90
DAGS = """
import os
from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.sdk import DAG, Asset, AssetWatcher, BaseOperator, task

def trigger(topic):
    return MessageQueueTrigger(scheme="metamq", topics=topic, group=topic, consumer={"session_timeout_ms": 1500})

def note(text):
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{text}\\n")

topic = os.environ["TOPIC"]
orders = Asset("orders", watchers=[AssetWatcher(name="orders", trigger=trigger(topic))])

with DAG("bill", schedule=orders):

    @task
    def bill(triggering_asset_events=None):
        for event in triggering_asset_events[orders]:
            note(event.extra["payload"]["value"])

    bill()

class Wait(BaseOperator):
    def execute(self, context):
        self.defer(trigger=trigger(f"{topic}-letters"), method_name="go_on")

    def go_on(self, context, event):
        note(event["value"])

with DAG("wait", schedule="@once"):
    Wait(task_id="wait")
"""


def environment(home: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "2",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "3",
        **more,
    }


def run_once(environment: dict[str, str], *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "airflow", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Airflow:
    """One installation of Airflow, with the DAGs above."""

    def __init__(self, home: Path, cluster: Cluster, topic: str) -> None:
        self._home, self._log, self._notes = home, home / "log", home / "notes"
        self.port = free_port()
        more = {"METAMQ_ZOOKEEPER": cluster.zookeeper, "TOPIC": topic, "NOTES": str(self._notes)}
        more["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"] = f"http://127.0.0.1:{self.port}/execution/"
        self._environment = environment(home, **more)
        (home / "dags").mkdir()
        (home / "dags" / "dags.py").write_text(DAGS)
        run_once(self._environment, "dags", "reserialize")

    @contextmanager
    def process(self, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        with (
            self._log.open("ab") as log,
            subprocess.Popen(
                [sys.executable, "-m", "airflow", *command],
                env=self._environment, start_new_session=True, stdout=log, stderr=log,
            ) as process,
        ):  # fmt: skip
            try:
                yield process
                process.terminate()
                process.wait(LIMIT_S)
            finally:
                kill(process)

    def triggerer(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        return self.process("triggerer", "--skip-serve-logs")

    def values(self) -> list[str]:
        """The values of the events that Airflow has stored."""
        with closing(sqlite3.connect(self._home / "airflow.db")) as database:
            rows = database.execute("SELECT extra FROM asset_event ORDER BY id").fetchall()
        return [json.loads(extra)["payload"]["value"] for (extra,) in rows]

    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    def answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_until(self, condition: Callable[[str], object]) -> None:
        """Waits for a condition, which gets the log."""
        deadline = time.monotonic() + LIMIT_S
        while not condition(log := self._log.read_text()):
            assert time.monotonic() < deadline, log[-10_000:]
            time.sleep(0.05)


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Airflow with a database without DAGs."""
    home = tmp_path_factory.mktemp("empty")
    run_once(environment(home), "db", "migrate")
    return home


@pytest.fixture
def airflow(empty_home: Path, tmp_path: Path, metamq_cluster: Cluster, metamq_topic: str) -> Airflow:
    settings = shutil.ignore_patterns("airflow.cfg")  # they name the other folder
    home = Path(shutil.copytree(empty_home, tmp_path / "airflow", ignore=settings))
    return Airflow(home, metamq_cluster, metamq_topic)


def send(cluster: Cluster, topic: str, *texts: str) -> None:
    with cluster.producer() as producer:
        for text in texts:
            producer.send(topic, text.encode())


def lag(cluster: Cluster, group: str) -> int:
    with cluster.admin() as admin:
        return admin.describe_group(group).lag


def test_messages_start_a_dag_and_end_the_wait_of_a_task(
    airflow: Airflow, metamq_cluster: Cluster, metamq_topic: str
) -> None:
    letters = f"{metamq_topic}-letters"
    metamq_cluster.create_topic(letters, partitions=1)
    with airflow.process("api-server", "--workers", "1", "--port", str(airflow.port)):
        airflow.wait_until(lambda _log: airflow.answers())
        with airflow.process("scheduler", "--skip-serve-logs"), airflow.triggerer():
            send(metamq_cluster, metamq_topic, "an order")
            airflow.wait_until(lambda log: "TaskInstance Finished: dag_id=wait" in log)  # it is deferred
            send(metamq_cluster, letters, "a", "b", "c")
            airflow.wait_until(lambda _log: len(airflow.notes()) == 2)
            airflow.wait_until(lambda _log: lag(metamq_cluster, letters) == 2)
    assert sorted(airflow.notes()) == ["a", "an order"]
    assert airflow.values() == ["an order"]
    assert lag(metamq_cluster, letters) == 2


def test_a_killed_triggerer_loses_no_message(airflow: Airflow, metamq_cluster: Cluster, metamq_topic: str) -> None:
    sent = [str(number) for number in range(200)]
    with airflow.triggerer() as process:
        send(metamq_cluster, metamq_topic, *sent[:100])
        airflow.wait_until(lambda _log: airflow.values())
        kill(process)
    with airflow.triggerer():
        send(metamq_cluster, metamq_topic, *sent[100:])
        airflow.wait_until(lambda _log: set(airflow.values()) == set(sent))
        airflow.wait_until(lambda _log: lag(metamq_cluster, metamq_topic) == 0)
    stored = airflow.values()
    with airflow.triggerer():
        send(metamq_cluster, metamq_topic, "the last")
        airflow.wait_until(lambda _log: airflow.values() == [*stored, "the last"])
        airflow.wait_until(lambda _log: lag(metamq_cluster, metamq_topic) == 0)


def test_another_triggerer_takes_over(airflow: Airflow, metamq_cluster: Cluster, metamq_topic: str) -> None:
    """Two triggerers run. The one that has the trigger is frozen, then continues."""
    with airflow.triggerer() as first:
        send(metamq_cluster, metamq_topic, "1")
        airflow.wait_until(lambda _log: airflow.values() == ["1"])
        with airflow.triggerer():
            os.killpg(first.pid, signal.SIGSTOP)
            send(metamq_cluster, metamq_topic, "2")
            airflow.wait_until(lambda _log: "2" in airflow.values())
            os.killpg(first.pid, signal.SIGCONT)
            send(metamq_cluster, metamq_topic, "3")
            airflow.wait_until(lambda _log: "3" in airflow.values())
            airflow.wait_until(lambda _log: lag(metamq_cluster, metamq_topic) == 0)
