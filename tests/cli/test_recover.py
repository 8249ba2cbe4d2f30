"""`metamq tx recover`: ends what killed applications left, once or as a service."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from metamq.testing import Cluster
from metamq.tx import create_outcome_table
from tests.cli.conftest import Metamq, until
from tests.parts import http_get, values_to_end
from tests.postgres import new_schema

APPLICATION = """
import os, sqlite3, sys
import psycopg
from metamq import Producer
from metamq.tx import dbtx
from metamq.tx.app.work import GlobalTransaction
from metamq.tx.database.outcomes import OutcomeTable

async def die(*_: object) -> None:
    os.kill(os.getpid(), 9)

zookeeper, topic, database, moment = sys.argv[1:]
place, name = {"prepared": (OutcomeTable, "commit"), "decided": (GlobalTransaction, "commit")}[moment]
setattr(place, name, die)
connect = psycopg.connect if "://" in database else sqlite3.connect
with Producer(zookeeper) as producer, dbtx(connect(database), producer) as tx:
    tx.send(topic, moment.encode())
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


def killed(running: Cluster, topic: str, database: str, moment: str) -> None:
    """An application is killed at a moment of its transaction."""
    command = [sys.executable, "-c", APPLICATION, running.zookeeper, topic, database, moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def prepared(metamq: Metamq) -> int:
    return len(metamq("tx", "list", "--state", "prepared", "-o", "json").json)


def messages(running: Cluster, topic: str) -> list[bytes]:
    with running.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
        return values_to_end(consumer)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        create_outcome_table(connection)
    return tmp_path / "shop.db"


def test_one_pass(metamq: Metamq, running: Cluster, topic: str, file: Path) -> None:
    killed(running, topic, str(file), "prepared")
    killed(running, topic, str(file), "decided")
    recover = ("tx", "recover", "--database", f"sqlite:///{file}")
    waiting = metamq(*recover, "--grace", "1h")
    assert (waiting.status, waiting.data, waiting.talk) == (0, b"", "0 committed, 0 rolled back, 2 left.\n")
    (branch, _other) = metamq("tx", "list", "-o", "json").json
    assert "Run `metamq tx recover`" in metamq("tx", "show", branch["xid"]).talk
    done = metamq(*recover, "--grace", "0s", "-o", "json")
    assert (done.status, done.json) == (0, {"committed": 1, "rolled_back": 1, "left": 0, "problems": []})
    assert messages(running, topic) == [b"decided"]


def test_a_broker_without_an_answer_is_named(metamq: Metamq, running: Cluster, file: Path) -> None:
    recover = ("tx", "recover", "--database", f"sqlite:///{file}")
    running.broker.stop()
    try:
        text, document = metamq(*recover), metamq(*recover, "-o", "json")
    finally:
        running.broker.start()
    assert (text.status, text.data, document.status) == (1, b"", 1)
    assert "Broker 0 does not list its prepared branches: " in text.talk
    (problem,) = document.json["problems"]
    assert (problem["broker_id"], problem["xids"]) == (0, [])
    assert problem["hint"] in text.talk


def test_postgresql_by_its_url(metamq: Metamq, running: Cluster, topic: str, postgres: str) -> None:
    known = conninfo_to_dict(postgres)
    url = f"postgresql://{known['user']}@/{known['dbname']}?host={known['host']}"
    url += f"&options=-csearch_path%3D{new_schema(postgres)}"
    with psycopg.connect(url) as connection:
        create_outcome_table(connection)
    killed(running, topic, url, "decided")
    done = metamq("tx", "recover", "--database", url, "--grace", "0s")
    assert (done.status, done.talk) == (0, "1 committed, 0 rolled back, 0 left.\n")
    assert messages(running, topic) == [b"decided"]


def test_a_database_without_the_table_is_named(metamq: Metamq, tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.db").close()
    (tmp_path / "empty.db").touch()
    done = metamq("tx", "recover", "--database", f"sqlite:///{tmp_path}/empty.db")
    assert done.status == 1
    assert "metamq_outcomes" in done.talk
    assert metamq("tx", "recover", "--database", "os:getcwd", "--http-port", 0).status == 2


@pytest.mark.slow
def test_a_service_is_ready_while_its_passes_end_well(
    metamq: Metamq, running: Cluster, topic: str, file: Path, process: Start
) -> None:
    (file.parent / "shop.py").write_text(f"import sqlite3\ndef connect():\n    return sqlite3.connect({str(file)!r})\n")
    killed(running, topic, str(file), "prepared")
    hidden = file.with_suffix(".hidden")
    file.rename(hidden)
    options = ("--every", "100ms", "--grace", "0s", "--http-port", 0, "-o", "json", "--log-format", "json")
    service = process("tx", "recover", "--database", "shop:connect", *options, cwd=file.parent)
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.extend(service.stderr or ()))
    reader.start()
    assert service.stdout is not None
    port = json.loads(service.stdout.readline())["http_port"]

    def page(path: str) -> tuple[int, str]:
        with contextlib.suppress(OSError):
            return http_get(port, path)
        return 0, ""

    until(lambda: "has no table" in page("/readyz")[1])
    assert (page("/readyz")[0], page("/healthz")[0], page("/else")[0]) == (503, 200, 404)
    assert prepared(metamq) == 1
    hidden.rename(file)
    until(lambda: page("/readyz") == (200, "ready\n"))
    until(lambda: prepared(metamq) == 0)
    killed(running, topic, str(file), "decided")
    until(lambda: messages(running, topic) == [b"decided"])
    running.broker.freeze()
    try:
        until(lambda: "broker 0 does not list its prepared branches: " in page("/readyz")[1])
        assert (page("/readyz")[0], "`metamq doctor`" in page("/readyz")[1]) == (503, True)
    finally:
        running.broker.thaw()
    until(lambda: page("/readyz")[0] == 200)
    figures = page("/metrics")[1]
    for outcome in ("committed", "rolled back"):
        assert f'metamq_recovery_branches_total{{outcome="{outcome}"}} 1.0' in figures
    assert "metamq_recovery_left_branches 0.0" in figures
    service.send_signal(signal.SIGTERM)
    assert service.wait(60) == 0
    reader.join(60)
    lines = [json.loads(line) for line in said]
    assert any("has no table" in line["message"] for line in lines)
    messages_of = {line["message"] for line in lines if line["logger"] == "metamq.cli"}
    assert {"0 committed, 1 rolled back", "1 committed, 0 rolled back", "recovery works"} <= messages_of


@pytest.mark.slow
def test_several_services_may_run(metamq: Metamq, running: Cluster, topic: str, file: Path, process: Start) -> None:
    """One of them is killed; the other ends the work."""
    command: tuple[Any, ...] = ("tx", "recover", "--database", f"sqlite:///{file}", "--every", "100ms", "--grace", "0s")
    services = [process(*command, "-o", "json") for _ in range(2)]
    for one in services:
        assert one.stdout is not None
        one.stdout.readline()
    services[0].kill()
    killed(running, topic, str(file), "decided")
    until(lambda: messages(running, topic) == [b"decided"])
    services[1].send_signal(signal.SIGTERM)
    assert services[1].wait(60) == 0


def test_a_second_signal_does_not_wait_for_a_pass_that_hangs(file: Path, running: Cluster, process: Start) -> None:
    hangs = file.parent / "hangs"
    (file.parent / "stuck.py").write_text(
        f"import time\ndef connect():\n    open({str(hangs)!r}, 'w').close()\n    while True: time.sleep(0.05)\n"
    )
    options = ("--every", "100ms", "--http-port", 0, "-o", "json")
    service = process("tx", "recover", "--database", "stuck:connect", *options, cwd=file.parent)
    until(hangs.exists)
    service.send_signal(signal.SIGTERM)
    assert service.stdout is not None
    port = json.loads(service.stdout.readline())["http_port"]
    until(lambda: "stopping, after this pass" in http_get(port, "/readyz")[1])
    assert (http_get(port, "/healthz")[0], service.poll()) == (200, None)
    service.send_signal(signal.SIGTERM)
    assert service.wait(60) == 130
