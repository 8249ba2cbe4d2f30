"""Data on standard output: tables for people, JSON for programs. Messages, plans, questions on standard error."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import click

from metamq.cli.show.terminal import escaped_json, shown
from metamq.words import count as count

F = TypeVar("F", bound=Callable[..., Any])

NOTHING = "-"
GAP = "  "
DEFAULT_WIDTH = 80
SHOWN_MAX = 12


def output_option(*kinds: str, text: str = "Output format.") -> Callable[[F], F]:
    """Returns the option -o; the first kind is the default."""
    return click.option("-o", "--output", type=click.Choice(kinds), default=kinds[0], show_default=True, help=text)


TABLE_OR_JSON = output_option("table", "json")
TEXT_OR_JSON = output_option("text", "json")


def print_json(value: Any) -> None:
    """Prints one JSON document."""
    click.echo(escaped_json(json.dumps(value, indent=2, ensure_ascii=False)))


def print_json_line(value: Any) -> None:
    """Prints one JSON document on one line, and flushes it: its reader needs it while the command continues."""
    click.echo(escaped_json(json.dumps(value, ensure_ascii=False)))
    sys.stdout.flush()


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints columns as wide as their longest texts; None appears as "-", numbers are right-aligned.

    If the table is wider than the terminal, the columns with the longest texts become narrower. After a text that does
    not fit into its column, the rest of the row continues on the next line.
    """
    for line in table_lines(headings, rows):
        click.echo(line)


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns the lines of a table."""
    plain = list(rows)
    cells = [[shown(_cell(value), sys.stdout) for value in row] for row in plain]
    right = [_are_numbers([row[column] for row in plain]) for column in range(len(headings))]
    widths = _widths(headings, cells, right)

    def lines(texts: Sequence[str]) -> Iterator[str]:
        begun: list[str] = []
        for column, (text, width) in enumerate(zip(texts, widths, strict=True)):
            begun.append(text.rjust(width) if right[column] else text.ljust(width))
            if len(text) > width and column < len(texts) - 1:
                yield GAP.join(begun).rstrip()
                begun = [" " * width for width in widths[: column + 1]]
        yield GAP.join(begun).rstrip()

    return [styled(next(lines(headings)), sys.stdout, bold=True), *(line for row in cells for line in lines(row))]


def _widths(headings: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> list[int]:
    """Returns the widths of the longest texts; smaller ones if a terminal is too narrow, but no less than a heading."""
    widths = [max(len(line[column]) for line in [headings, *cells]) for column in range(len(headings))]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - (_width(sys.stdout) or sys.maxsize)
    least = [width if right[column] else len(headings[column]) for column, width in enumerate(widths)]
    while excess > 0 and widths != least:
        spare = [width if width > low else 0 for width, low in zip(widths, least, strict=True)]
        widest = spare.index(max(spare))
        next_widest = max((width for column, width in enumerate(spare) if column != widest), default=0)
        before = widths[widest]
        widths[widest] = max(before - excess, min(next_widest, before - 1), least[widest])
        excess -= before - widths[widest]
    return widths


def _cell(value: object) -> str:
    if value is None or value == "":
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else str(value)


def _are_numbers(column: Sequence[object]) -> bool:
    known = [value for value in column if value is not None]
    return bool(known) and all(isinstance(value, int) for value in known)


def listed(names: Sequence[str]) -> str:
    """Returns "0-0, 0-1, 0-2"; the first few of many names."""
    rest = len(names) - SHOWN_MAX
    return ", ".join([*names[:SHOWN_MAX], *([f"and {rest:,} more"] if rest > 0 else [])])


def styled(text: str, stream: Any, **style: Any) -> str:
    """Returns the text with escapes; in colour if the stream is a terminal and NO_COLOR is not set."""
    text = shown(text, stream)
    return click.style(text, **style) if stream.isatty() and not os.environ.get("NO_COLOR") else text


def folded(text: str, stream: Any) -> str:
    """Returns the text with escapes, broken between words, if the stream is a terminal; else unchanged."""
    width = _width(stream)
    text = shown(text, stream)
    return text if width is None else "\n".join(_fold(line, width) for line in text.split("\n"))


def _width(stream: Any) -> int | None:
    """Returns the width of the stream's terminal; None if the stream is not a terminal."""
    if not stream.isatty():
        return None
    return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH


def _fold(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    begin = line[: len(line) - len(line.lstrip())]
    words = textwrap.TextWrapper(
        width, initial_indent=begin, subsequent_indent=begin + GAP, break_long_words=False, break_on_hyphens=False
    )
    return words.fill(line.lstrip())


def print_line(text: str) -> None:
    """Prints a line on standard output."""
    click.echo(folded(text, sys.stdout))


def say(text: str, **style: Any) -> None:
    """Prints a line on standard error."""
    click.echo(styled(folded(text, sys.stderr), sys.stderr, **style), err=True)


def silence_stdout() -> None:
    """Drops all further output, because its reader is gone, and Python's own flush at exit must not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def confirm(plan: Iterable[str], *, yes: bool) -> None:
    """Prints the plan, and returns after --yes or the answer yes. Otherwise ends the command with status 1."""
    for line in plan:
        say(line)
    if yes:
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        # Not click.confirm: in some of its versions a part of the question goes to standard output.
        click.echo("Do it? [y/N] ", err=True, nl=False)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        say("Nothing was done.")
    else:
        say("Nothing was done. Give --yes to do it.")
    click.get_current_context().exit(1)


YES = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
