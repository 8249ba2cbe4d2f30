"""Detects that servers refuse one session permanently: ZooKeeper was replaced by another, or restored from a copy.

A server that is behind the state that a session has seen closes its connections, without a message, until it has caught
up. This is right for a server that lags behind its leader; another server then takes the session. If all servers went
back in time, none ever will. A server that is only starting, or has no leader, also closes connections, but gives no
client a session. So the conclusion is safe enough if another session is given between two refusals.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metamq.security.tls import TlsSource
    from metamq.zk.session.attempts import ConnectAttempts

REFUSED_WITHIN_S = 3.0
"""Maximum seconds until the next attempt after a server has closed the connection."""
ASK_S = 2.0
_LOOK_S = 0.05
_CONNECT = struct.Struct(
    ">iiqiqi16s?"
)  # size, version, newest change seen, time-out, session, size, password, read-only
_CONNECTED = struct.Struct(">iiiq")  # size, version, time-out, session
_CLOSE = struct.pack(">iii", 8, 0, -11)
_TIMEOUT_MS = 1000


async def is_refused_alone(
    attempts: ConnectAttempts,
    is_suspended: Callable[[], bool],
    hosts: Sequence[tuple[str, int]],
    tls: TlsSource | None,
) -> bool:
    """Watches while the session has no connection; returns True when servers refuse it permanently."""
    while is_suspended():
        is_first = await _is_refused(attempts, is_suspended) and await _gives_session(hosts, tls)
        if is_first and await _is_refused(attempts, is_suspended):
            return is_suspended()
    return False


async def _is_refused(attempts: ConnectAttempts, is_suspended: Callable[[], bool]) -> bool:
    """True if a server closes the connection again, within the time in which each server is tried again."""
    loop = asyncio.get_running_loop()
    before, deadline = attempts.closed, loop.time() + REFUSED_WITHIN_S
    while is_suspended() and loop.time() < deadline:
        if attempts.closed > before:
            return True
        await asyncio.sleep(_LOOK_S)
    return False


async def _gives_session(hosts: Sequence[tuple[str, int]], tls: TlsSource | None) -> bool:
    """True if one of the servers begins a session with a new client; that session is ended at once."""
    context = tls.current() if tls is not None else None
    begun = await asyncio.gather(*(_begins_session(host, port, context) for host, port in hosts))
    return any(begun)


async def _begins_session(host: str, port: int, context: ssl.SSLContext | None) -> bool:
    try:
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                writer.write(_CONNECT.pack(_CONNECT.size - 4, 0, 0, _TIMEOUT_MS, 0, 16, b"", False))
                session_id = _CONNECTED.unpack(await reader.readexactly(_CONNECTED.size))[3]
                writer.write(_CLOSE)
                await writer.drain()
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    return bool(session_id)
