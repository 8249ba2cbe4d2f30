"""The lease that the clients on one session share: one renewal and one timer, however many they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Self

from metamq.zk.session.lease import Lease

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.zk")

LOOK_S = 0.1
"""Seconds between two checks for a change."""

Changed = Callable[[bool], None]


class CommonLease(Lease):
    """A Lease that begins with its first client and ends with its last one."""

    def __init__(self, session: Session) -> None:
        """Internal: use `CommonLease.of`."""
        super().__init__(session)
        self._clients: list[Changed] = []
        self._refused: dict[Callable[[], None], None] = {}
        self._was_valid = True
        self._looking: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, session: Session) -> Self:
        """Returns the lease of a session. The client must join() it at once, before it waits for anything else."""
        lease: Self | None = session.common.get(cls)
        if lease is None:
            lease = session.common[cls] = cls(session.twin())
        return lease

    async def join(self, changed: Changed) -> None:
        """Takes the lease for one more client, which must leave() it before its session ends.

        `changed` is called in the loop when the lease ends (False), and when it is valid again (True). Raises
        ConnectionLost.
        """
        self._clients.append(changed)
        if not self.valid():
            await self.start()
        if self._looking is None:
            self._looking = Context().run(asyncio.create_task, self._look(), name="metamq-lease-check")

    async def leave(self, changed: Changed) -> None:
        """Ends the client's part, also after a join() that failed. `changed` is that of join(). May be repeated."""
        with contextlib.suppress(ValueError):
            self._clients.remove(changed)
        if self._clients or self._session.common.get(type(self)) is not self:
            return
        del self._session.common[type(self)]
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
        await self.close()
        await self._session.close()

    def call_when_valid(self, callback: Callable[[], None]) -> None:
        """Calls back once, in the loop, soon after the lease is valid. Thread-safe."""
        self._refused[callback] = None

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._look_once()
            except Exception:
                log.exception("a check of the lease failed; it continues")

    def _look_once(self) -> None:
        loop = asyncio.get_running_loop()
        valid = self.valid()
        if valid != self._was_valid:
            self._was_valid = valid
            for changed in self._clients:
                loop.call_soon(changed, valid)  # an error of one client ends nothing of the others
        while valid and self._refused:
            loop.call_soon(self._refused.popitem()[0])
