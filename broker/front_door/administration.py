"""AdministrationProcessor: carries out SYNC, PROMOTE and TOPIC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from metamq.errors import ClosedError, ConfigError, MetamqError, ProtocolError, ServerBusy
from metamq.security.rights import ALTER, CREATE, DELETE
from metamq.wire import sync
from metamq.wire.commands import Promote, Promoted, TopicChange, TopicChanged
from metamq.wire.headers import unpack
from metamq.zk.cluster.topics import NEW
from metamq.zk.names import check_topic

if TYPE_CHECKING:
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.broker.roles.keeper import RoleKeeper
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.wire.connection import Request
    from metamq.zk.cluster.topics import TopicStore

log = logging.getLogger("metamq.broker")

DOCUMENT_BYTES_MAX = 64 * 1024
CHANGES_MAX = 8


class AdministrationProcessor:
    """Carries out SYNC, PROMOTE and TOPIC. Used by the broker's loop only."""

    def __init__(self, status: ReplicaStatus, keeper: RoleKeeper, store: TopicStore) -> None:
        self._status = status
        self._keeper = keeper
        self._store = store
        self._running: set[asyncio.Task[Any]] = set()
        self._changes: set[asyncio.Task[Any]] = set()
        """Changes of topics that wait for ZooKeeper."""

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
        self._answer_later(request, connection, self._promote(unpack(Promote, request.header)))

    async def _promote(self, asked: Promote) -> Promoted:
        state = (await self._keeper.promote(asked)).state
        return Promoted(state.epoch, state.generation)

    def topic(self, request: Request, connection: BrokerProtocol) -> None:
        """Creates, alters or deletes a topic in ZooKeeper. Answers when it is there. Raises NotAuthorized."""
        asked = unpack(TopicChange, request.header)
        right = DELETE if not asked.document else CREATE if asked.version == NEW else ALTER
        check_topic(asked.topic)
        connection.access.check_topic(right, asked.topic)
        if len(asked.document) > DOCUMENT_BYTES_MAX:
            raise ConfigError(f"the settings of topic {asked.topic!r} take more than {DOCUMENT_BYTES_MAX:,} bytes")
        if len(self._changes) >= CHANGES_MAX:  # the session of ZooKeeper has more urgent requests, too
            raise ServerBusy("changes of topics")
        what = f"{right} topic:{asked.topic}"
        connection.changes_topic(what)
        change = self._answer_later(request, connection, self._change_topic(asked, f"{what}, for {connection.who}"))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)

    async def _change_topic(self, asked: TopicChange, what: str) -> TopicChanged:
        is_done = await self._store.write_for_client(*asked)
        if is_done:
            log.info("done: %s", what)
        return TopicChanged(is_done)

    def _answer_later(
        self, request: Request, connection: BrokerProtocol, work: Coroutine[Any, Any, Any]
    ) -> asyncio.Task[Any]:
        """Answers the request with the result of the work, or with its error."""
        running = asyncio.ensure_future(work)

        def answer(task: asyncio.Task[Any]) -> None:
            self._running.discard(task)
            error = ClosedError("broker") if task.cancelled() else task.exception()
            if error is None:
                connection.answer(request, task.result())
            elif isinstance(error, MetamqError):
                connection.answer_error(request, error)
            else:
                log.error("request %d of %s failed", request.opaque, connection.peer, exc_info=error)
                connection.answer_error(request, MetamqError(f"internal error of the broker: {error!r}"))

        self._running.add(running)
        running.add_done_callback(answer)
        return running
