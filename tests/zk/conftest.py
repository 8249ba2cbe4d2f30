"""The real ZooKeeper: one for all tests, and others for the tests that kill, freeze or restart theirs."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
from kazoo.client import KazooClient

from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.session.session import Session

Expire = Callable[[Session], None]
Until = Callable[..., Awaitable[None]]


@pytest.fixture(scope="session")
def spare_zookeeper() -> Iterator[EmbeddedZooKeeper]:
    """Behind `victim`: not for use by tests."""
    with EmbeddedZooKeeper() as server:
        yield server


@pytest.fixture
def victim(spare_zookeeper: EmbeddedZooKeeper) -> Iterator[EmbeddedZooKeeper]:
    """A server to be killed or frozen, at work again for the next test. Its nodes stay."""
    yield spare_zookeeper
    if spare_zookeeper.pid is None:
        spare_zookeeper.restart()
    else:
        spare_zookeeper.thaw()


@pytest.fixture
def unique() -> str:
    """A chroot that only this test has, for servers other than the shared one."""
    return uuid.uuid4().hex


@pytest.fixture
def until() -> Until:
    """`await until(condition)`: returns once it holds, fails after a limit."""

    async def wait(condition: Callable[[], object], limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {limit_s} s"
            await asyncio.sleep(0.01)

    return wait


def take_over(session: Session) -> None:
    """Ends a session on the server, as a time-out would, without the wait. Blocks.

    Another connection takes the session over and closes it. The session may win itself back first: so the next
    connection looks whether it is over, and closes it otherwise.
    """
    client_id = session._channel.link._client.client_id
    assert client_id is not None
    for _ in range(100):
        client = KazooClient(session.servers.partition("/")[0], client_id=client_id)
        client.start_async().wait(5)
        found = client.client_id
        client.stop()
        client.close()
        if found is not None and found[0] != client_id[0]:
            return
    raise AssertionError("the session does not end")


@pytest.fixture(params=[None, "clients"], ids=["own sessions", "one session"])
def sharing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every session of the test has its own session of ZooKeeper, then all of them have one together."""
    if request.param is not None:
        monkeypatch.setattr(Session, "open", staticmethod(partial(Session.open, shared_by=request.param)))
    return request.param is not None


@pytest.fixture
def expire() -> Expire:
    """`expire(session)` ends it on the server."""
    return take_over
