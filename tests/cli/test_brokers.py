"""`metamq broker list`."""

from __future__ import annotations

from tests.cli.conftest import Metamq
from tests.one_zookeeper import cluster


def test_options_of_a_broker_before_list_are_refused(offline: Metamq) -> None:
    for option in (("--id", 3), ("-o", "json")):
        ended = offline("broker", *option, "list")
        assert ended.status == 2
        assert "is for a broker that runs: give it after `list`, or omit it" in ended.talk


def test_brokers_are_listed_up_and_down(offline: Metamq) -> None:
    with cluster() as running:
        other = running.add_broker(id=1)
        running.create_topic("t", partitions=6)
        found = offline("broker", "list", "-o", "json", "--zookeeper", running.zookeeper).json
        assert [(one["broker_id"], one["live"], one["partitions"]) for one in found] == [(0, True, 3), (1, True, 3)]
        assert found[1]["address"] == f"127.0.0.1:{other.port}"
        other.stop()
        lines = offline("broker", "list", "--zookeeper", running.zookeeper).text.splitlines()
    assert lines[0].split() == ["BROKER", "ADDRESS", "STATE", "REPLICA", "EPOCH", "PARTITIONS", "VERSION"]
    assert lines[1].split()[:6] == ["0", f"127.0.0.1:{running.broker.port}", "live", "0", "1", "3"]
    assert lines[2].split()[:6] == ["1", "-", "down", "-", "1", "3"]
