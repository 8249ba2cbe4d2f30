"""docs/fastapi.md: its code as printed, in real processes: SIGTERM under load loses no order and bills none twice."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx2 as httpx
import pytest

from metamq.testing import Cluster, cluster
from metamq.zk.server.ports import free_port
from tests.parts import SLOW_S, read_to_end, wait_until
from tests.test_docs import ROOT, SHELL, snippets

pytestmark = pytest.mark.slow
PYTEST = ["-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]


def write_files(page: str, folder: Path) -> list[list[str]]:
    """Writes the files of the page; returns the arguments of each of its commands."""
    for snippet in snippets(page):
        name, _, code = snippet.partition("\n")
        (folder / name.removeprefix("# ")).write_text(code)
    commands = []
    for command in SHELL.findall((ROOT / page).read_text()):
        metamq, *arguments = shlex.split(command.replace("\\\n", ""))
        assert metamq == "metamq"
        commands.append(["-m", "metamq.cli", *arguments])
    return commands


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    write_files("docs/fastapi.md", tmp_path)
    return tmp_path


@pytest.fixture
def billing(tmp_path: Path) -> list[str]:
    """The worker of the page."""
    (worker,) = write_files("docs/fastapi.md", tmp_path)
    return worker


@pytest.fixture
def running() -> Iterator[Cluster]:
    with cluster() as one:
        for topic in ("orders", "bills"):
            one.create_topic(topic)
        yield one


@contextmanager
def process(
    files: Path, running: Cluster, *arguments: str, stdout: IO[str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs Python in the folder of the page. At the end it stops by SIGTERM, unless the test has killed it."""
    command = [sys.executable, "-W", "error", *arguments]
    environment = {**os.environ, "METAMQ_ZOOKEEPER": running.zookeeper}
    with subprocess.Popen(command, cwd=files, env=environment, stdout=stdout) as one:
        try:
            yield one
            if one.poll() == -signal.SIGKILL:
                return
            one.send_signal(signal.SIGTERM)
            assert one.wait(SLOW_S) in (0, -signal.SIGTERM)  # uvicorn ends its work, then itself by the signal
        finally:
            one.kill()


@contextmanager
def served(
    files: Path, running: Cluster, app: str, stdout: IO[str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A service, ready."""
    port = free_port()
    with (
        process(
            files, running, "-m", "uvicorn", app, "--port", str(port), "--log-level", "warning", stdout=stdout
        ) as one,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SLOW_S) as client,
    ):

        def is_ready() -> bool:
            assert one.poll() is None
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0 and client.get("/readyz").status_code == 200

        wait_until(is_ready, what="the service")
        yield one, client


@contextmanager
def service(files: Path, running: Cluster, app: str = "orders:app") -> Iterator[httpx.Client]:
    """A service of the page, ready."""
    with served(files, running, app) as (_one, client):
        yield client


class Load(threading.Thread):
    """Sends orders, and notes those that were accepted."""

    def __init__(self, client: httpx.Client, first: int) -> None:
        super().__init__()
        self.accepted: list[int] = []
        self._client, self._first = client, first
        self.sent: list[int] = []

    def run(self) -> None:
        number = self._first
        while True:
            number += 1
            self.sent.append(number)
            try:
                answer = self._client.post("/orders", json={"id": number, "amount": 10})
            except httpx.TransportError:  # the service has ended
                return
            assert answer.status_code == 202, answer.text
            self.accepted.append(number)


def ids(running: Cluster, topic: str) -> Counter[int]:
    with running.consumer(topics=topic, idle_timeout_s=0.5, decode=json.loads) as consumer:
        return Counter(message.value["id"] for message in read_to_end(consumer))


def test_the_tests_of_the_page_pass(files: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, *PYTEST, "."], cwd=files, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 4 passed" in done.stdout


def test_sigterm_under_load_loses_no_order_and_bills_none_twice(
    files: Path, billing: list[str], running: Cluster
) -> None:
    loads = []
    for first in (0, 1_000_000):  # each time, another process of each kind
        with process(files, running, *billing):
            with service(files, running) as client:
                load = Load(client, first)
                load.start()
                loads.append(load)
                wait_until(lambda: len(load.accepted) > 100, what="some load")  # noqa: B023
                wait_until(lambda: client.get(f"/orders/{load.accepted[0]}/bill").status_code == 200)  # noqa: B023
            load.join(SLOW_S)
            assert not load.is_alive()
        # Both have ended amid their work.
    accepted = {number for load in loads for number in load.accepted}
    sent = {number for load in loads for number in load.sent}
    stored = ids(running, "orders")
    assert accepted <= stored.keys() <= sent
    assert set(stored.values()) == {1}
    with process(files, running, *billing):
        deadline = time.monotonic() + SLOW_S
        while (bills := ids(running, "bills")).keys() != stored.keys():
            assert time.monotonic() < deadline
    assert ids(running, "bills") == Counter(dict.fromkeys(stored, 1)) == bills


def test_without_its_broker_the_service_is_not_ready(files: Path, running: Cluster) -> None:
    with service(files, running) as client:
        running.broker.kill()
        wait_until(lambda: client.get("/readyz").status_code == 503)
        running.broker.start()
        wait_until(lambda: client.get("/readyz").status_code == 200)


def test_a_service_with_dbtx_is_ready_again_without_a_request_that_tries_it(files: Path, running: Cluster) -> None:
    with service(files, running, "shop:app") as client:
        assert client.post("/orders/1").status_code == 201
        running.broker.kill()
        assert client.post("/orders/2").status_code == 503
        assert client.get("/readyz").status_code == 503
        running.broker.start()
        wait_until(lambda: client.get("/readyz").status_code == 200)
        assert client.post("/orders/3").status_code == 201
    assert ids(running, "orders") == {1: 1, 3: 1}
