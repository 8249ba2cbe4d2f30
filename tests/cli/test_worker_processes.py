"""`metamq worker --processes N`: real processes that are killed, spent, and stopped by signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from metamq.testing import Cluster
from tests.cli.test_worker import committed, ended, fill, noted, ready
from tests.parts import gone, http_get, wait_until

Work = Callable[..., "subprocess.Popen[bytes]"]

HANDLERS = """
import multiprocessing, os, threading, time
from prometheus_client import Counter

bills = Counter("bills", "Bills")

def note(message):
    print("printed", flush=True)
    bills.inc()
    with open("noted", "a") as file:
        file.write(f"{os.getpid()}\\n")

def slow(message):
    time.sleep(0.01)
    note(message)

def hangs(message):
    note(message)
    threading.Event().wait()

def poison(message):
    if message.offset == 0:
        raise LookupError("poison")
    note(message)

def forks(message):
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    fork.start()
    with open("forked", "w") as file:
        file.write(f"{fork.pid} {os.getpid()} ")
"""


@pytest.fixture
def worker(topic: str, process: Callable[..., Any], tmp_path: Path) -> Work:
    (tmp_path / "handlers.py").write_text(HANDLERS)

    def start(handler: str, *more: object) -> subprocess.Popen[bytes]:
        options = ("-g", topic, "-t", topic, "--concurrency", "1", "-o", "json", *more)
        one: subprocess.Popen[bytes] = process("worker", f"handlers:{handler}", *options, cwd=tmp_path)
        return one

    return start


def samples(port: int, name: str) -> dict[str, float]:
    """The samples of a metric, by the number of the worker."""
    status, text = http_get(port, "/metrics")
    assert status == 200
    return {
        one.labels["worker"]: one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == name
    }


def test_the_status_port_has_all_processes_and_a_killed_one_starts_again(
    running: Cluster, topic: str, worker: Work, tmp_path: Path
) -> None:
    one = worker("note", "--processes", "2", "--http-port", "0")
    port = ready(one)["http_port"]
    wait_until(lambda: http_get(port, "/readyz") == (200, "worker 0: ready\nworker 1: ready\n"), what="the processes")
    fill(running, topic, 10)
    wait_until(lambda: sum(samples(port, "bills_total").values()) == 10, what="the messages")
    first, second = psutil.Process(one.pid).children()
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: sorted(samples(port, "metamq_worker_starts_total").values()) == [1, 2], what="another process")
    wait_until(lambda: http_get(port, "/readyz")[0] == 200, what="its group")
    assert second.is_running()
    one.send_signal(signal.SIGTERM)
    status, log = ended(one)
    assert status == 0, log
    assert ": it starts again in 1 s" in log
    assert "printed" in log


def test_a_killed_process_is_replaced_although_its_handler_has_forked(
    running: Cluster, topic: str, worker: Work, tmp_path: Path
) -> None:
    fill(running, topic, 1)
    one = worker("forks", "--processes", "2", "--http-port", "0")
    port = ready(one)["http_port"]
    forked = tmp_path / "forked"
    wait_until(lambda: forked.exists() and forked.read_text().endswith(" "), what="the fork")
    fork, child = map(int, forked.read_text().split())
    try:
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: sorted(samples(port, "metamq_worker_starts_total").values()) == [1, 2], what="another one")
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_process_that_is_stopped_alone_starts_again(worker: Work) -> None:
    one = worker("note", "--processes", "2", "--http-port", "0", "--log-format", "json")
    port = ready(one)["http_port"]
    psutil.Process(one.pid).children()[0].terminate()
    wait_until(lambda: sorted(samples(port, "metamq_worker_starts_total").values()) == [1, 2], what="another process")
    one.send_signal(signal.SIGTERM)
    status, log = ended(one)
    assert status == 0, log
    (line,) = [found for found in map(json.loads, log.splitlines()) if "starts again" in found["message"]]
    assert line["logger"] == "metamq.cli"


@pytest.mark.slow
def test_an_idle_process_leaves_the_others_ready(running: Cluster, topic: str, worker: Work) -> None:
    """The message comes when both have joined: a partition with a message that hangs would never move."""
    one = worker("hangs", "--processes", "2", "--http-port", "0", "--idle-timeout", "4s")
    port = ready(one)["http_port"]
    wait_until(lambda: http_get(port, "/readyz")[0] == 200, what="both processes")
    fill(running, topic, 1)
    alone = [(200, f"worker {number}: ready\n") for number in (0, 1)]
    wait_until(lambda: http_get(port, "/readyz") in alone, what="the end of one")
    one.send_signal(signal.SIGTERM)
    one.send_signal(signal.SIGINT)
    assert ended(one)[0] == 130


def test_the_options_may_end_before_the_handler(
    topic: str, worker: Work, process: Callable[..., Any], tmp_path: Path
) -> None:
    options = ("-g", topic, "-t", topic, "-o", "json", "--processes", "2")
    one = process("worker", *options, "--", "handlers:note", cwd=tmp_path)
    ready(one)
    one.send_signal(signal.SIGTERM)
    assert ended(one)[0] == 0


@pytest.mark.slow
def test_a_spent_process_is_replaced(running: Cluster, topic: str, worker: Work, tmp_path: Path) -> None:
    fill(running, topic, 100)
    one = worker("slow", "--processes", "2", "--max-messages", "3")
    wait_until(lambda: len(noted(tmp_path)) == 100 or len(set(noted(tmp_path))) > 3, what="more processes")
    one.send_signal(signal.SIGTERM)
    assert ended(one)[0] == 0
    assert len(set(noted(tmp_path))) > 2


@pytest.mark.parametrize("order", ["partition", "key"])
def test_one_process_ends_after_its_messages(
    running: Cluster, topic: str, worker: Work, metamq: Callable[..., Any], tmp_path: Path, order: str
) -> None:
    fill(running, topic, 100)
    assert ended(worker("slow", "--max-messages", "3", "--order", order))[0] == 0
    assert 3 <= len(noted(tmp_path)) < 20
    assert committed(metamq, topic) == len(noted(tmp_path))


@pytest.mark.parametrize("order", ["partition", "key"])
def test_a_message_that_fails_is_given_up_before_its_process_ends(
    running: Cluster, topic: str, worker: Work, metamq: Callable[..., Any], tmp_path: Path, order: str
) -> None:
    fill(running, topic, 1)
    options = ("--max-messages", "1", "--max-attempts", "3", "--retry-delay", "10ms", "--order", order)
    status, log = ended(worker("poison", *options))
    assert status == 0, log
    assert "given up after 3 attempts" in log
    assert committed(metamq, topic) == 1


def test_processes_that_end_by_their_idle_time_end_the_command(running: Cluster, topic: str, worker: Work) -> None:
    fill(running, topic, 5)
    assert ended(worker("note", "--processes", "2", "--idle-timeout", "200ms"))[0] == 0


def test_a_wrong_program_ends_the_command(worker: Work) -> None:
    status, log = ended(worker("absent", "--processes", "2"))
    assert status == 2
    assert log.count("absent") < 4
    assert "Traceback" not in log


def test_a_second_signal_does_not_wait(running: Cluster, topic: str, worker: Work, tmp_path: Path) -> None:
    fill(running, topic, 1)
    one = worker("hangs", "--processes", "2")
    wait_until(lambda: len(noted(tmp_path)) == 1, what="the call")
    ready(one)
    children = psutil.Process(one.pid).children()
    one.send_signal(signal.SIGTERM)
    one.send_signal(signal.SIGINT)
    assert ended(one)[0] == 130
    assert gone(children)


def test_the_processes_end_with_their_supervisor(worker: Work) -> None:
    one = worker("note", "--processes", "2")
    ready(one)
    children = psutil.Process(one.pid).children()
    one.kill()
    wait_until(lambda: gone(children), what="the end of the processes")
