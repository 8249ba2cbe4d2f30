"""Every Python snippet of the README and the guides runs as printed, against a real cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import read_to_end
from tests.postgres import running_postgres

ROOT = Path(__file__).parent.parent
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AT_ONCE = {
    "docs/producing.md": 1,
    "docs/administering.md": 1,
    "docs/consuming.md": 10,
    "docs/scan.md": 4,
    "docs/monitoring.md": 1,
    "docs/typed.md": 1,
    "docs/in-production.md": 1,
    "docs/coming-from-kafka.md": 1,
    "docs/coming-from-celery.md": 1,
}
"""How many snippets of a guide run side by side. Those that consume wait for the end of the topic, most of the time."""
LONG = {f"docs/{name}.md" for name in ("producing", "administering", "consuming", "scan", "monitoring", "typed")}
"""The documents that take many seconds."""


def marked(documents: Iterable[str]) -> list[Any]:
    return [pytest.param(one, marks=pytest.mark.slow) if one in LONG else one for one in documents]


@pytest.fixture
def running() -> Iterator[Cluster]:
    """A cluster for one document: other documents have other messages in topics of the same names."""
    with cluster() as one:
        yield one


def fill_orders(running: Cluster) -> None:
    """Makes what docs/producing.md leaves behind."""
    with running.admin() as admin:
        admin.create_topic("orders", partitions=4)
        # The snippets run at a time: one gives letters up, one looks at them.
        admin.create_topic("bills.dead-letter", partitions=1)
    with running.producer() as producer:
        producer.send_many("orders", [b"%d" % number for number in range(1000)])


def snippets(document: str) -> list[str]:
    return SNIPPET.findall((ROOT / document).read_text())


def run(snippet: str, running: Cluster, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "METAMQ_ZOOKEEPER": running.zookeeper, "PYTHONWARNINGS": "error", **variables}
    # Python before 3.12 may print a wrong byte if threads print at a time (gh-118138, gh-119506).
    return subprocess.run(
        [sys.executable, "-c", snippet],
        env=environment, cwd=folder, capture_output=True, text=True, errors="replace", timeout=250,
    )  # fmt: skip


@pytest.mark.parametrize("document", marked(AT_ONCE))
def test_snippets_run_as_printed(document: str, running: Cluster, tmp_path: Path) -> None:
    found = snippets(document)
    assert found, f"{document} has no snippet"
    others = ("scan", "monitoring", "in-production", "coming-from-kafka")
    if document in ("docs/consuming.md", *(f"docs/{name}.md" for name in others)):
        fill_orders(running)
    with ThreadPoolExecutor(AT_ONCE[document]) as pool:
        ended = pool.map(lambda snippet: run(snippet, running, tmp_path), found)
    for number, (snippet, done) in enumerate(zip(found, ended, strict=True), 1):
        assert done.returncode == 0, f"{document}, snippet {number}:\n{snippet}\n{done.stderr}"


@pytest.mark.parametrize(
    "document",
    marked(["docs/producing.md", "docs/administering.md", "docs/consuming.md", "docs/typed.md", "docs/scaling.md"]),
)
def test_commands_run_as_printed(document: str, tmp_path: Path) -> None:
    found = SHELL.findall((ROOT / document).read_text())
    assert found, f"{document} has no commands"
    with cluster() as fresh:
        fill_orders(fresh)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("METAMQ_")}
        environment |= {"METAMQ_ZOOKEEPER": fresh.zookeeper, "XDG_CONFIG_HOME": str(tmp_path)}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        if document == "docs/consuming.md":
            message = ["metamq", "produce", "orders", "-k", "customer-7", '{"total": 12}']
            subprocess.run(message, env=environment, check=True)
        for block in found:
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", block],
                env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250,
            )  # fmt: skip
            assert done.returncode == 0, f"{document}:\n{block}\n{done.stderr}"


@pytest.mark.slow
def test_the_tutorial_runs_as_printed(running: Cluster, tmp_path: Path) -> None:
    """Without its Spark, which tests/spark/test_tutorial.py runs."""
    send, count, table, spark = snippets("docs/tutorial.md")
    assert "spark" in spark
    assert run(send, running, tmp_path).returncode == 0
    for _ in range(2):
        done = run(count, running, tmp_path)
        assert (done.returncode, done.stdout) == (0, "(20, 5000)\n"), done.stderr
    done = run(table, running, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"station-\d\d", done.stdout) == ["station-19", "station-18", "station-17"]
    (command,) = SHELL.findall((ROOT / "docs" / "tutorial.md").read_text())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(
        ["sh", "-c", command], env={**os.environ, "METAMQ_ZOOKEEPER": running.zookeeper, "PATH": path},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert len(shown.stdout.splitlines()) == 4


@pytest.mark.slow
def test_the_snippets_of_transactions_run_as_printed(running: Cluster, tmp_path: Path) -> None:
    fill_orders(running)
    with running.consumer(topics=["orders"], idle_timeout_s=0.5) as consumer:
        before = Counter(message.value for message in read_to_end(consumer))
    with running_postgres("-c max_prepared_transactions=10") as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            for name in ("orders", "stock"):
                connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        for name, column in (("orders", SQL("id TEXT")), ("stock", SQL("amount INT"))):
            with psycopg.connect(server.dsn.replace("dbname=postgres", f"dbname={name}")) as connection:
                connection.execute(SQL("CREATE TABLE {} ({})").format(Identifier(name), column))
        where = dict(part.split("=") for part in server.dsn.split())
        postgres = {"PGHOST": where["host"], "PGUSER": where["user"]}
        found = snippets("docs/transactions.md")
        assert len(found) >= 7
        for number, snippet in enumerate(found, 1):
            done = run(snippet, running, tmp_path, **postgres)
            assert done.returncode == 0, f"docs/transactions.md, snippet {number}:\n{snippet}\n{done.stderr}"
        with psycopg.connect(server.dsn.replace("dbname=postgres", "dbname=orders")) as connection:
            assert connection.execute("SELECT id FROM orders").fetchall() == [("20",), ("28",)]
    with running.consumer(topics=["orders"], idle_timeout_s=0.5) as consumer:
        sent = Counter(message.value for message in read_to_end(consumer)) - before
    assert sent == {b"17": 2, **{b"%d" % number: 1 for number in range(18, 29)}}


@pytest.mark.slow
def test_the_readme_prints_what_it_sent(running: Cluster, tmp_path: Path) -> None:
    """The ten lines: what the producer stored is what the consumer prints."""
    (snippet,) = snippets("README.md")
    done = run(snippet, running, tmp_path)
    assert done.returncode == 0, done.stderr
    sent, received = done.stdout.splitlines()
    assert received == f"{sent} b'hello'"
