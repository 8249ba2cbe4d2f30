"""The real ZooKeeper: one for all tests, and others for the tests that kill, freeze or restart theirs."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator

import pytest
from kazoo.client import KazooClient

from metamq.zk.embedded import EmbeddedZooKeeper
from metamq.zk.session import Session

Expire = Callable[[Session], None]
Until = Callable[..., Awaitable[None]]


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[EmbeddedZooKeeper]:
    """A server shared by all tests; not to be stopped by any of them."""
    with EmbeddedZooKeeper() as server:
        yield server


@pytest.fixture
def servers(zookeeper: EmbeddedZooKeeper) -> str:
    """The shared server's address with a chroot that only this test has."""
    return f"{zookeeper.address}/{uuid.uuid4().hex}"


@pytest.fixture
def victim() -> Iterator[EmbeddedZooKeeper]:
    """A server of this test's own, to be killed or frozen."""
    with EmbeddedZooKeeper() as server:
        yield server


@pytest.fixture
def until() -> Until:
    """`await until(condition)`: returns once it holds, fails after a limit."""

    async def wait(condition: Callable[[], object], limit_s: float = 10.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {limit_s} s"
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def expire() -> Expire:
    """`expire(session)` ends it on the server, as a time-out would, without the wait. Blocks.

    Another connection takes the session over and closes it.
    """

    def take_over(session: Session) -> None:
        client_id = session._link._client.client_id
        if client_id is not None:
            client = KazooClient(session.servers.partition("/")[0], client_id=client_id)
            client.start(5)
            client.stop()
            client.close()

    return take_over
