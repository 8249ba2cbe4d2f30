"""`metamq plan`: works out the sizes of a cluster. The arithmetic is in `needs`, the measured figures in `measures`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.command import CliCommand
from metamq.cli.show.output import TABLE_OR_JSON, print_json, print_line, print_table
from metamq.cli.show.units import DURATION, SIZE, show_bytes

if TYPE_CHECKING:
    from metamq.cli.sizing.needs import LimitUse, SizedCluster

MORE = 10
_COUNT, _POSITIVE = click.IntRange(min=0), click.IntRange(min=1)


@click.command(cls=CliCommand)
@click.option("--topics", type=_POSITIVE, required=True, help="Number of topics.")
@click.option("--partitions", type=_POSITIVE, required=True, help="Partitions of each topic.")
@click.option("--rate", type=_POSITIVE, required=True, help="Messages a second, of all topics together.")
@click.option("--size", type=SIZE, required=True, help="Size of a message: 100, 1KiB.")
@click.option("--consumers", type=_COUNT, default=1, show_default=True, help="Members of all groups together.")
@click.option("--groups", type=_COUNT, default=1, show_default=True, help="Groups; each reads all topics.")
@click.option("--producers", type=_COUNT, default=10, show_default=True, help="Producers.")
@click.option("--batch", type=_POSITIVE, default=100, show_default=True, help="Messages in a request of a producer.")
@click.option("--keep", type=DURATION, default="7d", show_default=True, help="Retention of all topics.")
@click.option("--replicas", type=click.IntRange(1, 16), default=2, show_default=True, help="Replicas of a broker id.")
@click.option("--commit-interval", type=DURATION, default="1s", show_default=True, help="Time between two commits.")
@TABLE_OR_JSON
def plan(output: str, keep: int, commit_interval: int, **given: Any) -> None:
    """Work out brokers, memory, disks and ZooKeeper for a workload.

    Uses measured figures of one machine, see docs/scaling.md, and no cluster. The last column is for ten times the
    topics, messages and clients. AT is a limit, or the largest size that was measured.

    \b
    metamq plan --topics 50 --partitions 20 --rate 20000 --size 1000
    metamq plan --topics 5 --partitions 8 --rate 500 --size 1KiB -o json
    """
    from metamq.cli.sizing.measures import MEASURES
    from metamq.cli.sizing.needs import Workload, sized

    load = Workload(**given, keep_s=keep / 1000, commit_s=max(commit_interval, 1) / 1000)
    now, later = sized(load), sized(load.times(MORE))
    if output == "json":
        measures = {name: asdict(one) for name, one in MEASURES.items()}
        print_json({"workload": asdict(load), "cluster": asdict(now), "ten_times": asdict(later), "measures": measures})
        return
    needs = zip(_needs(now), _needs(later), strict=True)
    print_table(["NEED", "NOW", f"{MORE} TIMES"], [[*one, after[1]] for one, after in needs])
    click.echo()
    used = {one.what: one.share for one in later.limits}
    rows = [[one.what, _at(one), _percent(one.share), _percent(used[one.what])] for one in now.limits]
    print_table(["LIMIT", "AT", "NOW", f"{MORE} TIMES"], rows)
    click.echo()
    print_line(f"The number of broker ids follows from {now.reason}.")
    _print_first(now, "First limit")
    _print_first(later, f"First limit at {MORE} times")


def _print_first(cluster: SizedCluster, heading: str) -> None:
    first = cluster.first
    print_line(f"{heading}: {first.what}, {_percent(first.share)} used. Remedy: {first.then}.")
    for one in cluster.limits:
        if one.is_hard and one.share > 1 and one is not first:
            print_line(f"  Also passed: {one.what}, {_percent(one.share)} used. Remedy: {one.then}.")
    for one in cluster.untried:
        print_line(f"  Larger than measured: {one.what}, {one.used:,.0f}, measured {one.limit:,.0f}; {one.then}.")


def _at(one: LimitUse) -> str:
    return f"{one.limit:,.0f}" if one.is_hard else f"{one.limit:,.0f}, measured"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:,.0%}"


def _needs(cluster: SizedCluster) -> list[tuple[str, str]]:
    broker, zookeeper = cluster.broker, cluster.zookeeper
    return [
        ("broker ids", f"{cluster.broker_ids:,}"),
        ("broker processes, a core each", f"{cluster.processes:,}"),
        ("of a process: busy core", _percent(broker.cores)),
        ("of a process: memory", _size(broker.memory_bytes)),
        ("of a process: disk", _size(broker.disk_bytes)),
        ("of a process: written a second", _size(broker.written_bytes_per_s)),
        ("of a process: sent a second", _size(broker.sent_bytes_per_s)),
        ("of a process: partitions", f"{broker.partitions:,}"),
        ("of a process: connections", f"{broker.connections:,}"),
        ("of a process: connections_max", f"{broker.connections_max:,}"),
        ("of a process: LimitNOFILE", f"{broker.descriptors:,}"),
        ("ZooKeeper: nodes", f"{zookeeper.nodes:,}"),
        ("ZooKeeper: Java's heap", _size(zookeeper.memory_bytes)),
        ("ZooKeeper: sessions", f"{zookeeper.sessions:,}"),
        ("ZooKeeper: commits a second", f"{zookeeper.commits_per_s:,.0f}"),
        ("ZooKeeper: busy core", _percent(zookeeper.cores)),
        ("clients: memory in all", _size(cluster.client_memory_bytes)),
    ]


def _size(number: float) -> str:
    return show_bytes(round(number))
