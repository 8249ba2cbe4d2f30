"""`metamq doctor`: looks at every part, from the settings to the last partition, and says what to do about it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from metamq.broker.config import BrokerConfig
from metamq.cli.command import CliCommand
from metamq.cli.commands.tx import PREPARED, age_ms, next_steps, who_decides
from metamq.cli.context import Globals, current
from metamq.cli.reach import look_for_cluster
from metamq.cli.show.output import TABLE_OR_JSON, count, folded, listed, print_json, styled
from metamq.cli.show.replica_view import amiss, damage
from metamq.cli.show.topic_view import not_served, refuses_writes, size_in_words
from metamq.cli.show.units import show_age, show_bytes
from metamq.client.admin.admin_groups import children
from metamq.client.admin.admin_replicas import describe_broker
from metamq.client.admin.admin_topics import describe_topic
from metamq.client.admin.admin_transactions import open_branches
from metamq.client.fetch.consumer_options import ConsumerOptions
from metamq.client.group.rebalance_decisions import has_no_topic, why_idle
from metamq.client.net.cluster import ClusterClient
from metamq.client.producer.producer_core import ProducerOptions
from metamq.client.settings import ENVIRONMENT_PREFIX, VARIABLES, load, variable
from metamq.errors import ConfigError, CorruptData, MetamqError
from metamq.wire.commands import Command
from metamq.zk.documents import noting
from metamq.zk.groups.members import owned_partitions, read_members
from metamq.zk.groups.plans import PLAN_BYTES_MAX, PLAN_HINT, read_plan
from metamq.zk.server import jars
from metamq.zk.server.java import find_java, java_version
from metamq.zk.servers import parse_servers
from metamq.zk.session.session import Session

Status = Literal["ok", "warning", "problem"]

UNREACHABLE = 3
TIMEOUT_S = 5.0
SKEW_MS_MAX = 1_000
FREE_BYTES_MIN = 1024**3
SECTIONS: dict[str, type[Any]] = {"broker": BrokerConfig, "producer": ProducerOptions, "consumer": ConsumerOptions}
OTHERS = ("METAMQ_TEST_WORKERS", "METAMQ_ADVERTISE", "METAMQ_PUBLISH", "METAMQ_IMAGE")
"""Variables of `./dev test` and of docker-compose.yml."""
DAMAGE_HINT = (
    "`metamq log verify` on the broker's data folder shows every damaged place, and changes nothing. Where no "
    "replica is in sync, `metamq log forget` gives the log up."
)
PLAN_SHARE_WARNED = 0.75
IDLE_HINTS = {
    False: "Add partitions, or start no more members than there are; one that is left over only stands by.",
    True: "Create the topic again, with `metamq topic create`, or stop the member, which waits for that.",
}
"""By whether the member's topics are gone."""
PREPARED_MS_MAX = 60_000
"""A coordinator decides in less time: this one has failed, or waits for another one that has."""
BRANCHES_NAMED = 5
INDENT = 9
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    status: Status
    detail: str
    hint: str = ""


@click.command(cls=CliCommand)
@TABLE_OR_JSON
def doctor(output: str) -> int:
    """Look at every part, from settings, Java and disk to topics, groups and transactions, and say what is wrong.

    Ends with status 0 when there is no problem (a warning is none), 3 when ZooKeeper is not reachable, else 1.

    \b
    metamq doctor
    metamq doctor --zookeeper zk1:2181,zk2:2181
    metamq doctor -o json | jq '.[] | select(.status != "ok")'
    """
    settings = current()
    settings.log(quiet=logging.CRITICAL)
    # For what it waits.
    logging.getLogger("metamq.zk").setLevel(min(logging.WARNING, logging.getLogger("metamq").level))
    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        if output == "table":
            _print(finding)

    is_reachable = _look(settings, tell)
    if output == "json":
        print_json([asdict(finding) for finding in findings])
    if not is_reachable:
        return UNREACHABLE
    return 1 if any(finding.status == "problem" for finding in findings) else 0


def _print(finding: Finding) -> None:
    status = styled(finding.status.ljust(INDENT - 1), sys.stdout, fg=COLOURS[finding.status])
    # Folded without the colours, which take no place.
    lines = folded(f"{' ' * INDENT}{finding.what}: {finding.detail}", sys.stdout)
    click.echo(f"{status} {lines[INDENT:]}")
    if finding.hint:
        click.echo(folded(f"{' ' * INDENT}{finding.hint}", sys.stdout))


def _look(settings: Globals, tell: Callable[[Finding], None]) -> bool:
    """Tells of everything; False when ZooKeeper cannot be reached, after which nothing else is known."""
    for finding in _local():
        tell(finding)
    try:
        servers, root = settings.servers(), settings.place()
        hosts, _chroot = parse_servers(servers)
        for section, kind in SECTIONS.items():
            load(kind, section, file=settings.config_file, arguments={})
    except ConfigError as error:
        tell(Finding("settings", "problem", error.problem, error.hint))
        return True
    source = f"file {settings.config_file}" if settings.config_file else "no file"
    tell(Finding("settings", "ok", f"ZooKeeper at {servers}, root {root}, {source}"))
    for finding in _environment():
        tell(finding)
    reached = [_probe(host, port, tell) for host, port in hosts]
    if not any(reached):
        return False
    try:
        asyncio.run(_look_inside(servers, root, tell))
    except MetamqError as error:
        tell(Finding("ZooKeeper", "problem", error.problem, error.hint))
        return False
    return True


def _environment() -> Iterator[Finding]:
    """Variables that look like settings, and are none."""
    sections = tuple(variable(section, "") for section in SECTIONS)
    for name in sorted(os.environ):
        if name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(sections) and name not in (*VARIABLES, *OTHERS):
            yield Finding("settings", "warning", f"{name} is no setting", f"Known: {', '.join(VARIABLES)}.")


# This machine


def _local() -> Iterator[Finding]:
    yield _java()
    yield _jars()
    yield _disk()


def _java() -> Finding:
    try:
        program = find_java()
    except ConfigError as error:
        return Finding("Java, for `metamq up`", "warning", error.problem, error.hint)
    return Finding("Java, for `metamq up`", "ok", f"{program}, version {java_version(program)}")


def _jars() -> Finding:
    """Looks where find_jars() does, but downloads nothing."""
    what = "ZooKeeper's jars, for `metamq up`"
    setting = os.environ.get("METAMQ_ZOOKEEPER_JARS")
    places = [Path(setting)] if setting else [jars.cache_folder()]
    for place in places:
        if not jars.jars_in_folder(place)[1]:
            return Finding(what, "ok", str(place))
    if setting:
        missing = ", ".join(jars.jars_in_folder(Path(setting))[1])
        return Finding(what, "warning", f"METAMQ_ZOOKEEPER_JARS={setting} has no jar of {missing}")
    return Finding(what, "ok", "not here yet; the first start downloads them (4 MB)")


def _disk() -> Finding:
    place = Path("./metamq-data") if Path("./metamq-data").is_dir() else Path(".")
    free = shutil.disk_usage(place).free
    if free < FREE_BYTES_MIN:
        return Finding("disk", "warning", f"{show_bytes(free)} free here", "A broker refuses writes below its reserve.")
    return Finding("disk", "ok", f"{show_bytes(free)} free here")


# ZooKeeper


def _probe(host: str, port: int, tell: Callable[[Finding], None]) -> bool:
    what = f"ZooKeeper server {host}:{port}"
    began = time.monotonic()
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
    except OSError as error:
        hint = "Start one with `metamq up`, or say where yours is: --zookeeper or METAMQ_ZOOKEEPER."
        tell(Finding(what, "problem", f"not reachable: {(error.strerror or str(error)).lower()}", hint))
        return False
    tell(Finding(what, "ok", f"listens, connected in {(time.monotonic() - began) * 1000:.1f} ms"))
    return True


async def _look_inside(servers: str, root: str, tell: Callable[[Finding], None]) -> None:
    try:
        await look_for_cluster(servers, root)
    except ConfigError as error:
        tell(Finding("root", "problem", error.problem, error.hint))
        return
    session = await Session.open(servers, root=root)
    cluster = ClusterClient(session)
    try:
        began = time.monotonic()
        await session.sync()
        trip_ms = (time.monotonic() - began) * 1000
        timeout_s = session.negotiated_timeout_ms / 1000
        tell(Finding("ZooKeeper session", "ok", f"a round trip took {trip_ms:.1f} ms, time-out {timeout_s:g} s"))
        without_master = await _look_at_brokers(cluster, tell)
        await _look_at_topics(cluster, without_master, tell)
        await _look_at_groups(session, tell)
        await _look_at_transactions(cluster, without_master, tell)
    finally:
        await cluster.close()
        await session.close()


async def _checked(what: str, work: Awaitable[Finding], tell: Callable[[Finding], None]) -> None:
    """Tells what `work` finds; an error is a finding too."""
    try:
        tell(await work)
    except MetamqError as error:
        tell(Finding(what, "problem", error.problem, error.hint))


def _tell_unreadable(what: str, errors: list[CorruptData], tell: Callable[[Finding], None]) -> None:
    """Reports nodes in ZooKeeper that everybody passes over: no other part of metamq fails because of them."""
    for problem, hint in dict.fromkeys((error.problem, error.hint) for error in errors):
        tell(Finding(what, "problem", f"{problem}; it counts as not there", hint))


# Brokers


async def _look_at_brokers(cluster: ClusterClient, tell: Callable[[Finding], None]) -> set[int]:
    """Returns the broker ids without a master that answers."""
    session = cluster.session
    names = await children(session, session.paths.broker_ids())
    strange = [name for name in names if not name.isdecimal()]
    if strange:
        tell(Finding("brokers", "warning", f"strange nodes in {session.paths.broker_ids()}: {', '.join(strange)}"))
    broker_ids = sorted(int(name) for name in names if name.isdecimal())
    if not broker_ids:
        tell(Finding("brokers", "problem", "none was ever registered", "Start one with `metamq broker`."))
    return {broker_id for broker_id in broker_ids if not await _look_at_broker(cluster, broker_id, tell)}


async def _look_at_broker(cluster: ClusterClient, broker_id: int, tell: Callable[[Finding], None]) -> bool:
    """Tells of its master and the other replicas; False when it has no master that answers."""
    what = f"broker {broker_id}"
    try:
        with noting() as unreadable:
            found = await describe_broker(cluster, broker_id)
        _tell_unreadable(what, unreadable, tell)
        if found is None:
            tell(Finding(what, "problem", "not registered", "Start replica 0, or see its log for why it has ended."))
            return False
        faults = amiss(found)
        if not any(fault.status == "problem" for fault in faults):
            tell(await _master(cluster, broker_id))
    except MetamqError as error:
        tell(Finding(what, "problem", error.problem, "`metamq ha status` shows its replicas."))
        return False
    for fault in (*faults, *damage(found)):
        tell(Finding(fault.what, fault.status, fault.detail, fault.hint))
    return not any(fault.status == "problem" for fault in faults)


async def _master(cluster: ClusterClient, broker_id: int) -> Finding:
    """Answering, of a release we know, with our time, accepting writes."""
    what = f"broker {broker_id}"
    connection = await cluster.connection(broker_id)
    master = cluster.brokers[broker_id]
    began_ms = time.time_ns() / 1e6
    header = await connection.request(Command.STATS, None, timeout_s=TIMEOUT_S)
    ended_ms = time.time_ns() / 1e6
    # Its clock was read some time between; the skew is at least what remains outside of that.
    skew_ms = max(header["time_ms"] - ended_ms, began_ms - header["time_ms"] - 1, 0.0)
    seen = f"{master.address}, epoch {header['epoch']}, version {master.version}, {ended_ms - began_ms:.1f} ms"
    if header["writes_refused"]:
        return Finding(what, "problem", f"{seen}; it refuses writes: {header['writes_refused']}")
    if connection.greeting.broker_id != broker_id:
        hint = "Two brokers share an address, or --advertise names the wrong host."
        return Finding(what, "problem", f"{master.address} is broker {connection.greeting.broker_id}", hint)
    if skew_ms > SKEW_MS_MAX:
        hint = "Set both clocks by NTP: timestamps and retention go by them."
        return Finding(what, "warning", f"{seen}; its clock is {skew_ms / 1000:.1f} s off ours", hint)
    detail = f"{seen}, clock ±{max(skew_ms, ended_ms - began_ms):.0f} ms"
    return Finding(what, "ok", f"{detail}; {_verified(header.get('scrub') or {})}")


def _verified(scrub: dict[str, Any]) -> str:
    """How far the scrub has come, in words."""
    if not scrub.get("bytes_per_s"):
        return "its logs are not verified in the background"
    if not scrub["is_complete"]:
        return f"{show_bytes(scrub['pass_bytes'])} of its logs verified since its start"
    age_ms = round(scrub["pass_age_s"] * 1000)
    return f"all of its logs verified {show_age(age_ms)} ago"


# Topics and groups


async def _look_at_topics(cluster: ClusterClient, without_master: set[int], tell: Callable[[Finding], None]) -> None:
    """Of those whose brokers have no master it says no more than that: the brokers' findings say what to do."""
    in_the_dark: dict[str, set[int]] = {}

    async def look(name: str) -> None:
        config = await cluster.topics.get(name)
        if dark := without_master & set(config.partitions):
            in_the_dark[name] = dark
        if dark != set(config.partitions):
            tell(await _topic(cluster, name, without_master))

    names = await cluster.topics.names()
    if not names:
        tell(Finding("topics", "ok", "none yet"))
    for name in names:
        try:
            await look(name)
        except MetamqError as error:
            tell(Finding(f"topic {name}", "problem", error.problem, error.hint))
    if in_the_dark:
        brokers = listed([str(broker_id) for broker_id in sorted(set().union(*in_the_dark.values()))])
        detail = f"not served, in whole or in part, while broker {brokers} has no master: {listed(list(in_the_dark))}"
        tell(Finding("topics", "problem", detail))


async def _topic(cluster: ClusterClient, name: str, without_master: set[int]) -> Finding:
    what, found = f"topic {name}", await describe_topic(cluster, name)
    dark = not_served(found, besides=without_master)
    if dark:
        hint = DAMAGE_HINT if any(" is damaged" in problem for problem in dark) else ""
        return Finding(what, "problem", f"{size_in_words(found)}; not served: {'; '.join(dark)}", hint)
    refusals = refuses_writes(found, besides=without_master)
    if refusals:
        hint = f"See `metamq ha status`; or, with less safety: `metamq topic alter {name} --min-insync ...`."
        return Finding(what, "problem", f"{size_in_words(found)}; {'; '.join(refusals)}", hint)
    return Finding(what, "ok", size_in_words(found))


async def _look_at_groups(session: Session, tell: Callable[[Finding], None]) -> None:
    """That members, plans and owners can be read, no owner is without a member, and no member without a partition."""

    async def look(name: str) -> Finding:
        present = {}
        if await session.exists(session.paths.members(name)) is not None:
            with noting() as unreadable:
                present = await read_members(session, name)
            _tell_unreadable(f"group {name}", unreadable, tell)
        stored = await read_plan(session, name)
        owners = await owned_partitions(session, name)
        left = sorted({owner for owner in owners.values() if owner not in present})
        if left:
            hint = "They end with their owners' sessions; `metamq group evict` removes them at once."
            return Finding(f"group {name}", "warning", f"partitions owned by no member: {', '.join(left)}", hint)
        size = f"{count(len(present), 'member')}, {count(len(owners), 'partition')} owned"
        if stored is not None and stored.plan is None:
            stored.check_format(name)
            told = f"{size}; the plan of group {name!r} in ZooKeeper is damaged"
            return Finding(f"group {name}", "warning", told, "Its members make a new one.")
        if stored is not None and stored.size_bytes > PLAN_BYTES_MAX * PLAN_SHARE_WARNED:
            told = f"{size}; its plan takes {stored.size_bytes:,} of {PLAN_BYTES_MAX:,} bytes"
            return Finding(f"group {name}", "warning", told, PLAN_HINT)
        plan = stored.plan if stored is not None else None
        idle = {member: reason for member in present if plan is not None and (reason := why_idle(member, plan))}
        reasons = [f"{member} has none: {reason}" for member, reason in idle.items()]
        if reasons:
            waits = {plan is not None and has_no_topic(member, plan) for member in idle}
            hint = " ".join(IDLE_HINTS[is_without_topic] for is_without_topic in sorted(waits))
            return Finding(f"group {name}", "warning", f"{size}; {'; '.join(reasons)}", hint)
        return Finding(f"group {name}", "ok", size)

    for name in await children(session, session.paths.groups()):
        await _checked(f"group {name}", look(name), tell)


async def _look_at_transactions(
    cluster: ClusterClient, without_master: set[int], tell: Callable[[Finding], None]
) -> None:
    """That none is prepared for longer than it takes to decide. Of brokers without a master their findings tell."""
    found = await open_branches(cluster)
    for broker_id, problem in found.problems.items():
        if broker_id not in without_master:
            tell(Finding("transactions", "problem", f"not known: what is open at broker {broker_id}: {problem}"))
    prepared = sorted((one for one in found.branches if one.state == PREPARED), key=lambda one: one.prepared_us)
    late = [one for one in prepared if age_ms(one) > PREPARED_MS_MAX]
    for one in late[:BRANCHES_NAMED]:
        told = f"prepared at broker {one.broker_id} for {show_age(age_ms(one))}; it is decided by {who_decides(one)}"
        tell(Finding(f"transaction {one.xid}", "warning", told, " ".join(next_steps(one))))
    if len(late) > BRANCHES_NAMED:
        told = f"{len(late) - BRANCHES_NAMED:,} more are prepared for more than {show_age(PREPARED_MS_MAX)}"
        tell(Finding("transactions", "warning", told, "`metamq tx list` shows them."))
    if not late and not found.problems:
        told = f"{count(len({one.xid.whole for one in prepared}), 'transaction')} prepared, none for long"
        tell(Finding("transactions", "ok", told))
