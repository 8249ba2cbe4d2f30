"""What interrupts a `send` within its own thread: Ctrl-C, and handlers that send themselves. With real signals."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from metamq.client.producer.accumulator import Accumulator
from metamq.client.producer.outgoing import Delivery, OutgoingBatch
from metamq.errors import ConfigError
from tests.client.test_accumulator import Loopless, an_accumulator, known, take
from tests.one_zookeeper import cluster

INTERRUPTS = 100


class Looped(Loopless):
    """A producer whose loop runs when it is told to."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], object]] = []

    def in_loop(self, callback: Callable[..., object], *args: object) -> None:
        self.callbacks.append(lambda: callback(*args))

    def run(self) -> None:
        while self.callbacks:
            self.callbacks.pop(0)()


class Alarm:
    """A signal to this thread, some time from now."""

    def __init__(self) -> None:
        self.rings: Callable[[], object] = lambda: None
        self.count = 0

    def _ring(self, *_: object) -> None:
        self.count += 1
        self.rings()

    def __enter__(self) -> Alarm:
        gc.disable()  # what a callback of the collector raises is swallowed
        self._before = signal.signal(signal.SIGALRM, self._ring)
        self._limit = signal.setitimer(signal.ITIMER_REAL, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self.set(0)
        gc.enable()
        signal.signal(signal.SIGALRM, self._before)
        signal.setitimer(signal.ITIMER_REAL, *self._limit)  # the time limit of the test

    def set(self, delay_s: float, interval_s: float = 0) -> None:
        signal.setitimer(signal.ITIMER_REAL, delay_s, interval_s)


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    with Alarm() as set_up:
        yield set_up


def ctrl_c() -> None:
    raise KeyboardInterrupt


def finish(accumulator: Accumulator, deliveries: list[Delivery]) -> list[OutgoingBatch]:
    """Stores whatever can be taken; fails if anything is left behind, or a delivery is not where it says."""
    taken = take(accumulator)
    for batch in taken:
        assert batch.values
        assert all(column is None or len(column) == len(batch.values) for column in (batch.keys, batch.headers))
        accumulator.finished(batch)
    assert not accumulator.outstanding
    assert accumulator.buffered_bytes == 0
    for delivery in deliveries:
        assert delivery._batch in taken
    return taken


@pytest.mark.parametrize("kind", ["value", "keyed", "many"])
def test_ctrl_c_at_any_moment_leaves_nothing_behind_and_loses_nothing(alarm: Alarm, kind: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    alarm.rings = ctrl_c
    for _ in range(INTERRUPTS):
        accumulator = an_accumulator(batch_bytes=200, buffer_bytes=1 << 40)
        known(accumulator)
        sends: dict[str, Callable[[], object]] = {
            "value": lambda: accumulator.send("t", b"x" * 20),  # noqa: B023
            "keyed": lambda: accumulator.send_full("t", b"x" * 20, b"%d" % len(sent), {"h": b"1"}, None, None),  # noqa: B023
            "many": lambda: accumulator.send_many("t", [b"x" * 20] * 20, [b"%d" % n for n in range(20)]),  # noqa: B023
        }
        send, sent = sends[kind], []
        try:
            alarm.set(rng.uniform(1e-5, 4e-4))
            for _ in range(1000):
                sent.append(send())  # noqa: PERF401
            alarm.set(0)
        except KeyboardInterrupt:
            pass
        sent.append(send())
        batches = [batch for delivery in sent for batch in delivery._batches()]
        taken = finish(accumulator, [])
        assert set(batches) <= set(taken)
        assert 0 <= sum(len(b.values) for b in taken) - len(sent) * (20 if kind == "many" else 1) <= 20


def test_ctrl_c_while_the_sender_is_woken() -> None:
    with cluster() as parts:
        with parts.admin() as admin:
            admin.create_topic("t", partitions=4)
        with parts.producer() as producer:
            producer.send("t", b"first", key="k").result(60)
            accumulator = producer._core.accumulator
            wake = accumulator._wake

            def interrupted() -> None:
                accumulator._wake = wake
                raise KeyboardInterrupt

            accumulator._wake = interrupted
            with pytest.raises(KeyboardInterrupt):
                producer.send("t", b"x", key="k")
            producer.send("t", b"y", key="k").result(60)
            producer.flush(60)


@pytest.mark.skipif(
    sys.gettrace() is not None,
    reason="under a tracer, as a debugger or coverage, handlers run between any two lines: send() excludes that",
)
def test_handlers_that_send_within_a_send_neither_wait_for_ever_nor_lose_a_message(alarm: Alarm) -> None:
    owner = Looped()
    accumulator = an_accumulator(batch_bytes=200, buffer_bytes=1 << 40, owner=owner)
    known(accumulator)
    sent: list[Delivery] = []
    inner: list[Delivery] = []

    def handler() -> None:
        inner.append(accumulator.send_full("t", b"handler", b"h", None, None, None))
        inner.append(accumulator.send("t", b"handler"))

    alarm.rings = handler
    alarm.set(1e-4, 1e-4)
    until = time.monotonic() + 0.5
    while time.monotonic() < until or alarm.count <= 50:  # more time for a slow machine
        sent.append(accumulator.send_full("t", b"x", b"k", None, None, None))
        sent.append(accumulator.send("t", b"x"))
    alarm.set(0)
    assert alarm.count > 50
    owner.run()
    taken = take(accumulator)
    for batch in taken:
        batch.complete(0, None)
        accumulator.finished(batch)
    owner.run()
    assert not accumulator.outstanding
    assert all(delivery.exception(0) is None for delivery in sent + inner)
    assert sum(batch.count for batch in taken) == len(sent) + len(inner)
    assert len({(delivery._batch, delivery._index) for delivery in sent + inner}) == len(sent) + len(inner)


def test_who_waits_within_a_send_is_told_instead_of_waiting_for_ever(alarm: Alarm) -> None:
    flushed, refused = [], []
    with cluster() as parts:
        parts.create_topic("t", 1)
        with parts.producer() as producer:
            delivery = producer.send("t", b"x")
            assert delivery.result(60).offset == 0
            with producer._core.accumulator.lock:  # as in the middle of a send
                waiting = producer.send("t", b"x")
                for wait in (producer.flush, producer.close, waiting.result):
                    with pytest.raises(ConfigError, match="interrupts a send"):
                        wait()
                assert delivery.result().offset == 0

            def handler() -> None:
                try:
                    producer.flush(60)
                    flushed.append(True)
                except ConfigError:
                    refused.append(True)

            alarm.rings = handler
            until = time.monotonic() + 60
            while not (refused and flushed):
                assert time.monotonic() < until
                alarm.set(1e-4)
                for _ in range(100):
                    producer.send("t", b"x", b"k")
            alarm.set(0)
            assert waiting.result(60).offset == 1


def test_a_partitioner_may_send() -> None:
    owner = Looped()
    logged: list[Delivery] = []

    def partitioner(topic: str, key: bytes, count: int) -> int:
        if key == b"k":
            logged.append(accumulator.send_full("t", b"log", b"log", None, None, None))
        return 0

    accumulator = an_accumulator(partitioner=partitioner, owner=owner)
    known(accumulator)
    waiting = threading.Thread(target=accumulator.send_full, args=("t", b"x", b"k", None, None, None), daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()
    owner.run()
    assert [batch.values for batch in take(accumulator)] == [[b"x", b"log"]]
    assert not logged[0].done()
