"""`metamq tx recover`: a Recoverer for a database, for one pass or as a service with a page for its readiness."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.show.output import TEXT_OR_JSON, print_json, print_json_line, say
from metamq.cli.show.two_signals import TwoSignals
from metamq.cli.show.units import DURATION, Parsed
from metamq.cli.upkeep.database import HELP, Connect, parse_database
from metamq.errors import MetamqError

if TYPE_CHECKING:
    from metamq.tx.database.recoverer import Recovered, Recoverer

POLL_S = 0.2
HUNG_S = 300.0
"""A pass that takes longer hangs, most likely at the database."""


class RecoveryState:
    """The state of the service, for its pages. Any thread may read it."""

    def __init__(self) -> None:
        self._problems = ["no pass has ended yet"]
        """Empty after a good pass."""
        self._began: float | None = None

    def pass_once(self, recoverer: Recoverer) -> Recovered | None:
        """Makes a pass. Returns its result; None after an error, which is then the problem."""
        self._began = time.monotonic()
        try:
            done = recoverer.run_once()
        except MetamqError as error:
            self.note([str(error)])
            return None
        finally:
            self._began = None
        self.note([str(one) for one in done.problems])
        return done

    def note(self, problems: list[str]) -> None:
        """Prints the problems that are new, and their end."""
        for problem in problems:
            if problem not in self._problems:
                say(f"Recovery will be tried again: {problem}")
        if self._problems and not problems:
            say("Recovery works.")
        self._problems = problems

    def page(self, path: str) -> tuple[bool, str] | None:
        """Returns if the service is ready, or healthy, and the reason; None: there is no such page."""
        began = self._began
        is_hung = began is not None and time.monotonic() - began > HUNG_S
        if path == "/healthz":
            return not is_hung, f"a pass takes more than {HUNG_S:g} s" if is_hung else "healthy"
        if path == "/readyz":
            problems = [*self._problems, *(["a pass hangs"] if is_hung else [])]
            return not problems, "\n".join(problems) or "ready"
        return None

    def respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers a request of WSGI."""
        from metamq.broker.process.pages import BAD, GOOD, MISSING, Page

        found = self.page(environ["PATH_INFO"])
        if found is None:
            return Page.text(MISSING, "/healthz and /readyz are here.").send(start_response)
        return Page.text(GOOD if found[0] else BAD, found[1]).send(start_response)


@click.command(cls=CliCommand)
@click.option(
    "--database", "connect", type=Parsed("database", parse_database), required=True, metavar="DATABASE", help=HELP
)
@click.option("--table", metavar="NAME", help="The outcome table.  [metamq_outcomes]")
@click.option(
    "--grace", "grace_ms", type=DURATION, default="10s", show_default=True,
    help="Leave a branch alone for this time after its PREPARE: its application may be at work.",
)  # fmt: skip
@click.option(
    "--every", "every_ms", type=DURATION, help="Run as a service: a pass this often, until SIGTERM or Ctrl-C."
)
@click.option(
    "--http-port", type=click.IntRange(0, 65535), help="Port of the service's /healthz and /readyz; 0 takes a free one."
)
@click.option("--http-host", default="127.0.0.1", show_default=True, help="Address of that port.")
@TEXT_OR_JSON
def recover(
    connect: Connect,
    table: str | None,
    grace_ms: int,
    every_ms: int | None,
    http_port: int | None,
    http_host: str,
    output: str,
) -> int:
    """End the branches that crashed `dbtx` processes left, as the database has decided.

    If the database has no decision, the branch is rolled back. To end branches that another user began, it needs the
    right `recover cluster`. Without --every it makes one pass: the status is 1 if branches wait for that right, or for
    a broker that refuses or does not answer. With -o json the service prints one line with its port.

    \b
    metamq tx recover --database sqlite:///shop.db
    metamq tx recover --database postgresql://db.example.org/shop
    metamq tx recover --database shop.database:connect --every 5s --http-port 8130
    """
    if every_ms is None and http_port is not None:
        raise click.UsageError("--http-port needs --every: one pass serves no pages")
    if every_ms == 0:
        raise click.UsageError("--every is 0: give a time like 5s")
    if every_ms is not None:
        current().log(logging.INFO)
    from metamq.tx.database.recoverer import Recoverer

    given: dict[str, Any] = {"grace_s": grace_ms / 1000} | ({} if table is None else {"table": table})
    if every_ms is not None:
        with TwoSignals(lambda: None) as stops, Recoverer(connect, **given, **current().client()) as service:
            return _serve(service, every_ms / 1000, http_host, http_port, output, stops)
    with Recoverer(connect, **given, **current().client()) as one:
        done = one.run_once()
    if output == "json":
        problems = [one._asdict() | {"xids": [str(xid) for xid in one.xids]} for one in done.problems]
        print_json(done._asdict() | {"problems": problems})
    else:
        say(f"{done.committed} committed, {done.rolled_back} rolled back, {done.left} left.")
    for problem in map(str, done.problems):
        say(problem[0].upper() + problem[1:])
    return 1 if done.problems else 0


def _serve(recoverer: Recoverer, every_s: float, host: str, port: int | None, output: str, stops: TwoSignals) -> int:
    state = RecoveryState()
    server = None
    if port is not None:
        from metamq.broker.process.http import StatusServer

        server = StatusServer(host, port, state.respond)
    try:
        if output == "json":
            print_json_line({"http_port": server.port if server is not None else -1})
        while not stops.asked:
            done = state.pass_once(recoverer)
            if done is not None and done.committed + done.rolled_back:
                say(f"{done.committed} committed, {done.rolled_back} rolled back.")
            next_pass = time.monotonic() + every_s
            while not stops.asked and time.monotonic() < next_pass:
                time.sleep(min(POLL_S, every_s))
    finally:
        if server is not None:
            server.close()
    return 0
