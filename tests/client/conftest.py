"""The real ZooKeeper, shared by the tests of the client."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

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
