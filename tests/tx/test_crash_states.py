"""Power cuts at every moment of a journal's and its logs' life, on a modelled disk: no promise is broken."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.tx.crash_history import enumerate_crashes
from tests.tx.sim_disk import modelled_disk


def test_whatever_a_power_cut_leaves(report_figures: Callable[[str], None]) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    began = time.monotonic()
    with modelled_disk() as own:
        count = enumerate_crashes(own, random.Random(seed), most=8, inside=3)
    report_figures(f"{count:,} states after power cuts within {time.monotonic() - began:.1f} s, seed {seed}")
