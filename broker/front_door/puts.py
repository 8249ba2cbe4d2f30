"""PutProcessor and TxProcessor: carry out PUT and TX.

Each batch of a PUT succeeds or fails by itself. The PUT is answered when the last of them has its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from metamq.errors import MetamqError, ProtocolError, StorageError
from metamq.wire import status
from metamq.wire.commands import PutEntry, PutResult, unpack_list

if TYPE_CHECKING:
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.front_door.appends import Appends
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.broker.transactions.processor import TransactionalCommandProcessor
    from metamq.broker.transactions.term import SessionConnection
    from metamq.wire.connection import Request


class PutProcessor:
    """Used by the broker's loop only. `failed` is called if the disk fails: the broker must end."""

    def __init__(self, appends: Appends, flusher: Flusher, failed: Callable[[MetamqError], None]) -> None:
        self._appends = appends
        self._flusher = flusher
        self._failed = failed

    def put(self, request: Request, connection: BrokerProtocol) -> None:
        """Stores the batches of a PUT. Raises ProtocolError if the PUT itself is wrong."""
        entries = unpack_list(PutEntry, request.header)
        if not entries:
            raise ProtocolError("a PUT without a batch")
        if sum(entry.size for entry in entries) != len(request.body) or any(entry.size <= 0 for entry in entries):
            raise ProtocolError(f"the batches' sizes do not add up to the body's {len(request.body)} bytes")
        put = PendingPut(request, connection, len(entries))
        position = 0
        for number, entry in enumerate(entries):
            batch = request.body[position : position + entry.size]
            position += entry.size
            try:
                self._append(put, number, entry, batch)
            except MetamqError as error:
                if isinstance(error, StorageError) and not error.retriable:
                    self._failed(error)
                put.done(number, error)

    def _append(self, put: PendingPut, number: int, entry: PutEntry, batch: memoryview) -> None:
        master, partition, config, header = self._appends.admitted(entry, batch)
        appended = self._appends.store(master, partition, batch, header)
        put.stored(number, appended.base_offset, appended.time_us)
        master.transfer.when_acknowledged(partition, config, appended.end_offset, lambda error: put.done(number, error))
        self._flusher.appended(partition)


class PendingPut:
    """The results of a PUT. It answers when the last result is there. Only the first result of an entry counts."""

    __slots__ = ("_connection", "_left", "_request", "_results")

    def __init__(self, request: Request, connection: BrokerProtocol, count: int) -> None:
        self._request = request
        self._connection = connection
        self._left = set(range(count))
        self._results: list[PutResult] = [PutResult(status.OK, -1, -1, None)] * count

    def stored(self, number: int, base_offset: int, append_time_us: int) -> None:
        """Notes the place of an entry. The entry still waits for its acknowledgement."""
        self._results[number] = PutResult(status.OK, base_offset, append_time_us, None)

    def done(self, number: int, error: MetamqError | None) -> None:
        """Notes the final result of an entry."""
        if number not in self._left:  # a flush that cannot begin fails an entry that waits for it, or was answered
            return
        self._left.discard(number)
        if error is not None:
            code, fields = status.encode_error(error)
            self._results[number] = PutResult(code, -1, -1, fields)
        if not self._left:
            self._connection.answer(self._request, self._results)


class TxProcessor:
    """Used by the broker's loop only."""

    def __init__(self, replica: ReplicaStatus, transactions: TransactionalCommandProcessor) -> None:
        self._replica = replica
        self._transactions = transactions

    def tx(self, request: Request, connection: SessionConnection) -> None:
        """Carries out a TX, unless this master is leaving. Raises Fenced, and as TransactionalCommandProcessor.tx()."""
        if (leaving := self._replica.leaving) is not None:
            raise leaving.with_traceback(None)
        self._transactions.tx(request, connection)
