"""The ephemeral nodes of a session that several clients share: the client that may have made each of them.

ZooKeeper knows only the session that owns an ephemeral node. Here all writers of that session are in one process, so
this table knows the rest. Two rules decide:

    possible    a write whose answer is missing may have been done: its client may have made the node
    certain     a creation that succeeded met no node: no other client of this session has made the present node

If several clients may have made a node, its content decides: no two clients write the same content to one path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from metamq.errors import MetamqError
from metamq.zk.nodes import Create, Delete, Op, SetData

Client = object


class Ephemerals:
    """The table of one session. Use it in the loop."""

    def __init__(self) -> None:
        self._makers: dict[str, dict[Client, tuple[bytes, ...]]] = {}
        """By path and client: the possible contents."""
        self._paths: dict[Client, dict[str, None]] = {}
        self._term = 0
        """The number of sessions that are over."""

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self._makers)

    @contextmanager
    def writing(self, client: Client, operations: Sequence[Op]) -> Iterator[None]:
        """Notes the operations, which the block carries out. The outcome of its error decides if they may be done."""
        term = self._term
        noted = [one for one in operations if self._is_possible(client, one)]
        try:
            yield
        except MetamqError as error:
            if error.outcome != "unknown" and term == self._term:
                for one in noted:
                    self._refused(client, one)
            raise
        for operation in operations if term == self._term else ():
            self._done(client, operation)

    def _is_possible(self, client: Client, operation: Op) -> bool:
        """Notes the possible content of a node. Returns True if it is new here."""
        match operation:
            case Create(path=path, data=data, ephemeral=True):
                makers = [client]
            case SetData(path=path, data=data):
                makers = self._writers(client, path)
            case _:
                return False
        new = [maker for maker in makers if data not in self._contents(maker, path)]
        for maker in new:
            self._note(maker, path, (*self._contents(maker, path), data))
        return bool(new)

    def _writers(self, client: Client, path: str) -> list[Client]:
        """The possible makers of the node that this client writes: the client itself, if it is one of them."""
        makers = self._makers.get(path, {})
        return [client] if client in makers else list(makers)

    def _contents(self, client: Client, path: str) -> tuple[bytes, ...]:
        return self._makers.get(path, {}).get(client, ())

    def _note(self, client: Client, path: str, contents: tuple[bytes, ...]) -> None:
        if not contents:
            self.forget(client, path)
            return
        self._makers.setdefault(path, {})[client] = contents
        self._paths.setdefault(client, {})[path] = None

    def _refused(self, client: Client, operation: Op) -> None:
        if isinstance(operation, Create | SetData):
            for maker in self._writers(client, operation.path):
                contents = self._contents(maker, operation.path)
                self._note(maker, operation.path, tuple(one for one in contents if one != operation.data))

    def _done(self, client: Client, operation: Op) -> None:
        path = operation.path
        match operation:
            case Create(data=data, ephemeral=True):
                self._forget_all(path)
                self._note(client, path, (data,))
            case SetData(data=data):
                for maker in self._writers(client, path):
                    self._note(maker, path, (data,))
            case Delete():
                self._forget_all(path)

    def _forget_all(self, path: str) -> None:
        for maker in list(self._makers.get(path, ())):
            self.forget(maker, path)

    def made_by(self, client: Client, path: str, content: bytes) -> bool:
        """True if the client made the present node, which has this content and is of this session."""
        return content in self._contents(client, path)

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
