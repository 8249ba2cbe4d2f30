"""The lease: the time until which this process may assume that its session with ZooKeeper is alive.

Theory of operation. kazoo cannot answer this: without a connection it stays SUSPENDED without end, and its own thread
keeps the session alive while the event loop hangs. So the event loop itself sends a small request every sixth of the
session time-out. The lease runs from the moment when an *answered* request was *sent*, for two thirds of the time-out.
ZooKeeper counts from the moment when it received that request, which is later. The last third is for the granularity of
its clock, which ends sessions in ticks, and for the caller's work between the check and the action.

The request is a `sync`, which goes through the leader: a follower that lost the leader still answers reads from memory
while the leader lets the session expire. If the caller needs more than a live session, its `confirm` checks that after
the `sync`, and the lease is renewed only if it agrees: these reads are not older than the `sync`.

The clock is CLOCK_BOOTTIME, which continues while the machine sleeps; CLOCK_MONOTONIC stops then on Linux.

A lease is a bound, not a proof: a process may be stopped between the check and the action. So safety never depends on
the lease alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from metamq.errors import ClosedError
from metamq.zk.errors import ConnectionLost
from metamq.zk.session.session import Session, SessionState

_RENEWALS_PER_TIMEOUT = 6


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The grant of one answered request: the session, the time when it was sent, the session's time-out."""

    generation: int
    sent_ns: int
    timeout_ms: int

    @property
    def end_ns(self) -> int:
        """The end of the lease, on `now_ns`'s clock."""
        return self.sent_ns + self.timeout_ms * 1_000_000 * 2 // 3


def renewed(grant: LeaseGrant | None, answered: LeaseGrant) -> LeaseGrant:
    """The lease after one more answer. Answers may come in any order, and from a session that is over."""
    if grant is None or answered.generation > grant.generation:
        return answered
    if answered.generation < grant.generation or answered.end_ns <= grant.end_ns:
        return grant
    return answered


def remaining_ns(grant: LeaseGrant | None, generation: int, is_lost: bool, now_ns: int) -> int:
    """Nanoseconds for which the lease of session `generation` is still valid at `now_ns`; 0 if it is not valid."""
    if grant is None or is_lost or grant.generation != generation:
        return 0
    return max(grant.end_ns - now_ns, 0)


def now_ns() -> int:
    """Nanoseconds on the clock of leases, which includes the machine's sleep if the system has such a clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock)


class Lease:
    """Renews itself in the session's event loop from `start` to `close`; an async context manager.

    `valid`, `over_s` and `remaining_ms` cost a clock reading, and any thread may call them. After LOST the lease is
    invalid until the next session exists and has answered. A caller that registered something must compare
    `session.generation`.

    A caller may use the lease longer while it knows that no other process can take its place. Such a *longer lease*
    does not need the session. It ends at once if an answer of ZooKeeper, or the caller, refutes the conditions.
    """

    def __init__(
        self,
        session: Session,
        confirm: Callable[[], Awaitable[bool]] | None = None,
        refuted: Callable[[], None] = lambda: None,
    ) -> None:
        """`confirm` checks the other conditions for a renewal of the lease; it may raise ConnectionLost. `refuted` is
        called when it returns False, and by refute()."""
        self._session = session
        self._confirm = confirm
        self._refuted = refuted
        self._is_refuted = False
        self._grant: LeaseGrant | None = None
        self._beginning = 0
        """Number of calls of begin_again()."""
        self._timer: asyncio.Task[None] | None = None
        self._renewals: set[asyncio.Task[None]] = set()

    def valid(self, longer_s: float = 0.0) -> bool:
        """True if the session is alive and the confirmed conditions hold, as far as clocks can show.

        `longer_s` is the length of a longer lease, in seconds; 0 is none.
        """
        if self._remaining_ns() > 0:
            return True
        grant = self._grant
        if grant is None or longer_s == 0 or self._is_refuted:
            return False
        return now_ns() < grant.end_ns + longer_s * 1e9

    def refute(self) -> None:
        """Ends a longer lease: the conditions may not hold any more. The lease itself is not renewed until they do."""
        self._is_refuted = True
        self._refuted()

    def over_s(self) -> float | None:
        """Seconds since it became invalid; None while it is valid."""
        grant = self._grant
        if self.valid():
            return None
        return 0.0 if grant is None else max((now_ns() - grant.end_ns) / 1e9, 0.0)

    def remaining_ms(self) -> int:
        """Milliseconds for which it is still valid, rounded down; 0 if it is not."""
        return self._remaining_ns() // 1_000_000

    def _remaining_ns(self) -> int:
        is_lost = self._session.state is SessionState.LOST
        return remaining_ns(self._grant, self._session.generation, is_lost, now_ns())

    async def start(self) -> None:
        """Takes the lease, with one request, and keeps renewing it. Raises ConnectionLost; then it is not started."""
        await self._renew()
        if self._timer is None:
            # No part of the trace of the client that began it.
            self._timer = Context().run(asyncio.create_task, self._run(), name="metamq-lease")

    async def begin_again(self) -> None:
        """Starts again with other conditions: earlier and running confirmations no longer count. Waits for one answer,
        for a short time; without an answer the lease becomes valid with a later one."""
        self._grant = None
        self._beginning += 1
        await asyncio.wait({self._begin_renewal()}, timeout=self._interval_s)

    async def close(self) -> None:
        """Stops renewing; the lease is invalid from now on. A second call does nothing."""
        self._grant = None
        tasks = [task for task in (self._timer, *self._renewals) if task is not None]
        self._timer = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._grant = None

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
                # A request that waits for its answer must not block the next one, which may be answered sooner.
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
        await self._session.sync(is_urgent=True)
        is_confirmed = self._confirm is None or await self._confirm()
        if not is_confirmed:
            self.refute()
        elif beginning == self._beginning:
            self._grant = renewed(self._grant, LeaseGrant(generation, sent_ns, timeout_ms))
            self._is_refuted = False
