"""`metamq log forget`: one partition of a broker that is stopped is given up, and what follows at the next start."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.data.data_folder import REPLACED
from metamq.testing import BrokerProcess, Cluster
from metamq.zk.partitions import TopicPartition
from tests.broker.ha.test_replication import LAG_MS, SESSION_MS, Group, a_sync_topic, send
from tests.cli.conftest import Metamq
from tests.one_zookeeper import cluster
from tests.parts import http_get, read_to_end, wait_until

TOPIC = "flights"
BEFORE, AFTER = 30, 40
"""More come after the loss than were there, so that no offset that was read is beyond the end."""
SETTINGS: dict[str, Any] = {"session_timeout_ms": SESSION_MS, "insync_lag_ms": LAG_MS}


@pytest.fixture
def running() -> Iterator[Cluster]:
    """A lone broker with a topic of two partitions, both with messages."""
    with cluster(**SETTINGS) as running:
        running.create_topic(TOPIC, partitions=2, flush="ack")
        for partition in ("0-0", "0-1"):
            put(running, partition, b"before", BEFORE)
        yield running


def put(running: Cluster, partition: str, name: bytes, count: int) -> list[bytes]:
    values = [b"%s-%s-%d" % (name, partition.encode(), number) for number in range(count)]
    with running.producer(linger_ms=0) as producer:
        for value in values:
            producer.send(TOPIC, value, partition=partition).result(60)
    return values


def of(broker: BrokerProcess, index: int) -> Path:
    (folder,) = broker.data.glob(f"topics/{TOPIC}@*")
    return folder / str(index)


def flip(folder: Path) -> None:
    """One bit in the first batch."""
    path = min(folder.glob("*.log"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def lose(folder: Path) -> None:
    shutil.rmtree(folder)


def fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)}".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("harm", [flip, lose])
def test_at_a_lone_broker_readers_are_told_and_miss_nothing_of_what_comes_after(
    running: Cluster, offline: Metamq, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    broker, name = running.broker, f"{TOPIC}/0-1"
    with running.consumer(topics=[TOPIC], group="told", start="earliest", idle_timeout_s=0.3) as consumer:
        assert len(read_to_end(consumer)) == 2 * BEFORE
    broker.stop()
    harm(of(broker, 1))
    checked = offline("log", "verify", broker.data)
    assert checked.status == 1
    assert f"{name}: damage" in checked.text

    before = fingerprint(broker.data)
    planned = offline("log", "forget", broker.data, name)
    assert planned.status == 1
    assert "If no slave is in sync, every message of the partition is LOST." in planned.talk
    assert "metamq ha promote --broker 0 --slave" in planned.talk
    assert planned.talk.endswith("Nothing was done. Give --yes to do it.\n")
    assert fingerprint(broker.data) == before, "the plan changes nothing"

    done = offline("log", "forget", broker.data, name, "--yes", "-o", "json")
    assert done.status == 0, done.talk
    assert (done.json["partition"], done.json["was_master"]) == (name, True)
    if harm is flip:
        assert done.json["damaged_places"] == 1
        moved = Path(done.json["moved_to"])
        assert moved.name.startswith("1.damaged-")
        assert list(moved.glob("*.log"))
    else:
        assert (done.json["has_folder"], done.json["moved_to"]) == (False, None)
    assert offline("log", "verify", broker.data).status == 0
    broker.start()
    assert http_get(broker.http_port, "/readyz")[0] == 200
    after = put(running, "0-1", b"after", AFTER)
    with (
        caplog.at_level(logging.WARNING),
        running.consumer(topics=[TOPIC], group="told", idle_timeout_s=0.3) as consumer,
    ):
        assert [message.value for message in read_to_end(consumer)] == after
    assert [one for one in caplog.messages if f"{name}:" in one and "Continuing at 0" in one], "it says so"
    with running.consumer(topics=[TOPIC], start="earliest", idle_timeout_s=0.3) as consumer:
        assert len(read_to_end(consumer)) == BEFORE + AFTER, "the other partition is as it was"


def test_a_reader_that_was_up_all_the_time_is_told(running: Cluster, offline: Metamq) -> None:
    """And a producer that was goes on: what it numbered before is no repeat in the new log."""
    broker, place = running.broker, TopicPartition(TOPIC, "0-0")
    with (
        running.producer(linger_ms=0) as producer,
        running.consumer(topics=[TOPIC], start="earliest", on_data_loss="earliest") as consumer,
    ):
        producer.send(TOPIC, b"old", partition="0-0").result(60)
        messages = iter(consumer)
        assert len([next(messages) for _ in range(2 * BEFORE + 1)]) == 2 * BEFORE + 1
        broker.stop()
        assert offline("log", "forget", broker.data, str(place), "--yes").status == 0
        broker.start()
        after = [b"after-%d" % number for number in range(AFTER)]
        for value in after:
            producer.send(TOPIC, value, partition="0-0").result(60)
        assert [next(messages).value for _ in after] == after


def test_a_crash_in_between_leaves_a_partition_that_is_damaged_and_can_be_given_up_again(
    running: Cluster, offline: Metamq, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = running.broker
    broker.stop()

    def dies(*_names: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("metamq.broker.data.made_partitions.MadePartitions.forget", dies)
        assert offline("log", "forget", broker.data, f"{TOPIC}/0-0", "--yes").status != 0
    broker.start()
    assert f"{TOPIC}/0-0 is damaged: this replica had it" in http_get(broker.http_port, "/readyz")[1]
    assert "metamq log forget" in broker.log_path.read_text()
    broker.stop()
    assert offline("log", "forget", broker.data, f"{TOPIC}/0-0", "--yes").status == 0
    broker.start()
    assert http_get(broker.http_port, "/readyz")[0] == 200


def test_what_is_refused_and_why(running: Cluster, offline: Metamq) -> None:
    broker = running.broker
    used = offline("log", "forget", broker.data, f"{TOPIC}/0-0", "--yes")
    assert used.status == 1
    assert f"is in use by process {broker.pid}" in used.talk
    broker.stop()
    before = fingerprint(broker.data)
    for folder, partition, problem in (
        (broker.data, f"{TOPIC}/0-7", f"It has {TOPIC}/0-0, {TOPIC}/0-1."),
        (broker.data, "trains/0-0", f"It has {TOPIC}/0-0, {TOPIC}/0-1."),
        (broker.data, "~transactions/0-0", "a branch that is prepared in it may be committed elsewhere"),
        (broker.data / "topics", f"{TOPIC}/0-0", "is not a broker's data folder"),
    ):
        refused = offline("log", "forget", folder, partition, "--yes")
        assert refused.status == 1
        assert problem in refused.talk
    assert fingerprint(broker.data) == before


@pytest.mark.slow
def test_a_slave_copies_the_partition_again_and_a_master_beside_it_waits(offline: Metamq) -> None:
    with cluster(**SETTINGS) as running:
        group = Group(running)
        a_sync_topic(group, TOPIC, 2)
        slave = group.add_slave()
        try:
            group.wait_insync(0, 1)
            sent = send(group, TOPIC, 20)
            group.wait_equal(0, 1)
            slave.stop()
            flip(of(slave, 1))
            done = offline("log", "forget", slave.data, f"{TOPIC}/0-1", "--yes")
            assert done.status == 0
            assert "Replica 1 of broker 0 was a slave: it copies the missing messages from its master" in done.talk
            slave.start()
            group.wait_insync(0, 1)
            group.wait_equal(0, 1)

            group.lose_master(running.broker.kill, 1)
            assert offline("log", "forget", running.broker.data, f"{TOPIC}/0-1", "--yes").status == 0
            running.broker.start()
            wait_until(lambda: group.replication(0)["role"] == "waiting", what="the master of before waits")
            group.promote(1)
            group.wait_insync(0, 1, master=1)
            group.wait_equal(0, 1)
            assert sorted(group.read(TOPIC)) == sorted(sent)
        finally:
            slave.kill()


@pytest.mark.slow
def test_files_from_a_backup_are_served_once_a_person_accepts_them(
    running: Cluster, offline: Metamq, tmp_path: Path
) -> None:
    broker, name = running.broker, f"{TOPIC}/0-1"
    with running.consumer(topics=[TOPIC], group="told", start="earliest", idle_timeout_s=0.3) as consumer:
        assert len(read_to_end(consumer)) == 2 * BEFORE
    broker.stop()
    shutil.copytree(of(broker, 1), tmp_path / "backup")
    broker.start()
    put(running, "0-1", b"later", 5)
    broker.stop()
    refused = offline("log", "accept", broker.data, f"{TOPIC}/0-7", "--yes")
    assert refused.status == 1
    assert f"there is no partition '{TOPIC}/0-7'" in refused.talk
    lose(of(broker, 1))
    refused = offline("log", "accept", broker.data, name, "--yes")
    assert refused.status == 1
    assert f"{name} has no files in" in refused.talk
    shutil.copytree(tmp_path / "backup", of(broker, 1))
    broker.start()
    assert f"{name} is damaged: {REPLACED}" in http_get(broker.http_port, "/readyz")[1]
    broker.stop()

    before = fingerprint(broker.data)
    checked = offline("log", "verify", broker.data, "-o", "json")
    assert checked.status == 1
    reasons = {one["name"]: [found["reason"] for found in one["findings"]] for one in checked.json}
    assert reasons.pop(name) == [f"{REPLACED}: {of(broker, 1)}"]
    assert not any(reasons.values())
    planned = offline("log", "accept", broker.data, name)
    assert f"{name} will be accepted as it is: {BEFORE} messages" in planned.talk
    assert "If no slave is in sync, every message that these files lack is LOST." in planned.talk
    assert fingerprint(broker.data) == before, "the plan changes nothing"
    done = offline("log", "accept", broker.data, name, "--yes", "-o", "json")
    assert (done.status, done.json["messages"]) == (0, BEFORE), done.talk
    assert offline("log", "verify", broker.data).status == 0
    again = offline("log", "accept", broker.data, name, "--yes")
    assert (again.status, "this replica used the same files last" in again.talk) == (1, True)
    broker.start()
    assert http_get(broker.http_port, "/readyz")[0] == 200
    after = put(running, "0-1", b"after", AFTER)
    with running.consumer(topics=[TOPIC], group="told", idle_timeout_s=0.3) as consumer:
        assert [message.value for message in read_to_end(consumer)] == after


def test_only_files_from_elsewhere_are_accepted(running: Cluster, offline: Metamq, tmp_path: Path) -> None:
    broker, name = running.broker, f"{TOPIC}/0-1"
    broker.stop()
    copy = tmp_path / "copy"
    shutil.copytree(broker.data, copy)
    unknown = tmp_path / "unknown"
    broker.data.rename(unknown)  # the same files, so no copy
    record = unknown / "partitions"
    lines = record.read_text()
    for folder, reason in (
        (unknown, "this replica used the same files last"),
        (copy, f"all of {copy} is a copy, and the broker uses its files as they are"),
    ):
        before = fingerprint(folder)
        refused = offline("log", "accept", folder, name, "--yes")
        assert refused.status == 1
        assert f"{name} does not need `metamq log accept`: {reason}" in refused.talk
        assert fingerprint(folder) == before
        assert offline("log", "verify", folder).status == 0
    record.write_text("".join(line for line in lines.splitlines(keepends=True) if f"{TOPIC}@" not in line))
    refused = offline("log", "accept", unknown, name, "--yes")
    assert (refused.status, "the former files are unknown" in refused.talk) == (1, True)
    assert offline("log", "verify", unknown).status == 0
    unknown.rename(broker.data)
    broker.start()
    assert http_get(broker.http_port, "/readyz")[0] == 200


def test_a_journal_of_transactions_from_a_backup_is_served_once_a_person_accepts_it(
    running: Cluster, offline: Metamq, tmp_path: Path
) -> None:
    broker, name = running.broker, "~transactions/0-0"
    broker.stop()
    (folder,) = broker.data.glob("topics/~transactions@*/0")
    shutil.copytree(folder, tmp_path / "backup")
    lose(folder)
    shutil.copytree(tmp_path / "backup", folder)
    broker.start()
    assert f"{name} is damaged: {REPLACED}" in http_get(broker.http_port, "/readyz")[1]
    assert "`metamq log accept` takes a copy" in broker.log_path.read_text()
    broker.stop()
    planned = offline("log", "accept", broker.data, name)
    assert "Decide it only as its transaction manager did" in planned.talk
    assert offline("log", "accept", broker.data, name, "--yes").status == 0
    broker.start()
    assert http_get(broker.http_port, "/readyz")[0] == 200
    with running.producer(linger_ms=0) as producer:
        producer.send(TOPIC, b"after", partition="0-0").result(60)
