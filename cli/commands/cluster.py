"""`metamq cluster`: export, inspect, restore, remove-broker."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from metamq.broker.data.folder_report import FolderReport, inspect_folder
from metamq.broker.data.restore import Choices, Restore, plan_restore
from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.removal import ACCEPT_LOSS, removal_lines, report_removed
from metamq.cli.show.output import (
    TABLE_OR_JSON,
    TEXT_OR_JSON,
    YES,
    confirm,
    count,
    listed,
    output_option,
    print_json,
    print_table,
    say,
)
from metamq.cli.show.terminal import escaped_json
from metamq.client.net.first_contact import open_session
from metamq.errors import ConfigError
from metamq.private_files import OWNER_MODE
from metamq.zk.cluster.cluster_nodes import (
    SECURITY,
    ClusterExport,
    RestoreDiff,
    compare,
    exported_cluster,
    restore_cluster,
)

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
JSON = output_option("json")


@click.group(cls=Group)
def cluster() -> None:
    """Export and restore ZooKeeper's content; remove brokers.

    \b
    metamq cluster export cluster.json
    metamq cluster restore --data ./broker-0 --export cluster.json
    """


@cluster.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@JSON
def export(file: Path | None, output: str) -> None:
    """Export the cluster's data in ZooKeeper as JSON, to FILE or to standard output (no FILE, or -).

    The export has the topics with their settings, the masters and in-sync sets, the groups' offsets, Spark's decisions,
    users, rules and quotas: keep it as secret as passwords. It does not have nodes that exist only while a process
    runs. Export regularly: `metamq cluster restore` sets groups back to this state. The command replaces an older
    export in FILE, but not an export of another cluster.

    \b
    metamq cluster export cluster.json
    metamq cluster export | gzip > cluster-$(date +%F).json.gz
    """
    with current().admin() as admin:
        document = admin.export_cluster()
    text = escaped_json(json.dumps(document, indent=1)) + "\n"
    if file is None or str(file) == "-":
        sys.stdout.write(text)
    else:
        _check_is_own(file, document["cluster_id"])
        _write(file, text)
        say(f"{count(len(document['nodes']), 'node')} of cluster {document['cluster_id']} are in {file}.")
    moved = document["changed_meanwhile"]
    if moved:
        say(f"{count(len(moved), 'node')} changed during the export, which has their last state: {listed(moved)}.")


def _check_is_own(file: Path, cluster_id: str) -> None:
    """Raises ConfigError if the file is the export of another cluster, which may be its only one; OSError."""
    former = exported_cluster(file.read_bytes()) if file.is_file() else None
    if former not in (None, cluster_id):
        raise ConfigError(
            f"{file} is an export of cluster {former}, but this ZooKeeper has cluster {cluster_id}: it is not replaced",
            hint="Give another file name, or remove the file.",
        )


def _write(file: Path, text: str) -> None:
    """Replaces an older export after the new one is on the disk. It may have verifiers of passwords: the file is the
    owner's alone."""
    if file.exists() and not file.is_file():  # a pipe or a device cannot be replaced
        file.write_text(text)
        return
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_MODE), "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


@cluster.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@JSON
def inspect(folder: Path, output: str) -> None:
    """Print the cluster's data in the data folder DIR, as JSON: for a restore on another machine.

    The folder's broker must be stopped. Nothing is changed.

    \b
    metamq cluster inspect ./broker-0 > broker-0.json
    """
    print_json(inspect_folder(folder).to_json())


def _pairs(what: str, separator: str, values: Iterable[str]) -> Iterator[tuple[str, str]]:
    for value in values:
        left, found, right = value.rpartition(separator)
        if not found or not left or not right:
            raise click.UsageError(f"{what} is {value!r}: write it like {_EXAMPLES[what]}")
        yield left, right


_EXAMPLES = {"--master": "0=1", "--topic": "orders@0123456789abcdef"}


@cluster.command()
@click.option(
    "--data", "folders", metavar="DIR", type=FOLDER, multiple=True, help="A broker's data folder; repeatable."
)
@click.option(
    "--folder", "files", metavar="FILE", type=FILE, multiple=True,
    help="Output of `metamq cluster inspect` from another machine; repeatable.",
)  # fmt: skip
@click.option("--export", "exported", metavar="FILE", type=FILE, help="The last output of `metamq cluster export`.")
@click.option(
    "--master", "masters", metavar="BROKER=REPLICA", multiple=True, help="The next master of a broker id; repeatable."
)
@click.option(
    "--topic",
    "topics",
    metavar="NAME@ID",
    multiple=True,
    help="The topic to keep, if two topics have one name; repeatable.",
)
@click.option(
    "--without-broker", "without", metavar="ID", type=int, multiple=True,
    help="A broker that is lost with its partitions; repeatable.",
)  # fmt: skip
@YES
@TABLE_OR_JSON
def restore(
    folders: tuple[Path, ...],
    files: tuple[Path, ...],
    exported: Path | None,
    masters: tuple[str, ...],
    topics: tuple[str, ...],
    without: tuple[int, ...],
    yes: bool,
    output: str,
) -> None:
    """Restore a lost ZooKeeper's content from the brokers' data folders, and from an export.

    Stop all brokers, and give the folder of every replica. Without --yes the command writes nothing: it shows the plan,
    and the decisions that it needs from you. If it was interrupted, run it again. Then start the brokers.

    \b
    metamq cluster restore --data ./broker-0 --data ./broker-0-slave
    metamq cluster restore --data ./broker-0 --folder broker-1.json --yes
    """
    reports = [inspect_folder(folder) for folder in folders]
    reports += [FolderReport.from_json(file.read_bytes(), str(file)) for file in files]
    if not reports:
        raise click.UsageError("Give the brokers' data folders, with --data or --folder.")
    export = None if exported is None else ClusterExport.from_json(exported.read_bytes(), str(exported))
    try:
        choices = Choices(
            {int(broker_id): int(replica) for broker_id, replica in _pairs("--master", "=", masters)},
            dict(_pairs("--topic", "@", topics)),
            frozenset(without),
        )
    except ValueError as error:
        raise click.UsageError(f"--master takes two numbers, like {_EXAMPLES['--master']}") from error
    plan = plan_restore(reports, export, choices)
    standing = asyncio.run(_compare(plan))
    if output == "json":
        print_json(_document(plan, standing))
    else:
        _print(plan)
    for note in plan.notes:
        say(note)
    if plan.questions:
        raise ConfigError("this restore needs a decision from you", hint="\n  ".join(plan.questions))
    if standing.is_finished:
        say(f"Cluster {plan.cluster_id} is already in ZooKeeper: nothing is written. Start the brokers.")
        return
    access = current().access()
    where = f"{access.root} in ZooKeeper at {access.zookeeper}"
    confirm(
        [f"{count(len(standing.operations), 'node')} of cluster {plan.cluster_id} will be written to {where}."], yes=yes
    )
    asyncio.run(_restore(plan))
    say(f"Cluster {plan.cluster_id} is restored. Start the brokers.")


async def _compare(plan: Restore) -> RestoreDiff:
    async with await open_session(current().access(), patient=False) as session:
        return await compare(session, plan.cluster_id, plan.nodes)


async def _restore(plan: Restore) -> None:
    async with await open_session(current().access(), patient=False, make_chroot=True) as session:
        await restore_cluster(session, plan.cluster_id, plan.nodes)


def _print(plan: Restore) -> None:
    print_table(
        ["BROKER", "REPLICA", "BECOMES", "IN SYNC", "LACKS", "EPOCH", "FOLDER"],
        [
            [
                str(broker.broker_id),
                str(view.report.replica),
                "?" if broker.state is None else "master" if view.is_master else "slave",
                "yes" if view.in_sync else "no",
                count(sum(view.lacks.values()), "message") if view.lacks else "nothing",
                str(view.report.epoch),
                str(view.report),
            ]
            for broker in plan.brokers
            for view in broker.replicas
        ],
    )
    click.echo()
    print_table(
        ["TOPIC", "ID", "PARTITIONS", "REPLICATION", "FLUSH", "SETTINGS FROM"],
        [
            [
                topic,
                config.id,
                ", ".join(f"{number} at broker {broker_id}" for broker_id, number in config.partitions.items()),
                config.replication,
                config.flush if isinstance(config.flush, str) else "later",
                plan.settings_from.get(topic) or "unknown: defaults",
            ]
            for topic, config in plan.topics.items()
        ],
    )


def _document(plan: Restore, standing: RestoreDiff) -> dict[str, Any]:
    return {
        "cluster_id": plan.cluster_id,
        "is_here_already": standing.is_finished,
        "brokers": [
            {
                "broker_id": broker.broker_id,
                "epoch": broker.state.epoch if broker.state is not None else None,
                "generation": broker.state.generation if broker.state is not None else None,
                "master": broker.state.master if broker.state is not None else None,
                "replicas": [
                    {
                        "replica": view.report.replica,
                        "folder": str(view.report),
                        "in_sync": view.in_sync,
                        "lacks": dict(view.lacks),
                    }
                    for view in broker.replicas
                ],
            }
            for broker in plan.brokers
        ],
        "topics": {topic: plan.settings_from.get(topic, "") for topic in plan.topics},
        "notes": list(plan.notes),
        "questions": list(plan.questions),
        "nodes": {
            path: "(secret)" if path.startswith(SECURITY) else data.decode(errors="replace")
            for path, data in sorted(plan.nodes.items())
        },
        "writes": [f"{type(one).__name__.lower()} {one.path}" for one in standing.operations],
    }


@cluster.command("remove-broker")
@click.argument("broker_id", metavar="ID", type=int)
@ACCEPT_LOSS
@YES
@TEXT_OR_JSON
def remove_broker(broker_id: int, accept_loss: bool, yes: bool, output: str) -> None:
    """Remove a broker id that is lost permanently, with its partitions and the groups' offsets in them.

    The messages in its partitions are lost; a topic without other partitions is deleted. The command refuses a broker
    that runs. To remove a single replica, use `metamq ha remove`.

    \b
    metamq cluster remove-broker 3
    metamq cluster remove-broker 3 --accept-loss --yes
    """
    with current().admin() as admin:
        plan = admin.plan_removal(broker_id)
        confirm(removal_lines(plan, accept_loss), yes=yes)
        admin.remove_broker(broker_id, accept_loss=accept_loss)
    report_removed(plan, output)
