"""The pages of the brokers' status ports: health, readiness, and several samples of the metrics."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request
from collections.abc import Awaitable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from metamq.cli.support.parcel import LeftOut, in_thread
from metamq.errors import MetamqError
from metamq.security.tls import client_security

if TYPE_CHECKING:
    from metamq.cli.support.parcel import Parcel
    from metamq.client.settings import ClusterAccess

METRICS, CHECKS = "/metrics", ("/healthz", "/readyz")
PAGE_BYTES_MAX = 32 << 20
ANSWER_S = 8.0
NO_ADDRESS = "ZooKeeper has no address of a status port: give it with --status"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: a broker sends none."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


def parse_status(text: str) -> str:
    """Returns the address of a status port, as "http://host:8120", from an address or a URL. Raises ValueError."""
    form = f"{text!r} is not the address of a status port: write it like broker-0:8120 or https://broker-0:8120"
    try:
        found = urlsplit(text if "://" in text else f"http://{text}")
        port = found.port
    except ValueError:
        raise ValueError(form) from None
    if found.scheme not in ("http", "https") or not found.hostname or port is None or "@" in found.netloc:
        raise ValueError(form)
    return f"{found.scheme}://{found.netloc}"


class StatusPages:
    """The pages of several status ports; each is asked once."""

    def __init__(self, access: ClusterAccess, parcel: Parcel, samples: int, every_s: float) -> None:
        """Raises ConfigError if a file of the security settings cannot be used."""
        self._parcel = parcel
        self._samples = samples
        self._every_s = every_s
        self._asked = set[str]()
        security = client_security(access.security).brokers
        self._tls = security.tls.current() if security is not None else ssl.create_default_context()

    def check(self) -> None:
        """Raises LeftOut if no address was known."""
        if not self._asked and not self._parcel.problems:
            raise LeftOut(NO_ADDRESS)

    async def collect(self, addresses: Iterable[str]) -> None:
        """Puts the pages of these addresses into the parcel, and the samples of their metrics."""
        wanted = set(addresses) - self._asked
        self._asked |= wanted
        await asyncio.gather(*map(self._pages_of, wanted))

    async def collect_registered(self, registered: Awaitable[Mapping[str, str]]) -> None:
        """As collect(), with the addresses that replicas have registered in ZooKeeper, by the name of the replica."""
        found = set()
        try:
            addresses = await registered
        except MetamqError as error:
            self._parcel.missing("the addresses in ZooKeeper", error)
            return
        for name, address in addresses.items():
            try:
                found.add(parse_status(address))
            except ValueError as error:  # other clients of ZooKeeper may have written it
                self._parcel.missing(f"replica {name}", str(error))
        await self.collect(found)

    async def _pages_of(self, address: str) -> None:
        folder = f"status/{address.partition('://')[2].replace(':', '_')}"
        for path in CHECKS:
            await self._fetch(address, path, f"{folder}{path}.txt")
        for number in range(1, self._samples + 1):
            if not await self._fetch(address, METRICS, f"{folder}{METRICS}-{number}.txt"):
                return
            if number < self._samples:
                await asyncio.sleep(self._every_s)

    async def _fetch(self, address: str, path: str, name: str) -> bool:
        """Puts a page into the parcel. Returns False if there is none."""
        url = f"{address}{path}"
        try:
            status, text = await in_thread(partial(_get, url, self._tls))
        except (OSError, HTTPException, MetamqError) as error:
            self._parcel.missing(url, str(getattr(error, "reason", None) or error))
            return False
        if path in CHECKS:
            text = f"{status}\n{text}"  # 503 is an answer, too
        elif status != HTTPStatus.OK:
            self._parcel.missing(url, f"status {status}: {text.strip()[:200]}")
            return False
        self._parcel.files[name] = text
        return True


def _get(url: str, tls: ssl.SSLContext) -> tuple[int, str]:
    """Returns the status and the text of a page. Raises OSError, HTTPException; MetamqError if it is too large."""
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls), _NoRedirect()]
    opener = urllib.request.build_opener(*handlers)
    try:
        answer = opener.open(url, timeout=ANSWER_S)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        data: bytes = answer.read(PAGE_BYTES_MAX + 1)
    if len(data) > PAGE_BYTES_MAX:
        raise MetamqError(f"{url} has more than {PAGE_BYTES_MAX:,} bytes")
    return answer.status or 0, data.decode(errors="replace")
