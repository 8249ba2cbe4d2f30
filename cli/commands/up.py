"""`metamq up`: a whole cluster on one machine, while the command runs.

    1. Lock the folder.
    2. Start ZooKeeper, then a master and its slaves, then the console. Print their addresses.
    3. Wait for Ctrl-C, or for the end of ZooKeeper or of a broker without slaves.
    4. Stop the replicas, then ZooKeeper, which they need to deregister.

The lock is a flock, and the replicas inherit its descriptor. After a kill -9 of this process the lock lasts until the
replicas have ended, so the next `metamq up` does not find the folder free too early. The process id in the file
distinguishes a cluster that is ending from a running one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from metamq.broker.config import BrokerConfig
from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.processes import MEMORY, Stopped, StopSignals, find_java_and_jars, is_alive
from metamq.cli.show.output import TEXT_OR_JSON, count, print_json_line, say
from metamq.cli.up_console import PORT as CONSOLE_PORT
from metamq.cli.up_console import choose_port, console_of, url_of
from metamq.cli.up_replicas import BROKER_ID, ReplicaPlace, Replicas
from metamq.client.settings import load, security_config
from metamq.errors import ConfigError
from metamq.private_files import FILE_MODE, make_folder, restrict_process
from metamq.security.config import ADMIN, CA, LOOPBACK
from metamq.zk.server.embedded import MEMORY_VARIABLE, EmbeddedZooKeeper
from metamq.zk.server.ports import is_free

HOST = "127.0.0.1"
ZOOKEEPER_PORT, BROKER_PORT, HTTP_PORT = 2181, 8123, 8120
SLAVES_MAX = 8
POLL_S = 0.1
ORPHANS_S = 15.0
PORTS_TRIED = 100
SECURITY = "security"
"""The folder of the certificates, in the data folder."""
VARIABLES = ("METAMQ_SECURITY_DIR", "METAMQ_SECURITY_ROLE")


@click.command(cls=CliCommand)
@click.option("--data", metavar="FOLDER", help="Data folder.  [./metamq-data]")
@click.option("--ephemeral", is_flag=True, help="Keep no data: delete it at the end.")
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
@click.option(
    "--console-port",
    type=click.IntRange(-1, 65535),
    help=f"Port of the console's pages.  [{CONSOLE_PORT} or the next free one; -1 none]",
)
@click.option("--slaves", type=click.IntRange(0, SLAVES_MAX), default=1, show_default=True, help="Number of slaves.")
@click.option(
    "--zookeeper-memory",
    "zookeeper_memory_bytes",
    type=MEMORY,
    envvar=MEMORY_VARIABLE,
    default="512MiB",
    show_default=True,
    help="Memory of ZooKeeper, which keeps all of its data in memory.",
)
@click.option("--secure", is_flag=True, help="Encrypt all connections: make certificates in FOLDER/security.")
@TEXT_OR_JSON
def up(
    data: str | None,
    ephemeral: bool,
    port: int | None,
    broker_port: int | None,
    http_port: int | None,
    console_port: int | None,
    slaves: int,
    zookeeper_memory_bytes: int,
    secure: bool,
    output: str,
) -> int:
    """Start ZooKeeper and a broker, with a master and a slave, on this machine. Ctrl-C stops all of them.

    With `pip install 'metamq[console]'` it also starts `metamq console`, the pages for a browser.

    The first start downloads ZooKeeper's jars (4 MB, 7 MB with TLS). Without a network, see
    `metamq zookeeper --fetch-jars`.

    Prints an `export` line for the shells of clients. Clients on this machine need it only if ZooKeeper has another
    port than 2181. With -o json it prints all addresses on one line. If a replica is killed, the command reports it,
    and the others continue. If it was the master, a slave takes over by itself. Slaves have the next free ports. The
    broker's settings come from [broker] of the TOML file and from METAMQ_BROKER_... variables, except its id, replica
    number, address, ports, data folder and processes.

    With --secure, ZooKeeper and the broker speak only TLS. The command prints `export` lines with the certificate
    that clients use. A folder that was secure once stays secure. The console then asks for the name and password of
    a user of the cluster: `metamq user add NAME`, and `metamq acl allow NAME describe cluster`.

    \b
    metamq up
    metamq up --secure
    metamq up --ephemeral --slaves 0
    metamq up --data ./other --port 2182
    """
    _check_options(data, ephemeral)
    restrict_process()
    port_of_console = choose_port(console_port)
    ports, url = (broker_port, http_port), url_of(port_of_console)
    settings = load(BrokerConfig, "broker", file=current().config, arguments={})  # raises before anything starts
    with StopSignals() as signals:
        try:
            find_java_and_jars(signals, secure=secure)
            with (
                _folder(data, ephemeral) as folder,
                _locked(folder, signals) as lock,
                _security(folder, secure),
                _zookeeper(folder, ephemeral, port, zookeeper_memory_bytes, signals) as server,
                _replicas(server.address, settings, folder, slaves, ports, url, lock, signals) as replicas,
                console_of(server.address, port_of_console, folder / "console.log", signals) as console,
            ):
                _print_addresses(server.address, replicas, console, folder, ephemeral, output)
                _wait(signals, server, replicas)
        except Stopped:
            say("Stopping.")
    return 0


def _check_options(data: str | None, ephemeral: bool) -> None:
    if ephemeral and data is not None:
        raise click.UsageError("--ephemeral deletes the data, --data keeps it in a folder: give one of them")
    if current().zookeeper:
        raise click.UsageError("`metamq up` starts a ZooKeeper of its own: use `metamq broker` with --zookeeper")


def _wait(signals: StopSignals, server: EmbeddedZooKeeper, replicas: Replicas) -> None:
    """Watches the processes until the command is stopped, then ends the replicas."""
    while not signals.wait(POLL_S):
        server.check_running()
        server.renew()
        replicas.check_running()
    say("Stopping.")
    replicas.end()


def _print_addresses(
    zookeeper: str, replicas: Replicas, console: str | None, folder: Path, ephemeral: bool, output: str
) -> None:
    known = replicas.described()
    roles = {number: one.role for number, one in known.items()}
    if output == "json":
        kept = None if ephemeral else str(folder.absolute())
        addresses = [
            {
                "replica": one.number,
                "role": roles.get(one.number, "waiting"),
                "address": one.address,
                "metrics": one.metrics,
            }
            for one in replicas.members
        ]
        print_json_line({"zookeeper": zookeeper, "replicas": addresses, "console": console, "data": kept})
        return
    say(f"ZooKeeper serves at {zookeeper}, broker {BROKER_ID} has {count(len(replicas.members), 'replica')}:")
    for one in replicas.members:
        metrics = f", {one.metrics}" if one.metrics else ""
        say(f"  {roles.get(one.number, 'waiting')} (replica {one.number}) at {one.address}{metrics}")
    if console is not None:
        say(f"The console is at {console} .")
    for replica in known.values():
        if replica.problem:
            say(f"Replica {replica.replica} {replica.problem}.", fg="yellow")
        if replica.role == "waiting":  # the others were also on this machine: none is in sync
            say(
                f"To make it the master: metamq ha promote --broker {BROKER_ID} --slave {replica.replica} --accept-loss"
            )
    say(f"Data is {'in memory and a temporary folder' if ephemeral else f'in {folder}'}. Ctrl-C stops all.")
    click.echo(f"export METAMQ_ZOOKEEPER={zookeeper}")
    for name in VARIABLES:
        if os.environ.get(name):
            click.echo(f"export {name}={os.environ[name]}")


@contextlib.contextmanager
def _security(folder: Path, secure: bool) -> Iterator[None]:
    """Makes certificates if there are none yet, and sets the variables for this process and its children."""
    place = (folder / SECURITY).absolute()
    if not (secure or (place / CA).exists()):
        yield
        return
    if not (place / CA).exists():
        from metamq.security.certificates import make_all

        make_all(place, LOOPBACK)
    variables: dict[str, str] = dict(zip(VARIABLES, (str(place), ADMIN), strict=True))
    before = {name: value for name, value in os.environ.items() if name.startswith("METAMQ_SECURITY_")}
    for name in before:  # of another cluster
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _folder(data: str | None, ephemeral: bool) -> Iterator[Path]:
    if not ephemeral:
        folder = Path(data or "./metamq-data")
        try:
            make_folder(folder)
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
    """Locks the folder. Raises ConfigError if a `metamq up` that runs has it."""
    try:
        lock = os.open(folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise ConfigError(f"cannot use the folder {folder}: {error.strerror}", hint="Choose another --data.") from None
    try:
        deadline = time.monotonic() + ORPHANS_S
        while not _try_lock(lock):
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            if is_alive(holder) or time.monotonic() > deadline:
                raise ConfigError(
                    f"`metamq up` already runs on {folder}, as process {holder or 'unknown'}",
                    hint="Use that cluster, or stop it, or give this one another --data folder.",
                )
            signals.wait(POLL_S)  # the replicas of the killed process will end soon
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


def _zookeeper(
    folder: Path, ephemeral: bool, wanted_port: int | None, memory_bytes: int, signals: StopSignals
) -> EmbeddedZooKeeper:
    port = Ports(HOST).take("ZooKeeper", wanted_port, ZOOKEEPER_PORT, "--port")
    data = None if ephemeral else folder / "zookeeper"
    security = security_config(None, current().config)
    return EmbeddedZooKeeper(data, port, host=HOST, memory_bytes=memory_bytes, security=security, check=signals.check)


@contextlib.contextmanager
def _replicas(
    zookeeper: str,
    settings: BrokerConfig,
    folder: Path,
    slaves: int,
    ports: tuple[int | None, int | None],
    console_url: str,
    lock: int,
    signals: StopSignals,
) -> Iterator[Replicas]:
    given = current()
    root, is_auto = given.access(implicit=False).root, not settings.failover
    replicas = Replicas(zookeeper, root, given.config, settings.console_url or console_url, is_auto=is_auto)
    try:
        replicas.start(_places(folder, slaves, *ports), folder, lock)
        replicas.wait_ready(signals.check)
        yield replicas
    finally:
        replicas.stop()


def _places(folder: Path, slaves: int, port: int | None, http_port: int | None) -> list[ReplicaPlace]:
    """Returns the place of each replica. Raises ConfigError if a wanted port is in use."""
    free = Ports(HOST)
    first_port = free.take("the broker", port, BROKER_PORT, "--broker-port")
    first_http = -1 if http_port == -1 else free.take("/metrics", http_port, HTTP_PORT, "--http-port")
    places = [ReplicaPlace(0, HOST, first_port, first_http, folder / "broker")]
    for number in range(1, slaves + 1):
        own = free.next_free("a slave", first_port + number, "--broker-port") if first_port else 0
        own_http = free.next_free("/metrics", first_http + number, "--http-port") if first_http > 0 else first_http
        places.append(ReplicaPlace(number, HOST, own, own_http, folder / f"replica-{number}"))
    return places


class Ports:
    """Free ports of one address. Each is given out once: a server that is starting does not listen yet."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._given: set[int] = set()

    def take(self, what: str, wanted: int | None, usual: int, option: str) -> int:
        """Returns the wanted port, else the usual one or the next free one. Raises ConfigError if none is free.

        A wanted port of 0 lets the system choose. `what` names the server for the error.
        """
        if wanted is not None:
            if wanted and not self._is_free(wanted):
                raise ConfigError(
                    f"port {wanted} of {self._host} is in use: {what} cannot listen there",
                    hint=f"Choose another {option}.",
                )
            self._given.add(wanted)
            return wanted
        return self.next_free(what, usual, option)

    def next_free(self, what: str, first: int, option: str) -> int:
        """Returns the first free port from `first` on. Raises ConfigError if the next 100 ports are in use."""
        last = min(first + PORTS_TRIED - 1, 65535)
        for port in range(first, last + 1):
            if port not in self._given and self._is_free(port):
                self._given.add(port)
                return port
        raise ConfigError(f"no port from {first} to {last} is free for {what}", hint=f"Choose a port with {option}.")

    def _is_free(self, port: int) -> bool:
        try:
            return is_free(self._host, port)
        except OSError as error:
            problem = f"cannot listen on port {port} of {self._host}: {error.strerror}"
            raise ConfigError(problem, hint="Choose another port.") from None
