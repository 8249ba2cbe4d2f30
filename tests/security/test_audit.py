"""The audit log: who did what from where, allowed or not."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.config import BrokerConfig
from metamq.broker.front_door import audit
from metamq.broker.front_door.audit import COMMAND, LOGIN, REFUSED, Audit
from metamq.client.net.blocking_connection import BlockingConnection
from metamq.errors import AuthenticationFailed, ConfigError, NotAuthorized
from metamq.security.certificates import Authority
from metamq.security.tls import client_security
from metamq.testing import Cluster
from metamq.wire.commands import Command, Promote, Tx
from metamq.wire.xa import Verb, Xid
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import client_of, secured
from tests.security.raw_client import RawClient

CANARY = "swordfish-4711"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def set_to(now_s: float) -> None:
        monkeypatch.setattr(audit.time, "time", lambda: now_s)

    set_to(1_000_000.0)
    return set_to


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Audit, Path]]:
    path = tmp_path / "audit.log"
    log = Audit(BrokerConfig(id=3, replica=1, audit=str(path), audit_bytes_max=4096))
    yield log, path
    log.close()


def test_a_line_says_who_did_what_from_where(made: tuple[Audit, Path], clock: Callable[[float], None]) -> None:
    log, path = made
    log.record(LOGIN, "e\ntl", "10.0.0.1:99", "client \x1b[31m", allowed=False, reason="wrong")
    log.close()
    (line,) = path.read_bytes().splitlines()
    assert not any(byte < 32 or byte > 126 for byte in line)
    assert json.loads(line) == {
        "time": "1970-01-12T13:46:40.000+00:00", "broker": 3, "replica": 1, "event": "login", "principal": "e\ntl",
        "peer": "10.0.0.1:99", "what": "client \x1b[31m", "allowed": False, "reason": "wrong",
    }  # fmt: skip


def test_one_client_cannot_fill_the_log_and_hides_nobody(
    made: tuple[Audit, Path], clock: Callable[[float], None]
) -> None:
    log, path = made
    for port in range(2 * audit.ALL_LINES_PER_S):
        log.record(REFUSED, "noisy", f"10.0.0.1:{port}", "read topic:x", allowed=False)
        log.record(LOGIN, f"name of its choice {port}", f"10.0.0.2:{port}", "SCRAM", allowed=False)
    log.record(REFUSED, "other", "10.0.0.1:1", "read topic:x", allowed=False)
    clock(1_000_001.0)
    log.record(REFUSED, "noisy", "10.0.0.1:1", "read topic:x", allowed=False)
    log.close()
    found = [line for file in sorted(path.parent.iterdir(), reverse=True) for line in lines_of(file)]
    assert len(found) == 2 * audit.LINES_PER_S + 2
    assert [line["principal"] for line in found[-2:]] == ["other", "noisy"]
    assert [line.get("left_out", 0) for line in found[-2:]] == [4 * audit.ALL_LINES_PER_S - 2 * audit.LINES_PER_S, 0]


def test_all_clients_together_have_a_limit(made: tuple[Audit, Path], clock: Callable[[float], None]) -> None:
    log, _path = made
    for number in range(audit.ALL_LINES_PER_S + 7):
        log.record(REFUSED, f"user{number}", "10.0.0.1:1", "", allowed=False)
    assert log._left_out == 7
    log.record(COMMAND, "admin", "10.0.0.1:1", "PROMOTE", allowed=True)
    assert log._left_out == 0, "a command is always written, and says how many lines are missing"


def test_files_are_rotated(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = Audit(BrokerConfig(audit=str(path), audit_bytes_max=4096))
    for number in range(400):
        log.record(COMMAND, f"user{number}", "10.0.0.1:1", "x" * 50, allowed=True)
    log.close()
    names = {"audit.log", *(f"audit.log.{number}" for number in range(1, audit.FILES_KEPT + 1))}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert all(file.stat().st_size <= 4096 for file in tmp_path.iterdir())
    assert lines_of(path)[-1]["principal"] == "user399"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the audit log '.*' cannot be written: No such file or directory"):
        Audit(BrokerConfig(audit=str(tmp_path / "missing" / "audit.log")))


def metrics(running: Cluster) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{running.broker.http_port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().replace('{broker="0"}', "").splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


FULL = """
import logging, resource, signal, sys
from metamq.broker.config import BrokerConfig
from metamq.broker.front_door.audit import Audit
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
logging.basicConfig(stream=sys.stdout, format="%(message)s")
log = Audit(BrokerConfig(audit=sys.argv[1]))
for number in range(20):
    log.record("login", f"user{number}", "10.0.0.1:1", "", allowed=True)
log.close()
"""


def test_a_full_disk_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "audit.log")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    (told,) = done.stdout.splitlines()
    assert told.startswith(f"the audit log {tmp_path}/audit.log loses lines: ")


def test_a_broker_writes_logins_refusals_and_commands(authority: Authority, name: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    (tmp_path / "password").write_text(CANARY)
    with cluster(security=secured(authority.folder, zookeeper_tls=False), audit=str(path)) as running:
        with RawClient(running, authority, name) as client:
            assert isinstance(client.error(Command.PROMOTE, Promote(accept_loss=False)), NotAuthorized)
        with RawClient(running, authority, "admin") as admin:
            admin.error(Command.PROMOTE, Promote(accept_loss=False))
            admin.ask(Command.TX, Tx([1, b"x", b""], 0, "s", [Verb.HEURISTIC_ROLLBACK], 0, -1, 0, []))
        wrong = replace(client_of(authority.folder), user="etl", password_file=str(tmp_path / "password"))
        with pytest.raises(AuthenticationFailed):
            BlockingConnection.open(
                "127.0.0.1", running.broker.port, security=client_security(wrong).brokers, timeout_s=SLOW_S
            )
        wait_until(lambda: len(lines_of(path)) >= 6, what="the lines")
        counted = metrics(running)
        assert (counted["metamq_broker_refusals_total"], counted["metamq_broker_failed_logins_total"]) == (1, 1)
        found = [(one["event"], one["principal"], one["what"], one["allowed"]) for one in lines_of(path)]
        assert path.stat().st_mode & 0o777 == 0o640
        assert CANARY not in path.read_text()
    mine = [one for one in found if one[1] in (name, "etl") or one[0] == COMMAND]
    assert [(event, who, allowed) for event, who, _what, allowed in mine] == [
        (LOGIN, name, True), (REFUSED, name, False), (COMMAND, "admin", True), (COMMAND, "admin", True),
        (LOGIN, "etl", False),
    ]  # fmt: skip
    assert [what for _event, _who, what, _allowed in mine][1:4] == [
        "promote cluster", "PROMOTE", f"HEURISTIC_ROLLBACK {Xid(1, b'x')}",
    ]  # fmt: skip
