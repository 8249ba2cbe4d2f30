"""`metamq cluster`: ZooKeeper is lost, and made anew from the brokers' folders, with an export of it and without.

Another chroot of the same server is the new ZooKeeper: it is as empty as one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin, Consumer, Producer
from metamq.broker.data.data_folder import GONE, REPLACED
from metamq.broker.data.folder_report import inspect_folder
from metamq.errors import TopicNotFound
from metamq.testing import BrokerProcess
from metamq.zk.cluster.brokers import cluster_id
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.session.session import Session
from tests.cli.conftest import Metamq
from tests.parts import make_chroot, read_to_end, wait_until

pytestmark = pytest.mark.timeout(300)

SETTINGS: dict[str, Any] = {"replication": "sync", "flush": "ack", "retention_ms": None}


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[EmbeddedZooKeeper]:
    with EmbeddedZooKeeper() as server:
        yield server


class Scene:
    """Broker 0 with a master and a slave, and what was sent to it."""

    def __init__(self, zookeeper: EmbeddedZooKeeper, folder: Path, metamq: Metamq) -> None:
        self._server = zookeeper
        self._metamq = metamq
        self.folder = folder
        self.sent: list[bytes] = []
        self.running: list[BrokerProcess] = []
        self.servers = ""
        self.lose_zookeeper()

    def lose_zookeeper(self) -> None:
        self.servers = make_chroot(f"{self._server.address}/{uuid.uuid4().hex}")

    def data(self, replica: int, broker_id: int = 0) -> Path:
        return self.folder / f"broker-{broker_id}-{replica}"

    def start(self, replica: int = 0, broker_id: int = 0) -> BrokerProcess:
        broker = BrokerProcess(self.servers, self.data(replica, broker_id), broker_id, replica=replica)
        self.running.append(broker)
        broker.start()
        return broker

    def begin(self) -> None:
        for replica in (0, 1):
            self.start(replica)
        with Admin(self.servers) as admin:
            admin.create_topic("orders", partitions=2, **SETTINGS)
        self.wait_in_sync()
        self.send(100)

    def wait_in_sync(self, number: int = 2) -> None:
        with Admin(self.servers) as admin:
            wait_until(lambda: sum(one.holds_all for one in admin.replicas()[0].replicas) == number, what="in sync")

    def send(self, number: int) -> None:
        values = [b"%d" % at for at in range(len(self.sent), len(self.sent) + number)]
        with Producer[bytes](self.servers) as producer:
            producer.send_many("orders", values).result(60)
        self.sent += values

    def read(self, **settings: Any) -> list[bytes]:
        with Consumer[bytes](self.servers, topics=["orders"], idle_timeout_s=0.5, **settings) as consumer:
            return [message.value for message in read_to_end(consumer)]

    def stop(self) -> None:
        while self.running:
            assert self.running.pop().stop() == 0

    def kill(self) -> None:
        while self.running:
            broker = self.running.pop()
            if broker.running:
                broker.kill()

    def metamq(self, *arguments: object) -> Any:
        return self._metamq("cluster", *arguments, "--zookeeper", self.servers)

    def restore(self, *arguments: object) -> Any:
        return self.metamq("restore", *self.folders(), *arguments)

    def folders(self) -> list[object]:
        return [part for path in sorted(self.folder.glob("broker-?-?")) for part in ("--data", path)]


@pytest.fixture
def scene(zookeeper: EmbeddedZooKeeper, tmp_path: Path, offline: Metamq) -> Iterator[Scene]:
    made = Scene(zookeeper, tmp_path, offline)
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.slow
def test_from_folders_alone_brokers_come_into_sync_and_nothing_is_missing(scene: Scene) -> None:
    scene.begin()
    with Admin(scene.servers) as admin:
        before = admin.topics()
        epoch = admin.replicas()[0].epoch
    scene.stop()
    scene.lose_zookeeper()

    dry = scene.restore()
    assert dry.status == 1
    assert "Nothing was done. Give --yes to do it." in dry.talk
    assert "Committed offsets are unknown without an export" in dry.talk
    assert scene.metamq("export").status == 1, "the dry run wrote nothing"

    done = scene.restore("--yes")
    assert done.status == 0, done.talk
    rows = [line.split() for line in done.text.splitlines()]
    assert [row[:4] for row in rows[1:3]] == [["0", "0", "master", "yes"], ["0", "1", "slave", "yes"]]
    again = scene.restore("--yes")
    assert again.status == 0
    assert "is already in ZooKeeper: nothing is written" in again.talk

    for replica in (0, 1):
        scene.start(replica)
    scene.wait_in_sync()
    with Admin(scene.servers) as admin:
        assert admin.topics() == before, "settings are kept in the folders"
        assert admin.replicas()[0].epoch > epoch
        assert admin.replicas()[0].generation == 1, "nothing was given up"
        assert sorted(scene.read(start="earliest")) == sorted(scene.sent)
        admin.promote(0, 1)
    scene.wait_in_sync()
    scene.send(20)
    assert sorted(scene.read(start="earliest")) == sorted(scene.sent)


@pytest.mark.slow
def test_groups_go_on_from_the_export_and_newer_folders_count(scene: Scene) -> None:
    scene.begin()
    assert sorted(scene.read(group="readers", start="earliest")) == sorted(scene.sent)
    with Admin(scene.servers) as admin:
        admin.create_topic("gone-later", partitions=1)
    file = scene.folder / "cluster.json"
    assert scene.metamq("export", file).status == 0
    with Admin(scene.servers) as admin:
        admin.delete("gone-later")
        admin.alter("orders", partitions=3, retention_ms=1_000_000_000)
        admin.create_topic("made-later", partitions=1, flush="ack")
        admin.promote(0, 1)
    scene.wait_in_sync()
    unread = len(scene.sent)
    scene.send(30)
    with Admin(scene.servers) as admin:
        before = admin.topics()
        epoch = admin.replicas()[0].epoch
    scene.stop()
    scene.lose_zookeeper()

    done = scene.restore("--export", file, "--yes")
    assert done.status == 0, done.talk
    assert "Topic gone-later of the export has no folder: it was deleted later" in done.talk
    assert "Topic made-later is in folders, but not in the export" in done.talk
    for replica in (0, 1):
        scene.start(replica)
    scene.wait_in_sync()
    with Admin(scene.servers) as admin:
        assert admin.topics() == before
        assert admin.replicas()[0].epoch > epoch
    assert sorted(scene.read(group="readers", start="earliest")) == sorted(scene.sent[unread:])


@pytest.mark.slow
def test_machines_are_described_one_by_one(scene: Scene) -> None:
    scene.begin()
    assert "is in use by process" in scene.metamq("inspect", scene.data(0)).talk
    scene.stop()
    scene.lose_zookeeper()
    options: list[object] = []
    for replica in (0, 1):
        said = scene.metamq("inspect", scene.data(replica))
        assert said.status == 0
        file = scene.folder / f"{replica}.json"
        file.write_bytes(said.data)
        options += ["--folder", file]
    done = scene.metamq("restore", *options, "--yes", "-o", "json")
    assert done.status == 0, done.talk
    assert [one["in_sync"] for one in done.json["brokers"][0]["replicas"]] == [True, True]
    for replica in (0, 1):
        scene.start(replica)
    scene.wait_in_sync()
    assert sorted(scene.read(start="earliest")) == sorted(scene.sent)


@pytest.mark.slow
def test_the_longer_log_is_the_master_and_the_other_copies(scene: Scene) -> None:
    """The slave was killed before; what came after is in the master's folder alone."""
    scene.begin()
    scene.running.pop().kill()
    scene.send(50)
    scene.kill()
    scene.lose_zookeeper()
    scene.servers += "/made/by-the-restore"
    done = scene.restore("--yes", "-o", "json")
    assert done.status == 0, done.talk
    (broker,) = done.json["brokers"]
    assert broker["master"] == 0
    assert [(one["in_sync"], one["lacks"]) for one in broker["replicas"]] == [(True, {}), (False, {"orders": 50})]
    for replica in (0, 1):
        scene.start(replica)
    scene.wait_in_sync()
    assert sorted(scene.read(start="earliest")) == sorted(scene.sent)


@pytest.mark.slow
def test_a_folder_that_is_missing_or_empty_copies_from_the_others(scene: Scene) -> None:
    scene.begin()
    scene.stop()
    scene.lose_zookeeper()
    shutil.rmtree(scene.data(0))
    done = scene.restore("--yes")
    assert done.status == 0, done.talk
    for replica in (1, 0):
        scene.start(replica)
    scene.wait_in_sync()
    with Admin(scene.servers) as admin:
        assert [one.role for one in admin.replicas()[0].replicas] == ["slave", "master"]
    assert sorted(scene.read(start="earliest")) == sorted(scene.sent)


@pytest.mark.slow
def test_copies_from_a_backup_are_taken_up_and_counted_as_new(scene: Scene) -> None:
    scene.begin()
    scene.stop()
    scene.lose_zookeeper()
    for replica in (0, 1):
        shutil.copytree(scene.data(replica), scene.folder / f"backup-{replica}")
        shutil.rmtree(scene.data(replica))
        (scene.folder / f"backup-{replica}").rename(scene.data(replica))
    done = scene.restore("--yes")
    assert done.status == 0, done.talk
    assert "will come back as a new incarnation: it is a copy" in done.talk
    for replica in (0, 1):
        scene.start(replica)
    scene.wait_in_sync()
    assert sorted(scene.read(start="earliest")) == sorted(scene.sent)


@pytest.mark.slow
def test_a_prepared_branch_is_there_after_a_restore_and_can_be_committed(scene: Scene) -> None:
    scene.begin()
    with Producer[bytes](scene.servers) as producer:
        xid = producer.xid(7, "global", "branch")
        producer.tpc_begin(xid)
        producer.send("orders", b"in doubt")
        producer.tpc_prepare()
        producer.close()
    scene.stop()
    scene.lose_zookeeper()
    assert scene.restore("--yes").status == 0
    for replica in (0, 1):
        scene.start(replica)
    scene.wait_in_sync()
    assert sorted(scene.read(start="earliest")) == sorted(scene.sent)
    with Admin(scene.servers) as admin:
        (branch,) = admin.transactions().branches
        admin.commit_branch(branch.xid, branch.broker_id)
    assert sorted(scene.read(start="earliest")) == sorted([*scene.sent, b"in doubt"])


@pytest.mark.slow
def test_clients_that_run_meanwhile_wait_for_the_restore_and_go_on(tmp_path: Path, offline: Metamq) -> None:
    """An empty ZooKeeper has the address: no topic is taken for deleted, and the broker says what is to be done."""
    with EmbeddedZooKeeper(tmp_path / "zk-1") as first:
        servers, port = first.address, first.port
        broker = BrokerProcess(servers, tmp_path / "broker", session_timeout_ms=4000)
        broker.start()
        with Admin(servers) as admin:
            admin.create_topic("orders", partitions=1)
        producer = Producer[bytes](servers)
        consumer = Consumer[bytes](servers, topics=["orders"], group="g", start="earliest", session_timeout_ms=4000)
        messages = iter(consumer)
        producer.send("orders", b"before").result(60)
        assert next(messages).value == b"before"
        first.stop()
        with EmbeddedZooKeeper(tmp_path / "zk-2", port), producer, consumer:
            assert broker.wait() == 1
            said = broker.log_path.read_text()
            assert "was replaced, or restored from a copy" in said
            assert "does not know broker 0. Give the ZooKeeper, chroot and --root" in said
            assert "If ZooKeeper was lost, `metamq cluster restore` rebuilds its contents" in said
            sent = producer.send("orders", b"meanwhile")
            with Producer[bytes](servers) as new, pytest.raises(TopicNotFound, match="`metamq cluster restore`"):
                new.send("orders", b"to nobody").result(60)
            assert not sent.done()
            restore = offline("cluster", "restore", "--data", broker.data, "--yes", "--zookeeper", servers)
            assert restore.status == 0, restore.talk
            broker = BrokerProcess(servers, broker.data)
            broker.start()
            try:
                sent.result(60)
                while next(messages).value != b"meanwhile":
                    continue
            finally:
                assert broker.stop() == 0


def test_an_export_into_a_pipe_leaves_it_a_pipe(metamq: Metamq, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    try:
        assert metamq("cluster", "export", pipe).status == 0
        assert pipe.is_fifo()
        assert json.loads(reader.communicate(timeout=60)[0])["kind"] == "metamq cluster export"
    finally:
        reader.kill()
        reader.wait()


@pytest.mark.slow
def test_an_export_replaces_an_older_one_and_none_of_another_cluster(metamq: Metamq, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    for _time in range(2):
        assert metamq("cluster", "export", file).status == 0
    document = json.loads(file.read_text())
    own = document["cluster_id"]
    others = json.dumps({**document, "cluster_id": "f" * 32, "format": document["format"] + 1})
    file.write_text(others)
    refused = metamq("cluster", "export", file)
    assert refused.status == 1
    assert f"{file} is an export of cluster {'f' * 32}, but this ZooKeeper has cluster {own}" in refused.talk
    assert "Give another file name, or remove the file." in refused.talk
    assert file.read_text() == others
    assert list(tmp_path.iterdir()) == [file]


def test_an_export_to_a_dash_goes_to_standard_output(
    metamq: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert metamq("cluster", "export", "-").json["kind"] == "metamq cluster export"
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_text_is_refused_by_its_name(offline: Metamq, tmp_path: Path) -> None:
    file = tmp_path / "strange.json"
    file.write_bytes(b"\xff\xfe{}")
    refused = offline("cluster", "restore", "--folder", file)
    assert refused.status == 1
    assert f"{file} does not describe a data folder" in refused.talk


def test_what_cannot_be_one_cluster_is_refused(scene: Scene, zookeeper: EmbeddedZooKeeper) -> None:
    scene.begin()
    assert "is in use by process" in scene.restore("--yes").talk
    scene.stop()
    scene.lose_zookeeper()

    shutil.copytree(scene.data(1), scene.data(2))
    twice = scene.restore("--yes")
    assert (twice.status, "two folders are replica 1 of broker 0" in twice.talk) == (1, True)
    shutil.rmtree(scene.data(2))

    meta = scene.data(1) / "meta.json"
    whole = meta.read_text()
    meta.write_text(whole[:50])
    damaged = scene.restore("--yes")
    assert (damaged.status, f"{meta} cannot be read" in damaged.talk) == (1, True)
    meta.write_text(json.dumps({**json.loads(whole), "cluster_id": "another"}))
    assert "the folders and the export are of 2 clusters" in scene.restore("--yes").talk
    meta.write_text(whole)

    async def another_cluster() -> str:
        async with await Session.open(scene.servers) as session:
            return await cluster_id(session)

    other = asyncio.run(another_cluster())
    refused = scene.restore("--yes")
    assert (
        refused.status,
        f"there is another cluster below /meta in ZooKeeper at {scene.servers}: {other}" in refused.talk,
    ) == (1, True)


def test_a_broker_without_a_folder_has_to_be_given_up_by_name(scene: Scene) -> None:
    scene.start()
    scene.start(0, broker_id=1)
    with Admin(scene.servers) as admin:
        admin.create_topic("orders", partitions=4, flush="ack")
        admin.create_topic("elsewhere", partitions=1, brokers=[1])
    scene.stop()
    scene.lose_zookeeper()
    only = ["restore", "--data", scene.data(0), "--yes"]
    asked = scene.metamq(*only)
    assert asked.status == 1
    assert "broker 1 has partitions, but none of its folders is given" in asked.talk
    done = scene.metamq(*only, "--without-broker", 1)
    assert done.status == 0, done.talk
    assert "Topic orders loses partitions: 2 of broker 1." in done.talk
    scene.start()
    scene.send(10)
    with Admin(scene.servers) as admin:
        assert {topic: dict(config.partitions) for topic, config in admin.topics().items()} == {"orders": {0: 2}}


def test_a_log_that_was_put_there_from_elsewhere_makes_no_master(scene: Scene) -> None:
    scene.begin()
    scene.kill()
    log = next(path for path in sorted(scene.data(0).glob("topics/orders@*/?")))
    log.rename(log.with_name("away"))
    shutil.copytree(log.with_name("away"), log)
    shutil.rmtree(log.with_name("away"))
    (replaced,) = [one for one in inspect_folder(scene.data(0)).logs.values() if one.problem]
    assert (replaced.topic, replaced.index) == ("orders", int(log.name))
    assert REPLACED in replaced.problem
    scene.lose_zookeeper()
    done = scene.restore("--yes", "-o", "json")
    assert done.status == 0, done.talk
    assert done.json["brokers"][0]["master"] == 1


def test_a_log_that_is_damaged_or_torn_is_told_and_reported_as_recovery_finds_it(scene: Scene) -> None:
    scene.begin()
    scene.kill()
    torn = next(path for path in scene.data(0).glob("topics/orders@*/?/*.log") if path.stat().st_size)
    index = int(torn.parent.name)
    whole = inspect_folder(scene.data(0))
    with torn.open("ab") as file:
        file.write(b"\xff" * 800)
    assert inspect_folder(scene.data(0)) == whole, "a torn tail counts as not written"
    torn.unlink()
    report = inspect_folder(scene.data(0))
    (damaged,) = [log for log in report.logs.values() if log.problem]
    assert (damaged.topic, damaged.index) == ("orders", index)
    scene.lose_zookeeper()
    done = scene.restore("--yes", "-o", "json")
    assert done.status == 0, done.talk
    assert done.json["brokers"][0]["master"] == 1
    assert f"Replica 0 of broker 0 has damaged logs (orders/{index})" in done.talk


@pytest.mark.slow
@pytest.mark.parametrize("what", ["topics/orders@*", "topics/orders@*/0"])
def test_what_a_replica_had_and_is_not_there_is_damaged_and_not_deleted(
    scene: Scene, tmp_path: Path, what: str
) -> None:
    """A wrong `mv`, a disk that is not mounted: once it is back, all of it is served."""
    scene.begin()
    export = tmp_path / "export.json"
    assert scene.metamq("export", export).status == 0
    scene.kill()
    moved = []
    for number in (0, 1):
        (place,) = scene.data(number).glob(what)
        moved.append((place, place.rename(tmp_path / f"away-{number}")))
    scene.lose_zookeeper()
    done = scene.restore("--export", export, "--yes", "-o", "json")
    assert done.status == 0, done.talk
    assert "was deleted later" not in done.talk
    assert "Replica 0 of broker 0 has damaged logs (orders/0" in done.talk
    assert GONE in done.talk
    for place, away in moved:
        away.rename(place)
    for number in (0, 1):
        scene.start(number)
    assert Counter(scene.read(start="earliest")) == Counter(scene.sent)


def test_a_master_whose_folder_is_not_given_is_named(scene: Scene, tmp_path: Path) -> None:
    scene.begin()
    export = tmp_path / "export.json"
    assert scene.metamq("export", export).status == 0
    scene.kill()
    shutil.rmtree(scene.data(0))
    scene.lose_zookeeper()
    done = scene.restore("--export", export)
    assert "Replica 0 of broker 0 was the master at the time of the export, but its folder is not given" in done.talk
