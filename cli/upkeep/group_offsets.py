"""`metamq group copy-offsets` and `metamq group delete-offsets`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.show.output import TABLE_OR_JSON, YES, confirm, count, print_json, print_table, say, table_lines
from metamq.cli.show.units import EXISTING_GROUP, EXISTING_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from metamq.client.admin.admin_model import OffsetChange

    Changes = tuple[OffsetChange, ...]

HEADINGS = ("PARTITION", "BEFORE", "AFTER")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Only print the plan; ends with status 0.")


@click.command("copy-offsets", cls=CliCommand)
@click.argument("source", type=EXISTING_GROUP)
@click.argument("target", type=EXISTING_GROUP)
@click.option(
    "--topic", "topics", type=EXISTING_TOPIC, multiple=True, help="Only the offsets of this topic; repeatable.  [all]"
)
@click.option("--overwrite", is_flag=True, help="Replace offsets that TARGET has.")
@DRY_RUN
@YES
@TABLE_OR_JSON
def copy_offsets(
    source: str, target: str, topics: tuple[str, ...], overwrite: bool, dry_run: bool, yes: bool, output: str
) -> None:
    """Copy the committed offsets of group SOURCE to group TARGET, which may be new.

    No member of TARGET may read these topics; SOURCE may have members. A consumer that starts meanwhile waits.

    \b
    metamq group copy-offsets etl etl-2                    shows the plan
    metamq group copy-offsets etl etl-2 --yes
    metamq group copy-offsets etl etl-2 --topic flights --overwrite --yes
    """
    with current().admin() as admin:

        def copy(dry_run: bool) -> Changes:
            return admin.copy_offsets(source, target, topics or None, overwrite=overwrite, dry_run=dry_run)

        _carry_out(f"From group {source} to group {target}:", copy, "copied", dry_run, yes, output)


@click.command("delete-offsets", cls=CliCommand)
@click.argument("name", type=EXISTING_GROUP)
@click.argument("topic", type=EXISTING_TOPIC)
@DRY_RUN
@YES
@TABLE_OR_JSON
def delete_offsets(name: str, topic: str, dry_run: bool, yes: bool, output: str) -> None:
    """Delete a group's committed offsets in a topic that it no longer reads.

    No member may read the topic; members may read others. The topic may be deleted already. A consumer that reads the
    topic again begins as a new group does.

    \b
    metamq group delete-offsets etl flights                shows the plan
    metamq group delete-offsets etl flights --yes
    """
    with current().admin() as admin:

        def delete(dry_run: bool) -> Changes:
            return admin.delete_offsets(name, topic, dry_run=dry_run)

        _carry_out(f"Group {name}, topic {topic}:", delete, "deleted", dry_run, yes, output)


def _carry_out(title: str, change: Callable[[bool], Changes], done: str, dry_run: bool, yes: bool, output: str) -> None:
    changes = change(True)
    if not dry_run:
        confirm([title, *table_lines(HEADINGS, _rows(changes))], yes=yes)
        changes = change(False)
    if output == "json":
        print_json([asdict(one) for one in changes])
    elif dry_run:
        print_table(HEADINGS, _rows(changes))
    if not dry_run:
        say(f"{count(len(changes), 'offset')} {done}.")


def _rows(changes: Changes) -> list[list[object]]:
    return [[f"{one.topic}/{one.partition}", one.before, one.after] for one in changes]
