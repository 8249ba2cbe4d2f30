"""The pages of a broker's HTTP port: /metrics, /healthz, /readyz and /. Any thread may ask for one.

With `http_tls` the port speaks TLS only, and shows /metrics to a client whose certificate has the right `describe
cluster`. The page /settled is only for the supervisor of `metamq broker --processes`.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from metamq.broker.front_door.audit import REFUSED, Audit
from metamq.broker.process.http import PRINCIPAL
from metamq.broker.process.metrics import BrokerCollector
from metamq.errors import ConfigError, MetamqError

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.broker.process.server import Broker
    from metamq.broker.process.users import KnownUsers
    from metamq.security.tls import BrokerSecurity, FreshContext

GOOD, BAD, HIDDEN, MISSING = "200 OK", "503 Service Unavailable", "403 Forbidden", "404 Not Found"
TEXT, HTML = "text/plain", "text/html; charset=utf-8"
PATHS = ("/metrics", "/healthz", "/readyz")
SETTLED = "/settled"
"""200 if the replica is ready and in sync, so that the next one may be restarted."""
ASK_S = 5.0


class Page(NamedTuple):
    """An answer of HTTP."""

    status: str
    kind: str
    body: bytes

    @classmethod
    def text(cls, status: str, text: str) -> Page:
        """Returns a page with one line of text."""
        return cls(status, TEXT, f"{text}\n".encode())

    def send(self, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers a request of WSGI with it."""
        start_response(self.status, [("Content-Type", self.kind)])
        return [self.body]


NO_PAGE = Page.text(MISSING, "/metrics, /healthz and /readyz are here.")


class StatusGuard(NamedTuple):
    """The protection of the port. Any thread."""

    tls: FreshContext
    may_describe: Callable[[str], bool]
    """True if this principal may see the metrics."""
    refused: Callable[[str, str], None]
    """Called with the principal and the address of a client that may not."""


def guard_of(
    config: BrokerConfig, security: BrokerSecurity | None, users: KnownUsers, audit: Audit
) -> StatusGuard | None:
    """Returns the protection of the port, or None. Raises ConfigError if `http_tls` is set without certificates."""
    tls = port_tls(config, security)
    if tls is None:
        return None
    loop = asyncio.get_running_loop()

    def refused(principal: str, address: str) -> None:
        loop.call_soon_threadsafe(partial(audit.record, REFUSED, principal, address, "/metrics", allowed=False))

    return StatusGuard(tls, users.may_describe, refused)


def port_tls(config: BrokerConfig, security: BrokerSecurity | None) -> FreshContext | None:
    """Returns the TLS of the port, or None. Raises ConfigError if `http_tls` is set without certificates."""
    if not config.http_tls:
        return None
    if security is None:
        raise ConfigError(
            "http_tls is on, and security is off", hint="Set `dir` in [security], or METAMQ_SECURITY_DIR."
        )
    return security.server


class BrokerPages:
    """The pages of one broker. Any thread except for that of the broker's loop."""

    def __init__(self, broker: Broker, guard: StatusGuard | None = None) -> None:
        self._broker = broker
        self._guard = guard
        self._registry = CollectorRegistry()
        self._registry.register(BrokerCollector(broker))
        self._negotiated = make_wsgi_app(self._registry)
        self._first_page = first_page(broker.config.console_url)

    def respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers a request of WSGI. Its client chooses the format of /metrics."""
        path = environ["PATH_INFO"]
        refusal = self._refusal(path, environ[PRINCIPAL], environ["REMOTE_ADDR"])
        if path == "/metrics" and refusal is None:
            metrics: Iterable[bytes] = self._negotiated(environ, start_response)
            return metrics
        return (refusal or self._page(path)).send(start_response)

    def page(self, path: str, principal: str, address: str) -> Page:
        """Returns a page for a principal; /settled, too. /metrics has the format of text."""
        refusal = self._refusal(path, principal, address)
        if refusal is not None:
            return refusal
        if path == "/metrics":
            return Page(GOOD, CONTENT_TYPE_LATEST, generate_latest(self._registry))
        return self._settled() if path == SETTLED else self._page(path)

    def _refusal(self, path: str, principal: str, address: str) -> Page | None:
        if path != "/metrics" or self._guard is None or self._guard.may_describe(principal):
            return None
        self._guard.refused(principal, address)
        return Page.text(HIDDEN, "/metrics needs a certificate with the right `describe cluster`")

    def _page(self, path: str) -> Page:
        if path == "/":
            return Page(GOOD, HTML, self._first_page.encode())
        checks = {"/healthz": self._broker.health, "/readyz": self._broker.readiness}
        if path not in checks:
            return NO_PAGE
        good, reason = checks[path]()
        return Page.text(GOOD if good else BAD, reason)

    def _settled(self) -> Page:
        good, reason = self._broker.readiness()
        if not good:
            return Page.text(BAD, reason)
        asked = asyncio.run_coroutine_threadsafe(self._broker.is_in_sync(), self._broker.loop)
        try:
            good = asked.result(ASK_S)
        except (TimeoutError, MetamqError) as error:
            return Page.text(BAD, f"ZooKeeper does not say if the replica is in sync: {error or 'no answer'}")
        return Page.text(GOOD if good else BAD, "in sync" if good else "not in sync")


def first_page(console_url: str, title: str = "A metamq broker", more: str = "") -> str:
    """Returns the page `/` as HTML, with a link to the console, or the command that starts it; `more` is HTML."""
    address = html.escape(console_url)
    console = f'<a href="{address}">{address}</a>' if console_url else "run <code>metamq console</code>"
    links = " ".join(f'<a href="{path}">{path}</a>' for path in PATHS)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>{more}'
        f"<p>The console shows the cluster: {console}</p><p>This port has {links}</p></html>\n"
    )
