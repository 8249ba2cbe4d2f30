"""A small run of the simulation in bench/scale.py: every event ends, and its figures go into the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SIZES = {
    "brokers": 2, "topics": 4, "partitions": 16, "groups": 2, "consumers": 4, "processes": 2, "session-ms": 2000,
    "commit-s": 1,
}  # fmt: skip


def _simulated(output: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--only", "scale", "--output", str(output)]
    command += [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
    subprocess.run(command, check=True, timeout=250, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(output.read_text())["scale"]
    return found


@pytest.mark.slow
def test_every_event_of_a_small_simulation_is_measured(tmp_path: Path) -> None:
    found = _simulated(tmp_path / "scale.json")
    events = found["events"]
    assert list(events) == [
        "brokers", "topics", "topic", "members", "join", "kill", "promotion", "commits", "idle", "restart",
    ]  # fmt: skip
    assert events["kill"]["s"] > 1  # the session of the killed member ends first
    assert events["commits"]["commits"] >= 16
    # 4 members, 4 replicas, and the connection that asks; the offers and owners of 16 partitions are among the nodes.
    assert found["zookeeper"]["sessions"] >= 8
    assert found["zookeeper"]["ephemeral_nodes"] >= 4 + 4 + 4 * 2 * 3 + 16
    assert set(found["constants"]) == {"commit_us", "session_us"}
