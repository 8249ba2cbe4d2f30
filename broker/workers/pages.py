"""The pages of the supervisor's HTTP port: those of all workers in one answer, and a table of the workers.

/metrics   the metrics of all workers, which have the label `broker`, and two of the supervisor
/healthz   200 unless the event loop of a worker hangs: the supervisor itself starts ended workers again
/readyz    200 if every worker is ready that has not ended for good
/          the state of each worker
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from metamq.broker.process.http import PRINCIPAL
from metamq.broker.process.pages import BAD, GOOD, HIDDEN, HTML, NO_PAGE, TEXT, Page, first_page

if TYPE_CHECKING:
    from metamq.broker.workers.worker import Worker, WorkerState

HELP, TYPE = "# HELP ", "# TYPE "


class WorkerPages:
    """The pages. Any thread."""

    def __init__(self, workers: Sequence[Worker], console_url: str, *, guarded: bool) -> None:
        """`guarded`: /metrics needs a right, which the workers check."""
        self._workers = workers
        self._console_url = console_url
        self._guarded = guarded
        self._registry = CollectorRegistry()
        self._registry.register(WorkerCollector(workers))

    def respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers a request of WSGI."""
        page = self._page(environ["PATH_INFO"], environ[PRINCIPAL], environ["REMOTE_ADDR"])
        return page.send(start_response)

    def _page(self, path: str, principal: str, address: str) -> Page:
        if path == "/metrics":
            return self._metrics(self._asked(path, principal, address))
        states = [worker.state for worker in self._workers]
        if path == "/healthz":
            return health(states, self._asked(path, principal, address))
        if path == "/readyz":
            return readiness(states, self._asked(path, principal, address))
        if path == "/":
            pages = self._asked("/readyz", principal, address)
            title = f"{states[0].kind.capitalize()}s of metamq"
            return Page(GOOD, HTML, first_page(self._console_url, title, table(states, pages)).encode())
        return NO_PAGE

    def _asked(self, path: str, principal: str, address: str) -> list[Page | None]:
        """Returns the page of each worker. All are asked at the same time."""
        with ThreadPoolExecutor(len(self._workers)) as pool:
            return list(pool.map(lambda worker: worker.ask(path, principal, address), self._workers))

    def _metrics(self, pages: list[Page | None]) -> Page:
        answered = [page for page in pages if page is not None]
        hidden = next((page for page in answered if page.status == HIDDEN), None)
        if hidden is not None:
            return hidden
        good = [page.body.decode() for page in answered if page.status == GOOD]
        if self._guarded and not good:
            return Page.text(BAD, "no broker answers")
        own = generate_latest(self._registry).decode()
        return Page(GOOD, CONTENT_TYPE_LATEST, merged([*good, own]).encode())


class WorkerCollector(Collector):
    """The metrics of the supervisor."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        states = [worker.state for worker in self._workers]
        kind = states[0].kind
        up = GaugeMetricFamily("metamq_worker_up", f"1 while the process of the {kind} serves", labels=[kind])
        starts = CounterMetricFamily("metamq_worker_starts", f"Starts of the process of the {kind}", labels=[kind])
        for state in states:
            up.add_metric([str(state.broker_id)], int(state.phase == "serving"))
            starts.add_metric([str(state.broker_id)], state.starts)
        yield from (up, starts)


def merged(texts: Iterable[str]) -> str:
    """Returns metrics in the text format of Prometheus: the samples of each family together, below its first head."""
    families: dict[str, list[str]] = {}
    for text in texts:
        lines: list[str] = []
        is_new = False
        for line in text.split("\n"):
            if line.startswith(HELP):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                lines = families.setdefault(name, [])
            if line and (is_new or not line.startswith((HELP, TYPE))):
                lines.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def health(states: Sequence[WorkerState], pages: Sequence[Page | None]) -> Page:
    """Returns /healthz: good unless a worker that serves does not answer, or says that its loop hangs."""
    lines = [(state.phase != "serving" or (page is not None and page.status == GOOD), state, page)
             for state, page in zip(states, pages, strict=True)]  # fmt: skip
    return _listed(lines)


def readiness(states: Sequence[WorkerState], pages: Sequence[Page | None]) -> Page:
    """Returns /readyz: good if every worker is ready, without those that have ended for good, unless all have."""
    lines = [(page is not None and page.status == GOOD, state, page)
             for state, page in zip(states, pages, strict=True)]  # fmt: skip
    return _listed([line for line in lines if line[1].phase != "ended"] or lines)


def _listed(lines: list[tuple[bool, WorkerState, Page | None]]) -> Page:
    text = "".join(f"{state.title}: {_reason(state, page)}\n" for _good, state, page in lines)
    return Page(GOOD if all(good for good, _state, _page in lines) else BAD, TEXT, text.encode())


def _reason(state: WorkerState, page: Page | None) -> str:
    if page is not None:
        return page.body.decode(errors="replace").strip()
    if state.phase == "serving":
        return "it does not answer"
    return f"{state.phase} ({state.last_end})" if state.last_end else state.phase


def table(states: Sequence[WorkerState], pages: Sequence[Page | None]) -> str:
    """Returns the state of each worker as a table of HTML."""
    heads = "".join(
        f"<th>{head}"
        for head in (states[0].kind.capitalize(), "State", "Address", "Process", "Starts", "Last end", "Ready")
    )
    rows = [
        (state.broker_id, state.phase, state.address, state.pid or "", state.starts, state.last_end,
         _reason(state, page))
        for state, page in zip(states, pages, strict=True)
    ]  # fmt: skip
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in row) for row in rows)
    return f"<table><tr>{heads}{cells}</table>"
