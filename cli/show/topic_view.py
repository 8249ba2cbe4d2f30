"""Topics as JSON and as text, for `metamq topic` and the doctor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.show.output import count, listed, print_line, print_table
from metamq.cli.show.units import show_bytes, show_flush, show_ms, show_retention
from metamq.zk.cluster.topics import FlushEvery, TopicConfig

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import TopicDescription

_LEFT_OUT = ("unknown", "schemas", "trims")


def config_json(config: TopicConfig) -> dict[str, Any]:
    """Returns a topic's configuration for -o json: the names of TopicConfig; sizes in bytes, times in milliseconds."""
    document = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _LEFT_OUT}
    document["partitions"] = {str(broker_id): number for broker_id, number in config.partitions.items()}
    if isinstance(config.flush, FlushEvery):
        document["flush"] = {"messages": config.flush.messages, "ms": config.flush.ms}
    return document


def defaults_json(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of new topics for -o json, in the form of config_json()."""
    return {name: asdict(value) if isinstance(value, FlushEvery) else value for name, value in defaults.items()}


def print_defaults(defaults: Mapping[str, Any]) -> None:
    if not defaults:
        click.echo("The cluster has no defaults of its own: new topics have metamq's.")
        return
    shown = ", ".join(f"{name} {_shown(name, value)}" for name, value in sorted(defaults.items()))
    click.echo(f"New topics have {shown}, unless `metamq topic create` gives others.")


def _shown(setting: str, value: Any) -> str:
    if setting == "flush":
        return show_flush(value)
    if setting == "retention_ms":
        return show_ms(value)
    return show_bytes(value) if "bytes" in setting else str(value)


def description_json(one: TopicDescription) -> dict[str, Any]:
    partitions = [
        {**asdict(each), "problem": each.problem, "live": each.live, "messages": each.messages}
        for each in one.partitions
    ]
    for each in partitions:
        del each["error"]
    return {
        "topic": one.topic,
        "messages": one.messages,
        "config": config_json(one.config),
        "in_sync": {str(broker_id): number for broker_id, number in one.in_sync.items()},
        "partitions": partitions,
    }


def print_description(one: TopicDescription, groups: Sequence[str]) -> None:
    config = one.config
    click.echo(f"{config.topic}: {size_in_words(one)}, id {config.id}")
    click.echo(
        f"flush {show_flush(config.flush)}, "
        f"retention {show_retention(config.retention_ms, config.retention_bytes)}, cleanup {config.cleanup}, "
        f"replication {config.replication}, min in sync {config.min_insync}"
    )
    click.echo(f"segments of {show_bytes(config.segment_bytes)}, messages up to {show_bytes(config.max_message_bytes)}")
    click.echo(f"read by {listed(groups)}" if groups else "no group reads it")
    print_table(
        ["PARTITION", "BROKER", "START", "END", "MESSAGES", "SIZE"],
        [
            [
                partition.partition,
                partition.address,
                partition.start_offset,
                partition.stable_offset,
                partition.messages,
                None if partition.size_bytes is None else show_bytes(partition.size_bytes),
            ]
            for partition in one.partitions
        ],
    )
    for line in not_served(one):
        print_line(f"Not served: {line}")
    for line in refuses_writes(one):
        print_line(f"{line[0].upper()}{line[1:]}")


def size_in_words(one: TopicDescription) -> str:
    """Describes the size of a topic, as far as its partitions are served."""
    total, live = len(one.partitions), sum(partition.live for partition in one.partitions)
    if one.messages is None:
        return f"{count(total, 'partition')}, none of them served at present"
    if live == total:
        return f"{count(total, 'partition')}, {count(one.messages, 'message')}"
    return f"{count(total, 'partition')}, {count(one.messages, 'message')} in the {live:,} that are served at present"


def not_served(one: TopicDescription, *, without: Collection[int] = ()) -> list[str]:
    """Returns partitions that are not served, and why: "0-0, 0-1: no connection to ...". Skips brokers in `without`."""
    unserved: dict[str, list[str]] = {}
    for partition in one.partitions:
        if not partition.live and partition.broker_id not in without:
            unserved.setdefault(partition.problem, []).append(partition.partition)
    return [f"{listed(names)}: {problem}" for problem, names in unserved.items()]


def refuses_writes(one: TopicDescription, *, without: Collection[int] = ()) -> list[str]:
    """Returns brokers with fewer in-sync replicas than the topic requires. Skips brokers in `without`."""
    wanted = one.config.min_insync
    return [
        f"broker {broker_id} refuses writes: {count(have, 'replica')} in sync, and min_insync is {wanted}"
        for broker_id, have in one.in_sync.items()
        if have < wanted and broker_id not in without
    ]
