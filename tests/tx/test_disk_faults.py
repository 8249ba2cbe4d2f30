"""The n-th write, fsync, rename, open, removal or cut of a broker's journal and logs fails, for every n."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable

import pytest

from metamq.errors import MetamqError
from tests.tx.crash_history import Ended, History, Violation, check, copy_of, unfold
from tests.tx.sim_disk import DiskOs, modelled_disk, power_cuts

pytestmark = pytest.mark.timeout(600)  # thousands of recoveries
ERRORS: list[int | None] = [errno.EIO, errno.ENOSPC, None]
"""None: a write that is cut short, and the next one finds the disk full."""


class FailingCall:
    """Fails one call, and no other."""

    def __init__(self, number: int, kind: int | None) -> None:
        self.calls = 0
        self.what = ""
        self._number = number
        self.kind = kind
        self._full = False

    def __call__(self, call: str) -> OSError | int | None:
        self.calls += 1
        if self._full and call == "write":
            self._full = False
            return OSError(errno.ENOSPC, "No space left on device")
        if self.calls != self._number:
            return None
        self.what = call
        if self.kind is None and call == "write":
            self._full = True
            return 30
        return OSError(self.kind or errno.EIO, "a fault that was planted")


def lived(own: DiskOs, fault: FailingCall) -> History:
    """A broker that began, and did what it could."""
    own.fault = fault
    history: History | None = None
    try:
        history = History(own, noting=False)
        history.may_refuse = fault.kind != errno.EIO
        unfold(history)
    except (Ended, MetamqError):
        assert fault.what
    finally:
        own.fault = lambda call: None
    return history or History(own, noting=False)  # it could not even begin


def count_calls(own: DiskOs) -> int:
    fault = FailingCall(0, None)
    lived(own, fault)
    return fault.calls


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_scenario_23_the_nth_call_fails_and_nothing_is_promised_that_does_not_hold(
    every: int, report_figures: Callable[[str], None]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    began = time.monotonic()
    with modelled_disk() as own:
        calls = count_calls(own)
        for number in range(chance.randint(1, every), calls + 1, every):
            for kind in ERRORS if every == 1 else [chance.choice(ERRORS)]:
                fault = FailingCall(number, kind)
                history = lived(own, fault)
                image, disk = own.disks["a"].image(), copy_of(own.disks["a"])
                left = [disk, *power_cuts(image, chance, 4)][: 5 if every == 1 else 3]
                for state in left:
                    try:
                        check(own, state, history.known.copy(), 2)
                    except Violation as violation:
                        raise Violation(f"{violation}; after {fault.what} number {number} failed, {kind}") from None
    report_figures(
        f"{calls // every:,} of {calls:,} calls failed, within {time.monotonic() - began:.1f} s, seed {seed}"
    )


@pytest.mark.slow
def test_an_answer_before_the_fsync_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(
        "metamq.broker.transactions.journal.JournalStore.when_durable", lambda self, written, done: done(None)
    )
    with modelled_disk() as own, pytest.raises(Violation):
        _fail_each_once(own)


def _fail_each_once(own: DiskOs) -> None:
    for number in range(1, count_calls(own) + 1):
        history = lived(own, FailingCall(number, errno.EIO))
        for state in power_cuts(own.disks["a"].image(), random.Random(1), 4):
            check(own, state, history.known.copy(), 2)
