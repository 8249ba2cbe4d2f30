"""The login of one connection at a broker: its steps, its limits, its lines in logs, and the end of a token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from metamq.broker.front_door.audit import LOGIN
from metamq.errors import AuthenticationFailed
from metamq.security.login import BrokerLogin

if TYPE_CHECKING:
    from metamq.broker.front_door.door import FrontDoor
    from metamq.wire.connection import LoginStep

log = logging.getLogger("metamq.broker")

USER_CHARS_MAX = 64
"""Characters of a name or mechanism of an unknown client, in logs."""


class ConnectionLogin:
    """One login, by password or token. Used by the broker's loop only."""

    def __init__(self, door: FrontDoor, peer: str, address: str, tls: Any) -> None:
        self._door = door
        self._peer = peer
        self._address = address
        self._login = BrokerLogin(peer, door.users.find, tls.context.identity, door.users.tokens)
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def user(self) -> str:
        """The name that the client gave. It is verified when the last step is done."""
        return self._login.user

    @property
    def expires_s(self) -> float:
        """The end of the client's token (JWT), in seconds since 1970; 0: it has none."""
        return self._login.expires_s

    def next(self, step: LoginStep) -> tuple[bytes, bool]:
        """Takes a message of the client; returns the answer, and if the login is done.

        Raises AuthenticationFailed, after it was counted, logged and audited.
        """
        try:
            data, is_done = self._login.next(step.mechanism, step.data)
        except AuthenticationFailed as error:
            self._door.users.failed(self._address, self.user)
            self._note(step, error)
            raise
        if self._door.users.must_wait(self._address, self.user):
            too_many = AuthenticationFailed(self._peer, "too many logins have failed", hint="Wait for a minute.")
            self._note(step, too_many)
            raise too_many
        return data, is_done

    def _note(self, step: LoginStep, error: AuthenticationFailed) -> None:
        user = self.user[:USER_CHARS_MAX]
        log.warning("%s is refused as the user %r: %s", self._peer, user, error.reason)
        self._door.counters.failed_logins += 1
        mechanism = step.mechanism[:USER_CHARS_MAX]
        self._door.audit.record(LOGIN, user, self._peer, mechanism, allowed=False, reason=error.reason)

    def end_at_expiry(self, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        """Calls `end` when the client's token expires. A token of a delegation may be renewed before."""
        expires_s = self._login.expires_s or self._door.users.expires_s(self.user)
        if expires_s:
            self._expiry = loop.call_later(expires_s - time.time(), self._due, loop, end)

    def _due(self, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        later_s = self._door.users.expires_s(self.user)
        if later_s:
            self._expiry = loop.call_later(later_s - time.time(), self._due, loop, end)
            return
        log.info("%s: the token of %s has expired: closed", self._peer, self.user)
        end()

    def close(self) -> None:
        """Stops waiting for the token's expiry."""
        if self._expiry is not None:
            self._expiry.cancel()
