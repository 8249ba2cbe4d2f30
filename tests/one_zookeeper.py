"""One ZooKeeper server for the clusters of all tests of a process, each in a chroot of its own.

A server takes a second of processor time to start. A test that stops, freezes or looks into the server itself takes
`metamq.testing.cluster`, which starts one.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metamq import testing
from metamq.testing import Cluster
from metamq.zk.server.embedded import EmbeddedZooKeeper
from tests import leftovers
from tests.parts import make_chroot

_kept = contextlib.ExitStack()
_servers: list[EmbeddedZooKeeper] = []
_numbers = itertools.count()


def new_chroot() -> str:
    """Makes a new chroot; returns its address, "host:port/chroot"."""
    if not _servers:
        with leftovers.of_the_session():
            folder = _kept.enter_context(tempfile.TemporaryDirectory(prefix="metamq-tests-"))
            _servers.append(_kept.enter_context(EmbeddedZooKeeper(Path(folder) / "zookeeper")))
    return make_chroot(f"{_servers[0].address}/cluster-{next(_numbers)}")


@contextlib.contextmanager
def cluster(*, brokers: int = 1, folder: Path | None = None, **settings: Any) -> Iterator[Cluster]:
    """As metamq.testing.cluster."""
    with testing.cluster(brokers=brokers, folder=folder, zookeeper=new_chroot(), **settings) as running:
        yield running


def close() -> None:
    """Stops the server, if there is one."""
    _kept.close()
