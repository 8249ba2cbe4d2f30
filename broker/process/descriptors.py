"""The process's limit on open files, and its shares for log files and for connections."""

from __future__ import annotations

import contextlib
import resource

from metamq.errors import ConfigError

OPEN_FILES_LEAST = 128
OPEN_FILES_MOST = 1 << 16
OPENED_ELSEWHERE = 64
"""Descriptors for other uses than cached log files and clients: flushes, folders, ZooKeeper, the loop."""


def shares(limit: int, open_files_max: int) -> tuple[int, int]:
    """Splits the process's limit on open files; returns the shares of log files and of connections.

    Raises ConfigError if the limit is too low.
    """
    if limit < OPEN_FILES_LEAST:
        raise ConfigError(
            f"the limit on open files is {limit}, a broker needs at least {OPEN_FILES_LEAST}",
            hint="Raise it: `ulimit -n`, LimitNOFILE= of systemd, `ulimits` of Compose.",
        )
    files = open_files_max or (limit - OPENED_ELSEWHERE) // 2
    return files, max(1, limit - files - OPENED_ELSEWHERE)


def raised_open_files_limit() -> int:
    """Raises the process's limit on open files as far as possible, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return min(soft, OPEN_FILES_MOST)
