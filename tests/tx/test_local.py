"""producer.transaction(): all of it or nothing, over partitions of one or several brokers, whoever dies on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Producer, aio
from metamq.client.net.branches import TxClient
from metamq.errors import (
    BranchMisuse,
    BufferFull,
    ConfigError,
    ConnectError,
    MessageTooLarge,
    MetamqError,
    OutcomeUnknown,
    RolledBack,
    TopicNotFound,
    TryLater,
)
from metamq.tx import XAResource, Xid
from metamq.tx.app.transactions import Transactions
from metamq.wire.xa import Verb, XACode
from tests.one_zookeeper import cluster
from tests.parts import read_to_end, wait_until
from tests.tx.databases import until_committed

if TYPE_CHECKING:
    from tests.tx.conftest import Shop

BOTH = ("0-0", "1-0", "0-1", "1-1")


@pytest.fixture
def producer(shop: Shop) -> Iterator[Producer[bytes]]:
    with Producer(shop.cluster.zookeeper) as made:
        yield made


@pytest.fixture
def topic(shop: Shop) -> str:
    return shop.topic()


@pytest.mark.parametrize("partitions", [("0-0",), ("0-0", "0-1"), BOTH])
def test_all_of_it_is_seen_once_the_block_ends(
    shop: Shop, producer: Producer[bytes], topic: str, partitions: tuple[str, ...]
) -> None:
    def transact() -> Xid:
        with producer.transaction() as xid:
            for partition in partitions:
                producer.send(topic, partition.encode(), partition=partition)
            assert shop.seen(topic) == []
        return xid

    xid = until_committed(transact)
    assert xid.gtrid.startswith(b"local:")
    assert shop.seen(topic) == sorted(partition.encode() for partition in partitions)
    shop.until_ended()


def test_its_time_counts_from_the_beginning_of_the_block(
    shop: Shop, producer: Producer[bytes], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its brokers hear of it with the first batch only, and are told what is left of it then."""
    told: list[float] = []
    ask = TxClient.ask

    async def noted(self: TxClient, branch: Any, verbs: Any, *rest: Any, **fields: Any) -> Any:
        if Verb.START in verbs:
            told.append(fields["branch_timeout_s"])
        return await ask(self, branch, verbs, *rest, **fields)

    monkeypatch.setattr(TxClient, "ask", noted)
    began = time.monotonic()
    with producer.transaction(timeout_s=60):
        producer.send(topic, b"1", partition="0-0")
        time.sleep(0.05)
    assert 60 - (time.monotonic() - began) <= told.pop() <= 59.95
    with pytest.raises(RolledBack, match=r"0\.05 s") as raised, producer.transaction(timeout_s=0.05):  # noqa: PT012
        time.sleep(0.06)
        producer.send(topic, b"2", partition="0-0")
    assert raised.value.code == XACode.RBTIMEOUT
    assert told == []
    with producer.transaction():
        producer.send(topic, b"3", partition="0-0")
    assert told == [0], "the broker's own"
    assert shop.seen(topic) == [b"1", b"3"]


def test_a_transaction_that_is_never_entered_is_told_of(shop: Shop, producer: Producer[bytes], topic: str) -> None:
    with pytest.warns(RuntimeWarning, match=r"transaction\(\) was never entered.*`with producer\.transaction\(\):`"):
        producer.transaction()
    with producer.transaction() as xid:
        producer.send(topic, b"1")
    again = producer.transaction()
    with again as other:
        assert other != xid
    with pytest.raises(BranchMisuse, match="entered once"), again:
        pass

    async def scenario() -> None:
        async with aio.Producer(shop.cluster.zookeeper) as one:
            with pytest.warns(RuntimeWarning, match="`async with producer"):
                one.transaction()
            again = one.transaction()
            async with again:
                one.send(topic, b"2")
            with pytest.raises(BranchMisuse, match="entered once"):
                await again.__aenter__()

    asyncio.run(scenario())
    assert shop.seen(topic) == [b"1", b"2"]


@pytest.mark.parametrize("partitions", [("0-0",), BOTH])
def test_nothing_is_seen_when_the_block_fails(
    shop: Shop, producer: Producer[bytes], topic: str, partitions: tuple[str, ...]
) -> None:
    with pytest.raises(KeyError), producer.transaction():  # noqa: PT012
        for partition in partitions:
            producer.send(topic, b"1", partition=partition)
        raise KeyError
    assert shop.seen(topic) == []
    shop.until_ended()


def test_a_large_one_goes_out_batch_by_batch_and_keeps_its_order(shop: Shop, topic: str) -> None:
    values = [b"%06d" % number for number in range(3000)]

    def transact() -> None:
        with producer.transaction():
            for value in values[:1500]:
                producer.send(topic, value, partition=BOTH[int(value) % 4])
            producer.send_many(topic, values[1500:], keys=[b"k"] * 1500)

    with Producer(shop.cluster.zookeeper, batch_bytes=500) as producer:
        until_committed(transact)
        with shop.cluster.consumer(topics=[topic], idle_timeout_s=0.3) as consumer:
            found = [(message.partition, message.value) for message in read_to_end(consumer)]
    assert sorted(value for _partition, value in found) == values
    for partition in BOTH:
        in_it = [value for name, value in found if name == partition]
        assert in_it == sorted(in_it)


def test_what_other_threads_send_is_not_part_of_it(shop: Shop, producer: Producer[bytes], topic: str) -> None:
    with producer.transaction():
        producer.send(topic, b"mine", partition="0-0")

        def other() -> None:
            producer.send(topic, b"plain").result(60)
            with producer.transaction():
                producer.send(topic, b"theirs")

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert shop.seen(topic) == [b"plain", b"theirs"]
    assert shop.seen(topic) == [b"mine", b"plain", b"theirs"]
    assert not producer._has_transactions, "without transactions nothing is looked at"
    producer.send(topic, b"after").result(60)


def test_a_wrapper_of_send_sees_every_message_and_stays(
    shop: Shop, producer: Producer[bytes], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tracing libraries wrap it, on the instance; they keep the `send` that was there before."""
    seen: list[bytes] = []
    before, many_before = producer.send, producer.send_many

    def traced(topic: str, value: bytes, *args: Any, **kwargs: Any) -> Any:
        seen.append(value)
        return before(topic, value, *args, **kwargs)

    def traced_many(topic: str, values: list[bytes], *args: Any, **kwargs: Any) -> Any:
        seen.extend(values)
        return many_before(topic, values, *args, **kwargs)

    monkeypatch.setattr(producer, "send", traced)
    monkeypatch.setattr(producer, "send_many", traced_many)
    producer.send(topic, b"0").result(60)
    with pytest.raises(KeyError), producer.transaction():  # noqa: PT012
        producer.send(topic, b"1")
        producer.send_many(topic, [b"2"])
        raise KeyError
    with producer.transaction():
        producer.send(topic, b"3", key="k")
        producer.send_many(topic, [b"4"], ["k"])
        before(topic, b"5")
    assert vars(producer)["send"] is traced
    producer.send(topic, b"6").result(60)
    assert seen == [b"0", b"1", b"2", b"3", b"4", b"6"]
    assert shop.seen(topic) == [b"0", b"3", b"4", b"5", b"6"]


def test_the_send_of_a_subclass_sees_every_message(shop: Shop, topic: str) -> None:
    seen: list[bytes] = []

    class Counting(Producer[bytes]):
        def send(self, topic: str, value: bytes, *args: Any, **kwargs: Any) -> Any:
            seen.append(value)
            return super().send(topic, value, *args, **kwargs)

    with Counting(shop.cluster.zookeeper) as producer:
        producer.send(topic, b"0").result(60)
        with producer.transaction():
            producer.send(topic, b"1", partition="0-0")
    assert seen == shop.seen(topic) == [b"0", b"1"]


def test_threads_that_begin_their_first_transactions_at_once(
    shop: Shop, producer: Producer[bytes], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is to find its own: what it sends would go out at once else."""
    together, one_has_begun, have_begun = threading.Barrier(2), threading.Event(), threading.Barrier(2)

    class Slow(Transactions):
        def __init__(self, core: Any) -> None:
            super().__init__(core)
            with contextlib.suppress(threading.BrokenBarrierError):  # they were let in one after the other
                if together.wait(5):
                    assert one_has_begun.wait(30)

    monkeypatch.setattr("metamq.tx.app.transactional.Transactions", Slow)
    deliveries: list[Any] = []
    have_sent, go_on = threading.Semaphore(0), threading.Event()

    def work() -> None:
        with producer.transaction():
            one_has_begun.set()
            have_begun.wait(30)
            deliveries.append(producer.send(topic, b"1"))
            have_sent.release()
            assert go_on.wait(30)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(have_sent.acquire(timeout=30) for _ in threads)
        producer.flush()
        assert shop.seen(topic) == []
    finally:
        go_on.set()
        for thread in threads:
            thread.join(30)
    assert [delivery.result(0).offset for delivery in deliveries] == [-1, -1]
    assert shop.seen(topic) == [b"1", b"1"]


def test_one_begins_while_another_one_ends(producer: Producer[bytes]) -> None:
    looked_at, ends = threading.Event(), threading.Event()

    class Other(threading.Thread):
        """Its transaction ends while it is asked whether it is alive."""

        def is_alive(self) -> bool:
            if begun.is_set() and not looked_at.is_set():
                looked_at.set()
                ends.wait(0.3)  # it has to wait until the other one has begun
            return super().is_alive()

    begun = threading.Event()

    def work() -> None:
        with producer.transaction():
            begun.set()
            assert looked_at.wait(30)
        ends.set()

    other = Other(target=work)
    other.start()
    assert begun.wait(30)
    with producer.transaction():
        assert looked_at.is_set()
    other.join()


def test_deliveries_are_done_with_their_transaction(producer: Producer[bytes], topic: str) -> None:
    with producer.transaction():
        delivery = producer.send(topic, b"1", partition="0-0")
        many = producer.send_many(topic, [b"2", b"3"])
        assert not delivery.done()
        with pytest.raises(ConfigError, match="end of its transaction"):
            delivery.result()
    receipt = delivery.result(0)
    assert (receipt.topic, receipt.partition, receipt.offset) == (topic, "", -1)
    assert [(one.offset, one.count) for one in many.result(0)] == [(-1, 2)]
    with pytest.raises(KeyError), producer.transaction():  # noqa: PT012
        delivery = producer.send(topic, b"1")
        raise KeyError
    with pytest.raises(RolledBack):
        delivery.result(0)


def test_what_is_wrong_fails_the_whole_transaction(shop: Shop, producer: Producer[bytes], topic: str) -> None:
    with pytest.raises(TopicNotFound), producer.transaction():  # noqa: PT012
        producer.send(topic, b"1", partition="0-0")
        producer.send(topic, b"1", partition="1-0")
        producer.send("nowhere", b"2")
    with pytest.raises(MessageTooLarge), producer.transaction():  # noqa: PT012
        producer.send(topic, b"1")
        producer.send(topic, bytes(5 << 20))
    with pytest.raises(BranchMisuse, match="is open in this thread or task"), producer.transaction():  # noqa: PT012
        producer.send(topic, b"1")
        with producer.transaction():
            pass
    with producer.transaction():
        pass
    assert shop.seen(topic) == []
    shop.until_ended()


def test_one_that_took_too_long_is_rolled_back(shop: Shop, topic: str) -> None:
    with Producer(shop.cluster.zookeeper, batch_bytes=100) as producer:
        with pytest.raises(RolledBack), producer.transaction(timeout_s=0.2):  # noqa: PT012
            producer.send(topic, bytes(100), partition="0-0")
            # On a slow machine no broker may have heard of it by then.
            over_at = time.monotonic() + 0.2
            wait_until(lambda: time.monotonic() > over_at and not shop.at_work(), what="its end")
            producer.send(topic, b"1", partition="1-0")
        with producer.transaction():
            producer.send(topic, b"again")
    assert shop.seen(topic) == [b"again"]


def test_the_buffer_is_bounded(shop: Shop, topic: str) -> None:
    with Producer(shop.cluster.zookeeper, buffer_bytes=2000, batch_bytes=500) as producer, producer.transaction():
        for number in range(100):
            producer.send(topic, b"%0100d" % number, partition="0-0")
    assert len(shop.seen(topic)) == 100


def test_closing_rolls_back_what_is_open(shop: Shop, topic: str) -> None:
    producer = Producer(shop.cluster.zookeeper, batch_bytes=100)
    with pytest.raises(MetamqError), producer.transaction():  # noqa: PT012
        producer.send(topic, bytes(100))
        producer.close()
    assert shop.seen(topic) == []


def test_asyncio(shop: Shop) -> None:
    async def main(topic: str) -> None:
        async with aio.Producer(shop.cluster.zookeeper, buffer_bytes=2000) as producer:
            with pytest.raises(BufferFull):  # noqa: PT012
                async with producer.transaction():
                    for _ in range(100):
                        producer.send(topic, bytes(100))
            async with producer.transaction():
                deliveries = []
                for number in range(100):
                    deliveries.append(producer.send(topic, b"%0100d" % number))
                    await producer.drain()

                async def other() -> None:
                    await producer.send(topic, b"plain")

                await asyncio.create_task(other())
                with pytest.raises(ConfigError):
                    await deliveries[0]
                assert await asyncio.to_thread(shop.seen, topic) == [b"plain"]
            assert (await deliveries[0]).offset == -1
            with pytest.raises(KeyError):  # noqa: PT012
                async with producer.transaction():
                    producer.send(topic, b"never")
                    raise KeyError

    def transact() -> str:
        topic = shop.topic()
        asyncio.run(main(topic))
        return topic

    assert len(shop.seen(until_committed(transact))) == 101
    shop.until_ended()


def test_a_cancelled_task_leaves_nothing(shop: Shop, topic: str) -> None:
    async def main() -> None:
        async with aio.Producer(shop.cluster.zookeeper, batch_bytes=100) as producer:
            begun = asyncio.Event()

            async def work() -> None:
                async with producer.transaction():
                    producer.send(topic, bytes(200), partition="0-0")
                    producer.send(topic, bytes(200), partition="1-0")
                    await producer.drain()
                    begun.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(work())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            producer.send(topic, b"plain")

    asyncio.run(main())
    assert shop.seen(topic) == [b"plain"]
    shop.until_ended()


# -- over two brokers, with failures at each step --------------------------------------------------------------------


def failing(producer: Producer[Any], fails: Callable[[list[Verb], int, bool], bool]) -> list[tuple[Verb, int]]:
    """Asked before each request, and after it with True: where it says so, the client is cut off."""
    from metamq.client.net.branches import TxClient

    asked: list[tuple[Verb, int]] = []
    original = TxClient._once

    async def once(self: TxClient, branch: Any, header: Any, bodies: Any, deadline_s: float) -> Any:
        verbs = [Verb(number) for number in header.verbs]
        asked.append((verbs[-1], branch.broker_id))
        if fails(verbs, branch.broker_id, False):
            raise ConnectError("the broker", "the test says so")
        reply = await original(self, branch, header, bodies, deadline_s)
        if fails(verbs, branch.broker_id, True):
            raise ConnectError("the broker", "the test says so", outcome="unknown")
        return reply

    TxClient._once = once  # type: ignore[method-assign]
    return asked


@pytest.fixture
def restore_client() -> Iterator[Any]:
    from metamq.client.net.branches import TxClient

    once = TxClient._once
    yield once
    TxClient._once = once  # type: ignore[method-assign]


STEPS = [
    (Verb.START, False), (Verb.START, True), (Verb.PREPARE, False), (Verb.PREPARE, True), (Verb.DECIDE, False),
    (Verb.DECIDE, True), (Verb.COMMIT, False), (Verb.COMMIT, True), (Verb.FORGET, False), (Verb.FORGET, True),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("step", "behind"), STEPS)
def test_a_client_that_is_cut_off_at_any_step_leaves_all_or_nothing(
    shop: Shop, restore_client: Any, monkeypatch: pytest.MonkeyPatch, step: Verb, behind: bool
) -> None:
    """Cut off for good: brokers have to end it by themselves."""
    for answer_s in (0.3, 2, 10):  # brokers that are slow are given up before that step
        monkeypatch.setattr("metamq.tx.app.transactions.ANSWER_S", answer_s)
        topic = shop.topic()
        with Producer(shop.cluster.zookeeper) as producer:
            cut = False

            def fails(verbs: list[Verb], _broker_id: int, after: bool) -> bool:
                nonlocal cut
                cut = cut or (verbs[-1] is step and after == behind)
                return cut

            failing(producer, fails)
            error: MetamqError | None = None
            try:
                with producer.transaction():
                    for partition in BOTH:
                        producer.send(topic, partition.encode(), partition=partition)
            except MetamqError as raised:
                error = raised
        monkeypatch.undo()
        TxClient._once = restore_client  # type: ignore[method-assign]
        if cut:
            break
    assert cut
    shop.until_ended()
    seen = shop.seen(topic)
    assert seen in ([], sorted(partition.encode() for partition in BOTH))
    decided = step in (Verb.COMMIT, Verb.FORGET) or (step, behind) == (Verb.DECIDE, True)
    assert bool(seen) == decided
    if error is None:
        assert seen
    elif seen:
        assert isinstance(error, OutcomeUnknown)


CLIENT = """
import sys, os, signal
from contextlib import suppress
from metamq import Producer
from metamq.errors import RolledBack
from metamq.client.net.branches import TxClient
from metamq.wire.xa import Verb
zookeeper, topic, step = sys.argv[1:]
once = TxClient._once
async def dying(self, branch, header, bodies, deadline_s):
    reply = await once(self, branch, header, bodies, deadline_s)
    if Verb(header.verbs[-1]).name == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return reply
TxClient._once = dying
with Producer(zookeeper) as producer:
    for _ in range(20):  # the brokers may have ended what it was too slow to end
        with suppress(RolledBack), producer.transaction():
            for partition in ("0-0", "1-0", "0-1", "1-1"):
                producer.send(topic, partition.encode(), partition=partition)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", ["START", "PREPARE", "DECIDE", "COMMIT"])
def test_a_client_that_is_killed_and_brokers_that_are_restarted(shop: Shop, topic: str, step: str) -> None:
    command = [sys.executable, "-c", CLIENT, shop.cluster.zookeeper, topic, step]
    assert subprocess.run(command, env=os.environ, timeout=120).returncode == -signal.SIGKILL
    for broker in shop.cluster.brokers:
        broker.kill()
    for broker in shop.cluster.brokers:
        broker.start()
    shop.until_ended()
    assert len(shop.seen(topic)) == (4 if step in ("DECIDE", "COMMIT") else 0)


def test_an_id_that_follows_is_no_coordinators_to_decide(shop: Shop, topic: str) -> None:
    """What is prepared and follows another broker is not in anybody's recover()."""
    command = [sys.executable, "-c", CLIENT, shop.cluster.zookeeper, topic, "PREPARE"]

    def is_prepared() -> bool:
        return "prepared" in {state for _broker, state in shop.open_branches()}

    wait_until(lambda: not is_prepared(), what="the end of what others have left")
    with Producer(shop.cluster.zookeeper) as producer:
        for _ in range(20):  # its brokers end it soon, and may be faster than who asks
            subprocess.run(command, env=os.environ, timeout=120)
            before, found, behind = is_prepared(), producer.tpc_recover(), is_prepared()
            shop.until_ended()
            if before and behind:
                break
    assert before
    assert behind
    assert [one for one in found if one.gtrid.startswith(b"local:")] == []


def test_who_follows_a_broker_that_may_have_lost_its_decision_waits_for_a_person(shop: Shop, topic: str) -> None:
    """Another generation than when the branch was prepared: that the decider knows nothing of it proves nothing."""
    with XAResource(1, shop.cluster.zookeeper) as mq:
        xid = Xid.random(b"local:")
        mq.start(xid)
        mq.send(topic, b"1", partition="1-0")
        mq.end(xid)
        core = mq._core
        mq._background.run(core._client.ask(core._branch_of(xid), [Verb.PREPARE], follows=[0, 7, 1]))
        other = Xid.random(b"local:")
        mq.start(other)
        mq.send(topic, b"1", partition="1-0")
        mq.end(other)
        mq._background.run(core._client.ask(core._branch_of(other), [Verb.PREPARE], follows=[0, 1, 1]))
    # The other one is asked about behind it, and ended.
    wait_until(lambda: {one.xid for one in shop.branches(1)} == {xid}, what="the end of the other one")
    with Producer(shop.cluster.zookeeper) as producer, pytest.raises(TryLater):
        producer.tpc_rollback(xid)
    assert "has lost acknowledged data since" in shop.cluster.brokers[1].log_path.read_text()
    with shop.cluster.admin() as admin:
        admin.rollback_branch(xid, 1)
        admin.forget_branch(xid, 1)
    assert shop.seen(topic) == []


@pytest.mark.slow
@pytest.mark.parametrize("promoted", [0, 1])
@pytest.mark.parametrize("step", ["PREPARE", "DECIDE"])
def test_the_client_and_a_master_are_gone_and_its_slave_is_promoted(step: str, promoted: int) -> None:
    """Of the broker that decides (0), or of one that follows."""
    with cluster(brokers=2, branch_grace_ms=700) as running:
        running.create_topic("orders", partitions=4)
        running.add_slave(promoted)
        with running.admin() as admin:
            wait_until(lambda: sum(one.in_sync for one in admin.replicas()[promoted].replicas) == 2, what="a slave")
            command = [sys.executable, "-c", CLIENT, running.zookeeper, "orders", step]
            assert subprocess.run(command, env=os.environ, timeout=120).returncode == -signal.SIGKILL
            running.brokers[promoted].kill()
            admin.promote(promoted, 1)

            def ended() -> bool:
                found = admin.transactions()
                return not found.problems and not [one for one in found.branches if one.state != "rollback-only"]

            wait_until(ended, what="the end of every branch")
        with running.consumer(topics=["orders"], idle_timeout_s=0.5) as consumer:
            assert len(read_to_end(consumer)) == (4 if step == "DECIDE" else 0)
