"""The results of the last attempt to connect, for each address of each server: the reasons for a missing connection."""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kazoo.exceptions import ConnectionDropped
from kazoo.handlers.threading import KazooTimeoutError

from metamq.security.tls_errors import ENDED, tls_reason

Server = tuple[str, int]

NO_ANSWER = "no answer"
NO_ANSWER_YET = "no answer yet"
NOT_RESOLVED = "name not resolved"
CLOSED = "it closed the connection"
NOT_ZOOKEEPER = "its answer is not ZooKeeper's"
_REFUSALS = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL}


class _Failure(NamedTuple):
    reason: str
    is_refusal: bool
    """True if an early retry will not help; after silence it may help, since the server may be busy."""


class ConnectAttempts:
    """One thread writes it, any thread reads it: a dictionary keeps its keys once other threads can see it."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.closed = 0
        """Number of connections that a server accepted and closed, instead of giving a session."""
        self._servers = tuple(dict.fromkeys(servers))
        self._failures: dict[Server, dict[str, _Failure | None]] = {server: {"": None} for server in self._servers}

    def begin(self, addresses: Iterable[tuple[str, str, int]]) -> None:
        """Notes the addresses (name, IP address, port) to try next; a server without an address does not resolve."""
        failures: dict[Server, dict[str, _Failure | None]] = {server: {} for server in self._servers}
        for name, ip, port in addresses:
            failures[name, port][ip] = self._failures[name, port].get(ip)
        for found in failures.values():
            if not found:
                found[""] = _Failure(NOT_RESOLVED, is_refusal=True)
        self._failures = failures

    def failed(self, name: str, ip: str, port: int, error: Exception) -> None:
        """Notes a failed attempt."""
        failure = self._failures[name, port][ip] = _failure(error)
        self.closed += failure.reason == CLOSED

    def all_refused(self) -> bool:
        """True if every address of every server has actively refused."""
        return all(
            failure is not None and failure.is_refusal
            for found in self._failures.values()
            for failure in found.values()
        )

    def reason(self) -> str:
        """One reason if all servers have the same: "connection refused"; else "zk1:2181 no answer, zk2:2181 ..."."""
        reasons = {}
        for (name, port), found in self._failures.items():
            distinct = dict.fromkeys(one.reason if one else NO_ANSWER_YET for one in found.values())
            reasons[f"{name}:{port}"] = " and ".join(distinct)
        if len(set(reasons.values())) == 1:
            return next(iter(reasons.values()))
        return ", ".join(f"{server} {reason}" for server, reason in reasons.items())


def _failure(error: Exception) -> _Failure:
    # kazoo wraps what the socket raised.
    cause = error.__context__ if isinstance(error, ConnectionDropped) and error.__context__ is not None else error
    if isinstance(cause, TimeoutError | KazooTimeoutError):
        return _Failure(NO_ANSWER, is_refusal=False)
    if isinstance(cause, ssl.SSLError):
        reason = tls_reason(cause)
        return _Failure(reason[0], is_refusal=reason != ENDED)  # a server that is starting ends handshakes
    if isinstance(cause, OSError) and cause.errno:
        return _Failure(os.strerror(cause.errno).lower(), is_refusal=cause.errno in _REFUSALS)
    if isinstance(cause, ConnectionDropped):
        return _Failure(CLOSED, is_refusal=False)
    return _Failure(NOT_ZOOKEEPER, is_refusal=True)
