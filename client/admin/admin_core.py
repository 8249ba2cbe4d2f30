"""The implementation of Admin: one ZooKeeper session, and connections to brokers, for the functions of this folder.

The blocking and the asyncio Admin are thin APIs over this core; so both have every feature.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from metamq.client.net.first_contact import OwnCluster, until_connected
from metamq.zk.cluster.cluster_nodes import export_cluster

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient

P = ParamSpec("P")
T = TypeVar("T")

WAIT_S = 30.0
"""The default for the seconds that a change of a topic waits for its brokers."""


class AdminCore(OwnCluster):
    """The core of one Admin, for the loop that opens it."""

    def __init__(self) -> None:
        super().__init__("admin", "Use `async with Admin()`.")

    async def call(
        self, work: Callable[Concatenate[ClusterClient, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Does the work on the cluster, once its session is connected. Raises ClosedError, ConnectError."""
        await until_connected(self.cluster.session)
        return await work(self.cluster, *args, **kwargs)


async def exported(cluster: ClusterClient) -> dict[str, Any]:
    """Returns all data of the cluster. See Admin.export_cluster."""
    return (await export_cluster(cluster.session)).to_json()
