"""`metamq worker`: the process around a handler of messages."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from metamq.broker.process.parent import follow_parent
from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.json_log import LOG_FORMAT, log_as_json
from metamq.cli.processes import Stopped
from metamq.cli.show.output import TEXT_OR_JSON, print_json_line, say
from metamq.cli.show.two_signals import TwoSignals
from metamq.cli.show.units import GROUP, Parsed, parse_ms
from metamq.cli.show.user_objects import SEPARATOR
from metamq.cli.worker.child import IDLE_STATUS, PROCESS_VARIABLE, SPENT_STATUS, Spent, reporting
from metamq.cli.worker.program import (
    check_together,
    load_exceptions,
    load_others,
    load_program,
    load_topics,
)
from metamq.cli.worker.running import HandlerRun, stop_at_once
from metamq.client.handling.current import LogFilter
from metamq.client.settings import CONFIG_FILE_VARIABLE, ROOT_VARIABLE, ZOOKEEPER_VARIABLE
from metamq.client.subscriptions import check_subscription
from metamq.errors import MetamqError

if TYPE_CHECKING:
    from metamq.cli.worker.pages import ProgramPages

log = logging.getLogger("metamq.cli")

SECONDS = Parsed("time", lambda text: parse_ms(text) / 1000)
TOPIC_OR_PATH = Parsed("topic", lambda text: text if SEPARATOR in text else check_subscription(text))


@click.command(cls=CliCommand, quiet=logging.INFO)
@click.argument("handler", metavar="MODULE:FUNCTION")
@click.option("-g", "--group", type=GROUP, required=True, help="The group that the worker joins.")
@click.option(
    "-t",
    "--topic",
    "topics",
    type=TOPIC_OR_PATH,
    multiple=True,
    required=True,
    help="Topic to read; may be given several times. MODULE:NAME is a metamq.Topic, which decodes the values.",
)
@click.option(
    "--lifespan",
    metavar="MODULE:FUNCTION",
    help="Context manager that opens what the handler needs, and closes it after the last message.",
)
@click.option("--concurrency", type=click.IntRange(1), default=4, show_default=True, help="Messages at a time.")
@click.option(
    "--order",
    type=click.Choice(("partition", "key")),
    default="partition",
    show_default=True,
    help="One message after the other in each partition, or only for each key.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="A message that fails so often goes to the dead letters of the group.",
)
@click.option(
    "--retry-delay",
    type=SECONDS,
    default="100ms",
    show_default=True,
    help="Pause before the second attempt; it doubles with each further one.",
)
@click.option("--retry-delay-max", type=SECONDS, default="30s", show_default=True, help="The longest pause.")
@click.option(
    "--jitter",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Shorten each pause by chance, by up to this part of it: so many workers do not try at once.",
)
@click.option(
    "--retry-later",
    type=SECONDS,
    help="Try a failed message again after this time, from the topic GROUP.retry, and go on with those behind it. It "
    "doubles each time, up to an hour. Implies --retry-topic.",
)
@click.option("--retry-topic", is_flag=True, help="Also read GROUP.retry: the handler may raise metamq.RetryLater.")
@click.option(
    "--retry-on",
    metavar="MODULE:CLASS",
    multiple=True,
    help="Error of an outage, which is no attempt; may be given several times. Without a module it is one of Python's.",
)
@click.option(
    "--give-up-on",
    metavar="MODULE:CLASS",
    multiple=True,
    help="Error after which a message goes to the dead letters at once; may be given several times.",
)
@click.option(
    "--handler-timeout", type=SECONDS, help="Cancel an attempt of an `async` handler after this time: it has failed."
)
@click.option("--no-dead-letter", is_flag=True, help="End with status 1 at a message that fails in each attempt.")
@click.option(
    "--start",
    type=click.Choice(("earliest", "latest")),
    default="earliest",
    show_default=True,
    help="The place to begin at in partitions for which the group has no offset.",
)
@click.option("--decode", metavar="MODULE:FUNCTION", help="Turns the bytes of a value into the value, as json:loads.")
@click.option("--offsets", metavar="MODULE:NAME", help="A DatabaseOffsets or FileOffsets that keeps the offsets.")
@click.option("--no-auto-commit", is_flag=True, help="The handler calls consumer.commit(); it has a second argument.")
@click.option(
    "--idle-timeout", type=SECONDS, help="End with status 0 when no message came for this time, and none is left."
)
@click.option(
    "--http-port",
    type=click.IntRange(-1, 65535),
    default=-1,
    show_default=True,
    help="Port of /metrics, /healthz, /readyz; 0 takes a free port, -1 none.",
)
@click.option("--http-host", default="127.0.0.1", show_default=True, help="Address of that port.")
@LOG_FORMAT
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Processes of this worker.")
@click.option(
    "--max-messages",
    type=click.IntRange(1),
    help="End a process after about so many messages. With --processes another one starts.",
)
@click.option("--with-parent", is_flag=True, hidden=True)
@TEXT_OR_JSON
def worker(
    handler: str,
    output: str,
    log_format: str,
    http_port: int,
    http_host: str,
    with_parent: bool,
    processes: int,
    **options: Any,
) -> int:
    """Call a function of yours with each message of topics, as a member of a group.

    MODULE:FUNCTION is a function in a module of this folder or of PYTHONPATH. A plain function runs in threads, an
    `async` one in tasks. SIGTERM or Ctrl-C stops the worker: it finishes the messages in progress, commits them, and
    leaves the group. A second signal does not wait, and the status is 130.

    \b
    metamq worker billing:bill --group billing --topic orders
    metamq worker shop.billing:bill -g billing -t orders --decode json:loads

    \b
    metamq worker billing:bill -g billing -t orders --retry-on OSError
    metamq worker billing:bill -g billing -t orders --http-port 8000 --processes 4
    """  # fmt: skip
    logging.getLogger().setLevel(min(logging.INFO, logging.getLogger().level))  # the lines of the user's own modules
    if log_format == "json":
        log_as_json(LogFilter(), group=options["group"])
        logging.captureWarnings(True)
        current().logs_json = True
    as_process = os.environ.pop(PROCESS_VARIABLE, None)
    if with_parent and as_process is None:
        follow_parent(sys.stdin.fileno())
    if processes > 1 and as_process is None:
        return _run_processes(processes, http_host, http_port, partial(_say_ready, output, handler, options))
    spent = Spent(options["max_messages"])
    with (
        TwoSignals(stop_at_once) as signals,
        contextlib.suppress(Stopped),
        _serving(http_host, http_port) if as_process is None else _reporting(int(as_process)) as (pages, port, report),
    ):
        ready = report or partial(_say_ready, output, handler, options, port)
        work = _worker(handler, options, signals, pages, ready, spent)
        try:
            work()
        except MetamqError:
            raise
        except Exception as error:
            log.error("the worker ends: %s: %s", type(error).__name__, error, exc_info=error)
            return 1
    if signals.asked:
        log.info("stopped")
    elif as_process is not None:
        return SPENT_STATUS if spent.is_spent else IDLE_STATUS
    return 0


def _run_processes(count: int, host: str, port: int, ready: Callable[[int], None]) -> int:
    """Runs the supervisor. A process that refuses its options ends it as the options of one process do."""
    from metamq.cli.worker.processes import run_processes

    current().checking = True
    return run_processes(count, host, port, ready)


@contextlib.contextmanager
def _reporting(number: int) -> Iterator[tuple[ProgramPages, int, Callable[[], None]]]:
    """Does what _serving() does in a process of the supervisor, and yields the report to it, too."""
    from metamq.cli.worker.pages import ProgramPages

    with reporting(pages := ProgramPages(number)) as report:
        yield pages, -1, report


@contextlib.contextmanager
def _serving(host: str, port: int) -> Iterator[tuple[ProgramPages, int, None]]:
    """Yields the pages, and the port that serves them, -1 for none. Raises ConfigError if the port is taken."""
    from metamq.broker.process.http import StatusServer
    from metamq.cli.worker.pages import ProgramPages

    pages = ProgramPages()
    if port < 0:
        yield pages, -1, None
        return
    with contextlib.closing(StatusServer(host, port, pages.respond)) as server:
        yield pages, server.port, None


def _worker(
    handler: str,
    options: dict[str, Any],
    signals: TwoSignals,
    pages: ProgramPages,
    ready: Callable[[], None],
    spent: Spent,
) -> Callable[[], None]:
    """Imports what the options name, and returns the work. Raises ConfigError, ConnectError."""
    settings = current()
    access = settings.access()
    # Clients that the user's modules open connect to the same cluster.
    os.environ |= {ZOOKEEPER_VARIABLE: access.zookeeper, ROOT_VARIABLE: access.root}
    if settings.config_file is not None:
        os.environ[CONFIG_FILE_VARIABLE] = settings.config_file
    settings.checking = True
    program = load_program(handler, options["lifespan"])
    consumer, run = _arguments(options)
    check_together(handler, program, consumer, run)
    settings.checking = False
    return HandlerRun(program, consumer | settings.client(), run, signals, pages, ready, spent).work


def _arguments(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of the Consumer and of its run(). Raises ConfigError."""
    run = {name: options[name] for name in ("order", "concurrency", "max_attempts", "jitter")}
    run |= {"retry_delay_s": options["retry_delay"], "retry_delay_max_s": options["retry_delay_max"]}
    run |= {"retry_on": load_exceptions("--retry-on", options["retry_on"]), "retry_later_s": options["retry_later"]}
    run["give_up_on"] = load_exceptions("--give-up-on", options["give_up_on"])
    run |= {"handler_timeout_s": options["handler_timeout"], "dead_letter": not options["no_dead_letter"]}
    consumer = {
        "topics": load_topics(options["topics"]),
        "group": options["group"],
        "start": options["start"],
        "auto_commit": not options["no_auto_commit"],
        "idle_timeout_s": options["idle_timeout"],
        "retry_topic": options["retry_topic"] or options["retry_later"] is not None,
        **load_others(options["decode"], options["offsets"]),
    }
    return consumer, run


def _say_ready(output: str, handler: str, options: dict[str, Any], port: int) -> None:
    group, topics = options["group"], list(options["topics"])
    if output == "json":
        print_json_line({"handler": handler, "group": group, "topics": topics, "http_port": port})
        return
    if current().logs_json:
        log.info("%s works on %s", handler, ", ".join(topics), extra={"http_port": port})
        return
    where = f" The status port is {port}." if port >= 0 else ""
    say(f"{handler} works on {', '.join(topics)} in the group {group}.{where} Ctrl-C stops it.")
