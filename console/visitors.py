"""The visitors of the console, and the view of the cluster that each of them has.

Without a login all visitors share the identity of the settings. With it, a visitor gives the name and the password of a
user of the cluster. A broker verifies them, and the pages then ask the cluster as this user: brokers hold its rights,
and the console has none of its own.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from metamq.client.admin.aio_admin import Admin
from metamq.console.console_view import ConsoleView, answer_or_problem, within_time
from metamq.errors import AuthenticationFailed, MetamqError, NotAuthorized
from metamq.security.config import PasswordConfig

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess
    from metamq.console.console_view import Doctor

log = logging.getLogger("metamq.console")

VERIFIED_S = 60.0
"""The time after which a broker verifies a known visitor again: the user may be removed, or have another password."""
VISITORS_MAX = 16
Key = tuple[str, bytes]
"""The user, and a digest of the password."""
SHARED: Key = ("", b"")
"""The key of the one view that all visitors have without a login."""
NO_BROKER = "no broker answers, and only brokers verify passwords"


class Credentials(NamedTuple):
    """The name of a user, and the password that was typed."""

    user: str
    password: str


def credentials_of(header: str) -> Credentials | None:
    """Returns the content of a header Authorization of the scheme Basic; None if it is something else."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return Credentials(user, password) if user and colon else None


@dataclass(slots=True)
class _Known:
    """A visitor with an open view; `ends` closes it."""

    view: ConsoleView
    ends: contextlib.AsyncExitStack
    verified_at_s: float


class Visitors:
    """The open views, at most VISITORS_MAX. Belongs to one event loop. `config` is the settings file."""

    def __init__(
        self, access: ClusterAccess, config: str | None, doctor: Callable[[ClusterAccess], Doctor], *, with_login: bool
    ) -> None:
        self.with_login = with_login
        self._access = access
        self._config = config
        self._doctor = doctor
        self._known: OrderedDict[Key, _Known] = OrderedDict()
        """The visitor of the last request is the last."""
        self._door = asyncio.Lock()
        """One new visitor at a time: so it takes long to guess a password."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connects to the cluster for a `with` block, unless each visitor logs in. Raises ConnectError."""
        try:
            if not self.with_login:
                await self._enter(SHARED, self._access)
            yield
        finally:
            for known in self._known.values():
                await known.ends.aclose()

    async def visit(self, authorization: str) -> tuple[ConsoleView, str]:
        """Returns the view for a request with this header Authorization, and the user who logged in, if any.

        Raises as view_of().
        """
        given = credentials_of(authorization)
        view = await self.view_of(given)
        return view, given.user if given is not None and self.with_login else ""

    async def view_of(self, given: Credentials | None) -> ConsoleView:
        """Returns the view of a visitor. Raises AuthenticationFailed, and MetamqError if no broker can verify it."""
        if not self.with_login:
            return self._known[SHARED].view
        if given is None:
            raise AuthenticationFailed("the console", "it needs the name and the password of a user", hint="")
        key = given.user, hashlib.sha256(given.password.encode()).digest()
        access = self._access._replace(security=self._security(given))
        known = self._known.get(key) or await self._new(key, access)
        if time.monotonic() - known.verified_at_s > VERIFIED_S:
            await self._verify_again(key, known, access)
        with contextlib.suppress(KeyError):  # another visitor took its place
            self._known.move_to_end(key)
        return known.view

    def _security(self, given: Credentials) -> PasswordConfig:
        files = self._access.security.files()
        return PasswordConfig(
            ca=files.ca, revoked=files.revoked, zookeeper_tls=self._access.security.zookeeper_tls, name=given.user,
            password=given.password,
        )  # fmt: skip

    async def _new(self, key: Key, access: ClusterAccess) -> _Known:
        async with self._door:
            if key in self._known:
                return self._known[key]
            await self._verify(access)
            while len(self._known) >= VISITORS_MAX:
                _key, oldest = self._known.popitem(last=False)
                await oldest.ends.aclose()
            return await self._enter(key, access)

    async def _enter(self, key: Key, access: ClusterAccess) -> _Known:
        client = self._client(access)
        async with contextlib.AsyncExitStack() as stack:
            view = ConsoleView(await stack.enter_async_context(Admin(**client)), client, self._doctor(access))
            stack.callback(view.close)
            await answer_or_problem(view.load(with_groups=False))  # so that the first page has rates
            self._known[key] = _Known(view, stack.pop_all(), time.monotonic())
        return self._known[key]

    async def _verify_again(self, key: Key, known: _Known, access: ClusterAccess) -> None:
        """Raises AuthenticationFailed. While no broker answers, a known visitor may go on: it looks for the reason."""
        known.verified_at_s = time.monotonic()
        try:
            await self._verify(access)
        except AuthenticationFailed:
            if self._known.pop(key, None) is known:
                await known.ends.aclose()
            raise
        except MetamqError as error:
            log.info("the login of a visitor is not verified again: %s", error)

    async def _verify(self, access: ClusterAccess) -> None:
        async with Admin(**self._client(access)) as admin:  # new connections: a broker verifies each one once
            for broker_id, broker in (await within_time(admin.brokers())).items():
                answer = await answer_or_problem(admin.statistics(broker_id)) if broker.live else None
                if isinstance(answer, AuthenticationFailed):
                    raise answer
                if answer is not None and (isinstance(answer, NotAuthorized) or not isinstance(answer, MetamqError)):
                    return
        raise MetamqError(NO_BROKER, hint="`metamq doctor` shows the reason.")

    def _client(self, access: ClusterAccess) -> dict[str, Any]:
        return {**access._asdict(), "config": self._config}
