"""A replica that may lack what it acknowledged comes back as a new incarnation, and says so; any other does not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq.errors import Fenced
from metamq.testing import BrokerProcess, Cluster
from metamq.zk.cluster.brokers import read_state
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.session.session import Session
from tests.one_zookeeper import cluster
from tests.parts import another_boot, http_get, read_topic, statistics, until_answered, wait_until


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    with cluster(brokers=0) as running:
        yield running


@pytest.fixture
def broker(parts: Cluster, tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker with acknowledged messages, flushed, in topic `t-<broker id>`."""
    broker_id = len(parts.brokers)
    made = BrokerProcess(parts.zookeeper, tmp_path / "broker", broker_id)
    parts.brokers.append(made)
    made.start()
    with parts.admin() as admin:
        admin.create_topic(f"t-{broker_id}", partitions=2, brokers=[broker_id], flush="ack")
    with parts.producer() as producer:
        for number in range(10):
            producer.send(f"t-{broker_id}", b"%d" % number).result(60)
    assert incarnations(parts, made) == {1}
    yield made
    made.kill()


def incarnations(parts: Cluster, broker: BrokerProcess) -> set[int]:
    """The incarnation as it stands in the data folder, in STATS, in the metrics, and in ZooKeeper."""
    found = statistics(broker)
    metrics = http_get(broker.http_port, "/metrics")[1]

    async def registered() -> set[int]:
        async with await Session.open(parts.zookeeper) as session:
            state = await read_state(session, broker.broker_id)
            assert state is not None
            assert state[0].epoch == found["epoch"]
            ((replica, incarnation),) = state[0].insync
            assert replica == found["replica"]
            node = await session.get(session.paths.master(broker.broker_id))
            return {incarnation, json.loads(node.data)["incarnation"]}

    (line,) = [line for line in metrics.splitlines() if line.startswith("metamq_broker_incarnation{")]
    stored = json.loads((broker.data / "meta.json").read_text())["incarnation"]
    return {found["incarnation"], stored, int(float(line.split()[1]))} | until_answered(
        lambda: asyncio.run(registered())
    )


def tear(broker: BrokerProcess) -> None:
    """Half of a batch at the end of both logs, as a write leaves it that was interrupted."""
    paths = list(broker.data.glob("topics/[!~]*/*/*.log"))
    assert len(paths) == 2
    for path in paths:
        with open(path, "ab") as file:
            file.write(os.urandom(80))


@pytest.mark.slow
def test_a_start_after(parts: Cluster, broker: BrokerProcess) -> None:
    """One life of a broker: how it ended, what happened before the next start, and whether that is a loss."""
    life: list[tuple[str, list[Callable[[BrokerProcess], None]], bool]] = [
        ("stopped", [], False),
        ("stopped", [another_boot], False),
        ("killed", [], False),
        ("killed", [another_boot], True),
        ("killed", [tear], True),
        ("killed", [another_boot, tear], True),
        ("stopped", [], False),
    ]
    expected = 1
    for ended, meanwhile, is_loss in life:
        broker.stop() if ended == "stopped" else broker.kill()
        for change in meanwhile:
            change(broker)
        broker.start()
        expected += is_loss
        what = f"{ended}, then {[change.__name__ for change in meanwhile]}"
        assert incarnations(parts, broker) == {expected}, what
        assert broker.log_path.read_text().count("this replica is a new incarnation") == expected - 1, what
    with parts.admin() as admin:
        assert admin.statistics(broker.broker_id).incarnation == expected
        topic = admin.topics()[f"t-{broker.broker_id}"]
    assert sum(map(len, read_topic(broker, topic.topic, topic.id).values())) == 10


def test_a_loss_that_is_found_while_the_broker_serves(parts: Cluster, broker: BrokerProcess) -> None:
    """A topic whose configuration could not be read at the start is opened later."""
    name = f"t-{broker.broker_id}"

    async def write(data: bytes | None) -> bytes:
        async with await Session.open(parts.zookeeper) as session:
            path = session.paths.topic_config(name)
            before = await session.get(path)
            if data is not None:
                await session.set(path, data, ANY_VERSION)
            return before.data

    config = asyncio.run(write(b"not json"))
    broker.kill()
    tear(broker)
    broker.start()
    assert incarnations(parts, broker) == {1}
    epoch = statistics(broker)["epoch"]
    asyncio.run(write(config))
    wait_until(lambda: statistics(broker)["epoch"] > epoch, what="a new term")
    assert incarnations(parts, broker) == {2}
    with parts.producer() as producer:
        producer.send(name, b"after").result(60)


def test_a_stop_with_a_damaged_partition_is_no_clean_one(parts: Cluster, tmp_path: Path) -> None:
    """What that partition had not flushed may be gone after the next boot of the host."""
    broker = BrokerProcess(parts.zookeeper, tmp_path / "broker", len(parts.brokers), retention_check_s=0.1)
    parts.brokers.append(broker)
    broker.start()
    name = f"rot-{broker.broker_id}"
    with parts.admin() as admin:
        admin.create_topic(name, partitions=1, brokers=[broker.broker_id], segment_bytes=2000)
    with parts.producer() as producer:
        for _ in range(6):
            producer.send(name, b"x" * 900).result(60)
    broker.restart()
    first = sorted(broker.data.glob("topics/[!~]*/0/*.log"))[0]
    first.with_suffix(".index").unlink()
    data = bytearray(first.read_bytes())
    data[20] ^= 0x40
    first.write_bytes(data)
    broker.restart()
    wait_until(lambda: "is not served any more" in broker.log_path.read_text())
    assert broker.stop() == 0
    assert json.loads((broker.data / "meta.json").read_text())["clean"] is False


@pytest.mark.slow
def test_an_empty_folder_in_the_place_of_a_lost_one(broker: BrokerProcess, parts: Cluster) -> None:
    broker.kill()
    shutil.rmtree(broker.data)
    broker.start()
    assert_waits_for_a_person(parts, broker)
    (drawn,) = incarnations(parts, broker)
    assert drawn > 2, "the lost folder counts on to 2, should it come back after another boot"
    assert "is new, and the data in the replica's former folder is gone" in broker.log_path.read_text()
    broker.restart()
    assert incarnations(parts, broker) == {drawn}, "once it was accepted, it waits no more"


@pytest.mark.slow
def test_an_empty_folder_of_a_broker_that_never_had_a_topic_is_nobodys_loss(parts: Cluster, tmp_path: Path) -> None:
    broker = BrokerProcess(parts.zookeeper, tmp_path / "broker", len(parts.brokers))
    parts.brokers.append(broker)
    broker.start()
    broker.kill()
    shutil.rmtree(broker.data)
    broker.start()
    assert statistics(broker)["replication"]["role"] == "master"


def assert_waits_for_a_person(parts: Cluster, broker: BrokerProcess) -> None:
    """It acknowledges nothing, says why, and is the master again once a person accepts what is lost."""
    found = statistics(broker)["replication"]
    assert (found["role"], "its data folder is new, or an older copy" in found["reason"]) == ("waiting", True)
    status, text = http_get(broker.http_port, "/readyz")
    assert (status, found["reason"] in text) == (503, True)
    before = until_answered(lambda: asyncio.run(generation(parts, broker)))
    with parts.admin() as admin:
        (shown,) = until_answered(lambda: admin.replicas()[broker.broker_id].replicas)
        assert (shown.role, shown.problem) == ("waiting", f"waits: {found['reason']}")
        with pytest.raises(Fenced, match="not in the in-sync set"):
            admin.promote(broker.broker_id, 0)
        assert statistics(broker)["replication"]["role"] == "waiting"
        admin.promote(broker.broker_id, 0, accept_loss=True)
    assert until_answered(lambda: asyncio.run(generation(parts, broker))) == before + 1


def test_a_killed_broker_whose_folder_was_renamed_takes_its_place_again_at_once(parts: Cluster, tmp_path: Path) -> None:
    """While its session lives; and it is who it was."""
    broker = BrokerProcess(parts.zookeeper, tmp_path / "before", len(parts.brokers), session_timeout_ms=60_000)
    parts.brokers.append(broker)
    broker.start()
    broker.kill()
    broker.data = broker.data.rename(tmp_path / "renamed")
    broker.start(timeout_s=45)
    assert incarnations(parts, broker) == {1}


async def generation(parts: Cluster, broker: BrokerProcess) -> int:
    async with await Session.open(parts.zookeeper) as session:
        state = await read_state(session, broker.broker_id)
        assert state is not None
        return state[0].generation


def test_a_copy_that_was_made_while_the_broker_ran_waits(parts: Cluster, broker: BrokerProcess) -> None:
    """Nobody can say what came after it."""
    backup = broker.data.with_name("backup")
    subprocess.run(["cp", "-a", str(broker.data), str(backup)], check=True)
    with parts.producer() as producer:
        producer.send(f"t-{broker.broker_id}", b"after the copy").result(60)
    broker.stop()
    shutil.rmtree(broker.data)
    backup.rename(broker.data)
    broker.start()
    assert_waits_for_a_person(parts, broker)


@pytest.mark.parametrize("command", [["cp", "-r"], ["cp", "-a"]], ids=" ".join)
def test_a_copy_in_the_place_of_a_folder(parts: Cluster, broker: BrokerProcess, command: list[str]) -> None:
    """As restored from a backup: alone, the broker goes on with it, and says that messages may be gone."""

    backup, before = broker.data.with_name("backup"), until_answered(lambda: asyncio.run(generation(parts, broker)))
    broker.stop()
    subprocess.run([*command, str(broker.data), str(backup)], check=True)
    shutil.rmtree(broker.data)
    subprocess.run([*command, str(backup), str(broker.data)], check=True)
    broker.start()
    (drawn,) = incarnations(parts, broker)
    assert drawn > 2
    assert until_answered(lambda: asyncio.run(generation(parts, broker))) == before + 1
    assert "is a copy, or was moved to another disk" in broker.log_path.read_text()
    broker.restart()
    assert incarnations(parts, broker) == {drawn}


@pytest.mark.slow
def test_the_original_after_its_copy_has_served_is_said_to_be_the_older_one(
    parts: Cluster, broker: BrokerProcess
) -> None:
    """Each lacks what was acknowledged by the other; whoever starts one of them alone is told so."""
    copy = BrokerProcess(parts.zookeeper, broker.data.with_name("copy"), broker.broker_id)
    broker.stop()
    subprocess.run(["cp", "-a", str(broker.data), str(copy.data)], check=True)
    copy.start()
    with parts.producer() as producer:
        producer.send(f"t-{broker.broker_id}", b"in the copy").result(60)
    copy.stop()
    broker.start()
    assert_waits_for_a_person(parts, broker)
    (drawn,) = incarnations(parts, broker)
    assert drawn > 1 << 16
    assert "it lacks messages that are in that one" in broker.log_path.read_text()
    broker.restart()
    assert incarnations(parts, broker) == {drawn}
