"""`metamq bundle`: collects what a support engineer asks for, and writes it into one file.

1. Make the file: a folder without space or rights is noticed before the work.
2. Read the settings of this machine, which show the secrets that the filter must know.
3. Ask the cluster, and read the logs. All parts run at the same time, each with the time limit.
4. Filter all texts, and write them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from metamq.cli.command import CliCommand
from metamq.cli.commands.doctor import look
from metamq.cli.context import Globals, current
from metamq.cli.processes import Stopped, StopSignals
from metamq.cli.show.output import TEXT_OR_JSON, count, print_json, say
from metamq.cli.show.progress import progress_bar
from metamq.cli.show.units import DURATION, SIZE, Parsed, show_bytes
from metamq.cli.support.archive import ZIP, new_archive, stem_of
from metamq.cli.support.contents import errors, readme
from metamq.cli.support.parcel import Parcel, SupportPart, collect_all
from metamq.cli.support.parts import BundleOptions, machine, running, shared_cluster
from metamq.cli.support.redaction import Redaction
from metamq.cli.support.status_parts import parse_status

if TYPE_CHECKING:
    from metamq.cli.support.archive import SupportArchive

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
STATUS = Parsed("address", parse_status)
SAMPLES_MAX = 1000
POLL_S = 0.1
T = TypeVar("T")


@click.command(cls=CliCommand, quiet=logging.CRITICAL)
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--logs", "folders", metavar="FOLDER", type=FOLDER, multiple=True,
    help="Folder with logs or data folders of brokers on this machine; repeatable.  [./metamq-data, if it is here]",
)  # fmt: skip
@click.option("--logs-size", "logs_bytes", type=SIZE, default="16MiB", show_default=True,
              help="Size of all logs together: the newest.")  # fmt: skip
@click.option("--status", metavar="ADDRESS", type=STATUS, multiple=True,
              help="Status port of a broker that ZooKeeper does not know: broker-0:8120; repeatable.")  # fmt: skip
@click.option("--samples", type=click.IntRange(1, SAMPLES_MAX), default=2, show_default=True,
              help="Number of readings of metrics.")  # fmt: skip
@click.option("--every", "every_ms", type=DURATION, default="10s", show_default=True, help="Time between two of them.")
@click.option("--timeout", "limit_ms", type=DURATION, default="30s", show_default=True,
              help="Time of each part, in addition to the readings. All parts run at the same time.")  # fmt: skip
@TEXT_OR_JSON
def bundle(file: Path | None, every_ms: int, limit_ms: int, output: str, **given: Any) -> int:
    """Collect what a support engineer asks for into FILE, and print its path.

    It has versions, the doctor's findings, brokers, topics, groups, transactions, users without secrets, ZooKeeper's
    load, metrics, and the settings and logs of brokers on this machine. It has no password, no key, and nothing of a
    message. The file README.txt in it has the list.

    FILE ends with .zip, .tar.gz or .tgz. Only its owner may read it, and another file is not replaced. What cannot be
    collected is in errors.txt, with the reason; then the exit status is 1.

    \b
    metamq bundle
    metamq bundle incident-17.tar.gz --logs /var/log/metamq
    metamq bundle --status broker-0:8120 --samples 6 --every 30s
    """
    path = file or Path(f"metamq-bundle-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}{ZIP}")
    options = BundleOptions(every_s=every_ms / 1000, limit_s=max(limit_ms, 1) / 1000, **given)
    secrets = Redaction()
    with StopSignals() as signals, new_archive(path) as archive:
        parts, parcels = asyncio.run(_unless_stopped(signals, _collected(current(), options, secrets)))
        _write(archive, stem_of(path), parts, parcels, secrets)
    _report(path, parcels, output)
    return 1 if any(parcel.problems for parcel in parcels) else 0


async def _unless_stopped(signals: StopSignals, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of the work. Raises Stopped after a signal, once the work is cancelled."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait({task}, timeout=POLL_S)
        if signals.asked and not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise Stopped
    return task.result()


async def _collected(
    settings: Globals, options: BundleOptions, secrets: Redaction
) -> tuple[list[SupportPart], list[Parcel]]:
    async with shared_cluster(settings) as cluster:
        first, then = machine(settings, options, secrets), running(settings, options, secrets, cluster, look)
        with progress_bar("Collecting", len(first) + len(then), unit="parts") as done:
            parcels = await collect_all(first, options.limit_s, done)
            parcels += await collect_all(then, options.limit_s, done)
    for parcel in parcels:
        parcel.problems = list(dict.fromkeys(" ".join(secrets.text(one).split()) for one in parcel.problems))
        parcel.files = {secrets.text(name): content for name, content in parcel.files.items()}
    return [*first, *then], parcels


def _write(
    archive: SupportArchive, folder: str, parts: Sequence[SupportPart], parcels: Sequence[Parcel], secrets: Redaction
) -> None:
    """Writes all files below one folder. Raises OSError."""
    archive.add(f"{folder}/README.txt", _encoded(readme(parts, parcels)))
    archive.add(f"{folder}/errors.txt", _encoded(errors(parcels)))
    for name, content in (one for parcel in parcels for one in parcel.files.items()):
        text = secrets.text(content) if isinstance(content, str) else secrets.document(content)
        archive.add(f"{folder}/{name}", _encoded(text))


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _report(path: Path, parcels: Sequence[Parcel], output: str) -> None:
    problems = [{"part": one.part, "problem": problem} for one in parcels for problem in one.problems]
    if output == "json":
        parts = [
            {"part": one.part, "files": sorted(one.files), "seconds": one.took_s, "left_out": one.left_out}
            for one in parcels
        ]
        size = path.stat().st_size
        print_json({"path": str(path.absolute()), "bytes": size, "parts": parts, "problems": problems})
        return
    for one in problems:
        say(f"Missing: {one['part']}: {one['problem']}")
    files = sum(len(one.files) for one in parcels)
    say(f"{count(files, 'file')}, {show_bytes(path.stat().st_size)}. Look at its README.txt before you send it.")
    click.echo(path)
