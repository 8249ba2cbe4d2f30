"""`metamq topic`: create, list, describe, alter, delete; tail, trim and the schemas are in files of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import click

from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.messages.ranges import Place, matching_topics
from metamq.cli.messages.tail import tail
from metamq.cli.messages.trim import trim
from metamq.cli.schemas.schema import schema
from metamq.cli.show import units
from metamq.cli.show.output import TABLE_OR_JSON, TEXT_OR_JSON, YES, confirm, count, print_json, print_table, say
from metamq.cli.show.topic_view import (
    config_json,
    defaults_json,
    description_json,
    print_defaults,
    print_description,
    size_in_words,
)
from metamq.client.admin.admin_core import WAIT_S
from metamq.client.delayed import holds_delayed
from metamq.errors import ConfigError, CorruptData, MetamqError
from metamq.security.rights import DELAYED_SUFFIX

if TYPE_CHECKING:
    from metamq import Admin
    from metamq.zk.cluster.topics import TopicConfig

F = TypeVar("F", bound=Callable[..., Any])

_SETTINGS = (
    click.option("--flush", type=units.FLUSH, help="When to fsync: ack (before acknowledging), 1000 (messages), "
                 "500ms, 1000/500ms or never."),
    click.option("--retention", "retention_ms", type=units.DURATION_OR_UNLIMITED, help="Time to keep messages: "
                 "12h, 7d, unlimited."),
    click.option("--retention-bytes", type=units.SIZE_OR_UNLIMITED, help="Size to keep of each partition: 10GiB, "
                 "unlimited."),
    click.option("--cleanup", type=click.Choice(["delete", "archive"]), help="Delete or archive messages past "
                 "retention."),
    click.option("--segment-bytes", type=units.SIZE, help="Size of one file of a partition: 256MiB."),
    click.option("--max-message-bytes", type=units.SIZE, help="Refuse larger messages: 1MiB."),
    click.option("--min-insync", type=int, help="Replicas that must be in sync for a write."),
    click.option("--replication", type=click.Choice(["async", "sync"]), help="Acknowledge before (async) or after "
                 "(sync) the slaves have a message."),
)  # fmt: skip
_BROKERS = click.option(
    "--broker", "brokers", type=units.BROKER, multiple=True, metavar="ID", help="Use only this broker; repeatable."
)
_WAIT = click.option(
    "--wait",
    "wait_ms",
    type=units.DURATION,
    default=f"{WAIT_S:g}s",
    show_default=True,
    help="Wait at most this long for the brokers.",
)


def _settings(function: F) -> F:
    for option in reversed(_SETTINGS):
        function = option(function)
    return function


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value == units.UNLIMITED else value for name, value in options.items() if value is not None}


@contextlib.contextmanager
def _named_as_given(options: dict[str, Any]) -> Iterator[None]:
    """Makes the error for a refused setting name its option and the option's text: `--segment-bytes is 1k`."""
    try:
        yield
    except ConfigError as error:
        for parameter in click.get_current_context().command.params:
            refused = f": {parameter.name} is {options.get(parameter.name or '')!r}"
            text = units.as_written(parameter)
            if text is not None and error.problem.endswith(refused):
                problem = f"{error.problem.removesuffix(refused)}: {parameter.opts[0]} is {text}"
                raise ConfigError(problem, hint=error.hint) from None
        raise


@click.group(cls=Group)
def topic() -> None:
    """Create, list, describe, alter and delete topics; follow their messages."""


topic.add_command(tail)
topic.add_command(trim)
topic.add_command(schema)


@topic.command()
@click.argument("name", type=units.NEW_TOPIC)
@click.option("-p", "--partitions", type=int, default=4, show_default=True, help="Total number, over all brokers.")
@_settings
@_BROKERS
@click.option("--exist-ok", is_flag=True, help="Leave an existing topic as it is.")
@_WAIT
@TEXT_OR_JSON
def create(
    name: str,
    partitions: int,
    brokers: tuple[int, ...],
    exist_ok: bool,
    wait_ms: int,
    output: str,
    **options: Any,
) -> None:
    """Create a topic, and wait until it is ready.

    \b
    metamq topic create flights
    metamq topic create flights --exist-ok
    metamq topic create orders --partitions 8 --flush ack --retention unlimited
    metamq topic create clicks --retention 12h --retention-bytes 10GiB
    metamq topic create views --broker 0 --broker 1
    """
    with current().admin() as admin, _named_as_given(options):
        config = admin.create_topic(
            name,
            partitions,
            brokers=brokers or None,
            exist_ok=exist_ok,
            timeout_s=wait_ms / 1000,
            **_given(options),
        )
        _warn_of_too_few(admin, config)
    if output == "json":
        print_json(config_json(config))
        return
    places = ", ".join(f"{number} on broker {broker_id}" for broker_id, number in config.partitions.items())
    say(f"Topic {name} has {count(len(config.partition_names), 'partition')} ({places}).")


def _warn_of_too_few(admin: Admin, config: TopicConfig) -> None:
    """Warns if brokers have too few replicas for writes: else the first sign would be the producers' errors."""
    if config.min_insync == 1:
        return
    for broker in admin.replicas().values():
        there = len(broker.replicas)
        if broker.broker_id in config.partitions and there < config.min_insync:
            say(
                f"Broker {broker.broker_id} has {count(there, 'replica')}, and --min-insync is {config.min_insync}: "
                f"until {config.min_insync} are in sync, it refuses writes to {config.topic}."
            )


@topic.command()
@_settings
@click.option("--reset", is_flag=True, help="Remove all defaults of the cluster.")
@TEXT_OR_JSON
def defaults(reset: bool, output: str, **options: Any) -> None:
    """Show or change the cluster's default settings of new topics.

    A new topic has them if `metamq topic create` does not give the setting. Existing topics do not change.

    \b
    metamq topic defaults
    metamq topic defaults --replication sync --min-insync 2
    metamq topic defaults --reset
    """
    settings = _given(options)
    if settings and reset:
        raise click.UsageError("--reset removes all defaults: give it without settings")
    with current().admin() as admin:
        if settings or reset:
            with _named_as_given(options):
                kept: dict[str, Any] = {} if reset else dict(admin.topic_defaults())
                admin.set_topic_defaults(**{**kept, **settings})
        found = admin.topic_defaults()
    if output == "json":
        print_json(defaults_json(found))
    else:
        print_defaults(found)


@topic.command("list")
@click.argument("patterns", type=units.EXISTING_TOPIC, nargs=-1, metavar="[PATTERN]...")
@click.option("--all", "every", is_flag=True, help="Also the topics in which delayed messages wait.")
@TABLE_OR_JSON
def list_topics(patterns: tuple[str, ...], every: bool, output: str) -> None:
    """List the topics: all, or those that match a PATTERN in quotes.

    \b
    metamq topic list
    metamq topic list 'orders-*'
    metamq topic list -o json | jq -r '.[].topic'
    """
    with current().admin() as admin:
        configs = [
            config
            for config in admin.topics().values()
            if (every or not holds_delayed(config.topic))
            and (not patterns or any(fnmatchcase(config.topic, pattern) for pattern in patterns))
        ]
    if output == "json":
        print_json([config_json(config) for config in configs])
        return
    print_table(
        ["TOPIC", "PARTITIONS", "BROKERS", "FLUSH", "RETENTION", "CLEANUP"],
        [
            [
                config.topic,
                sum(config.partitions.values()),
                units.show_ids(config.partitions),
                units.show_flush(config.flush),
                units.show_retention(config.retention_ms, config.retention_bytes),
                config.cleanup,
            ]
            for config in configs
        ],
    )


@topic.command()
@click.argument("names", type=units.EXISTING_TOPIC, nargs=-1, required=True)
@TABLE_OR_JSON
def describe(names: tuple[str, ...], output: str) -> None:
    """Show the settings and partitions of topics.

    \b
    metamq topic describe flights
    metamq topic describe 'orders-*'
    metamq topic describe flights -o json | jq '.[0].partitions[].problem'
    """
    topics = matching_topics(names)
    with current().admin() as admin:
        found = [admin.describe_topic(name) for name in topics]
        groups = admin.groups().values()
    readers = {name: [group.group for group in groups if name in group.topics] for name in topics}
    if output == "json":
        print_json([{**description_json(one), "groups": readers[one.topic]} for one in found])
        return
    for number, one in enumerate(found):
        if number:
            click.echo()
        print_description(one, readers[one.topic])


@topic.command()
@click.argument("name", type=units.EXISTING_TOPIC)
@click.option(
    "--at",
    "place",
    type=units.PLACE,
    metavar="PLACE",
    default="latest",
    show_default=True,
    help="earliest, latest, @TIME or @-1h.",
)
@TABLE_OR_JSON
def offsets(name: str, place: Place, output: str) -> None:
    """Show the offset of each partition at a place: at a time, that of the first message at or after it.

    \b
    metamq topic offsets orders
    metamq topic offsets orders --at @-1h
    metamq topic offsets orders --at '@2026-11-28 08:00' -o json
    """
    if isinstance(place, int):
        raise click.UsageError("--at takes earliest, latest or a time, such as @-1h")
    with current().admin() as admin:
        found = admin.offsets(name, place)
    if output == "json":
        print_json([{**tp._asdict(), "offset": offset} for tp, offset in found.items()])
    else:
        print_table(["PARTITION", "OFFSET"], [[tp.partition, offset] for tp, offset in found.items()])


@topic.command()
@click.argument("name", type=units.EXISTING_TOPIC)
@click.option("-p", "--partitions", type=int, help="The new number of partitions; it can only grow.")
@_settings
@_BROKERS
@_WAIT
@YES
@TEXT_OR_JSON
def alter(
    name: str, partitions: int | None, brokers: tuple[int, ...], wait_ms: int, yes: bool, output: str, **options: Any
) -> None:
    """Change settings of a topic while it is used, or add partitions.

    With more partitions, most keys go to a different partition than before. A shorter retention removes messages, and
    needs --yes or a confirmation.

    \b
    metamq topic alter flights --retention 30d --flush 500ms
    metamq topic alter flights --partitions 8
    metamq topic alter flights --retention 1h --yes
    """
    settings = _given(options)
    if not settings and partitions is None:
        raise click.UsageError("give a setting to change, such as --retention 30d")
    with current().admin() as admin:
        before = admin.describe_topic(name).config
        losses = [
            f"Topic {name}: {setting} from {show(getattr(before, setting))} to {show(settings[setting])}, "
            "messages past it will be removed."
            for setting, show in (("retention_ms", units.show_ms), ("retention_bytes", units.show_bytes))
            if setting in settings and _is_less(settings[setting], getattr(before, setting))
        ]
        if losses:
            confirm(losses, yes=yes)
        with _named_as_given(options):
            after = admin.alter(
                name, partitions=partitions, brokers=brokers or None, timeout_s=wait_ms / 1000, **settings
            )
        if "min_insync" in settings or partitions is not None:
            _warn_of_too_few(admin, after)
    if output == "json":
        print_json(config_json(after))
    else:
        say(f"Topic {name} is changed.")


def _is_less(after: int | None, before: int | None) -> bool:
    return after is not None and (before is None or after < before)


def _waiting(admin: Admin) -> str:
    """Returns a sentence with the number of delayed messages at all brokers."""
    try:
        waiting = sum(admin.statistics(broker_id).delayed for broker_id in admin.brokers())
    except MetamqError as error:
        return f"How many wait is unknown: {error.problem}."
    return f"{count(waiting, 'delayed message')} of all topics {'waits' if waiting == 1 else 'wait'} now."


@topic.command()
@click.argument("names", type=units.EXISTING_TOPIC, nargs=-1, required=True)
@_WAIT
@YES
@TEXT_OR_JSON
def delete(names: tuple[str, ...], wait_ms: int, yes: bool, output: str) -> None:
    """Delete topics with all their messages. With -o json it prints their former settings.

    \b
    metamq topic delete flights          shows the plan
    metamq topic delete 'test-*'
    metamq topic delete flights --yes
    """
    names = matching_topics(names)
    with current().admin() as admin:
        plan, existing = [], set(admin.topics())
        readers = admin.groups().values()
        for name in names:
            try:
                plan.append(f"Delete topic {name}: {size_in_words(admin.describe_topic(name))}.")
            except (CorruptData, ConfigError) as error:
                plan.append(f"Delete topic {name}: {error.problem}.")
            plan += [f"  Group {group.group} reads it." for group in readers if name in group.topics]
            if f"{name}{DELAYED_SUFFIX}" in existing:
                plan.append(f"  Delayed messages for it are dropped when they are due. {_waiting(admin)}")
        confirm(plan, yes=yes)
        deleted = []
        for name in names:
            deleted.append(admin.delete(name, timeout_s=wait_ms / 1000))
            if output == "text":
                say(f"Topic {name} is deleted.")
    if output == "json":
        print_json([config and config_json(config) for config in deleted])
