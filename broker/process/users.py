"""The users of the cluster, their rights and their quotas, as a broker knows them: it follows their nodes.

Without ZooKeeper the last known values apply. This module also limits failed logins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from metamq.errors import ConnectError, CorruptData, NotAuthorized
from metamq.security.delegation import Delegation, Delegations, find_token
from metamq.security.login import TOKEN_PREFIX
from metamq.security.quotas import Meter, Meters, Quotas
from metamq.security.rights import CLUSTER, DESCRIBE, NO_RULES, UNLIMITED, Access, Resource, RuleTable
from metamq.zk.security.delegations import DELEGATIONS
from metamq.zk.security.owner_key import proof_of, read_owner_key
from metamq.zk.security.quotas import QUOTAS
from metamq.zk.security.rights import RULES
from metamq.zk.security.users import USERS
from metamq.zk.session.watches import OneWatch

if TYPE_CHECKING:
    from metamq.security.login import Verifiers
    from metamq.security.tls import BrokerSecurity
    from metamq.zk.cluster.brokers import Watcher
    from metamq.zk.security.users import Users
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

T = TypeVar("T")
RETRY_S = 0.5
FAILURES_MAX = 10
FAILURES_S = 60.0
"""A user with FAILURES_MAX failed logins in this time must wait, at the address that they came from."""
NOTED_MAX = 10_000


async def _nothing() -> None:
    pass


class Followed(Generic[T]):
    """A node that this broker follows. Used by the broker's loop only."""

    def __init__(
        self, session: Session, read: Callable[[Session, Watcher | None], Awaitable[T]], first: T, what: str
    ) -> None:
        """`first` is the value before the node is read; `what` names it in the log."""
        self.value = first
        self.changed: Callable[[], Awaitable[None]] = _nothing
        """Called after each change."""
        self._session = session
        self._read = read
        self._what = what
        self._due = asyncio.Event()
        self._watch = OneWatch(self._due.set)

    async def read(self) -> None:
        """Reads the node, and leaves a watch. If it is damaged, the former value still applies. Raises ConnectError."""
        self._due.clear()
        try:
            value = await self._watch.leave(lambda watch: self._read(self._session, watch))
        except CorruptData as error:
            log.error("%s", error)
            return
        except ConnectError:
            self._due.set()  # the watch may have been lost
            raise
        if value != self.value:
            self.value = value
            await self.changed()

    async def run(self) -> None:
        """Follows the node, until cancelled."""
        while True:
            await self._due.wait()
            await self._session.connected()
            try:
                await self.read()
            except ConnectError as error:
                log.info("the %s cannot be read, the former ones still apply: %s", self._what, error)
                self._due.set()
                await asyncio.sleep(RETRY_S)


async def read_table(session: Session, watch: Watcher | None) -> RuleTable:
    """Returns the present rules. Raises CorruptData, ConnectionLost."""
    return RuleTable(await RULES.read(session, watch))


class KnownUsers:
    """The users and their rights. Used by the broker's loop only."""

    def __init__(self, session: Session, security: BrokerSecurity | None) -> None:
        """`security`: None if it is off; then each client may do everything."""
        self._is_secure = security is not None
        self.tokens = security.tokens if security is not None else None
        self._users: Followed[Users] = Followed(session, USERS.read, {}, "users")
        self._rules: Followed[RuleTable] = Followed(session, read_table, NO_RULES, "rules of rights")
        self._quotas: Followed[Quotas] = Followed(session, QUOTAS.read, {}, "quotas")
        self._delegations: Followed[Delegations] = Followed(session, DELEGATIONS.read, {}, "tokens")
        self._nodes: tuple[Followed[Any], ...] = (self._users, self._rules, self._quotas, self._delegations)
        self._meters = Meters()
        self._session = session
        self._owner_key = b""
        self._failures: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()

    def when_rights_change(self, call: Callable[[], Awaitable[None]]) -> None:
        """Calls `call` after each change of the rules or the quotas."""
        self._rules.changed = self._quotas.changed = call

    def when_tokens_change(self, call: Callable[[], Awaitable[None]]) -> None:
        """Calls `call` after each change of the tokens."""
        self._delegations.changed = call

    @property
    def delegations(self) -> Delegations:
        """The tokens, as last read."""
        return self._delegations.value

    def owner(self, user: str) -> str | None:
        """Returns the principal of a logged-in user, or None if its token has ended."""
        if not user.startswith(TOKEN_PREFIX):
            return user
        token = self._token(user)
        return token.principal if token is not None else None

    def expires_s(self, user: str) -> float:
        """Returns the end of the user's token, in seconds since 1970; 0: it has none."""
        token = self._token(user)
        return token.expires_ms / 1000 if token is not None else 0.0

    def _token(self, user: str) -> Delegation | None:
        return find_token(self._delegations.value, user, time.time_ns() // 1_000_000)

    def zookeeper_proof(self, user: str) -> str:
        """Returns the user's proof of identity for ZooKeeper; empty for a user by a token of a delegation."""
        return proof_of(self._owner_key, user) if self._owner_key and not user.startswith(TOKEN_PREFIX) else ""

    async def read_tokens(self) -> None:
        """Reads the tokens now. Raises ConnectError."""
        await self._delegations.read()

    def access(self, user: str, refused: Callable[[NotAuthorized], None]) -> Access:
        """Returns the user's rights by the present rules. `refused` is called with each refusal."""
        if not self._is_secure:
            return UNLIMITED
        token = self._token(user)
        if token is not None:
            return Access(token.principal, self._rules.value, only=token.rights, refused=refused)
        only: frozenset[tuple[str, str]] | None = frozenset() if user.startswith(TOKEN_PREFIX) else None
        return Access(user, self._rules.value, only=only, refused=refused)

    def meter(self, principal: str, now_s: float) -> Meter | None:
        """Returns the principal's meter, with its present quota, or None without a quota."""
        return self._meters.find(principal, self._quotas.value, now_s)

    def may_describe(self, principal: str) -> bool:
        """True if the principal has the right `describe cluster`. Any thread."""
        return bool(principal) and self._rules.value.decide(principal, DESCRIBE, Resource(CLUSTER)).is_allowed

    def find(self, user: str) -> Verifiers | None:
        """Returns the verifiers of the user's password, or of a token's secret, or None if there is no such user."""
        token = self._token(user)
        return self._users.value.get(user) if token is None else token.verifiers

    def must_wait(self, address: str, user: str) -> bool:
        """True if too many logins of the user have failed, from this address."""
        times = self._failures.get((address, user), ())
        return sum(at > time.monotonic() - FAILURES_S for at in times) >= FAILURES_MAX

    def failed(self, address: str, user: str) -> None:
        """Notes a failed login."""
        times = self._failures.setdefault((address, user), deque(maxlen=FAILURES_MAX))
        times.append(time.monotonic())
        self._failures.move_to_end((address, user))
        if len(self._failures) > NOTED_MAX:
            self._failures.popitem(last=False)

    async def read(self) -> None:
        """Reads all lists. Raises ConnectError."""
        for node in self._nodes:
            await node.read()
        if self._is_secure and self._session.security.zookeeper is not None:
            self._owner_key = await read_owner_key(self._session)

    async def run(self) -> None:
        """Follows them, until cancelled."""
        async with asyncio.TaskGroup() as following:
            for node in self._nodes:
                following.create_task(node.run())
