"""The cluster, as its brokers and ZooKeeper describe it: known fields only, and no message.

A part first takes the facts that ZooKeeper has, then asks the brokers: a broker that does not answer takes nothing
from the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from metamq.cli.show.topic_view import config_json, defaults_json, description_json
from metamq.client.admin.admin_brokers import children, describe_brokers
from metamq.client.admin.admin_groups import describe_group
from metamq.client.admin.admin_replicas import describe_replicas
from metamq.client.admin.admin_topics import describe_topics, read_configs
from metamq.client.admin.admin_transactions import open_branches
from metamq.client.model import time_of
from metamq.client.net.paged_requests import ask_statistics
from metamq.errors import MetamqError
from metamq.zk.cluster.brokers import live_brokers
from metamq.zk.cluster.failover import read_failover
from metamq.zk.cluster.replicas import slaves_of
from metamq.zk.cluster.topic_defaults import read_defaults
from metamq.zk.security.delegations import DELEGATIONS
from metamq.zk.security.quotas import QUOTAS
from metamq.zk.security.rights import RULES
from metamq.zk.security.users import USERS

if TYPE_CHECKING:
    from metamq.cli.support.parcel import Parcel
    from metamq.client.admin.admin_model import GroupDescription
    from metamq.client.net.cluster import ClusterClient
    from metamq.zk.cluster.registrations import BrokerAddress

K = TypeVar("K")
T = TypeVar("T")
AT_ONCE = 16


async def each(
    keys: Iterable[K], ask: Callable[[K], Awaitable[T]], keep: Callable[[K, T], None], parcel: Parcel, what: str
) -> None:
    """Asks about each key, some at a time; keeps an answer at once. `what` names a key in the problems."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(key: K) -> None:
        async with slots:
            try:
                keep(key, await ask(key))
            except MetamqError as error:
                parcel.missing(f"{what} {key}", error)

    await asyncio.gather(*map(one, keys))


async def brokers(cluster: ClusterClient, parcel: Parcel) -> None:
    """Brokers, their replicas, and their failover with the last switches."""
    described = await describe_brokers(cluster)
    parcel.files["cluster/brokers.json"] = [{**asdict(one), "address": one.address} for one in described.values()]
    failover: dict[int, Any] = {}
    parcel.files["cluster/failover.json"] = failover
    await each(
        described,
        lambda broker_id: read_failover(cluster.session, broker_id),
        lambda broker_id, one: failover.update({broker_id: asdict(one)}),
        parcel,
        "the failover of broker",
    )
    replicas = await describe_replicas(cluster)
    parcel.files["cluster/replicas.json"] = [
        {**asdict(one), "replicas": [{**asdict(each_one), "state": each_one.state} for each_one in one.replicas]}
        for one in replicas.values()
    ]


async def replica_addresses(cluster: ClusterClient) -> dict[str, BrokerAddress]:
    """Returns the registered replicas, by "<broker id>-<replica>"."""
    masters = await live_brokers(cluster.session)
    found = {(one.broker_id, one.replica): one for one in masters.values()}
    for broker_id in await cluster.broker_ids():
        found |= {(one.broker_id, one.replica): one for one in await slaves_of(cluster.session, broker_id)}
    return {f"{broker_id}-{replica}": found[broker_id, replica] for broker_id, replica in sorted(found)}


async def status_addresses(cluster: ClusterClient) -> dict[str, str]:
    """Returns the registered addresses of status ports, by replica."""
    return {name: one.status for name, one in (await replica_addresses(cluster)).items() if one.status}


async def statistics(cluster: ClusterClient, parcel: Parcel, samples: int, every_s: float) -> None:
    """The figures of STATS of each replica, several times; and the delayed messages that wait."""
    for broker_id, one in (await describe_brokers(cluster)).items():
        if not one.live:
            parcel.missing(f"broker {broker_id}", "no master is registered in ZooKeeper")

    for number in range(1, samples + 1):
        pause = asyncio.create_task(asyncio.sleep(every_s if number < samples else 0))
        sample: dict[str, Any] = {}
        parcel.files[f"statistics/sample-{number}.json"] = {"time": _now(), "replicas": sample}
        await _sample(cluster, parcel, sample)
        if number == 1:
            parcel.files["cluster/delayed.json"] = [_delayed(name, one) for name, one in sorted(sample.items())]
        await pause


async def _sample(cluster: ClusterClient, parcel: Parcel, sample: dict[str, Any]) -> None:
    addresses = await replica_addresses(cluster)

    async def ask(name: str) -> dict[str, Any]:
        return await ask_statistics(await cluster.connections.get(addresses[name]))

    await each(addresses, ask, lambda name, one: sample.update({name: one}), parcel, "replica")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _delayed(name: str, header: dict[str, Any]) -> dict[str, Any]:
    found = header.get("delayed") or {}
    next_us = found.get("next_us")
    return {
        "replica": name,
        "waiting": found.get("waiting"),
        "next_due": time_of(next_us).isoformat() if next_us else None,
    }


async def topics(cluster: ClusterClient, parcel: Parcel) -> None:
    """Topics with their settings, and their partitions. Of a schema only its format and size."""
    configs, problems = await read_configs(cluster, await cluster.topics.names())
    parcel.files["cluster/topics.json"] = [
        {
            **config_json(one),
            "id": one.id,
            "compatibility": one.schemas.compatibility,
            "schemas": [
                {"format": each_one.format, "chars": len(each_one.definition)} for each_one in one.schemas.versions
            ],
        }
        for one in configs.values()
    ]
    for name, error in problems.items():
        parcel.missing(f"topic {name}", error)
    parcel.files["cluster/topic-defaults.json"] = defaults_json(await read_defaults(cluster.session))
    described = await describe_topics(cluster, list(configs.values()))
    parcel.files["cluster/partitions.json"] = [
        {name: one for name, one in description_json(found).items() if name != "config"} for found in described
    ]
    for found in described:
        for partition in found.partitions:
            if partition.error is not None:
                parcel.missing(f"the partitions at broker {partition.broker_id}", partition.error)


async def groups(cluster: ClusterClient, parcel: Parcel) -> None:
    """Groups with their members, owners, offsets and lags."""
    names = await children(cluster.session, cluster.session.paths.groups())
    described: dict[str, Any] = {}
    parcel.files["cluster/groups.json"] = described
    await each(
        names,
        lambda name: describe_group(cluster, name),
        lambda name, one: described.update({name: _group(one, parcel)}),
        parcel,
        "group",
    )


def _group(found: GroupDescription, parcel: Parcel) -> dict[str, Any]:
    for one in found.partitions:
        if one.problem:
            parcel.missing("the ends of partitions, and so lags", one.problem)
    return {
        **asdict(found),
        "lag": found.lag,
        "members": [{**asdict(one), "partitions": list(map(str, one.partitions))} for one in found.members],
        "partitions": [{**asdict(one), "lag": one.lag} for one in found.partitions],
    }


async def transactions(cluster: ClusterClient, parcel: Parcel) -> None:
    """The open branches of transactions."""
    found = await open_branches(cluster)
    parcel.files["cluster/transactions.json"] = [{**one._asdict(), "xid": str(one.xid)} for one in found.branches]
    for broker_id, problem in found.problems.items():
        parcel.missing(f"the branches at broker {broker_id}", problem)


async def security(cluster: ClusterClient, parcel: Parcel) -> None:
    """The names of users, rules, quotas, and tokens without their ids: no verifier of a password or a token."""
    session, document = cluster.session, dict[str, Any]()
    parcel.files["cluster/security.json"] = document
    document["users"] = sorted(await USERS.read(session))
    document["rules"] = sorted(map(str, await RULES.read(session)))
    document["quotas"] = {name: one._asdict() for name, one in sorted((await QUOTAS.read(session)).items())}
    document["delegations"] = [
        {"principal": one.principal, "rights": sorted(one.rights), "expires_ms": one.expires_ms}
        for one in (await DELEGATIONS.read(session)).values()
    ]
