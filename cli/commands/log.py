"""`metamq log`: checks and prints a broker's files, offline or beside a broker that runs; gives up a damaged log."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from metamq.cli import log_reader
from metamq.cli.command import Group
from metamq.cli.log_forget import accept, forget, lost_partitions, resolve_data_folder
from metamq.cli.show.message_format import as_json
from metamq.cli.show.output import TABLE_OR_JSON, count, output_option, print_json, print_line, print_table, say
from metamq.cli.show.progress import progress_bar
from metamq.cli.show.units import show_bytes
from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.model import time_of
from metamq.wire.compression import Codec
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.wire.batch import BatchHeader

_FOLDER = click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group(cls=Group)
def log() -> None:
    """Check and print a broker's files, offline; give up a damaged log, or accept a copy.

    Only `forget` and `accept` change files.

    \b
    metamq log verify ./metamq-data
    metamq log dump ./metamq-data --from 5000 -n 1 --messages
    metamq log forget ./metamq-data flights/0-1
    """


log.add_command(forget)
log.add_command(accept)


@log.command()
@_FOLDER
@TABLE_OR_JSON
def verify(folder: Path, output: str) -> int:
    """Check every batch in DIR: a broker's data folder, or the folder of a topic or a partition in it.

    Checks both checksums of each batch, and that there is no gap between offsets or segments. Bad bytes that were never
    flushed are a torn tail. That is no damage: the broker cuts it when it starts. A partition is also damaged if its
    folder is missing although the broker had it, or if its files came from elsewhere. Ends with status 1 if there is
    damage.

    \b
    metamq log verify ./metamq-data
    metamq log verify ./metamq-data/broker/topics/flights@0123456789abcdef -o json
    """
    partitions = log_reader.find_partitions(folder)
    data_folder = resolve_data_folder(folder)
    is_used = _warn_if_used(folder)
    total = sum(partition.size_bytes for partition in partitions)
    with progress_bar("Checking", total, unit="bytes") as advance:
        reports = [log_reader.verify_partition(partition, advance) for partition in partitions]
    reports = _with_missing(reports, data_folder)
    if output == "json":
        print_json([{**asdict(report), "is_damaged": report.is_damaged} for report in reports])
    else:
        _print_reports(reports, is_used=is_used)
    damaged = sum(report.is_damaged for report in reports)
    if damaged:
        say(f"{damaged} of {count(len(reports), 'partition')} damaged.", fg="red")
    return 1 if damaged else 0


def _with_missing(reports: list[log_reader.PartitionReport], folder: Path) -> list[log_reader.PartitionReport]:
    """Adds partitions whose folder is missing although the broker had it, or whose files came from elsewhere."""
    by_path = {Path(report.path).resolve(): report for report in reports}
    for place, problem in lost_partitions(folder):
        reason = f"{problem}: {place.path}"
        report = by_path.setdefault(place.path.resolve(), log_reader.PartitionReport(place.name, str(place.path)))
        report.findings.append(log_reader.LogFinding("damage", report.path, 0, 0, 0, reason))
    return list(by_path.values())


def _warn_if_used(folder: Path) -> bool:
    holder = log_reader.lock_holder(folder)
    if holder is not None:
        say(f"The data folder is in use by {holder}: bytes that it writes now may look torn.", fg="yellow")
    return holder is not None


def _print_reports(reports: list[log_reader.PartitionReport], *, is_used: bool) -> None:
    print_table(
        ["PARTITION", "OFFSETS", "BATCHES", "MESSAGES", "SIZE"],
        [
            [
                report.name,
                f"{segment.base_offset}..{segment.end_offset}",
                segment.batches,
                segment.messages,
                show_bytes(segment.size_bytes),
            ]
            for report in reports
            for segment in report.segments
        ],
    )
    for report in reports:
        for found in report.findings:
            size = found.end_position - found.position
            what = f"{report.name}: {found.kind} at byte {found.position:,}"
            place = f"{Path(found.path).name} at {found.position - found.base:,}"
            tail = ", or a write in progress" if is_used and found.kind == "torn tail" else ""
            print_line(f"{what} ({place}), {count(size, 'byte')}: {found.reason}{tail}")
        for note in report.notes:
            print_line(f"{report.name}: {note}")


@log.command()
@_FOLDER
@click.option(
    "--from", "from_offset", type=click.IntRange(min=0), default=0, help="Begin with the batch that has this offset."
)
@click.option("-n", "--count", "limit", type=click.IntRange(min=1), help="Batches to print of each partition.  [all]")
@click.option("--messages", "with_messages", is_flag=True, help="Print messages, as JSON lines, instead of batches.")
@output_option("table", "json", text="Batches as a table, or as one JSON object per line.")
def dump(folder: Path, from_offset: int, limit: int | None, with_messages: bool, output: str) -> None:
    """Print the batches in DIR: a broker's data folder, or the folder of a topic or a partition in it.

    Stops at the first damage. Times are UTC; -o json has every field.

    With --messages it prints one JSON object per message, as `metamq consume -o json` does.

    \b
    metamq log dump ./metamq-data/broker/topics/flights@0123456789abcdef/0
    metamq log dump ./metamq-data --from 5000 -n 1 --messages
    """
    partitions = log_reader.find_partitions(folder)
    _warn_if_used(folder)
    for partition in partitions:
        batches = itertools.islice(log_reader.stored_batches(partition, from_offset), limit)
        if with_messages:
            for _position, header, data in batches:
                _print_messages(partition, header, data, from_offset)
        elif output == "json":
            for position, header, _data in batches:
                click.echo(json.dumps({"partition": partition.name, "position": position, **_batch_json(header)}))
        else:
            rows: list[list[object]] = []
            try:
                for position, header, _data in batches:
                    rows.append(_row(position, header))  # the batches before damage are printed
            finally:
                click.echo(f"{partition.name}{'' if rows else ': no batches'}")
                if rows:
                    print_table(_HEADINGS, rows)


_HEADINGS = ["POSITION", "SIZE", "OFFSET", "COUNT", "EPOCH", "CODEC", "APPENDED"]


def _codec_name(header: BatchHeader) -> str:
    return {codec.value: codec.name.lower() for codec in Codec}.get(header.codec, f"unknown ({header.codec})")


def _row(position: int, header: BatchHeader) -> list[object]:
    return [
        position,
        header.size,
        header.base_offset,
        header.count,
        header.epoch,
        _codec_name(header),
        time_of(header.append_time_us).isoformat(timespec="milliseconds"),
    ]


def _batch_json(header: BatchHeader) -> dict[str, Any]:
    return {**header._asdict(), "codec": _codec_name(header)}


def _print_messages(
    partition: log_reader.PartitionFolder, header: BatchHeader, data: memoryview, from_offset: int
) -> None:
    topic, _slash, index = partition.name.rpartition("/")
    batch: MessageBatch[bytes] = MessageBatch(TopicPartition(topic, index), header, data, from_offset)
    for message in batch:
        click.echo(as_json(message), nl=False)
