"""What a slave refuses: both ends of a link are real, and in between is a test that spoils a frame.

Whatever is wrong with it, the link ends, nothing of it is stored, and the next handshake finds out where to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgpack
import pytest

from metamq.broker.data.partition import Partition
from metamq.broker.data.topics import Topics
from metamq.broker.log.replicated import CopyDamaged
from metamq.errors import MetamqError, ProtocolError
from metamq.wire import sync
from metamq.wire.batch import HEADER_BYTES
from metamq.wire.frames import Buffer
from tests.broker.ha.test_client import SlaveEnd, run_slave
from tests.broker.ha.test_service import EPOCH, TOPIC, turns

BEFORE = 3
"""Messages that the slave has, a batch each."""
Frame = tuple[Any, bytes]
Spoil = Callable[[Any, bytes], Frame]


class Cable(SlaveEnd):
    """Both ends. `spoil` has its way with every frame of batches."""

    peer = "a test"
    writable = True

    def __init__(self, master: Any, topics: Topics, spoil: Spoil | None = None) -> None:
        self._service = master.service
        self._spoil = spoil
        self.spoilt = 0
        join = sync.Join(sync.JOIN, EPOCH, sync.MAGIC, 0, 1, 7, "folder", False, 1)
        self._at_master, _accept = master.service.join(join, MasterEnd(self))
        super().__init__(topics)

    def push(self, frame: sync.FromSlave) -> None:
        super().push(frame)
        if not self._at_master.closed:
            self._service.received(self._at_master, msgpack.unpackb(msgpack.packb(frame)))

    def comes(self, header: Any, body: bytes) -> None:
        """A frame of the master's is on its way to the slave."""
        if self._spoil is not None and isinstance(header, (sync.Data, sync.Copy)):
            header, body = self._spoil(header, body)
            self.spoilt += 1
        self.link.received(msgpack.unpackb(msgpack.packb(header)), memoryview(body))

    def cut(self) -> None:
        """Both ends find out that the link has ended."""
        self.link.close()
        self._service.closed_by_slave(self._at_master, "the test")


class MasterEnd:
    """What the master's end writes to."""

    peer = "a test"
    writable = True

    def __init__(self, cable: Cable) -> None:
        self._cable = cable
        self._frames: list[Frame] = []

    def push(self, header: object, bodies: list[Buffer] | None = None) -> int:
        body = b"".join(map(bytes, bodies or ()))
        asyncio.get_running_loop().call_soon(self._cable.comes, header, body)
        return len(body)

    def close(self) -> None:
        pass


def log_of(partition: Partition | None) -> bytes:
    assert partition is not None
    log, data = partition.log, b""
    while len(data) < log.end_position:
        data += bytes(log.read_position(len(data), 1 << 20).data)
    return data


def with_header(**fields: Any) -> Spoil:
    """The frame says something else of itself."""
    return lambda header, body: (header._replace(**fields), body)


def another(header: Any) -> Spoil:
    return lambda _header, _body: (header, b"")


def moved(by: int) -> Spoil:
    """The batches belong somewhere else, as the frame has it."""

    def spoil(header: Any, body: bytes) -> Frame:
        entries = [(handle, position + by, size, flush) for handle, position, size, flush in header.entries]
        return header._replace(entries=entries), body

    return spoil


def sized(by: int) -> Spoil:
    def spoil(header: Any, body: bytes) -> Frame:
        entries = [(handle, position, size + by, flush) for handle, position, size, flush in header.entries]
        return header._replace(entries=entries), body

    return spoil


def flipped(at: int) -> Spoil:
    """A bit of the batches is another one."""

    def spoil(header: Any, body: bytes) -> Frame:
        data = bytearray(body)
        data[at] ^= 1
        return header, bytes(data)

    return spoil


def cut(to: int) -> Spoil:
    """The body is shorter, and the frame says so."""

    def spoil(header: Any, body: bytes) -> Frame:
        ((handle, position, _size, flush),) = header.entries
        return header._replace(entries=[(handle, position, len(body[:to]), flush)]), body[:to]

    return spoil


def twice(header: Any, body: bytes) -> Frame:
    """The batches came a second time, as the next ones."""
    ((handle, position, size, flush),) = header.entries
    return header._replace(entries=[(handle, position, 2 * size, flush)]), body * 2


SPOILT: dict[str, tuple[Spoil, type[MetamqError], str]] = {
    "the next epoch": (with_header(epoch=EPOCH + 1), ProtocolError, "of epoch 5 on a link of epoch 4"),
    "the epoch before": (with_header(epoch=EPOCH - 1), ProtocolError, "of epoch 3 on a link of epoch 4"),
    "no epoch": (with_header(epoch=-1), ProtocolError, ".epoch must be"),
    "nothing": (another(None), ProtocolError, "begins with its kind"),
    "an unknown kind": (another([99, EPOCH]), ProtocolError, "begins with its kind"),
    "a slave's frame": (another(sync.Leave(sync.LEAVE, EPOCH)), ProtocolError, "begins with its kind"),
    "a second ACCEPT": (another(sync.Accept(sync.ACCEPT, EPOCH, 9, 1)), ProtocolError, "Accept in the middle"),
    "a field too few": (lambda header, body: (list(header)[:-1], body), ProtocolError, "fields, got"),
    "half an entry": (with_header(entries=[(1, 0)]), ProtocolError, ".entries must be"),
    "more entries than bytes": (with_header(entries=[(1, 0, 8, 0)] * 99), ProtocolError, "is not made up of"),
    "no entry": (with_header(entries=[]), ProtocolError, "is not made up of"),
    "a size too large": (sized(8), ProtocolError, "is not made up of"),
    "a size too small": (sized(-8), ProtocolError, "is not made up of"),
    "further back": (moved(-8), ProtocolError, "the copy begins at byte"),
    "further on": (moved(8), ProtocolError, "the copy begins at byte"),
    "further on by far": (moved(1 << 40), ProtocolError, "the copy begins at byte"),
    "twice": (twice, ProtocolError, "expected is offset"),
    "cut in the header": (cut(HEADER_BYTES - 8), CopyDamaged, "is damaged at byte"),
    "cut in the body": (cut(-8), CopyDamaged, "is damaged at byte"),
    "a bit of the size": (flipped(0), CopyDamaged, "is damaged at byte"),
    "a bit of the offset": (flipped(8), CopyDamaged, "is damaged at byte"),
    "a bit of the producer's part": (flipped(HEADER_BYTES - 1), CopyDamaged, "is damaged at byte"),
    "a bit of the last value": (flipped(-8), CopyDamaged, "is damaged at byte"),
}


OUT_OF_SEQUENCE: dict[str, tuple[Spoil, type[MetamqError], str]] = {
    "a gap": (with_header(first_seq=2), ProtocolError, "sequence number 2 came after 0"),
    "one again": (with_header(first_seq=0), ProtocolError, "sequence number 0 came after 0"),
}


CASES = [*product(["copied", "live"], SPOILT), *product(["live"], OUT_OF_SEQUENCE)]


async def up_to_here(master: Any, topics: Topics) -> Partition:
    """The slave has some messages, in sync; its link is cut."""
    await topics.apply({"t": TOPIC}, {})
    partition = topics.get("t", 0)
    assert partition is not None
    for _ in range(BEFORE):
        master.append()
    cable = Cable(master, topics)
    await turns()
    assert partition.log.end_offset == BEFORE
    cable.cut()
    return partition


async def mends(master: Any, topics: Topics, slaves: Partition) -> None:
    """The next link goes on where the log ends, and the slave is in sync again."""
    cable = Cable(master, topics)
    await turns()
    assert log_of(slaves) == log_of(master.partition)
    assert slaves.log.end_offset == master.partition.log.end_offset > BEFORE
    assert not cable.link.ended.done()
    assert master.service.membership.insync == {(0, 1), (1, 7)}


def refused(cable: Cable, kind: type[MetamqError], problem: str, held_bytes: int) -> None:
    """The link has ended for this reason, and nothing beyond these bytes of the log was acknowledged."""
    error = cable.link.ended.result()
    assert type(error) is kind
    assert problem in str(error)
    for ack in cable.said:
        if isinstance(ack, sync.Ack):
            assert ack.held_seq == 0
            assert all(position <= held_bytes for _handle, position, _flushed in ack.copied)
    cable.cut()


@pytest.mark.parametrize(("sent", "name"), CASES)
def test_a_spoilt_frame_ends_the_link_and_nothing_of_it_is_stored(tmp_path: Path, sent: str, name: str) -> None:
    copied = sent == "copied"
    spoil, kind, problem = (SPOILT | OUT_OF_SEQUENCE)[name]

    async def scene(master: Any, topics: Topics) -> None:
        slaves = await up_to_here(master, topics)
        before = log_of(slaves)
        if copied:
            master.append()
        cable = Cable(master, topics, spoil)
        await turns()
        if not copied:
            master.append()
            await turns()
        assert cable.spoilt == 1
        assert log_of(slaves) == before
        refused(cable, kind, problem, len(before))
        await mends(master, topics, slaves)

    run_slave(tmp_path, scene)


def test_what_comes_before_damage_in_a_frame_stays_and_is_not_acknowledged(tmp_path: Path) -> None:
    """Entries are stored one by one, each of them as a whole."""

    async def scene(master: Any, topics: Topics) -> None:
        slaves = await up_to_here(master, topics)
        before = len(log_of(slaves))
        cable = Cable(master, topics, flipped(-8))
        await turns()
        for _ in range(3):
            master.append()
        await turns()
        assert slaves.log.end_offset == BEFORE + 2
        assert log_of(master.partition).startswith(log_of(slaves))
        refused(cable, CopyDamaged, "is damaged at byte", before)
        await mends(master, topics, slaves)

    run_slave(tmp_path, scene)


@pytest.mark.parametrize(
    ("frame", "body", "kind", "problem"),
    [
        ([sync.ATTACHED, EPOCH, [[1, 9, 0, 0, ""]]], b"", ProtocolError, "has the unknown decision 9"),
        ([sync.ATTACHED, EPOCH, [[1, 1, 0]]], b"", ProtocolError, "AttachResult has 5 fields"),
        ([sync.PRODUCERS, EPOCH, 1], b"junk", CopyDamaged, "its producer states are damaged"),
        ([sync.BEAT, EPOCH + 1, 0, []], b"", ProtocolError, "a Beat of epoch 5 on a link of epoch 4"),
        ([sync.HANDED_OVER, EPOCH, -1, ""], b"", ProtocolError, "HandedOver.end_seq"),
    ],
)
def test_other_frames_that_are_wrong_end_the_link(
    tmp_path: Path, frame: list[Any], body: bytes, kind: type[MetamqError], problem: str
) -> None:
    async def scene(master: Any, topics: Topics) -> None:
        await topics.apply({"t": TOPIC}, {})
        slaves = topics.get("t", 0)
        assert slaves is not None
        cable = Cable(master, topics)
        await turns()
        cable.link.received(msgpack.unpackb(msgpack.packb(frame)), memoryview(body))
        refused(cable, kind, problem, 0)
        for _ in range(BEFORE + 1):
            master.append()
        await mends(master, topics, slaves)

    run_slave(tmp_path, scene)


def test_what_comes_after_the_end_of_a_link_is_ignored(tmp_path: Path) -> None:
    async def scene(master: Any, topics: Topics) -> None:
        slaves = await up_to_here(master, topics)
        cable = Cable(master, topics)
        await turns()
        cable.link.received([99], memoryview(b""))
        master.append()
        await turns()
        assert slaves.log.end_offset == BEFORE
        refused(cable, ProtocolError, "begins with its kind", slaves.log.end_position)
        await mends(master, topics, slaves)

    run_slave(tmp_path, scene)
