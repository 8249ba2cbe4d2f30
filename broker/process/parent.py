"""A child process that ends with its parent.

A parent may be killed with -9, and then can tell nobody. So the child holds the read end of a pipe of which the parent
has the only write end: when that closes, the parent is gone, and the child ends as if it had got SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

AFTER_PARENT_S = 5.0


def follow_parent(stdin: int) -> None:
    """End this process when the pipe on standard input closes, gracefully if that does not take long.

    The descriptor is read, not the file object: a thread that waits in that would hold its lock, which Python waits
    for, in vain, when it ends.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(stdin, 1):
                continue
        os.kill(os.getpid(), signal.SIGTERM)
        timer = threading.Timer(AFTER_PARENT_S, os._exit, [1])
        timer.daemon = True
        timer.start()

    threading.Thread(target=watch, name="metamq-parent", daemon=True).start()
