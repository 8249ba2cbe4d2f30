"""The memory of committed branches: a repeated commit gets the answer of the first one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from metamq.tx.store.records import BranchKey, Outcome, epoch_and_time, pack_id, pack_outcome

if TYPE_CHECKING:
    from metamq.wire.xa import Xid

REMEMBERED_MAX = 100_000
REMEMBERED_US = 24 * 3600 * 1_000_000


class OutcomeMemory:
    """The newest `REMEMBERED_MAX` outcomes of the last 24 hours.

    Outcomes are kept as bytes, as in the journal: Python's garbage collector visits every tuple again and again.
    """

    def __init__(self, most: int = REMEMBERED_MAX, age_us: int = REMEMBERED_US) -> None:
        self._most = most
        self._age_us = age_us
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        """Outcomes, oldest first if `_in_order`."""
        self._in_order = True

    def __len__(self) -> int:
        return len(self._known)

    def add(self, branch: BranchKey, time_us: int) -> None:
        """Remembers that the branch was committed at that time."""
        xid, rest = pack_outcome(branch, time_us)
        self._known.pop(xid, None)
        self._known[xid] = rest
        self.expire(time_us)

    def restore(self, remembered: Iterable[Outcome]) -> None:
        """Adds outcomes from a REMEMBERED record. Their COMMITs may be gone from the journal, and newer COMMITs may be
        before that record. The writer of the record wrote all outcomes that it still remembered."""
        known, forgotten_us = self._known, -1
        if self._in_order and len(known) >= self._most:
            forgotten_us = _time_of(next(iter(known.items())))
        for outcome in remembered:
            xid, rest = outcome
            if xid not in known and _time_of(outcome) > forgotten_us:
                known[xid] = rest
                self._in_order = False

    def epoch_of(self, xid: Xid) -> int | None:
        """Returns the epoch of the id's committed use, or None if it is not remembered."""
        if not self._known:
            return None
        rest = self._known.get(pack_id(xid))
        return epoch_and_time(rest)[0] if rest is not None else None

    def expire(self, now_us: int) -> None:
        """Forgets outcomes that are too old or too many."""
        self._put_in_order()
        known = self._known
        while known and (
            len(known) > self._most or epoch_and_time(next(iter(known.values())))[1] < now_us - self._age_us
        ):
            known.popitem(last=False)

    def items(self) -> Iterable[Outcome]:
        """Returns all outcomes, oldest first."""
        self._put_in_order()
        return self._known.items()

    def _put_in_order(self) -> None:
        if not self._in_order:
            self._known = OrderedDict(sorted(self._known.items(), key=_time_of))
            self._in_order = True


def _time_of(outcome: Outcome) -> int:
    return epoch_and_time(outcome[1])[1]
