"""`metamq topic trim`: deletes the oldest messages of a topic, or of one partition, at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.show import units
from metamq.cli.show.output import TEXT_OR_JSON, YES, confirm, count, print_json, print_table, say, table_lines
from metamq.client.admin.admin_core import WAIT_S
from metamq.zk.names import check_node
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from metamq.client.admin.admin_model import PartitionTrim, TrimBefore, TrimPlace

HEADINGS = ["PARTITION", "BEGINS AT", "WILL BEGIN AT", "MESSAGES", "ABOUT"]


def _parse_target(text: str) -> tuple[str, str | None]:
    """Returns the topic and the partition of "flights" or "flights/0-3". Raises ValueError, ConfigError."""
    topic, slash, partition = text.partition("/")
    return check_node("topic", topic), units.parse_partition_name(partition) if slash else None


@click.command(cls=CliCommand)
@click.argument("target", metavar="TOPIC[/PARTITION]", type=units.Parsed("topic", _parse_target))
@click.option("--before-offset", type=click.IntRange(0), metavar="N", help="Delete the messages before this offset.")
@click.option(
    "--before-time", type=units.Parsed("time", units.parse_time), metavar="TIME",
    help="Delete the messages before the first one at or after TIME: 2026-11-01T00:00 or -1h.",
)  # fmt: skip
@click.option("--to-end", is_flag=True, help="Delete all messages that are there now.")
@click.option("--dry-run", is_flag=True, help="Only show how much would be deleted.")
@click.option(
    "--wait", "wait_ms", type=units.DURATION, default=f"{WAIT_S:g}s", show_default=True,
    help="Wait at most this long for the replicas.",
)  # fmt: skip
@YES
@TEXT_OR_JSON
def trim(
    target: tuple[str, str | None], before_offset: int | None, before_time: datetime | None, to_end: bool,
    dry_run: bool, wait_ms: int, yes: bool, output: str,
) -> None:  # fmt: skip
    """Delete the oldest messages of a topic or a partition, at once, on all replicas.

    Readers do not get them any more, and the command waits until they are gone from the disks of the running replicas.
    It may be repeated. Deleted messages do not come back.

    \b
    metamq topic trim flights/0-3 --before-offset 9312
    metamq topic trim flights --before-time 2026-11-01T00:00 --dry-run
    metamq topic trim flights --to-end --yes
    """
    if [before_offset is not None, before_time is not None, to_end].count(True) != 1:
        raise click.UsageError("give one of --before-offset, --before-time and --to-end")
    topic, partition = target
    place: TrimPlace = "latest" if before_time is None else before_time
    place = place if before_offset is None else before_offset
    before: TrimBefore = place if partition is None else {TopicPartition(topic, partition): place}
    with current().admin() as admin:
        plans = admin.trim(topic, before, dry_run=True)
        if not dry_run:
            confirm([*table_lines(HEADINGS, _rows(plans)), _summary(topic, plans)], yes=yes)
            # One call: all deletions are stored before the wait for the first replica.
            offsets = {TopicPartition(topic, plan.partition): plan.begin for plan in plans}
            say(f"Deleting in {count(len(plans), 'partition')}, and waiting for the replicas.")
            plans = admin.trim(topic, offsets, timeout_s=wait_ms / 1000)
    if output == "json":
        print_json([asdict(plan) for plan in plans])
    elif dry_run:
        print_table(HEADINGS, _rows(plans))
        say(_summary(topic, plans))
    else:
        _report(topic, plans)


def _rows(plans: Sequence[PartitionTrim]) -> list[list[object]]:
    return [
        [one.partition, one.begin_before, one.begin, one.messages, "" if one.bytes is None else _size(one.bytes)]
        for one in plans
    ]


def _size(number: int) -> str:
    return units.show_bytes(number) if number else "0B"


def _summary(topic: str, plans: Sequence[PartitionTrim]) -> str:
    size = sum(one.bytes or 0 for one in plans)
    return f"Topic {topic}: {count(sum(one.messages for one in plans), 'message')}, about {_size(size)}, to delete."


def _report(topic: str, plans: Sequence[PartitionTrim]) -> None:
    for one in plans:
        kept = one.kept_on_disk or 0
        rest = f", with {count(kept, 'message')} before it on the disk, in the same batch" if kept else ""
        say(f"{topic}/{one.partition} begins at {one.begin:,} now{rest}.")
