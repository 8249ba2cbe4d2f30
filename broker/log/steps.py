"""Long work on a log, in steps: work for any thread, and between two steps code for the log's own thread.

A generator has the code for the log's own thread: it runs between two yields, like a method of the log. Each yielded
step runs wherever its driver likes, while appends, reads and flushes continue. The driver sends back the result of a
step, or throws the OSError that it raised.

One rule makes this safe: *a step touches nothing that the log's own thread changes*. It gets paths of files that no
thread writes any more, or that no log refers to any longer, and calls functions without shared state. It never uses
the descriptors of the file cache, or the marks. After each step the generator checks the log's state again: meanwhile
the log may have been closed, have failed, have grown or been cut.

FLUSH is a special step. A log has at most one running flush, whoever starts it. So the driver asks the component that
runs the log's flushes, and continues when everything that was unflushed at the yield is flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, Literal, TypeVar

T = TypeVar("T")

FLUSH: Final = "flush"

Step = Callable[[], Any] | Literal["flush"]
Steps = Generator[Step, Any, T]
