"""A fork copies a client, but not its threads. In the child the client's core is notified; later uses raise."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Forkable(Protocol):
    """The core of a client."""

    def forked(self) -> None:
        """Called in the child after a fork. Every later use must raise ForkedError."""


_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def register_for_forks(client: Forkable) -> None:
    """Registers a client for as long as the client is referenced."""
    _clients.add(client)


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
