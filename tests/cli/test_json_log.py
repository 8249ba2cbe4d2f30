"""`metamq broker --log-format json`: each line is an object with the fields of its record."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from metamq.cli.json_log import JsonLines
from tests.one_zookeeper import new_chroot
from tests.parts import wait_until


def test_a_record_has_its_fields_and_its_traceback() -> None:
    log = logging.getLogger("tests.json")
    record = log.makeRecord("a", logging.ERROR, "f", 1, "%s\n is lost", ("t/0-3",), None, extra={"topic": "t"})
    line = JsonLines(broker=7).format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {"level": "ERROR", "logger": "a", "message": "t/0-3\n is lost", "broker": 7, "topic": "t"}
    try:
        raise ValueError("no")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: no" in json.loads(JsonLines().format(record))["traceback"]


def test_a_broker_writes_only_objects(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "metamq.cli", "broker", "--zookeeper", new_chroot(), "--data", str(tmp_path / "b"),
        "--id", "3", "--port", "0", "--http-port", "-1", "--log-format", "json", "-o", "json",
    ]  # fmt: skip
    said = tmp_path / "log"
    with said.open("wb") as log, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log) as broker:
        try:
            wait_until(lambda: "is up at" in said.read_text())
        finally:
            broker.terminate()
    lines = [json.loads(line) for line in said.read_text().splitlines()]
    assert {(line["broker"], line["replica"]) for line in lines} == {(3, 0)}
    assert all(line["level"] == "INFO" for line in lines)
