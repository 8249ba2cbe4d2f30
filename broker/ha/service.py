"""HAService: the master's side of replication, for one epoch of one broker id.

Theory of operation
-------------------
Each link (HAConnection) gets every append, and sends it when its state allows. Each acknowledgement moves the ends that
a replica has reached. From these the service derives each partition's *bound*: the lowest end among the replicas whose
acknowledgement is required (Membership.required). The log derives its stable mark from the bound and its own end. The
partition then wakes readers and waiting PUTs. No code polls.

Invariant: a message is below the stable mark only when every member of the in-sync set in ZooKeeper holds it (has
flushed it, if its topic flushes first). It holds for two reasons. A member is required from before the request to add
it to ZooKeeper until after its removal there is confirmed. And stable marks never go down.

The service does not know ZooKeeper: `change` carries out a compare-and-set, and `deposed` is called when the state
there has another epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metamq.broker.ha import handshake
from metamq.broker.ha.behind import BehindTimes
from metamq.broker.ha.connection import HAConnection, ReplicaEnd, Wire
from metamq.broker.ha.flow import FlowMonitor
from metamq.broker.ha.insync import Change, Member, Membership, Stage
from metamq.errors import ConfigError, ConnectError, CorruptData, Fenced, MetamqError, ProtocolError
from metamq.wire import sync
from metamq.wire.limits import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.zk.cluster.brokers import BrokerState, StateAt

log = logging.getLogger("metamq.broker")

TICK_S = 0.1
CLOSED_SHARE = 0.2
"""Share of the time that a slave may be behind: it may take this time to come back after it has closed its link."""
HEARTBEATS_MISSED_MAX = 3
HAND_OVER_CHECK_S = 0.005
REFUSED_LISTED_MAX = 10
"""Logs that are not replicated and are listed in statistics."""


@dataclass(frozen=True, slots=True)
class HASettings:
    """Settings of a master's service. Times in milliseconds, bytes per second; a limit of 0 is none."""

    broker_id: int
    member: Member
    epoch: int
    generation: int
    heartbeat_ms: int
    insync_lag_ms: int
    link_bytes_per_s: int


class HAService:
    """The links to the slaves of one master, in one epoch. Used by the broker's loop only."""

    def __init__(
        self,
        settings: HASettings,
        topics: Topics,
        state: StateAt,
        *,
        change: Callable[[Change], Awaitable[int | None]],
        read: Callable[[], Awaitable[StateAt]],
        may_ask: Callable[[], bool],
        deposed: Callable[[], None],
        failed: Callable[[Partition, MetamqError], None],
    ) -> None:
        """`change` returns the new version, or None if it was refused, and raises ConnectError if no answer came. It is
        called only while `may_ask` returns True: a request that ZooKeeper does not answer may have an effect later.

        `failed` is called with a partition whose log cannot be read.
        """
        self.epoch = settings.epoch
        self.membership = Membership(settings.member, state[0].insync, state[1], lag_s=settings.insync_lag_ms / 1000)
        self.links: dict[int, HAConnection] = {}
        """The link of each replica. A replica counts once, however many connections it makes."""
        self.closed = False
        self.writes_refused: Fenced | None = None
        """The reason why no more is written in this epoch: a hand-over, or another master."""
        self._is_deposed = False
        self._handing_over = 0
        """Hand-overs in progress. Writes stay refused until none is left."""
        self._settings = settings
        self._topics = topics
        self.cold_reads = topics.cold_reads
        self._change = change
        self._read = read
        self._may_ask = may_ask
        self._deposed = deposed
        self.failed = failed
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._required: tuple[Member, ...] = ()
        self._behind = BehindTimes(topics)
        self._complete: frozenset[Member] | None = None
        """Members that were in sync when a log was damaged here: they hold the lost messages. None: no damage."""
        self._changing: asyncio.Task[None] | None = None
        self._refused: dict[tuple[int, str], str] = {}
        """The reason for each log of a slave that is not replicated, by replica and partition."""
        for partition in topics.partitions():
            partition.stable_listener = self._stable_moved
        self._members_changed()
        if topics.damage():
            self.damaged()

    # -- events in the broker -----------------------------------------------------------------------------------------

    def opened(self, partition: Partition) -> None:
        """Binds a partition that was opened. Required slaves hold its stable mark back until they attach theirs."""
        partition.stable_listener = self._stable_moved
        self._bind(partition)

    def flush_changed(self, partition: Partition) -> None:
        """Binds a partition whose acknowledgements count differently now: when held, or when flushed."""
        self._bind(partition)

    def slave_beyond(self, partition: Partition, position: int) -> int:
        """Returns a slave whose readers see beyond this byte, or -1. Partitions choose different slaves."""
        slaves = [
            link.replica
            for link in self.links.values()
            if (place := link.places.get(partition)) is not None
            and min(place.held.position, place.known_position) > position
        ]
        return sorted(slaves)[partition.index % len(slaves)] if slaves else -1

    def damaged(self) -> None:
        """Notes that a log is damaged here."""
        insync = self.membership.insync
        self._complete = insync if self._complete is None else self._complete & insync
        log.warning("a log is damaged here: only slaves that were in the in-sync set before may join it")

    def closed_partition(self, partition: Partition) -> None:
        """Detaches a partition that was closed: ZooKeeper does not list it any more."""
        self._behind.forget_partition(partition)
        for link in self.links.values():
            place = link.places.get(partition)
            if place is not None:
                link.detach(place.handle)

    def appended(self, partition: Partition, batch: memoryview, position: int, end_offset: int) -> None:
        """Gives a batch that was appended at `position` to all links."""
        if not self.links:
            return
        end = ReplicaEnd(end_offset, position + len(batch))
        for link in self.links.values():
            link.appended(partition, batch, position, end, partition.flushes_before_ack)

    def _stable_moved(self, partition: Partition) -> None:
        """Sends a new stable mark to all slaves."""
        for link in self.links.values():
            link.stable_moved(partition)

    @property
    def insync_count(self) -> int:
        """The number of members of the in-sync set, with the master, as ZooKeeper confirmed last."""
        return self.membership.insync_count

    @property
    def alone(self) -> bool:
        """True if no other acknowledgement is required. Then only the lease shows that this is still the master."""
        return not self._required

    @property
    def nobody_can_take_over(self) -> bool:
        """True if no other replica is in the in-sync set: none can be promoted without an accepted loss."""
        return self.membership.is_alone_in_zookeeper

    # -- links --------------------------------------------------------------------------------------------------------

    def join(self, join: sync.Join, wire: Wire) -> tuple[HAConnection, sync.Accept]:
        """Makes the link of a replica that joins as a slave. Raises ConfigError, Fenced."""
        settings = self._settings
        what = f"replica {join.replica} of broker {join.broker_id}"
        if join.broker_id != settings.broker_id:
            raise ConfigError(f"{what} joined broker {settings.broker_id}", hint="Give it the address of its master.")
        if join.replica == settings.member[0]:
            raise ConfigError(
                f"{what} is the master here: two replicas have the same number",
                hint="Give each replica of a broker its own --replica and data folder.",
            )
        if join.epoch > self.epoch:  # another is the master, or ZooKeeper was taken back: the keeper reads the state
            self._deposed()
            raise Fenced(f"epoch {self.epoch} of broker {join.broker_id}", f"{what} has seen epoch {join.epoch}")
        former = self.links.get(join.replica)
        if former is not None:
            self.leave(former, "it has connected again")
        link = HAConnection(
            self, wire, join, loop=self._loop, flow=FlowMonitor(settings.link_bytes_per_s, self._loop.time())
        )
        self.links[join.replica] = link
        log.info("%s has joined from %s%s", what, wire.peer, ", as a learner" if join.learner else "")
        return link, sync.Accept(sync.ACCEPT, self.epoch, settings.generation, settings.heartbeat_ms)

    def received(self, link: HAConnection, header: Any) -> None:
        """Handles a frame from a slave. Raises ProtocolError: the caller closes the connection."""
        if link.closed:
            return
        link.heard_at = self._loop.time()
        frame = sync.unpack_from_slave(header)
        if frame.epoch != self.epoch:
            raise ProtocolError(
                f"replica {link.replica} sent a {type(frame).__name__} of epoch {frame.epoch}, not {self.epoch}"
            )
        if isinstance(frame, sync.Ack):
            for partition in link.acknowledged(frame):
                self._bind(partition)
            if self.membership.stage(link.member) in (None, Stage.JOINING):
                self._look_at_joiner(link)
        elif isinstance(frame, sync.Attach):
            self._attach(link, frame.partitions)
        elif isinstance(frame, sync.Detach):
            for handle in frame.handles:
                link.detach(handle)
        elif isinstance(frame, sync.Leave):
            log.info("replica %d stops", link.replica)
            link.is_leaving = True
            self._look_after(link.member, self._loop.time())
            self._change_soon()
        elif isinstance(frame, sync.HandOver):
            task = asyncio.ensure_future(self._hand_over(link, frame.wait_ms))
            link.tasks.add(task)
            task.add_done_callback(link.tasks.discard)
        else:
            raise ProtocolError(f"replica {link.replica} sent a {type(frame).__name__} in the middle of a link")

    def _attach(self, link: HAConnection, partitions: Iterable[sync.AttachPartition]) -> None:
        results, begun = [], []
        for request in partitions:
            partition = self._topics.get(request.topic, request.partition)
            master = None if partition is None else self._side(partition)
            if master is None:  # missing or damaged: nothing to compare with
                partition = None
            slave = handshake.Side(
                request.topic_id,
                handshake.LogPosition(request.start_offset, request.start_position),
                handshake.LogPosition(request.end_offset, request.end_position),
                request.stable_offset,
                request.epochs,
                link.generation,
            )
            verdict = handshake.decide(master, slave)
            if partition is not None and verdict.decision is sync.SyncDecision.REFUSE:
                self._lacks(link, partition, verdict.reason)
            if partition is not None and verdict.decision is sync.SyncDecision.FROM:
                verdict = self._checked(partition, slave, verdict)
            if partition is not None and master is not None and verdict.decision is sync.SyncDecision.FROM:
                verdict = handshake.begin_where_needed(partition.needed_offset, slave, verdict, master.start)
            if partition is not None and partition.damage is not None:
                verdict = handshake.wait_before_damage(partition.damage, verdict)
            name = f"{request.topic}/{request.partition}"
            log.log(verdict.level, "replica %d, %s: %s", link.replica, name, verdict.reason)
            self._refused.pop((link.replica, name), None)
            if verdict.decision is sync.SyncDecision.REFUSE:
                self._refused[link.replica, name] = verdict.reason
            results.append(
                sync.attach_result(request.handle, verdict.decision, verdict.offset, verdict.position, verdict.reason)
            )
            if partition is not None and verdict.decision in (sync.SyncDecision.FROM, sync.SyncDecision.RESET):
                link.attach(request.handle, partition, ReplicaEnd(verdict.offset, verdict.position))
                if verdict.position == partition.log.start_position:
                    begun.append((partition, request.handle))
        link.push(sync.Attached(sync.ATTACHED, self.epoch, results))
        for partition, handle in begun:
            self._push_producers(link, partition, handle)

    def _lacks(self, link: HAConnection, partition: Partition, reason: str) -> None:
        """Handles a slave with messages that readers saw and this log lacks.

        If the slave is in sync, it has all acknowledged messages. So this log is damaged, even if its checksums are
        right. It is not served any more, and the slave can be promoted.
        """
        if link.member in self.membership.insync:
            hint = f"Promote replica {link.replica}: this one then copies the partition from it."
            reason = f"replica {link.replica} is in sync and has data that this log lacks: {reason}"
            self.failed(partition, CorruptData(partition.name, reason, hint=hint))

    def _checked(
        self, partition: Partition, slave: handshake.Side, verdict: handshake.SyncVerdict
    ) -> handshake.SyncVerdict:
        """Returns the verdict to continue, or a refusal if no batch begins there."""
        try:
            begins = partition.log.begins_at(verdict.offset, verdict.position)
        except MetamqError as error:
            self.failed(partition, error)
            return handshake.decide(None, slave)
        return verdict if begins else handshake.refuse_between_batches(slave, verdict)

    def _push_producers(self, link: HAConnection, partition: Partition, handle: int) -> None:
        """Sends the states of producers whose batches retention removed: the copied log does not show them."""
        try:
            states = partition.log.producers_before_start()
        except MetamqError as error:
            self.failed(partition, error)
            return
        if len(states) > FRAME_BYTES_MAX // 2:
            log.warning("replica %d, %s: too many producers to send", link.replica, partition.name)
        elif states:
            link.push(sync.Producers(sync.PRODUCERS, self.epoch, handle), [states])

    def _side(self, partition: Partition) -> handshake.Side | None:
        """Returns the master's side of the handshake, or None if the log is damaged."""
        if partition.closed_by is not None:
            return None
        log_ = partition.log
        try:
            epochs = log_.epochs().entries
        except MetamqError as error:
            self.failed(partition, error)
            return None
        return handshake.Side(
            partition.topic_id,
            handshake.LogPosition(log_.start_offset, log_.start_position),
            handshake.LogPosition(log_.end_offset, log_.end_position),
            log_.stable_offset,
            epochs,
            self._settings.generation,
        )

    def closed_by_slave(self, link: HAConnection, reason: str) -> None:
        """Removes a link that the slave has closed: it was killed, or reconnects very soon."""
        self.leave(link, reason, since=self._loop.time() - (1 - CLOSED_SHARE) * self._settings.insync_lag_ms / 1000)

    def leave(self, link: HAConnection, reason: str, *, since: float | None = None) -> None:
        """Ends and removes a link. Its slave counts as behind since `since`, or now. A second call does nothing."""
        if self.links.get(link.replica) is link:
            self._behind.link_ended(link, self._loop.time() if since is None else since)
            del self.links[link.replica]
            self._refused = {key: reason for key, reason in self._refused.items() if key[0] != link.replica}
            self.membership.gone(link.member)
            self._members_changed()
        link.close(reason)

    # -- stable marks -------------------------------------------------------------------------------------------------

    def _bind(self, partition: Partition) -> None:
        """Sets the bound of one partition's stable mark."""
        lowest: ReplicaEnd | None = None
        for replica, incarnation in self._required:
            link = self.links.get(replica)
            place = link.places.get(partition) if link is not None and link.member[1] == incarnation else None
            mark = place.mark() if place is not None else ReplicaEnd(0, 0)
            if lowest is None or mark.position < lowest.position:
                lowest = mark
        if lowest is None:
            partition.unbound()
        else:
            partition.bound(*lowest)

    def _members_changed(self) -> None:
        """Binds all partitions again if the required members have changed."""
        required = tuple(sorted(self.membership.required))
        if required != self._required or not required:
            self._required = required
            for partition in self._topics.partitions():
                self._bind(partition)

    # -- the in-sync set ----------------------------------------------------------------------------------------------

    def _look_at_joiner(self, link: HAConnection) -> None:
        """Lets a slave join if all its partitions are live, and notes if it holds all stable messages."""
        if link.learner or link.copying or link.is_leaving:
            return
        partitions = [partition for partition in self._topics.partitions() if partition.closed_by is None]
        if not link.all_live(partitions) or not self._is_complete(link.member):
            return
        if self.membership.stage(link.member) is None:
            self.membership.live(link.member)
            self._members_changed()
        if all(link.places[p].mark().position >= p.log.stable_position for p in partitions):
            self.membership.caught_up(link.member)
            self._change_soon()

    def _is_complete(self, member: Member) -> bool:
        """Returns True if a slave that holds all messages served here lacks none.

        While a log is damaged here, that is true only of members that were in sync when the damage was found. Members
        of the in-sync set must be promotable without loss, so no other slave may be added.
        """
        if self._complete is not None and not self._topics.damage():  # the topic was deleted
            self._complete = None
        return self._complete is None or member in self._complete

    def tick(self, now: float) -> None:
        """Sends heartbeats, ends silent links, and finds slaves that are behind. Called every TICK_S."""
        heartbeat_s = self._settings.heartbeat_ms / 1000
        for link in list(self.links.values()):
            if now - link.heard_at > HEARTBEATS_MISSED_MAX * heartbeat_s:
                self.leave(link, f"it was silent for {now - link.heard_at:.1f} s", since=link.heard_at)
            elif now - link.spoke_at >= heartbeat_s / 2:
                link.beat()
        slaves = {link.member for link in self.links.values() if not link.learner}
        members = slaves | self.membership.required
        self._behind.keep_only(members)
        for member in members:
            self._look_after(member, now)
        if self.membership.required != frozenset(self._required):  # a joining slave was dropped
            self._members_changed()
        self._change_soon()

    def _look_after(self, member: Member, now: float) -> None:
        self.membership.behind(member, self._behind.since(member, self.links.get(member[0]), now), now)

    def fell_back(self, link: HAConnection) -> None:
        """Drops a joining slave that is not sent every append any more: writes must not wait for it."""
        if self.membership.stage(link.member) is Stage.JOINING:
            self.membership.gone(link.member)
            self._members_changed()

    def _change_soon(self) -> None:
        if self._changing is None and not self.closed and self._may_ask():
            change = self.membership.ask()
            if change is not None:
                self._members_changed()
                self._changing = asyncio.ensure_future(self._ask_for(change))
                self._changing.add_done_callback(self._change_ended)

    def _change_ended(self, task: asyncio.Task[None]) -> None:
        self._changing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the in-sync set was not changed: %s", error, exc_info=error)

    async def _ask_for(self, change: Change) -> None:
        """Requests one change and notes its outcome. Until then there is no other request."""
        before = self.membership.insync
        try:
            version = await self._change(change)
        except MetamqError as error:  # any error: an unreadable state leaves the outcome unknown, too
            log.info("it is unknown if the in-sync set was changed: %s", error)
            version = None
        if self.closed or self._is_deposed:
            return
        if version is not None:
            self.membership.confirmed(version)
        else:
            self.membership.lost()
            await self._read_state()
        if not self.closed:
            self._members_changed()
            if self.membership.insync != before:
                self._log_insync(before)

    def _log_insync(self, before: Iterable[Member]) -> None:
        replicas = {replica for replica, _ in self.membership.insync}
        lost = {replica for replica, _ in before} - replicas
        words = ", ".join(f"replica {replica}" for replica in sorted(replicas))
        log.log(logging.WARNING if lost else logging.INFO, "now in sync: %s", words)

    async def _read_state(self) -> None:
        """Reads the state after a lost answer, again and again until it succeeds."""
        logged = ""
        while not self.closed:
            try:
                state, version = await self._read()
            except MetamqError as error:
                if not isinstance(error, ConnectError) and logged != (logged := str(error)):
                    log.error("the in-sync set stays unchanged: %s", error)
                await asyncio.sleep(TICK_S)
                continue
            self.state_read(state, version)
            return

    def state_read(self, state: BrokerState, version: int) -> None:
        """Notes the state in ZooKeeper. Another epoch deposes this master."""
        if state.epoch != self.epoch:
            self._depose(state)
        elif self._changing is None or self._changing.done() or asyncio.current_task() is self._changing:
            self.membership.read(state.insync, version)

    def _depose(self, state: BrokerState) -> None:
        """Stops writes and requests of a deposed master. The keeper ends the role soon."""
        if not self._is_deposed:
            self._is_deposed = True
            self.membership.deposed()
            reason = f"replica {state.master} is the master, since epoch {state.epoch}"
            self.writes_refused = Fenced(f"broker {self._settings.broker_id}", reason)
        self._deposed()

    # -- hand-over ---------------------------------------------------------------------------------------------------

    async def _hand_over(self, link: HAConnection, wait_ms: int) -> None:
        """Refuses writes for a slave that will be promoted, and answers when it holds all, or after `wait_ms`."""
        what = f"broker {self._settings.broker_id}"
        reason = ""
        self._handing_over += 1
        self.writes_refused = Fenced(what, f"it hands over to replica {link.replica}")
        deadline = self._loop.time() + wait_ms / 1000
        partitions = list(self._topics.partitions())
        while not self._holds_all(link, partitions):
            if link.closed or self.closed or self._loop.time() > deadline:
                reason = f"replica {link.replica} did not hold everything within {wait_ms} ms"
                break
            await asyncio.sleep(HAND_OVER_CHECK_S)
        if not link.closed:
            link.push(sync.HandedOver(sync.HANDED_OVER, self.epoch, link.sent_seq, reason))
        if not reason:
            with contextlib.suppress(TimeoutError):  # the slave did not take over
                async with asyncio.timeout(wait_ms / 1000):
                    await self._ended.wait()
        if not self.closed:
            await self._read_state()
        self._handing_over -= 1
        if not (self.closed or self._is_deposed or self._handing_over):
            self.writes_refused = None

    def _holds_all(self, link: HAConnection, partitions: list[Partition]) -> bool:
        return link.held_seq == link.sent_seq and all(
            (place := link.places.get(p)) is not None and place.live and place.mark().position == p.log.end_position
            for p in partitions
            if p.closed_by is None
        )

    def close(self, reason: str) -> None:
        """Ends the epoch and all its links."""
        self.closed = True
        self._ended.set()
        for partition in self._topics.partitions():
            partition.stable_listener = None
        for link in list(self.links.values()):
            link.close(reason)
        self.links.clear()
        if self._changing is not None:
            self._changing.cancel()

    def statistics(self) -> dict[str, Any]:
        """Returns figures for `ha status`, STATS and metrics. Any thread."""
        now = self._loop.time()
        return {
            "insync": sorted(replica for replica, _ in self.membership.insync),
            "slaves": [self._link_statistics(link, now) for link in list(self.links.values())],
            "refused": [
                f"replica {replica}, {name}: {reason}" for (replica, name), reason in list(self._refused.items())
            ][:REFUSED_LISTED_MAX],
        }

    def _link_statistics(self, link: HAConnection, now: float) -> dict[str, Any]:
        lag_messages = lag_bytes = copying = 0
        for partition in self._topics.partitions():
            place = link.places.get(partition)
            held = (
                place.held
                if place is not None
                else ReplicaEnd(partition.log.start_offset, partition.log.start_position)
            )
            copying += partition.closed_by is None and (place is None or not place.live)
            lag_messages += max(partition.log.end_offset - held.offset, 0)
            lag_bytes += max(partition.log.end_position - held.position, 0)
        since = link.behind_since()
        stage = self.membership.stage(link.member)
        outside = "catching up" if self._is_complete(link.member) else "without a log that is damaged at the master"
        return {
            "replica": link.replica,
            "peer": link.peer,
            "learner": link.learner,
            "stage": stage.value if stage is not None else outside,
            "copying": copying,
            "lag_messages": lag_messages,
            "lag_bytes": lag_bytes,
            "lag_ms": round((now - since) * 1000) if since is not None else 0,
            "bytes_s": round(link.flow.bytes_s(now)),
            "sent_bytes": link.sent_bytes,
        }
