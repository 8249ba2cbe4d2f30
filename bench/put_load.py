"""The clients of bench/puts.py: many connections that send prepared PUTs of small messages, and an echo server.

    python bench/put_load.py load '{"port": 9092, ...}'    sends PUTs, see Load
    python bench/put_load.py echo uvloop                   answers each frame with a small frame
    python bench/put_load.py write uvloop                  also appends what it receives to a file

Both are processes of their own. The clients use sockets and epoll directly, since a client library takes more processor
for a PUT than a broker does. All frames are made before the measurement, each with its own message and checksums.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import select
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import uvloop

from metamq.wire.columns import encode
from metamq.wire.commands import Command, Hello, PutEntry
from metamq.wire.frames import PREFIX, PREFIX_BYTES, encode_frame
from metamq.wire.limits import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN

WARM_PUTS = 4
"""PUTs of each connection before the measurement."""
RECEIVED_BYTES = 256 * 1024
STORED = b"\x91\x94\x00"
"""The beginning of the answer's header: a list of one PutResult, whose status is OK."""
ECHO = bytes(encode_frame(PROTOCOL_VERSION_MAX, Command.PUT, 0, 1, [(0, 100_000, 1_800_000_000_000_000, None)])[0])
"""The answer of the echo server, as long as a broker's."""


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one load process. `window`: requests that a connection has under way. `messages`: of a PUT."""

    port: int
    connections: int
    window: int
    puts: int
    messages: int
    bytes: int
    topic: str
    topic_id: str
    partitions: int
    greets: bool
    """False: the server is an echo, which knows no HELLO."""


def frames_of(load: Load, number: int, count: int) -> Iterator[bytes]:
    """Yields the PUTs of one connection. Idempotent producers share it, as many as requests are under way, and send in
    turn. Each takes the partitions in turn."""
    chance = random.Random(number)
    for index in range(count):
        values = [chance.randbytes(load.bytes) for _ in range(load.messages)]
        own_index, producer = divmod(index, load.window)
        sequence, partition = divmod(own_index, load.partitions)
        producer_id = 1 + number * load.window + producer
        batch = encode(values, base_timestamp_us=1 + index, producer_id=producer_id, sequence=sequence)
        header = [PutEntry(load.topic, load.topic_id, (partition + producer_id) % load.partitions, len(batch))]
        yield b"".join(encode_frame(PROTOCOL_VERSION_MAX, Command.PUT, 0, 1 + index, header, [batch]))


class Client:
    """One connection and its PUTs."""

    def __init__(self, load: Load, number: int, count: int) -> None:
        self._frames = frames_of(load, number, count + WARM_PUTS)
        self.socket = socket.create_connection(("127.0.0.1", load.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        if load.greets:
            hello = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX, "bench", takes_delays=True)
            self.socket.sendall(b"".join(encode_frame(PROTOCOL_VERSION_MIN, Command.HELLO, 0, 0, hello)))
            self._whole_frames()
        for _ in range(WARM_PUTS):
            self.send(1)
            self.received()
        self._frames = iter(list(self._frames))

    def send(self, count: int) -> None:
        """Sends the next `count` PUTs, or the rest."""
        if frames := b"".join(itertools.islice(self._frames, count)):
            self.socket.sendall(frames)

    def received(self) -> int:
        """Receives what is there; returns the number of answers. Each must say that its batch is stored."""
        frames = self._whole_frames()
        assert all(frame[PREFIX_BYTES : PREFIX_BYTES + 3] == STORED for frame in frames), frames
        return len(frames)

    def _whole_frames(self) -> list[bytes]:
        data, at, found = self._rest + self.socket.recv(RECEIVED_BYTES), 0, []
        assert data, "the connection ended"
        while len(data) - at >= PREFIX_BYTES:
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            if end > len(data):
                break
            found.append(data[at:end])
            at = end
        self._rest = data[at:]
        return found


def send_all(load: Load) -> None:
    """Connects, waits for a line of input, sends all PUTs, and prints the seconds that they took."""
    clients = {}
    poll = select.epoll()
    for number in range(load.connections):
        client = Client(load, number, load.puts // load.connections)
        clients[client.socket.fileno()] = client
        poll.register(client.socket, select.EPOLLIN)
    left = load.puts // load.connections * load.connections
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    for client in clients.values():
        client.send(load.window)
    while left:
        for fd, _event in poll.poll():
            client = clients[fd]
            count = client.received()
            left -= count
            client.send(count)
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    sys.stdin.readline()


class Echo(asyncio.BufferedProtocol):
    """Answers each frame, after it has written it to a file if there is one."""

    def __init__(self, file: int | None) -> None:
        self._file = file
        self._buffer = bytearray(RECEIVED_BYTES)
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        at = answers = 0
        while self._filled - at >= PREFIX_BYTES:
            (length, *_fields) = PREFIX.unpack_from(self._buffer, at)
            if at + 4 + length > self._filled:
                break
            at += 4 + length
            answers += 1
        if self._file is not None and at:
            os.write(self._file, memoryview(self._buffer)[:at])
        self._buffer[: self._filled - at] = self._buffer[at : self._filled]
        self._filled -= at
        self._transport.write(ECHO * answers)


async def echo(*, writes: bool) -> None:
    """Serves on a free port, which it prints, until its input ends."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryFile(buffering=0) as file:
        made = partial(Echo, file.fileno() if writes else None)
        server = await loop.create_server(made, "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    if sys.argv[1] == "load":
        send_all(Load(**json.loads(sys.argv[2])))
    else:
        (uvloop.run if sys.argv[2] == "uvloop" else asyncio.run)(echo(writes=sys.argv[1] == "write"))
