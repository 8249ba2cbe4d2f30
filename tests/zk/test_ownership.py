"""Claims, commits and releases against the real ZooKeeper: one owner at a time, and no former owner gets through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from metamq.errors import ConfigError, CorruptData, OwnershipLost
from metamq.zk.errors import BadVersion
from metamq.zk.groups.members import Member, beat, evict, join, leave, owned_partitions, read_members
from metamq.zk.groups.ownership import (
    CommittedOffset,
    NotYet,
    Ownership,
    claim,
    commit,
    drop_owner,
    next_generation,
    prepare,
    read_offset,
    release,
    reset_offset,
)
from metamq.zk.nodes import ANY_VERSION, Create, Delete, SetData
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.session import Session

Until = Callable[..., Awaitable[None]]

pytestmark = pytest.mark.usefixtures("sharing")

TP = TopicPartition("flights", "0-3")
TOPIC_ID = "0123456789abcdef"


def ignore() -> None:
    pass


async def claimed(
    session: Session, consumer_id: str, tp: TopicPartition = TP, freed: Callable[[], None] = ignore
) -> Ownership:
    outcome = await claim(session, "etl", tp, TOPIC_ID, consumer_id, freed=freed)
    assert isinstance(outcome, Ownership)
    return outcome


async def committed(session: Session) -> CommittedOffset | None:
    stored = await read_offset(session, "etl", TP)
    assert stored is not None
    return stored[0].committed


def test_generations_grow_even_when_they_start_anew() -> None:
    assert next_generation(0, now_ms=1000) == 1000
    assert next_generation(1000, now_ms=1000) == 1001
    assert next_generation(5000, now_ms=1000) == 5001


def test_claim_commit_release_and_claim_again(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            first = await claimed(one, "one")
            assert first.committed is None
            first = await commit(one, first, 100, epoch=1)
            first = await commit(one, first, 150, epoch=2)
            assert first.committed == CommittedOffset(150, 2, TOPIC_ID)
            await release(one, first, (200, 2))
            second = await claimed(two, "two")
            assert second.committed == CommittedOffset(200, 2, TOPIC_ID)
            assert second.generation > first.generation
            await release(two, second)
            assert await committed(two) == CommittedOffset(200, 2, TOPIC_ID)
            assert await owned_partitions(two, "etl") == {}

    asyncio.run(scenario())


def test_a_partition_is_claimed_when_its_owner_lets_it_go_not_before(servers: str, until: Until) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            first = await claimed(one, "one")
            freed = asyncio.Event()
            assert await claim(two, "etl", TP, TOPIC_ID, "two", freed=freed.set) == NotYet(TP, "one")
            first = await commit(one, first, 5, 1)
            assert not freed.is_set()
            await release(one, first)
            await asyncio.wait_for(freed.wait(), 60)
            await claimed(two, "two")

    asyncio.run(scenario())


def test_many_race_for_one_partition_and_one_gets_it(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            outcomes = await asyncio.gather(
                *(
                    claim(session, "etl", TP, TOPIC_ID, name, freed=ignore)
                    for session, name in [(one, "one"), (two, "two")]
                )
            )
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NotYet", "Ownership"]

    asyncio.run(scenario())


def test_our_own_node_of_a_claim_without_an_answer_is_taken_over(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            unanswered = await claimed(session, "one")
            again = await claimed(session, "one")
            assert again.generation > unanswered.generation
            await commit(session, again, 7, 1)
            with pytest.raises(OwnershipLost, match=r"flights.*generation"):
                await commit(session, unanswered, 3, 1)
            assert await committed(session) == CommittedOffset(7, 1, TOPIC_ID)

    asyncio.run(scenario())


def test_a_former_owner_gets_no_commit_and_no_release_through_although_the_owner_node_looks_the_same(
    servers: str,
) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as zombie, await Session.open(servers) as two:
            old = await commit(zombie, await claimed(zombie, "one"), 10, 1)
            path = two.paths.owner("etl", *TP)
            seen = await two.get(path)
            # What the expiry of the zombie's session does.
            await two.delete(path, ANY_VERSION)
            new = await commit(two, await claimed(two, "two"), 20, 1)
            # ABA: a check of the owner node's version would let the zombie pass.
            assert (await two.get(path)).version == seen.version
            with pytest.raises(OwnershipLost, match="two claimed it with generation"):
                await commit(zombie, old, 15, 1)
            with pytest.raises(OwnershipLost):
                await release(zombie, old, (15, 1))
            with pytest.raises(OwnershipLost):
                await release(zombie, old)
            assert await owned_partitions(two, "etl") == {TP: "two"}
            assert (await commit(two, new, 30, 1)).committed == CommittedOffset(30, 1, TOPIC_ID)

    asyncio.run(scenario())


def test_an_expired_session_frees_the_partition_and_fences_the_claim(servers: str) -> None:
    async def scenario() -> None:
        zombie = await Session.open(servers)
        async with await Session.open(servers) as two:
            old = await claimed(zombie, "one")
            freed = asyncio.Event()
            assert isinstance(await claim(two, "etl", TP, TOPIC_ID, "two", freed=freed.set), NotYet)
            await zombie.close()
            await asyncio.wait_for(freed.wait(), 60)
            await claimed(two, "two")
            async with await Session.open(servers) as later_session:
                with pytest.raises(OwnershipLost):
                    await commit(later_session, old, 15, 1)

    asyncio.run(scenario())


def test_a_commit_whose_answer_was_lost_is_not_taken_for_anothers(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            before = await claimed(session, "one")
            # Both were carried out, but the caller never heard of it and still has the claim of before.
            await commit(session, before, 10, 1)
            await commit(session, before, 12, 1)
            after = await commit(session, before, 14, 1)
            assert await committed(session) == CommittedOffset(14, 1, TOPIC_ID)
            await release(session, before, (16, 1))
            # Neither was the release heard of.
            await release(session, before, (16, 1))
            await release(session, after)
            assert await committed(session) == CommittedOffset(16, 1, TOPIC_ID)

    asyncio.run(scenario())


def test_a_release_without_an_answer_does_not_take_the_partition_from_the_next_owner(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            held = await claimed(one, "one")
            await release(one, held, (16, 1))
            await claimed(two, "two")
            with pytest.raises(OwnershipLost):
                await release(one, held, (16, 1))
            assert await owned_partitions(two, "etl") == {TP: "two"}

    asyncio.run(scenario())


def test_the_offset_of_a_topic_that_was_made_anew_keeps_its_old_id(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            held = await claimed(session, "one")
            await release(session, held, (100, 3))
            new_id = "f" * 16
            again = await claim(session, "etl", TP, new_id, "one", freed=ignore)
            assert isinstance(again, Ownership)
            assert (again.topic_id, again.committed) == (new_id, CommittedOffset(100, 3, TOPIC_ID))
            again = await commit(session, again, 1, 1)
            assert again.committed == CommittedOffset(1, 1, new_id)

    asyncio.run(scenario())


def test_a_reset_from_outside_fences_the_owner(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            held = await commit(session, await claimed(session, "one"), 10, 1)
            await reset_offset(session, "etl", TP, CommittedOffset(3, 1, TOPIC_ID))
            with pytest.raises(OwnershipLost):
                await commit(session, held, 11, 1)
            assert await committed(session) == CommittedOffset(3, 1, TOPIC_ID)
            never_claimed = TopicPartition("flights", "1-0")
            await reset_offset(session, "etl", never_claimed, CommittedOffset(9, 1, TOPIC_ID))
            assert (await claimed(session, "one", never_claimed)).committed == CommittedOffset(9, 1, TOPIC_ID)
            await reset_offset(session, "etl", never_claimed, None)
            assert (await claimed(session, "one", never_claimed)).committed is None

    asyncio.run(scenario())


def test_deleted_offsets_end_a_claim(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            held = await claimed(session, "one")
            await session.delete(session.paths.offset("etl", *TP), ANY_VERSION)
            with pytest.raises(OwnershipLost, match="offsets of group 'etl' were deleted"):
                await commit(session, held, 1, 1)
            # A new owner with a new node: its generation is higher all the same.
            assert await drop_owner(session, "etl", TP, "one")
            assert (await claimed(session, "two")).generation >= held.generation

    asyncio.run(scenario())


def test_a_damaged_offset_node_is_named(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await session.create(session.paths.offset("etl", *TP), b"42", makepath=True)
            with pytest.raises(CorruptData, match="offset of group 'etl' for flights/0-3"):
                await claimed(session, "one")

    asyncio.run(scenario())


def test_a_hundred_partitions_are_claimed_committed_and_released_all_at_once(servers: str) -> None:
    items = [TopicPartition("flights", f"0-{index}") for index in range(100)]

    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await prepare(session, "etl", "flights")
            for _ in range(3):
                claims = await asyncio.gather(*(claimed(session, "one", tp) for tp in items))
                assert [claim.tp for claim in claims] == items
                claims = await asyncio.gather(*(commit(session, claim, 10, 1) for claim in claims))
                assert len(await session.children(session.paths.owners("etl", "flights"))) == 100
                await asyncio.gather(*(release(session, claim, (20, 1)) for claim in claims))
                assert await session.children(session.paths.owners("etl", "flights")) == []

    asyncio.run(scenario())


def member(consumer_id: str, progress_ms: int = 5, assigned: int = 0) -> Member:
    return Member(
        consumer_id,
        topics=("flights",),
        strategy="range",
        host="here",
        pid=42,
        since_ms=1,
        progress_ms=progress_ms,
        assigned=assigned,
        version="0.1.0",
        session_timeout_ms=10_000,
    )


def test_members_join_tell_of_themselves_and_leave(servers: str, until: Until) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            changes: list[None] = []
            assert await read_members(one, "etl", lambda: changes.append(None)) == {}
            assert await join(one, "etl", member("one"), left=ignore) is None
            await until(lambda: changes)
            assert await join(two, "etl", member("two"), left=ignore) is None
            await beat(two, "etl", member("two", progress_ms=9, assigned=3))
            present = await read_members(one, "etl")
            assert (present["two"].progress_ms, present["two"].assigned) == (9, 3)
            assert present["one"].joined < present["two"].joined
            await leave(two, "etl", "one")  # not its own
            await leave(two, "etl", "two")
            await leave(two, "etl", "two")
            assert set(await read_members(one, "etl")) == {"one"}

    asyncio.run(scenario())


def test_a_consumer_id_in_use_is_told_of_until_it_is_free(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            assert await join(one, "etl", member("same"), left=ignore) is None
            assert await join(one, "etl", member("same"), left=ignore) is None
            left = asyncio.Event()
            other = await join(two, "etl", member("same"), left=left.set)
            assert other is not None
            assert other.host == "here"
            await leave(one, "etl", "same")
            await asyncio.wait_for(left.wait(), 60)
            assert await join(two, "etl", member("same"), left=left.set) is None

    asyncio.run(scenario())


def test_an_evicted_member_loses_its_partitions_though_its_session_lives(servers: str) -> None:
    items = [TopicPartition("flights", f"0-{index}") for index in range(3)]

    async def scenario() -> None:
        async with await Session.open(servers) as stuck, await Session.open(servers) as two:
            await join(stuck, "etl", member("stuck"), left=ignore)
            held = await asyncio.gather(*(claimed(stuck, "stuck", tp) for tp in items[:2]))
            other = await claimed(two, "two", items[2])
            assert await evict(two, "etl", "stuck") == items[:2]
            assert await read_members(two, "etl") == {}
            assert await owned_partitions(two, "etl") == {items[2]: "two"}
            await claimed(two, "two", items[0])
            with pytest.raises(OwnershipLost):
                await commit(stuck, held[0], 5, 1)
            await commit(two, other, 5, 1)
            with pytest.raises(ConfigError, match="no member 'nobody'"):
                await evict(two, "etl", "nobody")

    asyncio.run(scenario())


def test_what_an_evicted_member_lets_go_of_by_itself_is_freed_too(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as stuck, await Session.open(servers) as two:
            await join(stuck, "etl", member("stuck"), left=ignore)
            held = await claimed(stuck, "stuck")
            delete = two.delete

            async def delete_and_wait_for_the_member(path: str, version: int) -> None:
                await delete(path, version)
                await release(stuck, held)

            monkeypatch.setattr(two, "delete", delete_and_wait_for_the_member)
            assert await evict(two, "etl", "stuck") == [held.tp]
            assert await owned_partitions(two, "etl") == {}

    asyncio.run(scenario())


def test_an_owner_that_came_in_between_is_not_dropped(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            stale = await claimed(session, "one")
            stored = await read_offset(session, "etl", TP)
            assert stored is not None
            await claimed(session, "one")
            # What drop_owner sends, had it read before the second claim.
            path = session.paths.offset("etl", *TP)
            with pytest.raises(BadVersion):
                await session.multi(
                    [SetData(path, b"", stored[1]), Delete(session.paths.owner("etl", *TP), stale.version)]
                )
            assert not await drop_owner(session, "etl", TP, "two")
            assert await drop_owner(session, "etl", TP, "one")
            assert not await drop_owner(session, "etl", TP, "one")

    asyncio.run(scenario())


def test_nothing_of_a_claim_is_done_when_it_cannot_be_done_whole(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            await claimed(session, "one")
            owner = session.paths.owner("etl", *TP)
            await session.delete(owner, ANY_VERSION)
            with pytest.raises(BadVersion):
                await session.multi([Create(owner, ephemeral=True), SetData(session.paths.offset("etl", *TP), b"", 99)])
            assert await owned_partitions(session, "etl") == {}

    asyncio.run(scenario())
