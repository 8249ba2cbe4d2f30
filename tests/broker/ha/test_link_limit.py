"""A real master's link with a limit: every byte on it is counted where it comes, headers and heartbeats included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from metamq.broker.ha.flow import BURST_S
from metamq.testing import Cluster
from metamq.wire import status, sync
from metamq.wire.commands import Command, PutEntry
from metamq.wire.frames import encode_frame
from metamq.wire.limits import ENTRIES_TARGET
from tests.broker.front_door.conftest import RawClient, batch_of
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S

MIB = 1024 * 1024
LIMIT_BYTES_S = 3 * MIB // 2
COPIED = [bytes(1000)] * 3000
LIVE_FRAMES = 20
LIVE = batch_of([b"value"])
TOPIC = "t"
EPOCH = 1


class Learner:
    """A slave that acknowledges whatever comes, and notes when it came."""

    def __init__(self, port: int, topic_id: str) -> None:
        self.began = time.monotonic()
        self._client = RawClient(port)
        self._held = 0
        join = sync.Join(sync.JOIN, EPOCH, sync.MAGIC, 0, 7, 1, "folder", True, 1)
        assert self._client.ask(Command.SYNC, join).status == status.OK
        places = [sync.AttachPartition(1 + n, TOPIC, topic_id, n, 0, 0, 0, 0, 0, []) for n in range(2)]
        self._push(sync.Attach(sync.ATTACH, EPOCH, places))

    def _push(self, frame: sync.FromSlave) -> None:
        self._client.send(encode_frame(1, Command.SYNC, 0, 0, frame))

    def frames(self) -> Iterator[tuple[sync.FromMaster, int, float]]:
        """Each frame, its size on the link, and when it had come, in seconds from before the link began."""
        while True:
            answer = self._client.answer()
            at = time.monotonic() - self.began
            frame = sync.unpack_from_master(answer.header)
            if isinstance(frame, sync.Data):
                self._held = frame.first_seq + len(frame.entries) - 1
            self._push(sync.Ack(sync.ACK, EPOCH, self._held, self._held, []))
            bodies: list[Any] | None = [answer.body] if len(answer.body) else None
            yield frame, sum(map(len, encode_frame(1, Command.SYNC, 0, 0, answer.header, bodies))), at

    def close(self) -> None:
        self._client.close()


def put(client: RawClient, topic_id: str, partition: int, batch: bytes | bytearray, times: int) -> None:
    entries = [PutEntry(TOPIC, topic_id, partition, len(batch))] * times
    assert client.ask(Command.PUT, entries, [batch for _ in entries]).status == status.OK


def fill(running: Cluster) -> str:
    """Makes the topic; its first partition has what is to be copied. Returns the topic's id."""
    running.create_topic(TOPIC, partitions=2)
    with running.admin() as admin:
        topic_id = admin.topics()[TOPIC].id
    with RawClient(running.broker.port) as client:
        put(client, topic_id, 0, batch_of(COPIED[:100]), len(COPIED) // 100)
    return topic_id


@pytest.mark.slow
def test_no_more_goes_over_a_link_than_its_limit_copies_and_appends_together() -> None:
    """Whatever goes, all that went before it is paid for. A machine that is slow only makes that easier.

    What is appended meanwhile comes from a thread of its own: a slave that waited for it would not acknowledge, and be
    dropped by its master.
    """

    def append_live() -> None:
        with RawClient(running.broker.port) as client:
            for _ in range(LIVE_FRAMES):
                put(client, topic_id, 1, LIVE, ENTRIES_TARGET)

    with cluster(replication_bytes_per_s=LIMIT_BYTES_S) as running:
        topic_id = fill(running)
        copied = live = beats = sent = 0
        with ThreadPoolExecutor() as pool, closing(Learner(running.broker.port, topic_id)) as learner:
            appended: Future[None] | None = None
            for frame, size, at in learner.frames():
                if isinstance(frame, (sync.Data, sync.Copy)):
                    allowed = LIMIT_BYTES_S * (at + BURST_S)
                    assert sent <= allowed, f"{sent} bytes within {at:.2f} s, before a {type(frame).__name__}"
                sent += size
                if isinstance(frame, sync.Attached):
                    appended = pool.submit(append_live)
                beats += isinstance(frame, sync.Beat)
                copied += sum(entry[2] for entry in frame.entries) if isinstance(frame, sync.Copy) else 0
                live += sum(entry[2] for entry in frame.entries) if isinstance(frame, sync.Data) else 0
                if copied >= sum(map(len, COPIED)) and live == LIVE_FRAMES * ENTRIES_TARGET * len(LIVE) and beats:
                    break
            assert appended is not None
            appended.result(SLOW_S)
