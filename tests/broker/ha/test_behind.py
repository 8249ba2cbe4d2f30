"""How long a slave that is behind holds writes up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.ha.attempts import PAUSE_FIRST_S, PAUSE_MAX_S, LinkAttempts
from metamq.wire import sync
from tests.broker.ha.test_service import EPOCH, LAG_S, Slave, a_master, in_sync, turns


def test_a_slave_that_says_it_stops_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = await in_sync(master)
        slave.says(sync.Leave(sync.LEAVE, EPOCH))
        await turns()
        assert [change.members for change in master.asked[1:]] == [{(0, 1)}]
        assert master.stable == 1
        slave.acknowledges(slave.sent_seq)
        master.after(0)
        master.service.closed_by_slave(slave.link, "it stops")
        await turns()
        assert len(master.asked) == 2, "and does not come in again"

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


@pytest.mark.parametrize("seen", ["linked", "away"])
@pytest.mark.parametrize("stores", [True, False])
def test_a_slave_that_links_again_and_again_and_stores_nothing_leaves_the_in_sync_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: bool, seen: str
) -> None:
    """Its disk is full: each link ends at the first message. The time counts across its links, long or short."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        loop = asyncio.get_running_loop()
        elapsed_s, time_s = 0.0, loop.time
        monkeypatch.setattr(loop, "time", lambda: time_s() + elapsed_s)
        master = await make()
        slave = await in_sync(master)
        for _ in range(12):
            master.service.closed_by_slave(slave.link, "its disk is full")
            if seen == "away":
                master.service.tick(loop.time())
            slave = Slave(master.service)
            slave.attach()
            await turns()  # all is copied to it
            if stores or seen == "linked":
                master.service.tick(loop.time())
            if stores:
                end = master.partition.log.end_position
                slave.says(sync.Ack(sync.ACK, EPOCH, 0, 0, [(1, end, end)]))
                master.service.tick(loop.time())
            master.append()
            elapsed_s += LAG_S / 10
            await turns()
        assert ((1, 7) in master.service.membership.insync) is stores
        assert master.stable >= 10

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))


def test_the_pause_between_links_grows_until_a_link_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pauses(links_s: list[float]) -> list[float]:
        loop = asyncio.get_running_loop()
        elapsed_s, time_s = 0.0, loop.time
        monkeypatch.setattr(loop, "time", lambda: time_s() + elapsed_s)
        attempts, following = LinkAttempts(), []
        for link_s in links_s:
            attempts.linked()
            elapsed_s += link_s
            await attempts.pause()
            following.append(attempts._pause_s / PAUSE_FIRST_S)
        return following

    assert asyncio.run(pauses([0.0, 0.0, 2 * PAUSE_MAX_S])) == [2, 4, 2]


def test_a_slave_that_closed_its_link_is_waited_for_a_fifth_of_the_time(tmp_path: Path) -> None:
    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = await in_sync(master)
        master.service.closed_by_slave(slave.link, "it was killed")
        master.after(LAG_S / 5 * 0.8)
        await turns()
        assert (master.stable, len(master.asked)) == (0, 1)
        master.after(LAG_S / 5 + 1)
        await turns()
        assert (master.stable, len(master.asked)) == (1, 2)

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(scenario(make))
