"""How much of what there is a trigger takes, and whether it takes any yet. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")


def admit(begun: Mapping[K, int], ends: Mapping[K, int], most: int | None) -> dict[K, int]:
    """Where each partition's share ends: in proportion to what it has, and one message at least where it has any.

    So a trigger may take more than `most`, by one for each partition at most.
    """
    sizes = {tp: max(ends[tp] - begun[tp], 0) for tp in begun}
    total = sum(sizes.values())
    if most is None or total <= most:
        return {tp: begun[tp] + sizes[tp] for tp in begun}
    return {tp: begun[tp] + (max(sizes[tp] * most // total, 1) if sizes[tp] else 0) for tp in begun}


def is_enough(found: int, least: int | None, waited_s: float, delay_max_s: float) -> bool:
    """Whether `found` messages make a batch: as many as are wanted, or any once it was waited for long enough."""
    if least is None or found >= least:
        return found > 0
    return found > 0 and waited_s >= delay_max_s
