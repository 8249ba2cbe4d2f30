"""`metamq doctor`: checks every part, from the settings to the last partition, and prints the next steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.command import CliCommand
from metamq.cli.commands.tx import PREPARED, age_ms, next_steps, who_decides
from metamq.cli.context import Globals, current, look_for_cluster
from metamq.cli.show.output import TABLE_OR_JSON, count, folded, listed, print_json, print_line, styled
from metamq.cli.show.replica_view import RECENT_MS, Finding, damage_faults, failover_faults, replica_faults
from metamq.cli.show.topic_view import not_served, refuses_writes, size_in_words
from metamq.cli.show.units import show_age, show_bytes
from metamq.cli.upkeep.sections import SECTIONS
from metamq.client.admin.admin_brokers import children
from metamq.client.admin.admin_groups import describe_group
from metamq.client.admin.admin_replicas import describe_broker, failover_of
from metamq.client.admin.admin_topics import describe_topics, read_configs
from metamq.client.admin.admin_transactions import open_branches
from metamq.client.group.rebalance_decisions import has_no_topic, why_idle
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.first_contact import open_session
from metamq.client.settings import ENVIRONMENT_PREFIX, VARIABLES, load, variable
from metamq.errors import ConfigError, ConnectError, CorruptData, MetamqError
from metamq.security.config import WARN_DAYS, SecurityConfig
from metamq.security.exposure import EXPOSED_HINT, is_exposed
from metamq.wire.commands import Command
from metamq.zk.cluster.node_acls import open_groups, wrong_nodes
from metamq.zk.documents import collect_skipped
from metamq.zk.groups.members import owned_partitions, read_members
from metamq.zk.groups.plans import PLAN_BYTES_MAX, PLAN_HINT, read_plan
from metamq.zk.groups.settled_letters import read_settled
from metamq.zk.names import DEAD_LETTER_SUFFIX
from metamq.zk.security.lists import damaged_lists
from metamq.zk.server import jars
from metamq.zk.server.java import find_java, java_version
from metamq.zk.server.load import ServerLoad, load_of
from metamq.zk.servers import parse_servers

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import TopicDescription
    from metamq.client.settings import ClusterAccess

UNREACHABLE = 3
TIMEOUT_S = 5.0
SKEW_MS_MAX = 1_000
FREE_BYTES_MIN = 1024**3
OTHERS = ("METAMQ_TEST_WORKERS", "METAMQ_ADVERTISE", "METAMQ_PUBLISH", "METAMQ_IMAGE")
"""Variables of `./dev test` and of docker-compose.yml."""
DAMAGE_HINT = (
    "`metamq log verify` on the broker's data folder shows every damaged place, and changes nothing. If no replica "
    "is in sync, `metamq log forget` gives up the log."
)
PLAN_SHARE_WARNED = 0.75
IDLE_HINTS = {
    False: "Add partitions, or run fewer members: a member without a partition only waits.",
    True: "Create the topic again, with `metamq topic create`, or stop the member, which waits for the topic.",
}
"""The hint for an idle member; True if its topics are gone."""
PREPARED_MS_MAX = 60_000
"""The time in which a coordinator decides. A slower coordinator has failed, or waits for one that has failed."""
BRANCHES_NAMED = 5
INDENT = 9
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command(cls=CliCommand, quiet=logging.CRITICAL)
@TABLE_OR_JSON
def doctor(output: str) -> int:
    """Check settings, Java, disk, ZooKeeper, brokers, topics, groups and transactions, and report problems.

    Ends with status 0 if there is no problem (a warning is no problem), 3 if ZooKeeper is not reachable, else 1.

    \b
    metamq doctor
    metamq doctor --zookeeper zk1:2181,zk2:2181
    metamq doctor -o json | jq '.[] | select(.status != "ok")'
    """
    settings = current()
    # This logs a wait for ZooKeeper.
    logging.getLogger("metamq.zk").setLevel(min(logging.WARNING, logging.getLogger("metamq").level))
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if output == "table":
            _print(finding)

    is_reachable = look(settings, report)
    if output == "json":
        print_json([asdict(finding) for finding in findings])
    if not is_reachable:
        return UNREACHABLE
    return 1 if any(finding.status == "problem" for finding in findings) else 0


def _print(finding: Finding) -> None:
    status = styled(finding.status.ljust(INDENT - 1), sys.stdout, fg=COLOURS[finding.status])
    # Wrapped before it is coloured: colours have no width.
    lines = folded(f"{' ' * INDENT}{finding.what}: {finding.detail}", sys.stdout)
    click.echo(f"{status} {lines[INDENT:]}")
    if finding.hint:
        print_line(f"{' ' * INDENT}{finding.hint}")


def look(settings: Globals, report: Callable[[Finding], None], access: ClusterAccess | None = None) -> bool:
    """Reports all findings; returns False if ZooKeeper is not reachable: then nothing else is known.

    `access` replaces that of the settings.
    """
    for finding in _local():
        report(finding)
    try:
        access = access or settings.access()
        hosts, _chroot = parse_servers(access.zookeeper)
        for section, kind in SECTIONS.items():
            load(kind, section, file=settings.config_file, arguments={})
    except ConfigError as error:
        report(Finding("settings", "problem", error.problem, error.hint))
        return True
    source = f"file {settings.config_file}" if settings.config_file else "no file"
    if (choice := settings.choice()).name is not None:
        source = f"{source}, context {choice.name}"
    report(Finding("settings", "ok", f"ZooKeeper at {access.zookeeper}, root {access.root}, {source}"))
    for finding in _environment():
        report(finding)
    plain = not (access.security.is_on and access.security.zookeeper_tls)
    reached = [_probe(host, port, report, plain=plain) for host, port in hosts]
    if not any(reached):
        return False
    try:
        asyncio.run(_look_inside(access, report))
    except MetamqError as error:
        report(Finding("ZooKeeper", "problem", error.problem, error.hint))
        return False
    return True


def _environment() -> Iterator[Finding]:
    """Yields a finding for each variable that looks like a setting but is none."""
    sections = tuple(variable(section, "") for section in SECTIONS)
    for name in sorted(os.environ):
        if name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(sections) and name not in (*VARIABLES, *OTHERS):
            yield Finding("settings", "warning", f"{name} is not a setting", f"Known: {', '.join(VARIABLES)}.")


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
    """Looks in the same folders as find_jars(), but downloads nothing."""
    what = "ZooKeeper's jars, for `metamq up`"
    setting = os.environ.get("METAMQ_ZOOKEEPER_JARS")
    places = [Path(setting)] if setting else [jars.installed_folder(), jars.cache_folder()]
    for place in places:
        if place is not None and not jars.jars_in_folder(place)[1]:
            return Finding(what, "ok", str(place))
    if setting:
        missing = ", ".join(jars.jars_in_folder(Path(setting))[1])
        return Finding(what, "warning", f"METAMQ_ZOOKEEPER_JARS={setting} has no jar of {missing}")
    return Finding(what, "ok", "not here yet; the first start downloads them (4 MB, 7 MB with TLS)")


def _disk() -> Finding:
    place = Path("./metamq-data") if Path("./metamq-data").is_dir() else Path(".")
    free = shutil.disk_usage(place).free
    if free < FREE_BYTES_MIN:
        return Finding("disk", "warning", f"{show_bytes(free)} free here", "A broker refuses writes below its reserve.")
    return Finding("disk", "ok", f"{show_bytes(free)} free here")


# ZooKeeper


def _probe(host: str, port: int, report: Callable[[Finding], None], *, plain: bool) -> bool:
    what = f"ZooKeeper server {host}:{port}"
    began = time.monotonic()
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
    except OSError as error:
        hint = "Start one with `metamq up`, or give the address of yours: --zookeeper or METAMQ_ZOOKEEPER."
        report(Finding(what, "problem", f"not reachable: {(error.strerror or str(error)).lower()}", hint))
        return False
    found = f"listens, connected in {(time.monotonic() - began) * 1000:.1f} ms"
    load_now: ServerLoad | None = None
    if plain:
        with contextlib.suppress(OSError):  # a server that does not answer is another finding
            load_now = load_of(host, port, TIMEOUT_S)
    report(Finding(what, "ok", found) if load_now is None else memory_finding(what, found, load_now))
    return True


def memory_finding(what: str, found: str, load_now: ServerLoad) -> Finding:
    """The finding on a server that answers: `found`, and the memory that its nodes take."""
    if load_now.memory_bytes_max is None:
        return Finding(what, "ok", f"{found}, {count(load_now.nodes, 'node')}")
    nodes = f"{count(load_now.nodes, 'node')}, about {show_bytes(load_now.nodes_bytes)}"
    found = f"{found}, {nodes} of {show_bytes(load_now.memory_bytes_max)} of memory"
    hint = "Start it with more memory, `metamq zookeeper --memory 2GiB`, or delete unused groups: `metamq group list`."
    return Finding(what, "warning", found, hint) if load_now.is_high else Finding(what, "ok", found)


async def _look_inside(access: ClusterAccess, report: Callable[[Finding], None]) -> None:
    try:
        await look_for_cluster(access)
    except ConfigError as error:
        report(Finding("root", "problem", error.problem, error.hint))
        return
    session = await open_session(access)
    cluster = ClusterClient(session)
    try:
        began = time.monotonic()
        await session.sync()
        trip_ms = (time.monotonic() - began) * 1000
        timeout_s = session.negotiated_timeout_ms / 1000
        report(Finding("ZooKeeper session", "ok", f"a round trip took {trip_ms:.1f} ms, time-out {timeout_s:g} s"))
        without_master = await _look_at_brokers(cluster, report)
        report(await _security(access, cluster))
        if access.security.is_on:
            await _checked("certificates", _certificates(access.security, cluster), report)
        await _look_at_topics(cluster, without_master, report)
        await _look_at_groups(cluster, report)
        await _look_at_transactions(cluster, without_master, report)
    finally:
        await cluster.close()
        await session.close()


async def _security(access: ClusterAccess, cluster: ClusterClient) -> Finding:
    """Reports data and ports that others can reach or change."""
    what = "security"
    zookeepers = {host for host, _port in parse_servers(access.zookeeper)[0]}
    if access.security.is_on:
        if access.security.zookeeper_tls and (wrong := await wrong_nodes(cluster.session, enough=1)):
            problem = f"on, and others can change nodes in ZooKeeper, as {wrong[0]}"
            return Finding(what, "warning", problem, "`metamq security migrate` corrects that.")
        if damaged := await damaged_lists(cluster.session):
            return Finding(what, "problem", damaged[0].problem, damaged[0].hint)
        if access.security.zookeeper_tls and (names := await open_groups(cluster.session)):
            problem = f"on, and each client can change {count(len(names), 'group')}, as {names[0]}"
            return Finding(what, "warning", problem, "`metamq group owner` gives a group an owner.")
        if access.security.zookeeper_tls or not any(map(is_exposed, zookeepers)):
            return Finding(what, "ok", "on")
        hint = f"Remove METAMQ_SECURITY_ZOOKEEPER_TLS once ZooKeeper has its certificate. {EXPOSED_HINT}"
        return Finding(what, "warning", "on, and connections to ZooKeeper are not encrypted", hint)
    hosts = {host.strip() for broker in cluster.brokers.values() for host in broker.host.split(",")} | zookeepers
    exposed = sorted(filter(is_exposed, hosts))
    if not exposed:
        return Finding(what, "ok", "off, and clients use only addresses of this machine")
    problem = f"off: any client that reaches {listed(exposed)} may read and change everything"
    return Finding(what, "warning", problem, EXPOSED_HINT)


async def _certificates(security: SecurityConfig, cluster: ClusterClient) -> Finding:
    """Finds certificates that expire soon: of the authority, of this client, and of the masters."""
    from metamq.security.certificates import end_of  # imports cryptography, which not all commands need

    files = security.files()
    ends_s = {path: end_of(path) for path in (files.ca, files.certificate) if path}
    for broker_id in cluster.brokers:
        with contextlib.suppress(ConnectError):  # a finding of its own
            if (end_s := (await cluster.connection(broker_id)).certificate_ends_s) is not None:
                ends_s[f"the certificate of broker {broker_id}"] = end_s
    days = {what: int((end_s - time.time()) // 86_400) for what, end_s in ends_s.items()}
    soon = [f"{what} expires in {count(left, 'day')}" for what, left in days.items() if left < WARN_DAYS]
    if soon:
        hint = "`metamq security issue NAME` renews a certificate; processes use it for their next connection."
        return Finding("certificates", "warning", "; ".join(soon), hint)
    return Finding("certificates", "ok", f"valid for at least {count(min(days.values()), 'day')}")


async def _checked(what: str, work: Awaitable[Finding], report: Callable[[Finding], None]) -> None:
    """Reports the finding of `work`; an error is a finding too."""
    try:
        report(await work)
    except MetamqError as error:
        report(Finding(what, "problem", error.problem, error.hint))


def _report_unreadable(what: str, errors: list[CorruptData], report: Callable[[Finding], None]) -> None:
    """Reports unreadable nodes in ZooKeeper. Every other part of metamq ignores them."""
    for problem, hint in dict.fromkeys((error.problem, error.hint) for error in errors):
        report(Finding(what, "problem", f"{problem}; metamq ignores it", hint))


# Brokers


async def _look_at_brokers(cluster: ClusterClient, report: Callable[[Finding], None]) -> set[int]:
    """Returns the broker ids without a master that answers."""
    session = cluster.session
    names = await children(session, session.paths.broker_ids())
    strange = [name for name in names if not name.isdecimal()]
    if strange:
        report(Finding("brokers", "warning", f"unknown nodes in {session.paths.broker_ids()}: {', '.join(strange)}"))
    broker_ids = sorted(int(name) for name in names if name.isdecimal())
    if not broker_ids:
        report(Finding("brokers", "problem", "none was ever registered", "Start one with `metamq broker`."))
    return {broker_id for broker_id in broker_ids if not await _look_at_broker(cluster, broker_id, report)}


async def _look_at_broker(cluster: ClusterClient, broker_id: int, report: Callable[[Finding], None]) -> bool:
    """Reports the master and the other replicas; returns False if no master answers."""
    what = f"broker {broker_id}"
    try:
        with collect_skipped() as unreadable:
            found = await describe_broker(cluster, broker_id)
        _report_unreadable(what, unreadable, report)
        if found is None:
            report(Finding(what, "problem", "not registered", "Start replica 0. Its log has the reason for its end."))
            return False
        faults = replica_faults(found)
        if not any(fault.status == "problem" for fault in faults):
            report(await _master(cluster, broker_id))
    except MetamqError as error:
        report(Finding(what, "problem", error.problem, "`metamq ha status` shows its replicas."))
        return False
    for fault in (*faults, *damage_faults(found), *failover_faults(found, await _recent_switches(cluster, broker_id))):
        report(fault)
    return not any(fault.status == "problem" for fault in faults)


async def _recent_switches(cluster: ClusterClient, broker_id: int) -> int:
    """Returns the number of recent automatic switches; 0 if they cannot be read, which is a finding of its own."""
    try:
        switches = (await failover_of(cluster, broker_id)).switches
    except CorruptData:
        return 0
    return sum(one.is_automatic and time.time() * 1000 - one.at_ms < RECENT_MS for one in switches)


async def _master(cluster: ClusterClient, broker_id: int) -> Finding:
    """Checks that the master answers, is the right broker, has the right time, and accepts writes."""
    what = f"broker {broker_id}"
    connection = await cluster.connection(broker_id)
    master = cluster.brokers[broker_id]
    began_ms = time.time_ns() / 1e6
    header = await connection.request(Command.STATS, None, timeout_s=TIMEOUT_S)
    ended_ms = time.time_ns() / 1e6
    # The broker read its clock between the two times; the skew is at least its distance from that interval.
    skew_ms = max(header["time_ms"] - ended_ms, began_ms - header["time_ms"] - 1, 0.0)
    seen = f"{master.address}, epoch {header['epoch']}, version {master.version}, {ended_ms - began_ms:.1f} ms"
    if header["writes_refused"]:
        return Finding(what, "problem", f"{seen}; it refuses writes: {header['writes_refused']}")
    if unlisted := header.get("unlisted"):
        return Finding(what, "problem", f"{seen}; it keeps topics that ZooKeeper lacks: {'; '.join(unlisted)}")
    if connection.greeting.broker_id != broker_id:
        hint = "Two brokers share an address, or --advertise names the wrong host."
        return Finding(what, "problem", f"{master.address} is broker {connection.greeting.broker_id}", hint)
    if skew_ms > SKEW_MS_MAX:
        hint = "Set both clocks by NTP: timestamps and retention depend on them."
        return Finding(what, "warning", f"{seen}; its clock differs from ours by {skew_ms / 1000:.1f} s", hint)
    detail = f"{seen}, clock ±{max(skew_ms, ended_ms - began_ms):.0f} ms"
    return Finding(what, "ok", f"{detail}; {_verified(header.get('scrub') or {})}")


def _verified(scrub: dict[str, Any]) -> str:
    """Describes the progress of the scrub."""
    if not scrub.get("bytes_per_s"):
        return "its logs are not verified in the background"
    if not scrub["is_complete"]:
        return f"{show_bytes(scrub['pass_bytes'])} of its logs verified since its start"
    age_ms = round(scrub["pass_age_s"] * 1000)
    return f"all of its logs verified {show_age(age_ms)} ago"


# Topics and groups


async def _look_at_topics(cluster: ClusterClient, without_master: set[int], report: Callable[[Finding], None]) -> None:
    """Reports each topic; one finding for all topics of brokers without a master, whose findings have the next step."""
    names = await cluster.topics.names()
    if not names:
        report(Finding("topics", "ok", "none yet"))
    configs, problems = await read_configs(cluster, names)
    masterless = {name: gone for name, config in configs.items() if (gone := without_master & set(config.partitions))}
    served = [config for name, config in configs.items() if masterless.get(name) != set(config.partitions)]
    described = {one.topic: one for one in await describe_topics(cluster, served)}
    for name in names:
        if name in problems:
            report(Finding(f"topic {name}", "problem", problems[name].problem, problems[name].hint))
        elif name in described:
            finding = _topic(described[name], without_master)
            if finding.status == "ok" and name.endswith(DEAD_LETTER_SUFFIX):
                finding = await _dead_letters(cluster, described[name])
            report(finding)
    if masterless:
        brokers = listed([str(broker_id) for broker_id in sorted(set().union(*masterless.values()))])
        detail = f"not served, in whole or in part, while broker {brokers} has no master: {listed(list(masterless))}"
        report(Finding("topics", "problem", detail))


def _topic(found: TopicDescription, without_master: set[int]) -> Finding:
    name, what = found.topic, f"topic {found.topic}"
    unserved = not_served(found, without=without_master)
    if unserved:
        hint = DAMAGE_HINT if any(" is damaged" in problem for problem in unserved) else ""
        return Finding(what, "problem", f"{size_in_words(found)}; not served: {'; '.join(unserved)}", hint)
    refusals = refuses_writes(found, without=without_master)
    if refusals:
        hint = f"See `metamq ha status`; or, with less safety: `metamq topic alter {name} --min-insync ...`."
        return Finding(what, "problem", f"{size_in_words(found)}; {'; '.join(refusals)}", hint)
    return Finding(what, "ok", size_in_words(found))


async def _dead_letters(cluster: ClusterClient, found: TopicDescription) -> Finding:
    """Reports the letters of a group that are not settled."""
    group = found.topic.removesuffix(DEAD_LETTER_SUFFIX)
    starts = {part.partition: part.start_offset or 0 for part in found.partitions}
    settled = (await read_settled(cluster.session, group)).of_topic(found.config.id, starts)
    done = sum(
        max(min(end, part.stable_offset) - max(begin, starts[part.partition]), 0)
        for part in found.partitions
        if part.stable_offset is not None
        for begin, end in settled.settled.get(part.partition, ())
    )
    left = (found.messages or 0) - done
    if left <= 0:
        return Finding(f"topic {found.topic}", "ok", size_in_words(found))
    detail = f"{count(left, 'dead letter')} of group {group}"
    hint = f"`metamq dlq show {group}` shows them."
    if await cluster.session.exists(cluster.session.paths.group(group)) is None:
        hint = f"The group is deleted. `metamq topic delete {found.topic}` removes them, too."
    return Finding(f"topic {found.topic}", "warning", detail, hint)


async def _without_members(cluster: ClusterClient, name: str, size: str) -> Finding:
    lag = (await describe_group(cluster, name)).lag
    if not lag:
        return Finding(f"group {name}", "ok", size)
    hint = f"Start a consumer, or remove the group with `metamq group delete {name}`."
    return Finding(f"group {name}", "warning", f"{size}; {count(lag, 'message')} to read", hint)


async def _look_at_groups(cluster: ClusterClient, report: Callable[[Finding], None]) -> None:
    """Checks that members, plans and owners are readable, owners are members, and each member has a partition."""
    session = cluster.session

    async def look(name: str) -> Finding:
        present = {}
        if await session.exists(session.paths.members(name)) is not None:
            with collect_skipped() as unreadable:
                present = await read_members(session, name)
            _report_unreadable(f"group {name}", unreadable, report)
        stored = await read_plan(session, name)
        owners = await owned_partitions(session, name)
        absent = sorted({owner for owner in owners.values() if owner not in present})
        if absent:
            hint = "They keep partitions until their sessions end; `metamq group evict` frees the partitions at once."
            return Finding(f"group {name}", "warning", f"owners that are not members: {', '.join(absent)}", hint)
        size = f"{count(len(present), 'member')}, {count(len(owners), 'partition')} owned"
        if stored is not None and stored.plan is None:
            stored.check_format(name)
            detail = f"{size}; the plan of group {name!r} in ZooKeeper is damaged"
            return Finding(f"group {name}", "warning", detail, "Its members make a new one.")
        if stored is not None and stored.size_bytes > PLAN_BYTES_MAX * PLAN_SHARE_WARNED:
            detail = f"{size}; its plan takes {stored.size_bytes:,} of {PLAN_BYTES_MAX:,} bytes"
            return Finding(f"group {name}", "warning", detail, PLAN_HINT)
        plan = stored.plan if stored is not None else None
        idle = {member: reason for member in present if plan is not None and (reason := why_idle(member, plan))}
        reasons = [f"{member} has no partition: {reason}" for member, reason in idle.items()]
        if reasons:
            waits = {plan is not None and has_no_topic(member, plan) for member in idle}
            hint = " ".join(IDLE_HINTS[is_without_topic] for is_without_topic in sorted(waits))
            return Finding(f"group {name}", "warning", f"{size}; {'; '.join(reasons)}", hint)
        return Finding(f"group {name}", "ok", size) if present else await _without_members(cluster, name, size)

    for name in await children(session, session.paths.groups()):
        await _checked(f"group {name}", look(name), report)


async def _look_at_transactions(
    cluster: ClusterClient, without_master: set[int], report: Callable[[Finding], None]
) -> None:
    """Checks that no branch is prepared for too long. Brokers without a master have findings of their own."""
    found = await open_branches(cluster)
    for broker_id, problem in found.problems.items():
        if broker_id not in without_master:
            report(Finding("transactions", "problem", f"the branches at broker {broker_id} are unknown: {problem}"))
    prepared = sorted((one for one in found.branches if one.state == PREPARED), key=lambda one: one.prepared_us)
    late = [one for one in prepared if age_ms(one) > PREPARED_MS_MAX]
    for one in late[:BRANCHES_NAMED]:
        detail = f"prepared at broker {one.broker_id} for {show_age(age_ms(one))}; it is decided by {who_decides(one)}"
        report(Finding(f"transaction {one.xid}", "warning", detail, " ".join(next_steps(one))))
    if len(late) > BRANCHES_NAMED:
        detail = f"{len(late) - BRANCHES_NAMED:,} more are prepared for more than {show_age(PREPARED_MS_MAX)}"
        report(Finding("transactions", "warning", detail, "`metamq tx list` shows them."))
    if not late and not found.problems:
        detail = f"{count(len({one.xid.whole for one in prepared}), 'transaction')} prepared, none for long"
        report(Finding("transactions", "ok", detail))
