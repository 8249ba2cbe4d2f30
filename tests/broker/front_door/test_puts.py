"""Requests that the broker answers once, whatever happens to their parts."""

from __future__ import annotations

from typing import Any, cast

from metamq.broker.front_door.appends import PendingPut
from metamq.errors import StorageError
from metamq.wire import status
from metamq.wire.commands import Command, PutResult
from metamq.wire.connection import Request


class Answers:
    """The end of a connection: what it would send."""

    def __init__(self) -> None:
        self.sent: list[list[PutResult]] = []

    def answer(self, request: Request, results: list[PutResult]) -> None:
        self.sent.append(list(results))


def test_an_entry_of_a_put_is_done_once() -> None:
    connection = Answers()
    put = PendingPut(Request(1, Command.PUT, None, memoryview(b"")), cast(Any, connection), 2)
    put.stored(0, 7, 1)
    put.done(0, None)
    put.done(0, StorageError("the flush that it waits for cannot begin"))
    assert connection.sent == [], "the other batch is still on its way"
    put.done(1, None)
    put.done(1, None)
    assert [[result.base_offset for result in results] for results in connection.sent] == [[7, -1]]
    assert connection.sent[0][0].status == status.OK
