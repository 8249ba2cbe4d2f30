"""The command tree, and the exit statuses.

A command is imported when it runs: `metamq --help` imports none of them. A command prints data on standard output, and
everything else on standard error. Its exit status is one of

    0   ok; also if the reader of the output closes it, and if a signal stops a server, however early
    1   failed; prints "metamq: problem" and, in the next line, the next step
    2   usage
    3   unreachable: ZooKeeper or a broker does not answer
    130 ended by Ctrl-C before the command was done
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

import click

from metamq.cli.command import Group
from metamq.cli.context import Globals
from metamq.cli.show.output import say, silence_stdout
from metamq.errors import ConfigError, ConnectError, MetamqError

log = logging.getLogger("metamq.cli")

OK, FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130

COMPLETION_VARIABLE = "_METAMQ_COMPLETE"

COMMANDS = {
    "up": ("metamq.cli.commands.up", "Start ZooKeeper and a broker on this machine, for development."),
    "broker": ("metamq.cli.commands.servers", "Run a broker, or list the brokers of a cluster."),
    "zookeeper": ("metamq.cli.commands.servers", "Run a ZooKeeper server."),
    "topic": ("metamq.cli.commands.topic", "Create, list, describe, alter, delete and follow topics."),
    "produce": ("metamq.cli.messages.produce", "Send lines of input, or arguments, to a topic."),
    "consume": ("metamq.cli.messages.consume", "Print the messages of topics."),
    "worker": ("metamq.cli.worker.worker", "Run a function of yours with each message of topics."),
    "delayed": ("metamq.cli.messages.delayed", "Show how many delayed messages wait, and when the next is due."),
    "dlq": ("metamq.cli.messages.dlq", "Show, resend, export and purge the dead letters of groups."),
    "group": ("metamq.cli.commands.group", "Show consumer groups, set their offsets, evict members."),
    "ha": ("metamq.cli.commands.ha", "Show masters and slaves, and promote a slave."),
    "cluster": ("metamq.cli.commands.cluster", "Export and restore ZooKeeper's content; remove brokers."),
    "tx": ("metamq.cli.commands.tx", "Show transactions in doubt; commit them or roll them back."),
    "log": ("metamq.cli.commands.log", "Check and print a broker's files, offline; give up a damaged log."),
    "context": ("metamq.cli.commands.context", "Name clusters, and choose the one to work on."),
    "security": ("metamq.cli.commands.security", "Make, renew and revoke the certificates of a cluster."),
    "user": ("metamq.cli.commands.user", "Add, list and remove the users who log in by password."),
    "acl": ("metamq.cli.commands.user", "Show and change the rights of users and certificates."),
    "quota": ("metamq.cli.commands.user", "Show and change quotas of users and certificates."),
    "top": ("metamq.cli.commands.top", "Show brokers, topics and groups as they work: rates and lag."),
    "console": ("metamq.console.command", "Show the cluster in a browser, on this machine."),
    "plan": ("metamq.cli.sizing.plan", "Work out the sizes of a cluster for a workload."),
    "bench": ("metamq.cli.commands.bench", "Measure the throughput of a running cluster."),
    "doctor": ("metamq.cli.commands.doctor", "Check every part of a cluster, and report problems."),
    "bundle": ("metamq.cli.support.bundle", "Collect what a support engineer asks for into one file."),
    "demo": ("metamq.cli.demo.story", "Send real data through a real cluster, and kill parts of it."),
}


class LazyGroup(Group):
    """Lists its commands without an import; imports a command when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _help = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, text) in COMMANDS.items()])


@click.group(cls=LazyGroup)
@click.version_option(package_name="metamq", prog_name="metamq", message="%(prog)s %(version)s")
def metamq() -> None:
    """Run, use and check metamq, a pull-style message queue.

    \b
    metamq up                           starts a cluster; in another terminal:
    metamq topic create flights
    echo hello | metamq produce flights
    metamq consume flights -e

    Settings come from a TOML file (--config or METAMQ_CONFIG), then from METAMQ_... variables, then from options; the
    last one wins. `metamq context` gives names to clusters. The options of every command may stand before or after the
    name of the command.

    Completion of commands, topics, groups, partitions and brokers; in zsh and fish with zsh_source and fish_source:

    \b
    eval "$(_METAMQ_COMPLETE=bash_source metamq)"
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, of sys.argv by default, and returns its exit status. Never raises."""
    if COMPLETION_VARIABLE in os.environ:
        logging.disable()
        metamq.main(prog_name="metamq")
    settings = Globals()
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        with metamq.make_context("metamq", given, obj=settings) as context:
            outcome = metamq.invoke(context)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else OK
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        if settings.logs_json:
            log.error("%s", error.format_message())
            return error.exit_code
        shown = io.StringIO()
        error.show(shown)
        say(shown.getvalue().rstrip())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt, EOFError):
        return INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        return OK
    except OSError as error:
        return report(_named(error), settings)
    except Exception as error:
        return report(error, settings)


def _named(error: OSError) -> OSError:
    """Returns the error; names "standard output" if that still has bytes that it cannot write, and drops the bytes."""
    try:
        sys.stdout.flush()
    except OSError as still:
        silence_stdout()
        if error.filename is None and still.errno == error.errno:
            return OSError(error.errno, error.strerror, "standard output")
    return error


def report(error: Exception, settings: Globals) -> int:
    """Prints each problem with its hint, or logs it if the command logs JSON; returns the exit status."""
    if settings.debug and not settings.logs_json:
        traceback.print_exception(error)
    causes = list(dict.fromkeys(_causes(error)))
    for problem, hint in causes:
        if settings.logs_json:
            log.error("%s", problem, extra={"hint": hint}, exc_info=error if settings.debug else None)
            continue
        say(f"metamq: {problem}")
        if hint:
            say(f"  {hint}")
    if settings.checking and isinstance(error, ConfigError):
        return USAGE
    return UNREACHABLE if all(isinstance(one, ConnectError) for one in _flat(error)) else FAILED


def _flat(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _flat(inner)
    else:
        yield error


def _causes(error: Exception) -> Iterator[tuple[str, str]]:
    for one in _flat(error):
        if isinstance(one, MetamqError):
            yield one.problem, one.hint
        elif isinstance(one, OSError):
            where = f"{one.filename}: " if one.filename else ""
            yield f"{where}{one.strerror or one}", ""
        else:
            log.debug("unexpected", exc_info=one)
            yield f"internal error: {one!r}", "Run the command again with --debug, and report its output."
