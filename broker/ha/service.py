"""HAService: the master's side of replication, for one term (epoch) of one broker id.

Theory of operation
-------------------
Every append is given to every link (HAConnection), which sends it as its state allows. Every acknowledgement moves
the ends that a replica has reached. From these the service derives each partition's *bound*: the lowest end among the
replicas whose acknowledgement counts (Membership.required). The log makes its stable mark of it and of its own end;
the partition then wakes readers, and PUTs that wait. Nobody polls.

Invariant: a message is below the stable mark only when every member of the in-sync set in ZooKeeper holds it (has
flushed it, where its topic flushes first). It holds because a member is required from before it is asked for in
ZooKeeper until after it is known to be gone from there, and because stable marks never go down.

The service does not know ZooKeeper: `change` carries a compare-and-set out, and `deposed` is called once the state
there is another master's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from metamq.broker.data.partition import Partition
from metamq.broker.data.topics import Topics
from metamq.broker.ha.connection import HAConnection, ReplicaEnd, Wire
from metamq.broker.ha.flow import FlowMonitor
from metamq.broker.ha.handshake import (
    LogPosition,
    Side,
    SyncVerdict,
    begin_where_needed,
    decide,
    refuse_between_batches,
    wait_before_damage,
)
from metamq.broker.ha.insync import Change, Member, Membership, Stage
from metamq.errors import ConfigError, ConnectError, CorruptData, Fenced, MetamqError, ProtocolError
from metamq.wire import sync
from metamq.wire.limits import FRAME_BYTES_MAX
from metamq.zk.cluster.brokers import BrokerState, StateAt

log = logging.getLogger("metamq.broker")

TICK_S = 0.1
CLOSED_SHARE = 0.2
"""Of the time that a slave may be behind: so long it may take to come back after it has closed its link."""
HEARTBEATS_MISSED_MAX = 3
HAND_OVER_CHECK_S = 0.005
REFUSED_TOLD = 10
"""So many logs that are not replicated are told of one by one."""


@dataclass(frozen=True, slots=True)
class HASettings:
    """What a master's service is told. Times in milliseconds, bytes per second; a limit of 0 is none."""

    broker_id: int
    member: Member
    epoch: int
    generation: int
    heartbeat_ms: int
    insync_lag_ms: int
    link_bytes_per_s: int


class HAService:
    """The links to the slaves of one master, in one term. Used by the broker's loop only."""

    def __init__(
        self,
        settings: HASettings,
        topics: Topics,
        state: StateAt,
        *,
        change: Callable[[Change], Awaitable[int | None]],
        read: Callable[[], Awaitable[StateAt]],
        deposed: Callable[[], None],
        failed: Callable[[Partition, MetamqError], None],
    ) -> None:
        """`change` gives the new version, or None when it was refused; raises ConnectError when no answer came.

        `failed`: a partition's log cannot be read.
        """
        self.epoch = settings.epoch
        self.membership = Membership(settings.member, state[0].insync, state[1], lag_s=settings.insync_lag_ms / 1000)
        self.links: dict[int, HAConnection] = {}
        """By replica: a replica counts once, however many connections it makes."""
        self.closed = False
        self.writes_refused: Fenced | None = None
        """The reason why no more is written in this epoch: a hand-over, or another master."""
        self._is_deposed = False
        self._handing_over = 0
        """Hand-overs under way: each of them counts on it that nothing is written."""
        self._settings = settings
        self._topics = topics
        self._change = change
        self._read = read
        self._deposed = deposed
        self.failed = failed
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._required: tuple[Member, ...] = ()
        self._away_since: dict[Member, float] = {}
        self._missing_since: dict[tuple[Member, Partition], float] = {}
        self._complete: frozenset[Member] | None = None
        """Once a log is damaged here: who was in sync then, and so holds what is not served here any more."""
        self._changing: asyncio.Task[None] | None = None
        self._refused: dict[tuple[int, str], str] = {}
        """Logs of slaves that are not replicated, by replica and partition, and why."""
        for partition in topics.partitions():
            partition.stable_listener = self._stable_moved
        self._members_changed()
        if topics.damage():
            self.damaged()

    # -- what the broker tells ----------------------------------------------------------------------------------------

    def opened(self, partition: Partition) -> None:
        """A partition was opened. Its slaves attach theirs; until then those that are required hold it back."""
        partition.stable_listener = self._stable_moved
        self._bind(partition)

    def flush_changed(self, partition: Partition) -> None:
        """What counts of a slave's acknowledgements has changed: what it holds, or what it has flushed."""
        self._bind(partition)

    def slave_beyond(self, partition: Partition, position: int) -> int:
        """A slave that lets readers see beyond this byte, by its number; -1 when none does. They take turns."""
        slaves = [
            link.replica
            for link in self.links.values()
            if (place := link.places.get(partition)) is not None
            and min(place.held.position, place.known_position) > position
        ]
        return sorted(slaves)[partition.index % len(slaves)] if slaves else -1

    def damaged(self) -> None:
        """A log was found to be damaged here."""
        insync = self.membership.insync
        self._complete = insync if self._complete is None else self._complete & insync
        log.warning("no slave is added to the in-sync set that was not in it before a log was damaged here")

    def closed_partition(self, partition: Partition) -> None:
        """A partition was closed: its topic was deleted."""
        self._missing_since = {key: since for key, since in self._missing_since.items() if key[1] is not partition}
        for link in self.links.values():
            place = link.places.get(partition)
            if place is not None:
                link.detach(place.handle)

    def appended(self, partition: Partition, batch: memoryview, position: int, end_offset: int) -> None:
        """A batch was appended at `position`."""
        if not self.links:
            return
        end = ReplicaEnd(end_offset, position + len(batch))
        for link in self.links.values():
            link.appended(partition, batch, position, end, partition.flushes_before_ack)

    def _stable_moved(self, partition: Partition) -> None:
        """A partition's stable mark moved: slaves are to know it."""
        for link in self.links.values():
            link.stable_moved(partition)

    @property
    def insync_count(self) -> int:
        """Members of the in-sync set, the master included, as ZooKeeper last confirmed."""
        return self.membership.insync_count

    @property
    def alone(self) -> bool:
        """Whether nobody else's acknowledgement counts: then only the lease tells whether this is the master still."""
        return not self._required

    # -- links --------------------------------------------------------------------------------------------------------

    def join(self, join: sync.Join, wire: Wire) -> tuple[HAConnection, sync.Accept]:
        """A replica wants to be a slave. Raises ConfigError, Fenced."""
        settings = self._settings
        what = f"replica {join.replica} of broker {join.broker_id}"
        if join.broker_id != settings.broker_id:
            raise ConfigError(f"{what} joined broker {settings.broker_id}", hint="Give it the address of its master.")
        if join.replica == settings.member[0]:
            raise ConfigError(
                f"{what} is the master here: two replicas have the same number",
                hint="Give each replica of a broker its own --replica and data folder.",
            )
        if join.epoch > self.epoch:  # another is the master, or ZooKeeper was taken back: it is to be looked at
            self._deposed()
            raise Fenced(f"epoch {self.epoch} of broker {join.broker_id}", f"{what} has seen epoch {join.epoch}")
        former = self.links.get(join.replica)
        if former is not None:
            self.leave(former, "it has connected anew")
        link = HAConnection(
            self,
            wire,
            join,
            loop=self._loop,
            flow=FlowMonitor(settings.link_bytes_per_s, self._loop.time()),
        )
        self.links[join.replica] = link
        log.info("%s has joined from %s%s", what, wire.peer, ", as a learner" if join.learner else "")
        return link, sync.Accept(sync.ACCEPT, self.epoch, settings.generation, settings.heartbeat_ms)

    def received(self, link: HAConnection, header: Any) -> None:
        """A frame from a slave. Raises ProtocolError: the link is to be closed."""
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
        for asked in partitions:
            partition = self._topics.get(asked.topic, asked.partition)
            master = None if partition is None else self._side(partition)
            if master is None:  # damaged: there is nothing to go by
                partition = None
            slave = Side(
                asked.topic_id,
                LogPosition(asked.start_offset, asked.start_position),
                LogPosition(asked.end_offset, asked.end_position),
                asked.stable_offset,
                asked.epochs,
                link.generation,
            )
            verdict = decide(master, slave)
            if partition is not None and verdict.decision is sync.SyncDecision.REFUSE:
                self._lacks(link, partition, verdict.reason)
            if partition is not None and verdict.decision is sync.SyncDecision.FROM:
                verdict = self._checked(partition, slave, verdict)
            if partition is not None and master is not None and verdict.decision is sync.SyncDecision.FROM:
                verdict = begin_where_needed(partition.needed_offset, slave, verdict, master.start)
            if partition is not None and partition.damage is not None:
                verdict = wait_before_damage(partition.damage, verdict)
            name = f"{asked.topic}/{asked.partition}"
            log.log(verdict.level, "replica %d, %s: %s", link.replica, name, verdict.reason)
            self._refused.pop((link.replica, name), None)
            if verdict.decision is sync.SyncDecision.REFUSE:
                self._refused[link.replica, name] = verdict.reason
            results.append(
                sync.attach_result(asked.handle, verdict.decision, verdict.offset, verdict.position, verdict.reason)
            )
            if partition is not None and verdict.decision in (sync.SyncDecision.FROM, sync.SyncDecision.RESET):
                link.attach(asked.handle, partition, ReplicaEnd(verdict.offset, verdict.position))
                if verdict.position == partition.log.start_position:
                    begun.append((partition, asked.handle))
        link.push(sync.Attached(sync.ATTACHED, self.epoch, results))
        for partition, handle in begun:
            self._push_producers(link, partition, handle)

    def _lacks(self, link: HAConnection, partition: Partition, reason: str) -> None:
        """A slave has what readers saw and this log lacks. If it is in sync, it lacks nothing that was acknowledged: so
        this log is damaged, however whole it looks. It is not served any more, and that slave can be promoted."""
        if link.member in self.membership.insync:
            hint = f"Promote replica {link.replica}: this one then copies the partition from it."
            reason = f"replica {link.replica} is in sync and has what this log lacks: {reason}"
            self.failed(partition, CorruptData(partition.name, reason, hint=hint))

    def _checked(self, partition: Partition, slave: Side, verdict: SyncVerdict) -> SyncVerdict:
        """The verdict to go on somewhere, if a batch begins there."""
        try:
            begins = partition.log.begins_at(verdict.offset, verdict.position)
        except MetamqError as error:
            self.failed(partition, error)
            return decide(None, slave)
        return verdict if begins else refuse_between_batches(slave, verdict)

    def _push_producers(self, link: HAConnection, partition: Partition, handle: int) -> None:
        """What the log does not tell: of the batches that retention removed from it."""
        try:
            states = partition.log.producers_before_start()
        except MetamqError as error:
            self.failed(partition, error)
            return
        if len(states) > FRAME_BYTES_MAX // 2:
            log.warning("replica %d, %s: too many producers to tell it of", link.replica, partition.name)
        elif states:
            link.push(sync.Producers(sync.PRODUCERS, self.epoch, handle), [states])

    def _side(self, partition: Partition) -> Side | None:
        """What to decide by, None where the log is damaged."""
        if partition.closed_by is not None:
            return None
        log_ = partition.log
        try:
            epochs = log_.epochs().entries
        except MetamqError as error:
            self.failed(partition, error)
            return None
        return Side(
            partition.topic_id,
            LogPosition(log_.start_offset, log_.start_position),
            LogPosition(log_.end_offset, log_.end_position),
            log_.stable_offset,
            epochs,
            self._settings.generation,
        )

    def closed_by_slave(self, link: HAConnection, reason: str) -> None:
        """The slave's end of a link is closed: it was killed, or comes back very soon."""
        self.leave(link, reason, since=self._loop.time() - (1 - CLOSED_SHARE) * self._settings.insync_lag_ms / 1000)

    def leave(self, link: HAConnection, reason: str, *, since: float | None = None) -> None:
        """A link is gone, or is to go; its slave counts as behind since then. A second call does nothing."""
        link.close(reason)
        if self.links.get(link.replica) is link:
            self._away_since[link.member] = (
                -math.inf if link.is_leaving else self._loop.time() if since is None else since
            )
            del self.links[link.replica]
            self._refused = {key: reason for key, reason in self._refused.items() if key[0] != link.replica}
            self.membership.gone(link.member)
            self._members_changed()

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
        """Whose acknowledgements count has changed: every bound is to be looked at."""
        required = tuple(sorted(self.membership.required))
        if required != self._required or not required:
            self._required = required
            for partition in self._topics.partitions():
                self._bind(partition)

    # -- the in-sync set ----------------------------------------------------------------------------------------------

    def _look_at_joiner(self, link: HAConnection) -> None:
        """Whether a slave counts from now on, and whether it holds all that is stable."""
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
        """Whether a slave that holds what is served here lacks nothing: not so of a log that is damaged here, unless
        it was in sync when that was found. Whoever is in sync may be promoted, and that without a loss."""
        if self._complete is not None and not self._topics.damage():  # the topic was deleted
            self._complete = None
        return self._complete is None or member in self._complete

    def tick(self, now: float) -> None:
        """Heartbeats, silence, who is behind. Called every TICK_S."""
        heartbeat_s = self._settings.heartbeat_ms / 1000
        for link in list(self.links.values()):
            if now - link.heard_at > HEARTBEATS_MISSED_MAX * heartbeat_s:
                self.leave(link, f"nothing was heard of it for {now - link.heard_at:.1f} s", since=link.heard_at)
            elif now - link.spoke_at >= heartbeat_s / 2:
                link.beat()
        slaves = {link.member for link in self.links.values() if not link.learner}
        members = slaves | self.membership.required
        self._away_since = {member: since for member, since in self._away_since.items() if member in members}
        self._missing_since = {key: since for key, since in self._missing_since.items() if key[0] in members}
        for member in members:
            self._look_after(member, now)
        if self.membership.required != frozenset(self._required):  # one that was joining is let go
            self._members_changed()
        self._change_soon()

    def _look_after(self, member: Member, now: float) -> None:
        self.membership.behind(member, self._behind_since(member, now), now)

    def fell_back(self, link: HAConnection) -> None:
        """A slave is not sent every append any more: what is joining does not hold the others up."""
        if self.membership.stage(link.member) is Stage.JOINING:
            self.membership.gone(link.member)
            self._members_changed()

    def _behind_since(self, member: Member, now: float) -> float | None:
        link = self.links.get(member[0])
        if link is None:
            return self._away_since.setdefault(member, now)
        if link.member != member or link.is_leaving:  # it does not come back, or not soon
            return -math.inf
        self._away_since.pop(member, None)
        since = link.behind_since()
        for partition in self._topics.partitions():
            place = link.places.get(partition)
            if partition.closed_by is not None or (place is not None and place.live):  # damaged here: none can have it
                self._missing_since.pop((member, partition), None)
                continue
            missing_since = self._missing_since.setdefault((member, partition), now)
            since = missing_since if since is None else min(since, missing_since)
        return since

    def _change_soon(self) -> None:
        if self._changing is None and not self.closed:
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
        """One compare-and-set, and what is known after it. Until then nothing else is asked."""
        before = self.membership.insync
        try:
            version = await self._change(change)
        except MetamqError as error:  # not of ConnectError alone: a state that cannot be read is no verdict, either
            log.info("whether the in-sync set was changed is not known: %s", error)
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
                self._tell_insync(before)

    def _tell_insync(self, before: Iterable[Member]) -> None:
        replicas = {replica for replica, _ in self.membership.insync}
        lost = {replica for replica, _ in before} - replicas
        words = ", ".join(f"replica {replica}" for replica in sorted(replicas))
        log.log(logging.WARNING if lost else logging.INFO, "in sync are now: %s", words)

    async def _read_state(self) -> None:
        """After a lost answer: reads before concluding, for as long as it takes."""
        said = ""
        while not self.closed:
            try:
                state, version = await self._read()
            except MetamqError as error:
                if not isinstance(error, ConnectError) and said != (said := str(error)):
                    log.error("the in-sync set is left as it is: %s", error)
                await asyncio.sleep(TICK_S)
                continue
            self.state_read(state, version)
            return

    def state_read(self, state: BrokerState, version: int) -> None:
        """What stands in ZooKeeper: another epoch deposes this master."""
        if state.epoch != self.epoch:
            self._depose(state)
        elif self._changing is None or self._changing.done() or asyncio.current_task() is self._changing:
            self.membership.read(state.insync, version)

    def _depose(self, state: BrokerState) -> None:
        """Nothing more is taken or asked for; the role ends as soon as the broker gets to it."""
        if not self._is_deposed:
            self._is_deposed = True
            self.membership.deposed()
            reason = f"replica {state.master} is the master, since epoch {state.epoch}"
            self.writes_refused = Fenced(f"broker {self._settings.broker_id}", reason)
        self._deposed()

    # -- giving the role away -----------------------------------------------------------------------------------------

    async def _hand_over(self, link: HAConnection, wait_ms: int) -> None:
        """A slave wants to become master: no more writes, until it holds all, or the time is over."""
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
            with contextlib.suppress(TimeoutError):  # then it did not take over: it said so, or is gone
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
        """The term is over."""
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
        """For `ha status`, STATS and metrics. Any thread."""
        now = self._loop.time()
        return {
            "insync": sorted(replica for replica, _ in self.membership.insync),
            "slaves": [self._link_statistics(link, now) for link in list(self.links.values())],
            "refused": [
                f"replica {replica}, {name}: {reason}" for (replica, name), reason in list(self._refused.items())
            ][:REFUSED_TOLD],
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
