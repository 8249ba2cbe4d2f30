"""What is sent in a transaction waits for room where it has to; a small one for nothing. None of it is lost."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from metamq import Producer, aio
from metamq.client.producer.producer_core import ProducerCore
from metamq.errors import BranchMisuse, BranchNotKnown, BufferFull, RolledBack, TopicNotFound
from metamq.testing import Cluster
from metamq.tx.app.outbox import TURN_MESSAGES
from tests.one_zookeeper import cluster
from tests.parts import values_to_end, wait_until


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """A KeyboardInterrupt in this, the main, thread once that holds."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def watch() -> None:
        wait_until(condition)
        signal.pthread_kill(main.ident or 0, signal.SIGUSR1)

    main = threading.current_thread()
    before = signal.signal(signal.SIGUSR1, interrupt)
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        watching.join()
        signal.signal(signal.SIGUSR1, before)


def send_more_than_fits(running: Cluster, topic: str) -> None:
    with running.producer(buffer_bytes=50_000) as producer, producer.transaction():
        for number in range(100):
            producer.send_many(topic, [b"%05d" % number] * 1000)
            producer.send(topic, b"%05d" % number)


def read(running: Cluster, topic: str) -> list[bytes]:
    with running.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
        return values_to_end(consumer)


def test_lists_larger_than_the_buffer(running: Cluster) -> None:
    running.create_topic("large", partitions=1)
    send_more_than_fits(running, "large")
    assert read(running, "large") == [b"%05d" % (number // 1001) for number in range(100 * 1001)]


@pytest.mark.slow
def test_more_than_a_frame_is_left_when_it_ends(running: Cluster) -> None:
    running.create_topic("wide", partitions=70)
    with running.producer(batch_bytes=2 * 1024 * 1024) as producer, producer.transaction():
        for index in range(70):  # none fills its batch
            producer.send("wide", index.to_bytes(2, "big") * 500_000, partition=f"0-{index}")
    assert sorted(value[:2] for value in read(running, "wide")) == [index.to_bytes(2, "big") for index in range(70)]


def hold_up(core: ProducerCore, topic: str) -> asyncio.Lock:
    """As while ZooKeeper does not answer after the topic was altered; until it is released. In the loop."""
    core.cluster._fresh_topics.discard(topic)
    lock = core.cluster._reading[topic]
    assert not lock.locked()
    return lock


class CallsOf:
    """Counts the calls of a method; too many of them end in an error, not in a test that hangs."""

    def __init__(self, owner: object, name: str) -> None:
        self.count = 0
        original = getattr(owner, name)

        def called(*args: object) -> object:
            self.count += 1
            assert self.count < 1000, f"{name}() is called again and again"
            return original(*args)

        setattr(owner, name, called)


def calls_of_loop(producer: Producer[bytes]) -> list[object]:
    """The callbacks that sends hand to the producer's loop from now on."""
    core, calls = producer._core, list[object]()
    original = core.in_loop

    def in_loop(callback: Callable[..., object], *args: object) -> None:
        calls.append(callback)
        original(callback, *args)

    core.in_loop = in_loop  # type: ignore[method-assign]
    return calls


def test_what_is_small_wakes_the_loop_at_its_end_only(running: Cluster) -> None:
    running.create_topic("small", partitions=1)
    with running.producer() as producer:
        with producer.transaction():
            producer.send("small", b"1")
        calls = calls_of_loop(producer)
        with producer.transaction():
            producer.send("small", b"2", key=b"k")
            producer.send_many("small", [b"3"] * 100)
            assert calls == []
            producer.send_many("small", [bytes(1000)] * 65)
            assert len(calls) == 1
    assert read(running, "small") == [b"1", b"2", *[b"3"] * 100, *[bytes(1000)] * 65]


def test_what_is_sent_while_the_producer_is_closed_is_told(running: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    running.create_topic("closed", partitions=1)
    with running.producer() as producer:
        producer.tpc_begin(producer.xid(1, "closed"))

        def close_meanwhile(*_: object) -> None:
            monkeypatch.undo()
            closing = threading.Thread(target=producer.close)
            closing.start()
            closing.join(30)
            assert not closing.is_alive()

        monkeypatch.setattr(producer._core, "in_loop", close_meanwhile)  # send() calls it behind taking the message
        delivery = producer.send("closed", b"1")
        assert delivery.done()
        with pytest.raises(RolledBack):
            delivery.result(0)


def test_room_behind_a_savepoint_is_what_was_sent_before_it(running: Cluster) -> None:
    running.create_topic("saved", partitions=1)
    with running.producer(buffer_bytes=10_000, on_full="raise") as producer:
        producer.tpc_begin(producer.xid(1, "saved"))
        one = producer._transactions.of(producer._owner())
        assert one is not None
        producer.send("saved", b"before" * 500)
        one.outbox.savepoint()
        producer.send("saved", b"behind" * 1300)
        assert one.outbox.is_full
        producer._background.run(asyncio.wait_for(one.outbox.until_half(), 60))
        producer.send("saved", b"behind" * 1300)
        with pytest.raises(BufferFull):
            producer._background.run(asyncio.wait_for(one.outbox.until_half(), 60))
        producer.tpc_commit()
    assert [len(value) for value in read(running, "saved")] == [3000, 7800, 7800]


def test_waiting_for_room_beside_the_end_lets_the_loop_go_on(running: Cluster) -> None:
    """One thread prepares what another one sends into."""
    running.create_topic("beside", partitions=1)

    async def main() -> None:
        async with aio.Producer(running.zookeeper, buffer_bytes=300_000) as producer:
            await producer.send("beside", b"warm")
            await producer.tpc_begin(producer.xid(1, "beside"))
            one = producer._transactions.of(asyncio.current_task())
            assert one is not None
            one.outbox._wake_bytes = 1 << 30  # all of it is left to the end
            for _ in range(5):
                producer.send_many("beside", [bytes(100)] * TURN_MESSAGES)
            async with hold_up(producer._core, "beside"):
                settling = asyncio.create_task(one.outbox.settle())
                while not one.outbox._is_running:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert one.outbox._bytes > 150_000
                waiting = asyncio.create_task(one.outbox.until_half())
                also = asyncio.create_task(one.outbox.settle())
                asks = CallsOf(one.outbox, "_begin")
                for _ in range(3):
                    await asyncio.sleep(0)
                assert not waiting.done()
                assert not also.done()
                assert asks.count == 1
            await asyncio.gather(settling, waiting, also)
            await producer.tpc_commit()

    asyncio.run(main())
    assert len(read(running, "beside")) == 1 + 5 * TURN_MESSAGES


def test_a_topic_that_is_not_there_is_told_before_the_end(running: Cluster) -> None:
    running.create_topic("there", partitions=1)
    with running.producer() as producer, pytest.raises(TopicNotFound), producer.transaction():  # noqa: PT012
        producer.send("there", b"1")
        producer.send("nowhere", b"1")

        def is_told() -> bool:
            try:
                producer.send("there", b"1")
            except TopicNotFound:
                return True
            return False

        wait_until(is_told)
    assert read(running, "there") == []


def test_what_is_rolled_back_meanwhile_is_not_prepared_in_part(running: Cluster) -> None:
    running.create_topic("meanwhile", partitions=1)

    async def main() -> None:
        async with aio.Producer(running.zookeeper) as producer:
            xid = producer.xid(1, "meanwhile")
            await producer.tpc_begin(xid)
            producer.send_many("meanwhile", [b"1"] * 2000)  # four turns; the topic is asked for first
            one = producer._transactions.of(asyncio.current_task())
            assert one is not None

            async def roll_back() -> None:  # as close() does, in whatever task it is called
                assert one.outbox._is_running
                await producer._transactions.rollback(one)

            rolling_back = asyncio.create_task(roll_back())
            with pytest.raises(BranchMisuse, match="rolled back meanwhile"):
                await producer.tpc_prepare()
            await rolling_back
            producer._leave(one)
            with pytest.raises(BranchNotKnown):
                await producer.tpc_commit(xid)

    asyncio.run(main())


@pytest.mark.slow
def test_a_block_that_was_left_leaves_what_its_task_began_since(running: Cluster) -> None:
    running.create_topic("left", partitions=1)

    async def main() -> None:
        async with aio.Producer(running.zookeeper) as producer:
            first = producer.transaction()
            await first.__aenter__()
            producer.send("left", b"of another task")
            entered = asyncio.Event()

            async def other() -> None:
                async with producer.transaction():
                    entered.set()
                    await first.__aexit__(None, None, None)
                    producer.send("left", b"of its own")
                    assert b"of its own" not in await asyncio.to_thread(read, running, "left")

            await asyncio.create_task(other())

    asyncio.run(main())
    assert read(running, "left") == [b"of another task", b"of its own"]


@pytest.mark.parametrize("again", ["prepare", "commit"])
def test_a_prepare_that_was_cancelled_loses_nothing_in_silence(running: Cluster, again: str) -> None:
    topic = f"cancelled-{again}"
    running.create_topic(topic, partitions=1)

    async def main() -> None:
        async with aio.Producer(running.zookeeper) as producer:
            await producer.send(topic, b"warm")
            await producer.tpc_begin(producer.xid(1, topic))
            producer.send(topic, b"one")
            async with hold_up(producer._core, topic):
                preparing = producer._to_prepare()
                task = asyncio.create_task(preparing)
                one = producer._transactions.of(asyncio.current_task())
                assert one is not None
                while not one.outbox._is_running:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            with pytest.raises(RolledBack, match="interrupted"):
                producer.send(topic, b"two")
            with pytest.raises(RolledBack, match="interrupted"):
                await (producer.tpc_prepare() if again == "prepare" else producer.tpc_commit())
            if again == "prepare":
                await producer.tpc_rollback()

    asyncio.run(main())
    assert read(running, topic) == [b"warm"]


def test_a_prepare_that_was_cancelled_in_the_middle_of_a_batch_loses_nothing_in_silence(running: Cluster) -> None:
    running.create_topic("halfway", partitions=1)

    async def main() -> None:
        async with aio.Producer(running.zookeeper, batch_bytes=30_000) as producer:
            await producer.send("halfway", b"warm")
            await producer.tpc_begin(producer.xid(1, "halfway"))
            one = producer._transactions.of(asyncio.current_task())
            assert one is not None
            one.outbox._wake_bytes = 1 << 30  # all of it is left to the end
            for number in range(400):
                producer.send("halfway", b"%04d" % number + bytes(96))
            running.broker.freeze()  # it does not answer to SEND
            try:
                task = asyncio.create_task(producer._to_prepare())
                while not one.work.branches:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            finally:
                running.broker.thaw()
            with pytest.raises(RolledBack, match="interrupted"):
                await producer.tpc_prepare()
            with pytest.raises(RolledBack, match="interrupted"):
                await producer.tpc_commit()

    asyncio.run(main())
    assert read(running, "halfway") == [b"warm"]


def test_control_c_in_prepare_leaves_a_roll_back_only(running: Cluster) -> None:
    running.create_topic("ctrl-c", partitions=1)
    with running.producer() as producer:
        producer.send("ctrl-c", b"warm").result()
        producer.tpc_begin(producer.xid(1, "ctrl-c"))
        producer.send("ctrl-c", b"one")
        one = producer._transactions.of(producer._owner())
        assert one is not None

        async def hold() -> asyncio.Lock:
            lock = hold_up(producer._core, "ctrl-c")
            await lock.acquire()
            return lock

        lock = producer._background.run(hold())
        with interrupted_when(lambda: one.outbox._is_running), pytest.raises(KeyboardInterrupt):
            producer.tpc_prepare()
        producer._background.call_soon(lock.release)
        with pytest.raises((RolledBack, BranchMisuse), match="can only be rolled back"):
            producer.tpc_commit()
    assert read(running, "ctrl-c") == [b"warm"]
