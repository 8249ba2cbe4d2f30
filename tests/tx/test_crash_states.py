"""Power cuts at every moment of a journal's and its logs' life, on a modelled disk: no promise is broken."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.tx.crash_history import History, Violation, check, copy_of, enumerate_crashes, unfold
from tests.tx.sim_disk import modelled_disk

pytestmark = pytest.mark.timeout(600)  # thousands of recoveries


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "inside", "states_max"),
    [(8, 5, 500), pytest.param(200, 10, 60_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_whatever_a_power_cut_leaves(
    most: int, inside: int, states_max: int, report_figures: Callable[[str], None]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    began = time.monotonic()
    with modelled_disk() as own:
        count = enumerate_crashes(own, random.Random(seed), most=most, inside=inside, states_max=states_max)
    report_figures(f"{count:,} states after power cuts within {time.monotonic() - began:.1f} s, seed {seed}")


def test_rot_is_refused_and_never_taken_for_a_torn_tail() -> None:
    """A bit that changed in what was flushed of the journal: nothing of it is believed, and nothing cut."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with modelled_disk() as own:
        history = History(own, noting=False)
        unfold(history)
        journal = history.replica.journal.log
        image = copy_of(own.disks["a"])
        paths = [segment.path for segment in journal.segments()]
        for _ in range(150):
            disk = copy_of(image)
            path = chance.choice([path for path in paths if len(disk.data[disk.names[path]])])
            data = disk.data[disk.names[path]]
            base = int(path.removesuffix(".log").rpartition("-")[2])
            at = chance.randrange(min(len(data), journal.flushed_position - base))
            data[at] ^= 1 << chance.randrange(8)
            before = {name: bytes(disk.data[inode]) for name, inode in disk.names.items() if "transactions" in name}
            with pytest.raises(Violation, match="recovery fails"):
                check(own, disk, history.known.copy(), 2)
            after = {name: bytes(disk.data[disk.names[name]]) for name in paths}
            assert after == {name: before[name] for name in paths}
