"""One cluster for all tests of the command line, and the command line: in this process, or in one of its own."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from metamq.cli.app import run
from metamq.testing import Cluster, cluster

LIMIT_S = 30.0
COMMAND = [sys.executable, "-W", "error", "-m", "metamq.cli"]
LOGGERS = ("metamq", "metamq.client", "metamq.zk", "kazoo")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended, and what it printed."""

    status: int
    data: bytes
    talk: str

    @property
    def text(self) -> str:
        return self.data.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.data)


Metamq = Callable[..., Outcome]


@pytest.fixture(scope="session")
def running() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


def unset(environment: Mapping[str, str]) -> dict[str, str]:
    """Without settings of metamq, but for where Java and the jars are."""
    kept = ("METAMQ_JAVA", "METAMQ_ZOOKEEPER_JARS", "METAMQ_MAVEN")
    return {name: value for name, value in environment.items() if not name.startswith("METAMQ_") or name in kept}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metamq]:
    """The command line in this process, without a cluster: offline("topic", "list", stdin=b"")."""
    for name in set(os.environ) - set(unset(os.environ)):
        monkeypatch.delenv(name)
    levels = {name: logging.getLogger(name).level for name in LOGGERS}

    def metamq(*arguments: object, stdin: bytes = b"") -> Outcome:
        out, err = io.BytesIO(), io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            patch.setattr(sys, "stdout", io.TextIOWrapper(out, write_through=True))
            patch.setattr(sys, "stderr", io.TextIOWrapper(err, write_through=True))
            status = run([str(argument) for argument in arguments])
            return Outcome(status, out.getvalue(), err.getvalue().decode())

    yield metamq
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def metamq(offline: Metamq, running: Cluster, monkeypatch: pytest.MonkeyPatch) -> Metamq:
    """The command line in this process, with the cluster."""
    monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
    return offline


@pytest.fixture
def topic(metamq: Metamq, request: pytest.FixtureRequest) -> str:
    """A topic of this test's own, with one partition."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    assert metamq("topic", "create", name, "--partitions", 1).status == 0
    return name


@pytest.fixture
def process(running: Cluster) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `metamq` as a process, with pipes; what still runs at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object, **settings: Any) -> subprocess.Popen[bytes]:
        environment = {**unset(os.environ), "METAMQ_ZOOKEEPER": running.zookeeper, **settings.pop("env", {})}
        child = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            env=environment,
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings},
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


def until(condition: Callable[[], Any], what: str = "it") -> None:
    """Waits for a condition, for a limited time."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in time"
        time.sleep(0.02)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., None]:
    return until
