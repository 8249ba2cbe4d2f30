"""What goes wrong over and over is told once, again when its reason changes, and when it is over."""

from __future__ import annotations

import logging

from metamq.errors import DiskFull, MetamqError

log = logging.getLogger("metamq.broker")


class Trouble:
    """One thing that does not work for a while, though it is tried again and again."""

    def __init__(self) -> None:
        self._told: tuple[str, str] | None = None

    def lasts(self, what: str, error: MetamqError) -> None:
        """It failed, perhaps not for the first time."""
        # How much is free on a full disk differs from time to time: that is no other reason.
        reason = what, type(error).__name__ if isinstance(error, DiskFull) else str(error)
        if reason != self._told:
            self._told = reason
            log.info("%s: %s", what, error)

    def is_over(self, words: str) -> None:
        """It works; `words` say so if it did not before."""
        if self._told is not None:
            self._told = None
            log.info("%s", words)
