"""`metamq bundle` on real clusters: what is in the file, what is never in it, and what happens when parts are gone."""

from __future__ import annotations

import json
import socket
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from metamq import testing
from metamq.testing import Cluster
from metamq.tx import XAResource, Xid
from tests.one_zookeeper import cluster, new_chroot
from tests.parts import wait_until
from tests.scenarios.test_poisoned_nodes import KINDS

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]
SEED = "s3cr3t-Xq9"
"""The begin of each text here that must not leave."""
QUICK = ("--samples", 1, "--timeout", "60s")


def unpacked(path: Path) -> dict[str, str]:
    """The texts of a bundle, by name below its folder. No secret is anywhere in it."""
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    assert all(name.startswith(f"{path.stem}/") for name in found)
    leaks = [f"{name}: {line!r}" for name, data in found.items() for line in data.splitlines() if SEED.encode() in line]
    assert leaks + [name for name in found if SEED in name] == []
    return {name.partition("/")[2]: data.decode() for name, data in found.items()}


def documents(path: Path) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in unpacked(path).items() if name.endswith(".json")}


def test_a_bundle_of_a_cluster_that_is_well(
    metamq: Metamq, running: Cluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with running.producer() as producer:
        headers = {"h": f"{SEED}-header".encode()}
        producer.send(topic, f"{SEED}-value".encode(), key=f"{SEED}-key".encode(), headers=headers).result(60)
        producer.send(topic, f"{SEED}-later".encode(), delay_s=3600).result(60)
    metamq("consume", topic, "-g", topic, "-e")
    given = ("--logs", running.folder, "--samples", 2, "--every", "10ms", "--timeout", "60s")
    with XAResource(0, running.zookeeper) as branch:
        branch.start(xid := Xid(7, b"bundle"))
        branch.send(topic, f"{SEED}-in-doubt".encode())
        branch.end(xid)
        branch.prepare(xid)
        ended = metamq("bundle", "one.zip", "-o", "json", *given)
        branch.rollback(xid)
    assert (ended.status, ended.talk) == (0, "")
    assert ended.json["path"] == str(tmp_path / "one.zip")
    assert ended.json["bytes"] == (tmp_path / "one.zip").stat().st_size
    assert ended.json["problems"] == []
    found, texts = documents(tmp_path / "one.zip"), unpacked(tmp_path / "one.zip")
    listed = {name for part in ended.json["parts"] for name in part["files"]}
    assert listed == texts.keys() - {"README.txt", "errors.txt"}
    assert texts["errors.txt"] == ""
    assert all(name in texts["README.txt"] for name in listed)
    assert not [one for one in found["doctor.json"] if one["status"] == "problem"]
    assert "kazoo" in found["machine/versions.json"]["packages"]
    assert found["cluster/brokers.json"][0]["live"] is True
    assert found["cluster/replicas.json"][0]["replicas"][0]["role"] == "master"
    assert found["cluster/failover.json"]["0"]["mode"] == "manual"
    (described,) = (one for one in found["cluster/topics.json"] if one["topic"] == topic)
    assert described["retention_ms"] > 0
    assert topic in [one["topic"] for one in found["cluster/partitions.json"]]
    group = found["cluster/groups.json"][topic]
    assert (group["lag"], group["partitions"][0]["committed"]) == (0, 1)
    assert found["cluster/delayed.json"][0]["waiting"] == 1
    assert str(xid) in [one["xid"] for one in found["cluster/transactions.json"]]
    assert found["cluster/security.json"] == {"users": [], "rules": [], "quotas": {}, "delegations": []}
    (server,) = found["zookeeper/servers.json"].values()
    assert server["load"]["nodes"] > 0
    counts = found["zookeeper/nodes.json"]["counts"]
    assert counts["consumers/*/offsets"]["bytes"] > 0
    assert counts["brokers/ids"]["ephemeral"] == 1
    assert found["zookeeper/nodes.json"]["largest_groups"][topic]["nodes"] > 0
    assert {name for name in texts if name.startswith("statistics/")} == {
        "statistics/sample-1.json", "statistics/sample-2.json",
    }  # fmt: skip
    pages = {name.rpartition("/")[2]: text for name, text in texts.items() if name.startswith("status/")}
    assert pages.keys() == {"healthz.txt", "readyz.txt", "metrics-1.txt", "metrics-2.txt"}
    assert pages["readyz.txt"].startswith("200\n")
    assert "metamq_broker_" in pages["metrics-2.txt"]
    assert any("is the master" in text for name, text in texts.items() if name.startswith("logs/"))
    assert found["machine/brokers/0-0-broker-0.json"]["process"]["pid"] == running.broker.pid
    metamq("group", "delete", topic, "--yes")


def test_no_secret_of_this_machine_leaves(offline: Metamq, process: Start, tmp_path: Path) -> None:
    """Each file and variable that a broker and this command read has one, also in the wrong place."""
    zookeeper, folder = new_chroot(), tmp_path / "here"
    folder.mkdir()
    (folder / "password").write_text(f"{SEED}-password\n")
    file = folder / "broker.toml"
    file.write_text(f"""
[broker]
id = 0
port = 0
http_port = 0
data = "{folder / "data"}"
console_url = "https://ann:{SEED}-url@example.org"
""")
    mine = folder / "mine.toml"
    mine.write_text(f"""
zookeeper = "{zookeeper}"
[security]
password_file = "{SEED}-misplaced"
[broker]
pasword = "{SEED}-setting"
""")
    variables = {"METAMQ_ZOOKEEPER": zookeeper, "METAMQ_SECRET": f"{SEED}-variable", "PGPASSWORD": f"{SEED}-database"}
    with (folder / "broker.log").open("ab") as log:
        child = process("broker", "--config", file, env=variables, stderr=log)
        wait_until(lambda: b" is up at " in (folder / "broker.log").read_bytes(), what="the broker")
        with (folder / "broker.log").open("a") as more:
            more.write(f"2026-11-28 10:42:14,503 ERROR metamq.broker: password: {SEED}-line {SEED}-database\n")
            more.write(f"{SEED}-of another program\n")
        ended = offline("bundle", tmp_path / "b.zip", "--config", mine, "--logs", folder, "-o", "json", *QUICK)
        child.terminate()
        child.wait(60)
    assert SEED not in ended.data.decode() + ended.talk
    found, texts = documents(tmp_path / "b.zip"), unpacked(tmp_path / "b.zip")
    assert ended.status == 1, "the settings of this command name a password without a user"
    assert "broker" in found["machine/settings/command.json"]["settings"]
    broker = found["machine/brokers/0-0-data.json"]
    assert broker["process"]["variables"]["METAMQ_ZOOKEEPER"] == zookeeper
    assert broker["process"]["variables"]["METAMQ_SECRET"] == "(removed)"
    assert found["machine/settings/broker-1.json"]["settings"]["broker"]["id"] == 0
    assert "(removed)@example.org" in found["machine/settings/broker-1.json"]["settings"]["broker"]["console_url"]
    assert "password: (removed) (removed)" in texts["logs/broker.log"]
    assert "2 lines are left out" in texts["logs/broker.log"]


@pytest.mark.slow
def test_no_content_of_a_node_leaves(offline: Metamq, tmp_path: Path) -> None:
    """Whatever is in it: bytes, a document with a wrong value in each field, and each node of the cluster itself."""
    with cluster() as running:
        running.create_topic("good", partitions=1)
        client = KazooClient(running.zookeeper)
        client.start()
        try:
            for number, seeded in enumerate((_as_bytes, _in_each_field, _in_each_name)):
                for kind in (one for one in KINDS if "/owners/" not in one):  # that one has the name of a member
                    _put(client, f"/meta/{kind}", seeded(_get(client, f"/meta/{kind}")))
                for name in ("users", "rights", "quotas", "delegations", "owner-key"):
                    _put(client, f"/meta/security/{name}", seeded(_get(client, f"/meta/security/{name}")))
                _put(client, "/meta/config/topic-defaults", seeded(b'{"cleanup": "delete"}'))
                for field in (good := json.loads(_get(client, "/meta/config/topics/good"))):
                    _put(client, f"/meta/config/topics/odd-{field}", json.dumps({**good, field: SEED}).encode())
                path = tmp_path / f"{number}.zip"
                ended = offline("bundle", path, "--zookeeper", running.zookeeper, *QUICK)
                assert ended.status == 1
                assert SEED not in ended.talk
                assert unpacked(path)["errors.txt"]
        finally:
            client.stop()
            client.close()


def _get(client: KazooClient, path: str) -> bytes:
    if not client.exists(path):
        return b'{"a": 1, "topics": {"b": ["c"]}}'
    found: Any = client.get(path)
    data: bytes = found[0]
    return data


def _put(client: KazooClient, path: str, data: bytes) -> None:
    client.ensure_path(path)
    client.set(path, data)


def _as_bytes(_data: bytes) -> bytes:
    return f"{SEED} {SEED}!".encode()


def _in_each_field(data: bytes) -> bytes:
    try:
        return json.dumps(_seeded(json.loads(data))).encode()
    except ValueError:
        return json.dumps({"a": SEED, "insync": SEED}).encode()


def _seeded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _seeded(one) for name, one in value.items()}
    return [_seeded(one) for one in value] if isinstance(value, list) else SEED


def _in_each_name(_data: bytes) -> bytes:
    return json.dumps({"a": {SEED: [SEED, {SEED: SEED}]}}).encode()  # the first may be the name of a user


@pytest.mark.slow
def test_a_broker_that_is_gone_takes_only_its_own_parts(offline: Metamq, tmp_path: Path) -> None:
    with cluster(session_timeout_ms=2000) as running:
        running.create_topic("orders", partitions=1)
        port = running.broker.http_port
        running.broker.stop()
        given = ("--zookeeper", running.zookeeper, "--status", f"127.0.0.1:{port}", "--logs", running.folder)
        ended = offline("bundle", tmp_path / "b.zip", "-o", "json", *given, *QUICK)
        assert ended.status == 1
        problems = {(one["part"], one["problem"]) for one in ended.json["problems"]}
        assert ("statistics", "broker 0: no master is registered in ZooKeeper") in problems
        assert ("status", f"http://127.0.0.1:{port}/metrics: Connection refused") in problems or (
            "status", f"http://127.0.0.1:{port}/metrics: [Errno 111] Connection refused",
        ) in problems  # fmt: skip
        found, texts = documents(tmp_path / "b.zip"), unpacked(tmp_path / "b.zip")
        assert texts["errors.txt"].splitlines() == [
            f"{one['part']}: {one['problem']}" for one in ended.json["problems"]
        ]
        assert [one["topic"] for one in found["cluster/topics.json"]] == ["orders"]
        assert found["cluster/brokers.json"][0]["live"] is False
        assert "has stopped" in texts["logs/broker-0.log"]
        assert found["machine/brokers/0-0-broker-0.json"]["process"] is None


@pytest.mark.slow
def test_a_broker_that_hangs_delays_nothing_for_long(offline: Metamq, tmp_path: Path) -> None:
    with cluster() as running:
        running.create_topic("orders", partitions=1)
        with running.freeze(running.broker):
            given = ("--zookeeper", running.zookeeper, "--samples", 1, "--timeout", "2s")
            ended = offline("bundle", tmp_path / "b.zip", "-o", "json", *given)
        assert ended.status == 1
        late = {one["part"] for one in ended.json["problems"] if one["problem"] == "not complete after 2 s"}
        assert {"doctor", "topics", "statistics"} <= late
        assert documents(tmp_path / "b.zip")["cluster/topics.json"][0]["topic"] == "orders"


def test_without_zookeeper_this_machine_is_collected(offline: Metamq, tmp_path: Path) -> None:
    (tmp_path / "broker.log").write_text("2026-11-28 10:42:14,503 INFO metamq.broker: a line\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        here = ("--zookeeper", f"127.0.0.1:{taken.getsockname()[1]}", "--logs", tmp_path)
        ended = offline("bundle", tmp_path / "b.zip", *here, *QUICK)
    assert ended.status == 1
    assert ended.text == f"{tmp_path / 'b.zip'}\n"
    assert "Missing: brokers: no connection to ZooKeeper" in ended.talk
    texts = unpacked(tmp_path / "b.zip")
    assert {"logs/broker.log", "machine/versions.json", "doctor.json"} <= texts.keys()
    assert "doctor: the cluster: ZooKeeper is not reachable" in texts["errors.txt"].splitlines()


def test_parts_that_do_not_apply_are_no_problem(
    metamq: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = metamq("bundle", "-o", "json", *QUICK)
    assert ended.status == 0
    path = Path(ended.json["path"])
    assert (path.parent, path.name[:14], path.suffix) == (tmp_path, "metamq-bundle-", ".zip")
    left_out = {one["part"]: one["left_out"] for one in ended.json["parts"] if one["left_out"]}
    assert left_out.keys() == {"logs", "local-brokers"}
    assert "give it with --logs" in unpacked(path)["README.txt"]


def test_without_a_status_port_its_part_is_left_out(offline: Metamq, tmp_path: Path) -> None:
    with cluster(http_port=-1) as running:
        ended = offline("bundle", tmp_path / "b.zip", "-o", "json", "--zookeeper", running.zookeeper, *QUICK)
    assert ended.status == 0
    assert "give it with --status" in {one["part"]: one["left_out"] for one in ended.json["parts"]}["status"]


def test_only_the_address_of_a_status_port_is_asked(offline: Metamq, tmp_path: Path) -> None:
    """Without security any client may write a broker's node: it must not make an operator's command read a file."""
    (tmp_path / "mine").write_text(f"{SEED}\n")
    with cluster() as running:
        client = KazooClient(running.zookeeper)
        client.start()
        try:
            document = json.loads(_get(client, "/meta/brokers/ids/0/master"))
            _put(
                client,
                "/meta/brokers/ids/0/slave5",
                json.dumps({**document, "replica": 5, "status": f"file://{tmp_path}/mine"}).encode(),
            )
            ended = offline("bundle", tmp_path / "b.zip", "-o", "json", "--zookeeper", running.zookeeper, *QUICK)
        finally:
            client.stop()
            client.close()
    assert ended.status == 1
    assert any("is not the address of a status port" in one["problem"] for one in ended.json["problems"])
    assert any(name.endswith("metrics-1.txt") for name in unpacked(tmp_path / "b.zip"))


@pytest.mark.slow
def test_status_ports_that_are_given_do_not_wait_for_zookeeper(offline: Metamq, tmp_path: Path) -> None:
    with testing.cluster() as running:
        status = f"127.0.0.1:{running.broker.http_port}"
        with running.freeze("zookeeper"):
            given = ("--zookeeper", running.zookeeper, "--status", status, "--samples", 1, "--timeout", "5s")
            ended = offline("bundle", tmp_path / "b.zip", "-o", "json", *given)
    assert ended.status == 1
    assert {"status", "topics", "doctor"} <= {one["part"] for one in ended.json["problems"]}
    assert any(name.endswith("/metrics-1.txt") for name in unpacked(tmp_path / "b.zip"))
