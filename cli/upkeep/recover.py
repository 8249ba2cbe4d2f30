"""`metamq tx recover`: a Recoverer for a database, for one pass or as a service."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.json_log import LOG_FORMAT, log_as_json
from metamq.cli.show.output import TEXT_OR_JSON, print_json, print_json_line, say
from metamq.cli.show.two_signals import TwoSignals
from metamq.cli.show.units import DURATION, Parsed
from metamq.cli.upkeep.database import HELP, Connect, parse_database

if TYPE_CHECKING:
    from metamq.tx.database.recoverer import Recoverer


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
    "--http-port", type=click.IntRange(0, 65535), help="Port of /metrics, /healthz, /readyz; 0 takes a free port."
)
@click.option("--http-host", default="127.0.0.1", show_default=True, help="Address of that port.")
@LOG_FORMAT
@TEXT_OR_JSON
def recover(
    connect: Connect,
    table: str | None,
    grace_ms: int,
    every_ms: int | None,
    http_port: int | None,
    http_host: str,
    log_format: str,
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
        if log_format == "json":
            log_as_json()
            current().logs_json = True
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
    from metamq.broker.process.http import StatusServer
    from metamq.cli.upkeep.recovery_service import RecoveryService

    service = RecoveryService(recoverer, stops)
    server = StatusServer(host, port, service.respond) if port is not None else None
    try:
        if output == "json":
            print_json_line({"http_port": server.port if server is not None else -1})
        service.run(every_s)
    finally:
        if server is not None:
            server.close()
    return 0
