"""`metamq doctor` and `metamq bench`, on a cluster that is well and on one that is not."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq.testing import cluster
from metamq.zk.embedded import EmbeddedZooKeeper

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]


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
    assert "epoch 1" in findings["broker 0"]["detail"]
    assert not [finding for finding in looked.json if finding["status"] == "problem"]
    lines = metamq("doctor").text.splitlines()
    assert f"ok       topic {topic}: 1 partition, 1 message" in lines


NOT_REGISTERED = "no connection to broker 0: it is not registered in ZooKeeper"
WAITING = {
    "produce": "Waiting for brokers to take 1 message. `metamq doctor` says what is wrong.\n",
    "consume": f"broker 0: 4 partitions cannot be fetched at present: {NOT_REGISTERED}. Is it running?\n",
}


def test_damage_on_a_brokers_disk(offline: Metamq) -> None:
    with cluster() as running:
        here = ("--zookeeper", running.zookeeper)
        running.create_topic("rotten", 1, flush="ack")
        with running.producer() as producer:
            producer.send("rotten", b"value").result(20)
        running.broker.kill()
        (segment,) = (running.broker.data / "topics").glob("rotten@*/0/*.log")
        segment.write_bytes(segment.read_bytes().replace(b"value", b"VALUE"))
        running.broker.start()
        finding = by_name(offline("doctor", "-o", "json", *here).json)["topic rotten"]
        assert finding["status"] == "problem"
        assert "not served: 0-0: " in finding["detail"]
        assert "`metamq log verify`" in finding["hint"]


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
                assert child.stderr.readline() == b"Storing what has been read. Ctrl-C again gives up.\n"
                child.send_signal(signal.SIGTERM)
                assert child.stderr.readline() == b"Given up: 0 messages stored, 1 not known to be.\n"
                assert child.wait(20) == 130
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
        assert findings["topic flights"]["detail"] == (
            f"4 partitions, none of them served at present; not served: 0-0, 0-1, 0-2, 0-3: {NOT_REGISTERED}"
        )
        assert "configuration of topic 'broken' in ZooKeeper is damaged" in findings["topic broken"]["detail"]
        assert "the plan of group 'lost' in ZooKeeper is damaged" in findings["group lost"]["detail"]


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
            assert ended.talk == f"metamq: {words}  Start the first with `metamq broker`.\n"


def _write(zookeeper: str, path: str, data: bytes) -> None:
    import asyncio

    from metamq.zk.session import Session

    async def write() -> None:
        async with await Session.open(zookeeper) as session:
            await session.create(path, data, makepath=True)

    asyncio.run(write())


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
    assert "warning  settings: METAMQ_SIZE is no setting\n" in looked.text
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
