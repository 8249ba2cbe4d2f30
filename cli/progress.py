"""Progress bars on standard error, for people only: nothing is drawn when it is not a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]


@contextlib.contextmanager
def progress_bar(what: str, total: int | None, *, unit: str = "") -> Iterator[Advance]:
    """Gives a function to be told of each bit of work done. `total` None: nobody knows how much there is.

    `unit` "bytes" shows sizes.
    """
    if not sys.stderr.isatty():
        yield lambda _amount: None
        return
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
    """What metamq.zk.jars tells of its downloads, as a line or a bar a file."""
    with contextlib.ExitStack() as stack:
        bars: dict[str, tuple[Advance, int]] = {}

        def tell(name: str, received: int, total: int) -> None:
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

        yield tell
