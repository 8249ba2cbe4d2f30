"""What an answer that does not come, or says that the disk failed, means: unknown only where it may be committed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Producer
from metamq.client.net.branches import TxClient
from metamq.errors import BranchNotKnown, ConnectError, RolledBack, StorageError, TransactionError
from metamq.tx import XAResource, Xid
from metamq.wire import status
from metamq.wire.commands import TxReply
from metamq.wire.xa import Verb, XACode

if TYPE_CHECKING:
    from tests.tx.conftest import Shop

BOTH = ("0-0", "1-0")
Lose = Callable[..., list[Verb]]


@pytest.fixture
def topic(shop: Shop) -> str:
    return shop.topic()


@pytest.fixture
def producer(shop: Shop) -> Iterator[Producer[bytes]]:
    with Producer(shop.cluster.zookeeper, batch_bytes=100) as made:
        yield made


@pytest.fixture
def mq(shop: Shop) -> Iterator[XAResource]:
    with XAResource(0, shop.cluster.zookeeper) as made:
        yield made


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Lose:
    """Loses one request whose first, or last, verb is that, or its answer; returns whose."""

    def lose_one(verb: Verb, *, is_done: bool, meanwhile: Callable[[], Awaitable[object]] | None = None) -> list[Verb]:
        once, lost = TxClient._once, list[Verb]()

        async def losing(self: TxClient, branch: Any, header: Any, *rest: Any) -> TxReply:
            if lost or verb not in (header.verbs[0], header.verbs[-1]):
                return await once(self, branch, header, *rest)
            lost.append(Verb(header.verbs[-1]))
            if is_done:
                await once(self, branch, header, *rest)
            if meanwhile is not None:
                await meanwhile()
            raise ConnectError("the broker", "the line broke", outcome="unknown")

        monkeypatch.setattr(TxClient, "_once", losing)
        return lost

    return lose_one


def in_xa(mq: XAResource, topic: str, *, prepared: bool) -> Xid:
    xid = Xid(1, f"order-{time.monotonic_ns()}".encode())
    mq.start(xid)
    mq.send(topic, b"in a branch", partition="0-0")
    mq.end(xid)
    if prepared:
        mq.prepare(xid)
    return xid


def in_two_phases(producer: Producer[bytes], topic: str) -> Xid:
    """Begun, and something sent to both brokers."""
    xid = producer.xid(1, f"order-{time.monotonic_ns()}")
    producer.tpc_begin(xid)
    for partition in BOTH:
        producer.send(topic, partition.encode(), partition=partition)
    return xid


def test_a_roll_back_that_is_asked_for_again_is_none_of_what_was_committed_meanwhile(
    shop: Shop, topic: str, mq: XAResource, lose: Lose
) -> None:
    xid = in_xa(mq, topic, prepared=True)
    with XAResource(0, shop.cluster.zookeeper) as other:
        # Other resources have a loop of the same thread: it has to go on meanwhile.
        lose(Verb.ROLLBACK, is_done=False, meanwhile=lambda: asyncio.to_thread(other.commit, xid))
        with pytest.raises(BranchNotKnown) as raised:
            mq.rollback(xid)
    assert raised.value.finished == "committed"
    assert shop.seen(topic) == [b"in a branch"]


def test_a_roll_back_that_is_asked_for_again_may_find_it_gone(
    shop: Shop, topic: str, mq: XAResource, lose: Lose
) -> None:
    xid = in_xa(mq, topic, prepared=True)
    assert lose(Verb.ROLLBACK, is_done=True) == []
    mq.rollback(xid)
    assert shop.seen(topic) == []


@pytest.mark.parametrize("committed", [0, 1])
def test_what_a_broker_has_committed_is_not_said_to_be_rolled_back(
    shop: Shop, topic: str, producer: Producer[bytes], committed: int
) -> None:
    xid = in_two_phases(producer, topic)
    producer.tpc_prepare()
    producer._abandon()
    with XAResource(committed, shop.cluster.zookeeper) as mq:
        mq.commit(xid)
    with pytest.raises(TransactionError, match="committed") as raised:
        producer.tpc_rollback(xid)
    if committed == 0:  # it was asked first, and the other one then was not
        assert isinstance(raised.value, BranchNotKnown)
        producer.tpc_commit(xid)
        assert shop.seen(topic) == [b"0-0", b"1-0"]
    else:
        assert raised.value.code == XACode.HEURMIX
        assert shop.seen(topic) == [b"1-0"]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("verb", [Verb.SEND, Verb.PREPARE])
def test_without_an_answer_to_what_decides_nothing_it_is_rolled_back(
    shop: Shop, topic: str, producer: Producer[bytes], lose: Lose, verb: Verb, is_done: bool
) -> None:
    lost = lose(verb, is_done=is_done)
    with pytest.raises(RolledBack, match="nothing was decided"), producer.transaction():  # noqa: PT012
        for partition in BOTH:
            producer.send(topic, bytes(80 if verb is Verb.SEND else 10), partition=partition)
            producer.send(topic, bytes(80 if verb is Verb.SEND else 10), partition=partition)
    assert lost == [verb]
    assert shop.open_branches() == []
    assert shop.seen(topic) == []


@pytest.mark.parametrize("is_done", [False, True])
def test_a_prepare_without_an_answer_is_rolled_back(
    shop: Shop, topic: str, producer: Producer[bytes], lose: Lose, is_done: bool
) -> None:
    in_two_phases(producer, topic)
    lose(Verb.PREPARE, is_done=is_done)
    with pytest.raises(RolledBack, match="nothing was decided"):
        producer.tpc_prepare()
    producer.tpc_rollback()
    assert shop.open_branches() == []
    assert shop.seen(topic) == []


@pytest.mark.parametrize("is_done", [False, True])
def test_a_commit_whose_broker_says_that_its_disk_failed_is_asked_about(
    shop: Shop, topic: str, producer: Producer[bytes], monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """A write that has failed may be there all the same."""
    once = TxClient._once
    number, fields = status.encode_error(StorageError("the journal: Input/output error"))

    async def failing(self: TxClient, branch: Any, header: Any, *rest: Any) -> TxReply:
        if header.verbs[-1] != Verb.COMMIT_ONE_PHASE:
            return await once(self, branch, header, *rest)
        if is_done:
            await once(self, branch, header, *rest)
        return TxReply("0:1", [[number, int(XACode.RMERR), 0, fields]])

    monkeypatch.setattr(TxClient, "_once", failing)
    error: TransactionError | None = None
    try:
        with producer.transaction():
            producer.send(topic, b"1", partition="0-0")
    except TransactionError as raised:
        error = raised
    assert shop.seen(topic) == ([b"1"] if is_done else [])
    assert error is None if is_done else isinstance(error, RolledBack)


@pytest.mark.parametrize("theirs", ["open", "prepared", "committed"])
def test_one_whose_id_is_in_use_and_whose_requests_are_lost_leaves_that_alone(
    shop: Shop, topic: str, producer: Producer[bytes], mq: XAResource, lose: Lose, theirs: str
) -> None:
    xid = in_xa(mq, topic, prepared=theirs != "open")
    if theirs == "committed":
        mq.commit(xid)
    producer.tpc_begin(xid)
    producer.send(topic, b"ours", partition="0-0")
    assert lose(Verb.START, is_done=False) == []
    with pytest.raises(RolledBack):
        producer.tpc_commit()
    if theirs != "committed":
        mq.commit(xid, one_phase=theirs == "open")
    assert shop.seen(topic) == [b"in a branch"]
