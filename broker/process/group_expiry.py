"""Removes the offsets of groups that no consumer has used for the time of the setting `group_expiry_s`."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from metamq.broker.log_once import LogOnce
from metamq.broker.roles.role import MasterRole
from metamq.errors import MetamqError
from metamq.words import count
from metamq.zk.groups.expiry import look_after

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

INTERVAL_S_MAX = 6 * 3600.0
INTERVALS = 20
"""Looks at a group in the time of its expiry."""


class GroupExpiry:
    """A task in the broker's loop. Each master looks at all groups: two that look at one group do no harm."""

    def __init__(self, session: Session, status: ReplicaStatus, config: BrokerConfig) -> None:
        self._session = session
        self._status = status
        self._expiry_s = config.group_expiry_s
        self._log_once = LogOnce()

    async def run(self) -> None:
        """Looks at intervals until cancelled."""
        interval_s = min(self._expiry_s / INTERVALS, INTERVAL_S_MAX)
        while self._expiry_s:
            await asyncio.sleep(interval_s * random.uniform(0.5, 1))  # brokers that start together spread
            if not isinstance(self._status.role, MasterRole):
                continue
            try:
                await self._round()
                self._log_once.worked("unused groups are looked for again")
            except MetamqError as error:
                self._log_once.failed("unused groups are not looked for now", error)
            except Exception:  # groups must not end a broker
                log.exception("unused groups cannot be looked for")

    async def _round(self) -> None:
        for group in sorted(await self._session.children_or_none(self._session.paths.groups()) or []):
            state, offsets = await look_after(self._session, group, int(self._expiry_s * 1000))
            if state == "marked":
                log.info("group %s has no members: without one its offsets expire in %.0f s", group, self._expiry_s)
            elif state == "removed":
                log.warning(
                    "group %s was not used for %.0f s (group_expiry_s): its offsets of %s are removed",
                    group, self._expiry_s, count(offsets, "partition"),
                )  # fmt: skip
