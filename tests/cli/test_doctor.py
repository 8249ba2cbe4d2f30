"""`metamq doctor` and `metamq bench`, on a cluster that is well and on one that is not."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq.cli.commands.doctor import BRANCHES_NAMED
from metamq.client.admin.admin_model import ReplicaDescription
from metamq.testing import BrokerProcess, Cluster
from metamq.tx import XAResource, Xid
from metamq.zk.groups.plans import Plan, PlanInputs, TopicInput, to_json
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.session.session import Session
from tests.one_zookeeper import cluster
from tests.parts import another_boot, wait_until

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]


NO_DISK_HAS_BYTES = 1024**5


def by_name(findings: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {finding["what"]: finding for finding in findings}


def test_all_is_well(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "a")
    metamq("consume", topic, "-g", topic, "-e")
    looked = metamq("doctor", "-o", "json")
    assert (looked.status, looked.talk) == (0, "")
    findings = by_name(looked.json)
    assert findings[f"topic {topic}"]["detail"] == "1 partition, 1 message"
    assert findings[f"group {topic}"]["status"] == "ok"
    assert re.search(r", epoch \d+, version ", findings["broker 0"]["detail"])
    assert not [finding for finding in looked.json if finding["status"] == "problem"]
    (zookeeper,) = (one for one in findings if one.startswith("ZooKeeper server"))
    assert re.search(
        r"listens, connected in .* ms, \d+ nodes, about .*iB of .*iB of memory$", findings[zookeeper]["detail"]
    )
    lines = metamq("doctor").text.splitlines()
    assert f"ok       topic {topic}: 1 partition, 1 message" in lines


def test_dead_letters_and_a_group_without_members_are_remarks(metamq: Metamq, running: Cluster, topic: str) -> None:
    metamq("produce", topic, "a")
    with running.consumer(group=topic, topics=[topic], idle_timeout_s=0.5) as consumer:
        consumer.run(lambda message: 1 / 0, max_attempts=1)
    metamq("produce", topic, "b")
    looked = metamq("doctor", "-o", "json")
    findings = by_name(looked.json)
    letters, group = findings[f"topic {topic}.dead-letter"], findings[f"group {topic}"]
    assert (letters["status"], letters["detail"]) == ("warning", f"1 dead letter of group {topic}")
    assert letters["hint"] == f"`metamq dlq show {topic}` shows them."
    assert (group["status"], group["detail"]) == ("warning", "0 members, 0 partitions owned; 1 message to read")
    assert looked.status == 0
    metamq("dlq", "purge", topic, "--yes")
    assert by_name(metamq("doctor", "-o", "json").json)[f"topic {topic}.dead-letter"]["status"] == "ok"
    metamq("produce", f"{topic}.dead-letter", "left")
    metamq("group", "delete", topic, "--yes")
    hint = by_name(metamq("doctor", "-o", "json").json)[f"topic {topic}.dead-letter"]["hint"]
    assert hint == f"The group is deleted. `metamq topic delete {topic}.dead-letter` removes them, too."


NOT_REGISTERED = "no connection to broker 0: it is not registered in ZooKeeper"
WAITING = {
    "produce": ". `metamq doctor` shows the problem.\n",
    "consume": f"broker 0: 4 partitions cannot be fetched at present: {NOT_REGISTERED}. Check that it runs.\n",
}


@pytest.mark.slow
def test_damage_on_a_brokers_disk(offline: Metamq) -> None:
    with cluster() as running:
        here = ("--zookeeper", running.zookeeper)
        running.create_topic("rotten", 1, flush="ack")
        with running.producer() as producer:
            producer.send("rotten", b"value").result(60)
        running.broker.kill()
        (segment,) = (running.broker.data / "topics").glob("rotten@*/0/*.log")
        segment.write_bytes(segment.read_bytes().replace(b"value", b"VALUE"))
        running.broker.start()
        finding = by_name(offline("doctor", "-o", "json", *here).json)["topic rotten"]
        assert finding["status"] == "problem"
        assert "not served: 0-0: " in finding["detail"]
        assert "`metamq log verify`" in finding["hint"]


@pytest.mark.slow
def test_a_broker_that_is_gone_and_znodes_that_make_no_sense(offline: Metamq, process: Start) -> None:
    with cluster(session_timeout_ms=2000) as running:
        here = ("--zookeeper", running.zookeeper)
        assert offline("topic", "create", "flights", *here).status == 0
        assert offline("produce", "flights", "a", "b", *here).status == 0
        running.broker.stop()
        for command in (["produce", "flights", "c"], ["consume", "flights"]):
            child = process(*command, env={"METAMQ_ZOOKEEPER": running.zookeeper}, stdin=subprocess.DEVNULL)
            assert child.stderr is not None
            assert child.stderr.readline().decode().endswith(WAITING[command[0]])
            if command[0] == "produce":
                child.send_signal(signal.SIGINT)
                assert child.stderr.readline() == b"Storing the messages that were read. Ctrl-C again gives up.\n"
                child.send_signal(signal.SIGTERM)
                assert child.stderr.readline() == b"Given up: 0 messages stored, 1 may not be stored.\n"
                assert child.wait(60) == 130
            child.kill()
        ended = offline("consume", "flights", "-e", *here)
        assert (ended.status, ended.talk.splitlines()[0]) == (3, f"metamq: {NOT_REGISTERED}")
        described = offline("topic", "describe", "flights", *here).text.splitlines()
        assert described[0].startswith("flights: 4 partitions, none of them served at present, id ")
        assert described[-1] == f"Not served: 0-0, 0-1, 0-2, 0-3: {NOT_REGISTERED}"
        plan = offline("topic", "delete", "flights", *here).talk.splitlines()
        assert plan[0] == "Delete topic flights: 4 partitions, none of them served at present."
        _write(running.zookeeper, "/meta/config/topics/broken", b"what")
        _write(running.zookeeper, "/meta/consumers/lost/plan", b"what")
        looked = offline("doctor", "-o", "json", *here)
        assert looked.status == 1
        findings = by_name(looked.json)
        assert findings["broker 0"]["detail"].startswith("not registered")
        assert findings["broker 0"]["hint"] == "Start it. Its log has the reason for its end."
        assert findings["topics"]["detail"] == (
            "not served, in whole or in part, while broker 0 has no master: flights"
        )
        assert "topic flights" not in findings
        assert "configuration of topic 'broken' in ZooKeeper is damaged" in findings["topic broken"]["detail"]
        assert "the plan of group 'lost' in ZooKeeper is damaged" in findings["group lost"]["detail"]


def test_transactions_that_are_prepared_for_long_are_named_with_the_next_step(
    metamq: Metamq, running: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    xids = [Xid(7, b"order-%d" % number) for number in range(BRANCHES_NAMED + 2)]
    with XAResource(0, running.zookeeper) as resource:
        for xid in xids:
            resource.start(xid)
            resource.send(topic, b"value")
            resource.end(xid)
            resource.prepare(xid)
        looked = by_name(metamq("doctor", "-o", "json").json)
        assert looked["transactions"]["status"] == "ok"
        assert looked["transactions"]["detail"] == f"{len(xids)} transactions prepared, none for long"
        monkeypatch.setattr("metamq.cli.commands.doctor.PREPARED_MS_MAX", 0)
        looked = by_name(metamq("doctor", "-o", "json").json)
        finding = looked[f"transaction {xids[0]}"]
        assert finding["status"] == "warning"
        assert re.fullmatch(
            r"prepared at broker 0 for \d+m?s; it is decided by its transaction manager", finding["detail"]
        )
        assert finding["hint"].startswith("Start its transaction manager again: it recovers prepared branches.")
        assert f"transaction {xids[BRANCHES_NAMED]}" not in looked, "the oldest are named"
        assert looked["transactions"]["detail"].startswith("2 more are prepared for more than")
        for xid in xids:
            resource.rollback(xid)


def test_nodes_that_cannot_be_read_are_named(metamq: Metamq, running: Cluster) -> None:
    """They are passed over by all that read them: nothing else would say so to a person who looks."""
    member, slave = "/meta/consumers/odd/ids/m-1", "/meta/brokers/ids/0/slave3"
    for path in (member, slave):
        _write(running.zookeeper, path, b"[]")
    try:
        looked = metamq("doctor", "-o", "json")
        assert (looked.status, looked.talk) == (1, "")
        problems = {one["what"]: one for one in looked.json if one["detail"].endswith("metamq ignores it")}
        assert "the node of member 'm-1' of group 'odd' in ZooKeeper is damaged" in problems["group odd"]["detail"]
        assert problems["group odd"]["hint"] == "`metamq group evict odd m-1` removes it."
        assert "the slave node of broker 0 in ZooKeeper is damaged" in problems["broker 0"]["detail"]
        assert problems["broker 0"]["hint"].startswith("Restart that replica.")
    finally:
        for path in (member, slave):
            _delete(running.zookeeper, path)


def test_a_plan_that_is_near_the_limit_is_warned_of(metamq: Metamq, running: Cluster) -> None:
    topics = {f"{number:0200}": TopicInput("0" * 16, {0: 1}) for number in range(3_300)}
    plan = Plan(1, "range", PlanInputs({}, topics), {})
    _write(running.zookeeper, "/meta/consumers/large/plan", to_json(plan))
    finding = by_name(metamq("doctor", "-o", "json").json)["group large"]
    assert finding["status"] == "warning"
    assert re.fullmatch(
        r"0 members, 0 partitions owned; its plan takes 7\d\d,\d{3} of 1,000,000 bytes", finding["detail"]
    )
    assert "split it into groups with fewer topics each" in finding["hint"]


def test_a_zookeeper_that_no_broker_has_ever_seen(offline: Metamq) -> None:
    with EmbeddedZooKeeper() as zookeeper:
        here = ("--zookeeper", zookeeper.address)
        words = f"there is no /meta in ZooKeeper at {zookeeper.address}: no broker has ever been there\n"
        looked = offline("doctor", *here)
        assert looked.status == 1
        assert f"problem  root: {words}" in looked.text
        for command in (["topic", "create", "x"], ["topic", "list"]):
            ended = offline(*command, *here)
            assert (ended.status, ended.data) == (1, b"")
            assert ended.talk == (
                f"metamq: {words}  Start the first with `metamq broker`. "
                "If ZooKeeper was lost, see `metamq cluster restore`.\n"
            )


def _write(zookeeper: str, path: str, data: bytes) -> None:
    async def write() -> None:
        async with await Session.open(zookeeper) as session:
            await session.create(path, data, makepath=True)

    asyncio.run(write())


def _delete(zookeeper: str, path: str) -> None:
    async def delete() -> None:
        async with await Session.open(zookeeper) as session:
            await session.delete(path, ANY_VERSION)

    asyncio.run(delete())


def test_nobody_there(offline: Metamq) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        looked = offline("doctor", "--zookeeper", f"127.0.0.1:{taken.getsockname()[1]}")
        assert looked.status == 3
        assert "not reachable: connection refused" in looked.text


def test_settings_that_are_none(metamq: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAMQ_SIZE", "1")
    monkeypatch.setenv("METAMQ_TEST_WORKERS", "0")
    looked = metamq("doctor")
    assert looked.status == 0
    assert "warning  settings: METAMQ_SIZE is not a setting\n" in looked.text
    assert "METAMQ_TEST_WORKERS" not in looked.text
    monkeypatch.setenv("METAMQ_BROKER_PROT", "1")
    looked = metamq("doctor")
    assert looked.status == 1
    assert "unknown setting 'METAMQ_BROKER_PROT' in the environment\n" in looked.text
    assert "Did you mean 'METAMQ_BROKER_PORT'?\n" in looked.text
    monkeypatch.delenv("METAMQ_BROKER_PROT")
    file = tmp_path / "metamq.toml"
    file.write_text("[consumer]\nfetch_wait = 1\n")
    looked = metamq("doctor", "--config", file)
    assert looked.status == 1
    assert f"unknown setting 'fetch_wait' in [consumer] of {file}\n" in looked.text


def test_bench_measures_and_cleans_up(metamq: Metamq) -> None:
    before = metamq("topic", "list").text
    measured = metamq("bench", "-n", 3000, "-s", "1KiB", "-p", 2, "-o", "json")
    assert measured.status == 0
    assert [(rate["what"], rate["messages"], rate["bytes"]) for rate in measured.json["rates"]] == [
        ("send_many", 3000, 3000 * 1024),
        ("batches", 3000, 3000 * 1024),
    ]
    assert 0 < measured.json["round_trip_ms"]["p50"] <= measured.json["round_trip_ms"]["p99"]
    assert metamq("topic", "list").text == before


@pytest.mark.slow
def test_what_is_amiss_with_replicas_and_the_command_that_mends_it(offline: Metamq, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"session_timeout_ms": 2000, "insync_lag_ms": 500}
    with cluster(**settings) as running, running.admin() as admin:
        here = ("--zookeeper", running.zookeeper)
        slave = BrokerProcess(running.zookeeper, tmp_path / "replica-1", 0, replica=1, **settings)
        learner = BrokerProcess(running.zookeeper, tmp_path / "replica-2", 0, replica=2, learner=True, **settings)

        def replicas() -> dict[int, ReplicaDescription]:
            return {one.replica: one for one in admin.replicas()[0].replicas}

        def in_sync() -> list[int]:
            return [number for number, one in replicas().items() if one.in_sync]

        def looked() -> dict[str, dict[str, str]]:
            return by_name(offline("doctor", "-o", "json", *here).json)

        try:
            slave.start()
            learner.start()
            running.create_topic("safe", 1, min_insync=2)
            wait_until(lambda: in_sync() == [0, 1] and 2 in replicas(), what="the slave in sync, and the learner there")
            (row,) = [line for line in offline("ha", "status", *here).text.splitlines() if " learner " in line]
            assert " never " in row
            refused = offline("ha", "promote", "--slave", 2, *here).talk
            assert "It is a learner, which is never in sync: without --accept-loss" in refused

            slave.kill()
            fitting = {"disk_reserve_bytes": slave.settings["disk_reserve_bytes"]}
            slave.settings["disk_reserve_bytes"] = NO_DISK_HAS_BYTES
            wait_until(lambda: in_sync() == [0], what="the slave out of the set")
            assert looked()["topic safe"]["detail"].endswith("refuses writes: 1 replica in sync, and min_insync is 2")
            described = offline("topic", "describe", "safe", *here).text
            assert "Broker 0 refuses writes: 1 replica in sync, and min_insync is 2\n" in described
            slave.start()
            wait_until(lambda: 1 in replicas() and "in reserve" in replicas()[1].problem, what="the slave's reason")
            assert " in reserve. Free disk" in looked()["broker 0, replica 1"]["detail"]

            slave.stop()
            slave.settings |= fitting
            slave.start()
            wait_until(lambda: in_sync() == [0, 1], what="the slave in sync again")
            running.broker.kill()
            promote = "`metamq ha promote --broker 0 --slave 1` makes replica 1, which is in sync, the master"
            wait_until(lambda: promote in looked()["broker 0"]["hint"], what="the advice")
            findings = looked()
            assert findings["topics"]["detail"].endswith("while broker 0 has no master: safe")
            assert not [one for one in findings.values() if "doctor" in one["hint"]]
            shown = offline("ha", "status", *here)
            assert shown.status == 1
            assert promote in shown.talk

            another_boot(running.broker)
            running.broker.start()
            wait_until(lambda: replicas()[0].role == "waiting", what="the former master waits")
            wait_until(lambda: promote in looked()["broker 0"]["hint"], what="the advice")
            assert looked()["broker 0"]["detail"].startswith("replica 0 waits: it may lack messages that it")
            slave.kill()
            wait_until(lambda: replicas()[1].address is None, what="the slave's session over")
            assert looked()["broker 0"]["hint"] == (
                "Replica 1 is in sync and down. Start it first: its folder has the acknowledged messages."
            )
        finally:
            for broker in (slave, learner):
                if broker.running:
                    broker.kill()
