"""The transport in a real worker of Celery, with a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import celery_metamq  # noqa: F401, registers metamq://
import kombu
import pytest
from celery import Celery
from celery_metamq.transport import Unfinished
from kombu import Connection, Exchange

from metamq import TopicPartition
from metamq.errors import ConnectError
from metamq.testing import Cluster, cluster

LIMIT_S = 60
TASKS = """
import os, time
import celery_metamq
from celery import Celery

app = Celery("tasks", broker=os.environ["BROKER"])
app.conf.worker_enable_remote_control = False
app.conf.task_acks_late = True
app.conf.task_default_queue = os.environ["QUEUE"]
app.conf.broker_transport_options = {
    "partitions": int(os.environ["PARTITIONS"]), "commit_interval_s": 0.1,
    "consumer": {"session_timeout_ms": int(os.environ["SESSION_MS"])},
}

@app.task(bind=True, name="note")
def note(self, number: int, pause_s: float = 0, fails: bool = False) -> None:
    with open("begun", "a") as file:
        file.write(f"{number}\\n")
    if fails and not self.request.delivery_info.get("redelivered") and self.request.retries == 0:
        raise self.retry(countdown=0)
    time.sleep(pause_s)
    with open("done", "a") as file:
        file.write(f"{number}\\n")
"""


class Shop:
    """A queue of its own, its workers and its client."""

    def __init__(self, cluster: Cluster, folder: Path, partitions: int, session_ms: int = 1500) -> None:
        self.cluster, self.folder = cluster, folder
        self.url = f"metamq://{cluster.zookeeper.partition('/')[0]}"
        self.queue = f"tasks-{time.monotonic_ns()}"
        self._environment = {"BROKER": self.url, "QUEUE": self.queue, "PARTITIONS": str(partitions)}
        self._environment["SESSION_MS"] = str(session_ms)
        self.app = Celery("tasks", broker=self.url)
        self.app.conf.task_default_queue = self.queue
        self.app.conf.broker_transport_options = {"partitions": partitions}

    def send(self, *arguments: object, **options: Any) -> None:
        self.app.send_task("note", arguments, **options)

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        (self.folder / "tasks.py").write_text(TASKS)
        options = ["--concurrency", "4", "--loglevel", "INFO"]
        command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", *options]
        environment = {**os.environ, **self._environment, "PYTHONPATH": str(self.folder)}
        with (
            (self.folder / "log").open("ab") as log,
            subprocess.Popen(
                command, cwd=self.folder, env=environment, start_new_session=True, stdout=log, stderr=log
            ) as process,
        ):
            try:
                yield process
                process.terminate()
                process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def lines(self, name: str) -> list[int]:
        path = self.folder / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def lag(self) -> int:
        with self.cluster.admin() as admin:
            return admin.describe_group(self.queue).lag


@pytest.fixture
def shop(metamq_cluster: Cluster, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(metamq_cluster, tmp_path, 2)
    yield made
    made.app.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_tasks_run_once(shop: Shop) -> None:
    for number in range(20):
        shop.send(number)
    for _ in range(2):  # the second worker finds nothing left
        with shop.worker():
            wait_until(lambda: len(shop.lines("done")) >= 20)
        assert shop.lag() == 0
    assert sorted(shop.lines("done")) == list(range(20))


def test_a_task_that_is_tried_again_and_a_countdown(shop: Shop) -> None:
    shop.send(0, 0, True)
    shop.send(1, countdown=2)
    with shop.worker():
        wait_until(lambda: sorted(shop.lines("done")) == [0, 1])
    assert sorted(shop.lines("begun")) == [0, 0, 1]
    assert shop.lag() == 0


def test_a_killed_worker_loses_no_task(metamq_cluster: Cluster, tmp_path: Path) -> None:
    """A long task holds back the commit: so it runs again, and with it the task after it."""
    shop = Shop(metamq_cluster, tmp_path, 1)
    shop.send(0, 3600)
    shop.send(1)
    for times in (1, 2):
        with shop.worker() as process:
            wait_until(lambda times=times: shop.lines("done") == [1] * times)
            os.killpg(process.pid, signal.SIGKILL)
    assert sorted(shop.lines("begun")) == [0, 0, 1, 1]
    assert shop.lag() == 2
    shop.app.close()


def test_a_rejected_message_comes_again_at_the_end(shop: Shop) -> None:
    with Connection(shop.url, transport_options={"partitions": 1}) as connection:
        queue = connection.SimpleQueue(f"{shop.queue}-simple")
        for number in range(3):
            queue.put(number)
        first = queue.get(timeout=LIMIT_S)
        first.requeue()
        found = []
        for _ in range(3):
            message = queue.get(timeout=LIMIT_S)
            found.append(message.payload)
            message.ack()
        assert (first.payload, found) == (0, [1, 2, 0])
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.5)
        queue.close()
    with shop.cluster.admin() as admin:
        assert admin.describe_group(f"{shop.queue}-simple").lag == 0


@pytest.mark.parametrize("value", [b"no JSON", b"[1]", b"{}", b'{"properties": 1}', b"\xff"])
def test_a_message_that_is_no_task_is_passed_over(metamq_cluster: Cluster, tmp_path: Path, value: bytes) -> None:
    shop = Shop(metamq_cluster, tmp_path, 1)
    shop.send(0)
    with metamq_cluster.producer() as producer:
        producer.send(shop.queue, value).result(LIMIT_S)
    shop.send(1)
    with shop.worker():
        wait_until(lambda: sorted(shop.lines("done")) == [0, 1])
    assert shop.lag() == 0
    assert f"{shop.queue}/0-0 at offset 1 is no task" in (tmp_path / "log").read_text()
    shop.app.close()


def test_a_message_without_acknowledgement_comes_once(shop: Shop) -> None:
    for name in ("gets", "consumes"):
        for number in range(2):
            with Connection(shop.url, transport_options={"partitions": 1}) as connection:
                queue = connection.SimpleQueue(f"{shop.queue}-{name}", no_ack=True)
                queue.put(number)
                if name == "gets":
                    message = None
                    while message is None:
                        message = queue.queue.get(no_ack=True)
                    assert message.payload == number
                else:
                    assert queue.get(timeout=LIMIT_S).payload == number
                queue.close()


def test_a_requeued_message_stays_in_its_queue(shop: Shop) -> None:
    with Connection(shop.url, transport_options={"partitions": 1}) as connection:
        exchange = Exchange("feed")
        bound = kombu.Queue(f"{shop.queue}-bound", exchange, routing_key="feed.import", channel=connection)
        bound.declare()
        with connection.Producer() as producer:
            producer.publish("a value", exchange=exchange, routing_key="feed.import")
        with connection.SimpleQueue(bound) as queue:
            queue.get(timeout=LIMIT_S).requeue()
            again = queue.get(timeout=LIMIT_S)
            assert again.payload == "a value"
            again.ack()


def test_two_names_are_two_queues(shop: Shop) -> None:
    with Connection(shop.url, transport_options={"partitions": 1}) as connection:
        for name in (f"{shop.queue} x", f"{shop.queue}-x", f"{shop.queue}/x"):
            with connection.SimpleQueue(name) as queue:
                queue.put(name)
        for name in (f"{shop.queue} x", f"{shop.queue}-x", f"{shop.queue}/x"):
            with connection.SimpleQueue(name) as queue:
                message = queue.get(timeout=LIMIT_S)
                message.ack()
                assert message.payload == name


def test_an_outage_of_zookeeper_runs_no_task_twice(tmp_path: Path) -> None:
    with cluster(folder=tmp_path / "cluster") as own:
        shop = Shop(own, tmp_path, 2, session_ms=20_000)
        shop.send(100, 6)
        with shop.worker():
            wait_until(lambda: shop.lines("begun") == [100])
            with own.freeze("zookeeper"):
                time.sleep(3)
            for number in range(5):
                shop.send(number)
            wait_until(lambda: sorted(shop.lines("done")) == [0, 1, 2, 3, 4, 100])
        assert sorted(shop.lines("begun")) == [0, 1, 2, 3, 4, 100]
        shop.app.close()


def test_acknowledged_tasks_are_committed_before_another_worker_takes_over(shop: Shop) -> None:
    name, options = f"{shop.queue}-moved", {"partitions": 2, "commit_interval_s": 3600}
    with Connection(shop.url, transport_options=options) as first, first.SimpleQueue(name) as queue:
        for number in range(10):
            queue.put(number)
        for _ in range(10):
            queue.get(timeout=LIMIT_S).ack()
        with Connection(shop.url, transport_options=options) as second, second.SimpleQueue(name) as other:

            def is_shared() -> bool:
                for one in (queue, other):  # both go on, as workers do
                    with pytest.raises(queue.Empty):
                        one.get(timeout=0.2)
                return len(assignment(second, name)) == 1

            wait_until(is_shared)
            (taken,) = assignment(second, name)
            with shop.cluster.admin() as admin:
                parts = {one.partition: one.lag for one in admin.describe_group(name).partitions}
    assert parts[taken.partition] == 0


def assignment(connection: Connection, queue: str) -> list[TopicPartition]:
    return connection.default_channel._queues[queue].consumer.assignment if connection.default_channel._queues else []


def test_a_purged_queue_is_empty(shop: Shop) -> None:
    for number in range(5):
        shop.send(number)
    with shop.app.connection() as connection:
        assert connection.default_channel.queue_purge(shop.queue) == 5
    with shop.worker():
        shop.send(5)
        wait_until(lambda: shop.lines("done"))
    assert shop.lines("done") == [5]


def test_a_url_without_a_host_means_the_environment(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAMQ_ZOOKEEPER", shop.cluster.zookeeper)
    with Connection("metamq://") as connection:
        queue = connection.SimpleQueue(f"{shop.queue}-env")
        queue.put(1)
        message = queue.get(timeout=LIMIT_S)
        message.ack()
        queue.close()
    assert message.payload == 1


def test_an_unreachable_zookeeper_is_an_error_that_celery_tries_again() -> None:
    with Connection("metamq://127.0.0.1:1") as connection, pytest.raises(ConnectError) as caught:
        connection.SimpleQueue("any").put(1)
    assert isinstance(caught.value, connection.connection_errors)


def test_the_offset_to_commit_is_that_of_the_oldest_unfinished_task() -> None:
    unfinished = Unfinished()
    for offset in (5, 6, 7):
        unfinished.begin(offset)
    unfinished.finish(6)
    assert unfinished.to_commit() is None
    unfinished.finish(5)
    assert unfinished.to_commit() == 7
    assert unfinished.to_commit() == 7, "as long as the commit has not succeeded"
    unfinished.note_commit(7)
    assert unfinished.to_commit() is None
    unfinished.finish(7)
    assert unfinished.to_commit() == 8
