"""Logs a repeated problem only at its start, when its reason changes, and at its end."""

from __future__ import annotations

import logging

from metamq.errors import DiskFull, MetamqError

log = logging.getLogger("metamq.broker")


class LogOnce:
    """One operation that is retried until it works."""

    def __init__(self) -> None:
        self._logged: tuple[str, str] | None = None

    def failed(self, what: str, error: MetamqError) -> None:
        """Logs a failure, unless it repeats the one before."""
        # The free space in the text of DiskFull differs each time: the reason is the same.
        reason = what, type(error).__name__ if isinstance(error, DiskFull) else str(error)
        if reason != self._logged:
            self._logged = reason
            log.info("%s: %s", what, error)

    def worked(self, words: str) -> None:
        """Logs `words` if the operation failed before."""
        if self._logged is not None:
            self._logged = None
            log.info("%s", words)
