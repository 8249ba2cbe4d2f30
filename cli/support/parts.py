"""The parts of a bundle, and the one session with ZooKeeper that they share."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from metamq.cli.support import cluster_parts, machine_parts, zookeeper_parts
from metamq.cli.support.log_files import logs_here
from metamq.cli.support.parcel import LeftOut, Parcel, SupportPart, in_thread
from metamq.cli.support.settings_part import settings_document, shown_variables
from metamq.cli.support.status_parts import StatusPages
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.first_contact import open_session
from metamq.errors import ConfigError
from metamq.zk.session.presence import missing_cluster

if TYPE_CHECKING:
    from metamq.cli.context import Globals
    from metamq.cli.show.replica_view import Finding
    from metamq.cli.support.redaction import Redaction
    from metamq.client.settings import ClusterAccess

UP_FOLDER = Path("./metamq-data")
NO_FOLDER = f"no folder of a broker on this machine is known: give it with --logs ({UP_FOLDER} is not here)"
CLOSE_S = 3.0
Look: TypeAlias = "Callable[[Globals, Callable[[Finding], None]], bool]"
"""As metamq.cli.commands.doctor.look."""


@dataclass(frozen=True, slots=True)
class BundleOptions:
    """The options of the command. Without `folders`, that of `metamq up` counts, if it is here."""

    folders: tuple[Path, ...]
    logs_bytes: int
    status: tuple[str, ...]
    samples: int
    every_s: float
    limit_s: float

    @property
    def places(self) -> tuple[Path, ...]:
        """The folders with logs and data of this machine's brokers. Raises LeftOut if there are none."""
        if self.folders:
            return self.folders
        if UP_FOLDER.is_dir():
            return (UP_FOLDER,)
        raise LeftOut(NO_FOLDER)

    @property
    def sampling_s(self) -> float:
        """The time between the first and the last sample."""
        return (self.samples - 1) * self.every_s


class SharedCluster:
    """The cluster, which the first part that needs it opens. Each part gets the error if that fails."""

    def __init__(self, access: Callable[[], ClusterAccess]) -> None:
        """`access` may raise ConfigError."""
        self.access = access
        self._opening: asyncio.Future[ClusterClient] | None = None

    async def get(self) -> ClusterClient:
        """Returns the cluster. Raises ConfigError, ConnectError."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> ClusterClient:
        session = await open_session(self.access(), patient=False)
        problem = await missing_cluster(session)
        if problem is not None:
            await session.close()
            raise problem
        return ClusterClient(session)

    async def close(self) -> None:
        """Ends the session. Returns soon, also if ZooKeeper does not answer."""
        if self._opening is None:
            return
        self._opening.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            cluster = await self._opening
            async with asyncio.timeout(CLOSE_S):
                await cluster.close()
                await cluster.session.close()


@contextlib.asynccontextmanager
async def shared_cluster(settings: Globals) -> AsyncIterator[SharedCluster]:
    """Yields the cluster of the settings, and closes it."""
    cluster = SharedCluster(settings.access)
    try:
        yield cluster
    finally:
        await cluster.close()


def machine(settings: Globals, options: BundleOptions, secrets: Redaction) -> list[SupportPart]:
    """Returns the parts that read this machine's settings. They make its secrets known to the filter."""

    async def versions(parcel: Parcel) -> None:
        parcel.files["machine/versions.json"] = await in_thread(machine_parts.versions)

    async def command(parcel: Parcel) -> None:
        parcel.files["machine/settings/variables.json"] = shown_variables(os.environ, secrets)
        try:
            file = settings.config_file
        except ConfigError as error:
            return parcel.missing("the settings file", error)
        found = settings_document(file, parcel, secrets) if file else None
        if found is not None:
            parcel.files["machine/settings/command.json"] = found
        return None

    async def brokers(parcel: Parcel) -> None:
        await in_thread(partial(machine_parts.brokers_here, options.places, parcel, secrets))

    return [
        SupportPart("versions", "The versions of metamq, Python, the system and all packages.", versions),
        SupportPart("settings", "The settings of this command: its file, and variables of metamq.", command),
        SupportPart("local-brokers", "The data folders, processes and settings of brokers on this machine.", brokers),
    ]


def running(
    settings: Globals, options: BundleOptions, secrets: Redaction, cluster: SharedCluster, look: Look
) -> list[SupportPart]:
    """Returns the parts that ask the cluster, and read logs. `look` is the doctor."""
    samples, every_s = options.samples, options.every_s

    async def doctor(parcel: Parcel) -> None:
        findings: list[dict[str, Any]] = []
        parcel.files["doctor.json"] = findings

        def report(finding: Finding) -> None:
            findings.append(asdict(finding))

        if not await in_thread(lambda: look(settings, report)):
            parcel.missing("the cluster", "ZooKeeper is not reachable")

    async def statistics(parcel: Parcel) -> None:
        await cluster_parts.statistics(await cluster.get(), parcel, samples, every_s)

    async def servers(parcel: Parcel) -> None:
        await zookeeper_parts.servers(cluster.access(), parcel)

    async def nodes(parcel: Parcel) -> None:
        await zookeeper_parts.nodes((await cluster.get()).session, parcel)

    async def registered() -> dict[str, str]:
        return await cluster_parts.status_addresses(await cluster.get())

    async def status(parcel: Parcel) -> None:
        pages = StatusPages(cluster.access(), parcel, samples, every_s)
        await asyncio.gather(pages.collect(options.status), pages.collect_registered(registered()))
        pages.check()

    async def logs(parcel: Parcel) -> None:
        await in_thread(partial(logs_here, options.places, options.logs_bytes, parcel, secrets))

    def asked(work: Callable[[ClusterClient, Parcel], Awaitable[None]]) -> Callable[[Parcel], Awaitable[None]]:
        async def collect(parcel: Parcel) -> None:
            await work(await cluster.get(), parcel)

        return collect

    more_s = options.sampling_s
    return [
        SupportPart("doctor", "The findings of `metamq doctor`.", doctor),
        SupportPart("brokers", "Brokers, replicas, in-sync sets, lags, failover.", asked(cluster_parts.brokers)),
        SupportPart("statistics", "The figures of each replica; delayed messages that wait.", statistics, more_s),
        SupportPart("topics", "Topics with their settings, and their partitions.", asked(cluster_parts.topics)),
        SupportPart("groups", "Groups: members, owners, offsets, lags.", asked(cluster_parts.groups)),
        SupportPart("transactions", "The open branches of transactions.", asked(cluster_parts.transactions)),
        SupportPart("security", "The names of users; rules and quotas.", asked(cluster_parts.security)),
        SupportPart("zookeeper-servers", "The load of ZooKeeper's servers.", servers),
        SupportPart("zookeeper-nodes", "The number and the size of the nodes, by kind.", nodes),
        SupportPart("status", "The pages and the metrics of the brokers' status ports.", status, more_s),
        SupportPart("logs", "The newest lines of the logs of brokers and ZooKeeper on this machine.", logs),
    ]
