"""AdministrationProcessor: carries out SYNC, PROMOTE, TOPIC and DELEGATE."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from metamq.broker.front_door.audit import CHANGE
from metamq.client.net.inboxes import inbox_of
from metamq.errors import ClosedError, ConfigError, MetamqError, ProtocolError, ServerBusy
from metamq.security.config import BROKERS
from metamq.security.delegation import (
    LIFETIME_MAX_S,
    MECHANISM,
    Delegation,
    Delegations,
    check_rights,
    check_verifier,
    is_renewed,
    with_token,
    without_token,
)
from metamq.security.login import Verifier
from metamq.security.names import check_name
from metamq.security.rights import ALTER, CREATE, DELAYED_SUFFIX, DELETE, SUPERUSERS
from metamq.wire import sync
from metamq.wire.commands import Delegate, Delegated, DelegatedRight, Promote, Promoted, TopicChange, TopicChanged
from metamq.wire.headers import unpack
from metamq.zk.cluster.schemas import SCHEMAS_BYTES_MAX
from metamq.zk.cluster.topics import NEW, from_json
from metamq.zk.names import check_topic
from metamq.zk.security.delegations import DELEGATIONS

if TYPE_CHECKING:
    from metamq.broker.front_door.door import UserDirectory
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.broker.roles.keeper import RoleKeeper
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.wire.connection import Request
    from metamq.zk.cluster.topics import TopicStore
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

DOCUMENT_BYTES_MAX = 64 * 1024 + 2 * SCHEMAS_BYTES_MAX
"""Bytes of a topic's document. Its schemas may be twice as long there, with escapes for quotes."""
CHANGES_MAX = 8
SHOWN_MAX = 10
"""Rights of a token that the audit log shows."""


class AdministrationProcessor:
    """Carries out SYNC, PROMOTE, TOPIC and DELEGATE. Used by the broker's loop only."""

    def __init__(
        self, status: ReplicaStatus, keeper: RoleKeeper, store: TopicStore, session: Session, users: UserDirectory
    ) -> None:
        self._status = status
        self._keeper = keeper
        self._store = store
        self._session = session
        self._users = users
        self._running: set[asyncio.Task[Any]] = set()
        self._changes: set[asyncio.Task[Any]] = set()
        """Changes for clients that wait for ZooKeeper."""
        self._delegating: set[str] = set()
        """The principals for which a token is being changed."""

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
        self._check_busy("changes of topics")
        what = f"{right} topic:{asked.topic}"
        connection.decided(what, CHANGE)
        is_inbox = right == CREATE and asked.topic.endswith(DELAYED_SUFFIX)
        check = is_inbox and connection.access.principal not in ("", *SUPERUSERS)
        self._change(request, connection, self._change_topic(asked, f"{what}, for {connection.who}", check))

    def _check_busy(self, what: str) -> None:
        if len(self._changes) >= CHANGES_MAX:  # the session of ZooKeeper has more urgent requests, too
            raise ServerBusy(what)

    def _change(self, request: Request, connection: BrokerProtocol, work: Coroutine[Any, Any, Any]) -> None:
        change = self._answer_later(request, connection, work)
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)

    async def _change_topic(self, asked: TopicChange, what: str, check: bool) -> TopicChanged:
        """`check`: the topic takes delayed messages, and its maker may only write to the topic that they are for."""
        if check:
            wanted = inbox_of(await self._store.get(asked.topic.removesuffix(DELAYED_SUFFIX)))
            if replace(from_json(asked.topic, asked.document), id=wanted.id) != wanted:
                raise ConfigError(
                    f"topic {asked.topic!r} takes delayed messages, so other settings are for an administrator",
                    hint=f"Send a delayed message to {wanted.topic.removesuffix(DELAYED_SUFFIX)!r}: that makes it.",
                )
        is_done = await self._store.write_for_client(*asked)
        if is_done:
            log.info("done: %s", what)
        return TopicChanged(is_done)

    def delegate(self, request: Request, connection: BrokerProtocol) -> None:
        """Makes, renews or ends a token. Answers when this broker knows it. Raises NotAuthorized, ConfigError."""
        asked, access = unpack(Delegate, request.header), connection.access
        if not access.principal or access.principal == BROKERS or access.is_delegated:
            raise ConfigError(
                "only a user, or the certificate of a client, can delegate its rights",
                hint="Read and write without a token: `delegation` is false.",
            )
        check_name(asked.token_id)
        rights = [unpack(DelegatedRight, one) for one in asked.rights]
        wanted = frozenset((one.right, one.topic) for one in rights)
        check_rights(wanted)
        for right, topic in wanted:
            access.check_delegates(right, topic)
        verifier = Verifier(asked.salt, asked.stored_key, asked.server_key, asked.iterations)
        check_verifier(verifier)
        now_ms = time.time_ns() // 1_000_000
        expires_ms = now_ms + max(min(asked.lifetime_s, LIFETIME_MAX_S), 0) * 1000
        if connection.login_ends_s:
            expires_ms = min(expires_ms, int(connection.login_ends_s * 1000))
        token = Delegation(access.principal, wanted, expires_ms, {MECHANISM: verifier})
        known = self._users.delegations.get(asked.token_id)
        if is_renewed(known, token, now_ms) and expires_ms > now_ms:
            connection.answer(request, Delegated(expires_ms))
            return
        self._check_busy("delegations")
        if access.principal in self._delegating:
            raise ServerBusy("delegations of one client")
        does = "makes or renews" if expires_ms > now_ms else "ends"
        granted = ", ".join(map(" ".join, sorted(wanted)[:SHOWN_MAX]))
        connection.decided(f"{does} token {asked.token_id}: {granted}", CHANGE)
        self._delegating.add(access.principal)
        self._change(request, connection, self._delegate(asked.token_id, token, now_ms))

    async def _delegate(self, token_id: str, token: Delegation, now_ms: int) -> Delegated:
        def change(known: Delegations) -> Delegations:
            if token.expires_ms <= now_ms:
                return without_token(known, token_id, token.principal)
            return with_token(known, token_id, token, now_ms)

        try:
            await DELEGATIONS.change(self._session, change)
            await self._users.read_tokens()
        finally:
            self._delegating.discard(token.principal)
        return Delegated(token.expires_ms)

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
