"""Copies of data that is not in memory: the link waits in no thread of the loop, and errors reach the right place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.data.partition import Partition
from metamq.broker.ha.connection import FRAME_BYTES
from metamq.broker.ha.flow import CopyPace
from metamq.errors import MetamqError, StorageError
from metamq.wire import sync
from metamq.wire.batch import read_header
from metamq.wire.columns import encode
from metamq.wire.frames import Buffer
from tests.broker.ha.test_service import Master, Slave, a_master
from tests.broker.slow_disk import EIO, SlowDisk

CHUNKS = 5
CLOSED = StorageError("t/0: closed")


class Copying(Slave):
    """A slave that keeps the bytes it gets."""

    def __init__(self, *arguments: Any) -> None:
        self.copied = bytearray()
        self.closed = False
        super().__init__(*arguments)

    def push(self, header: object, bodies: list[Buffer] | None = None) -> int:
        if isinstance(header, sync.Copy):
            for body in bodies or ():
                self.copied += body
        return super().push(header, bodies)

    def close(self) -> None:
        self.closed = True


class Scene:
    """A master with some chunks of data, none of them in memory, and a slave without any."""

    def __init__(self, master: Master, disk: SlowDisk) -> None:
        self.disk = disk
        self.failed: list[MetamqError] = []
        master.service.failed = lambda _partition, error: self.failed.append(error)
        assert isinstance(master.partition, Partition)
        self.partition = master.partition
        for _ in range(CHUNKS):
            batch = memoryview(encode([bytes(FRAME_BYTES * 3 // 4)], base_timestamp_us=1))
            self.partition.append(batch, [read_header(batch, 0)], master.ids)
        disk.is_cold = True
        self.slave = Copying(master.service)
        self.slave.attach()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


Play = Callable[[Scene], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], None]:
    def run(play: Play) -> None:
        async def scenario() -> None:
            disk = SlowDisk(monkeypatch)
            try:
                await play(Scene(await make(), disk))
            finally:
                disk.goes.set()

        with a_master(tmp_path) as (_topics, make):
            asyncio.run(scenario())

    return run


def test_all_is_copied_byte_by_byte(play: Callable[[Play], None]) -> None:
    async def scene(on: Scene) -> None:
        log = on.partition.log
        await on.until(lambda: len(on.slave.copied) == log.end_position)
        assert on.slave.copied == log.read_position(0, log.end_position).data
        assert on.disk.began >= CHUNKS
        await on.until(lambda: not on.slave.link.copying)

    play(scene)


def test_the_loop_goes_on_while_a_chunk_is_read(play: Callable[[Play], None]) -> None:
    async def scene(on: Scene) -> None:
        on.disk.goes.clear()
        await on.until(lambda: on.disk.waiting)
        assert on.slave.link.copying, "so it does not join the in-sync set"
        assert not on.failed
        on.disk.goes.set()
        await on.until(lambda: len(on.slave.copied) == on.partition.log.end_position)

    play(scene)


class EndsBetweenLooks(CopyPace):
    """A pause that is there at the first look after each chunk, and over at the next one."""

    looks = 0

    def sent(self, now: float) -> None:
        self.looks = 0

    def wait_s(self, now: float) -> float:
        self.looks += 1
        return 0.001 if self.looks == 1 else 0.0


def test_a_pause_that_ends_while_it_is_looked_at_does_not_stop_the_copy(play: Callable[[Play], None]) -> None:
    async def scene(on: Scene) -> None:
        on.slave.link._pace = EndsBetweenLooks()
        await on.until(lambda: len(on.slave.copied) == on.partition.log.end_position)

    play(scene)


def test_a_chunk_that_cannot_be_read_is_reported_and_not_left_out(play: Callable[[Play], None]) -> None:
    async def scene(on: Scene) -> None:
        on.disk.error = EIO
        await on.until(lambda: on.failed)
        assert isinstance(on.failed[0], StorageError)
        assert not on.slave.copied

    play(scene)


@pytest.mark.parametrize("end", ["link", "place", "partition"])
def test_what_ends_meanwhile_is_not_copied_any_more(play: Callable[[Play], None], end: str) -> None:
    async def scene(on: Scene) -> None:
        on.disk.goes.clear()
        await on.until(lambda: on.disk.waiting)
        copied = len(on.slave.copied)
        if end == "link":
            on.slave.link.close("the test")
        elif end == "place":
            on.slave.link.detach(1)
        else:
            on.partition.close(CLOSED, clean=False)
        on.disk.goes.set()
        await on.until(lambda: not on.slave.link._in_threads)
        assert len(on.slave.copied) == copied
        assert not on.failed

    play(scene)
