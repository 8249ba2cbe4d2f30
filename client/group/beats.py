"""The updates of the members' nodes, for all members on one session at once: a hundred of them in a transaction.

A write of its own costs ZooKeeper twenty times as much, and a process may have thousands of members.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, NamedTuple

from metamq.zk.groups.together import beat_all

if TYPE_CHECKING:
    from metamq.errors import MetamqError
    from metamq.zk.groups.members import Member
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.client")


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
            self._task = Context().run(asyncio.create_task, self._run(), name="metamq-beats")
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
            try:
                news = [_news_of(ask) for ask in self._members]
                await write_news(self._session, [found for found in news if found is not None])
            except Exception:
                log.exception("the nodes of this process's group members are not updated")


def _news_of(ask: Ask) -> News | None:
    try:
        return ask()
    except Exception:  # of one member: the others continue
        log.exception("the node of a group member is not updated")
        return None


async def write_news(session: Session, news: Sequence[News]) -> None:
    """Writes all of them. An error of one `done` is logged."""
    outcomes = await beat_all(session, [(one.group, one.member) for one in news])
    for one, outcome in zip(news, outcomes, strict=True):
        try:
            one.done(outcome)
        except Exception:
            log.exception("group %s: the update of %s failed", one.group, one.member.consumer_id)
