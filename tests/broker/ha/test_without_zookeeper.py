"""A master whose ZooKeeper does not answer, and its slaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.broker.ha.test_service import Slave, a_master, turns


def test_without_zookeeper_a_slave_joins_and_is_not_asked_for(tmp_path: Path) -> None:
    """A request without an answer might have an effect later: then the slave could be promoted."""

    async def scenario(make: Callable[[], Awaitable[Any]]) -> None:
        master = await make()
        slave = Slave(master.service)
        slave.attach()
        master.append()
        await turns()
        assert master.service.nobody_can_take_over
        master.may_ask = False
        slave.acknowledges(0)
        master.append()
        await turns()
        slave.acknowledges(slave.sent_seq)
        master.after(0)
        await turns()
        assert (master.asked, master.stable) == ([], 2), "its acknowledgement counts"
        assert not master.service.alone
        assert master.service.nobody_can_take_over
        master.answers.clear()
        master.may_ask = True
        master.after(0)
        await turns()
        assert [change.members for change in master.asked] == [{(0, 1), (1, 7)}]
        assert not master.service.nobody_can_take_over

    with a_master(tmp_path) as (_, make):
        asyncio.run(scenario(make))
