"""Starts threads, one or a whole pool, and gives a thread memory for a moment."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from metamq.errors import TooManyThreads


def start(thread: threading.Thread) -> None:
    """Starts a thread. Raises TooManyThreads."""
    try:
        thread.start()
    except RuntimeError as error:  # Python raises no more specific error
        raise TooManyThreads(thread.name) from error


def start_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool after all its threads are started, since a later start could fail. Raises TooManyThreads."""
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


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[int, bytearray] = {}


_scratch = _Scratch()


def scratch(size: int) -> bytearray:
    """Returns memory of this size, the same one at each call in a thread. Its content is undefined."""
    found = _scratch.buffers.get(size)
    return found if found is not None else _scratch.buffers.setdefault(size, bytearray(size))
