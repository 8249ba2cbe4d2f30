"""The size of a trigger's batch, and the decision if there is a batch yet. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")


def admit(begun: Mapping[K, int], ends: Mapping[K, int], most: int | None) -> dict[K, int]:
    """Returns the end of each partition's share: in proportion to its messages, and at least one message if it has any.

    So a trigger may take more than `most`, by at most one message for each partition.
    """
    sizes = {tp: max(ends[tp] - begun[tp], 0) for tp in begun}
    total = sum(sizes.values())
    if most is None or total <= most:
        return {tp: begun[tp] + sizes[tp] for tp in begun}
    return {tp: begun[tp] + (max(sizes[tp] * most // total, 1) if sizes[tp] else 0) for tp in begun}


def is_enough(found: int, least: int | None, waited_s: float, delay_max_s: float) -> bool:
    """True if `found` messages make a batch: as many as wanted, or any after the longest wait."""
    if least is None or found >= least:
        return found > 0
    return found > 0 and waited_s >= delay_max_s
