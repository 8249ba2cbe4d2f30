"""A connection that is being opened in the moment in which a broker stops accepting."""

from __future__ import annotations

import asyncio
import socket

import pytest

from metamq.broker.front_door.acceptor import Acceptor


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_is_being_opened_ends_with_the_acceptor(turns: int) -> None:
    """With no turn of the loop in between, its opening has not begun. With many, its protocol has it."""
    made: list[asyncio.BaseTransport] = []

    class Noted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        acceptor = Acceptor(listener, Noted)
        with socket.create_connection(listener.getsockname()) as client:
            client.setblocking(False)
            acceptor._accept()
            for _ in range(turns):
                await asyncio.sleep(0)
            acceptor.close()
            await asyncio.gather(*acceptor._opening, return_exceptions=True)
            for transport in made:
                transport.close()
            return await asyncio.wait_for(loop.sock_recv(client, 1), 10)

    assert asyncio.run(run()) == b""
    if turns == 0:
        assert not made
    if turns == 4:
        assert made
