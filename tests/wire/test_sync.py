"""Replication's frames: what is declared is taken, and nothing else; any number of partitions fits into frames."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.errors import ProtocolError
from metamq.wire import sync
from metamq.wire.commands import Command
from metamq.wire.frames import encode_frame
from metamq.wire.headers import fields_of
from metamq.wire.limits import (
    ATTACH_EPOCHS_MAX,
    ENTRIES_MAX,
    ENTRIES_TARGET,
    HAND_OVER_MS_MAX,
    HEADER_BYTES_MAX,
)
from metamq.wire.sync import AttachPartition, AttachResult, SyncDecision
from tests.examples import examples

PARTITION = AttachPartition(1, "flights", "id", 3, 10, 1000, 20, 2000, 20, [(4, 10, 1000), (5, 15, 1500)])
FROM_SLAVE = [
    sync.Join(sync.JOIN, 5, sync.MAGIC, 0, 1, 7, "folder", False, 2),
    sync.Attach(sync.ATTACH, 5, [PARTITION]),
    sync.Ack(sync.ACK, 5, 100, 90, [(1, 1500, 1400)]),
    sync.Detach(sync.DETACH, 5, [1, 2]),
    sync.HandOver(sync.HANDOVER, 5, 3000),
    sync.Leave(sync.LEAVE, 5),
]
FROM_MASTER = [
    sync.Accept(sync.ACCEPT, 5, 2, 1000),
    sync.Attached(sync.ATTACHED, 5, [AttachResult(1, SyncDecision.FROM, 20, 2000, "it goes on")]),
    sync.Data(sync.DATA, 5, 91, [(1, 2000, 120, 1), (2, 0, 80, 0)], [(1, 20, 2000)]),
    sync.Copy(sync.COPY, 5, [(1, 2000, 120, 1)], []),
    sync.Producers(sync.PRODUCERS, 5, 1),
    sync.Beat(sync.BEAT, 5, 92, [(1, 20, 2000), (2, 1, 80)]),
    sync.HandedOver(sync.HANDED_OVER, 5, 92, ""),
]
BOTH = [(sync.unpack_from_slave, frame) for frame in FROM_SLAVE] + [
    (sync.unpack_from_master, frame) for frame in FROM_MASTER
]
EVERY = pytest.mark.parametrize(("unpack", "sent"), BOTH, ids=[type(frame).__name__ for _, frame in BOTH])


def received(header: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(header))


def test_each_kind_has_one_number_and_goes_one_way() -> None:
    tables = {**sync.FROM_SLAVE, **sync.FROM_MASTER}
    assert len(tables) == len(sync.FROM_SLAVE) + len(sync.FROM_MASTER) == len(BOTH)
    assert {type(frame): frame[0] for _, frame in BOTH} == {cls: kind for kind, cls in tables.items()}
    assert sorted(tables) == list(range(1, len(tables) + 1))


@EVERY
def test_round_trip(unpack: Any, sent: Any) -> None:
    got = unpack(received(sent))
    assert type(got) is type(sent)
    assert received(got) == received(sent)


@EVERY
def test_fields_of_a_newer_release_are_left_out(unpack: Any, sent: Any) -> None:
    assert unpack([*received(sent), "new"]) == unpack(received(sent))


@EVERY
def test_it_is_refused_by_the_end_that_says_it(unpack: Any, sent: Any) -> None:
    other = sync.unpack_from_master if unpack is sync.unpack_from_slave else sync.unpack_from_slave
    with pytest.raises(ProtocolError, match="a SYNC frame begins with its kind"):
        other(received(sent))


@EVERY
def test_a_wrong_field_is_named(unpack: Any, sent: Any) -> None:
    good = received(sent)
    for number, name in enumerate(sent._fields[1:], 1):
        for wrong in (None, 1.5, b"bytes", {}, [["x"]], [[-1] * 4], -1 if name != "learner" else 1, 1 << 63):
            if name in ("partitions", "results") and isinstance(wrong, list):
                continue  # their entries are looked at one by one
            with pytest.raises(ProtocolError, match=rf"{type(sent).__name__}\.{name} "):
                unpack([*good[:number], wrong, *good[number + 1 :]])
    for short in range(1, len(good)):
        with pytest.raises(ProtocolError, match=f"{type(sent).__name__} has {len(good)} fields, got"):
            unpack(good[:short])


@pytest.mark.parametrize("entry", [PARTITION, AttachResult(1, 1, 20, 2000, "")], ids=["partition", "result"])
def test_a_wrong_field_of_an_entry_is_named(entry: Any) -> None:
    def unpack(changed: list[Any]) -> Any:
        if isinstance(entry, AttachPartition):
            return sync.unpack_from_slave([sync.ATTACH, 5, [changed]])
        return sync.unpack_from_master([sync.ATTACHED, 5, [changed]])

    good = received(entry)
    unpack(good)
    for number, (name, kind) in enumerate(fields_of(type(entry))):
        for wrong in (None, 1.5, b"bytes", {}, -1, 1 << 63, [1], [[1, 2]], [[1, 2, -3]], [[1, 2, 3, 4]]):
            with pytest.raises(ProtocolError, match=rf"{type(entry).__name__}\.{name} "):
                unpack([*good[:number], wrong, *good[number + 1 :]])
        assert kind in (int, str, list[tuple[int, int, int]])


def test_a_stranger_is_told() -> None:
    with pytest.raises(ProtocolError, match="the magic of a Join must be 0x4d514841, got 0x1"):
        sync.unpack_from_slave(received(FROM_SLAVE[0]._replace(magic=1)))  # type: ignore[union-attr, call-arg]


def test_a_decision_that_is_none() -> None:
    for decision in (0, 5):
        with pytest.raises(ProtocolError, match=f"the unknown decision {decision}"):
            sync.unpack_from_master([sync.ATTACHED, 5, [[1, decision, 0, 0, ""]]])


@pytest.mark.parametrize(
    ("kind", "rest"), [(sync.DATA, [1, "entries", []]), (sync.DATA, [1, [], "entries"]), (sync.ACK, [1, 1, "entries"])]
)
def test_too_many_entries(kind: int, rest: list[Any]) -> None:
    unpack = sync.unpack_from_master if kind == sync.DATA else sync.unpack_from_slave
    entry = [1, 2, 3, 1] if rest[1] == "entries" and kind == sync.DATA else [1, 2, 3]
    for count, fits in ((ENTRIES_MAX, True), (ENTRIES_MAX + 1, False)):
        header = [kind, 5, *([entry] * count if field == "entries" else field for field in rest)]
        assert len(msgpack.packb(header)) < HEADER_BYTES_MAX
        if fits:
            unpack(header)
        else:
            with pytest.raises(ProtocolError, match="20,001 entries, the limit is 20,000"):
                unpack(header)


def test_too_many_epochs() -> None:
    epochs = [(epoch, epoch, epoch) for epoch in range(1, ATTACH_EPOCHS_MAX + 2)]
    with pytest.raises(ProtocolError, match="more than 1,000 epochs"):
        sync.unpack_from_slave(received(sync.Attach(sync.ATTACH, 5, [PARTITION._replace(epochs=epochs)])))


def test_a_master_is_not_asked_to_stop_for_long() -> None:
    longest = sync.HandOver(sync.HANDOVER, 5, HAND_OVER_MS_MAX)
    assert sync.unpack_from_slave(received(longest)) == longest
    with pytest.raises(ProtocolError, match="a HandOver waits for at most 60,000 ms, got 60,001"):
        sync.unpack_from_slave(received(longest._replace(wait_ms=HAND_OVER_MS_MAX + 1)))


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.integers(0, 100), max_size=20), st.binary(max_size=300))
def test_a_body_is_taken_apart_or_refused(sizes: list[int], body: bytes) -> None:
    entries = [(1, 0, size, 0) for size in sizes]
    right = sum(sizes) == len(body) and all(sizes)
    if not right:
        with pytest.raises(ProtocolError, match="is not made up of"):
            sync.bodies(entries, memoryview(body))
        return
    pieces = sync.bodies(entries, memoryview(body))
    assert [len(piece) for piece in pieces] == sizes
    assert b"".join(pieces) == body


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(0, 3 * ATTACH_EPOCHS_MAX), max_size=60), st.integers(0, 2 * ENTRIES_TARGET + 1))
def test_any_number_of_partitions_fits_into_frames(epochs: list[int], plain: int) -> None:
    most = (1 << 63) - 1
    long = PARTITION._replace(topic="t" * 200, topic_id="i" * 32, handle=1 << 31, end_position=most, stable_offset=most)
    partitions = [
        long._replace(partition=number, epochs=[(1 << 24, most, most)] * count)
        for number, count in enumerate([*epochs, *[1] * plain])
    ]
    frames = list(sync.attach_frames(5, iter(partitions)))
    sent = [entry for frame in frames for entry in frame.partitions]
    assert sent == [entry._replace(epochs=entry.epochs[-ATTACH_EPOCHS_MAX:]) for entry in partitions]
    for frame in frames:
        assert frame.partitions
        encode_frame(1, Command.SYNC, 0, 0, frame)  # raises MessageTooLarge over the limit of a header
    if frames:
        sync.unpack_from_slave(received(frames[-1]))


def test_a_reason_is_cut() -> None:
    assert len(sync.attach_result(1, SyncDecision.WAIT, 0, 0, "x" * 5000).reason) == 1000


ODD = [None, True, 0, 7, -1, 1 << 63, "", "x", b"x", {}, [], [1], [[]], [[1, 2, 3]], [[1, 2, 3, 4]], [[1, "2", 3]]]


@settings(deadline=None, max_examples=examples(200))
@given(
    st.sampled_from([frame for _, frame in BOTH]),
    st.dictionaries(st.integers(0, 9), st.sampled_from([*ODD, [PARTITION]]), max_size=3),
)
def test_anything_else_is_refused(good: Any, changes: dict[int, Any]) -> None:
    header = received(good)
    for number, value in changes.items():
        header[number : number + 1] = [value]
    for unpack, table in ((sync.unpack_from_slave, sync.FROM_SLAVE), (sync.unpack_from_master, sync.FROM_MASTER)):
        try:
            got = unpack(header)
        except ProtocolError:
            continue
        assert type(got) is table[got.kind]  # type: ignore[comparison-overlap]


def test_an_error_shows_little_of_a_large_frame() -> None:
    with pytest.raises(ProtocolError) as caught:
        sync.unpack_from_master([sync.BEAT, 5, 1, [[-1, 0, 0]] * 5000])
    assert len(str(caught.value)) < 300
