"""ReplicaProcessor: carries out SYNC and PROMOTE."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from metamq.errors import ClosedError, MetamqError, ProtocolError
from metamq.wire import sync
from metamq.wire.commands import Promote, Promoted
from metamq.wire.headers import unpack

if TYPE_CHECKING:
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.broker.roles.keeper import RoleKeeper
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.wire.connection import Request
    from metamq.zk.cluster.brokers import Mastership

log = logging.getLogger("metamq.broker")


class ReplicaProcessor:
    """Carries out SYNC and PROMOTE. Used by the broker's loop only."""

    def __init__(self, status: ReplicaStatus, keeper: RoleKeeper) -> None:
        self._status = status
        self._keeper = keeper
        self._promotions: set[asyncio.Task[Mastership]] = set()

    def join(self, request: Request, connection: BrokerProtocol) -> None:
        """Makes the connection the link of a slave. Raises Fenced, ConfigError, ProtocolError."""
        service = self._status.master().service
        if connection.is_link:
            raise ProtocolError("a connection that joins is a link already")
        join = sync.unpack_from_slave(request.header)
        if not isinstance(join, sync.Join):
            raise ProtocolError(f"a SYNC request is a Join, got {type(join).__name__}")
        connection.become_link(request, *service.join(join, connection), service)

    def promote(self, request: Request, connection: BrokerProtocol) -> None:
        """Makes this replica the master. Answers when it is the master, or with the reason why it is not."""
        asked = unpack(Promote, request.header)
        promotion = asyncio.ensure_future(self._keeper.promote(asked))

        def answer(task: asyncio.Task[Mastership]) -> None:
            self._promotions.discard(task)
            error = None if task.cancelled() else task.exception()
            if task.cancelled():
                error = ClosedError("broker")
            if error is None:
                state = task.result().state
                connection.answer(request, Promoted(state.epoch, state.generation))
            elif isinstance(error, MetamqError):
                connection.answer_error(request, error)
            else:
                log.error("a promotion failed", exc_info=error)
                connection.answer_error(request, MetamqError(f"internal error of the broker: {error!r}"))

        self._promotions.add(promotion)
        promotion.add_done_callback(answer)
