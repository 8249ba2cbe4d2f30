"""Reconstructs the contents of a lost ZooKeeper from data folders and from an export. Pure: no I/O.

Theory of operation
-------------------
*The master* is a replica that has every acknowledged message, in *every* partition, including the journal of
transactions. Of two logs of a partition, one has everything that was acknowledged in the other if any of these holds:

1. Its replica was a master, the other's replica knows no later epoch, and its replica is still the same incarnation. A
   master begins with everything that was acknowledged before, and from then on acknowledges only messages that it has.
   After its host went down, it may have lost some of them.
2. It has all of the other log.
3. Its last batch is of an epoch at least as late as any that the other's replica knows, and it reaches further. Such a
   log has everything with which the master of that epoch began (metamq.broker.log.disk.epochs).

A later last batch alone proves nothing. Example: replicas 0 and 2 are in sync, and 2 becomes the master. It appends
under epoch 9, but acknowledges nothing, since 0 does not follow it. Then 0 becomes the master of epoch 10. Now all
messages of 0 count as acknowledged; the batches of epoch 9 never were. So the epochs that a replica knows matter, too.

If no replica meets this in every partition, each lacks messages of another, and the operator chooses. Replicas that
follow an older generation than others are no candidates: a loss was accepted since, and their messages were given up.

*The in-sync set* is the master and the replicas whose logs are all equal to its logs. The others copy the messages that
they lack. A folder that will come back as a new incarnation is only in its own set: its new number is unknown.

*The epoch.* No later master may reuse an epoch, and a replica without a folder here may have been a later master. So
the state's epoch is EPOCHS_AHEAD above the highest one that any folder, or the export, knows.

*The generation* rises if the chosen master lacks messages: only then may slaves cut messages that readers have seen.

*Topics.* The folders show the existing data, and an export shows the settings at its time. The newer source wins: the
settings in a folder if it saw them first after the export, else those of the export. If a topic is in the export, but
in no folder of its brokers, it was deleted later. If a topic is only in a folder, it was made later, or its broker
missed the deletion: it is kept, and a note says so.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from metamq.errors import ConfigError, MetamqError
from metamq.words import count
from metamq.zk.cluster.brokers import BrokerState, state_json
from metamq.zk.cluster.cluster_nodes import (
    CLIENTS,
    DEFAULTS,
    DELEGATIONS,
    HAD_SLAVES,
    SECURITY,
    TOPICS,
    ClusterExport,
)
from metamq.zk.cluster.topics import TopicConfig, from_json, to_json
from metamq.zk.names import OWN, parse_partition

if TYPE_CHECKING:
    from metamq.broker.data.folder_report import FolderReport, LogReport, Place

EPOCHS_AHEAD = 1000
_STATE = re.compile(r"/brokers/ids/(\d+)/state")
_OFFSET = re.compile(r"/consumers/([^/]+)/offsets/([^/]+)/([^/]+)")
_NOTHING = (-1, 0)
_DAMAGED = (-2, 0)


@dataclass(frozen=True, slots=True)
class Choices:
    """The operator's decisions: broker id -> its master, topic -> its id, broker ids that are lost permanently."""

    masters: Mapping[int, int]
    topics: Mapping[str, str]
    without: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica in the plan. `lacks`: topic -> messages that another folder has and this one does not have."""

    report: FolderReport
    is_master: bool
    in_sync: bool
    lacks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BrokerView:
    """One broker id in the plan. `state` is None if the operator must choose the master."""

    broker_id: int
    state: BrokerState | None
    replicas: tuple[ReplicaView, ...]
    had_slaves: bool


@dataclass(frozen=True, slots=True)
class Restore:
    """The nodes to write. The operator must first answer the `questions`; `notes` are for the operator to read."""

    cluster_id: str
    brokers: tuple[BrokerView, ...]
    topics: Mapping[str, TopicConfig]
    settings_from: Mapping[str, str]
    """The source of each topic's settings: "folder", "export", or "" if they are unknown and the defaults are used."""
    nodes: Mapping[str, bytes]
    notes: tuple[str, ...]
    questions: tuple[str, ...]


def plan_restore(reports: Sequence[FolderReport], export: ClusterExport | None, choices: Choices) -> Restore:
    """Plans the restore. Raises ConfigError if the inputs are not of one cluster, or if a replica has two folders."""
    cluster_id = _cluster_id(reports, export)
    by_broker = _by_broker(reports)
    _check_choices(choices, by_broker)
    notes: list[str] = []
    questions: list[str] = []
    brokers = [_broker(broker_id, found, export, choices) for broker_id, found in sorted(by_broker.items())]
    questions += [_ask_for_master(broker) for broker in brokers if broker.state is None]
    topics, settings_from = _topics(by_broker, export, choices, notes, questions)
    named = {broker_id for config in topics.values() for broker_id in config.partitions} | _states(export).keys()
    missing = named - by_broker.keys()
    for unknown in sorted(choices.without - missing):
        raise ConfigError(
            f"broker {unknown} is given up with --without-broker, but neither the folders nor the export name it",
            hint=f"Brokers that they name, without a folder here: {', '.join(map(str, sorted(missing))) or 'none'}.",
        )
    topics = _without(topics, choices.without, notes)
    questions += [_ask_for_broker(number) for number in sorted(missing - choices.without)]
    nodes = {f"/brokers/ids/{one.broker_id}/state": state_json(one.state) for one in brokers if one.state is not None}
    nodes |= {f"/brokers/ids/{one.broker_id}/{HAD_SLAVES}": b"" for one in brokers if one.had_slaves}
    nodes |= _of_failover(brokers, export)
    nodes |= {path: data for path, data in (export.nodes if export is not None else {}).items() if path == DEFAULTS}
    nodes |= {f"{TOPICS}{topic}": to_json(config) for topic, config in topics.items()}
    nodes |= _of_security(export, notes)
    nodes |= _of_clients(export, topics, choices, notes)
    notes += _notes_of(brokers, topics, settings_from, export)
    return Restore(
        cluster_id, tuple(brokers), topics, settings_from, nodes, tuple(notes), tuple(dict.fromkeys(questions))
    )


def _cluster_id(reports: Sequence[FolderReport], export: ClusterExport | None) -> str:
    said: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        said[report.cluster_id].append(str(report))
    if export is not None:
        said[export.cluster_id].append("the export")
    if len(said) != 1:
        parts = "; ".join(f"{cluster_id}: {', '.join(who)}" for cluster_id, who in sorted(said.items()))
        raise ConfigError(
            f"the folders and the export are of {len(said)} clusters: {parts}", hint="Restore each cluster separately."
        )
    return next(iter(said))


def _by_broker(reports: Sequence[FolderReport]) -> dict[int, list[FolderReport]]:
    found: dict[int, dict[int, FolderReport]] = defaultdict(dict)
    for report in reports:
        twin = found[report.broker_id].setdefault(report.replica, report)
        if twin is not report:
            shown = "; ".join(
                f"{one} (epoch {one.epoch}, incarnation {one.incarnation}"
                f"{', ' + one.becomes_new if one.becomes_new else ''})"
                for one in (twin, report)
            )
            raise ConfigError(
                f"two folders are replica {report.replica} of broker {report.broker_id}: {shown}",
                hint="One is a copy of the other, or replaces it. Give only the one that its broker will use.",
            )
    return {broker_id: [one for _number, one in sorted(these.items())] for broker_id, these in found.items()}


def _check_choices(choices: Choices, by_broker: Mapping[int, Sequence[FolderReport]]) -> None:
    for broker_id in sorted(choices.masters.keys() - by_broker.keys()):
        raise ConfigError(f"a master is chosen for broker {broker_id}, but none of its folders is given")
    for broker_id in sorted(choices.without & by_broker.keys()):
        raise ConfigError(
            f"broker {broker_id} is given up, but has a folder here", hint="Leave out the folder or --without-broker."
        )


# -- brokers ----------------------------------------------------------------------------------------------------------


def _broker(
    broker_id: int, reports: Sequence[FolderReport], export: ClusterExport | None, choices: Choices
) -> BrokerView:
    known = _states(export).get(broker_id)
    newest = max(report.generation for report in reports)
    able = [report for report in reports if report.generation == newest]
    chosen = choices.masters.get(broker_id)
    if chosen is None:
        master = _complete_replica(able, known)
    else:
        master = next((report for report in reports if report.replica == chosen), None)
        if master is None:
            hint = f"Its folders here are those of: {', '.join(str(one.replica) for one in reports)}."
            raise ConfigError(f"replica {chosen} of broker {broker_id} has no folder here", hint=hint)
    epochs = [report.epoch for report in reports] + ([known.epoch] if known is not None else [])
    views = tuple(
        ReplicaView(one, one is master, _is_in_sync(one, master, newest), _lacks(one, reports)) for one in reports
    )
    had_slaves = len(reports) > 1 or reports[0].replica != 0 or (export is not None and _had_slaves(export, broker_id))
    if master is None:
        return BrokerView(broker_id, None, views, had_slaves)
    generation = max(newest, known.generation if known is not None else 0)
    if master not in able or any(_lacks(master, able).values()):
        generation += 1
    members = tuple((view.report.replica, view.report.incarnation) for view in views if view.in_sync)
    state = BrokerState(max(epochs) + EPOCHS_AHEAD, master.replica, members, max(generation, 1), is_restored=True)
    return BrokerView(broker_id, state, views, had_slaves)


def _complete_replica(able: Sequence[FolderReport], known: BrokerState | None) -> FolderReport | None:
    """Chooses among the replicas that lack nothing. Prefers those that keep their incarnation, then the last master."""
    complete = [one for one in able if not any(_is_behind(one, other) for other in able)]
    former = known.master if known is not None else -1
    return min(complete, key=lambda one: (bool(one.becomes_new), one.replica != former, one.replica), default=None)


def _is_in_sync(one: FolderReport, master: FolderReport | None, newest: int) -> bool:
    if master is None or one is master:
        return one is master
    is_same = all(_reach(one, place) == _reach(master, place) for place in one.logs.keys() | master.logs.keys())
    return is_same and one.generation == newest and not one.becomes_new and not master.becomes_new


def _is_behind(one: FolderReport, other: FolderReport) -> bool:
    return any(_may_lack(one, other, place) for place in other.logs)


def _may_lack(one: FolderReport, other: FolderReport, place: Place) -> bool:
    """True if the other's log of a partition may have acknowledged messages that this one lacks: see above."""
    mine, theirs = one.logs.get(place), other.logs[place]
    reach = _reach(one, place)
    if mine is None or mine.problem or theirs.problem:
        return reach < _reach(other, place)
    was_master_since = 0 < other.epoch <= one.reign
    has_all = not _extra_messages(theirs, mine)
    is_later = reach[0] >= other.epoch and reach >= theirs.reach
    return not (was_master_since or has_all or is_later)


def _reach(report: FolderReport, place: Place) -> tuple[int, int]:
    log = report.logs.get(place)
    return _NOTHING if log is None else _DAMAGED if log.problem else log.reach


def _lacks(one: FolderReport, others: Sequence[FolderReport]) -> dict[str, int]:
    """Messages by topic that another folder has and this one lacks, in partitions where this one is behind."""
    most: dict[Place, int] = {}
    for other in others:
        for place, log in other.logs.items():
            if not log.problem and _may_lack(one, other, place):
                most[place] = max(most.get(place, 0), _extra_messages(log, one.logs.get(place)))
    found: dict[str, int] = defaultdict(int)
    for (topic, _id, _index), messages in most.items():
        found[topic] += messages
    return dict(sorted(found.items()))


def _extra_messages(log: LogReport, behind: LogReport | None) -> int:
    """The number of messages of a log beyond its common part with a log that is behind it."""
    start = log.epochs[0].offset if log.epochs else log.end_offset
    agreed = start
    if behind is not None and not behind.problem:
        theirs, ours = _ends(behind), _ends(log)
        agreed = max((min(ours[epoch], theirs[epoch]) for epoch in ours.keys() & theirs.keys()), default=start)
    return log.end_offset - agreed


def _ends(log: LogReport) -> dict[int, int]:
    """Epoch -> its end offset in the log."""
    ends = [epoch.offset for epoch in log.epochs[1:]] + [log.end_offset]
    return {epoch.epoch: end for epoch, end in zip(log.epochs, ends, strict=False)}


def _ask_for_master(broker: BrokerView) -> str:
    parts = []
    for view in broker.replicas:
        lacking = ", ".join(f"{count(number, 'message')} of {topic}" for topic, number in view.lacks.items())
        parts.append(f"replica {view.report.replica} lacks {lacking or 'nothing of the same generation'}")
    return (
        f"broker {broker.broker_id}: no replica has everything ({'; '.join(parts)}). Choose with "
        f"--master {broker.broker_id}=REPLICA; the messages that it lacks are lost"
    )


def _ask_for_broker(broker_id: int) -> str:
    return (
        f"broker {broker_id} has partitions, but none of its folders is given. Give one with --data or --folder, or "
        f"give up broker {broker_id} and its partitions with --without-broker {broker_id}"
    )


# -- what an export says ----------------------------------------------------------------------------------------------


def _states(export: ClusterExport | None) -> dict[int, BrokerState]:
    found = {}
    for path, data in export.nodes.items() if export is not None else ():
        if (match := _STATE.fullmatch(path)) is not None:
            try:
                document = json.loads(data)
                insync = tuple((int(replica), int(incarnation)) for replica, incarnation in document["insync"])
                found[int(match[1])] = BrokerState(
                    int(document["epoch"]), int(document["master"]), insync, int(document["generation"])
                )
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"the export's {path} cannot be read: {error!r}") from error
    return found


def _had_slaves(export: ClusterExport, broker_id: int) -> bool:
    return f"/brokers/ids/{broker_id}/{HAD_SLAVES}" in export.nodes


def _exported_topics(export: ClusterExport | None, notes: list[str]) -> dict[str, TopicConfig]:
    found = {}
    for path, data in export.nodes.items() if export is not None else ():
        if path.startswith(TOPICS):
            topic = path.removeprefix(TOPICS)
            try:
                found[topic] = from_json(topic, data)
            except MetamqError as error:
                notes.append(f"The export's configuration of topic {topic} is left out: {error.problem}.")
    return found


# -- topics -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DatedSettings:
    """Settings of a topic, and the time at which they were valid."""

    config: TopicConfig
    at_ms: int
    source: str


def _topics(
    by_broker: Mapping[int, Sequence[FolderReport]],
    export: ClusterExport | None,
    choices: Choices,
    notes: list[str],
    questions: list[str],
) -> tuple[dict[str, TopicConfig], dict[str, str]]:
    exported = _exported_topics(export, notes)
    counts = _counts(by_broker)
    settings = _dated_settings(by_broker, exported, export)
    ids: dict[str, set[str]] = defaultdict(set)
    for name, its_id in counts:
        ids[name].add(its_id)
    configs: dict[str, TopicConfig] = {}
    sources: dict[str, str] = {}
    for topic in sorted(ids | exported.keys()):
        exported_config = exported.get(topic)
        if topic not in ids and exported_config is not None:
            if exported_config.partitions.keys() & by_broker.keys():
                notes.append(f"Topic {topic} of the export has no folder: it was deleted later, so it is left out.")
                continue
            configs[topic], sources[topic] = exported_config, "export"
            continue
        candidates = ids[topic] | ({exported_config.id} if exported_config is not None else set())
        topic_id = _which_id(topic, candidates, settings, choices, questions)
        if topic_id is None:
            continue
        _note_other_ids(topic, topic_id, ids[topic], by_broker, notes)
        newest = max(settings.get((topic, topic_id), []), key=lambda one: one.at_ms, default=None)
        config = newest.config if newest is not None else TopicConfig(topic, {}, topic_id)
        partitions = dict(config.partitions)
        for broker_id, number in counts.get((topic, topic_id), {}).items():
            partitions[broker_id] = max(partitions.get(broker_id, 0), number)
        configs[topic] = replace(config, partitions=dict(sorted(partitions.items())))
        sources[topic] = newest.source if newest is not None else ""
        if export is not None and exported_config is None:
            notes.append(
                f"Topic {topic} is in folders, but not in the export: it was made later, or deleted while a broker was "
                f"down. `metamq topic delete {topic}` removes it."
            )
    return configs, sources


def _counts(by_broker: Mapping[int, Sequence[FolderReport]]) -> dict[tuple[str, str], dict[int, int]]:
    """(topic, id) -> broker id -> number of partitions with a folder."""
    found: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for broker_id, reports in by_broker.items():
        for report in reports:
            for log in report.logs.values():
                if not log.topic.startswith(OWN):
                    known = found[log.topic, log.topic_id]
                    known[broker_id] = max(known.get(broker_id, 0), log.index + 1)
    return found


def _dated_settings(
    by_broker: Mapping[int, Sequence[FolderReport]], exported: Mapping[str, TopicConfig], export: ClusterExport | None
) -> dict[tuple[str, str], list[_DatedSettings]]:
    found: dict[tuple[str, str], list[_DatedSettings]] = defaultdict(list)
    for reports in by_broker.values():
        for report in reports:
            for config, since_ms in report.settings.values():
                found[config.topic, config.id].append(_DatedSettings(config, since_ms, "folder"))
    for topic, config in exported.items():
        assert export is not None
        found[topic, config.id].append(_DatedSettings(config, export.exported_ms, "export"))
    return found


def _which_id(
    topic: str,
    ids: set[str],
    settings: Mapping[tuple[str, str], list[_DatedSettings]],
    choices: Choices,
    questions: list[str],
) -> str | None:
    """The id of a topic. If a topic was deleted and made again, the later id."""
    chosen = choices.topics.get(topic)
    if chosen is not None:
        if chosen not in ids:
            raise ConfigError(f"topic {topic} has no id {chosen}", hint=f"Its ids are: {', '.join(sorted(ids))}.")
        return chosen
    if len(ids) == 1:
        return next(iter(ids))
    known = {
        topic_id: max(one.at_ms for one in settings[topic, topic_id])
        for topic_id in ids
        if (topic, topic_id) in settings
    }
    if len(known) == len(ids):
        return max(known, key=lambda topic_id: known[topic_id])
    questions.append(
        f"topic {topic} was deleted and made again, and it is unknown which of {', '.join(sorted(ids))} is later. "
        f"Choose with --topic {topic}@ID. Brokers remove the data of the other ids when they start"
    )
    return None


def _note_other_ids(
    topic: str, topic_id: str, ids: set[str], by_broker: Mapping[int, Sequence[FolderReport]], notes: list[str]
) -> None:
    for other in sorted(ids - {topic_id}):
        logs = (log for reports in by_broker.values() for report in reports for log in report.logs.values())
        messages = sum(log.end_offset for log in logs if (log.topic, log.topic_id) == (topic, other))
        notes.append(
            f"Topic {topic} was made again as {topic_id}. The data of {other}, up to {count(messages, 'message')}, is "
            "REMOVED when brokers start; copy the folders first if you want to keep it."
        )


def _without(configs: Mapping[str, TopicConfig], gone: frozenset[int], notes: list[str]) -> dict[str, TopicConfig]:
    """Removes the partitions of brokers that are given up."""
    kept = {}
    for topic, config in configs.items():
        lost = {broker_id: number for broker_id, number in config.partitions.items() if broker_id in gone}
        left = {broker_id: number for broker_id, number in config.partitions.items() if broker_id not in gone}
        if lost:
            who = ", ".join(f"{number} of broker {broker_id}" for broker_id, number in lost.items())
            removal = "" if left else " It has no partitions left, so it is removed."
            notes.append(f"Topic {topic} loses partitions: {who}.{removal}")
        if left:
            kept[topic] = replace(config, partitions=left)
    return kept


def _of_failover(brokers: Sequence[BrokerView], export: ClusterExport | None) -> dict[str, bytes]:
    """The operators' choices of failover. Without an export there are none: an operator promotes."""
    exported = export.nodes if export is not None else {}
    paths = [f"/brokers/ids/{one.broker_id}/failover" for one in brokers]
    return {path: exported[path] for path in paths if path in exported}


# -- clients ----------------------------------------------------------------------------------------------------------


def _of_security(export: ClusterExport | None, notes: list[str]) -> dict[str, bytes]:
    """The users, rules and quotas, and the key of the groups' owners. Tokens of delegations are for running queries."""
    found = {
        path: data
        for path, data in (export.nodes if export is not None else {}).items()
        if path.startswith(SECURITY) and path != DELEGATIONS
    }
    if found:
        notes.append(
            "Owners of groups are not in an export: the groups belong to the certificate that restores them, until "
            "`metamq group owner` gives them to their programs."
        )
    return found


def _of_clients(
    export: ClusterExport | None, topics: Mapping[str, TopicConfig], choices: Choices, notes: list[str]
) -> dict[str, bytes]:
    """The nodes of groups and of Spark's sinks, for topics that are restored."""
    nodes = {}
    dropped = 0
    for path, data in export.nodes.items() if export is not None else ():
        if path.startswith(CLIENTS):
            if _is_not_restored(path, topics, choices):
                dropped += 1
            else:
                nodes[path] = data
    if dropped:
        notes.append(f"{count(dropped, 'committed offset')} of partitions that are not restored: left out.")
    return nodes


def _is_not_restored(path: str, topics: Mapping[str, TopicConfig], choices: Choices) -> bool:
    match = _OFFSET.fullmatch(path)
    if match is None:
        return False
    try:
        return match[2] not in topics or parse_partition(match[3])[0] in choices.without
    except MetamqError:
        return False


def _notes_of(
    brokers: Sequence[BrokerView],
    topics: Mapping[str, TopicConfig],
    settings_from: Mapping[str, str],
    export: ClusterExport | None,
) -> Iterator[str]:
    """Notes about unknown facts, and about consequences of the folders."""
    if export is None:
        yield (
            "Committed offsets are unknown without an export: each group begins where its consumers' `start` says, "
            "unless it keeps its offsets in a database or a file."
        )
        yield "Decisions of Spark's exactly-once sinks are unknown: a query that was in a batch may write it again."
    else:
        yield (
            "Groups continue from the offsets of the export; messages committed later are read again. A Spark query "
            "that has decided a batch since may write it again."
        )
    unknown = [topic for topic in topics if not settings_from.get(topic)]
    if unknown:
        yield (
            f"The settings of {', '.join(unknown)} are unknown. They get the defaults (retention 7 days, flush once "
            "a second, replication async). Set them with `metamq topic alter` before the brokers start."
        )
    for broker in brokers:
        former = _states(export).get(broker.broker_id)
        if former is not None and former.master not in [view.report.replica for view in broker.replicas]:
            yield (
                f"Replica {former.master} of broker {broker.broker_id} was the master at the time of the export, but "
                "its folder is not given. Messages that only it had are LOST; their number is unknown."
            )
        for view in broker.replicas:
            who = f"Replica {view.report.replica} of broker {broker.broker_id}"
            problems = [log for log in view.report.logs.values() if log.problem]
            if problems:
                named = ", ".join(f"{log.topic}/{log.index}" for log in problems[:5])
                yield f"{who} has damaged logs ({named}): {problems[0].problem}."
            if view.report.becomes_new:
                yield f"{who} will come back as a new incarnation: {view.report.becomes_new}."
            if view.is_master and any(view.lacks.values()):
                lost = ", ".join(f"{count(number, 'message')} of {topic}" for topic, number in view.lacks.items())
                yield f"LOST with {who.lower()} as the master: {lost}."
