"""The command tree, what all commands share, and how a command ends.

Commands are loaded when they are named: `metamq --help` imports none of them. What a command prints on standard output
is data; everything else is talk and goes to standard error. Its end is one of

    0   ok, also when whoever reads our output has had enough, and when a server was asked to end, however early
    1   failed; "metamq: problem" and, in the next line, what to do
    2   usage
    3   unreachable: nobody answers where ZooKeeper or a broker should be
    130 ended by Ctrl-C before it was done
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
from metamq.cli.show.output import say
from metamq.errors import ConnectError, MetamqError

OK, FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130

COMPLETION_VARIABLE = "_METAMQ_COMPLETE"

COMMANDS = {
    "up": ("metamq.cli.commands.up", "up", "Start a ZooKeeper and a broker here, for development."),
    "broker": ("metamq.cli.commands.servers", "broker", "Run a broker."),
    "zookeeper": ("metamq.cli.commands.servers", "zookeeper", "Run a single ZooKeeper server."),
    "topic": ("metamq.cli.commands.topic", "topic", "Create, list, describe, alter and delete topics."),
    "produce": ("metamq.cli.commands.produce", "produce", "Send lines of input, or arguments, to a topic."),
    "consume": ("metamq.cli.commands.consume", "consume", "Print the messages of topics."),
    "group": ("metamq.cli.commands.group", "group", "Look at consumer groups, and mend them."),
    "ha": ("metamq.cli.commands.ha", "ha", "Look at masters and slaves, and promote a slave."),
    "cluster": (
        "metamq.cli.commands.cluster",
        "cluster",
        "Save and restore what ZooKeeper holds; remove brokers.",
    ),
    "tx": ("metamq.cli.commands.tx", "tx", "Look at transactions in doubt, and decide about them."),
    "log": ("metamq.cli.commands.log", "log", "Check and print a broker's files, offline; give up a damaged log."),
    "bench": ("metamq.cli.commands.bench", "bench", "Measure what a running cluster can do."),
    "doctor": ("metamq.cli.commands.doctor", "doctor", "Look at every part, and say what is wrong."),
    "demo": ("metamq.cli.demo.command", "demo", "Watch real data go through a real cluster."),
}


class LazyGroup(Group):
    """Knows its commands by name; imports one when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name, _help = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, _name, text) in COMMANDS.items()])


@click.group(cls=LazyGroup)
@click.version_option(package_name="metamq", prog_name="metamq", message="%(prog)s %(version)s")
def metamq() -> None:
    """A pull-style message queue: brokers, topics, groups, from the command line.

    \b
    metamq up                           a cluster on this machine; elsewhere:
    metamq topic create flights
    echo hello | metamq produce flights
    metamq consume flights -e

    Settings come from a TOML file (--config or METAMQ_CONFIG), then METAMQ_... variables, then options; a later one
    wins. Options that all commands share may stand before or behind the command's name.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, of sys.argv by default, and returns its exit status. Never raises."""
    if COMPLETION_VARIABLE in os.environ:
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
        return tell(_of_output(error), debug=settings.debug)
    except Exception as error:
        return tell(error, debug=settings.debug)


def _of_output(error: OSError) -> OSError:
    """The same error; with a name where standard output still holds what it cannot write. That is then dropped."""
    try:
        sys.stdout.flush()
    except OSError as still:
        silence_stdout()
        if error.filename is None and still.errno == error.errno:
            return OSError(error.errno, error.strerror, "standard output")
    return error


def silence_stdout() -> None:
    """Nobody reads our output any more: Python's own flush at exit is not to complain of it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def tell(error: Exception, *, debug: bool) -> int:
    """Prints what went wrong, in as few words as possible; returns the exit status."""
    if debug:
        traceback.print_exception(error)
    causes = list(dict.fromkeys(_causes(error)))
    for problem, hint in causes:
        say(f"metamq: {problem}")
        if hint:
            say(f"  {hint}")
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
            logging.getLogger("metamq.cli").debug("unexpected", exc_info=one)
            yield f"internal error: {one!r}", "Run it again with --debug, and report what it prints."
