"""The service of `metamq tx recover --every`: passes of a Recoverer, with pages for readiness, health and metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app

from metamq.broker.process.pages import BAD, GOOD, MISSING, Page
from metamq.errors import MetamqError

if TYPE_CHECKING:
    from collections.abc import Callable

    from metamq.cli.show.two_signals import TwoSignals
    from metamq.tx.database.recoverer import Recoverer

log = logging.getLogger("metamq.cli")

POLL_S = 0.2
HUNG_S = 300.0
"""A pass that takes longer hangs, most likely at the database."""


class RecoveryService:
    """Makes passes until a signal, and has their state for its pages. Any thread may ask for a page."""

    def __init__(self, recoverer: Recoverer, stops: TwoSignals) -> None:
        self._recoverer = recoverer
        self._stops = stops
        self._problems = ["no pass has ended yet"]
        """Empty after a good pass."""
        self._began: float | None = None
        registry = CollectorRegistry()
        self._metrics = make_wsgi_app(registry)
        self._passes = Counter("metamq_recovery_passes", "Passes, by result", ["result"], registry=registry)
        self._ended = Counter("metamq_recovery_branches", "Branches that were ended", ["outcome"], registry=registry)
        self._left = Gauge("metamq_recovery_left_branches", "Branches that the last pass left", registry=registry)
        self._good_at = Gauge(
            "metamq_recovery_last_good_pass_timestamp_seconds", "Time of the last good pass", registry=registry
        )
        for result in ("good", "bad"):
            self._passes.labels(result)
        for outcome in ("committed", "rolled back"):
            self._ended.labels(outcome)

    def run(self, every_s: float) -> None:
        """Makes a pass this often, until a signal."""
        while not self._stops.asked:
            self._pass()
            next_pass = time.monotonic() + every_s
            while not self._stops.asked and time.monotonic() < next_pass:
                time.sleep(min(POLL_S, every_s))

    def _pass(self) -> None:
        self._began = time.monotonic()
        try:
            done = self._recoverer.run_once()
        except MetamqError as error:
            self._note([str(error)])
            return
        finally:
            self._began = None
        self._ended.labels("committed").inc(done.committed)
        self._ended.labels("rolled back").inc(done.rolled_back)
        self._left.set(done.left)
        self._note([str(one) for one in done.problems])
        if done.committed + done.rolled_back:
            log.info("%d committed, %d rolled back", done.committed, done.rolled_back)

    def _note(self, problems: list[str]) -> None:
        """Counts a pass. Logs the problems that are new, and their end."""
        for problem in problems:
            if problem not in self._problems:
                log.warning("recovery will be tried again: %s", problem)
        if self._problems and not problems:
            log.info("recovery works")
        self._problems = problems
        self._passes.labels("bad" if problems else "good").inc()
        if not problems:
            self._good_at.set_to_current_time()

    def page(self, path: str) -> tuple[bool, str] | None:
        """Returns if the service is ready, or healthy, and the reason; None: there is no such page."""
        began = self._began
        is_hung = began is not None and time.monotonic() - began > HUNG_S
        if path == "/healthz":
            return not is_hung, f"a pass takes more than {HUNG_S:g} s" if is_hung else "healthy"
        if path == "/readyz":
            stopping = ["stopping, after this pass"] if self._stops.asked else []
            problems = [*stopping, *self._problems, *(["a pass hangs"] if is_hung else [])]
            return not problems, "\n".join(problems) or "ready"
        return None

    def respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers a request of WSGI."""
        if environ["PATH_INFO"] == "/metrics":
            metrics: Iterable[bytes] = self._metrics(environ, start_response)
            return metrics
        found = self.page(environ["PATH_INFO"])
        if found is None:
            return Page.text(MISSING, "/healthz, /readyz and /metrics are here.").send(start_response)
        return Page.text(GOOD if found[0] else BAD, found[1]).send(start_response)
