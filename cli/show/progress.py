"""Progress bars on standard error. They appear only if standard error is a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]

APPEARS_AFTER_S = 0.5


@contextlib.contextmanager
def progress_bar(what: str, total: int | None, *, unit: str = "", wanted: bool = True) -> Iterator[Advance]:
    """Yields a function that adds to the amount of work done. `total` is None if the amount of work is unknown.

    The bar appears after half a second. `unit` "bytes" shows sizes.
    """
    if not wanted or not sys.stderr.isatty():
        yield lambda _amount: None
        return
    with contextlib.ExitStack() as stack:
        due_s = time.monotonic() + APPEARS_AFTER_S
        done = 0
        bar: Advance | None = None

        def advance(amount: int) -> None:
            nonlocal done, bar
            done += amount
            if bar is not None:
                bar(amount)
            elif time.monotonic() >= due_s:
                bar = stack.enter_context(_bar(what, total, unit))
                bar(done)

        yield advance


@contextlib.contextmanager
def _bar(what: str, total: int | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    console = Console(file=sys.stderr)
    columns = [TextColumn("{task.description}"), BarColumn()]
    counts = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    with Progress(*columns, *counts, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)


@contextlib.contextmanager
def download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields the callback for downloads of metamq.zk.server.jars: it shows a line or a bar for each file."""
    with contextlib.ExitStack() as stack:
        bars: dict[str, tuple[Advance, int]] = {}

        def show(name: str, received: int, total: int) -> None:
            if name not in bars:
                if not sys.stderr.isatty():
                    print(f"Downloading {name} ({total / 1e6:.1f} MB)", file=sys.stderr)
                stack.close()
                bars[name] = (stack.enter_context(progress_bar(f"Downloading {name}", total, unit="bytes")), 0)
            advance, before = bars[name]
            advance(received - before)
            bars[name] = (advance, received)
            if received == total:
                stack.close()

        yield show
