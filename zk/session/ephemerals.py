"""The ephemeral nodes of a session that several clients share: the client that may have made each of them.

ZooKeeper knows only the session that owns an ephemeral node. Here all writers of that session are in one process, so
this table knows the rest. Two rules decide:

    possible    a write whose answer is missing may have been done: its client may have made the node
    certain     a creation that succeeded met no node: no write before it has made the present node

Writes overlap: an answer says nothing of the writes that began after its own, whose answers are still missing.

If one client may have made a node, it did. If several may, the content decides: no two clients write the same content
to one path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from metamq.errors import MetamqError
from metamq.zk.nodes import Create, Delete, Op, SetData

Client = object


class Ephemerals:
    """The table of one session. Use it in the loop."""

    def __init__(self) -> None:
        self._makers: dict[str, dict[Client, dict[int, bytes]]] = {}
        """By path and client: the possible contents, by the number of their write."""
        self._paths: dict[Client, dict[str, None]] = {}
        self._term = 0
        """The number of sessions that are over."""
        self._writes = 0
        """The number of writes that have begun. They are sent, and answered, in this order."""

    def paths(self) -> Iterable[str]:
        """The paths of all nodes."""
        return self._makers.keys()

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self._makers)

    @contextmanager
    def writing(self, client: Client, operations: Sequence[Op]) -> Iterator[None]:
        """Notes the operations, which the block carries out. The outcome of its error decides if they may be done."""
        self._writes += 1
        term, number = self._term, self._writes
        for one in operations:
            self._begun(client, one, number)
        try:
            yield
        except MetamqError as error:
            if error.outcome != "unknown" and term == self._term:
                for path in {one.path for one in operations}:
                    self._drop(path, lambda other: other == number)
            raise
        for one in operations if term == self._term else ():
            self._done(client, one, number)

    def _begun(self, client: Client, operation: Op, number: int) -> None:
        match operation:
            case Create(path=path, data=data, ephemeral=True):
                self._note(client, path, number, data)
            case SetData(path=path, data=data):
                makers = self._makers.get(path, {})
                for maker in [client] if client in makers else list(makers):
                    self._note(maker, path, number, data)

    def _done(self, client: Client, operation: Op, number: int) -> None:
        """Only what a later write may have done is possible beside the content of this one."""
        path = operation.path
        match operation:
            case Create(data=data, ephemeral=True):
                self._note(client, path, number, data)
                self._drop(path, lambda other: other < number)
            case SetData(data=data):
                for maker in [one for one, contents in self._makers.get(path, {}).items() if number in contents]:
                    self._note(maker, path, number, data)
                    self._drop(path, lambda other: other < number, [maker])
            case Delete():
                self._drop(path, lambda other: other <= number)

    def _note(self, client: Client, path: str, number: int, content: bytes) -> None:
        self._makers.setdefault(path, {}).setdefault(client, {})[number] = content
        self._paths.setdefault(client, {})[path] = None

    def _drop(self, path: str, is_over: Callable[[int], bool], makers: Sequence[Client] | None = None) -> None:
        """Drops the contents whose writes are over: those of `makers`, or of all clients."""
        for maker in makers or list(self._makers.get(path, ())):
            contents = self._makers[path][maker]
            for number in [*filter(is_over, contents)]:
                del contents[number]
            if not contents:
                self.forget(maker, path)

    def made_by(self, client: Client, path: str, content: bytes) -> bool:
        """True if the client made the present node, which has this content and is of this session."""
        makers = self._makers.get(path, {})
        return client in makers and (len(makers) == 1 or content in makers[client].values())

    def of(self, client: Client) -> list[str]:
        """The paths of the nodes that the client may have made, the last one first."""
        return list(reversed(self._paths.get(client, ())))

    def forget(self, client: Client, path: str) -> None:
        """Notes that no node at this path is the client's."""
        makers = self._makers.get(path, {})
        makers.pop(client, None)
        if not makers:
            self._makers.pop(path, None)
        paths = self._paths.get(client, {})
        paths.pop(path, None)
        if not paths:
            self._paths.pop(client, None)

    def clear(self) -> None:
        """Notes that the session is over."""
        self._term += 1
        self._makers.clear()
        self._paths.clear()
