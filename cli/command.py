"""click commands that take the global options, and show them below their own options in `--help`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.context import Globals
from metamq.zk.paths import DEFAULT_ROOT

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

SHORT_HELP_MAX = 200


class GlobalOption(click.Option):
    """An option of every command. If it is given several times, the last one counts."""


def _set(name: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value:
            setattr(context.ensure_object(Globals), name, value)
        return value

    return callback


def _complete_context(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from metamq.cli.completion import complete

    return complete("context", context, incomplete)


def global_options() -> list[click.Parameter]:
    """Returns new objects for the options of every command."""

    def option(*names: str, text: str, **kind: Any) -> GlobalOption:
        callback = _set(names[-1].removeprefix("--"))
        return GlobalOption(list(names), help=text, expose_value=False, callback=callback, **kind)

    return [
        option(
            "--zookeeper", metavar="ADDRESS", text="ZooKeeper's address: host:port,host:port/chroot.  [127.0.0.1:2181]"
        ),
        option(
            "--context",
            metavar="NAME",
            text="A cluster that `metamq context add` has named.",
            shell_complete=_complete_context,
        ),
        option("--config", metavar="FILE", text="A TOML file with settings."),
        option("--root", metavar="PATH", text=f"The path of the cluster in ZooKeeper.  [{DEFAULT_ROOT}]"),
        option("-v", "--verbose", count=True, text="Log more on standard error; -vv logs everything."),
        option("--debug", is_flag=True, text="Log everything, and print the stack trace of an error."),
    ]


class _WithGlobals(click.Command):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings["params"] = [*(settings.get("params") or []), *global_options()]
        settings["context_settings"] = {**SETTINGS, **(settings.get("context_settings") or {})}
        super().__init__(*arguments, **settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        shared: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and not isinstance(parameter, click.Argument):
                (shared if isinstance(parameter, GlobalOption) else own).append(record)
        with formatter.section("Options"):
            formatter.write_dl(own)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
        with formatter.section("Options of every command"):
            formatter.write_dl(shared)


class CliCommand(_WithGlobals):
    """A command. It logs from level `quiet` up, or more with -v. The error for a wrong argument shows an example."""

    def __init__(self, *arguments: Any, quiet: int = logging.WARNING, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._quiet = quiet

    def invoke(self, ctx: click.Context) -> Any:
        ctx.ensure_object(Globals).log(self._quiet)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            example = self._example(ctx)
            if type(error) not in (click.UsageError, click.MissingParameter) or not example:
                raise  # the message names the wrong argument
            raise click.UsageError(f"{error.format_message()}\nWrite it like: {example}", ctx) from error

    def _example(self, ctx: click.Context) -> str:
        """Returns the first example of the help, without the remark beside it."""
        lines = (line.strip().partition("   ")[0] for line in (self.help or "").splitlines())
        return next((line for line in lines if f"{line} ".startswith(f"{ctx.command_path} ")), "")


class Group(_WithGlobals, click.Group):
    """A command with commands below it."""

    command_class = CliCommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands with whole sentences: click cuts them at the width of the terminal."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, one.get_short_help_str(SHORT_HELP_MAX)) for name, one in commands if one and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(shown)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            if not near or "Did you mean" in error.message:  # a later click may suggest a command itself
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from error
