"""Holds back the requests of one connection while its principal is above its quota (metamq.security.quotas).

A request waits in the kernel, or unprocessed. A DELAY informs its client, so the client knows that the broker is alive.
The counted amounts, each with its time:

- a request, and the body of a small frame, when the request is begun
- a large frame when it begins to arrive. While the principal must wait, none is read, so waiting frames take no memory.
  Its request is begun as soon as the frame is complete
- the data of an answer when it is sent, since its size is not known before
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from metamq.wire.limits import DELAY_MS_MAX

if TYPE_CHECKING:
    from metamq.security.quotas import Meter, Quota, QuotaWait


class Throttle:
    """The waits of one connection. Used by the broker's loop only."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, begins: Callable[[QuotaWait], None], ends: Callable[[], None]
    ) -> None:
        """`begins` is called when a wait begins, `ends` when it is over: then call must_wait()."""
        self.meter: Meter | None = None
        """None if the principal has no quota."""
        self._quota: Quota | None = None
        self._loop = loop
        self._begins = begins
        self._ends = ends
        self._timer: asyncio.TimerHandle | None = None

    def take(self, limit: int, amount: int) -> None:
        """Counts an amount of use. `limit` as for Meter.take."""
        if self.meter is not None:
            self.meter.take(limit, amount, self._loop.time())

    def must_wait(self) -> bool:
        """True if the next request must wait until `ends` is called."""
        if self._timer is None and self.meter is not None:
            now_s = self._loop.time()
            wait = self.meter.wait(now_s)
            if wait is not None:
                wait = wait._replace(wait_s=min(wait.wait_s, DELAY_MS_MAX / 1000))
                self._timer = self._loop.call_at(now_s + wait.wait_s, self._over)
                self._begins(wait)
        return self._timer is not None

    def _over(self) -> None:
        self._timer = None
        self._ends()

    def change(self, meter: Meter | None) -> None:
        """Changes or removes the meter. If the quota has changed, a wait ends, and the next request checks again."""
        quota = meter.quota if meter is not None else None
        if meter is self.meter and quota == self._quota:
            return
        self.meter, self._quota = meter, quota
        if self._timer is not None:
            self.close()
            self._ends()

    def close(self) -> None:
        """Ends a wait without a call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
