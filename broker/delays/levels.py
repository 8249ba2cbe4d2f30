"""The levels of delayed messages, and the rule that moves them. No I/O.

Level k is a log for messages that wait for at least W(k) = 0.1 s * 2^k from the time at which they were put there. So
the messages of a level leave it in the order in which they are, and the state of a level is one offset:

    level 0           left are less than 0.2 s: it leaves when it is due
    level k           left are W(k) to W(k + 1): it leaves W(k) after it was put there, or when it is due
    the last level    left are W(k) or more

A message that leaves goes to its topic if it is due, else to the level for what is left. A clock that steps, or a
message at a wrong level, can hold up the messages behind it for W(k), not longer.
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


def ready_us(level: int, put_us: int, due_us: int) -> int:
    """Returns the time at which a message leaves a level."""
    return min(due_us, put_us + wait_us(level if level else 1))


def retention_ms(level: int) -> int:
    """Returns the retention of a level's topic, in milliseconds."""
    return RETENTION_MS + wait_us(level) // 1000
