"""The lease: until when this process may believe that its session with ZooKeeper lives.

Theory of operation. kazoo cannot be asked: cut off, it says SUSPENDED for ever, and its own thread keeps the session
alive while the event loop hangs. So the event loop itself sends a small request every sixth of the session time-out,
and the lease runs from the moment an *answered* request was *sent* for two thirds of the time-out. ZooKeeper counts
from when it received that request, which is later; the last third is for the step of its own clock, which ends
sessions in ticks, and for what the caller does between asking and acting.

The request is a `sync`, which goes through the leader: a follower that lost the leader still answers reads from
memory while the leader lets the session expire. Where the session's life is not all that counts, the caller asks the
rest after it, and a lease is only renewed by a yes: what is read then is no older than the `sync`.

The clock is CLOCK_BOOTTIME: it goes on while the machine sleeps, where CLOCK_MONOTONIC stands still on Linux.

A lease bounds, it does not prove: a process may be stopped between asking and acting. Safety never rests on it alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from metamq.errors import ClosedError
from metamq.zk.errors import ConnectionLost
from metamq.zk.session.session import Session, SessionState

_RENEWALS_PER_TIMEOUT = 6


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """What one answered request grants: in which session, when it was sent, under which time-out."""

    generation: int
    sent_ns: int
    timeout_ms: int

    @property
    def end_ns(self) -> int:
        """When the lease ends, on `now_ns`'s clock."""
        return self.sent_ns + self.timeout_ms * 1_000_000 * 2 // 3


def renewed(term: LeaseGrant | None, answered: LeaseGrant) -> LeaseGrant:
    """The lease after one more answer; answers may come in any order, and from a session that is over."""
    if term is None or answered.generation > term.generation:
        return answered
    if answered.generation < term.generation or answered.end_ns <= term.end_ns:
        return term
    return answered


def remaining_ns(term: LeaseGrant | None, generation: int, is_lost: bool, now_ns: int) -> int:
    """How long the lease of session `generation` is still valid at `now_ns`; 0 when it is not."""
    if term is None or is_lost or term.generation != generation:
        return 0
    return max(term.end_ns - now_ns, 0)


def now_ns() -> int:
    """Nanoseconds on the clock of leases, which also counts the time that the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock)


class Lease:
    """Renews itself in the session's event loop from `start` to `close`; an async context manager.

    `valid`, `over_s` and `remaining_ms` cost a clock reading and may be called from any thread. After LOST the lease is
    not valid until the next session is there and has answered; whoever registered something compares
    `session.generation`.
    """

    def __init__(self, session: Session, confirm: Callable[[], Awaitable[bool]] | None = None) -> None:
        """`confirm` asks what else is to hold for the lease to be renewed; it may raise ConnectionLost."""
        self._session = session
        self._confirm = confirm
        self._term: LeaseGrant | None = None
        self._beginning = 0
        """How often it was begun anew."""
        self._timer: asyncio.Task[None] | None = None
        self._renewals: set[asyncio.Task[None]] = set()

    def valid(self) -> bool:
        """Whether the session lives, and what else was to be confirmed holds, as far as clocks can tell."""
        return self._remaining_ns() > 0

    def over_s(self) -> float | None:
        """For how many seconds it has not been valid; None while it is."""
        if self.valid():
            return None
        return 0.0 if self._term is None else max((now_ns() - self._term.end_ns) / 1e9, 0.0)

    def remaining_ms(self) -> int:
        """For how many milliseconds yet, rounded down; 0 when it is not valid."""
        return self._remaining_ns() // 1_000_000

    def _remaining_ns(self) -> int:
        is_lost = self._session.state is SessionState.LOST
        return remaining_ns(self._term, self._session.generation, is_lost, now_ns())

    async def start(self) -> None:
        """Take the lease, with one request, and keep renewing it. Raises ConnectionLost; then it is not started."""
        await self._renew()
        if self._timer is None:
            self._timer = asyncio.create_task(self._run(), name="metamq-lease")

    async def begin_anew(self) -> None:
        """What is to hold is something else from now on: what was confirmed before, or is being confirmed, does not
        count. Waits for one answer, not for long; without it, the lease is valid once a later one is there."""
        self._term = None
        self._beginning += 1
        await asyncio.wait({self._begin_renewal()}, timeout=self._interval_s)

    async def close(self) -> None:
        """Stop renewing; the lease is not valid from now on. May be repeated."""
        self._term = None
        tasks = [task for task in (self._timer, *self._renewals) if task is not None]
        self._timer = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._term = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self) -> None:
        woken = asyncio.Event()
        remove = self._session.on_state(lambda _: woken.set())
        try:
            while not self._session.closed:
                # A request that waits for its answer must not keep back the next one, which may be answered sooner.
                self._begin_renewal()
                woken.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await woken.wait()
        finally:
            remove()

    @property
    def _interval_s(self) -> float:
        return self._session.negotiated_timeout_ms / 1000 / _RENEWALS_PER_TIMEOUT

    def _begin_renewal(self) -> asyncio.Task[None]:
        renewal = asyncio.create_task(self._renew_or_wait())
        self._renewals.add(renewal)
        renewal.add_done_callback(self._renewals.discard)
        return renewal

    async def _renew_or_wait(self) -> None:
        with contextlib.suppress(ConnectionLost, ClosedError):
            await self._renew()

    async def _renew(self) -> None:
        generation, timeout_ms, sent_ns = self._session.generation, self._session.negotiated_timeout_ms, now_ns()
        beginning = self._beginning
        await self._session.sync()
        is_confirmed = self._confirm is None or await self._confirm()
        if is_confirmed and beginning == self._beginning:
            self._term = renewed(self._term, LeaseGrant(generation, sent_ns, timeout_ms))
