"""The load of a ZooKeeper server, as it reports it by its four-letter words over a plain connection."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

NODE_BYTES = 900
"""The part of Java's heap that one small node takes, measured."""
ANSWER_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The number of nodes that a server has in its memory, and the limit of that memory; None if it is not known."""

    nodes: int
    memory_bytes_max: int | None

    @property
    def nodes_bytes(self) -> int:
        """The memory that the nodes take, about."""
        return self.nodes * NODE_BYTES

    @property
    def is_high(self) -> bool:
        """True if the nodes take half of the memory: Java needs the rest for its work, and ends without it."""
        return self.memory_bytes_max is not None and self.nodes_bytes * 2 > self.memory_bytes_max


def load_of(host: str, port: int, timeout_s: float) -> ServerLoad | None:
    """Returns the load; None if the server does not report it, as with TLS. Raises OSError."""
    nodes = re.search(r"^Node count: ([0-9]{1,15})$", ask(host, port, b"srvr", timeout_s), re.MULTILINE)
    if nodes is None:
        return None
    memory = re.search(r"^os\.memory\.max=([0-9]{1,9})MB$", ask(host, port, b"envi", timeout_s), re.MULTILINE)
    return ServerLoad(int(nodes[1]), int(memory[1]) << 20 if memory else None)


def ask(host: str, port: int, word: bytes, timeout_s: float) -> str:
    """Returns the answer to a four-letter word; empty if the server does not speak without TLS. Raises OSError."""
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.sendall(word)
        answer = b""
        while len(answer) < ANSWER_BYTES_MAX and (part := connection.recv(1 << 16)):
            answer += part
    return answer.decode("ascii", "replace")
