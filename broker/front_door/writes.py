"""Sends what connections write in one turn of the loop together: one system call for each connection."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger("metamq.broker")


class Writer(Protocol):
    """A connection with unsent answers."""

    def flush(self) -> None:
        """Sends them."""


class Writes:
    """The connections that have something to send. Used by the broker's loop only."""

    def __init__(self) -> None:
        self._due: list[Writer] = []
        self._is_held = False

    def add(self, writer: Writer) -> None:
        """Calls the writer's flush() once, at the end of this turn of the loop or before."""
        if not self._due and not self._is_held:
            asyncio.get_running_loop().call_soon(self.flush)
        self._due.append(writer)

    def hold(self) -> None:
        """The caller promises to call flush() in this turn of the loop."""
        self._is_held = True

    def flush(self) -> None:
        """Calls flush() of all writers now."""
        self._is_held = False
        due, self._due = self._due, []
        for writer in due:
            try:
                writer.flush()
            except Exception:  # a bug there: the others send
                log.exception("answers of %s were not sent", writer)
