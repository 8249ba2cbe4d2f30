"""Long work on a log, in steps: what any thread may do, and between it what only the log's own thread may.

A generator does the second: what it runs between two yields is as a call of the log's. What it yields is the first, to
be run wherever its driver likes, while appends, reads and flushes go on. The driver sends back what a step returned,
or throws the OSError that it raised.

The rule that makes this safe: *a step touches nothing that the log's own thread changes*. It gets paths of files that
nobody writes to any more, or that nobody knows any longer, and calls what needs no state of ours; descriptors of the
file cache and all marks are out of its reach. And after each step the generator takes nothing for granted: the log
may have been closed, have failed, have grown or been cut meanwhile, and it looks again.

A flush is a step of its own kind, FLUSH. A log has one flush under way at most, whoever wants it; so the driver asks
whoever runs the log's flushes, and goes on when all that was unflushed at the yield is flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, Literal, TypeVar

T = TypeVar("T")

FLUSH: Final = "flush"

Step = Callable[[], Any] | Literal["flush"]
Steps = Generator[Step, Any, T]
