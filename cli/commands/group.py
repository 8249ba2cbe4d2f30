"""`metamq group`: list, describe, explain, reset, copy-offsets, delete-offsets, evict, owner, delete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.show.output import (
    TABLE_OR_JSON,
    TEXT_OR_JSON,
    YES,
    confirm,
    count,
    listed,
    print_json,
    print_line,
    print_table,
    say,
    table_lines,
)
from metamq.cli.show.units import EXISTING_GROUP, PLACE, TOPIC, Parsed, show_age
from metamq.cli.upkeep.database import HELP, parse_database
from metamq.cli.upkeep.group_offsets import copy_offsets, delete_offsets
from metamq.errors import ConfigError, ConnectError, NotAuthorized
from metamq.security.rights import ANY_PRINCIPAL
from metamq.zk.names import check_consumer, parse_partition
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq import Admin, DatabaseOffsets
    from metamq.client.admin.admin_model import (
        GroupDescription,
        GroupPartition,
        OffsetReset,
        ResetTo,
        TopicDescription,
    )

_DATABASE = click.option(
    "--database", "connect", type=Parsed("database", parse_database), metavar="DATABASE",
    help=f"{HELP} For a group that keeps its offsets there.",
)  # fmt: skip
_TABLE = click.option("--table", metavar="NAME", help="The table of the offsets there.  [metamq_offsets]")
RESET_HEADINGS = ("PARTITION", "BEFORE", "AFTER")


@click.group(cls=Group)
def group() -> None:
    """Show consumer groups, set their offsets, evict members."""


group.add_command(copy_offsets)
group.add_command(delete_offsets)


@group.command("list")
@TABLE_OR_JSON
def list_groups(output: str) -> None:
    """List the groups, with and without members.

    \b
    metamq group list
    metamq group list -o json | jq -r '.[] | select(.members == []) | .group'
    """
    with current().admin() as admin:
        found = list(admin.groups().values())
    if output == "json":
        print_json([asdict(one) for one in found])
        return
    print_table(
        ["GROUP", "MEMBERS", "STRATEGY", "OWNER", "TOPICS"],
        [[one.group, len(one.members), one.strategy, one.owner, ",".join(one.topics)] for one in found],
    )


@group.command()
@click.argument("names", type=EXISTING_GROUP, nargs=-1, required=True)
@_DATABASE
@_TABLE
@TABLE_OR_JSON
def describe(names: tuple[str, ...], connect: Any, table: str | None, output: str) -> None:
    """Show committed offsets, lag and owners of a group's partitions, and its members.

    PROGRESS is the time since a member last reported progress. Members report it every 10 s; a minute or more means
    that the member is stuck. "-" means that nothing is committed, no member owns the partition, or the lag is unknown.

    \b
    metamq group describe etl
    metamq group describe etl -o json | jq '.[0].partitions | map(.lag) | add'
    metamq group describe totals --database sqlite:///shop.db
    """
    storage = _storage(connect, table)
    with current().admin() as admin:
        found = [admin.describe_group(name, storage) for name in names]
    if output == "json":
        print_json([_description_json(one) for one in found])
        return
    for number, one in enumerate(found):
        if number:
            click.echo()
        _print_description(one)


def _description_json(one: GroupDescription) -> dict[str, Any]:
    members = [{**asdict(member), "partitions": list(map(str, member.partitions))} for member in one.members]
    return {
        "group": one.group,
        "strategy": one.strategy,
        "plan_generation": one.plan_generation,
        "owner": one.owner,
        "lag": one.lag,
        "members": members,
        "partitions": [{**asdict(partition), "lag": partition.lag} for partition in one.partitions],
    }


def _committed(part: GroupPartition) -> int | str | None:
    return part.committed if part.progress is None else f"{part.progress:,}*"


def _print_description(one: GroupDescription) -> None:
    strategy = f", strategy {one.strategy}" if one.strategy else ""
    owner = f", of {one.owner}" if one.owner else ""
    lag = "unknown" if one.lag is None else f"{one.lag:,}"
    print_line(f"{one.group}: {count(len(one.members), 'member')}{strategy}{owner}, lag {lag}")
    if one.partitions:
        print_table(
            ["PARTITION", "COMMITTED", "END", "LAG", "OWNER"],
            [
                [f"{part.topic}/{part.partition}", _committed(part), part.end, part.lag, part.owner]
                for part in one.partitions
            ],
        )
    for keeper, names in _grouped(one, lambda part: part.kept_by).items():
        star = " (*: what its owner has processed)" if any(part.progress is not None for part in one.partitions) else ""
        print_line(f"Offsets are kept by {keeper}, not in ZooKeeper{star}: {listed(names)}")
        if star and keeper == "DatabaseOffsets":
            print_line("The database may have lower offsets: --database reads them.")
    for problem, names in _grouped(one, lambda part: part.problem).items():
        print_line(f"The end of {listed(names)} is unknown: {problem}")
    if one.members:
        click.echo()
        print_table(
            ["MEMBER", "HOST", "PID", "PARTITIONS", "PROGRESS", "VERSION"],
            [
                [
                    member.consumer_id,
                    member.host,
                    str(member.pid),
                    len(member.partitions),
                    show_age(member.progress_age_ms),
                    member.version,
                ]
                for member in one.members
            ],
        )
    for member in one.members:
        if member.idle_reason:
            print_line(f"{member.consumer_id} has no partition: {member.idle_reason}")


def _grouped(one: GroupDescription, text_of: Callable[[GroupPartition], str]) -> dict[str, list[str]]:
    """Returns the names of the partitions that have a text, by that text."""
    found: dict[str, list[str]] = {}
    for part in one.partitions:
        if text := text_of(part):
            found.setdefault(text, []).append(f"{part.topic}/{part.partition}")
    return found


@group.command()
@click.argument("name", type=EXISTING_GROUP)
@TABLE_OR_JSON
def explain(name: str, output: str) -> None:
    """Show which member should own each partition and why, and the partitions that still have another owner.

    \b
    metamq group explain etl
    """
    with current().admin() as admin:
        found = admin.explain_group(name)
    if output == "table":
        print_line(found.text)
        return
    print_json(
        {
            "group": found.group,
            "generation": found.generation,
            "strategy": found.strategy,
            "members": {member: list(topics) for member, topics in found.members.items()},
            "assignment": {str(tp): member for tp, member in found.assignment.items()},
            "owners": {str(tp): member for tp, member in found.owners.items()},
            "text": found.text,
        }
    )


def _parse_partition_offset(text: str) -> tuple[str, int]:
    partition, equals, offset = text.partition("=")
    parse_partition(partition)
    if not equals or not offset.isdecimal():
        raise ValueError(f"{text!r} is not PARTITION=OFFSET: write it like 0-3=1200")
    return partition, int(offset)


@group.command()
@click.argument("name", type=EXISTING_GROUP)
@click.argument("topic", type=TOPIC)
@click.option(
    "--to",
    "place",
    type=PLACE,
    metavar="PLACE",
    help="earliest, latest, an OFFSET for all partitions, -N for the last N messages of each partition, @TIME or @-1h.",
)
@click.option(
    "--shift-by", type=int, metavar="N", help="Move each committed offset N messages forward, or back with -N.",
)  # fmt: skip
@click.option(
    "--partition", "offsets", type=Parsed("offset", _parse_partition_offset), multiple=True, metavar="0-3=1200",
    help="An offset for one partition; repeatable. The others stay as they are.",
)  # fmt: skip
@_DATABASE
@_TABLE
@click.option("--dry-run", is_flag=True, help="Only print the plan; ends with status 0.")
@YES
@TABLE_OR_JSON
def reset(
    name: str,
    topic: str,
    place: Any,
    shift_by: int | None,
    offsets: tuple[tuple[str, int], ...],
    connect: Any,
    table: str | None,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Set a group's offsets in a topic. The group must have no members.

    --to -N and --shift-by stay within the messages that exist. TIME is local, unless it names a zone.

    \b
    metamq group reset etl flights --to earliest          shows the plan
    metamq group reset etl flights --to earliest --yes
    metamq group reset etl flights --to @2026-11-01T00:00 --yes

    \b
    metamq group reset etl flights --to -100 --dry-run
    metamq group reset etl flights --shift-by -10 --yes
    metamq group reset etl flights --partition 0-3=1200 --yes
    metamq group reset totals flights --to latest --database sqlite:///shop.db
    """
    if [place is not None, shift_by is not None, bool(offsets)].count(True) != 1:
        raise click.UsageError("give either --to, --shift-by or --partition, for the group's new offsets")
    storage = _storage(connect, table)
    with current().admin() as admin:
        if shift_by is not None:
            to: ResetTo = _shifted(admin, name, topic, shift_by, storage)
        elif isinstance(place, int) and place < 0:
            to = _before_the_end(admin.describe_topic(topic), place)
        else:
            to = {TopicPartition(topic, partition): offset for partition, offset in offsets} if offsets else place
        resets = admin.reset_offsets(name, topic, to, dry_run=True, offsets=storage)
        if not dry_run:
            confirm([f"Group {name}, topic {topic}:", *table_lines(RESET_HEADINGS, _rows(resets))], yes=yes)
            to = {TopicPartition(topic, one.partition): one.after for one in resets}
            resets = admin.reset_offsets(name, topic, to, offsets=storage)
    if output == "json":
        print_json([asdict(one) for one in resets])
    elif dry_run:
        print_table(RESET_HEADINGS, _rows(resets))
    if not dry_run:
        say(f"{count(len(resets), 'offset')} set.")


def _storage(connect: Any, table: str | None) -> DatabaseOffsets | None:
    """Returns the storage in the database of --database and --table, or None."""
    from metamq import DatabaseOffsets

    if connect is None:
        if table is not None:
            raise click.UsageError("--table needs --database")
        return None
    return DatabaseOffsets(connect) if table is None else DatabaseOffsets(connect, table=table)


def _before_the_end(found: TopicDescription, place: int) -> dict[TopicPartition, int]:
    """Returns the offset of the last -`place` messages of each partition. Raises ConnectError, NotAuthorized."""
    offsets = {}
    for part in found.partitions:
        if isinstance(part.error, NotAuthorized):
            raise part.error
        if part.stable_offset is None or part.start_offset is None:
            raise _unknown_end(found.topic, part.partition, part.problem)
        offsets[TopicPartition(found.topic, part.partition)] = max(part.stable_offset + place, part.start_offset)
    return offsets


def _shifted(
    admin: Admin, name: str, topic: str, shift: int, storage: DatabaseOffsets | None
) -> dict[TopicPartition, int]:
    """Returns each committed offset plus the shift, within the log. Raises ConfigError without any, ConnectError."""
    starts = admin.reset_offsets(name, topic, "earliest", dry_run=True, offsets=storage)
    ends = admin.reset_offsets(name, topic, "latest", dry_run=True, offsets=storage)
    offsets = {
        TopicPartition(topic, end.partition): min(max(end.before + shift, start.after), end.after)
        for start, end in zip(starts, ends, strict=True)
        if end.before is not None
    }
    if not offsets:
        hint = "Give --to or --partition: there is no offset to shift."
        raise ConfigError(f"group {name!r} has no committed offsets in topic {topic!r}", hint=hint)
    return offsets


def _unknown_end(topic: str, partition: str, problem: str) -> ConnectError:
    return ConnectError(f"the master of {topic}/{partition}", problem, hint="`metamq doctor` checks every part.")


def _rows(resets: tuple[OffsetReset, ...]) -> list[list[object]]:
    return [[one.partition, one.before, one.after] for one in resets]


@group.command()
@click.argument("name", type=EXISTING_GROUP)
@click.argument("member", type=Parsed("consumer id", check_consumer))
@YES
@TABLE_OR_JSON
def evict(name: str, member: str, yes: bool, output: str) -> None:
    """Remove a stuck member from its group; other members get its partitions at once.

    They receive its uncommitted messages again. If the member still runs, it ends with an error.

    \b
    metamq group describe etl                            shows the members
    metamq group evict etl etl_host-4711-0a1b2c3d --yes
    """
    with current().admin() as admin:
        plan = _eviction(admin.describe_group(name), member)
        if plan:  # else there is no such member, and evict() raises
            confirm(plan, yes=yes)
        freed = admin.evict(name, member)
    if output == "json":
        print_json({"group": name, "member": member, "partitions": list(map(str, freed))})
    say(f"{member} is removed from group {name}, {count(len(freed), 'partition')} freed.")


def _eviction(found: GroupDescription, consumer_id: str) -> list[str]:
    """Returns the plan of the eviction; an empty one if there is no such member and no such owner."""
    held = [f"{part.topic}/{part.partition}" for part in found.partitions if part.owner == consumer_id]
    lines = [
        f"Evict {consumer_id} from group {found.group}: process {member.pid} on {member.host}, "
        f"last progress {show_age(member.progress_age_ms)} ago."
        for member in found.members
        if member.consumer_id == consumer_id
    ]
    if held:
        lines.append(f"  {consumer_id} owns {', '.join(held)}.")
    return lines


@group.command()
@click.argument("name", type=EXISTING_GROUP)
@click.argument("principal")
@TEXT_OR_JSON
def owner(name: str, principal: str, output: str) -> int:
    """Give a group to the user or certificate PRINCIPAL; '*': to all clients. Stop its members first.

    With TLS to ZooKeeper, a group belongs to the user or certificate that made it. An owner that is no administrator
    can give it to a certificate only.

    \b
    metamq group owner etl report
    metamq group owner etl '*'
    """
    with current().admin() as admin:
        strange = admin.set_group_owner(name, principal)
    if output == "json":
        print_json({"group": name, "owner": principal, "strange": strange})
    else:
        whose = "open to all clients" if principal == ANY_PRINCIPAL else f"of {principal}"
        say(f"Group {name} is now {whose}.")
    if strange:
        nodes = count(len(strange), "node")
        say(f"{nodes} in it belong to another client, as {strange[0]}: only ZooKeeper's superuser can remove them.")
    return 1 if strange else 0


@group.command()
@click.argument("names", type=EXISTING_GROUP, nargs=-1, required=True)
@YES
@TEXT_OR_JSON
def delete(names: tuple[str, ...], yes: bool, output: str) -> None:
    """Delete groups with their committed offsets. They must have no members.

    Its dead letters then all count as not sent.

    \b
    metamq group delete etl --yes
    """
    with current().admin() as admin:
        found = [admin.describe_group(name) for name in names]
        committed = [sum(part.committed is not None for part in one.partitions) for one in found]
        plan = [
            f"Delete group {one.group}: {count(offsets, 'committed offset')}, {count(len(one.members), 'member')}."
            for one, offsets in zip(found, committed, strict=True)
        ]
        confirm(plan, yes=yes)
        for name in names:
            admin.delete_group(name)
            if output == "text":
                say(f"Group {name} is deleted.")
    if output == "json":
        print_json(
            [{"group": name, "committed_offsets": offsets} for name, offsets in zip(names, committed, strict=True)]
        )
