"""The broker process: its start, its run, its stop and its failure.

start   lock the data folder → bind the port → wait for ZooKeeper → read the topics → recover their logs → become
        master under a new epoch → serve → register the topics. No client can find a broker before recovery ends.
run     Topics follow their configuration. After a lost session the broker becomes master and registers again. Without
        ZooKeeper the broker serves readers; it serves producers, too, if it never had a slave, else until its lease
        ends, and for `alone_lease_s` longer if no slave is in sync.
stop    as a slave, leave the in-sync set; as a master, hand over to a slave → refuse writes → answer the waiting ones →
        stop accepting → withdraw from ZooKeeper → close the logs cleanly. A slave takes a refused connection for the
        end of the process: so the broker accepts connections until it acknowledges nothing more.
fail    After the first failed write or fsync the broker acknowledges nothing more, logs the reason, and ends with
        status 1. The content of the disk is unknown then, so the broker flushes nothing and closes no log cleanly;
        recovery examines the logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import metamq
from metamq.broker.data.data_folder import LOST_ZOOKEEPER, REMOVED, RIGHT_ZOOKEEPER, DataFolder
from metamq.broker.data.flusher import Flusher
from metamq.broker.data.kept_topics import kept_topics, unserved_partitions
from metamq.broker.data.topics import Topics
from metamq.broker.front_door.acceptor import Acceptor
from metamq.broker.front_door.audit import Audit
from metamq.broker.front_door.limits.admission import LINGERING_MAX, SLOTS_KEPT
from metamq.broker.front_door.protocol import BrokerProtocol
from metamq.broker.log.disk.files import SHORTAGES, FileCache
from metamq.broker.log.disk.whole_disk import SYNC_DISK
from metamq.broker.log_once import LogOnce
from metamq.broker.process.descriptors import raised_open_files_limit, shares
from metamq.broker.process.http import StatusServer, status_address
from metamq.broker.process.listener import bind
from metamq.broker.process.metrics import Histogram, SyncTimes
from metamq.broker.process.pages import BrokerPages, guard_of
from metamq.broker.process.parts import follow_rights, make_parts
from metamq.broker.process.topic_reader import TopicReader
from metamq.broker.process.users import KnownUsers
from metamq.broker.roles.decide_role import RoleKind
from metamq.broker.transactions.followers import Followers
from metamq.broker.transactions.journal import TOPIC as JOURNAL
from metamq.broker.transactions.journal import journal_config
from metamq.errors import (
    ClosedError,
    ConfigError,
    ConnectError,
    CorruptData,
    DiskFull,
    Fenced,
    MetamqError,
    TooManyOpenFiles,
)
from metamq.private_files import restrict_process
from metamq.security.tls import OFF, broker_security
from metamq.words import count
from metamq.zk.cluster.brokers import cluster_id, known_cluster_id, read_state
from metamq.zk.cluster.registrations import Registration, until_alone
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.errors import ConnectionLost
from metamq.zk.session.session import Session, SessionState

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.client.settings import ClusterAccess

log = logging.getLogger("metamq.broker")

RETRY_S = 1.0
STALL_S = 30.0
"""Seconds between two checks for stalled connections. A connection is closed after one to two of them."""
COLLECTED_AFTER = 20_000
"""New objects per run of the garbage collector over young objects. Python's default of 700 is a few requests."""


class Broker:
    """One broker process. Its owner calls start(), wait() until it must end, then stop()."""

    def __init__(
        self, config: BrokerConfig, access: ClusterAccess, publish: Callable[[BrokerPages], None] = lambda _: None
    ) -> None:
        """`publish` gets the pages of the broker before it is ready."""
        self.config = config
        self._publish = publish
        self.failure: MetamqError | None = None
        self._access = access
        self._ended = asyncio.Event()
        self._topics_changed = asyncio.Event()
        self._connections: set[BrokerProtocol] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready_reason = "starting"
        self._status: StatusServer | None = None
        self._beat = time.monotonic()

    async def start(self) -> None:
        """Starts the broker, see the module. Raises ConfigError, ConnectError, CorruptData, StorageError."""
        config = self.config
        self.loop = asyncio.get_running_loop()
        self._folder = await self._opened_folder()
        try:
            self._listener = bind(config, is_secure=self._access.security.is_on)
            self.port = self._listener.getsockname()[1]
            limit = raised_open_files_limit()
            open_files, connections = shares(limit, config.open_files_max)
            connections_max = min(config.connections_max, max(1, connections - SLOTS_KEPT - LINGERING_MAX))
            self._sync_times = SyncTimes()
            self._files = FileCache(open_files, sync=self._sync_times.timed(os.fsync), sync_disk=SYNC_DISK)
            self._security = broker_security(self._access.security)
            self._session = await Session.open(
                self._access.zookeeper,
                timeout_ms=config.session_timeout_ms,
                connect_timeout_s=None,  # ZooKeeper may be started after the broker
                root=self._access.root,
                security=self._security.client if self._security else OFF,
                make_chroot=not self._folder.cluster_id,  # an old folder must find its own cluster
                on_state=self._session_state,
            )
            self._flusher = Flusher(self.fail)
            self._audit = Audit(config)
            self._users = KnownUsers(self._session, self._security)
            self._topics = Topics(config.id, self._folder, self._files)
            self._store = TopicStore(self._session)
            self._reader = TopicReader(self._session, self._store, self._topics_changed.set)
            await self._until_answered(self._check_zookeeper)
            await self._until_answered(self._read_topics)
            await self._until_answered(self._users.read)
            self._make_parts(connections_max)
            guard = guard_of(config, self._security, self._users, self._audit)
            pages = BrokerPages(self, guard)
            self._publish(pages)
            tls = guard.tls if guard is not None else None
            host, port = config.http_host or config.host, config.http_port
            self._status = StatusServer(host, port, pages.respond, tls) if port >= 0 else None
            await self._until_answered(self._parts.keeper.begin)
        except BaseException:
            await self._abandon()
            raise
        self._tasks = [asyncio.ensure_future(job()) for job in self._work()]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        self._ready_reason = ""
        log.info(
            "%s is up at %s:%d, %s, data in %s",
            self.name, self.host, self.port, count(len(self._topics.counts()), "topic"), config.data,
        )  # fmt: skip

    async def _opened_folder(self) -> DataFolder:
        """Opens the data folder. On a full disk it waits for free space."""
        log_once = LogOnce()
        while True:
            try:
                return DataFolder.open(Path(self.config.data), self.config.id, self.config.replica)
            except DiskFull as error:
                log_once.failed(f"broker {self.config.id} waits for space on its disk", error)
                await asyncio.sleep(RETRY_S)

    async def _until_answered(self, step: Callable[[], Awaitable[None]]) -> None:
        """Runs a step of the start, again from its beginning if ZooKeeper, space or descriptors are missing."""
        while True:
            await self._session.connected()
            try:
                return await step()
            except (ConnectError, *SHORTAGES) as error:
                names = {DiskFull: "space on its disk", TooManyOpenFiles: "descriptors"}
                what = names.get(type(error), "ZooKeeper")
                log.info("broker %d waits for %s: %s", self.config.id, what, error)
                await asyncio.sleep(RETRY_S)

    def _make_parts(self, connections_max: int) -> None:
        """Makes the parts above the topics. The replica has no role yet."""
        parts = self._parts = make_parts(
            self.config,
            self._folder,
            self._session,
            self._store,
            self._topics,
            self._flusher,
            self._registration,
            connections_max=connections_max,
            users=self._users,
            audit=self._audit,
            check=self._check_zookeeper,
            failed=self.fail,
        )
        follow_rights(self._users, parts.door)
        self._memory, self._answers, self._connections = parts.door.requests, parts.door.answers, parts.door.connections
        self._acceptor = Acceptor(self._listener, lambda: BrokerProtocol(parts.door, self.loop), self._security)

    @property
    def host(self) -> str:
        """The host that the broker registers for its clients."""
        if self.config.advertise:
            return self.config.advertise
        return socket.gethostname() if self.config.host in ("0.0.0.0", "::") else self.config.host

    @property
    def http_port(self) -> int:
        """The port of /metrics; -1: none."""
        return self._status.port if self._status is not None else -1

    @property
    def name(self) -> str:
        """The replica and its role, for messages."""
        role = self._parts.status.role
        names = {RoleKind.MASTER: f"the master, epoch {role.epoch}", RoleKind.SLAVE: "a slave"}
        return f"replica {self._folder.replica} of broker {self.config.id} ({names.get(role.kind, role.kind.value)})"

    def _registration(self) -> Registration:
        return Registration(
            broker_id=self.config.id,
            replica=self._folder.replica,
            incarnation=self._folder.incarnation,
            folder=self._folder.identity,
            lock=self._folder.lock,
            host=self.host,
            port=self.port,
            version=metamq.__version__,
            learner=self.config.learner,
            data=os.path.abspath(self.config.data),
            epoch=self._folder.epoch,
            state_version=self._folder.state_version,
            generation=self._folder.generation,
            is_replaced=self._folder.is_replaced and bool(self._topics.counts()),
            status=status_address(self.config, self.host, self.http_port),
        )

    @property
    def epoch(self) -> int:
        """The newest epoch in which this replica was the master."""
        return self._parts.status.role.epoch

    async def _check_zookeeper(self) -> None:
        """Refuses a ZooKeeper that does not know this broker: with an empty ZooKeeper all topics would seem deleted."""
        topics = {folder.topic for folder in self._folder.topics()} - {JOURNAL}
        if topics and await read_state(self._session, self.config.id) is None:
            is_ours = await known_cluster_id(self._session) == self._folder.cluster_id
            wrong = "With another ZooKeeper its topics would count as deleted."
            raise ConfigError(
                f"the data folder {self.config.data} holds {count(len(topics), 'topic')}, but ZooKeeper at "
                f"{self._access.zookeeper} does not know broker {self.config.id}",
                hint=REMOVED if is_ours else f"{RIGHT_ZOOKEEPER} {LOST_ZOOKEEPER} {wrong}",
            )
        await self._check_cluster()
        await self._check_not_copied()

    async def _check_cluster(self) -> None:
        """Refuses a ZooKeeper of another cluster, and an empty one. Only a new folder creates nodes there."""
        if self._folder.cluster_id:
            self._folder.check_cluster(await known_cluster_id(self._session))
        else:
            await self._check_not_replaced()
            self._folder.join_cluster(await cluster_id(self._session))
        for shared in (self._session.paths.groups(), self._session.paths.sinks()):
            await self._session.ensure(shared)  # clients may not make them, if brokers own their parent

    async def _check_not_replaced(self) -> None:
        """Gives a new folder in the place of a lost one a new incarnation: the in-sync set does not contain it then."""
        former = await self._incarnations_before()
        if former:
            reason = "is new, and the data in the replica's former folder is gone"
            self._folder.begin_after(max(former), reason, is_older=True)

    async def _check_not_copied(self) -> None:
        """Gives a new incarnation to a copy of the folder, and to an original after a copy was used in its place.

        The replica may have continued with the other folder. While a process with that folder may run, nothing is
        changed here.
        """
        is_older = True
        if self._folder.is_copy:
            reason = "is a copy, or was moved to another disk: it may be older than the replica's last data"
            is_older = not await self._is_complete_copy()
        elif max(await self._known_incarnations(), default=0) > self._folder.incarnation:  # in a folder, it only rises
            reason = "is not the one that the replica used last: it lacks messages that are in that one"
        else:
            return
        former = await self._incarnations_before()
        self._folder.begin_after(max(former, default=0), reason, is_older=is_older)

    async def _is_complete_copy(self) -> bool:
        """Returns True if the folder was copied after a clean stop, and no epoch has begun since."""
        stored = await read_state(self._session, self.config.id)
        return self._folder.was_clean and stored is not None and stored[0].epoch == self._folder.epoch

    async def _incarnations_before(self) -> list[int]:
        """Returns the incarnations of this replica with another folder. Raises ConfigError if another running process
        is this replica: it has lost nothing."""
        await until_alone(self._session, self._registration())
        return await self._known_incarnations()

    async def _known_incarnations(self) -> list[int]:
        """Returns the incarnations of this replica that ZooKeeper knows."""
        stored = await read_state(self._session, self.config.id)
        if stored is None:
            return []
        found = [incarnation for replica, incarnation in stored[0].insync if replica == self._folder.replica]
        if not found and stored[0].master == self._folder.replica:
            return [self._folder.incarnation]
        return found

    async def _read_topics(self) -> None:
        """Applies the configuration of every topic, and watches all of them; reads only what has changed.

        A topic that is not listed is removed from the disk, unless the list is older than one that had it. So a list
        counts only if it comes from the ZooKeeper whose cluster was checked. A replaced ZooKeeper does not know the
        session; the session's generation differs then.
        """
        generation = self._session.generation
        await self._check_cluster()
        found, listing = await self._reader.read()
        configs = {topic: one for topic, one in found.items() if isinstance(one, TopicConfig)}
        unreadable = {topic: one for topic, one in found.items() if isinstance(one, MetamqError)}
        if self._session.generation != generation:
            raise ConnectionLost("the list of topics", "the session ended meanwhile")
        folders = self._folder.topics()
        kept = kept_topics(self.config.id, folders, configs, listing)
        own = {topic: found for topic, found in configs.items() if found.partitions.get(self.config.id)}
        served = {topic: found for topic, found in own.items() if topic not in unreadable | kept}
        served[JOURNAL] = journal_config(self.config.id, self.config.transactions_min_insync)
        self._topics.listed = listing.version
        await self._topics.apply(served, unreadable, kept)
        self._note_unlisted(kept, unserved_partitions(self.config.id, folders, served))
        if self._topics.get(JOURNAL, 0) is None and (full := self._topics.without_room()) is not None:
            raise full.with_traceback(None)

    def _note_unlisted(self, kept: dict[str, MetamqError], in_part: dict[str, MetamqError]) -> None:
        before, self._topics.unlisted = self._topics.unlisted, kept | in_part
        for topic, error in in_part.items():
            if topic not in before:
                log.error("topic %s is served in part: %s", topic, error)

    async def _follow_topics(self) -> None:
        log_once = LogOnce()
        while True:
            await self._topics_changed.wait()
            self._topics_changed.clear()
            try:
                await self._read_topics()
                await self._parts.keeper.settle()  # a log that was opened may lack messages
                if self._topics.unlisted:
                    self._parts.keeper.offers.are_gone()
                await self._parts.keeper.offer()
                if (full := self._topics.without_room()) is not None:
                    raise full.with_traceback(None)
                log_once.worked("topics are followed again")
            except (ConnectError, CorruptData, *SHORTAGES) as error:
                log_once.failed("topics are not followed at present", error)
                await asyncio.sleep(RETRY_S)
                self._topics_changed.set()

    def _session_state(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            log.warning("the ZooKeeper session is lost: registering again with the next one")
            self._topics_changed.set()  # its watches are lost as well
            if hasattr(self, "_parts"):
                self._parts.keeper.look_again()
        elif state is SessionState.SUSPENDED and hasattr(self, "_parts"):
            self._parts.keeper.offers.may_be_gone()

    async def _beats(self) -> None:
        """Records for /healthz that the loop runs."""
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(0.5)

    async def _sweeps(self) -> None:
        """Closes clients that hold memory and make no progress."""
        while True:
            await asyncio.sleep(STALL_S)
            for connection in list(self._connections):
                connection.sweep()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, MetamqError):
                self.fail(error)
            else:
                log.critical("a task of the broker ended by an error", exc_info=error)
                self.fail(MetamqError(f"internal error: {error!r}"))

    def fail(self, error: MetamqError) -> None:
        """Ends the broker with this error. It must not continue."""
        if self.failure is None:
            self.failure = error
            log.critical("broker %d stops: %s", self.config.id, error)
            for connection in list(self._connections):
                connection.abort()
            self._ended.set()

    def end(self) -> None:
        """Requests a graceful stop."""
        self._ended.set()

    async def wait(self) -> None:
        """Waits until end() or fail()."""
        await self._ended.wait()

    async def stop(self) -> None:
        """Ends the broker: gracefully after end(), at once after fail()."""
        self._parts.keeper.say_goodbye()
        if self.failure is None:
            await self._parts.keeper.successor.resign()
        self._ready_reason = "stopping"
        self._parts.status.stopping = Fenced(f"broker {self.config.id}", "it is stopping")
        self._parts.transactions.give_up_wait(self._parts.status.stopping)
        if self.failure is None:
            await self._drain()
        for partition in self._topics.partitions():
            partition.fail_waiting(self._parts.status.stopping.with_unknown_outcome())
        self._acceptor.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        await self._parts.keeper.close()
        self._parts.door.slices.close()
        clean = self._topics.close(ClosedError("broker"), clean=self.failure is None)
        for connection in list(self._connections):
            connection.close() if self.failure is None else connection.abort()
        self._flusher.close()
        self._parts.housekeeping.close()
        self._parts.scrubber.close()
        if self._status is not None:
            self._status.close()
        self._files.close()
        self._folder.close(clean=clean)
        self._audit.close()
        log.info("broker %d has stopped", self.config.id)

    def _work(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """Returns the coroutine functions that run until the stop."""
        config, parts = self.config, self._parts
        return (
            self._flusher.run, parts.housekeeping.watch_disk, parts.housekeeping.run, parts.scrubber.run,
            parts.scrubber.run_reports, parts.lags.run, parts.expiry.run, parts.delays.run, self._topics.run_removals,
            self._follow_topics, parts.keeper.run, parts.keeper.tick, parts.transactions.run,
            Followers(config.id, self._session, parts.transactions, config.branch_grace_ms / 1000).run,
            self._beats, self._sweeps, self._users.run,
        )  # fmt: skip

    async def _drain(self) -> None:
        """Answers the unanswered requests and flushes, up to the drain time-out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self._flusher.drain()
                while any(not connection.idle for connection in self._connections):
                    await asyncio.sleep(0.01)
                    await self._flusher.drain()

    async def _abandon(self) -> None:
        """Undoes a failed start."""
        if self._status is not None:
            self._status.close()
        if hasattr(self, "_audit"):
            self._audit.close()
        if hasattr(self, "_acceptor"):
            self._acceptor.close()
        elif hasattr(self, "_listener"):
            self._listener.close()
        if hasattr(self, "_parts"):
            await self._parts.keeper.close()
        if hasattr(self, "_session"):
            await self._session.close()
        if hasattr(self, "_topics"):
            self._topics.close(ClosedError("broker"), clean=False)
        if hasattr(self, "_parts"):
            self._parts.housekeeping.close()
            self._parts.scrubber.close()
        if hasattr(self, "_flusher"):
            self._flusher.close()
        if hasattr(self, "_files"):
            self._files.close()
        self._folder.close(clean=False)

    def health(self) -> tuple[bool, str]:
        """Returns True if the event loop turns, and a text. Any thread."""
        late_s = time.monotonic() - self._beat
        return late_s < 5, f"the event loop last turned {late_s:.1f} s ago"

    def readiness(self) -> tuple[bool, str]:
        """Returns True if clients are fully served, and a text. Any thread."""
        reason = self._ready_reason or self._parts.keeper.readiness()
        if reason:
            return False, reason
        if (refusal := self._parts.status.writes_refused) is not None:
            return False, str(refusal)
        if broken := self._topics.broken():
            return False, "; ".join(str(error) for error in broken)
        return True, f"epoch {self.epoch}, {count(len(self._topics.counts()), 'topic')}"

    async def is_in_sync(self) -> bool:
        """Returns True if this replica is in the in-sync set, or is a learner. Raises MetamqError."""
        stored = await read_state(self._session, self.config.id)
        member = (self._folder.replica, self._folder.incarnation)
        return self.config.learner or (stored is not None and member in stored[0].insync)

    def statistics(self) -> dict[str, object]:
        """Returns the fields of an answer to STATS, and further figures for metrics. Any thread."""
        return {
            **self._parts.stats.statistics(),
            "connections": len(self._connections),
            "flushes": self._flusher.flushes,
            "open_log_files": self._files.open_count,
            "request_bytes": self._memory.used_bytes,
            "requests_held_back": self._memory.waiting,
            "answer_bytes": self._answers.used_bytes,
            "stalled_connections": self._answers.stalled,
            "group_lags": self._parts.lags.last,
        }

    def fsyncs(self) -> Histogram:
        """Returns the durations of fsyncs. Any thread."""
        return self._sync_times.snapshot()


async def serve(broker: Broker, ready: Callable[[Broker], None]) -> int:
    """Runs a broker until SIGTERM, SIGINT or SIGHUP; `ready` is called once it serves. Returns the exit status."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` sets SIG_IGN
            loop.add_signal_handler(number, broker.end)
    if not await _started(broker):
        log.info("broker %d was stopped before it was up", broker.config.id)
        return 0
    ready(broker)
    await broker.wait()
    await broker.stop()
    return 1 if broker.failure else 0


async def _started(broker: Broker) -> bool:
    """Starts the broker. Returns False if a request to end came before; the start is undone then."""
    start, end = asyncio.ensure_future(broker.start()), asyncio.ensure_future(broker.wait())
    try:
        await asyncio.wait({start, end}, return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            await asyncio.wait({start})
        if start.cancelled():
            return False
        start.result()
        return True
    finally:
        end.cancel()


def run_broker(
    config: BrokerConfig,
    access: ClusterAccess,
    *,
    ready: Callable[[Broker], None] = lambda _: None,
    publish: Callable[[BrokerPages], None] = lambda _: None,
) -> int:
    """Runs a broker until SIGTERM, SIGINT or SIGHUP; returns the exit status. Raises the errors of Broker.start().

    `publish` gets the pages of the broker before it serves.
    """
    restrict_process()
    gc.freeze()  # modules and classes never become garbage
    gc.set_threshold(COLLECTED_AFTER, *gc.get_threshold()[1:])
    work = serve(Broker(config, access, publish), ready)
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    status: int = uvloop.run(work)
    return status
