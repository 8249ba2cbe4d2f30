"""The updates of the members' nodes, for all members on one session at once: a hundred of them in a transaction.

A write of its own costs ZooKeeper twenty times as much, and a process may have thousands of members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from metamq.zk.groups.together import beat_all

if TYPE_CHECKING:
    from metamq.errors import MetamqError
    from metamq.zk.groups.members import Member
    from metamq.zk.session.session import Session


class News(NamedTuple):
    """The content for a member's node. `done` is called when it is written, or with the error."""

    group: str
    member: Member
    done: Callable[[MetamqError | None], None]


Ask = Callable[[], News | None]
"""Returns a member's news; None if its node has them."""


class Beats:
    """The members on one session. Use it in the loop."""

    def __init__(self, session: Session, every_s: float) -> None:
        """Internal: use `Beats.begin`."""
        self._session = session.twin()
        self._every_s = every_s
        self._members: list[Ask] = []
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def begin(cls, session: Session, ask: Ask, every_s: float) -> Callable[[], None]:
        """Writes a member's news every `every_s` seconds. The returned function ends this."""
        beats: Beats | None = session.common.get(cls)
        if beats is None:
            beats = session.common[cls] = cls(session, every_s)
        return beats._begin(ask)

    def _begin(self, ask: Ask) -> Callable[[], None]:
        self._members.append(ask)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="metamq-beats")
        return lambda: self._end(ask)

    def _end(self, ask: Ask) -> None:
        if ask in self._members:
            self._members.remove(ask)
        if not self._members and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await write_news(self._session, [found for ask in self._members if (found := ask()) is not None])


async def write_news(session: Session, news: Sequence[News]) -> None:
    """Writes all of them."""
    outcomes = await beat_all(session, [(one.group, one.member) for one in news])
    for one, outcome in zip(news, outcomes, strict=True):
        one.done(outcome)
