"""Workers beside a test: they begin in their group, stop cleanly, and their errors are raised."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq import Consumer, Message, aio
from metamq.errors import ConfigError, MetamqError
from metamq.testing import Cluster, aio_running, running
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, wait_until

HANDLERS = """
import os, time

def note(message):
    with open("noted", "a") as file:
        file.write(f"{message.value.decode()}\\n")
    print("noted")

def forks(message):
    if (pid := os.fork()) == 0:
        time.sleep(600)
    with open("new", "w") as file:
        file.write(str(pid))
    os.rename("new", "fork")
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with cluster() as one:
        yield one


@pytest.fixture
def topic(shared: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "billing.py").write_text(HANDLERS)
    monkeypatch.chdir(tmp_path)
    topic = shared.new_topic("orders", 1)
    with shared.producer() as producer:
        producer.send(topic, b"17").result()
    return topic


def test_a_worker_process_stops_cleanly_and_ends_by_itself(shared: Cluster, topic: str, tmp_path: Path) -> None:
    with shared.worker(f"billing:note --group one --topic {topic} --idle-timeout 0.2s") as worker:
        assert worker.wait() == 0
    assert (tmp_path / "noted").read_text() == "17\n"
    with shared.worker(["billing:note", "--group", "one", "--topic", topic]) as worker, shared.admin() as admin:
        assert admin.describe_group("one").members
    with shared.admin() as admin:
        assert not admin.describe_group("one").members, "it has left its group"
    with shared.worker(f"billing:note --group two --topic {topic}") as worker:
        worker.kill()


def test_the_error_of_a_worker_is_raised(shared: Cluster, topic: str) -> None:
    absent = shared.worker(f"billing:absent --group one --topic {topic}")
    with pytest.raises(MetamqError, match="ended with status 2 at its start"), absent:
        pass


def test_a_handler_in_a_thread_stops_at_the_end_of_the_block(shared: Cluster, topic: str) -> None:
    seen: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with shared.consumer(topics=topic, group="threads") as consumer:
        with running(consumer, lambda message: seen.put(message.value), max_attempts=1):
            assert seen.get(timeout=SLOW_S) == b"17"
        assert consumer.stopped


def bad(_message: object) -> None:
    raise LookupError("bad")


def test_the_error_of_run_is_raised_at_the_end_of_the_block(shared: Cluster, topic: str) -> None:
    with shared.consumer(topics=topic, group="bad", idle_timeout_s=0.2) as consumer:
        ends = running(consumer, bad, max_attempts=1, dead_letter=False)
        with pytest.raises(LookupError, match="bad"), ends:
            wait_until(lambda: consumer.health().handlers, what="the call")


def fail_after_the_call(consumer: Consumer[bytes]) -> None:
    wait_until(lambda: consumer.health().handlers, what="the call")
    raise TimeoutError("what the test waits for")


def test_the_error_of_run_is_the_reason_for_the_error_of_the_block(shared: Cluster, topic: str) -> None:
    consumer = shared.consumer(topics=topic, group="reason")
    ends = running(consumer, bad, max_attempts=1, dead_letter=False)
    with consumer, pytest.raises(LookupError, match="bad") as caught, ends:
        fail_after_the_call(consumer)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_a_consumer_that_has_stopped_does_not_run_again(shared: Cluster, topic: str) -> None:
    with shared.consumer(topics=topic, group="once") as consumer:
        with running(consumer, print):
            pass
        with pytest.raises(ConfigError, match="has stopped, and runs no more"), running(consumer, print):
            pass


def test_a_worker_whose_handler_has_forked_is_waited_for(shared: Cluster, topic: str, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    with shared.worker(f"billing:forks --group forks --topic {topic}") as worker:
        wait_until(fork.exists, what="the fork")
        worker.kill()
    os.kill(int(fork.read_text()), signal.SIGKILL)


def test_a_handler_in_a_task_stops_at_the_end_of_the_block(shared: Cluster, topic: str) -> None:
    asyncio.run(_in_tasks(shared, topic))


async def _in_tasks(shared: Cluster, topic: str) -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def note(message: Message[bytes]) -> None:
        await seen.put(message.value)

    async with shared.aio_consumer(topics=topic, group="tasks") as consumer:
        async with aio_running(consumer, note), asyncio.timeout(SLOW_S):
            assert await seen.get() == b"17"
        assert consumer.stopped
    async with shared.aio_consumer(topics=topic, group="tasks-bad") as consumer:
        with pytest.raises(LookupError, match="bad"):
            await _until_called(consumer)
    async with shared.aio_consumer(topics=topic, group="tasks-reason") as consumer:
        with pytest.raises(LookupError, match="bad") as caught:
            await _until_called(consumer, TimeoutError("what the test waits for"))
        assert isinstance(caught.value.__cause__, TimeoutError)


async def _until_called(consumer: aio.Consumer[bytes], then: Exception | None = None) -> None:
    called = asyncio.Event()

    def note_and_fail(message: Message[bytes]) -> None:
        called.set()
        bad(message)

    async with aio_running(consumer, note_and_fail, max_attempts=1, dead_letter=False), asyncio.timeout(SLOW_S):
        await called.wait()
        if then is not None:
            raise then
