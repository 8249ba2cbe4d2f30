"""Consumers and producers of one process: they share a session of ZooKeeper, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Consumer, Producer, aio
from metamq.client.group.beats import Ask, Beats, News
from metamq.zk.groups.members import Member, join
from metamq.zk.session import channel
from metamq.zk.session.common_lease import CommonLease
from metamq.zk.session.session import Session
from tests.zk.conftest import take_over

if TYPE_CHECKING:
    from tests.client.conftest import Shop


def session_of(client: Consumer[Any] | Producer[Any] | aio.Consumer[Any]) -> Session:
    session = client._core._session
    assert session is not None
    return session


def test_blocking_clients_share_one_session_and_no_thread_is_added(shop: Shop, group: str) -> None:
    topic = shop.topic(4)
    with shop.consumer(topic, group) as first:
        threads = set(threading.enumerate())
        with ExitStack() as stack:
            consumers = [first, *(stack.enter_context(shop.consumer(topic, group)) for _ in range(3))]
            producers = [stack.enter_context(shop.cluster.producer()) for _ in range(3)]
            assert {session_of(one).session_id for one in (*consumers, *producers)} == {session_of(first).session_id}
            assert set(threading.enumerate()) == threads
            shop.until(lambda: [len(one.assignment) for one in consumers] == [1] * 4)
        shop.until(lambda: len(first.assignment) == 4)
        assert len(shop.admin.describe_group(group).members) == 1


def test_asyncio_clients_share_one_session(shop: Shop, group: str) -> None:
    topic = shop.topic(2)

    async def main() -> None:
        async with (
            shop.cluster.aio_consumer(topics=topic, group=group) as one,
            shop.cluster.aio_consumer(topics=topic, group=group) as two,
            shop.cluster.aio_producer() as producer,
        ):
            assert session_of(one).session_id == session_of(two).session_id == producer._core._session.session_id  # type: ignore[union-attr]
            await asyncio.to_thread(shop.until, lambda: [len(one.assignment), len(two.assignment)] == [1, 1])

    asyncio.run(main())


def test_consumers_that_may_own_many_partitions_share_no_session(
    shop: Shop, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session with too many ephemeral nodes stops an ensemble when it ends."""
    topic = shop.topic(6)
    with shop.consumer(topic, group) as one, shop.consumer(topic) as reader:
        session = session_of(one)
        room = session.room_for([session.paths.owner(group, topic, "0-6")] * 6)
        monkeypatch.setattr(channel, "ROOM_MAX", 2 * room)
        with shop.consumer(topic, group) as two:
            assert session_of(reader).session_id == session.session_id != session_of(two).session_id
            shop.until(lambda: [len(one.assignment), len(two.assignment)] == [3, 3])


def test_a_consumer_with_a_pattern_shares_no_session(shop: Shop, group: str) -> None:
    """The number of its partitions has no limit."""
    topic = shop.topic(2)
    with shop.consumer(topic) as reader, shop.consumer(f"{topic[:-1]}?", group) as one, shop.consumer(topic) as other:
        assert session_of(reader).session_id == session_of(other).session_id != session_of(one).session_id


@pytest.mark.slow
def test_all_members_of_a_process_go_on_after_their_session_has_expired(shop: Shop, group: str) -> None:
    topic = shop.topic(4)
    handled: Counter[bytes] = Counter()

    def run(consumer: Consumer[Any]) -> None:
        consumer.run(lambda message: handled.update([message.value]))

    with ExitStack() as stack:
        consumers = [stack.enter_context(shop.consumer(topic, group, session_timeout_ms=4_000)) for _ in range(3)]
        session = session_of(consumers[0])
        handlers = [threading.Thread(target=run, args=(consumer,)) for consumer in consumers]
        for handler in handlers:
            handler.start()
        for turn in range(3):
            shop.until(lambda: sorted(len(one.assignment) for one in consumers) == [1, 1, 2])
            values = [b"%d-%d" % (turn, number) for number in range(200)]
            shop.send(topic, values)
            shop.until(lambda values=values: all(handled[value] for value in values))  # type: ignore[misc]
            generation = session.generation
            take_over(session)
            shop.until(lambda generation=generation: session.generation > generation)  # type: ignore[misc]
        shop.until(lambda: sum(offset or 0 for offset in shop.committed(group).values()) == 600)
        for consumer in consumers:
            consumer.stop()
        for handler in handlers:
            handler.join()
    assert shop.admin.describe_group(group).members == ()


def test_an_idle_producer_has_nothing_to_do_and_a_busy_one_has(shop: Shop) -> None:
    topic = shop.topic()
    with shop.cluster.producer() as producer:
        has_work = producer._core.sender._has_work
        assert not has_work.is_set()
        delivery = producer.send(topic, b"1")
        shop.until(has_work.is_set)
        delivery.result(60)
        shop.until(lambda: not has_work.is_set())
        producer.send(topic, b"2").result(60)


def test_an_error_of_one_client_ends_nothing_for_the_others(servers: str, caplog: pytest.LogCaptureFixture) -> None:
    calls: Counter[str] = Counter()
    trace: ContextVar[str] = ContextVar("trace")
    myself = Member("one", ("flights",), "range", "here", 1, 2, 3, 4, "0", 10_000)

    def called(what: str, *outcome: object, fails: bool = True) -> None:
        calls[what] += 1
        if fails:
            raise KeyError(what)

    def traced() -> None:
        assert trace.get("") == ""
        called("traced", fails=False)

    read = partial(called, "read", fails=False)

    async def main() -> None:
        trace.set("of the first client")
        async with await Session.open(servers, shared_by="clients") as session:
            assert await join(session, "etl", myself, left=read) is None
            news = [
                News("etl", myself, partial(called, "done")),
                News("etl", myself, partial(called, "read", fails=False)),
            ]
            asks: list[Ask] = [traced, partial(called, "ask"), lambda: news[0], lambda: news[1]]
            ends = [Beats.begin(session, ask, 0.01) for ask in asks]
            lease = CommonLease.of(session)
            await lease.join(partial(called, "changed", fails=False))
            while not all(calls[what] > 2 for what in ("ask", "done", "read", "valid", "last", "traced")):
                lease.call_when_valid(partial(called, "valid"))
                lease.call_when_valid(partial(called, "last", fails=False))
                await asyncio.sleep(0.01)
            for end in ends:
                end()
            await lease.leave(lease._clients[0])

    asyncio.run(asyncio.wait_for(main(), 60))
    assert {"the node of a group member is not updated", "group etl: the update of one failed"} <= {
        record.getMessage() for record in caplog.records
    }
