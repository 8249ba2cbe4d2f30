"""The batch that one thread fills without a lock: closed at whatever moment, no message is lost or doubled."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from metamq.client.producer.accumulator import Accumulator
from metamq.client.producer.outgoing import Delivery, OutgoingBatch, QuickBatch
from tests.client.test_accumulator import an_accumulator, known, take

HAMMERED = 60_000


class Interrupted(list[bytes]):
    """Pending values, with something that happens in another thread before or after a value is appended."""

    def __init__(self, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        super().__init__()
        self._before, self._after = before, after

    def append(self, value: bytes) -> None:
        before, self._before = self._before, None
        if before is not None:
            before()
        super().append(value)
        after, self._after = self._after, None
        if after is not None:
            after()


def quick_batch(accumulator: Accumulator) -> QuickBatch:
    batch = accumulator.buffers["t"].quick
    assert batch is not None
    return batch


def stored(batches: list[OutgoingBatch], delivery: Delivery) -> bytes:
    """The value at the place that the delivery names."""
    assert delivery._batch in batches
    return delivery._batch.values[delivery._index]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_closed_just_before_or_after_a_value_is_appended(moment: str) -> None:
    accumulator = an_accumulator()
    known(accumulator)
    first = accumulator.send("t", b"first")
    taken: list[OutgoingBatch] = []
    close = lambda: taken.extend(take(accumulator))  # noqa: E731
    batch = quick_batch(accumulator)
    batch.pending = batch.values = Interrupted(
        close if moment == "before" else None, close if moment == "after" else None
    )
    list.append(batch.pending, b"first")
    second = accumulator.send("t", b"second")
    taken += take(accumulator)
    assert [bytes(value) for batch in taken for value in batch.values] == [b"first", b"second"]
    assert (stored(taken, first), stored(taken, second)) == (b"first", b"second")
    for batch in taken:
        accumulator.finished(batch)
    assert accumulator.buffered_bytes == 0


def test_messages_of_one_thread_keep_their_order_whatever_they_carry() -> None:
    accumulator = an_accumulator()
    known(accumulator)
    accumulator.send("t", b"1")
    accumulator.send_full("t", b"2", None, {"k": b"v"}, None, None)
    accumulator.send("t", b"3")
    accumulator.send_many("t", [b"4"], None)
    accumulator.send("t", b"5")
    accumulator.send_full("t", b"6", None, None, None, 7)
    assert [value for batch in take(accumulator) for value in batch.values] == [b"1", b"2", b"3", b"4", b"5", b"6"]


def test_another_thread_does_not_touch_it() -> None:
    accumulator = an_accumulator()
    known(accumulator)
    accumulator.send("t", b"mine")
    batch = quick_batch(accumulator)
    other = threading.Thread(target=accumulator.send, args=("t", b"other's"))
    other.start()
    other.join()
    accumulator.send("t", b"mine")
    assert quick_batch(accumulator) is batch
    assert sorted(list(batch.values) for batch in take(accumulator)) == [[b"mine", b"mine"], [b"other's"]]


@pytest.fixture
def _restless() -> Iterator[None]:
    """Threads change places as often as they can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("_restless")
def test_hammered_by_senders_and_takers_every_value_is_where_its_delivery_says() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    accumulator = an_accumulator(batch_bytes=random.Random(seed).randrange(100, 5000), buffer_bytes=1 << 40)
    known(accumulator)
    deliveries: dict[bytes, Delivery] = {}

    def send(name: int) -> None:
        for number in range(HAMMERED // 3):
            value = b"%d-%d" % (name, number)
            deliveries[value] = accumulator.send("t", value)

    taken: list[OutgoingBatch] = []
    threads = [threading.Thread(target=send, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += take(accumulator)
    taken += take(accumulator)

    batches = set(taken)
    assert sum(len(batch.values) for batch in taken) == HAMMERED
    assert all(d._batch in batches and d._batch.values[d._index] == value for value, d in deliveries.items())
    for name in range(3):
        mine = [value for batch in taken for value in batch.values if value.startswith(b"%d-" % name)]
        assert mine == [b"%d-%d" % (name, number) for number in range(HAMMERED // 3)]
