"""Requests of one principal to a real broker, frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from metamq import SecurityConfig
from metamq.client.net.transport import BrokerConnection
from metamq.errors import MetamqError
from metamq.security.certificates import Authority
from metamq.security.tls import client_security
from metamq.testing import Cluster
from metamq.wire.commands import Command, GetResult, OffsetsResult, PutResult
from metamq.wire.frames import Buffer
from metamq.wire.status import decode_error
from tests.parts import SLOW_S
from tests.security.certificate_folder import client_of


def of(authority: Authority, name: str) -> SecurityConfig:
    return replace(client_of(authority.folder, name), zookeeper_tls=False)


def new_topic(running: Cluster, name: str) -> tuple[str, str]:
    """Its name and id."""
    running.create_topic(name, partitions=1)
    with running.admin() as admin:
        return name, admin.topics()[name].id


class RawClient:
    """Raw requests of one principal."""

    def __init__(self, running: Cluster, authority: Authority, name: str) -> None:
        security = client_security(of(authority, name)).brokers
        self._runner = asyncio.Runner()
        opening = BrokerConnection.open("127.0.0.1", running.broker.port, security=security, timeout_s=SLOW_S)
        self._connection = self._runner.run(opening)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_error: object) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()

    def ask(self, command: int, header: Any, body: bytes = b"") -> Any:
        """The header of the answer. Raises the broker's error."""
        bodies: list[Buffer] | None = [body] if body else None
        return self._runner.run(self._connection.request(command, header, bodies, timeout_s=SLOW_S))

    def ask_in_the_meantime(self, command: int, header: Any, do: Callable[[], object]) -> Any:
        """The header of the answer. `do` runs in a thread once the broker has the request, and waits to answer it."""

        async def ask() -> Any:
            asked = asyncio.ensure_future(self._connection.request(command, header, timeout_s=SLOW_S))
            await asyncio.sleep(0)  # it is sent
            await self._connection.request(Command.OFFSETS, [], timeout_s=SLOW_S)  # is answered behind it
            await asyncio.to_thread(do)
            return await asked

        return self._runner.run(ask())

    def error(self, command: int, header: Any, body: bytes = b"") -> MetamqError:
        """That of the request, or of its only entry."""
        try:
            answer = self.ask(command, header, body)
        except MetamqError as error:
            return error
        kinds: dict[int, Any] = {Command.PUT: PutResult, Command.GET: GetResult, Command.OFFSETS: OffsetsResult}
        (entry,) = answer
        result = kinds[command](*entry)
        return decode_error(result.status, result.error)
