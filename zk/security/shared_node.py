"""A list that administrators keep in one persistent node, and that brokers follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from metamq.zk.documents import read_document
from metamq.zk.session.change import change_node

if TYPE_CHECKING:
    from metamq.zk.paths import Paths
    from metamq.zk.session.session import Session

T = TypeVar("T")
Watcher = Callable[[], None]
"""Is called once, when a node changes."""

DATA_BYTES_MAX = 900_000
"""A little less than ZooKeeper stores in a node."""


@dataclass(frozen=True)
class SharedNode(Generic[T]):
    """The node of one list. Each change is made by compare-and-set."""

    name: str
    """The things in the list, as "users"."""
    path: Callable[[Paths], str]
    missing: T
    """The list if the node does not exist."""
    decode: Callable[[dict[str, Any]], T]
    """Reads the JSON document. Raises ValueError or a similar error if it has the wrong form."""
    encode: Callable[[T], bytes]
    """Returns the data of the node. Raises ConfigError if it would be too large."""
    add_again: str
    """The command that adds to the list, for errors; empty: clients do it by themselves."""

    def parsed(self, path: str, data: bytes | None) -> T:
        """Returns the list in a node with this data, or None if there is no node. Raises CorruptData."""
        if data is None:
            return self.missing
        again = f", then add the {self.name} again: `{self.add_again}`" if self.add_again else ""
        hint = f"Delete this node with ZooKeeper's own client{again}."
        return read_document(f"the list of {self.name} in ZooKeeper ({path})", data, self.decode, hint=hint)

    async def read(self, session: Session, watch: Watcher | None = None) -> T:
        """Returns the list. `watch` is called once if it changes. Raises CorruptData, ConnectionLost."""
        path = self.path(session.paths)
        node = await session.get_or_none(path, watch=watch)
        return self.parsed(path, None if node is None else node.data)

    async def change(self, session: Session, change: Callable[[T], T]) -> None:
        """Stores `change(the stored list)`; `change` may be called several times.

        Raises CorruptData, the errors of `change`, and ConnectionLost: then the outcome is unknown.
        """
        path = self.path(session.paths)
        await change_node(session, path, lambda data: self.parsed(path, data), change, self.encode)
