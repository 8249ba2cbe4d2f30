"""A child process that ends with its parent.

A parent that is killed with -9 cannot notify its child. So the child holds the read end of a pipe, and the parent has
the only write end. When the pipe closes, the parent is gone, and the child ends as if it had received SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

AFTER_PARENT_S = 5.0


def follow_parent(stdin: int) -> None:
    """Ends this process when the pipe on standard input closes: gracefully, or by force after AFTER_PARENT_S.

    The thread reads the descriptor, not the file object. A thread that waits in the file object holds its lock, and
    Python would wait for this lock at its exit.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(stdin, 1):
                continue
        end_without_parent()

    threading.Thread(target=watch, name="metamq-parent", daemon=True).start()


def end_without_parent() -> None:
    """Ends this process gracefully, or by force after AFTER_PARENT_S. Any thread."""
    os.kill(os.getpid(), signal.SIGTERM)
    timer = threading.Timer(AFTER_PARENT_S, os._exit, [1])
    timer.daemon = True
    timer.start()
