"""PUTs straight at one replica's port: not through ZooKeeper, which would lead a producer to another one."""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import NamedTuple, Self

from metamq.client.net.transport import BrokerConnection
from metamq.errors import ConnectError, MetamqError
from metamq.testing import BrokerProcess
from metamq.wire import status
from metamq.wire.columns import encode
from metamq.wire.commands import Command, PutEntry, PutResult
from metamq.wire.connection import Response
from metamq.wire.headers import unpack_list
from metamq.zk.cluster.topics import TopicConfig
from tests.parts import SLOW_S, wait_until

INTERVAL_S = 0.005


class Answer(NamedTuple):
    """To one PUT; `error` is None when it was acknowledged. Times are of time.monotonic()."""

    value: bytes
    sent_at: float
    answered_at: float
    error: MetamqError | None


class DirectPuts:
    """One message after the other to partition 0 of a topic, without waiting for answers; from `with` to its end."""

    def __init__(self, replica: BrokerProcess, topic: TopicConfig) -> None:
        self.answers: list[Answer] = []
        """As they come; to be looked at at any time."""
        self._replica = replica
        self._topic = topic
        self._sent = 0
        self._ended = threading.Event()
        self._began = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="direct PUTs")

    @property
    def acknowledged(self) -> list[Answer]:
        """Those that were."""
        return [answer for answer in list(self.answers) if answer.error is None]

    def settle(self) -> None:
        """Returns once the answers that have come by now are noted."""
        turned = self._sent + 2
        wait_until(lambda: self._sent >= turned, what="a turn of the loop")

    @property
    def refused(self) -> list[Answer]:
        """Those that were not, or of which it is not known."""
        return [answer for answer in list(self.answers) if answer.error is not None]

    async def _run(self) -> None:
        connection = await BrokerConnection.open("127.0.0.1", self._replica.port, timeout_s=SLOW_S)
        self._began.set()
        try:
            number = 0
            while not self._ended.is_set():
                self._put(connection, b"direct-%d" % number)
                number += 1
                self._sent = number
                await asyncio.sleep(INTERVAL_S)
        except ConnectError:  # the broker has ended
            return
        finally:
            await connection.close()

    def _put(self, connection: BrokerConnection, value: bytes) -> None:
        batch = encode([value], base_timestamp_us=1)
        sent_at = time.monotonic()
        entry = PutEntry(self._topic.topic, self._topic.id, 0, len(batch))
        future = connection.send(Command.PUT, [entry], [batch])

        def answered(future: asyncio.Future[Response]) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            (result,) = unpack_list(PutResult, future.result().header)
            error = status.decode_error(result.status, result.error) if result.status != status.OK else None
            self.answers.append(Answer(value, sent_at, time.monotonic(), error))

        future.add_done_callback(answered)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._began.wait(SLOW_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(SLOW_S)
