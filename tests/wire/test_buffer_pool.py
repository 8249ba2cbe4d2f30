"""Memory of large frames is used again, and never while anybody can see it."""

from __future__ import annotations

import random

import pyarrow
import pytest

from metamq.wire.buffer_pool import BUFFER_STEP_BYTES, SMALL_BYTES, BufferPool

STEP = BUFFER_STEP_BYTES
STEPS = 8


@pytest.fixture
def buffers() -> BufferPool:
    return BufferPool(STEPS * STEP)


def address(buffer: bytearray) -> int:
    return id(buffer)


def test_what_nobody_sees_is_used_again(buffers: BufferPool) -> None:
    buffer = buffers.take(STEP)
    first = address(buffer)
    del buffer
    assert address(buffers.take(STEP - 5)) == first
    assert buffers.kept_bytes == STEP


@pytest.mark.parametrize(
    "seen_as",
    [
        memoryview,
        lambda buffer: memoryview(buffer)[10:20],
        lambda buffer: memoryview(buffer)[8:].cast("q")[3:],
        lambda buffer: [{"frame": memoryview(buffer)[:1]}],
        lambda buffer: memoryview(buffer)[:5].toreadonly(),
    ],
)
def test_what_is_seen_in_any_form_is_not(buffers: BufferPool, seen_as: object) -> None:
    buffer = buffers.take(STEP)
    first = address(buffer)
    seen = seen_as(buffer)  # type: ignore[operator]
    del buffer
    assert address(buffers.take(STEP)) != first
    del seen
    assert address(buffers.take(STEP)) == first


def test_an_arrow_array_over_it_sees_it(buffers: BufferPool) -> None:
    buffer = buffers.take(STEP)
    first = address(buffer)
    array = pyarrow.Array.from_buffers(pyarrow.int8(), 5, [None, pyarrow.py_buffer(memoryview(buffer)[8:])])
    del buffer
    assert address(buffers.take(STEP)) != first
    del array
    assert address(buffers.take(STEP)) == first


def test_no_more_than_so_much_is_kept(buffers: BufferPool) -> None:
    held = [buffers.take(STEP) for _ in range(STEPS)]
    assert buffers.kept_bytes == STEPS * STEP
    beyond = buffers.take(STEP)
    assert len(beyond) == STEP
    assert buffers.kept_bytes == STEPS * STEP
    del held[0], held[0]
    large = buffers.take(2 * STEP)  # in place of the two that are free
    assert len(large) == 2 * STEP
    assert buffers.kept_bytes == STEPS * STEP
    assert len(buffers.take(2 * STEPS * STEP)) == 2 * STEPS * STEP
    assert buffers.kept_bytes <= STEPS * STEP


def test_a_frame_fills_most_of_its_memory(buffers: BufferPool) -> None:
    address(buffers.take(4 * STEP))
    for steps in (1, 2, 3):
        assert len(buffers.take(steps * STEP)) <= 1.5 * steps * STEP


def test_small_frames_do_not_take_a_room(buffers: BufferPool) -> None:
    assert len(buffers.take(SMALL_BYTES)) == SMALL_BYTES
    assert buffers.kept_bytes == 0


def test_whatever_is_held_stays_as_it_was_written(buffers: BufferPool) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    held: list[tuple[memoryview, bytes]] = []
    for number in range(2000):
        size = choose.randrange(1, 3 * STEP)
        buffer = memoryview(buffers.take(size))[:size]
        mark = number.to_bytes(4, "little")
        start = choose.randrange(max(size - 4, 1))
        buffer[start : start + 4] = mark[: len(buffer[start : start + 4])]
        held.append((buffer[start : start + 4], mark))
        while len(held) > choose.randrange(12):
            view, expected = held.pop(choose.randrange(len(held)))
            assert view.tobytes() == expected[: len(view)]
