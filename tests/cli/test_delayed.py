"""`metamq produce --delay` and `metamq delayed`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from metamq.testing import Cluster
from tests.cli.conftest import Metamq
from tests.one_zookeeper import cluster
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


def test_json_names_no_places_that_a_reader_would_look_for(metamq: Metamq, topic: str) -> None:
    before = datetime.now(UTC)
    sent = metamq("produce", topic, "--delay", "2h", "first", "second", "-o", "json").json
    due = datetime.fromisoformat(sent.pop("due"))
    assert before + timedelta(hours=2) <= due <= datetime.now(UTC) + timedelta(hours=2)
    assert sent.pop("seconds") > 0
    assert sent == {"topic": topic, "messages": 2, "stored": [], "waiting_in": f"{topic}.delayed"}
    record = b'{"value": "third", "timestamp_us": 1700000000000000}\n'
    sent = metamq("produce", topic, "--delay", "0s", "--json", "-o", "json", stdin=record).json
    assert (sent["messages"], sent["stored"], sent["waiting_in"]) == (1, [], f"{topic}.delayed")


@pytest.mark.slow
def test_brokers_that_cannot_be_asked_are_named(offline: Metamq, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is down, and one hangs."""
    with cluster(brokers=3) as three:
        monkeypatch.setenv("METAMQ_ZOOKEEPER", three.zookeeper)
        three.brokers[1].stop()
        three.brokers[2].freeze()
        try:
            table, document = offline("delayed"), offline("delayed", "-o", "json")
        finally:
            three.brokers[2].thaw()
    assert (table.status, document.status) == (1, 1)
    assert [line.split() for line in table.text.splitlines()[1:]] == [["0", "0", "-"], ["1", "-", "-"], ["2", "-", "-"]]
    well, down, silent = document.json
    assert well == {"broker": 0, "waiting": 0, "next_due": None, "problem": ""}
    assert down == {
        "broker": 1, "waiting": None, "next_due": None,
        "problem": "no connection to broker 1: it is not registered in ZooKeeper",
    }  # fmt: skip
    assert silent["problem"].startswith(f"no connection to 127.0.0.1:{three.brokers[2].port}: ")
    for one in (down, silent):
        assert f"The delayed messages at broker {one['broker']} are unknown: {one['problem']}" in table.talk
        assert f"The delayed messages at broker {one['broker']} are unknown: " in document.talk
    assert "Check that it runs." in table.talk
