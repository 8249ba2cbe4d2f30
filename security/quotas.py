"""Quotas: limits on the bytes and requests of a principal at one broker, per second. Without I/O.

A quota delays requests, and refuses none. After more use than the quota allows, the broker begins no request of the
principal until the average is within the quota. A Meter keeps the time at which all past use is paid for:

    take(n)    paid_at = max(paid_at, now - BURST_S) + n / limit        for each of the three limits
    wait       paid_at - now, if that is at least WAIT_LEAST_S          of the limit with the longest wait

A request begins when nothing is left to pay. It is then finished, however large it is. So in any T seconds a principal
uses at most `limit` x (T + BURST_S + WAIT_LEAST_S), plus the requests in progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakValueDictionary

from metamq.errors import ConfigError
from metamq.security.names import check_name
from metamq.security.rights import ANY_PRINCIPAL, SUPERUSERS

BURST_S = 1.0
"""The time for which an unused quota is kept."""
WAIT_LEAST_S = 0.02
"""A shorter wait is postponed, to keep the number of waits small."""
QUOTAS_MAX = 1000
LIMIT_MAX = 1 << 50


class Quota(NamedTuple):
    """Limits of one principal at one broker; 0: none."""

    write_bytes_s: int = 0
    """Bytes of messages that it sends per second, in frames of PUT and TX."""
    read_bytes_s: int = 0
    """Bytes of messages that it receives per second, in answers to GET."""
    requests_s: int = 0
    """Requests of all kinds per second."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {limit:,}" for name, limit in self._asdict().items() if limit) or "none"


WRITE_BYTES, READ_BYTES, REQUESTS = range(3)
"""The places of the limits in a Quota."""
NO_QUOTA = Quota()
Quotas = Mapping[str, Quota]
"""The quota of each principal; ANY_PRINCIPAL is the quota of each principal without its own."""


class QuotaWait(NamedTuple):
    """The time that a principal must wait, and why."""

    wait_s: float
    limit: str
    """The name of the limit, a field of Quota."""
    per_second: int


class Meter:
    """The use of one principal at one broker. For one loop. All times are seconds of one clock."""

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self._paid_at_s = [0.0] * len(quota)

    def take(self, limit: int, amount: int, now_s: float) -> None:
        """Counts an amount of use. `limit` is WRITE_BYTES, READ_BYTES or REQUESTS."""
        if per_second := self.quota[limit]:
            self._paid_at_s[limit] = max(self._paid_at_s[limit], now_s - BURST_S) + amount / per_second

    def wait(self, now_s: float) -> QuotaWait | None:
        """Returns the time that the principal must wait before its next request, or None if it must not wait."""
        wait_s, limit = max((self._paid_at_s[limit] - now_s, limit) for limit, it in enumerate(self.quota) if it)
        if wait_s < WAIT_LEAST_S:
            return None
        return QuotaWait(wait_s, Quota._fields[limit], self.quota[limit])

    def change(self, quota: Quota, now_s: float) -> None:
        """Changes the quota. The debt in bytes or requests stays the same, so a larger limit pays it sooner."""
        for limit, (before, after) in enumerate(zip(self.quota, quota, strict=True)):
            debt_s = max(self._paid_at_s[limit] - now_s, 0.0)
            self._paid_at_s[limit] = now_s + debt_s * before / after if debt_s and after else 0.0
        self.quota = quota

    def is_paid(self, now_s: float) -> bool:
        """True if forgetting the meter changes nothing."""
        return max(self._paid_at_s) <= now_s - BURST_S


class Meters:
    """The meters of all principals at one broker. A meter outlives its principal's connections. For one loop."""

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}
        self._in_use: WeakValueDictionary[str, Meter] = WeakValueDictionary()
        """The meters of open connections, including forgotten ones."""
        self._forget_above = METERS_KEPT

    def find(self, principal: str, quotas: Quotas, now_s: float) -> Meter | None:
        """Returns the meter of a principal with its present quota, or None if it has no quota."""
        quota = quota_of(quotas, principal)
        if quota == NO_QUOTA:
            self._meters.pop(principal, None)
            self._in_use.pop(principal, None)
            return None
        meter = self._in_use.get(principal) or Meter(quota)
        if principal not in self._meters and len(self._meters) >= self._forget_above:
            self._forget(now_s)
        self._meters[principal] = self._in_use[principal] = meter
        if meter.quota != quota:
            meter.change(quota, now_s)
        return meter

    def _forget(self, now_s: float) -> None:
        self._meters = {name: meter for name, meter in self._meters.items() if not meter.is_paid(now_s)}
        self._forget_above = max(METERS_KEPT, 2 * len(self._meters))


METERS_KEPT = 1000


def quota_of(quotas: Quotas, principal: str) -> Quota:
    """Returns the principal's own quota, or else the quota for all principals."""
    if not principal or principal in SUPERUSERS:
        return NO_QUOTA
    return quotas.get(principal) or quotas.get(ANY_PRINCIPAL, NO_QUOTA)


def check_quota(principal: str, quota: Quota) -> None:
    """Raises ConfigError if the quota cannot be set."""
    if not isinstance(principal, str):
        raise ConfigError(f"the principal is {principal!r}", hint="Give the name of a user or of a certificate.")
    if principal != ANY_PRINCIPAL:
        check_name(principal)
    if principal in SUPERUSERS:
        raise ConfigError(f"{principal!r} never has a quota", hint="Give the program another certificate.")
    for name, limit in quota._asdict().items():
        if type(limit) is not int or not 0 <= limit <= LIMIT_MAX:
            hint = f"It is a whole number from 1 to {LIMIT_MAX:,}, or 0 for no limit."
            raise ConfigError(f"{name} is {limit!r}"[:80], hint=hint)
    if quota == NO_QUOTA:
        raise ConfigError(
            f"the quota of {principal!r} has no limit", hint="Set one, or remove the quota: `metamq quota remove`."
        )
