"""Reads many nodes by one request, ZooKeeper's multiRead, which kazoo lacks. A request for each node takes twenty times
as much processor time, here and in ZooKeeper. It is in ZooKeeper 3.6 and newer, and leaves no watches."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from kazoo.exceptions import EXCEPTIONS
from kazoo.protocol.serialization import GetData, MultiHeader, read_buffer, stat_struct

from metamq.zk.errors import NoNode
from metamq.zk.nodes import Node
from metamq.zk.session.answers import error_of

NODES_MAX = 100
"""The nodes of one request. Its size is limited to 1 MB: 10 kB for each path."""
_GET = bytes(MultiHeader(GetData.type, False, -1).serialize())
_END = bytes(MultiHeader(-1, True, -1).serialize())
_HEADER = struct.Struct("!i?i")
_CODE = struct.Struct("!i")
_ERROR = -1
Answer = Node | Exception
"""A node, or kazoo's exception."""


class ManyNodes:
    """The request, as kazoo's connection sends it. The paths are those below the root of ZooKeeper."""

    type = 22

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def serialize(self) -> bytes:
        """Returns the request without its header."""
        return b"".join(_GET + GetData(path, None).serialize() for path in self.paths) + _END

    @staticmethod
    def deserialize(data: bytes, offset: int) -> list[Answer]:
        """Returns a node or an exception for each path, in order."""
        found: list[Answer] = []
        while True:
            kind, is_end, _code = _HEADER.unpack_from(data, offset)
            offset += _HEADER.size
            if is_end:
                return found
            if kind == _ERROR:
                found.append(EXCEPTIONS[_CODE.unpack_from(data, offset)[0]]())
                offset += _CODE.size
                continue
            content, offset = read_buffer(data, offset)
            czxid, mzxid, ctime, mtime, version, _, _, owner, _, children, _ = stat_struct.unpack_from(data, offset)
            offset += stat_struct.size
            found.append(Node(version, czxid, mzxid, owner, ctime, mtime, children, bytes(content or b"")))


def requests(paths: Sequence[str]) -> list[Callable[[Any], Any]]:
    """Returns functions that pass a request to kazoo's client; their answers are those of all paths, in order."""
    parts = (paths[first : first + NODES_MAX] for first in range(0, len(paths), NODES_MAX))
    return [partial(_read, part) for part in parts]


def _read(paths: Sequence[str], client: Any) -> Any:
    answer = client.handler.async_result()
    client._call(ManyNodes(paths), answer)
    return answer


def found_nodes(answers: Sequence[Sequence[Answer]], servers: str, paths: Sequence[str]) -> list[Node | None]:
    """Returns the nodes of the answers to requests(), None for a missing one. Raises the error of another answer."""
    return [_found(one, servers, path) for one, path in zip(chain.from_iterable(answers), paths, strict=True)]


def _found(answer: Answer, servers: str, path: str) -> Node | None:
    if isinstance(answer, Node):
        return answer
    error = error_of(answer, servers, path)
    if isinstance(error, NoNode):
        return None
    raise error
