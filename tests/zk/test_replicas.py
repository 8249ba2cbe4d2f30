"""Slaves, the in-sync set and promotions: one node decides, and an answer that was lost is read up."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from metamq.errors import ConfigError, CorruptData, Fenced
from metamq.zk.cluster.brokers import BrokerState, Mastership, become_master, live_brokers, next_term, read_state
from metamq.zk.cluster.epochs import next_epoch
from metamq.zk.cluster.registrations import EXPIRY_MARGIN_MS, BrokerAddress, Registration
from metamq.zk.cluster.replicas import (
    Confirmed,
    Refused,
    Unknown,
    change_insync,
    live_slaves,
    promoted,
    register_slave,
    slaves_of,
    take_over,
)
from metamq.zk.errors import ConnectionLost
from metamq.zk.nodes import Op
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.session.session import Session

Expire = Callable[[Session], None]
Until = Callable[..., Awaitable[None]]
T = TypeVar("T")

ME = Registration(0, replica=0, incarnation=1, folder="abc", lock="x", host="one.example", port=8123, version="0.1.0")
ONE = replace(ME, replica=1, incarnation=7, folder="def", host="two.example")
TWO = replace(ME, replica=2, incarnation=4, folder="ghi", host="three.example")
ALL = (ME.member, ONE.member, TWO.member)


def address(registration: Registration, role: str = "slave") -> BrokerAddress:
    r = registration
    return BrokerAddress(0, r.replica, role, r.host, r.port, r.version, r.incarnation, r.learner)  # type: ignore[arg-type]


async def in_sync(session: Session, members: Sequence[tuple[int, int]] = ALL) -> Mastership:
    """ME is master, with these in sync."""
    changed = await change_insync(session, await become_master(session, ME), members)
    assert isinstance(changed, Confirmed)
    return changed.held


# -- slaves --------------------------------------------------------------------


def test_slaves_that_come_and_go_are_seen(servers: str, until: Until) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session, await Session.open(servers) as one:
            changes: list[None] = []
            assert await live_slaves(session) == {}
            assert await slaves_of(session, 0, lambda: changes.append(None)) == []
            learner = replace(TWO, learner=True)
            two = await Session.open(servers)
            await register_slave(two, learner)
            await until(lambda: changes)
            await register_slave(one, ONE)
            await register_slave(one, replace(ONE, port=9))  # again in the same session, as after a lost answer
            seen = len(changes)
            found = await slaves_of(session, 0, lambda: changes.append(None))
            assert found == [address(replace(ONE, port=9)), address(learner)]
            assert await live_slaves(session) == {0: {slave.replica: slave for slave in found}}
            assert await live_brokers(session) == {}
            await two.close()
            await until(lambda: len(changes) > seen)
            assert await slaves_of(session, 0) == [address(replace(ONE, port=9))]

    asyncio.run(scenario())


def test_a_slave_that_is_registered_already_wakes_nobody(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await register_slave(session, ONE)
            path = session.paths.slave(0, ONE.replica)
            before = await session.get(path)
            await register_slave(session, ONE)
            assert await session.get(path) == before

    asyncio.run(scenario())


def test_a_killed_slaves_node_is_replaced_at_once_by_its_own_folder(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers, timeout_ms=60_000) as killed, await Session.open(servers) as session:
            await register_slave(killed, ONE)
            async with asyncio.timeout(30):  # the session has 60
                await register_slave(session, replace(ONE, incarnation=8))
            assert await slaves_of(session, 0) == [address(replace(ONE, incarnation=8))]

    asyncio.run(scenario())


def test_two_live_replicas_of_one_number_are_an_error_that_names_the_other(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a data folder that was copied to another machine."""

    async def scenario() -> None:
        async with await Session.open(servers) as session:
            other = await Session.open(servers, timeout_ms=30_000)
            other._channel.negotiated_timeout_ms = 500  # the time of the wait; its session lives longer
            await register_slave(other, replace(ONE, folder="another"))
            with monkeypatch.context() as patch:
                patch.setattr("metamq.zk.cluster.registrations.EXPIRY_MARGIN_MS", 500)
                with pytest.raises(ConfigError, match=r"replica 1 of broker 0 runs already, at two\.example:8123"):
                    await register_slave(session, ONE)
            waiting = asyncio.create_task(register_slave(session, ONE))
            await other.close()
            await waiting
            assert await slaves_of(session, 0) == [address(ONE)]

    asyncio.run(scenario())


DIES = """
import asyncio, os, sys
from metamq.zk.cluster.registrations import Registration
from metamq.zk.cluster.replicas import register_slave
from metamq.zk.session.session import Session

async def die():
    session = await Session.open(sys.argv[1], timeout_ms=3_000, make_chroot=True)
    await register_slave(session, Registration(0, 1, 7, "def", "another", "two.example", 8123, "0.1.0"))
    os._exit(0)

asyncio.run(die())
"""


@pytest.mark.slow
def test_a_frozen_zookeeper_ends_no_session_so_the_wait_for_its_end_goes_on(
    victim: EmbeddedZooKeeper, unique: str, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    """A process with another lock on the folder was killed. ZooKeeper is frozen before it can end the session."""

    async def scenario() -> None:
        servers = f"{victim.address}/{unique}"
        async with await Session.open(servers, timeout_ms=60_000, make_chroot=True) as session:
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", DIES, servers], check=True)
            waiting = asyncio.create_task(register_slave(session, ONE))
            await until(lambda: "waiting 5 s for its session to end" in caplog.text)
            victim.freeze()
            await asyncio.wait([waiting], timeout=(3_000 + EXPIRY_MARGIN_MS) / 1000)
            victim.thaw()
            await waiting
            assert await slaves_of(session, 0) == [address(ONE)]

    asyncio.run(scenario())


def test_a_replica_has_one_node_in_whatever_role(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await register_slave(session, ME)
            held = await become_master(session, ME)
            assert (await slaves_of(session, 0), set(await live_brokers(session))) == ([], {0})
            await register_slave(session, ME)
            assert (await slaves_of(session, 0), await live_brokers(session)) == ([address(ME)], {})
            assert await take_over(session, ME, held.state, held.version) == await mastership(session)
            assert (await slaves_of(session, 0), set(await live_brokers(session))) == ([], {0})

    asyncio.run(scenario())


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"replica": 1}'])
def test_a_damaged_slave_node_is_passed_over_and_named_to_who_needs_it(servers: str, data: bytes) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await session.create(session.paths.slave(3, 1), data, makepath=True)
            assert await slaves_of(session, 3) == []
            with pytest.raises(CorruptData, match="slave node of broker 3"):
                await register_slave(session, replace(ONE, broker_id=3))

    asyncio.run(scenario())


# -- the in-sync set --------------------------------------------------------------------


async def mastership(session: Session) -> Mastership:
    stored = await read_state(session, 0)
    assert stored is not None
    return Mastership(0, *stored)


def test_the_set_changes_if_the_state_is_as_the_master_holds_it(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            first = await become_master(session, ME)
            grown = await change_insync(session, first, [ONE.member, ME.member])
            assert isinstance(grown, Confirmed)
            assert grown.held == await mastership(session)
            assert grown.held.state == replace(first.state, insync=(ME.member, ONE.member))
            assert grown.held.version == first.version + 1
            late = await change_insync(session, first, [ME.member, TWO.member])
            assert late == Refused(grown.held.state, grown.held.version)
            assert isinstance(await change_insync(session, grown.held, [ME.member]), Confirmed)

    asyncio.run(scenario())


def test_the_same_set_again_makes_changes_with_the_version_of_before_void(servers: str) -> None:
    """So a change whose answer was lost is settled, even when it was never done."""

    async def scenario() -> None:
        async with await Session.open(servers) as session:
            held = await become_master(session, ME)
            again = await change_insync(session, held, held.state.insync)
            assert isinstance(again, Confirmed)
            assert again.held == replace(held, version=held.version + 1)
            assert await change_insync(session, held, ALL) == Refused(again.held.state, again.held.version)

    asyncio.run(scenario())


def test_without_a_state_there_is_no_set(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            held = await become_master(session, ME)
            await session.delete(session.paths.broker_state(0), held.version)
            with pytest.raises(Fenced, match="its state in ZooKeeper was deleted"):
                await change_insync(session, held, [ME.member])

    asyncio.run(scenario())


def test_a_change_without_an_answer_is_unknown_and_asked_again_happens_once(
    victim: EmbeddedZooKeeper, unique: str
) -> None:
    async def scenario() -> None:
        servers = f"{victim.address}/{unique}"
        async with (
            await Session.open(servers, timeout_ms=60_000, make_chroot=True) as patient,
            await Session.open(servers, timeout_ms=2_000) as session,
        ):
            held = await become_master(patient, ME)
            victim.freeze()
            lost = await change_insync(session, held, [ME.member, ONE.member])
            assert isinstance(lost, Unknown)
            assert isinstance(await change_insync(session, held, [ME.member, ONE.member]), Unknown)  # nothing is sent
            victim.thaw()
            async with asyncio.timeout(60):
                await session.connected()
                found = await change_insync(session, held, [ME.member, ONE.member])
                while isinstance(found, Unknown):
                    await session.connected()
                    found = await change_insync(session, held, [ME.member, ONE.member])
            now = await mastership(patient)
            assert (now.version, now.state.insync) == (held.version + 1, (ME.member, ONE.member))
            assert found in (Confirmed(now), Refused(now.state, now.version))

    asyncio.run(scenario())


# -- promotion --------------------------------------------------------------------


def test_who_stays_in_sync_at_a_promotion() -> None:
    state = BrokerState(epoch=4, master=0, insync=ALL, generation=2)
    stored, epoch = (state, 9), next_epoch(4, 1)
    assert promoted(stored, ONE) == BrokerState(epoch, 1, (ONE.member, TWO.member), 2)
    assert promoted(stored, ONE, accept_loss=True) == promoted(stored, ONE), "nothing is lost"
    assert promoted(stored, ONE, handed_over=True) == BrokerState(epoch, 1, ALL, 2)
    alone = replace(state, insync=(ME.member,)), 9
    assert promoted(alone, ONE, accept_loss=True) == BrokerState(epoch, 1, (ONE.member,), 3)
    assert promoted(stored, replace(ONE, incarnation=8), accept_loss=True) == BrokerState(epoch, 1, ((1, 8),), 3)


def test_the_master_of_before_may_be_promoted_after_a_power_cut() -> None:
    """It waits, since replica 1 may be ahead; if that one is lost, too, the loss may be accepted."""
    state = BrokerState(epoch=4, master=0, insync=(ME.member, ONE.member), generation=2)
    again = replace(ME, incarnation=2)
    with pytest.raises(Fenced, match="replica 1 may be ahead"):
        next_term((state, 9), again)
    with pytest.raises(Fenced, match="it is not in sync, as replica 0, 1 is"):
        promoted((state, 9), again)
    assert promoted((state, 9), again, accept_loss=True) == BrokerState(17, 0, ((0, 2),), 3)


@pytest.mark.parametrize("registration", [replace(ONE, incarnation=8), TWO], ids=["another incarnation", "never in it"])
def test_outside_of_the_set_nobody_is_promoted_unless_the_loss_is_accepted(
    servers: str, registration: Registration
) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session, await Session.open(servers) as slave:
            held = await in_sync(session, [ME.member, ONE.member])
            with pytest.raises(Fenced, match=f"replica {registration.replica} of broker 0 .* not in sync") as refused:
                await take_over(slave, registration, held.state, held.version)
            assert refused.value.hint == "Promote replica 0, 1, or accept the loss of the messages that this one lacks."
            assert await mastership(session) == held
            taken = await take_over(slave, registration, held.state, held.version, accept_loss=True)
            assert isinstance(taken, Mastership)
            assert taken == await mastership(session)
            epoch = next_epoch(held.epoch, registration.replica)
            assert taken.state == BrokerState(epoch, registration.replica, (registration.member,), 2)

    asyncio.run(scenario())


def test_a_slave_takes_over_at_once_from_a_master_whose_session_still_lives(servers: str) -> None:
    """S2-13: a dead master's node would stand in the way until its session expires."""

    async def scenario() -> None:
        async with await Session.open(servers, timeout_ms=60_000) as dead, await Session.open(servers) as slave:
            held = await in_sync(dead)
            await register_slave(slave, ONE)
            async with asyncio.timeout(30):  # the session has 60
                taken = await take_over(slave, ONE, held.state, held.version)
            assert taken == await mastership(slave)
            assert await live_brokers(slave) == {0: address(ONE, "master")}
            assert await slaves_of(slave, 0) == []
            with pytest.raises(Fenced, match="replica 1 is, since epoch 2"):
                await become_master(dead, ME)
            assert isinstance(await change_insync(dead, held, [ME.member]), Refused)

    asyncio.run(scenario())


def test_a_state_that_has_changed_is_decided_upon_anew(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session, await Session.open(servers) as slave:
            held = await in_sync(session)
            shrunk = await change_insync(session, held, [ME.member, TWO.member])
            assert isinstance(shrunk, Confirmed)
            refused = await take_over(slave, ONE, held.state, held.version)
            assert refused == Refused(shrunk.held.state, shrunk.held.version)
            assert set(await live_brokers(session)) == {0}

    asyncio.run(scenario())


def test_a_former_master_does_not_wait_for_its_successor_to_end(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another replica takes over between the two reads of a master that begins again in a new session."""

    async def scenario() -> None:
        async with await Session.open(servers) as session, await Session.open(servers) as one:
            held = await in_sync(session)
            await register_slave(one, ONE)
            read = session.get_or_none

            async def read_before_the_switch(path: str, *others: Any, **more: Any) -> Any:
                monkeypatch.setattr(session, "get_or_none", read)
                found = await read(path, *others, **more)
                assert isinstance(await take_over(one, ONE, held.state, held.version, handed_over=True), Mastership)
                return found

            monkeypatch.setattr(session, "get_or_none", read_before_the_switch)
            with pytest.raises(Fenced, match="replica 1 is, since epoch"):
                await become_master(session, ME)

    asyncio.run(scenario())


def test_of_two_slaves_that_take_over_at_once_one_does(servers: str) -> None:
    async def scenario() -> None:
        async with (
            await Session.open(servers) as session,
            await Session.open(servers) as one,
            await Session.open(servers) as two,
        ):
            winners: set[int] = set()
            for turn in range(120):
                if turn >= 12 and winners == {1, 2}:
                    break
                held = await in_sync(session)
                await asyncio.gather(register_slave(one, ONE), register_slave(two, TWO))
                calls = [(one, ONE), (two, TWO)][:: 1 if turn % 2 else -1]
                results = await asyncio.gather(*(take_over(s, r, held.state, held.version) for s, r in calls))
                (taken,) = [result for result in results if isinstance(result, Mastership)]
                assert taken == await mastership(session)
                assert [r for r in results if isinstance(r, Refused)] == [Refused(taken.state, taken.version)]
                assert (await live_brokers(session))[0].replica == taken.state.master
                winners.add(taken.state.master)
                await start_over(session)
            assert winners == {1, 2}

    asyncio.run(scenario())


async def start_over(session: Session) -> None:
    """As if nobody had ever been master."""
    for path in (session.paths.broker_state(0), session.paths.master(0)):
        await session.delete(path, -1)


async def after(round_trips: int, session: Session, call: Coroutine[Any, Any, T]) -> T:
    for _ in range(round_trips):
        await session.sync()
    return await call


def test_a_master_that_goes_on_alone_and_a_slave_that_takes_over_exclude_each_other(servers: str) -> None:
    """S1-1: both read the set with both in it; then one takes the other out, and that one takes over."""

    async def scenario() -> None:
        async with await Session.open(servers) as session, await Session.open(servers) as slave:
            outcomes: set[bool] = set()
            for turn in range(240):
                if turn >= 24 and outcomes == {True, False}:
                    break
                held = await in_sync(session, [ME.member, ONE.member])
                await register_slave(slave, ONE)
                shrink = after(turn % 6, session, change_insync(session, held, [ME.member]))
                results = await asyncio.gather(shrink, take_over(slave, ONE, held.state, held.version))
                done = {type(result) for result in results}
                assert done in ({Confirmed, Refused}, {Refused, Mastership})
                now = await mastership(session)
                went_on = Confirmed in done
                assert now.state.insync == ((ME.member,) if went_on else (ONE.member,))
                assert now.state.master == (await live_brokers(session))[0].replica == (0 if went_on else 1)
                outcomes.add(went_on)
                await start_over(session)
            assert outcomes == {True, False}

    asyncio.run(scenario())


class LosesAnAnswer(Session):
    """A session whose next transaction is done, and not answered."""

    loses = False

    async def multi(self, operations: Sequence[Op]) -> list[int | None]:
        done = await super().multi(operations)
        if self.loses:
            self.loses = False
            raise ConnectionLost(self.servers, "the answer was lost on purpose")
        return done


def test_a_promotion_whose_answer_was_lost_is_found_by_asking_again(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session, await LosesAnAnswer.open(servers) as slave:
            held = await in_sync(session)
            assert isinstance(slave, LosesAnAnswer)
            slave.loses = True
            with pytest.raises(ConnectionLost):
                await take_over(slave, ONE, held.state, held.version)
            now = await mastership(session)
            assert now.state.master == 1
            assert await take_over(slave, ONE, held.state, held.version) == now
            assert await mastership(session) == now
            # Nobody else takes that answer for its own.
            assert await take_over(session, TWO, held.state, held.version) == Refused(now.state, now.version)

    asyncio.run(scenario())


def test_a_promotion_whose_session_was_lost_with_the_answer_begins_another_term(
    servers: str, expire: Expire, until: Until
) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session, await LosesAnAnswer.open(servers) as slave:
            held = await in_sync(session)
            assert isinstance(slave, LosesAnAnswer)
            slave.loses = True
            with pytest.raises(ConnectionLost):
                await take_over(slave, ONE, held.state, held.version)
            await asyncio.to_thread(expire, slave)
            await until(lambda: slave.generation == 2)
            await slave.connected()
            taken = await take_over(slave, ONE, held.state, held.version)
            assert isinstance(taken, Mastership)
            assert (taken.epoch, taken) == (next_epoch(next_epoch(held.epoch, 1), 1), await mastership(session))
            node = await session.get(session.paths.master(0))
            assert node.ephemeral_owner == slave.session_id
            assert json.loads(node.data)["replica"] == 1

    asyncio.run(scenario())


def test_a_promotion_whose_answer_was_lost_and_that_another_followed_is_over(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session, await LosesAnAnswer.open(servers) as slave:
            held = await in_sync(session)
            assert isinstance(slave, LosesAnAnswer)
            slave.loses = True
            with pytest.raises(ConnectionLost):
                await take_over(slave, ONE, held.state, held.version)
            now = await mastership(session)
            later = await take_over(session, TWO, now.state, now.version)
            assert isinstance(later, Mastership)
            found = await take_over(slave, ONE, held.state, held.version)
            assert found == Refused(later.state, later.version)

    asyncio.run(scenario())
