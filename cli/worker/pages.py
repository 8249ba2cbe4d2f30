"""The pages of a worker's HTTP port: /metrics, /healthz, /readyz. Any thread may ask for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, make_wsgi_app

from metamq.broker.process.pages import BAD, GOOD, NO_PAGE, Page
from metamq.prometheus import ClientCollector

if TYPE_CHECKING:
    from metamq.client.consumer.consumer_api import ConsumerApi


class ProgramPages:
    """The state of a worker for its readers. /metrics has everything in prometheus-client's REGISTRY."""

    def __init__(self) -> None:
        self._metrics = make_wsgi_app(REGISTRY)
        self._consumer: ConsumerApi[Any] | None = None
        self._reason = "starting"

    def reads(self, consumer: ConsumerApi[Any]) -> None:
        """Notes that the consumer is open, and adds its metrics."""
        REGISTRY.register(ClientCollector(consumer))
        self._consumer = consumer
        self._reason = ""

    def ends(self) -> None:
        """Notes that the worker takes no more messages."""
        self._reason = "stopping"

    def respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers a request of WSGI."""
        path = environ["PATH_INFO"]
        if path == "/metrics":
            metrics: Iterable[bytes] = self._metrics(environ, start_response)
            return metrics
        page = {"/healthz": lambda: Page.text(GOOD, "alive"), "/readyz": self._readiness}.get(path)
        return (page() if page is not None else NO_PAGE).send(start_response)

    def _readiness(self) -> Page:
        problem = self._problem()
        return Page.text(BAD if problem else GOOD, problem or "ready")

    def _problem(self) -> str:
        if self._reason or self._consumer is None:
            return self._reason
        health = self._consumer.health()
        if not health.delivering:
            return "ZooKeeper does not answer"
        for tp, one in health.partitions.items():
            if one.last_error:
                return f"{tp.topic}/{tp.partition}: {one.last_error}"
        return ""
