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
        assert [one["status"] for one in found] == [f"http://127.0.0.1:{one.http_port}" for one in running.brokers]
        replicas = offline("ha", "status", "-o", "json", "--zookeeper", running.zookeeper).json
        assert replicas[1]["replicas"][0]["status"] == found[1]["status"]
        top = offline("top", "--once", "--interval", "100ms", "-o", "json", "--zookeeper", running.zookeeper).json
        assert [one["status"] for one in top["brokers"]] == [one["status"] for one in found]
        other.stop()
        lines = offline("broker", "list", "--zookeeper", running.zookeeper).text.splitlines()
    headings = ["BROKER", "ADDRESS", "STATE", "REPLICA", "EPOCH", "PARTITIONS", "VERSION", "STATUS", "PORT"]
    assert lines[0].split() == headings
    assert lines[1].split()[-1] == found[0]["status"]
    assert lines[2].split()[-1] == "-"
    assert lines[1].split()[:6] == ["0", f"127.0.0.1:{running.broker.port}", "live", "0", "1", "3"]
    assert lines[2].split()[:6] == ["1", "-", "down", "-", "1", "3"]
