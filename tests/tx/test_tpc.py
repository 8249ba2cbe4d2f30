"""PEP 249's two-phase transactions on the producer, as psycopg 3 has them on its connections."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Producer, aio
from metamq.client.net.branches import Branch, TxClient
from metamq.errors import (
    BranchMisuse,
    BranchNotKnown,
    ConfigError,
    ConnectError,
    MetamqError,
    OutcomeUnknown,
    RolledBack,
    WrongType,
)
from metamq.tx import RecoveredXid, Xid
from metamq.wire.xa import Verb, XACode
from tests.parts import until_answered, wait_until
from tests.tx.databases import until_committed

if TYPE_CHECKING:
    from tests.tx.conftest import Shop

BOTH = ("0-0", "1-0")


@pytest.fixture
def producer(shop: Shop) -> Iterator[Producer[bytes]]:
    with Producer(shop.cluster.zookeeper) as made:
        yield made


@pytest.fixture
def topic(shop: Shop) -> str:
    return shop.topic()


def new_xid(producer: Producer[bytes]) -> Xid:
    return producer.xid(1, f"order-{time.monotonic_ns()}", "mq")


def begun(producer: Producer[bytes], topic: str) -> Xid:
    """A transaction with a message at each broker."""
    xid = new_xid(producer)
    producer.tpc_begin(xid)
    for partition in BOTH:
        producer.send(topic, partition.encode(), partition=partition)
    return xid


def test_two_phases(shop: Shop, producer: Producer[bytes], topic: str) -> None:
    begun(producer, topic)
    assert producer.tpc_prepare() is True
    assert shop.seen(topic) == []
    producer.tpc_commit()
    assert shop.seen(topic) == [b"0-0", b"1-0"]
    producer.send(topic, b"plain").result(60)


@pytest.mark.parametrize("prepared", [False, True])
def test_rollback(shop: Shop, producer: Producer[bytes], topic: str, prepared: bool) -> None:
    begun(producer, topic)
    if prepared:
        producer.tpc_prepare()
    producer.tpc_rollback()
    assert shop.seen(topic) == []
    shop.until_ended()


async def unreachable(self: TxClient, *_: Any, **__: Any) -> None:
    raise ConnectError("broker 0", reason="nobody answers")


LARGE = [bytes(1000)] * 3000
"""More than a batch: some of it goes out at once."""


def test_a_rollback_that_reaches_nobody_says_what_happens_next(
    shop: Shop, producer: Producer[bytes], topic: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is prepared, so nothing can ever be committed: no error, and the thread goes on."""
    xid = new_xid(producer)
    producer.tpc_begin(xid)
    producer.send_many(topic, LARGE)
    wait_until(lambda: any(one.xid == xid for broker in (0, 1) for one in shop.branches(broker)))
    with monkeypatch.context() as patch:
        patch.setattr(TxClient, "ask", unreachable)
        producer.tpc_rollback()
    assert f"transaction {xid} is rolled back, but a broker did not answer: " in caplog.text
    assert "after its time-out" in caplog.text
    producer.send(topic, b"after").result(60)
    assert shop.seen(topic) == [b"after"]


def test_a_rollback_with_asyncio_that_reaches_nobody_says_what_happens_next(
    shop: Shop, topic: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with aio.Producer[bytes](shop.cluster.zookeeper) as producer:
            await producer.tpc_begin(producer.xid(1, f"order-{time.monotonic_ns()}", "mq"))
            producer.send_many(topic, LARGE)
            one = producer._transactions.of(asyncio.current_task())
            assert one is not None
            await asyncio.to_thread(wait_until, lambda: one.work.branches)
            with monkeypatch.context() as patch:
                patch.setattr(TxClient, "ask", unreachable)
                await producer.tpc_rollback()
            await producer.send(topic, b"after")

    asyncio.run(scenario())
    assert "is rolled back, but a broker did not answer: " in caplog.text
    assert shop.seen(topic) == [b"after"]


def test_a_rollback_after_a_prepare_that_failed_is_an_error_until_every_broker_is_told(
    shop: Shop, producer: Producer[bytes], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them may have prepared its branch, which nobody would end."""
    xid = begun(producer, topic)
    proper = TxClient.ask

    def states() -> set[str]:
        return {one.state for broker in (0, 1) for one in shop.branches(broker) if one.xid == xid}

    async def answer_is_lost(self: TxClient, branch: Branch, verbs: Sequence[Verb], *args: Any, **more: Any) -> Any:
        await proper(self, branch, verbs, *args, **more)
        raise OutcomeUnknown(branch.xid, XACode.RMFAIL, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(TxClient, "ask", answer_is_lost)
        with pytest.raises(RolledBack):
            producer.tpc_prepare()
        patch.setattr(TxClient, "ask", unreachable)
        for _ in range(2):
            with pytest.raises(ConnectError, match="nobody answers"):
                producer.tpc_rollback()
    assert states() == {"prepared"}
    producer.tpc_rollback()
    assert states() == set()
    producer.send(topic, b"after").result(60)
    assert shop.seen(topic) == [b"after"]


@pytest.mark.slow
def test_one_phase_without_prepare(shop: Shop, topic: str) -> None:
    def transact() -> None:
        with Producer[bytes](shop.cluster.zookeeper) as producer:
            begun(producer, topic)
            producer.tpc_commit()

    until_committed(transact)
    assert shop.seen(topic) == [b"0-0", b"1-0"]
    shop.until_ended()


@pytest.mark.parametrize("how", ["prepare", "one phase", "close"])
def test_an_id_that_is_in_use_leaves_whose_it_is_alone(
    shop: Shop, producer: Producer[bytes], topic: str, how: str
) -> None:
    """As when an application chooses it again after a crash."""
    gone = Producer[bytes](shop.cluster.zookeeper)
    xid = begun(gone, topic)
    gone.tpc_prepare()
    gone.close()
    again = Producer[bytes](shop.cluster.zookeeper)
    again.tpc_begin(xid)
    again.send(topic, b"again", partition="0-0")
    with pytest.raises(BranchMisuse, match="the id is in use"):
        again.tpc_commit() if how == "one phase" else again.tpc_prepare()
    if how == "prepare":
        again.tpc_rollback()
    again.close()
    assert xid in producer.tpc_recover()
    producer.tpc_commit(xid)
    assert shop.seen(topic) == [b"0-0", b"1-0"]


def test_what_is_prepared_outlives_its_producer_and_what_was_forgotten_is_told(
    shop: Shop, producer: Producer[bytes], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Producer[bytes](shop.cluster.zookeeper) as closed:
        xid = begun(closed, topic)
        closed.tpc_prepare()
    assert f"{xid} is prepared, and stays prepared" in caplog.text
    with Producer[bytes](shop.cluster.zookeeper) as forgetful:
        forgotten = begun(forgetful, topic)
    assert f"{forgotten} was not committed, and is rolled back" in caplog.text
    assert xid in producer.tpc_recover()
    producer.tpc_commit(xid)
    assert shop.seen(topic) == [b"0-0", b"1-0"]


def test_an_empty_one_has_nothing_to_commit(shop: Shop, producer: Producer[bytes]) -> None:
    producer.tpc_begin(new_xid(producer))
    assert producer.tpc_prepare() is False
    producer.tpc_commit()
    producer.tpc_begin(new_xid(producer))
    producer.tpc_commit()
    shop.until_ended()


@pytest.mark.parametrize("commits", [False, True])
def test_another_process_finds_what_is_prepared_and_ends_it(
    shop: Shop, topic: str, producer: Producer[bytes], commits: bool
) -> None:
    gone = Producer(shop.cluster.zookeeper)
    xid = begun(gone, topic)
    gone.tpc_prepare()
    gone.close()
    (found,) = [one for one in producer.tpc_recover() if one == xid]
    assert isinstance(found, RecoveredXid)
    assert (found.format_id, found.gtrid, found.bqual) == xid
    assert abs(found.prepared - datetime.now(UTC)) < timedelta(minutes=1)
    assert (found.database, found.messages) == ("0,1", 2)
    assert ":" in found.owner
    if commits:
        producer.tpc_commit(found)
    else:
        producer.tpc_rollback(str(found))
    assert shop.seen(topic) == ([b"0-0", b"1-0"] if commits else [])
    assert xid not in producer.tpc_recover()
    if commits:
        producer.tpc_commit(xid)  # the answer to the first may have been lost
        with pytest.raises(BranchNotKnown) as late:
            producer.tpc_rollback(xid)
        assert late.value.finished == "committed"
    else:
        with pytest.raises(BranchNotKnown):
            producer.tpc_rollback(xid)


def test_what_is_not_allowed_when(producer: Producer[bytes], topic: str) -> None:
    """As psycopg: each of these is a ProgrammingError there."""

    def refused(call: Callable[[], object], words: str) -> None:
        with pytest.raises(BranchMisuse, match=words) as raised:
            call()
        assert isinstance(raised.value, producer.ProgrammingError)
        assert isinstance(raised.value, producer.Error)

    refused(producer.tpc_prepare, "needs a tpc_begin")
    refused(producer.tpc_commit, "without an id needs a tpc_begin")
    refused(producer.tpc_rollback, "without an id needs a tpc_begin")
    xid = begun(producer, topic)
    refused(lambda: producer.tpc_begin(new_xid(producer)), "is open in this thread or task")
    refused(lambda: producer.transaction().__enter__(), "is open in this thread or task")
    refused(lambda: producer.tpc_commit(xid), "with an id is not allowed in a transaction")
    refused(lambda: producer.tpc_rollback(xid), "with an id is not allowed in a transaction")
    refused(producer.tpc_recover, "not allowed in a transaction")
    producer.tpc_prepare()
    refused(producer.tpc_prepare, "was called before")
    producer.tpc_rollback()
    with producer.transaction():
        refused(lambda: producer.tpc_begin(xid), "is open in this thread or task")
        refused(producer.tpc_prepare, "needs a tpc_begin")
        refused(producer.tpc_commit, "without an id needs a tpc_begin")


def test_a_prepared_one_takes_no_more(producer: Producer[bytes], topic: str) -> None:
    begun(producer, topic)
    producer.tpc_prepare()
    with pytest.raises(BranchMisuse):
        producer.send(topic, b"late")
    producer.tpc_rollback()


def test_ids(producer: Producer[bytes]) -> None:
    assert producer.xid(7, "é", b"\xff") == Xid(7, b"\xc3\xa9", b"\xff")
    for wrong in (("1", "g", ""), (-1, "g", ""), (1, "", ""), (1, "g" * 65, ""), (1, "é" * 33, "")):
        with pytest.raises(ConfigError):
            producer.xid(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        producer.tpc_begin("not an id")
    with pytest.raises(WrongType):
        producer.tpc_begin(17)  # type: ignore[arg-type]
    with pytest.raises(BranchNotKnown):
        producer.tpc_commit(new_xid(producer))
    found = RecoveredXid(1, b"g", b"b")
    found.owner = "somebody"
    assert pickle.loads(pickle.dumps(found)).owner == "somebody"


def test_a_transaction_that_another_client_ends_is_over(shop: Shop, producer: Producer[bytes], topic: str) -> None:
    """The thread may begin another one."""
    xid = begun(producer, topic)
    producer.tpc_prepare()
    with shop.cluster.producer() as other:
        other.tpc_rollback(xid)
    with pytest.raises(BranchNotKnown):
        producer.tpc_commit()
    begun(producer, topic)
    producer.tpc_rollback()


def test_a_prepare_that_fails_is_rolled_back(shop: Shop, producer: Producer[bytes], topic: str) -> None:
    producer.tpc_begin(new_xid(producer))
    producer.send(topic, b"1", partition="0-0")
    producer.send("nowhere", b"1")
    with pytest.raises(MetamqError):
        producer.tpc_prepare()
    producer.tpc_rollback()
    begun(producer, topic)
    one = producer._transactions.of(producer._owner())
    assert one is not None
    producer._background.run(one.outbox.settle())
    assert one.work._staging is not None
    one.work._staging.rest(1)  # a batch that got lost
    with pytest.raises(MetamqError):
        producer.tpc_prepare()
    producer.tpc_rollback()
    assert shop.seen(topic) == []
    shop.until_ended()


def test_recovery_is_complete_or_fails(shop: Shop, producer: Producer[bytes], topic: str) -> None:
    xid = begun(producer, topic)
    producer.tpc_prepare()
    producer._abandon()
    second = shop.cluster.brokers[1]
    second.kill()
    try:
        with pytest.raises(ConnectError):
            producer.tpc_recover()
    finally:
        second.start()
    assert xid in until_answered(producer.tpc_recover)
    producer.tpc_commit(xid)
    assert shop.seen(topic) == [b"0-0", b"1-0"]


def test_a_broker_that_is_restarted_before_prepare(shop: Shop, topic: str) -> None:
    with Producer(shop.cluster.zookeeper, batch_bytes=100) as producer:
        producer.tpc_begin(new_xid(producer))
        producer.send(topic, bytes(100), partition="1-0")
        deadline = time.monotonic() + 60
        while not shop.branches(1):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        shop.cluster.brokers[1].kill()
        shop.cluster.brokers[1].start()
        with pytest.raises(RolledBack):
            producer.tpc_prepare()
        producer.tpc_rollback()
    assert shop.seen(topic) == []


def test_asyncio(shop: Shop) -> None:
    async def main(topic: str) -> None:
        async with aio.Producer(shop.cluster.zookeeper) as producer:
            for ends in ("commit", "one-phase", "rollback", "left"):
                xid = producer.xid(1, f"aio-{ends}-{time.monotonic_ns()}", "mq")
                await producer.tpc_begin(xid)
                for partition in BOTH:
                    producer.send(topic, ends.encode(), partition=partition)
                with pytest.raises(BranchMisuse):
                    await producer.tpc_commit(xid)
                if ends != "one-phase":
                    assert await producer.tpc_prepare()
                if ends == "rollback":
                    await producer.tpc_rollback()
                elif ends == "left":
                    producer._abandon()
                    assert xid in await producer.tpc_recover()
                    await producer.tpc_rollback(xid)
                else:
                    await producer.tpc_commit()
            with pytest.raises(BranchMisuse):
                await producer.tpc_prepare()

    def transact() -> str:
        topic = shop.topic()
        asyncio.run(main(topic))
        return topic

    assert shop.seen(until_committed(transact)) == [b"commit"] * 2 + [b"one-phase"] * 2
    shop.until_ended()
