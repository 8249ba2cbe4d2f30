"""The decisions of the supervisor about a worker that has ended. No I/O.

    the command stops                                   the worker has ended
    a rolling restart asked for the end                 start it again at once
    a ConfigError, and the worker has never served      end the command with that error
    anything else                                       start it again after a pause

The pause is 1 s, and doubles up to 60 s. A process that served for five minutes begins again with 1 s. A worker that
has served once is always started again: its configuration was right, so an error then may pass.
"""

from __future__ import annotations

import enum

PAUSE_S = 1.0
PAUSE_MAX_S = 60.0
STEADY_S = 300.0
"""After it served for this time, an end is not one of a series."""


class Reaction(enum.Enum):
    """The reaction to the end of a worker's process."""

    ENDED = "ended"
    AT_ONCE = "start again at once"
    FAIL = "end the command"
    LATER = "start again after a pause"


def after_end(*, stopping: bool, restarting: bool, refused: bool, has_served: bool) -> Reaction:
    """Returns the reaction, see the module. `refused`: the process reported a ConfigError."""
    if stopping:
        return Reaction.ENDED
    if refused and not has_served:
        return Reaction.FAIL
    return Reaction.AT_ONCE if restarting else Reaction.LATER


def ends_in_series(before: int, served_s: float) -> int:
    """Returns the number of ends in a series, after one more. `served_s` is 0 if the process never served."""
    return 1 if served_s >= STEADY_S else before + 1


def pause_s(ends: int) -> float:
    """Returns the pause in seconds before the next start, after this number of ends in a series."""
    return min(PAUSE_S * 2.0 ** min(ends - 1, 30), PAUSE_MAX_S)
