"""The asyncio XAResource."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Self, Unpack

from metamq.client.settings import cluster_access, load
from metamq.tx.app.resource import TM, Vote, XACore, XAOptions

if TYPE_CHECKING:
    from metamq.client.net.branches import BranchDescription
    from metamq.security.config import SecurityConfig
    from metamq.tx.app.xa_resource import XASettings
    from metamq.wire.xa import Xid


class XAResource:
    """The verbs of XA at one broker; see metamq.tx.XAResource. For one task at a time, in the loop of `open`.

        async with XAResource(broker=0) as mq:
            await mq.start(xid)
            await mq.send("orders", b"...")
            await mq.end(xid)
            if await mq.prepare(xid) is Vote.OK:
                await mq.commit(xid)

    If you cancel a call after its request was sent, the outcome of the request is unknown.
    """

    def __init__(
        self,
        broker: int = 0,
        zookeeper: str | None = None,
        *,
        config: str | None = None,
        root: str | None = None,
        security: SecurityConfig | None = None,
        **settings: Unpack[XASettings],
    ) -> None:
        self._core = XACore(broker, load(XAOptions, "xa", file=config, arguments=settings, others=type(self)))
        self._access = cluster_access(zookeeper, root, config, security)

    async def open(self) -> Self:
        """Connects to ZooKeeper; `async with` does it. Raises ConnectError."""
        await self._core.open(self._access)
        return self

    async def start(self, xid: Xid, flags: TM = TM.NOFLAGS, *, timeout_s: float | None = None) -> None:
        """See metamq.tx.XAResource.start."""
        await self._core.start(xid, flags, timeout_s)

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: str | None = None,
        timestamp: datetime | int | None = None,
    ) -> None:
        """See metamq.tx.XAResource.send."""
        await self._core.send(topic, value, key, headers, partition, timestamp)

    async def end(self, xid: Xid, flags: TM = TM.SUCCESS) -> None:
        """See metamq.tx.XAResource.end."""
        await self._core.end(xid, flags)

    async def prepare(self, xid: Xid) -> Vote:
        """See metamq.tx.XAResource.prepare."""
        return await self._core.prepare(xid)

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See metamq.tx.XAResource.commit."""
        await self._core.commit(xid, one_phase)

    async def rollback(self, xid: Xid) -> None:
        """See metamq.tx.XAResource.rollback."""
        await self._core.rollback(xid)

    async def recover(self, flags: TM = TM.STARTRSCAN) -> list[BranchDescription]:
        """See metamq.tx.XAResource.recover."""
        return await self._core.recover(flags)

    async def forget(self, xid: Xid) -> None:
        """See metamq.tx.XAResource.forget."""
        await self._core.forget(xid)

    def set_timeout(self, timeout_s: float) -> None:
        """See metamq.tx.XAResource.set_timeout."""
        self._core.set_timeout(timeout_s)

    def is_same_rm(self, other: XAResource) -> bool:
        """See metamq.tx.XAResource.is_same_rm."""
        return self._core.is_same_rm(other._core)

    async def close(self) -> None:
        """Disconnects; a second call does nothing. The broker rolls back unprepared branches some seconds later."""
        await self._core.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()
