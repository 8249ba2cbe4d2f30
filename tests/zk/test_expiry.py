"""The offsets of unused groups expire, those of used groups never, whatever happens at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from metamq.zk.groups import expiry
from metamq.zk.groups.expiry import look_after
from metamq.zk.groups.members import Member, join, leave
from metamq.zk.groups.ownership import CommittedOffset, Ownership, claim, read_offset, release, reset_offset
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.session import Session

TP = TopicPartition("flights", "0-3")
MEMBER = Member("one", ("flights",), "range", "host", 1, 0, 0, 0, "0.1.0", 10_000)
DAY_MS = 86_400_000


def ignore() -> None:
    pass


async def use(session: Session, group: str = "etl", tp: TopicPartition = TP) -> None:
    """A consumer claims the partition, commits and leaves."""
    owned = await claim(session, group, tp, "an-id", "one", freed=ignore)
    assert isinstance(owned, Ownership)
    await release(session, owned, (200, 1))


async def state(session: Session, expiry_ms: int = 0) -> str:
    return (await look_after(session, "etl", expiry_ms))[0]


def test_an_unused_group_is_marked_and_removed_when_the_time_is_over(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one:
            await join(one, "etl", MEMBER, left=ignore)
            await use(one)
            await use(one, tp=TopicPartition("flights", "0-4"))
            await use(one, tp=TopicPartition("orders", "0-0"))
            assert await state(one) == "used"
            await leave(one, "etl", "one")
            assert await state(one) == "marked"
            assert [await state(one, DAY_MS) for _ in range(3)] == ["unused"] * 3
            assert await look_after(one, "etl", 0) == ("removed", 3)
            assert await one.exists(one.paths.group("etl")) is None
            await use(one)  # a consumer that comes later begins as in a new group

    asyncio.run(scenario())


def test_a_member_a_claim_or_a_reset_ends_the_time(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one:
            await use(one)
            assert await state(one) == "marked"
            await join(one, "etl", MEMBER, left=ignore)
            await leave(one, "etl", "one")
            assert await state(one) == "marked", "it had a member since: the time begins again"
            owned = await claim(one, "etl", TP, "an-id", "one", freed=ignore)
            assert isinstance(owned, Ownership)
            assert await state(one) == "used", "a consumer of fixed partitions is no member"
            await release(one, owned)
            assert [await state(one), await state(one)] == ["used", "marked"]
            await reset_offset(one, "etl", TP, CommittedOffset(7, 1, "an-id"))
            assert [await state(one), await state(one), await state(one)] == ["used", "marked", "removed"]

    asyncio.run(scenario())


def test_settled_dead_letters_stay(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as one:
            await use(one)
            await one.create(one.paths.settled_letters("etl"), b"{}")
            assert [await state(one), await state(one)] == ["marked", "removed"]
            assert await one.children(one.paths.group("etl")) == ["settled"]

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["joins", "claims", "resets"])
@pytest.mark.parametrize("delete_bytes_max", [expiry.DELETE_BYTES_MAX, 150])
def test_a_consumer_or_a_reset_during_the_removal_keeps_the_offsets(
    servers: str, monkeypatch: pytest.MonkeyPatch, what: str, delete_bytes_max: int
) -> None:
    """It comes between the listing of the nodes and the first transaction."""
    monkeypatch.setattr(expiry, "DELETE_BYTES_MAX", delete_bytes_max)

    async def scenario() -> None:
        async with await Session.open(servers) as one, await Session.open(servers) as two:
            await join(one, "etl", MEMBER, left=ignore)
            await use(one)
            await leave(one, "etl", "one")
            assert await state(one) == "marked"
            listed = expiry._nodes

            async def listed_and_then(*arguments: object, **named: object) -> object:
                found = await listed(*arguments, **named)  # type: ignore[arg-type]
                if what == "joins":
                    await join(two, "etl", replace(MEMBER, consumer_id="two"), left=ignore)
                elif what == "claims":
                    await claim(two, "etl", TP, "an-id", "two", freed=ignore)
                else:
                    await reset_offset(two, "etl", TP, CommittedOffset(200, 1, "an-id"))
                return found

            monkeypatch.setattr(expiry, "_nodes", listed_and_then)
            assert await state(one) == "unused"
            stored = await read_offset(one, "etl", TP)
            assert stored is not None
            assert stored[0].committed == CommittedOffset(200, 1, "an-id")

    asyncio.run(scenario())


def test_a_large_group_is_removed_in_steps(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "DELETE_BYTES_MAX", 1000)
    monkeypatch.setattr(expiry, "READS_AT_ONCE", 7)

    async def scenario() -> None:
        async with await Session.open(servers) as one:
            for number in range(40):
                await use(one, tp=TopicPartition("flights", f"0-{number}"))
            assert await state(one) == "marked"
            assert await look_after(one, "etl", 0) == ("removed", 40)
            assert await one.exists(one.paths.group("etl")) is None

    asyncio.run(scenario())
