"""Names for the completion of a shell: topics, groups, brokers and partitions of the cluster, and contexts.

A completion must neither delay the typing nor print: it asks the cluster for a short time, and offers nothing if that
fails. click has the scripts for bash, zsh and fish, and calls this module through `shell_complete`.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from metamq.cli.context import Globals
from metamq.cli.contexts import read_contexts

if TYPE_CHECKING:
    from metamq import Admin

LIMIT_S = 2.0
_SAFE = re.compile(r"[A-Za-z0-9._-]+")
"""Names that a shell takes as they are. Others may have been written by any client of ZooKeeper."""


def _partitions(admin: Admin, context: click.Context) -> Iterable[str]:
    """Returns the partitions of the topics that the command line names so far."""
    given = context.params.get("topics") or context.params.get("topic") or ()
    # While an option waits for its value, click keeps the arguments unparsed.
    named = {*context.args, *([given] if isinstance(given, str) else given)}
    return {name for topic, config in admin.topics().items() if topic in named for name in config.partition_names}


_ASKS: dict[str, Callable[[Admin, click.Context], Iterable[object]]] = {
    "topic": lambda admin, _context: admin.topics(),
    "group": lambda admin, _context: admin.groups(),
    "broker": lambda admin, _context: admin.brokers(),
    "partition": _partitions,
}


def complete(kind: str, context: click.Context, incomplete: str) -> list[CompletionItem]:
    """Returns the names of a kind that begin with `incomplete`; none for an unknown kind, or after an error."""
    if kind == "context":
        with contextlib.suppress(Exception):
            return _items(read_contexts().named, incomplete)
        return []
    return _items(_asked(kind, context), incomplete) if kind in _ASKS else []


def _items(names: Iterable[object], incomplete: str) -> list[CompletionItem]:
    texts = map(str, names)
    return [CompletionItem(name) for name in sorted(texts) if name.startswith(incomplete) and _SAFE.fullmatch(name)]


def _asked(kind: str, context: click.Context) -> Sequence[object]:
    """Asks the cluster in a thread, which the end of this process does not wait for."""
    found: list[object] = []

    def ask() -> None:
        with contextlib.suppress(Exception), (context.find_object(Globals) or Globals()).admin() as admin:
            found.extend(_ASKS[kind](admin, context))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LIMIT_S)
    return [*found]
