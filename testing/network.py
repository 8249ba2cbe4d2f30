"""A network between the parties of a test: TCP lines that stall, one way or both, break, or are slow.

Theory of operation
-------------------
Each party that others connect to is behind a line: an address of its own, where this process listens and passes all
bytes on. The inode of a connection's socket shows which process has connected. So one address per party suffices, and
a cut between two parties does not affect the others.

TCP loses no bytes in the middle of a stream. So a cut connection stalls, as it does if packets are dropped. After the
cut it continues where it was, or one end finds that it is broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

CHUNK_BYTES = 1 << 16
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, ANY = 4, 20, 1, 0xFFFFFFFF
"""The interface of Linux that looks up sockets: sock_diag(7)."""
INODE_AT = 84
"""The place of the inode in the answer."""


class Way(NamedTuple):
    """A direction: from the source to the target."""

    source: str
    target: str

    @property
    def back(self) -> Way:
        """The other way."""
        return Way(self.target, self.source)


class Network:
    """Lines, served by a thread of its own. All methods are for other threads."""

    def __init__(self, pids: Callable[[], Mapping[str, int]], elsewhere: str = "client") -> None:
        """`pids` returns the process id of each party that runs. Every other process is the party `elsewhere`."""
        self._pids = pids
        self._elsewhere = elsewhere
        self._loop = asyncio.new_event_loop()
        self._lines: dict[tuple[str, int], tuple[str, str]] = {}
        """By host and port: the party, and the host where the party listens itself."""
        self._listeners: dict[tuple[str, int], socket.socket] = {}
        self._cut: set[Way] = set()
        self._delays_s: dict[Way, float] = {}
        self._passable = asyncio.Event()
        """Set by each heal(). Those who wait then look at the cuts again."""
        self._open: dict[Way, set[asyncio.StreamWriter]] = defaultdict(set)
        """Both ends of each connection, by the direction in which it was made."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    # -- for tests ----------------------------------------------------------------------------------------------------

    def line(self, party: str, host: str, port: int, target_host: str = "127.0.0.1") -> str:
        """Connects host:port to the party, on the same port of `target_host`. Returns the address."""
        self._lines[host, port] = party, target_host
        self.accept(host, port)
        return f"{host}:{port}"

    def refuse(self, host: str, port: int) -> None:
        """Refuses new connections to the line, like a machine where no process listens."""
        self._call(self._refuse(host, port))

    async def _refuse(self, host: str, port: int) -> None:
        listening = self._listeners.pop((host, port), None)
        if listening is not None:
            self._loop.remove_reader(listening)
            listening.close()

    def accept(self, host: str, port: int) -> None:
        """Ends refuse()."""

        async def accept() -> None:
            if (host, port) not in self._listeners:
                listening = self._listeners[host, port] = socket.create_server((host, port), backlog=256)
                listening.setblocking(False)
                self._loop.add_reader(listening, self._accepted, listening, port, *self._lines[host, port])

        self._call(accept())

    def _accepted(self, listening: socket.socket, port: int, party: str, target_host: str) -> None:
        with contextlib.suppress(OSError):  # the client has gone already
            made, _ = listening.accept()
            made.setblocking(False)
            task = self._loop.create_task(self._take(made, party, target_host, port))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _task: made.close())  # also if it was cancelled before it began

    async def _take(self, made: socket.socket, party: str, target_host: str, port: int) -> None:
        with contextlib.suppress(asyncio.CancelledError, OSError):
            reader, writer = await asyncio.open_connection(sock=made)
            await self._serve(party, target_host, port, reader, writer)

    def cut(self, *ways: Way) -> None:
        """Lets nothing pass in these directions, until they are healed."""

        async def cut() -> None:
            self._cut.update(ways)

        self._call(cut())

    def heal(self, *ways: Way, broken: bool = False) -> None:
        """Ends cuts and delays. With `broken`, existing connections break."""

        async def heal() -> None:
            self._cut.difference_update(ways)
            for way in ways:
                self._delays_s.pop(way, None)
            if broken:
                self._break(ways)
            passable, self._passable = self._passable, asyncio.Event()
            passable.set()

        self._call(heal())

    def heal_all(self) -> bool:
        """Ends all cuts and delays. Returns True if there were any."""
        ways = self._cut | self._delays_s.keys()
        if ways:
            self.heal(*ways)
        return bool(ways)

    def slow_down(self, delay_s: float, *ways: Way) -> None:
        """Delays each chunk in these directions."""

        async def slow_down() -> None:
            self._delays_s.update(dict.fromkeys(ways, delay_s))

        self._call(slow_down())

    def break_(self, *ways: Way) -> None:
        """Breaks the connections in these directions. Later ones work."""

        async def end() -> None:
            self._break(ways)

        self._call(end())

    def _break(self, ways: tuple[Way, ...]) -> None:
        for way in ways:
            for made in (way, way.back):
                for writer in self._open.pop(made, ()):
                    writer.transport.abort()

    def close(self) -> None:
        """Ends all lines and the thread."""

        async def close() -> None:
            for place in list(self._listeners):
                await self._refuse(*place)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._break(tuple(self._open))
            await asyncio.sleep(0)  # aborted transports close their sockets in the loop's next turn

        self._call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    # -- lines --------------------------------------------------------------------------------------------------------

    async def _serve(
        self, party: str, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        way = Way(self._who(writer), party)
        self._open[way].add(writer)
        target: asyncio.StreamWriter | None = None
        try:
            await self._until_passable(way)  # a connection is made by packets both ways
            await self._until_passable(way.back)
            back, target = await asyncio.open_connection(host, port)
            self._open[way].add(target)
            await asyncio.gather(self._pass_on(way, reader, target), self._pass_on(way.back, back, writer))
        finally:
            for end in (writer, target):
                if end is not None:
                    self._open[way].discard(end)
                    end.transport.abort()

    async def _pass_on(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes bytes on until this direction ends. Then it closes the other end, as soon as that is known there."""
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if way in self._delays_s:
                    await asyncio.sleep(self._delays_s[way])
                await self._until_passable(way)
                writer.write(data)
                await writer.drain()
        await self._until_passable(way)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async def _until_passable(self, way: Way) -> None:
        while way in self._cut:
            await self._passable.wait()

    # -- the parties --------------------------------------------------------------------------------------------------

    def _who(self, writer: asyncio.StreamWriter) -> str:
        inode = _inode(writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        for party, pid in self._pids().items():
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if os.readlink(descriptor) == f"socket:[{inode}]":
                            return party
        return self._elsewhere


def _inode(near: tuple[str, int], to: tuple[str, int]) -> str:
    """Returns the inode of the socket that is connected from `near` to an address; "" if it has gone.

    It asks the kernel for this one socket. A list of all sockets grows with each connection of the last minute: to read
    it for each new connection can take longer than clients wait.
    """
    id_ = struct.pack("!HH4s12x4s12xIII", near[1], to[1], *map(socket.inet_aton, (near[0], to[0])), 0, ANY, ANY)
    request = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, ANY) + id_
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        header = struct.pack("=IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0)
        kernel.sendto(header + request, (0, 0))
        answer = kernel.recv(4096)
    (kind,) = struct.unpack_from("=H", answer, 4)
    return str(struct.unpack_from("=I", answer, INODE_AT)[0]) if kind == SOCK_DIAG_BY_FAMILY else ""
