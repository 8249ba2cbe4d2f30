"""Groups of real members on a real ZooKeeper: they settle, each partition has one owner throughout, nothing is stuck.

The referee sees every assignment and every end of one the moment it happens, and fails at the first partition that two
members consume; a sampler compares what members consume with the owner nodes in ZooKeeper all the while.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from metamq.client.group import holdings
from metamq.client.offsets.offsets import CommitRequest, CommittedOffset
from metamq.errors import ConfigError, OwnershipLost, TopicNotFound
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.errors import ConnectionLost
from metamq.zk.groups import ownership
from metamq.zk.groups.members import evict, owned_partitions, read_members
from metamq.zk.groups.ownership import read_offset
from metamq.zk.partitions import TopicPartition
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.session.session import Session, SessionState
from tests.client.rebalance_members import GROUP, Member, Referee, expire, group_with, until


@pytest.mark.slow
def test_ten_members_and_a_hundred_partitions_settle_after_every_change(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 60, 1: 40})) as group:
            members = [await group.member(f"c{index}", strategy="sticky") for index in range(11)]
            took: dict[str, float] = {}

            async def measured(what: str, change: Callable[[], object], *present: Member) -> None:
                start = time.perf_counter()
                await change()  # type: ignore[misc]
                await group.settled(100, *present)
                took[what] = time.perf_counter() - start

            await measured(
                "10 start", lambda: asyncio.gather(*(m.listener.start() for m in members[:10])), *members[:10]
            )
            assert sorted(len(member.consuming) for member in members[:10]) == [10] * 10
            await measured("1 joins", members[10].listener.start, *members)
            await measured("1 leaves", members[3].listener.stop, *members[:3], *members[4:])
            rest = [*members[:3], *members[4:]]
            await measured("1 more leaves", rest[0].listener.stop, *rest[1:])
            # Its process is killed: the server closes its session.
            killed = rest[5]
            killed.die()
            await measured("1 is killed", killed.session.close, *(m for m in rest[1:] if m is not killed))
            print(
                {what: f"{seconds * 1000:.0f} ms" for what, seconds in took.items()}, group.referee.samples, "samples"
            )

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True], ids=["own sessions", "one session"])
@pytest.mark.parametrize("strategy", ["range", "round_robin", "consistent_hash", "sticky"])
def test_members_that_come_and_go_at_random_never_share_a_partition(
    servers: str, strategy: str, is_shared: bool
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)

    async def scenario() -> None:
        topics = TopicConfig("t", {0: 12}), TopicConfig("u", {0: 5, 3: 3})
        async with group_with(servers, *topics, is_shared=is_shared) as group:
            present: list[Member] = [await group.join("first", ("t", "u"), strategy)]
            for number in range(15):
                if len(present) > 1 and chance.random() < 0.4:
                    leaver = present.pop(chance.randrange(1, len(present)))
                    if chance.random() < 0.5:
                        await leaver.listener.stop()
                    leaver.die()
                    await leaver.session.close()
                elif chance.random() < 0.3:
                    await expire(chance.choice(present), *(present if is_shared else ()))
                elif chance.random() < 0.5:
                    # The session survives; answers that were under way do not.
                    for member in present:
                        member.session._channel.link.drop()
                    await asyncio.sleep(chance.random() * 0.02)
                    await asyncio.gather(*(member.session.connected() for member in present))
                else:
                    subscribed = chance.choice([("t", "u"), ("t",), ("u",)])
                    present.append(await group.join(f"c{number}", subscribed, strategy))
                await asyncio.sleep(chance.random() * 0.1)
            await group.settled(20, *present)

    asyncio.run(scenario())


def test_offsets_are_handed_on_with_the_partition(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 2})) as group:
            one = await group.join("one")
            await group.settled(2, one)
            tp = TopicPartition("t", "0-1")
            request = CommitRequest(one.consuming[tp].claim, 41, 1)
            assert await one.listener.commit([request]) == {}
            # The claim may be the one that was assigned, however many commits ago.
            assert await one.listener.commit([replace(request, offset=42)]) == {}
            stored = await read_offset(group.session, GROUP, tp)
            assert stored is not None
            assert stored[0].committed == CommittedOffset(42, 1, request.claim.topic_id)
            two = await group.join("two")
            await group.settled(2, one, two)
            # What the former owner had in hand when it was asked to revoke was committed with the release.
            assert two.consuming[tp].committed == CommittedOffset(1, 1, request.claim.topic_id)
            assert one.events == ["assigned 2", "revoke 1"]
            refused = await one.listener.commit([replace(request, offset=99)])
            assert isinstance(refused[tp], OwnershipLost)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_shared", [False, True], ids=["own sessions", "one session"])
def test_a_slow_member_keeps_its_partition_until_it_is_done_and_holds_up_nothing_else(
    servers: str, is_shared: bool
) -> None:
    async def scenario() -> None:
        topics = TopicConfig("t", {0: 2}), TopicConfig("u", {0: 2})
        async with group_with(servers, *topics, is_shared=is_shared) as group:
            slow = await group.join("slow", ("t",))
            await group.settled(2, slow)
            slow.lets_go.clear()
            other = await group.join("zoe", ("t", "u"))
            await group.until(lambda: len(other.consuming) == 2)
            await group.until(lambda: other.listener.health().waiting == {TopicPartition("t", "0-1"): "slow"})
            await group.until(lambda: slow.listener.health().revoking == (TopicPartition("t", "0-1"),))
            # While it is busy, its own new partitions come all the same.
            await group.topics.alter("t", lambda config: replace(config, partitions={0: 2, 1: 2}))
            await group.until(lambda: TopicPartition("t", "0-0") in slow.consuming and len(other.consuming) == 4)
            assert TopicPartition("t", "0-1") in slow.consuming
            slow.lets_go.set()
            await group.settled(6, slow, other)

    asyncio.run(scenario())


def test_an_expired_session_is_told_at_once_and_followed_by_a_new_one(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 4})) as group:
            one, two = await group.join("one"), await group.join("two")
            await group.settled(4, one, two)
            tp = next(iter(one.consuming))
            before = one.consuming[tp].claim
            await expire(one)
            assert "lost 2" in one.events
            await group.settled(4, one, two)
            assert len(one.consuming) == len(two.consuming) == 2
            # A commit under the claim of before, from this process or a frozen one, gets through nowhere.
            refused = await one.listener.commit([CommitRequest(before, 77, 1)])
            assert isinstance(refused[tp], OwnershipLost)
            with pytest.raises(OwnershipLost):
                await ownership.commit(one.session, before, 77, 1)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_member_goes_on_through_a_restart_of_zookeeper() -> None:
    async def scenario(server: EmbeddedZooKeeper) -> None:
        async with group_with(server.address, TopicConfig("t", {0: 4})) as group:
            one, two = [await group.member(name, timeout_ms=30_000) for name in ("one", "two")]
            for member in (one, two):
                await member.listener.start()
            await group.settled(4, one, two)
            held = dict(one.consuming)
            await asyncio.to_thread(server.kill)
            await group.until(lambda: one.session.state is SessionState.SUSPENDED)
            # Cut off, nothing is given up; the lease decides how long to go on.
            assert one.listener.health().state == "cut off from ZooKeeper"
            tp = next(iter(held))
            refused = await one.listener.commit([CommitRequest(held[tp].claim, 5, 1)])
            assert refused[tp].retriable
            assert one.consuming == held
            await asyncio.to_thread(server.restart)
            await one.session.connected()
            await group.until(lambda: one.listener.health().state == "member")
            await asyncio.gather(two.session.connected(), group.session.connected())
            assert await one.listener.commit([CommitRequest(held[tp].claim, 5, 1)]) == {}
            assert one.consuming == held
            await two.listener.stop()
            await group.settled(4, one)

    with EmbeddedZooKeeper() as server:
        asyncio.run(scenario(server))


@pytest.mark.slow
def test_stop_takes_bounded_time_when_zookeeper_is_away() -> None:
    async def scenario(server: EmbeddedZooKeeper) -> None:
        async with await Session.open(server.address) as session:
            await TopicStore(session).create(TopicConfig("t", {0: 4}))
            member = Member("one", session, Referee(), ["t"], "range")
            await member.listener.start()
            await until(lambda: len(member.consuming) == 4)
            await asyncio.to_thread(server.kill)
            await until(lambda: session.state is not SessionState.CONNECTED)
            start = time.monotonic()
            await member.listener.stop(timeout_s=0.5)
            assert time.monotonic() - start < 20  # for ever, else
            assert member.consuming == {}

    with EmbeddedZooKeeper() as server:
        asyncio.run(scenario(server))


def test_after_stop_nothing_is_left_and_everything_is_committed(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 3})) as group:
            one = await group.join("one")
            await group.settled(3, one)
            await one.listener.stop()
            await one.listener.stop()
            assert await owned_partitions(group.session, GROUP) == {}
            assert await read_members(group.session, GROUP) == {}
            for index in range(3):
                stored = await read_offset(group.session, GROUP, TopicPartition("t", f"0-{index}"))
                assert stored is not None
                assert stored[0].committed is not None
                assert stored[0].committed.offset == 1
            assert one.listener.health().state == "stopped"

    asyncio.run(scenario())


def test_members_of_one_group_use_one_strategy(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 4})) as group:
            one = await group.join("one", strategy="sticky")
            await group.settled(4, one)
            other = await group.member("other", strategy="range")
            with pytest.raises(ConfigError, match="'etl' uses strategy 'sticky', consumer 'other' asks for 'range'"):
                await other.listener.start()
            assert set(await read_members(group.session, GROUP)) == {"one"}
            await one.listener.stop()
            await other.listener.start()
            await group.settled(4, other)

    asyncio.run(scenario())


def test_of_strategies_that_start_together_one_wins(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 4})) as group:
            members = [await group.member("a", strategy="sticky"), await group.member("b", strategy="range")]
            outcomes = await asyncio.gather(*(m.listener.start() for m in members), return_exceptions=True)
            refused = [outcome for outcome in outcomes if outcome is not None]
            # The later one learns it when it joins, or when it looks at the plan.
            await group.until(lambda: refused or any(member.failure for member in members))
            errors = [*refused, *(member.failure for member in members if member.failure)]
            assert [type(error) for error in errors] == [ConfigError]
            winner = next(m for m, outcome in zip(members, outcomes, strict=True) if outcome is None and not m.failure)
            await group.settled(4, winner)

    asyncio.run(scenario())


def test_a_topic_that_does_not_exist_is_refused_at_the_start(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("flights", {0: 4})) as group:
            member = await group.member("one", topics=("flights", "flihgts"))
            with pytest.raises(TopicNotFound, match="Did you mean 'flights'"):
                await member.listener.start()
            assert await read_members(group.session, GROUP) == {}

    asyncio.run(scenario())


def test_a_topic_is_deleted_made_anew_and_grows(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 2}), TopicConfig("u", {0: 1})) as group:
            one, two = await group.join("one", ("t", "u")), await group.join("two", ("t", "u"))
            await group.settled(3, one, two)
            old_id = one.consuming[TopicPartition("t", "0-0")].claim.topic_id
            await group.topics.delete("t")
            await group.settled(1, one, two)
            await group.topics.create(TopicConfig("t", {0: 2}))
            await group.settled(3, one, two)
            again = one.consuming[TopicPartition("t", "0-0")]
            # What is committed belongs to the topic of before, and says so.
            assert again.claim.topic_id != old_id
            assert again.committed is not None
            assert again.committed.topic_id == old_id
            await group.topics.alter("t", lambda config: replace(config, partitions={0: 2, 1: 3}))
            await group.settled(6, one, two)
            # Deleted and made anew at once: nobody may go on with the old one.
            await group.topics.delete("t")
            config = await group.topics.create(TopicConfig("t", {0: 2}))

            def all_new() -> bool:
                items = [*one.consuming.values(), *two.consuming.values()]
                ids = [assigned.claim.topic_id for assigned in items if assigned.tp.topic == "t"]
                return ids == [config.id] * 2

            await group.until(all_new)
            await group.settled(3, one, two)

    asyncio.run(scenario())


def test_an_evicted_member_stops_and_the_others_take_over(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 4})) as group:
            one, two = await group.join("one"), await group.join("two")
            await group.settled(4, one, two)
            # A stuck one would not notice; this one does, perhaps after its successor: an eviction waits for nobody.
            for tp in [tp for tp, member in group.referee.owners.items() if member is one]:
                group.referee.ends(one, tp)
            await evict(group.session, GROUP, "one")
            await group.until(lambda: one.failure)
            assert "evicted from group 'etl'" in str(one.failure)
            assert one.events[-1] == "lost 2"
            assert one.listener.health().state == "failed"
            await group.settled(4, two)

    asyncio.run(scenario())


def test_a_reset_of_a_live_groups_offset_makes_its_owner_start_there(servers: str) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 1})) as group:
            one = await group.join("one")
            await group.settled(1, one)
            tp = TopicPartition("t", "0-0")
            claim = one.consuming[tp].claim
            await ownership.reset_offset(group.session, GROUP, tp, CommittedOffset(500, 1, claim.topic_id))
            refused = await one.listener.commit([CommitRequest(claim, 7, 1)])
            assert isinstance(refused[tp], OwnershipLost)
            await group.settled(1, one)
            assert one.consuming[tp].committed == CommittedOffset(500, 1, claim.topic_id)

    asyncio.run(scenario())


def test_more_members_than_partitions(servers: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 1})) as group:
            one, two = await group.join("one"), await group.join("two")
            reason = "2 members share 1 partition of 1 topic, by strategy range"
            await group.until(lambda: two.listener.health().idle_reason == reason)
            three = await group.join("three")
            for idle in (two, three):
                await group.until(lambda idle=idle: "3 members" in idle.listener.health().idle_reason)
            told = [record.getMessage().partition(". ")[0] for record in caplog.records]
            said = [line for line in told if "has no partition" in line]
            assert said == [f"group etl: two has no partition: {reason}", said[-1]], "once for each"
            assert said[-1].startswith("group etl: three has no partition: 3 members")
            await one.listener.stop()
            await three.listener.stop()
            await group.until(lambda: two.listener.health().idle_reason == "")

    asyncio.run(scenario())


@pytest.mark.parametrize("place", ["the plan", "the claims", "the offsets"])
def test_a_rebalance_that_fails_is_tried_again_for_as_long_as_it_takes(
    servers: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The original gave up after seven tries, five seconds apart; with the pauses of here that would take minutes."""
    monkeypatch.setattr("metamq.client.group.rebalance.RETRY_MS_MAX", 5)
    failures, tries = 30, 0

    def failing(owner: object, name: str) -> None:
        proper = getattr(owner, name)

        async def attempt(*arguments: Any, **settings: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries <= failures:
                raise ConnectionLost(servers, f"failure {tries} of the test", outcome="not_done")
            return await proper(*arguments, **settings)

        monkeypatch.setattr(owner, name, attempt)

    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 4})) as group:
            one, two = await group.join("one"), await group.member("two")
            await group.settled(4, one)
            listener = two.listener
            owner, name = {
                "the plan": (listener._group_plan, "agree"),
                "the claims": (holdings, "claim_all"),
                "the offsets": (listener._holdings._storage, "claimed"),
            }[place]
            failing(owner, name)
            await listener.start()
            await group.until(lambda: "of the test" in listener.health().last_error)
            await group.settled(4, one, two)
            assert tries > failures
            assert two.failure is None
            assert (len(one.consuming), len(two.consuming)) == (2, 2)
            await group.until(lambda: listener.health().last_error == "")

    asyncio.run(scenario())


@pytest.mark.parametrize("is_shared", [False, True], ids=["own sessions", "one session"])
def test_a_consumer_id_is_used_once(servers: str, monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 2}), is_shared=is_shared) as group:
            one = await group.member("same", timeout_ms=30_000)
            await one.listener.start()
            await group.settled(2, one)
            twin = await group.member("same", timeout_ms=30_000 if is_shared else 10_000)
            with monkeypatch.context() as patch:
                # Its session lives on while it is waited for, for a second.
                patch.setattr("metamq.client.group.rebalance.EXPIRY_MARGIN_MS", -29_000)
                with pytest.raises(ConfigError, match="consumer id 'same' in group 'etl' is in use by process"):
                    await twin.listener.start()
            # Its process ends, or it is closed, while another start waits for that.
            waiting = asyncio.create_task(twin.listener.start())
            await asyncio.wait({waiting}, timeout=0.1)
            one.die()
            await one.session.close()
            await waiting
            await group.settled(2, twin)

    asyncio.run(scenario())


def test_members_tell_how_they_are_doing(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metamq.client.group.rebalance.BEAT_S", 0.05)

    async def scenario() -> None:
        async with group_with(servers, TopicConfig("t", {0: 2})) as group:
            one = await group.join("one")
            await group.settled(2, one)
            joined = (await read_members(group.session, GROUP))["one"]
            one.listener.note_progress()
            while True:
                told = (await read_members(group.session, GROUP))["one"]
                if told.assigned == 2 and told.progress_ms > joined.since_ms:
                    break
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_dead_member_s_partitions_of_500_topics_with_long_names_go_to_the_living(servers: str) -> None:
    """The plan took 1.2 MB, more than ZooKeeper holds in a node: it was never replaced, and nobody owned them."""
    topics = [f"{'long-name-' * 19}{number:010}" for number in range(500)]

    async def scenario() -> None:
        async with group_with(servers, *(TopicConfig(topic, {0: 1}) for topic in topics)) as group:
            members = [await group.member(f"member-{number:02}", topics, timeout_ms=40_000) for number in range(10)]
            await asyncio.gather(*(member.listener.start() for member in members))
            await group.settled(500, *members, limit_s=240)
            assert {len(member.consuming) for member in members} == {50}
            await members[0].listener.stop()
            await group.settled(500, *members[1:], limit_s=240)

    asyncio.run(scenario())
