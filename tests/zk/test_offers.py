"""What a broker offers is kept in step, and a deposed master takes nothing from its successor."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from metamq.errors import Fenced
from metamq.zk.cluster.brokers import become_master
from metamq.zk.cluster.offers import register_slave_topics, register_topics
from metamq.zk.cluster.registrations import Registration
from metamq.zk.cluster.replicas import Confirmed, change_insync, take_over
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.session.session import Session, SessionState

ME = Registration(0, replica=0, incarnation=1, folder="abc", lock="x", host="one.example", port=8123, version="0.1.0")
SLAVE = replace(ME, replica=1, folder="def")


async def offered(session: Session) -> dict[str, int]:
    """ "pub/<topic>/<who>" -> partitions."""
    found = {}
    for kind in ("pub", "sub"):
        for topic in await session.children(session.paths.offered_topics(f"topics-{kind}")):
            for name in await session.children(session.paths.offers(f"topics-{kind}", topic)):
                node = await session.get(session.paths.offered_topic(f"topics-{kind}", topic, name))
                found[f"{kind}/{topic}/{name}"] = json.loads(node.data)["partitions"]
    return found


def test_what_a_broker_offers_is_kept_in_step(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session, await Session.open(servers) as neighbour:
            held, other = await become_master(session, ME), await become_master(neighbour, replace(ME, broker_id=1))
            await register_topics(neighbour, other, {"flights": 9})
            await register_topics(session, held, {"flights": 4, "rides": 2})
            await register_topics(session, held, {"flights": 5, "bids": 1})
            assert await offered(session) == {
                "pub/bids/0-m": 1,
                "pub/flights/0-m": 5,
                "pub/flights/1-m": 9,
                "sub/bids/0-m": 1,
                "sub/flights/0-m": 5,
                "sub/flights/1-m": 9,
            }

    asyncio.run(scenario())


def test_after_a_registration_only_what_changed_is_written(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session, await Session.open(servers) as slave:
            held = await become_master(session, ME)
            before = {"flights": 4, "rides": 2, "gone": 1}
            await register_topics(session, held, before)
            await session.delete(session.paths.offered_topic("topics-pub", "rides", "0-m"), ANY_VERSION)
            after = {"flights": 5, "rides": 2, "bids": 1}
            await register_topics(session, held, after, before)
            made = {f"{kind}/{topic}/0-m": number for kind in ("pub", "sub") for topic, number in after.items()}
            assert await offered(session) == {name: made[name] for name in made if name != "pub/rides/0-m"}
            assert "gone" not in await session.children(session.paths.offered_topics("topics-pub"))
            await register_topics(session, held, after)
            assert await offered(session) == made, "without `before` all are read"
            await register_slave_topics(slave, 0, 1, {"rides": 2}, {})
            await register_slave_topics(slave, 0, 1, {"flights": 5}, {"rides": 2})
            assert await offered(session) == {**made, "sub/flights/0-s1": 5}

    asyncio.run(scenario())


def test_offers_of_a_former_session_are_made_our_own(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            former = await Session.open(servers)
            await register_topics(former, await become_master(former, ME), {"flights": 4, "gone": 1})
            held = await become_master(session, ME)
            await register_topics(session, held, {"flights": 4})
            await former.close()
            assert session.state is SessionState.CONNECTED
            assert await offered(session) == {"pub/flights/0-m": 4, "sub/flights/0-m": 4}

    asyncio.run(scenario())


def test_a_slave_offers_for_reading_under_its_own_name(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session, await Session.open(servers) as slave:
            await register_topics(session, await become_master(session, ME), {"flights": 4})
            await register_slave_topics(slave, 0, 1, {"flights": 4, "bids": 1})
            await register_slave_topics(slave, 0, 1, {"flights": 5})
            assert await offered(session) == {"pub/flights/0-m": 4, "sub/flights/0-m": 4, "sub/flights/0-s1": 5}
            await register_slave_topics(slave, 0, 1, {})
            assert await offered(session) == {"pub/flights/0-m": 4, "sub/flights/0-m": 4}

    asyncio.run(scenario())


def test_a_deposed_master_takes_no_offer_from_its_successor(servers: str) -> None:
    """Its node would stand in the place of the successor's, and go with its session."""

    async def scenario() -> None:
        async with await Session.open(servers) as successor:
            deposed = await Session.open(servers)
            held = await become_master(deposed, ME)
            await register_topics(deposed, held, {"flights": 4, "bids": 1})
            taken = await take_over(successor, SLAVE, held.state, held.version, accept_loss=True)
            await register_topics(successor, taken, {"flights": 4})  # type: ignore[arg-type]
            for late in ({"flights": 4, "bids": 1}, {"flights": 9}, {}):
                with pytest.raises(
                    Fenced, match="replica 0 of broker 0 is not the master: replica 1 is, since epoch 2"
                ):
                    await register_topics(deposed, held, late)
            await deposed.close()
            assert await offered(successor) == {"pub/flights/0-m": 4, "sub/flights/0-m": 4}

    asyncio.run(scenario())


def test_a_master_whose_state_changed_goes_on_offering(servers: str) -> None:
    """Its in-sync set is another one, or it began another term at the same time, after a lost session."""

    async def scenario() -> None:
        async with await Session.open(servers) as session:
            held = await become_master(session, ME)
            assert isinstance(await change_insync(session, held, [ME.member, SLAVE.member]), Confirmed)
            await register_topics(session, held, {"flights": 3})
            await become_master(session, ME)
            await register_topics(session, held, {"flights": 4})
            assert await offered(session) == {"pub/flights/0-m": 4, "sub/flights/0-m": 4}

    asyncio.run(scenario())


def test_a_state_that_was_deleted_ends_the_offering(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            held = await become_master(session, ME)
            await session.delete(session.paths.broker_state(0), held.version)
            with pytest.raises(Fenced, match="its state in ZooKeeper was deleted"):
                await register_topics(session, held, {"flights": 4})

    asyncio.run(scenario())
