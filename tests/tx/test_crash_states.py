"""Power cuts at every moment of a journal's and its logs' life, on a modelled disk: no promise is broken."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.tx.crash_history import enumerate_crashes
from tests.tx.sim_disk import modelled_disk


@pytest.mark.parametrize(
    ("most", "inside", "states_max"), [(8, 5, 1500), pytest.param(200, 10, 60_000, marks=pytest.mark.long)]
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
