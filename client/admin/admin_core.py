"""The implementation of Admin: one ZooKeeper session, and connections to brokers, for the functions of this folder.

The blocking and the asyncio Admin are thin APIs over this core; so both have every feature.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from metamq.client.admin.admin_topics import until_connected
from metamq.client.forks import register_for_forks
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.first_contact import open_client_session
from metamq.errors import ClosedError, ForkedError, MetamqError, closed_client
from metamq.zk.cluster.cluster_nodes import export_cluster

P = ParamSpec("P")
T = TypeVar("T")

WAIT_S = 30.0
"""Seconds that a change of a topic waits for its brokers, unless the caller says otherwise."""


class AdminCore:
    """The core of one Admin, for the loop that opens it."""

    def __init__(self) -> None:
        self.closed_by: MetamqError | None = ClosedError(
            "admin", "it was never opened", hint="Use `async with Admin()`."
        )
        self._open_cluster: ClusterClient | None = None
        register_for_forks(self)

    async def open(self, servers: str, root: str) -> None:
        """Connects to ZooKeeper. Raises ConnectError."""
        session = await open_client_session(servers, root)
        self._open_cluster = ClusterClient(session)
        self.closed_by = None

    async def close(self) -> None:
        """Disconnects. May be repeated. Does nothing in a fork's child."""
        if isinstance(self.closed_by, ForkedError):
            return
        cluster, self._open_cluster = self._open_cluster, None
        if cluster is not None:
            self.closed_by = closed_client("admin")
            await cluster.close()
            await cluster.session.close()

    def forked(self) -> None:
        """Closes the copy in a fork's child: it cannot be used any more."""
        self.closed_by = ForkedError("admin")

    async def call(
        self, work: Callable[Concatenate[ClusterClient, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Does the work on the cluster, once its session is connected. Raises ClosedError, ConnectError."""
        cluster = self._open_cluster
        if cluster is None or self.closed_by is not None:
            raise self.closed_by or closed_client("admin")
        await until_connected(cluster.session)
        return await work(cluster, *args, **kwargs)


async def exported(cluster: ClusterClient) -> dict[str, Any]:
    """Returns all data of the cluster. See Admin.export_cluster."""
    return (await export_cluster(cluster.session)).to_json()
