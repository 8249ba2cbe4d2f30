"""Processors: finds the function that carries out a request by the number of its command.

Each request gets one answer. A PUT is answered when each of its batches is stored as its topic asks, perhaps after an
fsync; a GET when its fetch session has data, or its long poll ends; OFFSETS in slices; the others at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from metamq.errors import ProtocolError
from metamq.wire.commands import Command
from metamq.wire.connection import Request

if TYPE_CHECKING:
    from metamq.broker.front_door.protocol import BrokerProtocol

Processor = Callable[[Request, "BrokerProtocol"], None]


class Processors:
    """The table of commands. Used by the broker's loop only."""

    def __init__(self, table: Mapping[Command, Processor]) -> None:
        self._table: dict[int, Processor] = {int(command): processor for command, processor in table.items()}

    def process(self, request: Request, connection: BrokerProtocol) -> None:
        """Starts on a request. Raises the error that answers the request."""
        processor = self._table.get(request.command)
        if processor is None:
            known = ", ".join(f"{command} {Command(command).name}" for command in self._table)
            raise ProtocolError(f"command {request.command} is not known to this broker", hint=f"It knows {known}.")
        if request.body and request.command not in (Command.PUT, Command.TX):
            raise ProtocolError(f"{Command(request.command).name} has no body, got {len(request.body):,} bytes")
        processor(request, connection)
