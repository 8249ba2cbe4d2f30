"""Threads that are started when they are needed, or all at once; and the error where the system gives no more."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from metamq.errors import TooManyThreads


def start(thread: threading.Thread) -> None:
    """Starts a thread. Raises TooManyThreads."""
    try:
        thread.start()
    except RuntimeError as error:  # that is all that Python says
        raise TooManyThreads(thread.name) from error


def start_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run already: none is to be started later, when there may be no more. Raises
    TooManyThreads."""
    pool = ThreadPoolExecutor(threads, name)
    all_run = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)
    except RuntimeError as error:
        all_run.abort()
        pool.shutdown(wait=False)
        raise TooManyThreads(name) from error
    all_run.wait()
    return pool
