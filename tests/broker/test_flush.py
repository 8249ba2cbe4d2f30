"""Flush policies: one fsync for all that wait, nothing unflushed is seen where it must not be, nothing is forgotten."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from metamq.broker.data.flusher import Flusher
from metamq.broker.data.partition import Appended, BatchIds, Partition
from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.trim import TrimmedLog
from metamq.errors import MetamqError, StorageError
from metamq.testing import Cluster
from metamq.wire.batch import read_header
from metamq.wire.columns import encode
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker, read_topic

ACK = FlushPolicy(before_ack=True, every_messages=None, every_ms=None)


class Disk:
    """fsync as slow as the test wants, or failing. Counts."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.begun = 0
        self.error: Exception | None = None

    def sync(self, fd: int) -> None:
        self.begun += 1
        assert self.free.wait(100)
        if self.error is not None:
            raise self.error
        os.fsync(fd)


class Bench:
    """One partition on a test's disk, with its flusher."""

    def __init__(self, folder: Path, policy: FlushPolicy) -> None:
        self.disk = Disk()
        self.failures: list[MetamqError] = []
        log = TrimmedLog.open(folder / "0", "t/0", LogConfig(flush=policy), FileCache(sync=self.disk.sync), now_us=0)
        log.clear_bound()
        self.disk.begun = 0
        self.partition = Partition("t", "1" * 16, 0, log)
        self.flusher = Flusher(self.failures.append)
        self.acknowledged: list[int] = []
        self._ids = BatchIds(1)

    def put(self, value: bytes, *, producer_id: int = 0, sequence: int = 0) -> Appended:
        """As a PUT of one batch; its number among the puts goes to `acknowledged` when it would be answered."""
        batch = encode([value], base_timestamp_us=1, producer_id=producer_id, sequence=sequence)
        header = read_header(batch)
        appended = self.partition.stored_before(header) or self.partition.append(memoryview(batch), [header], self._ids)

        def answered(error: MetamqError | None) -> None:
            assert error is None
            self.acknowledged.append(appended.base_offset)

        if self.partition.when_stable(appended.end_offset, answered):
            answered(None)
        self.flusher.appended(self.partition)
        return appended


@pytest.fixture
def bench(tmp_path: Path) -> Callable[[FlushPolicy, Callable[[Bench], Awaitable[None]]], None]:
    """Runs a test's coroutine on a bench."""

    def run(policy: FlushPolicy, test: Callable[[Bench], Awaitable[None]]) -> None:
        async def go() -> None:
            made = Bench(tmp_path, policy)
            try:
                await test(made)
            finally:
                made.disk.free.set()
                await made.flusher.drain()
                made.flusher.close()
                made.partition.log.close(clean=False)

        asyncio.run(go())

    return run


async def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        await asyncio.sleep(0.005)


class Reader:
    """A long poll that waits for data."""

    def __init__(self, partition: Partition) -> None:
        self.bytes = 0
        partition.readers.add(self)

    def data_ready(self, added_bytes: int) -> None:
        self.bytes += added_bytes


def test_before_the_acknowledgement_one_fsync_serves_all_that_wait(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        on.disk.free.clear()
        on.put(b"first")
        await until(lambda: on.disk.begun)
        for number in range(200):
            on.put(b"%d" % number)
        await asyncio.sleep(0)
        assert on.acknowledged == []
        on.disk.free.set()
        await until(lambda: len(on.acknowledged) == 201)
        assert on.acknowledged == list(range(201))
        assert on.flusher.flushes == 2

    bench(ACK, test)


def test_what_comes_in_one_turn_of_the_loop_shares_one_fsync(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        for number in range(5):
            on.put(b"%d" % number)
        await until(lambda: len(on.acknowledged) == 5)
        assert on.flusher.flushes == 1

    bench(ACK, test)


def test_the_next_fsync_begins_before_those_that_waited_for_the_last_are_answered(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        on.disk.free.clear()
        first = on.put(b"first")
        begun: list[int] = []
        on.partition.when_stable(first.end_offset, lambda _: begun.append(on.flusher.flushes))
        await until(lambda: on.disk.begun)
        on.put(b"second")
        on.disk.free.set()
        await until(lambda: len(on.acknowledged) == 2)
        assert begun == [2]

    bench(ACK, test)


def test_a_flush_that_cannot_begin_ends_the_broker(bench: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(on: Bench) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(TrimmedLog, "start_flush", lambda self: (_ for _ in ()).throw(StorageError("t/0: opening")))
            on.put(b"first")
            await until(lambda: on.failures)
        assert on.acknowledged == []

    bench(ACK, test)


def test_readers_never_see_what_is_not_flushed_where_the_topic_flushes_first(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        reader, log = Reader(on.partition), on.partition.log
        on.disk.free.clear()
        on.put(b"first")
        on.put(b"second")
        await until(lambda: on.disk.begun)
        assert (log.end_offset, log.stable_offset) == (2, 0)
        assert log.read(0, 1000).data == b""
        assert reader.bytes == 0
        on.disk.free.set()
        await until(lambda: len(on.acknowledged) == 2)
        assert reader.bytes > 0
        assert log.stable_offset == 2

    bench(ACK, test)


def test_a_repeated_batch_is_answered_no_sooner_than_the_first_is_on_the_disk(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        on.disk.free.clear()
        assert on.put(b"x", producer_id=7) == on.put(b"x", producer_id=7), "the second is a repeat"
        await until(lambda: on.disk.begun)
        assert on.acknowledged == []
        on.disk.free.set()
        await until(lambda: on.acknowledged == [0, 0])

    bench(ACK, test)


def test_a_repetition_from_long_ago_waits_too(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        on.disk.free.clear()
        for sequence in range(8):
            on.put(b"x", producer_id=7, sequence=sequence)
        assert on.put(b"x", producer_id=7, sequence=0).base_offset == -1
        await until(lambda: on.disk.begun)
        assert on.acknowledged == []
        on.disk.free.set()
        await until(lambda: len(on.acknowledged) == 9)

    bench(ACK, test)


def test_by_count(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        for _ in range(9):
            on.put(b"x")
        assert on.flusher.flushes == 0
        assert len(on.acknowledged) == 9
        on.put(b"x")
        await until(lambda: on.partition.log.flushed_offset == 10)
        assert on.flusher.flushes == 1

    bench(FlushPolicy(every_messages=10, every_ms=None), test)


def test_by_count_also_what_gathered_during_an_fsync(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        on.disk.free.clear()
        for _ in range(10):
            on.put(b"x")
        await until(lambda: on.disk.begun)
        for _ in range(10):
            on.put(b"x")
        on.disk.free.set()
        await until(lambda: on.partition.log.flushed_offset == 20)

    bench(FlushPolicy(every_messages=10, every_ms=None), test)


def test_by_time_also_what_was_appended_during_an_fsync(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        ticking = asyncio.ensure_future(on.flusher.run())
        on.disk.free.clear()
        on.put(b"x")
        await until(lambda: on.disk.begun)
        on.put(b"y")
        on.disk.free.set()
        await until(lambda: on.partition.log.flushed_offset == 2)
        assert on.partition.dirty_since_ms is None
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)

    bench(FlushPolicy(every_ms=50), test)


def test_settled_is_what_was_there_before_and_waits_for_no_more(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        log = on.partition.log
        on.disk.free.clear()
        on.put(b"before the flush that is under way")
        on.flusher.start(on.partition)
        await until(lambda: on.disk.begun)
        on.put(b"and after")
        settling = asyncio.ensure_future(on.flusher.settle(on.partition))
        await asyncio.sleep(0)
        assert not settling.done()
        on.disk.free.set()
        await settling
        assert log.flushed_offset == log.end_offset == 2
        flushes = on.flusher.flushes
        await on.flusher.settle(on.partition)
        assert on.flusher.flushes == flushes == 2

    bench(FlushPolicy(every_ms=None), test)


def test_whoever_waits_for_a_flush_is_served_by_one_that_another_asked_for(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        on.disk.free.clear()
        settling = []
        for number in range(3):
            on.put(b"x")
            settling.append(asyncio.ensure_future(on.flusher.settle(on.partition)))
            await until(lambda: on.disk.begun)
            assert len(settling) == number + 1
        on.disk.free.set()
        await asyncio.gather(*settling)
        assert on.acknowledged == [0, 1, 2]
        assert on.flusher.flushes == 2

    bench(ACK, test)


def test_the_first_failed_fsync_is_told_and_nobody_is_answered(bench: Callable[..., None]) -> None:
    async def test(on: Bench) -> None:
        on.disk.error = OSError(5, "Input/output error")
        on.put(b"x")
        await until(lambda: on.failures)
        assert isinstance(on.failures[0], StorageError)
        assert on.acknowledged == []
        on.disk.error = None
        with pytest.raises(StorageError, match="takes no writes since its disk failed"):
            on.put(b"y")

    bench(ACK, test)


# -- the whole broker -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("a mistake of ours")])
def test_a_flush_that_ends_by_whatever_error_is_told(bench: Callable[..., None], error: Exception) -> None:
    async def test(on: Bench) -> None:
        on.disk.error = error
        on.put(b"a")
        await until(lambda: on.failures)
        assert str(error.args[-1]) in str(on.failures[0])
        assert on.acknowledged == []

    bench(ACK, test)


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[Cluster]:
    with cluster(brokers=0) as parts:
        yield parts


@pytest.mark.slow
def test_many_producers_share_fsyncs(zookeeper: Cluster, tmp_path: Path) -> None:
    with LocalBroker(zookeeper.zookeeper, tmp_path / "broker") as local, zookeeper.admin() as admin:
        admin.create_topic("shared", partitions=1, flush="ack")
        flusher = local.broker._flusher

        at_once = threading.Barrier(12)

        def work() -> None:
            with zookeeper.producer() as producer:
                at_once.wait(60)
                for _ in range(40):
                    producer.send("shared", b"x").result(60)

        before = flusher.flushes
        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        flushes = flusher.flushes - before
        print(f"{flushes} flushes for 480 acknowledgements")
        assert 40 <= flushes < 400


def test_what_was_acknowledged_was_flushed_and_what_is_read_too(tmp_path: Path) -> None:
    with cluster(folder=tmp_path) as parts:
        with parts.admin() as admin:
            topic = admin.create_topic("t", partitions=1, flush="ack")
        with parts.producer() as producer:
            receipts = [producer.send("t", b"%d" % n, b"k").result(60) for n in range(20)]
        parts.broker.kill()
        config = LogConfig(flush=ACK)
        folder = tmp_path / "broker-0" / "topics" / f"t@{topic.id}" / "0"
        log = TrimmedLog.open(folder, "t/0", config, FileCache(), now_us=0)
        log.clear_bound()
        assert log.flushed_offset >= len(receipts)
        log.close(clean=False)
        parts.broker.start()
        assert [m.offset for m in read_topic(parts.broker, "t", topic.id)["0-0"]] == [r.offset for r in receipts]
