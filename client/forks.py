"""A fork copies a client, but not its threads: its core is told in the child, and raises when it is used."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Forkable(Protocol):
    """The core of a client."""

    def forked(self) -> None:
        """Called in the child after a fork; every later use is to raise ForkedError."""


_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def tell_of_forks(client: Forkable) -> None:
    """Registers it, for as long as it is referenced."""
    _clients.add(client)


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
