"""Memory of large frames is used again, and never while anybody can see it."""

from __future__ import annotations

import random

import pyarrow
import pytest

from metamq.wire.rooms import ROOM_STEP_BYTES, SMALL_BYTES, Rooms

STEP = ROOM_STEP_BYTES
STEPS = 8


@pytest.fixture
def rooms() -> Rooms:
    return Rooms(STEPS * STEP)


def address(room: bytearray) -> int:
    return id(room)


def test_what_nobody_sees_is_used_again(rooms: Rooms) -> None:
    room = rooms.take(STEP)
    first = address(room)
    del room
    assert address(rooms.take(STEP - 5)) == first
    assert rooms.kept_bytes == STEP


@pytest.mark.parametrize(
    "seen_as",
    [
        memoryview,
        lambda room: memoryview(room)[10:20],
        lambda room: memoryview(room)[8:].cast("q")[3:],
        lambda room: [{"frame": memoryview(room)[:1]}],
        lambda room: memoryview(room)[:5].toreadonly(),
    ],
)
def test_what_is_seen_in_any_form_is_not(rooms: Rooms, seen_as: object) -> None:
    room = rooms.take(STEP)
    first = address(room)
    seen = seen_as(room)  # type: ignore[operator]
    del room
    assert address(rooms.take(STEP)) != first
    del seen
    assert address(rooms.take(STEP)) == first


def test_an_arrow_array_over_it_sees_it(rooms: Rooms) -> None:
    room = rooms.take(STEP)
    first = address(room)
    array = pyarrow.Array.from_buffers(pyarrow.int8(), 5, [None, pyarrow.py_buffer(memoryview(room)[8:])])
    del room
    assert address(rooms.take(STEP)) != first
    del array
    assert address(rooms.take(STEP)) == first


def test_no_more_than_so_much_is_kept(rooms: Rooms) -> None:
    held = [rooms.take(STEP) for _ in range(STEPS)]
    assert rooms.kept_bytes == STEPS * STEP
    beyond = rooms.take(STEP)
    assert len(beyond) == STEP
    assert rooms.kept_bytes == STEPS * STEP
    del held[0], held[0]
    large = rooms.take(2 * STEP)  # in place of the two that are free
    assert len(large) == 2 * STEP
    assert rooms.kept_bytes == STEPS * STEP
    assert len(rooms.take(2 * STEPS * STEP)) == 2 * STEPS * STEP
    assert rooms.kept_bytes <= STEPS * STEP


def test_a_frame_fills_most_of_its_memory(rooms: Rooms) -> None:
    address(rooms.take(4 * STEP))
    for steps in (1, 2, 3):
        assert len(rooms.take(steps * STEP)) <= 1.5 * steps * STEP


def test_small_frames_do_not_take_a_room(rooms: Rooms) -> None:
    assert len(rooms.take(SMALL_BYTES)) == SMALL_BYTES
    assert rooms.kept_bytes == 0


def test_whatever_is_held_stays_as_it_was_written(rooms: Rooms) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    held: list[tuple[memoryview, bytes]] = []
    for number in range(2000):
        size = choose.randrange(1, 3 * STEP)
        room = memoryview(rooms.take(size))[:size]
        mark = number.to_bytes(4, "little")
        start = choose.randrange(max(size - 4, 1))
        room[start : start + 4] = mark[: len(room[start : start + 4])]
        held.append((room[start : start + 4], mark))
        while len(held) > choose.randrange(12):
            view, expected = held.pop(choose.randrange(len(held)))
            assert view.tobytes() == expected[: len(view)]
