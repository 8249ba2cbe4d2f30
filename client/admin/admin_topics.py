"""The administration of topics: they are created, altered and deleted in ZooKeeper, then the brokers follow.

The configuration node is the change; the rest is waiting. So a time-out here reverts nothing, and the same call can be
repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from metamq.client.admin.admin_brokers import ask_offsets, children, partition_statistics
from metamq.client.admin.admin_model import PartitionDescription, TopicDescription, TopicSettings
from metamq.client.checks import check_seconds, is_whole, wrong_type
from metamq.client.net.first_contact import until_connected
from metamq.client.settings import unknown
from metamq.errors import (
    ConfigError,
    ConnectError,
    CorruptData,
    MetamqError,
    NotAuthorized,
    Timeout,
    TopicExists,
    TopicNotFound,
)
from metamq.wire.commands import LATEST
from metamq.zk.cluster.brokers import live_brokers, read_state
from metamq.zk.cluster.offers import offered_partitions
from metamq.zk.cluster.replicas import slaves_of
from metamq.zk.cluster.topic_defaults import read_defaults, write_defaults
from metamq.zk.cluster.topics import PARTITIONS_MAX, TopicConfig, spread_partitions
from metamq.zk.errors import ConnectionLost, NoNode, NotEmpty
from metamq.zk.names import check_topic, parse_partition
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.paths import master_offer

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.zk.partitions import TopicPartition
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.client")

LOOK_AGAIN_S = 0.02
LOOK_AGAIN_S_MAX = 0.5
OFFER_KINDS = ("topics-pub", "topics-sub")


async def create_topic(
    cluster: ClusterClient,
    topic: str,
    partitions: int,
    brokers: Collection[int] | None,
    exist_ok: bool,
    timeout_s: float,
    settings: TopicSettings,
) -> TopicConfig:
    """Creates a topic and waits until it accepts and delivers messages. See Admin.create_topic."""
    check_topic(topic)
    _check_count(topic, partitions)
    _check_settings(settings, "create_topic()")
    check_seconds("timeout_s", timeout_s)
    there = await cluster.topics.get_or_none(topic)
    if there is not None:
        return await _served_already(cluster, there, exist_ok, timeout_s)
    chosen = await _choose_brokers(cluster, brokers)
    defaults = await read_defaults(cluster.session)
    config = TopicConfig(topic, partitions=spread_partitions(partitions, chosen), **{**defaults, **settings})
    try:
        await _create(cluster, config)
    except TopicExists:  # another process was faster
        return await _served_already(cluster, await cluster.topics.get(topic), exist_ok, timeout_s)
    await _wait_served(cluster, config, timeout_s)
    return config


async def _served_already(cluster: ClusterClient, config: TopicConfig, exist_ok: bool, timeout_s: float) -> TopicConfig:
    if not exist_ok:
        raise TopicExists(config.topic)
    await _wait_served(cluster, config, timeout_s, reachable_only=True)
    return config


async def _create(cluster: ClusterClient, config: TopicConfig) -> None:
    """Creates the node once, even if answers are lost."""
    while True:
        try:
            await cluster.topics.create(config)
            return
        except ConnectionLost:
            await until_connected(cluster.session)


async def topic_defaults(cluster: ClusterClient) -> TopicSettings:
    """Returns the cluster's defaults for new topics."""
    return cast(TopicSettings, await read_defaults(cluster.session))


async def set_topic_defaults(cluster: ClusterClient, settings: TopicSettings) -> None:
    """Replaces the cluster's defaults for new topics. See Admin.set_topic_defaults."""
    _check_settings(settings, "set_topic_defaults()")
    await write_defaults(cluster.session, settings)


async def alter_topic(
    cluster: ClusterClient,
    topic: str,
    partitions: int | None,
    brokers: Collection[int] | None,
    timeout_s: float,
    settings: TopicSettings,
) -> TopicConfig:
    """Changes settings, adds partitions, and waits until brokers serve the new ones. See Admin.alter."""
    if partitions is None and brokers is not None:
        raise ConfigError("`brokers` is only for new partitions", hint="Give `partitions` too, the new total.")
    if partitions is not None:
        _check_count(topic, partitions)
    _check_settings(settings, "alter()")
    check_seconds("timeout_s", timeout_s)
    await cluster.topics.get(topic)
    chosen = await _choose_brokers(cluster, brokers) if partitions is not None else []

    def change(before: TopicConfig) -> TopicConfig:
        spread = before.partitions
        if partitions is not None:
            spread = spread_partitions(partitions, chosen, before.partitions)
        return replace(before, partitions=spread, **settings)

    config = await cluster.topics.alter(topic, change)
    if partitions is not None:
        await _wait_served(cluster, config, timeout_s)
    return config


async def delete_topic(cluster: ClusterClient, topic: str, timeout_s: float) -> TopicConfig | None:
    """Deletes a topic and waits until no broker offers it. See Admin.delete."""
    check_seconds("timeout_s", timeout_s)
    config = await cluster.topics.delete(topic)

    async def withdrawn() -> str:
        for kind in OFFER_KINDS:
            names = await children(cluster.session, cluster.session.paths.offers(kind, topic))
            if names:
                return f"{', '.join(names)} still offer it"
        return ""

    await wait_for(f"the end of topic {topic!r}", timeout_s, withdrawn, "It is deleted; brokers follow when they can.")
    for kind in OFFER_KINDS:
        # NotEmpty: the topic has been created again. NotAuthorized: only brokers may remove the node.
        with contextlib.suppress(NoNode, NotEmpty, NotAuthorized):
            await cluster.session.delete(cluster.session.paths.offers(kind, topic), ANY_VERSION)
    return config


async def all_topics(cluster: ClusterClient) -> dict[str, TopicConfig]:
    """Returns every topic's configuration, in alphabetical order. Warns of those that cannot be read."""
    configs, problems = await read_configs(cluster, await cluster.topics.names())
    for topic, problem in problems.items():
        log.warning("topic %r is left out: %s. `metamq topic delete` removes it", topic, problem.problem)
    return configs


async def read_configs(
    cluster: ClusterClient, topics: Collection[str]
) -> tuple[dict[str, TopicConfig], dict[str, MetamqError]]:
    """Returns the topics' configurations, and the errors of topics without a usable one. Raises ConnectionLost."""
    found = await cluster.topics.get_all(sorted(topics))
    configs: dict[str, TopicConfig] = {}
    problems: dict[str, MetamqError] = {}
    for topic, outcome in found.items():
        if isinstance(outcome, TopicConfig):
            configs[topic] = outcome
        elif outcome is None:
            problems[topic] = TopicNotFound(topic)
        else:
            problems[topic] = outcome
    return configs, problems


async def describe_topic(cluster: ClusterClient, topic: str) -> TopicDescription:
    """Returns configuration and state of a topic. Raises TopicNotFound, ConnectionLost."""
    return (await describe_topics(cluster, [await cluster.topics.get(topic)]))[0]


async def describe_topics(cluster: ClusterClient, configs: Collection[TopicConfig]) -> list[TopicDescription]:
    """Returns the state of topics, with a few requests to each of their brokers. Raises ConnectionLost."""
    masters = await live_brokers(cluster.session)
    found = await ask_offsets(cluster, {tp: (one.id, LATEST) for one in configs for tp in one.topic_partitions})
    broker_ids = sorted({broker_id for config in configs for broker_id in config.partitions})
    figures = await partition_statistics(cluster, [broker_id for broker_id in broker_ids if broker_id in masters])
    states = {broker_id: await read_state(cluster.session, broker_id) for broker_id in broker_ids}
    in_sync = {broker_id: len(stored[0].insync) for broker_id, stored in states.items() if stored is not None}

    def described(tp: TopicPartition) -> PartitionDescription:
        broker_id, answer = parse_partition(tp.partition)[0], found[tp]
        address = masters[broker_id].address if broker_id in masters else None
        if isinstance(answer, MetamqError):
            return PartitionDescription(tp.partition, broker_id, address, error=answer)
        size, last_append_us = (one.size_bytes, one.last_append_us) if (one := figures.get(tp)) else (None, None)
        return PartitionDescription(
            tp.partition, broker_id, address, answer.start_offset, answer.stable_offset, size, None, last_append_us
        )

    return [
        TopicDescription(
            config,
            tuple(map(described, config.topic_partitions)),
            {broker_id: in_sync[broker_id] for broker_id in config.partitions if broker_id in in_sync},
        )
        for config in configs
    ]


async def _choose_brokers(cluster: ClusterClient, wanted: Collection[int] | None) -> list[int]:
    """Returns the broker ids for new partitions: the live ones, or the wanted ones if all of them are live."""
    live = sorted(await live_brokers(cluster.session))
    if wanted is None:
        if not live:
            raise ConfigError("there is no broker to put partitions on", hint=await _how_to_get_one(cluster))
        return live
    if not isinstance(wanted, Collection) or not all(map(is_whole, wanted)):
        raise wrong_type("`brokers`", "a list of broker ids", wanted)
    missing = sorted(set(wanted) - set(live))
    if missing:
        known = f"Live brokers: {', '.join(map(str, live))}." if live else await _how_to_get_one(cluster)
        raise ConfigError(f"broker {', '.join(map(str, missing))} is not registered in ZooKeeper", hint=known)
    return sorted(set(wanted))


async def _how_to_get_one(cluster: ClusterClient) -> str:
    """Returns the next step if no broker has a master."""
    for broker_id in await cluster.broker_ids():
        stored = await read_state(cluster.session, broker_id)
        for slave in await slaves_of(cluster.session, broker_id):
            if stored is not None and (slave.replica, slave.incarnation) in stored[0].insync:
                promote = f"`metamq ha promote --broker {broker_id} --slave {slave.replica}`"
                return f"Broker {broker_id} has no master, and a slave in sync: start the master again, or {promote}."
    return "Start one with `metamq broker`."


def _check_count(topic: str, partitions: int) -> None:
    if type(partitions) is not int or not 1 <= partitions <= PARTITIONS_MAX:
        raise ConfigError(
            f"topic {topic!r}: partitions is {partitions!r}",
            hint=f"It must be a whole number, 1 to {PARTITIONS_MAX:,} in all.",
        )


def _check_settings(settings: Mapping[str, object], where: str) -> None:
    known = [*TopicSettings.__annotations__, "partitions", "brokers", "timeout_s"]
    for name in settings:
        if name not in known:
            raise unknown(name, known, where)


async def _wait_served(
    cluster: ClusterClient, config: TopicConfig, timeout_s: float, *, reachable_only: bool = False
) -> None:
    """Waits until every broker of the topic offers its partitions, and serves them under the topic's id.

    The offer alone may be left from a topic of the same name that was just deleted. `reachable_only`: skips brokers
    that are down; they know a topic that is not new.
    """
    hint = "The configuration is stored; brokers follow when they are up. See `metamq topic describe`, `metamq doctor`."

    async def served() -> str:
        live = await live_brokers(cluster.session) if reachable_only else config.partitions
        for broker_id, count in config.partitions.items():
            if broker_id in live and await _offered_counts(cluster.session, config.topic, broker_id) != {count}:
                return f"broker {broker_id} does not offer its {count} yet"
        requests: dict[TopicPartition, tuple[str, int]] = dict.fromkeys(config.topic_partitions, (config.id, LATEST))
        for tp, answer in (await ask_offsets(cluster, requests)).items():
            is_away = reachable_only and isinstance(answer, ConnectError | Timeout)
            if isinstance(answer, MetamqError) and not is_away and not isinstance(answer, NotAuthorized):
                return f"{tp}: {answer.problem}"
        return ""

    await wait_for(f"the start of topic {config.topic!r} at its brokers", timeout_s, served, hint)


async def _offered_counts(session: Session, topic: str, broker_id: int) -> set[int | None]:
    """Returns the numbers of partitions that a broker offers for writing and for reading."""
    found = set[int | None]()
    for kind in OFFER_KINDS:
        node = await session.get_or_none(session.paths.offered_topic(kind, topic, master_offer(broker_id)))
        try:
            found.add(None if node is None else offered_partitions(node.data))
        except CorruptData:
            found.add(None)
    return found


async def wait_for(what: str, timeout_s: float, missing: Callable[[], Awaitable[str]], hint: str) -> None:
    """Calls `missing` until it returns "". Raises Timeout with its last answer."""
    pause_s, words = LOOK_AGAIN_S, "ZooKeeper did not answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    words = await missing()
                except ConnectionLost as error:
                    words = error.problem
                if not words:
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 1.5, LOOK_AGAIN_S_MAX)
    except TimeoutError:
        raise Timeout(f"{what} ({words})", timeout_s, hint=hint) from None
