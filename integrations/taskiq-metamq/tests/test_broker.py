"""MetamqBroker in a real worker of taskiq, with a real cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from taskiq import AckableMessage, SendTaskError
from taskiq_metamq import MetamqBroker
from taskiq_metamq.broker import Unfinished

from metamq.errors import ConfigError
from metamq.testing import Cluster

LIMIT_S = 60
TASKS = """
import os, time
from taskiq_metamq import MetamqBroker

broker = MetamqBroker(topic=os.environ["TOPIC"], consumer={"session_timeout_ms": 1500})

@broker.task(task_name="note")
def note(number: int, pause_s: float = 0) -> None:
    with open("begun", "a") as file:
        file.write(f"{number}\\n")
    time.sleep(pause_s)
    with open("done", "a") as file:
        file.write(f"{number}\\n")
"""


@contextmanager
def worker(folder: Path, cluster: Cluster, topic: str) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "tasks.py").write_text(TASKS)
    command = [sys.executable, "-m", "taskiq", "worker", "tasks:broker", "--workers", "1", "--max-async-tasks", "8"]
    environment = {**os.environ, "METAMQ_ZOOKEEPER": cluster.zookeeper, "TOPIC": topic, "PYTHONPATH": str(folder)}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True) as process:
        try:
            yield process
            process.terminate()
            process.wait(LIMIT_S)
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


@asynccontextmanager
async def client(cluster: Cluster, topic: str) -> AsyncIterator[MetamqBroker]:
    broker = MetamqBroker(cluster.zookeeper, topic=topic)
    await broker.startup()
    try:
        yield broker
    finally:
        await broker.shutdown()


async def kick(broker: MetamqBroker, *arguments: object) -> None:
    @broker.task(task_name="note")
    def note(number: int, pause_s: float = 0) -> None: ...

    await note.kiq(*arguments)


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.asyncio
async def test_tasks_run_once(metamq_cluster: Cluster, metamq_topic: str, tmp_path: Path) -> None:
    async with client(metamq_cluster, metamq_topic) as broker:
        for number in range(20):
            await kick(broker, number)
    for _ in range(2):  # the second worker finds nothing left
        with worker(tmp_path, metamq_cluster, metamq_topic):
            wait_until(lambda: len(lines(tmp_path / "done")) >= 20)
    with metamq_cluster.admin() as admin:
        assert admin.describe_group("taskiq").lag == 0
    assert sorted(lines(tmp_path / "done")) == list(range(20))


@pytest.mark.asyncio
async def test_a_killed_worker_loses_no_task(metamq_cluster: Cluster, tmp_path: Path) -> None:
    """A long task holds back the commit: so it runs again, and with it what came after it."""
    topic = metamq_cluster.new_topic(partitions=1)
    async with client(metamq_cluster, topic) as broker:
        await kick(broker, 0, 3600)
        await kick(broker, 1)
        with worker(tmp_path, metamq_cluster, topic) as process:
            wait_until(lambda: lines(tmp_path / "done") == [1] and sorted(lines(tmp_path / "begun")) == [0, 1])
            os.killpg(process.pid, signal.SIGKILL)
        with worker(tmp_path, metamq_cluster, topic) as process:
            wait_until(lambda: lines(tmp_path / "done") == [1, 1] and lines(tmp_path / "begun").count(0) == 2)
            os.killpg(process.pid, signal.SIGKILL)
    assert sorted(lines(tmp_path / "begun")) == [0, 0, 1, 1]


@pytest.mark.asyncio
async def test_acknowledgements_commit_up_to_the_oldest_unfinished_task(metamq_cluster: Cluster) -> None:
    topic = metamq_cluster.new_topic(partitions=1)
    async with client(metamq_cluster, topic) as broker:
        for number in range(3):
            await kick(broker, number)
    broker = MetamqBroker(metamq_cluster.zookeeper, topic=topic, group=topic)
    broker.is_worker_process = True
    await broker.startup()
    tasks = broker.listen()
    first, second, third = [await anext(tasks) for _ in range(3)]

    async def committed_after(one: AckableMessage) -> int | None:
        one.ack()
        await broker._commit()
        with metamq_cluster.admin() as admin:
            (offset,) = await asyncio.to_thread(lambda: admin.describe_group(topic).partitions)
        return offset.committed

    assert not await committed_after(second)  # at most the place where the group began
    assert await committed_after(first) == 2
    assert await committed_after(third) == 3
    await tasks.aclose()
    await broker.shutdown()


@pytest.mark.asyncio
async def test_a_delay(metamq_cluster: Cluster, metamq_topic: str) -> None:
    async with client(metamq_cluster, metamq_topic) as broker:

        @broker.task(task_name="later", delay=0.2)
        def later() -> None: ...

        @broker.task(task_name="wrong", delay="soon")
        def wrong() -> None: ...

        await later.kiq()
        with pytest.raises(SendTaskError) as caught:
            await wrong.kiq()
        assert isinstance(caught.value.__cause__, ConfigError)
    sent_us = time.time_ns() // 1000
    async with metamq_cluster.aio_consumer(topics=metamq_topic, start="earliest") as consumer:
        message = await anext(aiter(consumer))
    assert message.timestamp >= sent_us - 200_000


def test_the_offset_to_commit_is_that_of_the_oldest_unfinished_task() -> None:
    unfinished = Unfinished(5)
    for offset in (5, 6, 7):
        unfinished.begin(offset)
    unfinished.finish(6)
    assert unfinished.to_commit() is None
    unfinished.finish(5)
    assert unfinished.to_commit() == 7
    assert unfinished.to_commit() == 7, "as long as the commit has not succeeded"
    unfinished.committed = 7
    assert unfinished.to_commit() is None
    unfinished.finish(7)
    assert unfinished.to_commit() == 8


@pytest.mark.asyncio
async def test_a_partition_that_comes_back_begins_again(metamq_cluster: Cluster) -> None:
    """Another worker has processed the tasks meanwhile, and this one acknowledges late."""
    topic = metamq_cluster.new_topic(partitions=1)
    async with client(metamq_cluster, topic) as sender:
        for number in range(3):
            await kick(sender, number)
    broker = MetamqBroker(metamq_cluster.zookeeper, topic=topic, group=topic, commit_interval_s=3600)
    broker.is_worker_process = True
    await broker.startup()
    tasks = broker.listen()
    late = await anext(tasks)
    (partition,) = broker._unfinished
    await broker._give_up([partition])
    again = await anext(tasks)
    again.ack()
    late.ack()
    await broker._commit()
    with metamq_cluster.admin() as admin:
        (offset,) = await asyncio.to_thread(lambda: admin.describe_group(topic).partitions)
    assert offset.committed == 2
    await tasks.aclose()
    await broker.shutdown()


@pytest.mark.asyncio
async def test_acknowledged_tasks_are_committed_before_another_worker_takes_over(metamq_cluster: Cluster) -> None:
    topic = metamq_cluster.new_topic(partitions=2)
    async with client(metamq_cluster, topic) as sender:
        for number in range(10):
            await kick(sender, number)
    brokers = [
        MetamqBroker(metamq_cluster.zookeeper, topic=topic, group=topic, commit_interval_s=3600) for _ in range(2)
    ]
    for broker in brokers:
        broker.is_worker_process = True
    await brokers[0].startup()
    tasks = brokers[0].listen()
    for _ in range(10):
        (await anext(tasks)).ack()
    waiting = asyncio.create_task(anext(tasks))
    await brokers[1].startup()
    async with asyncio.timeout(LIMIT_S):
        while len(brokers[1]._consumer.assignment) != 1:  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(0.02)
    with metamq_cluster.admin() as admin:
        described = await asyncio.to_thread(lambda: admin.describe_group(topic))
    (taken,) = brokers[1]._consumer.assignment
    (part,) = [one for one in described.partitions if one.partition == taken.partition]
    assert part.lag == 0
    waiting.cancel()
    await asyncio.wait([waiting])
    for broker in brokers:
        await broker.shutdown()
