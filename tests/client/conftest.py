"""The real ZooKeeper, and a real PostgreSQL where there is one, shared by the tests of the client."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.zk.embedded import EmbeddedZooKeeper


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[EmbeddedZooKeeper]:
    """A server shared by all tests; not to be stopped by any of them."""
    with EmbeddedZooKeeper() as server:
        yield server


@pytest.fixture
def servers(zookeeper: EmbeddedZooKeeper) -> str:
    """The shared server's address with a chroot that only this test has."""
    return f"{zookeeper.address}/{uuid.uuid4().hex}"


def _find(program: str) -> str:
    places = [shutil.which(program), *sorted(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{program}")))]
    found = next((place for place in reversed(places) if place), None)
    if found is None:
        pytest.skip(f"PostgreSQL's {program} is not installed")
    return found


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The connection string of a PostgreSQL server of our own, on a Unix socket."""
    pytest.importorskip("psycopg")
    initdb, pg_ctl = _find("initdb"), _find("pg_ctl")
    folder = Path(tempfile.mkdtemp(prefix="metamq-postgres-"))
    data = folder / "data"
    # PostgreSQL refuses to run as root.
    user = "nobody" if os.geteuid() == 0 else None
    if user is not None:
        shutil.chown(folder, user)

    def run(*command: str) -> None:
        subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)

    run(initdb, "-D", str(data), "-U", "metamq", "-A", "trust", "--no-sync")
    options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
    run(pg_ctl, "start", "-w", "-D", str(data), "-l", str(folder / "log"), "-o", options)
    try:
        yield f"host={folder} user=metamq dbname=postgres"
    finally:
        run(pg_ctl, "stop", "-m", "immediate", "-D", str(data))
        shutil.rmtree(folder, ignore_errors=True)
