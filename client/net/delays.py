"""Delays: a broker holds back the requests of a connection while the client is above its quota.

Meanwhile it informs the client at least once in DELAY_MS_MAX. So the client knows that the broker is alive, and begins
to measure the time-outs of its requests when the delay ends.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from metamq.wire.commands import Delay
from metamq.wire.headers import unpack
from metamq.wire.limits import DELAY_MS_MAX

log = logging.getLogger("metamq.client")

WARN_EVERY_S = 60.0


class Delays:
    """The delays of one connection. Not thread-safe; any thread may read `ends_at_s` and `reason`."""

    def __init__(self, address: str) -> None:
        self.ends_at_s = 0.0
        """The end of the last delay, as time.monotonic(). It may be in the past."""
        self.reason = ""
        """The reason of the last delay, for errors."""
        self._address = address
        self._warn_at_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the delay ends; 0 without a delay."""
        return max(self.ends_at_s - time.monotonic(), 0.0)

    def received(self, header: Any) -> None:
        """Notes a DELAY of the broker. Raises ProtocolError."""
        delay = unpack(Delay, header)
        now_s = time.monotonic()
        self.ends_at_s = now_s + min(max(delay.wait_ms, 0), DELAY_MS_MAX) / 1000
        self.reason = f"the broker delays requests: this client is above its quota, {delay.limit} {delay.per_second:,}"
        if now_s >= self._warn_at_s:
            self._warn_at_s = now_s + WARN_EVERY_S
            log.warning("%s: %s (logged once a minute)", self._address, self.reason)
