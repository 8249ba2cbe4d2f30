"""Becoming master: one epoch per start, one live master per broker id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from metamq.errors import ConfigError, CorruptData, Fenced
from metamq.zk.cluster.brokers import BrokerState, become_master, live_brokers, master_of, next_term, read_state
from metamq.zk.cluster.epochs import next_epoch
from metamq.zk.cluster.registrations import BrokerAddress, Registration
from metamq.zk.session.session import Session

Until = Callable[..., Awaitable[None]]

ME = Registration(0, replica=0, incarnation=1, folder="abc", lock="x", host="one.example", port=8123, version="0.1.0")
OTHER = replace(ME, folder="xyz", host="two.example")


def test_each_start_raises_the_epoch() -> None:
    first = next_term(None, ME)
    assert first == BrokerState(epoch=1, master=0, insync=((0, 1),), generation=1)
    assert next_term((first, 0), ME) == replace(first, epoch=next_epoch(1, 0))


def test_alone_a_new_incarnation_takes_the_place_of_the_old_and_says_that_messages_may_be_gone() -> None:
    state = BrokerState(epoch=4, master=0, insync=((0, 1),), generation=2)
    assert next_term((state, 0), ME) == BrokerState(17, 0, ((0, 1),), 2)
    assert next_term((state, 0), replace(ME, incarnation=2)) == BrokerState(17, 0, ((0, 2),), 3)
    with pytest.raises(Fenced, match="its data folder is new, or an older copy"):
        next_term((state, 0), replace(ME, incarnation=2, is_replaced=True))
    assert next_term((state, 0), replace(ME, is_replaced=True)) == BrokerState(17, 0, ((0, 1),), 2), "it has caught up"


def test_replica_0_is_the_first_master() -> None:
    with pytest.raises(Fenced, match="replica 1 of broker 0 is not the master: replica 0 must be the first master"):
        next_term(None, replace(ME, replica=1))


def test_another_replica_is_the_master() -> None:
    with pytest.raises(Fenced, match="replica 0 of broker 0 is not the master: replica 1 is, since epoch 4"):
        next_term((BrokerState(epoch=4, master=1, insync=((1, 1),), generation=1), 0), ME)


def test_after_a_crash_of_its_host_a_master_does_not_go_before_who_may_be_ahead() -> None:
    state = BrokerState(epoch=4, master=0, insync=((0, 1), (2, 7)), generation=1)
    assert next_term((state, 0), ME).insync == ((0, 1), (2, 7))
    with pytest.raises(Fenced, match="replica 2 may be ahead"):
        next_term((state, 0), replace(ME, incarnation=2))


def test_a_master_is_registered_with_its_epoch(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            mastership = await become_master(session, ME)
            assert mastership.epoch == 1
            assert await read_state(session, 0) == (mastership.state, mastership.version)
            assert await live_brokers(session) == {0: BrokerAddress(0, 0, "master", "one.example", 8123, "0.1.0", 1)}
            node = await session.get(session.paths.master(0))
            former = {name: one for name, one in json.loads(node.data).items() if name != "status"}
            await session.set(session.paths.master(0), json.dumps(former).encode(), node.version)
            assert (await live_brokers(session))[0].status == "", "a former release wrote the node"
            # Again in the same session, as after an answer that was lost.
            again = await become_master(session, ME)
            assert again.epoch == next_epoch(1, 0)
            assert await read_state(session, 0) == (again.state, again.version)

    asyncio.run(scenario())


def test_a_killed_masters_node_is_replaced_at_once_by_its_own_folder(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers, timeout_ms=60_000) as killed, await Session.open(servers) as session:
            await become_master(killed, ME)
            async with asyncio.timeout(30):  # the session has 60
                assert (await become_master(session, replace(ME, port=9))).epoch == next_epoch(1, 0)
            assert (await live_brokers(session))[0].port == 9

    asyncio.run(scenario())


def test_another_masters_node_is_waited_for(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            other = await Session.open(servers)
            await become_master(other, OTHER)
            waiting = asyncio.create_task(become_master(session, ME))
            await asyncio.wait({waiting}, timeout=0.1)
            assert not waiting.done()
            await other.close()
            assert (await waiting).epoch == next_epoch(1, 0)

    asyncio.run(scenario())


def test_two_live_masters_of_one_broker_id_are_an_error_that_names_the_other(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metamq.zk.cluster.registrations.EXPIRY_MARGIN_MS", 500)

    async def scenario() -> None:
        async with await Session.open(servers, timeout_ms=30_000) as other, await Session.open(servers) as session:
            other._channel.negotiated_timeout_ms = 500  # the time of the wait; its session lives longer
            await become_master(other, OTHER)
            with pytest.raises(ConfigError, match=r"replica 0 of broker 0 runs already, at two\.example:8123"):
                await become_master(session, ME)
            assert (await live_brokers(session))[0].host == "two.example"

    asyncio.run(scenario())


def test_masters_that_race_get_different_epochs(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            terms = await asyncio.gather(*(become_master(session, ME) for session in (one, two, one, two)))
            assert len({term.epoch for term in terms}) == 4

    asyncio.run(scenario())


def test_brokers_that_come_and_go_are_seen(servers: str, until: Until) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            changes: list[None] = []
            assert await live_brokers(session, lambda: changes.append(None)) == {}
            broker = await Session.open(servers)
            await become_master(broker, ME)
            await until(lambda: changes)
            assert set(await live_brokers(session, lambda: changes.append(None))) == {0}
            seen = len(changes)
            await broker.close()
            await until(lambda: len(changes) > seen)
            assert await live_brokers(session) == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"replica": 0}'])
def test_a_damaged_master_node_is_named(servers: str, data: bytes) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await session.create(session.paths.master(3), data, makepath=True)
            with pytest.raises(CorruptData, match="master node of broker 3"):
                await master_of(session, 3)
            assert 3 not in await live_brokers(session)

    asyncio.run(scenario())
