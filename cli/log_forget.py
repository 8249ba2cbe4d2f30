"""`metamq log forget`: gives up one partition of a stopped broker, because its log is damaged or missing.
`metamq log accept`: accepts the files of a partition that came from elsewhere, and may lack messages.

Files in the folder are moved, never removed. The plan follows from the rules of roles and in-sync sets. A replica that
gave up a log is a new incarnation, so it is not in sync (metamq.broker.data.data_folder). A slave then copies the
partition. A master beside other in-sync replicas waits until one of them is promoted. A master without them begins a
new epoch and generation with an empty log. Readers whose message is of an epoch that the log does not have begin at
the start of the log (metamq.broker.log.disk.epochs).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from metamq.broker.data import made_partitions
from metamq.broker.data.data_folder import GONE, REPLACED, DataFolder
from metamq.broker.data.folder_report import data_folder, is_copy, is_replaced, lock_mark_of, locked, read_meta
from metamq.broker.log.disk import flushed
from metamq.cli.command import CliCommand
from metamq.cli.log_reader import PartitionFolder, verify_partition
from metamq.cli.show.output import TEXT_OR_JSON, YES, confirm, count, listed, print_json, say
from metamq.cli.show.progress import progress_bar
from metamq.cli.show.units import show_bytes
from metamq.errors import ConfigError
from metamq.zk.names import OWN, partition_name

OLDER_JOURNAL = (
    "It holds the broker's promises in transactions. If the copy is older, a branch that ended later is prepared "
    "again. Decide it only as its transaction manager did: a second commit stores its messages a second time."
)


@dataclass(frozen=True, slots=True)
class KnownPartition:
    """One partition that a data folder has, or had."""

    topic: str
    topic_id: str
    index: int
    name: str
    path: Path

    @property
    def key(self) -> str:
        """Its name in the record of partitions."""
        return f"{self.topic}@{self.topic_id}/{self.index}"

    @property
    def is_missing(self) -> bool:
        """True if the folder no longer has the partition."""
        return not (self.path / flushed.FILE_NAME).exists()


@dataclass(frozen=True, slots=True)
class ForgetPlan:
    """The partition that is given up. `messages` is the number of readable messages in its log."""

    partition: str
    broker_id: int
    replica: int
    was_master: bool
    epoch: int
    has_folder: bool
    messages: int
    size_bytes: int
    damaged_places: int


@click.command(cls=CliCommand)
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("partition", metavar="TOPIC/PARTITION")
@YES
@TEXT_OR_JSON
def forget(folder: Path, partition: str, yes: bool, output: str) -> None:
    """Give up one partition in DIR, the data folder of a stopped broker: its log is damaged, or missing.

    The log is moved aside, not removed. At its next start the broker makes an empty log. A slave copies the partition
    again. If a master has no slave in sync, the messages are lost, and consumers do what their setting `on_data_loss`
    says.

    \b
    metamq log verify ./broker-0
    metamq log forget ./broker-0 flights/0-1
    metamq log forget ./broker-0 flights/0-1 --yes
    """
    folder = resolve_data_folder(folder)
    with locked(folder):
        meta, _mark = read_meta(folder)
        place = _find(known_partitions(folder, meta["broker_id"]), partition, folder)
        _check_is_not_journal(place, partition)
        plan = _plan(place, meta)
    confirm(_plan_lines(plan, place), yes=yes)
    with _opened(folder, meta) as opened:
        moved_to = opened.forget_partition(place.topic, place.topic_id, place.index, place.name)
    if output == "json":
        print_json({**asdict(plan), "moved_to": None if moved_to is None else str(moved_to)})
        return
    say(f"{place.name} is given up." + ("" if moved_to is None else f" Its log is in {moved_to}."))


@click.command(cls=CliCommand)
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("partition", metavar="TOPIC/PARTITION")
@YES
@TEXT_OR_JSON
def accept(folder: Path, partition: str, yes: bool, output: str) -> None:
    """Accept the files of one partition in DIR that came from elsewhere, such as a backup.

    DIR is the data folder of a stopped broker. The broker does not serve such a partition, because it may lack
    messages. If a master has no slave in sync, messages that the files lack are lost, and consumers do what their
    setting `on_data_loss` says.

    \b
    metamq log accept ./broker-0 flights/0-1
    metamq log accept ./broker-0 flights/0-1 --yes
    """
    folder = resolve_data_folder(folder)
    with locked(folder) as lock_mark:
        meta, mark = read_meta(folder)
        place = _find(known_partitions(folder, meta["broker_id"]), partition, folder)
        if place.is_missing:
            hint = "Put the files there first."
            if not place.topic.startswith(OWN):
                hint += f" Or begin with an empty log: `metamq log forget {folder} {place.name}`."
            raise ConfigError(f"{place.name} has no files in {place.path}", hint=hint)
        _check_is_replaced(place, folder, is_whole_copy=is_copy(meta, lock_mark, mark))
        plan = _plan(place, meta)
    readable = f"{count(plan.messages, 'message')} ({show_bytes(plan.size_bytes)})"
    lines = [f"{place.name} will be accepted as it is: {readable}, {count(plan.damaged_places, 'damaged place')}."]
    if place.topic.startswith(OWN):
        lines.append(OLDER_JOURNAL)
    confirm([*lines, *_effects(plan, "every message that these files lack")], yes=yes)
    with _opened(folder, meta) as opened:
        opened.accept_partition(place.topic, place.topic_id, place.index, place.name)
    if output == "json":
        print_json(asdict(plan))
        return
    say(f"{place.name} is accepted. Start the broker.")


@contextlib.contextmanager
def _opened(folder: Path, meta: dict[str, Any]) -> Iterator[DataFolder]:
    opened = DataFolder.open(folder, meta["broker_id"], meta["replica"])
    try:
        yield opened
    finally:
        opened.close(clean=False)


def resolve_data_folder(folder: Path) -> Path:
    """Returns the data folder for a folder of the command line; prints it if it is a different folder."""
    chosen = data_folder(folder)
    if chosen != folder.absolute():
        others = [str(path.parent) for path in sorted(folder.glob("replica-*/meta.json"))]
        more = f" The folder also has {listed(others)}: to use another one, give its path." if others else ""
        say(f"The data folder is {chosen}.{more}")
    return chosen


def known_partitions(folder: Path, broker_id: int) -> list[KnownPartition]:
    """Returns the partitions that a data folder has, or had according to its record. Raises OSError."""
    folders = (folder / "topics").glob("[!.]*@*/*")
    found = {f"{path.parent.name}/{path.name}" for path in folders if path.name.isdecimal()}
    described = []
    for one in sorted(found.union(made_partitions.recorded(folder))):
        topic_folder, _slash, index = one.rpartition("/")
        topic, _at, topic_id = topic_folder.rpartition("@")
        name = f"{topic}/{partition_name(broker_id, int(index))}"
        described.append(KnownPartition(topic, topic_id, int(index), name, folder / "topics" / one))
    return sorted(described, key=lambda place: (place.topic, place.index))


def lost_partitions(folder: Path) -> list[tuple[KnownPartition, str]]:
    """Returns the partitions of a data folder whose files are missing or came from elsewhere, and why. Raises OSError.

    "From elsewhere" means: not the files that the replica used last. A folder without a record has none.
    """
    recorded = made_partitions.recorded(folder)
    if not recorded:
        return []
    lock_mark = lock_mark_of(folder)
    meta, mark = read_meta(folder)
    takes_all = is_copy(meta, lock_mark, mark)
    lost = []
    for place in known_partitions(folder, meta["broker_id"]):
        if place.key in recorded and place.is_missing:
            lost.append((place, GONE))
        elif not takes_all and is_replaced(place.path, recorded.get(place.key)):
            lost.append((place, REPLACED))
    return lost


def _find(known: list[KnownPartition], partition: str, folder: Path) -> KnownPartition:
    found = [place for place in known if place.name == partition]
    if not found:
        users = [place.name for place in known if not place.topic.startswith(OWN)]
        hint = f"It has {listed(users)}." if users else "It has none."
        raise ConfigError(f"there is no partition {partition!r} in {folder}", hint=hint)
    if len(found) > 1:
        raise ConfigError(
            f"{partition} is in {len(found)} folders, because the topic was deleted and created again",
            hint="Start the broker: it removes the folders of the deleted topic. Then stop it, and try again.",
        )
    return found[0]


def _check_is_not_journal(place: KnownPartition, partition: str) -> None:
    """Raises ConfigError if the partition is the journal of transactions."""
    if place.topic.startswith(OWN):
        raise ConfigError(
            f"{partition} cannot be given up: it holds the broker's promises in transactions, and a branch that is "
            "prepared in it may be committed elsewhere",
            hint="Promote a slave that is in sync (see `metamq ha status`): this replica then copies the journal. Or "
            "restore its folder from a copy, and accept it with `metamq log accept`. Until then the broker serves "
            "everything except transactions.",
        )


def _check_is_replaced(place: KnownPartition, folder: Path, *, is_whole_copy: bool) -> None:
    """Raises ConfigError if the broker uses the partition's files anyway; OSError."""
    mark = made_partitions.recorded(folder).get(place.key)
    if is_whole_copy:
        reason = f"all of {folder} is a copy, and the broker uses its files as they are"
    elif not mark:
        reason = "the former files are unknown, and the broker uses these"
    elif is_replaced(place.path, mark):
        return
    else:
        reason = "this replica used the same files last"
    raise ConfigError(
        f"{place.name} does not need `metamq log accept`: {reason}",
        hint=f"Start the broker. `metamq log verify {folder}` shows whether a log is damaged.",
    )


def _plan(place: KnownPartition, meta: dict[str, Any]) -> ForgetPlan:
    messages = size_bytes = damaged_places = 0
    if place.path.is_dir():
        size_bytes = sum(path.stat().st_size for path in place.path.glob("*.log"))
        with progress_bar("Checking", size_bytes, unit="bytes") as advance:
            report = verify_partition(PartitionFolder(place.name, place.path, size_bytes), advance)
        messages = sum(segment.messages for segment in report.segments)
        damaged_places = sum(finding.kind == "damage" for finding in report.findings)
    return ForgetPlan(
        partition=place.name,
        broker_id=meta["broker_id"],
        replica=meta["replica"],
        was_master=meta["state_version"] >= 0,
        epoch=meta["epoch"],
        has_folder=place.path.is_dir(),
        messages=messages,
        size_bytes=size_bytes,
        damaged_places=damaged_places,
    )


def _plan_lines(plan: ForgetPlan, place: KnownPartition) -> list[str]:
    readable = f"{count(plan.messages, 'message')} ({show_bytes(plan.size_bytes)})"
    if not plan.has_folder:
        lines = [f"The folder of {plan.partition} is missing: {place.path}. The broker will make an empty log."]
    elif plan.damaged_places:
        damage = count(plan.damaged_places, "damaged place")
        lines = [f"{plan.partition} has {damage}, and {readable} that can be read. Its folder will be moved aside."]
    elif place.is_missing:
        lines = [f"{plan.partition} lacks its file `flushed`, and has {readable}. Its folder will be moved aside."]
    else:
        lines = [f"No damage is found in {plan.partition}, which has {readable}. Its folder will be moved aside."]
    return [*lines, *_effects(plan, "every message of the partition")]


def _effects(plan: ForgetPlan, lost: str) -> list[str]:
    replica = f"Replica {plan.replica} of broker {plan.broker_id}"
    if not plan.was_master:
        return [f"{replica} was a slave: it copies the missing messages from its master, and is then in sync."]
    promote = f"metamq ha promote --broker {plan.broker_id} --slave NUMBER"
    return [
        f"{replica} was the master, in epoch {plan.epoch}. If a slave is in sync, replica {plan.replica} waits until "
        f"that slave is promoted. It is better to promote it now, and to give up nothing: `{promote}`. "
        "`metamq ha status` shows the slaves that are in sync.",
        f"If no slave is in sync, {lost} is LOST. A new epoch begins, and consumers that had read further follow their "
        "`on_data_loss`. A slave that is not in sync also gives up the messages that this replica lacks.",
    ]
