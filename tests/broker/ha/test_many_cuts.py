"""A slave that has very many logs to cut after a handshake: the loop goes on with its other work in between."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgpack

from metamq.broker.data.data_folder import DataFolder
from metamq.broker.data.flusher import Flusher
from metamq.broker.data.partition import BatchIds
from metamq.broker.data.topics import Topics
from metamq.broker.ha.client import HAClient
from metamq.broker.ha.slave_link import DECIDING_S, SlaveLink
from metamq.broker.log.disk.files import FileCache
from metamq.errors import ClosedError, MetamqError
from metamq.wire import sync
from metamq.wire.batch import read_header
from metamq.wire.columns import encode
from metamq.zk.cluster.topics import TopicConfig
from tests.broker.ha.test_client import REGISTRATION

EPOCH = 2
PARTITIONS = 20
BATCHES = 3
FSYNC_S = 0.005


class Line:
    """The link's connection; notes whether it is read."""

    address = "a test"

    def __init__(self) -> None:
        self.closed: asyncio.Future[MetamqError] = asyncio.get_running_loop().create_future()
        self.pauses = 0
        self.is_read = True
        self.acknowledged: list[Any] = []

    def push(self, frame: Any) -> None:
        if isinstance(frame, sync.Ack):
            self.acknowledged += frame.copied

    def pause(self) -> None:
        self.pauses += 1
        self.is_read = False

    def resume(self) -> None:
        self.is_read = True


def a_batch() -> memoryview:
    return memoryview(bytearray(encode([b"value"], base_timestamp_us=1)))


def as_received(frame: tuple[Any, ...]) -> Any:
    return msgpack.unpackb(msgpack.packb(frame))


def test_thousands_of_cuts_leave_the_loop_to_others_and_what_comes_behind_them_waits(tmp_path: Path) -> None:
    """Without it a slave answers nobody for seconds, and its link ends for want of heartbeats."""
    folder = DataFolder.open(tmp_path, 0)
    is_slow = False

    def fsync(fd: int) -> None:
        os.fsync(fd)
        time.sleep(FSYNC_S if is_slow else 0)

    files = FileCache(8, sync=fsync)
    topics = Topics(0, folder, files)

    async def scenario() -> None:
        nonlocal is_slow
        await topics.apply({"t": TopicConfig("t", {0: PARTITIONS})}, {})
        ids = BatchIds(1)
        partitions = list(topics.partitions())
        for partition in partitions:
            for _ in range(BATCHES):
                batch = a_batch()
                partition.append(batch, [read_header(batch, 0)], ids)
        end = partitions[0].log.end_position
        client = HAClient(
            lambda: REGISTRATION, topics, Flusher(fails), learner=False, security=None, generation=lambda: 1,
            known_epoch=lambda: 0, begun=lambda epoch: None,
            followed=lambda generation: None, gave_up=lambda given_up: None,
            changed=lambda: None, full=lambda: None, failed=fails,
        )  # fmt: skip
        line = Line()
        link = SlaveLink(client, line, topics, Flusher(fails))  # type: ignore[arg-type]
        link.begin(sync.Accept(sync.ACCEPT, EPOCH, 1, 1000))
        is_slow = True
        cut_to = end // BATCHES
        results = [
            sync.attach_result(number + 1, sync.SyncDecision.FROM, 1, cut_to, "it is cut")
            for number in range(PARTITIONS)
        ]
        turns = 0
        link.received(as_received(sync.Attached(sync.ATTACHED, EPOCH, results)), memoryview(b""))
        link.received(as_received(sync.Beat(sync.BEAT, EPOCH, 0, [(PARTITIONS, 1, cut_to)])), memoryview(b""))
        assert not line.is_read
        while not line.is_read:
            turns += 1
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not link.ended.done()
        assert [p.log.end_position for p in partitions] == [cut_to] * PARTITIONS
        assert sorted(handle for handle, _, _ in line.acknowledged) == list(range(1, PARTITIONS + 1))
        assert partitions[-1].log.stable_offset == 1, "what came behind was done, in the end"
        # Each cut takes FSYNC_S at least, so that they are so many at a time at most, on whatever machine.
        assert turns > PARTITIONS / (DECIDING_S / FSYNC_S + 1)
        link.close()

    try:
        asyncio.run(scenario())
    finally:
        topics.close(ClosedError("broker"), clean=False)
        files.close()
        folder.close(clean=False)


def fails(*problem: object) -> Any:
    raise AssertionError(problem)
