"""The judge of a group's history: who handled and committed what, and under which claim, as each member tells it.

A claim's generation orders the owners of a partition. So all that a group promises can be said of generations: one
member each; each begins where an earlier one committed, and not before what is committed for certain; none goes on when
a later one has begun. A process that was frozen may finish what it had in hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

THAW_GRACE_S = 1.0
"""A thawed process finishes what it has in hand, and may begin another message before its loop has seen the clock."""


class Handled(NamedTuple):
    """A member began with a message under a claim."""

    member: str
    partition: str
    generation: int
    offset: int
    time: float


class Commit(NamedTuple):
    """A member's commit came back: "ok", "lost" or "unknown"."""

    member: str
    partition: str
    generation: int
    next_offset: int
    outcome: str


class Freeze(NamedTuple):
    """A member was stopped, and went on."""

    member: str
    begin: float
    end: float


@dataclass(frozen=True)
class History:
    """What all members did; `ends` are the partitions' lengths, `committed` what stands there at last."""

    handled: list[Handled]
    commits: list[Commit]
    freezes: list[Freeze]
    ends: Mapping[str, int]
    committed: Mapping[str, int]


def judge(history: History) -> list[str]:
    """What a group must not do; nothing, if all is well."""
    found = []
    for partition, end in history.ends.items():
        handled = [each for each in history.handled if each.partition == partition]
        commits = [each for each in history.commits if each.partition == partition]
        found += [f"{partition}: {problem}" for problem in _judge_one(handled, commits, history.freezes, end)]
        if history.committed.get(partition) != end:
            found.append(f"{partition}: {history.committed.get(partition)} is committed of {end}")
    return found


def _judge_one(handled: list[Handled], commits: list[Commit], freezes: list[Freeze], end: int) -> Iterator[str]:
    by_claim: dict[int, list[Handled]] = defaultdict(list)
    for each in handled:
        by_claim[each.generation].append(each)
    unread = set(range(end)) - {each.offset for each in handled}
    if unread:
        yield f"never handled: {sorted(unread)[:5]}"
    for generation, mine in sorted(by_claim.items()):
        if len({each.member for each in mine}) > 1:
            yield f"claim {generation} is of two members"
        offsets = [each.offset for each in mine]
        if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            yield f"claim {generation} does not go on in order: {offsets}"
        before = [each for each in commits if each.generation < generation]
        certain = max((each.next_offset for each in before if each.outcome == "ok"), default=0)
        possible = {each.next_offset for each in before if each.outcome != "lost"} | {0}
        if offsets[0] < certain:
            yield f"claim {generation} begins at {offsets[0]}, an earlier one committed {certain}"
        if offsets[0] not in possible:
            yield f"claim {generation} begins at {offsets[0]}, where nobody committed"
        yield from _former_owners(generation, mine, handled, freezes)


def _former_owners(
    generation: int, mine: list[Handled], handled: list[Handled], freezes: list[Freeze]
) -> Iterator[str]:
    begun = min(each.time for each in mine)
    for late in handled:
        if late.generation < generation and late.time > begun:
            thaws = [freeze.end for freeze in freezes if freeze.member == late.member and freeze.begin < begun]
            if not any(late.time < end + THAW_GRACE_S for end in thaws):
                yield f"{late.member} begins {late.offset} {late.time - begun:.3f} s after claim {generation} began"
