"""The levels of delayed messages, and the rule that moves them. No I/O.

Level k is a log for messages that wait there for W(k) = 0.1 s * 2^k. A message passes levels by what is left of its
delay:

    level 0           left are less than 0.2 s: it leaves when it is due
    level k           left are W(k) to W(k + 1): it leaves W(k) later, by its own schedule, whenever it was put there
    the last level    left are W(k) or more

INVARIANT: the levels that a message passes depend on its delay alone. A message that is late leaves them at once, but
skips none. So messages with the same delay pass the same logs, in the order in which they were sent.

What is left before and after a level is counted by the delay, not by a clock. A message whose clock is ahead, or that
is at a wrong level, can hold up the messages behind it for 2 W(k), not longer. If it comes out of the last of its
levels before it is due, it begins again with what is left by the clock.
"""

from __future__ import annotations

UNIT_US = 100_000
LEVELS = 25
"""The last level is 19 days; a longer delay passes through it more than once."""
RETENTION_MS = 7 * 86_400_000
"""Milliseconds for which a level keeps a message longer than it waits there: time to start a broker again."""


def wait_us(level: int) -> int:
    """Returns W(level), in microseconds."""
    return UNIT_US << level


def level_of(left_us: int) -> int:
    """Returns the level for a message that is due in `left_us` microseconds."""
    return max(0, min(LEVELS, (left_us // UNIT_US).bit_length()) - 1)


def left_after_us(level: int, left_us: int) -> int:
    """Returns what is left of a delay after a level, in microseconds."""
    return max(0, left_us - wait_us(level)) if level else 0


def ready_us(level: int, put_us: int, due_us: int, left_us: int) -> int:
    """Returns the time at which a message leaves a level; `left_us`: what is left of its delay after it."""
    return min(due_us - left_us, put_us + wait_us(max(level, 1) + 1))


def retention_ms(level: int) -> int:
    """Returns the retention of a level's topic, in milliseconds."""
    return RETENTION_MS + wait_us(level) // 1000
