"""Signals for a command that ends after the work that it does now."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Self


class TwoSignals:
    """SIGTERM, SIGINT and SIGHUP: the first one calls `stop`, each further one raises KeyboardInterrupt."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self.asked = False
        self.stop = stop

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
                signal.signal(number, self._come)
        return self

    def __exit__(self, *_error: object) -> None:
        """Leaves the handlers: a signal must not end the process between here and its exit status."""

    def _come(self, _number: int, _frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.stop()
