"""`metamq produce --delay` and `metamq delayed`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from metamq.testing import Cluster
from tests.cli.conftest import Metamq
from tests.parts import wait_until


def test_what_waits_is_shown(metamq: Metamq, running: Cluster, topic: str) -> None:
    before = metamq("delayed", "-o", "json").json[0]["waiting"]
    assert metamq("produce", topic, "--delay", "2h", "--key", "k", "first", "second").status == 0
    record = b'{"value": "third", "timestamp_us": 1700000000000000}\n'
    assert metamq("produce", topic, "--delay", "2h", "--json", stdin=record).status == 0
    found: dict[str, Any] = {}

    def is_known() -> bool:
        found.update(metamq("delayed", "-o", "json").json[0])
        return found["waiting"] == before + 3 and found["next_due"] is not None

    wait_until(is_known)
    assert found["broker"] == 0
    assert datetime.fromisoformat(found["next_due"]) < datetime.now(UTC) + timedelta(hours=2)
    assert metamq("delayed").text.split()[:6] == ["BROKER", "WAITING", "NEXT", "DUE", "0", str(before + 3)]
    assert metamq("produce", topic, "--delay", "0.1s", "soon").status == 0
    with running.consumer(topics=topic, start="earliest") as consumer:
        assert next(iter(consumer)).value == b"soon"
