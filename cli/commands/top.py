"""`metamq top`: a live view of brokers, topics and groups, with rates and lag.

Rates come from two samples of the brokers' own counters, which one request per broker returns, whatever its number of
partitions. All parts are asked side by side, and groups in threads of their own, which a frozen broker may keep busy. A
part that does not answer in time delays the view once: its question stays open, and its row shows that.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.processes import StopSignals
from metamq.cli.show.output import NOTHING, TABLE_OR_JSON, print_json, print_table
from metamq.cli.show.terminal import escaped
from metamq.cli.show.top_view import ORDERS, ClusterLoad, Sample, Section, figures, ordered, sections
from metamq.cli.show.units import DURATION
from metamq.errors import MetamqError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from metamq import Admin

ANSWER_S = 3.0
KEY_S = 0.2
INTERVAL_MS_MIN = 100
THREADS = 16


@click.command(cls=CliCommand)
@click.option("--once", is_flag=True, help="Print one snapshot, and end.")
@click.option(
    "--interval", "interval_ms", type=DURATION, default="2s", show_default=True, help="Time between two samples."
)
@click.option(
    "--sort",
    "order",
    type=click.Choice(ORDERS),
    default=ORDERS[0],
    show_default=True,
    help="Sort topics and groups; the size of a group is its lag.",
)
@TABLE_OR_JSON
def top(once: bool, interval_ms: int, order: str, output: str) -> int:
    """Show brokers, topics and groups as they work: rates, sizes, lag. The key q ends it, s changes the order.

    MSG/S, IN/S and OUT/S are messages and bytes per second that clients send and read; DONE/S is what a group commits.
    "-" is a figure that is not known. With -o json, and without a terminal, it prints one snapshot.

    \b
    metamq top
    metamq top --sort size --interval 5s
    metamq top --once -o json | jq '.groups[] | {group, lag}'
    """  # fmt: skip
    if interval_ms < INTERVAL_MS_MIN:
        raise click.BadParameter(f"the least is {INTERVAL_MS_MIN}ms", param_hint="'--interval'")
    with current().admin() as admin, _sampler(admin) as sampler, StopSignals() as signals:
        before = sampler.sample()
        if once or output == "json" or not (sys.stdout.isatty() and sys.stdin.isatty()):
            with signals.at_once():
                time.sleep(interval_ms / 1000)
            _print(figures(before, sampler.sample()), order, output)
        else:
            _show(sampler, before, interval_ms / 1000, order, signals)
    return 0


class Sampler:
    """Asks all parts of a cluster at once."""

    def __init__(self, admin: Admin, pool: ThreadPoolExecutor, group_pool: ThreadPoolExecutor) -> None:
        self._admin = admin
        self._pool = pool
        self._group_pool = group_pool
        self._open: dict[Any, Future[Any]] = {}

    def sample(self) -> Sample:
        """Returns the present state. Raises the errors of ZooKeeper."""
        admin = self._admin
        first = self._ask({"brokers": admin.brokers, "topics": admin.topics, "groups": admin.groups})
        for answer in first.values():
            if isinstance(answer, Exception):
                raise answer
        brokers, topics, groups = first["brokers"], first["topics"], first["groups"]
        live = [broker_id for broker_id, one in brokers.items() if one.live]
        questions: dict[Any, Callable[[], Any]] = {one: partial(admin.statistics, one) for one in live}
        questions |= {("group", name): partial(admin.describe_group, name) for name in groups}
        answers = self._ask(questions)
        failed = {key: str(answer) for key, answer in answers.items() if isinstance(answer, Exception)}
        return Sample(
            time.monotonic(),
            brokers,
            topics,
            {one: answers[one] for one in live if one not in failed},
            {name: None if ("group", name) in failed else answers["group", name] for name in groups},
            {one: failed[one] for one in live if one in failed},
        )

    def _ask(self, questions: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
        """Returns each answer, or the error. A question without an answer stays open, and is not asked again."""
        fresh = {
            key: (self._group_pool if isinstance(key, tuple) else self._pool).submit(question)
            for key, question in questions.items()
            if key not in self._open
        }
        self._open |= fresh
        wait(fresh.values(), ANSWER_S)
        return {key: self._answer(key) for key in questions}

    def _answer(self, key: Any) -> Any:
        future = self._open[key]
        if not future.done():
            return MetamqError("no answer")
        del self._open[key]
        error = future.exception()
        if error is not None and not isinstance(error, MetamqError):
            raise error
        return error or future.result()


@contextlib.contextmanager
def _sampler(admin: Admin) -> Iterator[Sampler]:
    pools = ThreadPoolExecutor(THREADS), ThreadPoolExecutor(THREADS)
    try:
        yield Sampler(admin, *pools)
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        admin.close()  # ends the open questions


def _print(found: ClusterLoad, order: str, output: str) -> None:
    if output == "json":
        print_json(ordered(found, order).document())
        return
    for number, (_name, headings, rows) in enumerate(sections(found, order)):
        if number:
            click.echo()
        print_table(headings, rows)


def _show(sampler: Sampler, before: Sample, interval_s: float, order: str, signals: StopSignals) -> None:
    """Shows the figures on the whole screen until q, Ctrl-C or SIGTERM."""
    from rich.live import Live

    found, problem = figures(before, before), ""
    with Live(screen=True, auto_refresh=False) as live, _keys() as key_within:
        while True:
            size = live.console.size
            live.update(screen(sections(found, order), size.height, f"sorted by {order}", problem), refresh=True)
            due_s = time.monotonic() + interval_s
            while not signals.asked and (left_s := due_s - time.monotonic()) > 0:
                key = key_within(min(left_s, KEY_S))
                if key == "s":
                    order = ORDERS[(ORDERS.index(order) + 1) % len(ORDERS)]
                if key in ("s", "q") or size != live.console.size:
                    break
            else:
                key = "q" if signals.asked else ""
            if key == "q":
                return
            if time.monotonic() >= due_s:
                try:
                    after = sampler.sample()
                    found, before, problem = figures(before, after), after, ""
                except MetamqError as error:
                    problem = str(error)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits for a key. The terminal then neither shows keys nor waits for a newline."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    former = termios.tcgetattr(descriptor)

    def key_within(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode("latin-1").lower() if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield key_within
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, former)


def screen(parts: list[Section], height: int, order: str, problem: str) -> RenderableType:
    """Returns what fits on a screen: the first rows of each section, and the number of the others."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = f"metamq top  q: end  s: {order}  {escaped(problem)}"
    shown: list[RenderableType] = [Text(head, no_wrap=True, style="dim")]
    rest = height - 1
    for number, (name, headings, rows) in enumerate(parts):
        room = max(rest // (len(parts) - number) - 3, 1)  # the headings, the line of the others, an empty line
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in headings:
            is_text = heading in ("BROKER", "ADDRESS", "STATE", "TOPIC", "GROUP")
            table.add_column(heading, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
        for row in rows[:room]:
            table.add_row(*(Text(_cell(value)) for value in row))
        more = len(rows) - room
        shown += [table, Text(f"and {more:,} more {name}" if more > 0 else "", style="dim")]
        rest -= min(len(rows), room) + 2
    return Group(*shown)


def _cell(value: object) -> str:
    return NOTHING if value is None else f"{value:,}" if isinstance(value, int) else escaped(str(value))
