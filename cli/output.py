"""Data on standard output: tables for people, JSON for programs. Talk, plans and questions on standard error."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from metamq.words import count as count

F = TypeVar("F", bound=Callable[..., Any])

NOTHING = "-"
GAP = "  "
DEFAULT_WIDTH = 80
SHOWN_MAX = 12


def output_option(*kinds: str, text: str = "How to print it.") -> Callable[[F], F]:
    """The option -o; the first kind is the default."""
    return click.option("-o", "--output", type=click.Choice(kinds), default=kinds[0], show_default=True, help=text)


TABLE_OR_JSON = output_option("table", "json")
TEXT_OR_JSON = output_option("text", "json")


def print_json(value: Any) -> None:
    """One JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """One JSON document on one line, at once: for whoever reads while we go on."""
    click.echo(json.dumps(value, ensure_ascii=False))
    sys.stdout.flush()


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as they need to be; None shows as "-", numbers stand right.

    Where that is wider than the terminal, the column with the longest text gets what is left; longer text in it moves
    the rest of its own line only.
    """
    for line in table_lines(headings, rows):
        click.echo(line)


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    plain = list(rows)
    cells = [[_cell(value) for value in row] for row in plain]
    widths = [max(len(line[column]) for line in [list(headings), *cells]) for column in range(len(headings))]
    right = [_are_numbers([row[column] for row in plain]) for column in range(len(headings))]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - (_width(sys.stdout) or sys.maxsize)
    if excess > 0:
        widest = max(range(len(widths)), key=lambda column: 0 if right[column] else widths[column])
        widths[widest] = max(widths[widest] - excess, len(headings[widest]))

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(texts, widths, right, strict=True)
        )
        return GAP.join(padded).rstrip()

    return [styled(line(headings), sys.stdout, bold=True), *(line(row) for row in cells)]


def _cell(value: object) -> str:
    if value is None or value == "":
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else str(value)


def _are_numbers(column: Sequence[object]) -> bool:
    known = [value for value in column if value is not None]
    return bool(known) and all(isinstance(value, int) for value in known)


def listed(names: Sequence[str]) -> str:
    """ "0-0, 0-1, 0-2"; of many the first."""
    rest = len(names) - SHOWN_MAX
    return ", ".join([*names[:SHOWN_MAX], *([f"and {rest:,} more"] if rest > 0 else [])])


def styled(text: str, stream: Any, **style: Any) -> str:
    """Coloured, where a person looks at the stream and has not said NO_COLOR."""
    return click.style(text, **style) if stream.isatty() and not os.environ.get("NO_COLOR") else text


def folded(text: str, stream: Any, indent: str = "  ") -> str:
    """Broken between words where a person looks at the stream; what is piped on stays one line."""
    width = _width(stream)
    return text if width is None else "\n".join(_fold(line, width, indent) for line in text.split("\n"))


def _width(stream: Any) -> int | None:
    """Of the terminal behind the stream; None when there is none."""
    if not stream.isatty():
        return None
    return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH


def _fold(line: str, width: int, indent: str) -> str:
    if len(line) <= width:
        return line
    begin = line[: len(line) - len(line.lstrip())]
    words = textwrap.TextWrapper(
        width, initial_indent=begin, subsequent_indent=begin + indent, break_long_words=False, break_on_hyphens=False
    )
    return words.fill(line.lstrip())


def say(text: str, **style: Any) -> None:
    """A line of talk."""
    click.echo(styled(folded(text, sys.stderr), sys.stderr, **style), err=True)


def confirm(plan: Iterable[str], *, yes: bool) -> None:
    """Prints what is going to be done, and goes on with --yes or a yes. Ends the command with status 1 otherwise."""
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


YES = click.option("--yes", is_flag=True, help="Do it, without asking.")


def partition_map(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """With "topic/partition" for TopicPartitions, as JSON wants keys."""
    return {str(key): value for key, value in mapping.items()}
