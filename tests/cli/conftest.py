"""One cluster for all tests of the command line, and the command line: in this process, or in one of its own."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from metamq.cli.app import run
from metamq.cli.demo.flights import FILE, PACKAGE, WHOLE_NUMBERS
from metamq.testing import Cluster, cluster

FLIGHTS = 5_000
LIMIT_S = 60.0
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


@pytest.fixture(autouse=True)
def _no_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contexts of the person who runs the tests choose no cluster in them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


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
        child: subprocess.Popen[Any] = subprocess.Popen(
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


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The only place for temporary files of a process that has it as its TMPDIR."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def flights(tmp_path: Path) -> Path:
    """A stand-in for the package with the demo's data: for PYTHONPATH."""
    place = tmp_path / "packages"
    file = place / PACKAGE / FILE
    file.parent.mkdir(parents=True)
    text = io.StringIO()
    rows = csv.DictWriter(text, [*WHOLE_NUMBERS, "carrier"])
    rows.writeheader()
    for number in range(FLIGHTS):
        rows.writerow({**dict.fromkeys(WHOLE_NUMBERS, number % 60), "carrier": f"C{number % 16}"})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("flights.csv", text.getvalue())
    metadata = place / f"{PACKAGE}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n")
    (metadata / "RECORD").write_text(f"{PACKAGE}/{FILE},,\n")
    return place


def until(condition: Callable[[], Any], what: str = "it", limit_s: float = LIMIT_S) -> None:
    """Waits for a condition, for a limited time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in time"
        time.sleep(0.02)


def but_for_closing(talk: bytes) -> bytes:
    """What a process said, without the warning that its connection to ZooKeeper takes long to close: it may."""
    return b"".join(line for line in talk.splitlines(True) if b"is still closing; left to itself" not in line)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., None]:
    return until
