"""`metamq up`: a whole cluster on one machine, for as long as the command runs.

    lock the folder → ZooKeeper → broker → print where they are → wait for Ctrl-C, or for one of them to end
    → stop the broker, then ZooKeeper, which the broker needs to say good-bye

The lock is a flock whose descriptor the broker inherits. After a kill -9 of this process it is held for as long as the
broker takes to end, so that whoever comes next neither finds the folder free too early nor takes a dying cluster for a
living one: the process id in the file tells the two apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from metamq.broker.config import BrokerConfig
from metamq.cli.command import Command
from metamq.cli.context import current
from metamq.cli.output import TEXT_OR_JSON, print_json_line, say
from metamq.cli.processes import BrokerChild, Stopped, StopSignals, fetch_what_zookeeper_needs
from metamq.client.settings import load
from metamq.errors import ConfigError
from metamq.zk.embedded import EmbeddedZooKeeper

HOST = "127.0.0.1"
ZOOKEEPER_PORT, BROKER_PORT, HTTP_PORT = 2181, 8123, 8120
PORTS_TRIED = 100
POLL_S = 0.1
ORPHANS_S = 15.0


@click.command(cls=Command)
@click.option("--data", metavar="FOLDER", help="Keep the data here.  [./metamq-data]")
@click.option("--ephemeral", is_flag=True, help="Keep nothing: the data is gone at the end.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help=f"ZooKeeper's port.  [{ZOOKEEPER_PORT} or the next free one]"
)
@click.option(
    "--broker-port", type=click.IntRange(0, 65535), help=f"The broker's port.  [{BROKER_PORT} or the next free one]"
)
@click.option(
    "--http-port",
    type=click.IntRange(-1, 65535),
    help=f"Port of /metrics.  [{HTTP_PORT} or the next free one; -1 none]",
)
@TEXT_OR_JSON
def up(
    data: str | None, ephemeral: bool, port: int | None, broker_port: int | None, http_port: int | None, output: str
) -> int:
    """Start a ZooKeeper and a broker on this machine, and run until Ctrl-C, which ends both.

    Prints the line to paste where the clients run; with the usual port, clients on this machine need none. With -o json
    one line says where everything is. Settings of the broker come from [broker] of the TOML file and METAMQ_BROKER_...,
    but for its id, address, ports and data.

    \b
    metamq up
    metamq up --ephemeral
    metamq up --data ./other --port 2182
    """
    if ephemeral and data is not None:
        raise click.UsageError("--ephemeral keeps nothing, --data says where to keep it: give one of them")
    current().log()
    load(BrokerConfig, "broker", file=current().config, arguments={})  # before anything is started for nothing
    with StopSignals() as signals:
        try:
            fetch_what_zookeeper_needs(signals)
            with (
                _folder(data, ephemeral) as folder,
                _locked(folder, signals) as lock,
                _zookeeper(None if ephemeral else folder / "zookeeper", port, signals) as server,
                _broker(server.address, folder, broker_port, http_port, lock, signals) as broker,
            ):
                _tell(server.address, broker, folder, ephemeral, output)
                while not signals.wait(POLL_S):
                    server.check_running()
                    broker.check_running()
                say("Stopping.")
                broker.end()
        except Stopped:
            say("Stopping.")
    return 0


def _tell(zookeeper: str, broker: BrokerChild, folder: Path, ephemeral: bool, output: str) -> None:
    address = f"{HOST}:{broker.port}"
    metrics = f"http://{HOST}:{broker.http_port}/metrics" if broker.http_port > 0 else None
    if output == "json":
        kept = None if ephemeral else str(folder.absolute())
        print_json_line({"zookeeper": zookeeper, "broker": address, "metrics": metrics, "data": kept})
        return
    say(f"ZooKeeper serves at {zookeeper}, broker 0 at {address}.")
    if metrics is not None:
        say(f"Metrics are at {metrics}.")
    say(f"Data is {'in memory and a temporary folder' if ephemeral else f'in {folder}'}. Ctrl-C ends all.")
    click.echo(f"export METAMQ_ZOOKEEPER={zookeeper}")


@contextlib.contextmanager
def _folder(data: str | None, ephemeral: bool) -> Iterator[Path]:
    if not ephemeral:
        folder = Path(data or "./metamq-data")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {folder}: {error.strerror}", hint="Choose another --data."
            ) from None
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="metamq-up-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, signals: StopSignals) -> Iterator[int]:
    """Holds the folder. Raises ConfigError when a living `metamq up` has it."""
    try:
        lock = os.open(folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot use the folder {folder}: {error.strerror}", hint="Choose another --data.") from None
    try:
        deadline = time.monotonic() + ORPHANS_S
        while not _try_lock(lock):
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            if _is_alive(holder) or time.monotonic() > deadline:
                raise ConfigError(
                    f"`metamq up` runs already on {folder}, as process {holder or 'unknown'}",
                    hint="Use that one, stop it, or give this one a --data folder of its own.",
                )
            signals.wait(POLL_S)  # its broker is about to end
            signals.check()
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield lock
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(holder: str) -> bool:
    try:
        os.kill(int(holder), 0)
    except PermissionError:
        return True
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    return True


@contextlib.contextmanager
def _zookeeper(folder: Path | None, wanted_port: int | None, signals: StopSignals) -> Iterator[EmbeddedZooKeeper]:
    port = _port("ZooKeeper", wanted_port, ZOOKEEPER_PORT, "--port")
    with EmbeddedZooKeeper(folder, port, host=HOST, check=signals.check) as server:
        yield server


@contextlib.contextmanager
def _broker(
    zookeeper: str, folder: Path, port: int | None, http_port: int | None, lock: int, signals: StopSignals
) -> Iterator[BrokerChild]:
    settings = {
        "--id": 0,
        "--host": HOST,
        "--advertise": HOST,
        "--port": _port("the broker", port, BROKER_PORT, "--broker-port"),
        "--http-port": -1 if http_port == -1 else _port("/metrics", http_port, HTTP_PORT, "--http-port"),
        "--data": folder / "broker",
        "--zookeeper": zookeeper,
        "--root": current().place(),
    }
    arguments = [f"{name}={value}" for name, value in settings.items()]
    if current().config:
        arguments.append(f"--config={current().config}")
    broker = BrokerChild(arguments, folder / "broker.log", pass_fds=(lock,))
    try:
        broker.wait_ready(signals.check)
        yield broker
    finally:
        broker.stop()


def _port(what: str, wanted: int | None, usual: int, option: str) -> int:
    """The wanted port, else the usual one or the next that is free. Raises ConfigError when it is taken."""
    if wanted is not None:
        if wanted and not _is_free(wanted):
            raise ConfigError(
                f"port {wanted} of {HOST} is taken, {what} cannot listen there", hint=f"Choose another {option}."
            )
        return wanted
    for port in range(usual, usual + PORTS_TRIED):
        if _is_free(port):
            return port
    raise ConfigError(f"no port from {usual} to {usual + PORTS_TRIED - 1} is free for {what}", hint=f"Give {option}.")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET) as probe:
        # As the servers do: a connection that still lingers in TIME_WAIT does not take the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(
                f"cannot listen on port {port} of {HOST}: {error.strerror}", hint="Choose another."
            ) from None
    return True
