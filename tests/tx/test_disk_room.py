"""Disks that are full, or fail, under whole brokers that have promised something: refused or ended, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from metamq.client.background import at_once
from metamq.client.offsets.connections import database_of
from metamq.errors import CorruptData, MetamqError, TryLater
from metamq.testing import BrokerProcess, Cluster
from metamq.tx import Recovered, Recoverer, Vote, XAResource, Xid, create_outcome_table, dbtx
from metamq.wire.limits import BATCH_BYTES_MAX
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker, read_to_end, wait_until

MEBIBYTE = 1024 * 1024
RESERVE_BYTES = 2 * BATCH_BYTES_MAX


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    with cluster(brokers=0) as running:
        yield running


def seen(parts: Cluster, topic: str) -> list[bytes]:
    """The names of the messages, sorted."""
    with parts.consumer(topics=[topic], idle_timeout_s=0.5) as consumer:
        return sorted(message.value.partition(b"-")[0] for message in read_to_end(consumer))


def worked(mq: XAResource, topic: str, name: bytes, size: int) -> Xid:
    """A branch that may be prepared, with so many bytes in it."""
    xid = Xid.random(name)
    mq.start(xid)
    while size > 0:
        mq.send(topic, name + b"-" + os.urandom(min(size, MEBIBYTE // 2)))
        size -= MEBIBYTE // 2
    mq.end(xid)
    return xid


@pytest.mark.slow
def test_more_than_the_disk_has_room_for_is_refused_at_prepare_and_nothing_of_it_is_lost(
    parts: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is promised has to fit beside all else that is, also what was promised a moment ago."""
    free_bytes = RESERVE_BYTES + 8 * MEBIBYTE
    with (
        LocalBroker(parts.zookeeper, tmp_path / "broker", id=1, disk_reserve_bytes=RESERVE_BYTES) as broker,
        parts.admin() as admin,
        XAResource(1, parts.zookeeper) as mq,
    ):
        monkeypatch.setattr(broker.broker._folder, "free_bytes", lambda: free_bytes)
        admin.create_topic("room", partitions=1, brokers=[1])
        mq.set_timeout(600)
        large = worked(mq, "room", b"large", RESERVE_BYTES + 12 * MEBIBYTE)
        with pytest.raises(TryLater, match="bytes free"):
            mq.prepare(large)
        halves = [worked(mq, "room", name, 24 * MEBIBYTE) for name in (b"one", b"two")]
        assert mq.prepare(halves[0]) is Vote.OK
        with pytest.raises(TryLater, match="bytes free"):
            mq.prepare(halves[1])
        assert [one.xid for one in mq.recover()] == halves[:1]
        mq.commit(halves[0])
        free_bytes = 4 * RESERVE_BYTES
        wait_until(lambda: broker.broker._parts.status.disk_full is None, what="room")
        for xid in (halves[1], large):
            assert mq.prepare(xid) is Vote.OK
            mq.commit(xid)
    with LocalBroker(parts.zookeeper, tmp_path / "broker", id=1):
        assert seen(parts, "room") == [b"large"] * 88 + [b"one"] * 48 + [b"two"] * 48


def test_a_commit_that_a_broker_refuses_is_a_problem_of_the_recoverer(parts: Cluster, tmp_path: Path) -> None:
    """The partition of its message is damaged."""
    connect = partial(sqlite3.connect, tmp_path / "shop.db")
    with (
        LocalBroker(parts.zookeeper, tmp_path / "broker", id=2) as broker,
        parts.admin() as admin,
        parts.producer() as producer,
        contextlib.closing(connect()) as database,
    ):
        admin.create_topic("refused", partitions=1, brokers=[2])
        create_outcome_table(database)
        tx = dbtx(database, producer).__enter__()
        tx.send("refused", b"decided")
        assert tx._work is not None
        producer._background.run(tx._work.prepare())
        at_once(tx._outcomes.commit(database_of(database), tx._work.gtrid))
        database.commit()
        (partition,) = [one for one in broker.broker._topics.partitions() if one.topic == "refused"]
        partition.closed_by = CorruptData("refused/2-0", "a test says so")
        with Recoverer(connect, parts.zookeeper, grace_s=0) as recoverer:
            done = recoverer.run_once()
            assert done[:3] == (0, 0, 0)
            (problem,) = done.problems
            assert (problem.broker_id, [xid.gtrid for xid in problem.xids]) == (2, [tx._work.gtrid])
            assert problem.reason == "refused/2-0 is damaged: a test says so"
            partition.closed_by = None
            assert recoverer.run_once() == Recovered(1, 0, 0)
        assert seen(parts, "refused") == [b"decided"]


class TooLargeFiles:
    """No file may grow beyond what it is, and a bit: a write is cut short, and the next one fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fails(self, broker: BrokerProcess) -> None:
        largest = max(path.stat().st_size for path in self.folder.rglob("*~transactions*/**/*.log"))
        limits = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (largest + 30_000, limits[1]))

    def is_well(self) -> None:
        """The broker's next process has no such limit."""


class FullDisk:
    """A file system of its own that has no room at all, without warning."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", folder], check=True, capture_output=True)

    def fails(self, broker: BrokerProcess) -> None:
        with contextlib.suppress(OSError), open(self.folder / "ballast", "wb", buffering=0) as file:
            while file.write(bytes(4096)):  # to the last page
                pass

    def is_well(self) -> None:
        (self.folder / "ballast").unlink()


Disk = TooLargeFiles | FullDisk


@pytest.fixture(params=[TooLargeFiles, FullDisk])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param is TooLargeFiles:
        yield TooLargeFiles(folder)
        return
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        made = FullDisk(folder)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', error)}")
    yield made
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def until_done(broker: BrokerProcess, call: Callable[[], object]) -> None:
    """As an operator would: a broker that has ended is started. It may say at first that it is to be asked later."""

    def is_done() -> bool:
        if not broker.running:
            broker.stop()  # nothing, but that it has ended is noted
            broker.start()
        try:
            call()
        except MetamqError as error:
            if not error.retriable:
                raise
            return False
        return True

    wait_until(is_done, 60, "what a broker is asked again")


@pytest.mark.slow
def test_a_journal_that_cannot_be_written_ends_the_broker_or_is_refused_and_what_was_promised_holds(
    parts: Cluster, disk: Disk
) -> None:
    number = 2 if isinstance(disk, TooLargeFiles) else 3
    topic = f"failing-{number}"
    broker = BrokerProcess(parts.zookeeper, disk.folder / "broker", number, disk_reserve_bytes=RESERVE_BYTES)
    broker.log_path = disk.folder.with_name("broker.log")
    broker.start()
    parts.brokers.append(broker)
    with parts.admin() as admin:
        admin.create_topic(topic, partitions=2, brokers=[number])
    names = iter([b"%04d" % each for each in range(10_000)])
    prepared, committed, tried = dict[Xid, bytes](), list[bytes](), set[bytes]()
    with XAResource(number, parts.zookeeper, request_timeout_s=5) as mq:

        def one(*, is_committed: bool) -> None:
            name = next(names)
            tried.add(name)
            xid = worked(mq, topic, name, 9000)
            assert mq.prepare(xid) is Vote.OK
            prepared[xid] = name
            if is_committed:
                mq.commit(xid)
                committed.append(prepared.pop(xid))

        for turn in range(6):
            one(is_committed=turn % 2 == 0)
        disk.fails(broker)
        with pytest.raises(MetamqError):  # noqa: PT012
            for turn in range(1000):
                one(is_committed=turn % 2 == 0)
        if isinstance(disk, TooLargeFiles):
            assert broker.wait(60) == 1
            assert f"broker {number} stops: ~transactions/" in broker.log_path.read_text()
    print(f"{len(prepared)} are prepared, {len(tried)} were tried; the broker is up: {broker.running}")
    disk.is_well()

    with XAResource(number, parts.zookeeper) as mq:
        found: set[Xid] = set()

        def recover() -> None:
            found.update(one.xid for one in mq.recover())

        until_done(broker, recover)
        assert found >= {*prepared}
        for xid in found:
            until_done(broker, partial(mq.commit, xid))
        until_done(broker, partial(worked, mq, topic, b"after", 10))
    names_seen = seen(parts, topic)
    certain = sorted([*committed, *prepared.values()])
    assert len(names_seen) == len(set(names_seen)), "each once"
    assert {*certain} <= {*names_seen} <= tried
    assert len({*names_seen} - {*certain}) <= 1, "the one of which nobody was told"
    assert broker.stop() == 0
