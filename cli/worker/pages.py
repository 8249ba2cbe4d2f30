"""The pages of a worker's HTTP port: /metrics, /healthz, /readyz. Any thread may ask for one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, generate_latest, make_wsgi_app

from metamq.broker.process.pages import BAD, GOOD, NO_PAGE, TEXT, Page
from metamq.prometheus import ClientCollector

if TYPE_CHECKING:
    from metamq.client.consumer.consumer_api import ConsumerApi


class ProgramPages:
    """The state of a worker for its readers. /metrics has everything in prometheus-client's REGISTRY."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
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
        return self.page(path).send(start_response)

    def page(self, path: str, principal: str = "", address: str = "") -> Page:
        """Returns a page. /metrics is for the supervisor of several processes, with the number of this one."""
        if path == "/metrics":
            return Page(GOOD, TEXT, labelled(generate_latest(REGISTRY).decode(), self.number).encode())
        if path == "/healthz":
            return Page.text(GOOD, "alive")
        return self._readiness() if path == "/readyz" else NO_PAGE

    def _readiness(self) -> Page:
        """Partitions without progress are only named while others have some: a rollout must not wait for them."""
        if self._reason or self._consumer is None:
            return Page.text(BAD, self._reason)
        health = self._consumer.health()
        if health.obstacle:
            return Page.text(BAD, health.obstacle)
        lines = ["ready"]
        for tp, one in health.partitions.items():
            lines += [f"{tp}: {one.last_error}"] if one.last_error else []
            lines += [f"{tp}: the handler tries again: {one.handler_error}"] if one.handler_error else []
        return Page.text(GOOD, "\n".join(lines))


def labelled(metrics: str, number: int) -> str:
    """Returns metrics in the text format of Prometheus with the label `worker` in each sample."""
    label = f'worker="{number}"'
    return re.sub(
        r"^([A-Za-z_:][\w:]*)(\{)?",
        lambda found: f"{found[1]}{{{label}" + ("," if found[2] else "}"),
        metrics,
        flags=re.MULTILINE,
    )
