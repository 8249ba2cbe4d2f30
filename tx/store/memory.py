"""What is remembered of branches that were committed, so that a repeated commit is answered as the first one was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from metamq.tx.store.records import BranchKey, Outcome, epoch_and_time, pack_id, pack_outcome
from metamq.wire.xa import Xid

REMEMBERED_MAX = 100_000
REMEMBERED_US = 24 * 3600 * 1_000_000


class OutcomeMemory:
    """The newest `REMEMBERED_MAX` of the last 24 hours, of either whichever is less.

    Bytes by bytes, as the journal has them: Python's garbage collector looks at every tuple again and again.
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
        """The branch was committed then."""
        xid, rest = pack_outcome(branch, time_us)
        self._known.pop(xid, None)
        self._known[xid] = rest
        self.expire(time_us)

    def restore(self, remembered: Iterable[Outcome]) -> None:
        """Some of what is remembered, as it was at that place of the journal: their COMMITs may be gone from it, and
        newer ones stand before that place. Who has written it down knows all of it, but for what it forgot since."""
        known, forgotten_us = self._known, -1
        if self._in_order and len(known) >= self._most:
            forgotten_us = _time_of(next(iter(known.items())))
        for outcome in remembered:
            xid, rest = outcome
            if xid not in known and _time_of(outcome) > forgotten_us:
                known[xid] = rest
                self._in_order = False

    def epoch_of(self, xid: Xid) -> int | None:
        """Which use of the id was committed; None: it is not remembered."""
        if not self._known:
            return None
        rest = self._known.get(pack_id(xid))
        return epoch_and_time(rest)[0] if rest is not None else None

    def expire(self, now_us: int) -> None:
        """Forgets what is too old, or too much."""
        self._put_in_order()
        known = self._known
        while known and (
            len(known) > self._most or epoch_and_time(next(iter(known.values())))[1] < now_us - self._age_us
        ):
            known.popitem(last=False)

    def items(self) -> Iterable[Outcome]:
        """All of it, oldest first."""
        self._put_in_order()
        return self._known.items()

    def _put_in_order(self) -> None:
        if not self._in_order:
            self._known = OrderedDict(sorted(self._known.items(), key=_time_of))
            self._in_order = True


def _time_of(outcome: Outcome) -> int:
    return epoch_and_time(outcome[1])[1]
