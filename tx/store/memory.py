"""What is remembered of branches that were committed, so that a repeated commit is answered as the first one was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from metamq.tx.store.records import Branch
from metamq.wire.xa import Xid

REMEMBERED_MAX = 100_000
REMEMBERED_US = 24 * 3600 * 1_000_000


class OutcomeMemory:
    """The newest `REMEMBERED_MAX` of the last 24 hours, of either whichever is less."""

    def __init__(self, most: int = REMEMBERED_MAX, age_us: int = REMEMBERED_US) -> None:
        self._most = most
        self._age_us = age_us
        self._known: OrderedDict[Xid, tuple[int, int]] = OrderedDict()
        """(epoch, when) by id, oldest first."""

    def __len__(self) -> int:
        return len(self._known)

    def add(self, branch: Branch, time_us: int) -> None:
        """The branch was committed then."""
        self._known.pop(branch.xid, None)
        self._known[branch.xid] = branch.epoch, time_us
        self.expire(time_us)

    def restore(self, remembered: Iterable[tuple[Branch, int]]) -> None:
        """Some of what is remembered, oldest first: their COMMITs may be gone from the journal."""
        for branch, time_us in remembered:
            self._known.setdefault(branch.xid, (branch.epoch, time_us))

    def epoch_of(self, xid: Xid) -> int | None:
        """Which use of the id was committed; None: it is not remembered."""
        known = self._known.get(xid)
        return known[0] if known is not None else None

    def expire(self, now_us: int) -> None:
        """Forgets what is too old, or too much."""
        known = self._known
        while known and (len(known) > self._most or next(iter(known.values()))[1] < now_us - self._age_us):
            known.popitem(last=False)

    def items(self) -> Iterator[tuple[Branch, int]]:
        """All of it, oldest first."""
        for xid, (epoch, time_us) in self._known.items():
            yield Branch(xid, epoch), time_us
