"""Large answers that come in pieces: the kernel wakes the client for much at a time, and never for more than comes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop

from metamq.client.net import transport
from metamq.client.net.transport import WAKE_BYTES, BrokerConnection
from metamq.errors import ConnectError
from metamq.wire.commands import Command, Get, HelloReply
from metamq.wire.connection import Greeted, Request, ServerConnection
from metamq.wire.limits import FRAME_BYTES_MAX

BODY = random.Random(17).randbytes(5 * WAKE_BYTES + 12_345)
GREETING = HelloReply(1, 0, 5, 4_000_000, 16_000_000, FRAME_BYTES_MAX, "metamq test")
PAUSE_S = 0.005
"""Between pieces: long enough for the client to read what is there and to wait again."""


class Peer:
    """A broker that answers any request with BODY, cut at `cuts`; with a last cut before the end it then closes."""

    def __init__(self, cuts: list[int], *, ends: bool = False) -> None:
        self._cuts = cuts
        self._ends = ends
        self.served = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = ServerConnection("client", GREETING)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                connection.next_buffer()[: len(data)] = data
                for event in connection.received(len(data)):
                    if isinstance(event, Request):
                        answer = b"".join(connection.respond(event, [], [BODY]))
                        await self._send(writer, answer)
                    elif isinstance(event, Greeted):
                        writer.writelines(event.buffers)
        writer.close()
        self.served.set()

    async def _send(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        ends = [cut if cut >= 0 else len(answer) + cut for cut in self._cuts] + ([] if self._ends else [len(answer)])
        at = 0
        for end in ends:
            writer.write(answer[at:end])
            await writer.drain()
            await asyncio.sleep(PAUSE_S)
            at = end
        if self._ends:
            writer.close()


@contextlib.asynccontextmanager
async def connected(peer: Peer) -> AsyncIterator[BrokerConnection]:
    async with await asyncio.start_server(peer.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = await BrokerConnection.open("127.0.0.1", port)
        try:
            yield connection
        finally:
            connection.abort()
            await peer.served.wait()


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    factory: Callable[[], asyncio.AbstractEventLoop] = request.param
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner


ASK = Get(0, 1, FRAME_BYTES_MAX, FRAME_BYTES_MAX, [], [], [])


@pytest.mark.parametrize("last", [1, 100, WAKE_BYTES - 1, WAKE_BYTES, WAKE_BYTES + 1])
def test_the_last_piece_may_be_of_any_size(run: asyncio.Runner, last: int) -> None:
    """And behind it a small answer comes at once: the client does not wait for more than there is."""

    async def ask() -> None:
        async with connected(Peer([1, 1000, 70_000, 70_001, -last - 3 * WAKE_BYTES, -last])) as connection:
            for _ in range(2):
                async with asyncio.timeout(20):
                    response = await connection.send(Command.GET, ASK)
                assert response.body == BODY

    run.run(ask())


def test_an_answer_that_is_cut_off_is_told(run: asyncio.Runner) -> None:
    async def ask() -> None:
        async with connected(Peer([100_000], ends=True)) as connection:
            with pytest.raises(ConnectError):
                async with asyncio.timeout(20):
                    await connection.send(Command.GET, ASK)

    run.run(ask())


def test_the_kernel_wakes_for_much_at_a_time(run: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, one after the other: without that each would be a wake-up of its own."""
    counts: list[int] = []
    received = transport.BrokerConnection.buffer_updated

    def counted(self: BrokerConnection, count: int) -> None:
        counts.append(count)
        received(self, count)

    monkeypatch.setattr(transport.BrokerConnection, "buffer_updated", counted)

    async def ask() -> None:
        pieces = list(range(10_000, len(BODY), 50_000))
        async with connected(Peer(pieces)) as connection:
            async with asyncio.timeout(20):
                response = await connection.send(Command.GET, ASK)
            assert response.body == BODY
            assert len(counts) < len(pieces)

    run.run(ask())
