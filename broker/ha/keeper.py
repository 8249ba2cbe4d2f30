"""RoleKeeper: follows the state in ZooKeeper, and makes this replica what it is to be: master, slave, or waiting.

    any  ──▶ MASTER    the epoch is raised; logs are bound by the in-sync set; PUTs and slaves are taken
    any  ──▶ SLAVE     PUTs that wait are answered as unknown, others refused; linked to the master, readers served
    any  ──▶ WAITING   as SLAVE, without a master to link to

Everything that may change a role ends in `settle()`, one at a time: a watch on the state or on the master's node, a
lost session, a promotion. It reads what stands in ZooKeeper and asks metamq.broker.ha.role.cast what that means. So a
missed or doubled event does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from metamq.broker.config import BrokerConfig
from metamq.broker.data.data_folder import DataFolder
from metamq.broker.data.flusher import Flusher
from metamq.broker.data.partition import BatchIds, Partition
from metamq.broker.data.topics import Topics
from metamq.broker.front_door.processors import Processors
from metamq.broker.ha.client import HAClient
from metamq.broker.ha.group_transfer import GroupTransferService
from metamq.broker.ha.insync import Change
from metamq.broker.ha.role import Role, cast
from metamq.broker.ha.service import TICK_S, HAService, HASettings
from metamq.broker.log.disk.files import SHORTAGES
from metamq.broker.trouble import Trouble
from metamq.errors import ConnectError, CorruptData, Fenced, MetamqError, StorageError, Timeout
from metamq.zk.cluster.brokers import (
    BrokerState,
    Mastership,
    Registration,
    StateAt,
    become_master,
    known,
    master_of,
    read_state,
)
from metamq.zk.cluster.epochs import KnownState, taken_back
from metamq.zk.cluster.offers import register_slave_topics, register_topics
from metamq.zk.cluster.replicas import Refused, Unknown, change_insync, had_slaves, register_slave, slaves_of, take_over
from metamq.zk.session.lease import Lease
from metamq.zk.session.session import Session
from metamq.zk.session.watches import OneWatch

log = logging.getLogger("metamq.broker")

RETRY_S = 0.5
HAND_OVER_MS = 3000
LINK_UP_S = 1.0
"""So long a promotion waits for a link to a master that is registered; not at all when nobody is at its address."""


class RoleKeeper:
    """The role of one replica. Used by the broker's loop only."""

    def __init__(
        self,
        config: BrokerConfig,
        folder: DataFolder,
        session: Session,
        topics: Topics,
        flusher: Flusher,
        ids: BatchIds,
        processors: Processors,
        registration: Callable[[], Registration],
        *,
        check: Callable[[], Awaitable[None]],
        failed: Callable[[MetamqError], None],
    ) -> None:
        """`check` is called in each new session, before anything is registered: whether it is the right ZooKeeper."""
        self.role = Role.STARTING
        self.reason = ""
        self.epoch = 0
        self.ha: HAService | None = None
        self.client: HAClient | None = None
        self._config = config
        self._folder = folder
        self._session = session
        self._topics = topics
        self._flusher = flusher
        self._ids = ids
        self._processors = processors
        self._register_as = registration
        self._check = check
        self._failed = failed
        self._what = f"replica {folder.replica} of broker {folder.broker_id}"
        self._changed = asyncio.Event()
        self._settling = asyncio.Lock()
        self._registered = (-1, -1)
        """The session, by its generation, and the incarnation that this replica is registered with."""
        self._taken: tuple[tuple[int, int], int] | None = None
        """What `_registered` will be, and the epoch: of a term that this replica has in ZooKeeper and has not begun."""
        self._lease = Lease(session, self._is_my_term)
        self._has_others = False
        """Whether there may be somebody else whom one could promote, running or not."""
        self._mastership: Mastership | None = None
        self._state: BrokerState | None = None
        """As this slave saw it last."""
        self._offered: tuple[int, Role, dict[str, int]] | None = None
        self._following: asyncio.Task[None] | None = None
        self._state_watch, self._slaves_watch, self._master_watch = (OneWatch(self.look_again) for _ in range(3))
        topics.opened = self._opened
        topics.closing = self._closing
        topics.flush_changed = self._flush_changed
        topics.damaged = self._damaged

    @property
    def _registration(self) -> Registration:
        """What this replica says of itself now."""
        return self._register_as()

    # -- following ----------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Takes the first role. Raises ConfigError, Fenced, ConnectError."""
        await self._lease.start()
        await self.settle()

    async def run(self) -> None:
        """Follows, for ever."""
        trouble = Trouble()
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._session.connected()
                await self.settle()
                trouble.is_over("the role is followed again")
            except (ConnectError, CorruptData, *SHORTAGES) as error:
                trouble.lasts("the role is not followed at present", error)
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def tick(self) -> None:
        """Lets time pass for the master's service, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            if self.ha is not None:
                self.ha.tick(loop.time())
            self._processors.transactions.tick(time.monotonic())

    def look_again(self) -> None:
        """Something may have changed."""
        self._changed.set()

    async def settle(self) -> None:
        """Makes this replica what it is to be. Raises ConnectError; to be called again then."""
        async with self._settling:
            registration = self._registration
            if self._registered[0] != self._session.generation:
                await self._check()
            stored, claims = await self._read_all()
            state = stored[0] if stored is not None else None
            others = bool(claims) or (state is not None and len(state.insync) > 1)
            self._has_others = self._has_others or others or await had_slaves(self._session, registration.broker_id)
            if state is not None and registration.member in state.insync:
                self._folder.has_caught_up()
            part = cast(stored, registration, claims, learner=self._config.learner, playing=self.role, epoch=self.epoch)
            if part.role is not Role.MASTER:
                self._state = state
                await self._be_slave(part.role, part.reason)
            elif stored is not None and self._taken == (self._to_register(), stored[0].epoch):
                await self._begin_term(Mastership(registration.broker_id, *stored), self._to_register())
            elif self.role is Role.MASTER and state is not None and state.epoch != self.epoch:
                self._lose_term(state)
                await self._be_master(claims)
            elif self.role is not Role.MASTER or self._registered != self._to_register():
                await self._be_master(claims)
            elif self.ha is not None and stored is not None:
                self._hold(*stored)
                self.ha.state_read(*stored)

    async def _read_all(self) -> tuple[StateAt | None, list[KnownState]]:
        """The state, and what the slaves that are registered know of it: never more than it says, or it was taken back.

        So the slaves are read first; and once more where the server that was asked may only be behind the others.
        """
        registration = self._registration
        what = self._session, registration.broker_id
        for is_last in (False, True):
            slaves = await self._slaves_watch.leave(partial(slaves_of, *what))
            stored = await self._state_watch.leave(partial(read_state, *what))
            claims = [slave.claim for slave in slaves]
            if is_last or not taken_back(known(stored), [registration.claim, *claims]):
                break
            await self._session.sync()
        return stored, claims

    def _to_register(self) -> tuple[int, int]:
        return self._session.generation, self._registration.incarnation

    # -- the roles ----------------------------------------------------------------------------------------------------

    def _lose_term(self, state: BrokerState) -> None:
        """Another one has begun in this replica's name. At once: the process that did may live, and is waited for."""
        self.role, self.reason = Role.WAITING, f"epoch {state.epoch} has begun"
        log.warning("%s: %s", self._what, self.reason)
        self._processors.not_master = Fenced(self._what, self.reason)
        self._end_term(self.reason)

    async def _be_master(self, claims: list[KnownState]) -> None:
        registered = self._to_register()
        self._folder.check_writable()  # where the term could not be noted, each attempt would use up epochs
        self._folder.incarnation_known()  # from here on, whether or not we hear of it
        try:
            mastership = await become_master(self._session, self._registration, claims)
        except Fenced:
            self.look_again()  # somebody was faster
            return
        await self._begin_term(mastership, registered)

    async def _begin_term(self, mastership: Mastership, registered: tuple[int, int]) -> None:
        """`registered`: the session and incarnation of its registration. If these changed since, it registers again.

        Raises SHORTAGES: settle() then begins the same term again. Each retry would use up an epoch otherwise.
        """
        self._end_term("a new term begins")
        self._registered = -1, -1  # until all of it is done
        self._taken = registered, mastership.epoch
        await self._stop_following()
        self._folder.know_epoch(mastership.epoch, mastership.version)  # before anything is written under it
        self._folder.has_caught_up()  # whatever it lacks was accepted
        self.role, self.epoch, self.reason = Role.MASTER, mastership.epoch, ""
        await self._lease.begin_again()  # that of this term: it may have taken long to get here
        if self._ids.epoch != mastership.epoch:
            self._ids.start_epoch(mastership.epoch)
        registration, state = self._registration, mastership.state
        settings = HASettings(
            broker_id=registration.broker_id,
            member=registration.member,
            epoch=state.epoch,
            generation=state.generation,
            heartbeat_ms=max(min(self._session.negotiated_timeout_ms // 6, 1000), 50),
            insync_lag_ms=self._config.insync_lag_ms,
            link_bytes_per_s=self._config.replication_bytes_per_s,
        )
        self._folder.follow_generation(state.generation)
        # What a former master had committed is in the partitions before anybody reads them, or copies them.
        await self._processors.transactions.begin_term(mastership.epoch, state.generation)
        self.ha = HAService(
            settings,
            self._topics,
            (state, mastership.version),
            change=self._change,
            read=self._read,
            deposed=self.look_again,
            refuse_writes=self._refuse_writes,
            failed=self._log_failed,
        )
        self._taken = None  # from here on clients may have been answered in this term
        self._processors.ha = self.ha
        self._processors.transfer = GroupTransferService(registration.broker_id, self.ha, self._may_believe)
        self._refuse_writes(None)
        log.info("%s is the master, epoch %d", self._what, self.epoch)
        self._mastership = mastership
        await self._offer()
        self._registered = registered

    def _end_term(self, reason: str) -> None:
        """What this replica did as a master, it does no more."""
        ha, self.ha = self.ha, None
        self._processors.ha = self._processors.transfer = None
        self._processors.transactions.end_term(Fenced(self._what, reason))
        if ha is not None:
            ha.close(reason)
            unknown = Fenced(self._what, reason).with_unknown_outcome()
            for partition in self._topics.partitions():
                partition.fail_waiting(unknown)
                partition.freeze()

    async def _be_slave(self, role: Role, reason: str) -> None:
        if self.role is not role or self.reason != reason:
            log.log(logging.WARNING if role is Role.WAITING else logging.INFO, "%s: %s", self._what, reason)
        self._processors.not_master = Fenced(self._what, reason)
        self._end_term(reason)
        self._refuse_writes(None)  # those to a master: a slave refuses them by being one
        self.role, self.reason = role, reason
        if self.client is None:
            for partition in self._topics.partitions():
                partition.freeze()  # later on, each link does: what its master has said once, it does not say again
            self.client = HAClient(
                self._register_as,
                self._topics,
                self._flusher,
                learner=self._config.learner,
                generation=lambda: self._folder.generation,
                known_epoch=lambda: self._folder.epoch,
                begun=self._folder.know_epoch,
                followed=self._folder.follow_generation,
                full=lambda: self._processors.disk_full,
                readable_changed=self.look_again,
                failed=self._failed,
            )
            self._following = asyncio.ensure_future(self.client.run())
        what = self._session, self._registration.broker_id
        master = await self._master_watch.leave(partial(master_of, *what))
        if role is not Role.SLAVE:
            master = None
        if master is not None and self._topics.damage():  # else the damaged log may be the best that there is
            self.client.follow(None)  # what was acknowledged on this link is not all here any more
            await self._topics.set_damaged_aside()
        self._folder.incarnation_known()
        registered = self._to_register()
        await register_slave(self._session, self._registration)
        await self._offer()
        if not (master is None and role is Role.SLAVE and self._is_linked_to_master()):
            self.client.follow(master)
        self._registered = registered

    def _is_linked_to_master(self) -> bool:
        """Whether the link is to who is the master by the state: it may be so without being registered, when it is cut
        off from ZooKeeper alone. It then goes on with its slaves, and can still hand over to one."""
        client, state = self.client, self._state
        if client is None or client.master is None or not client.linked:
            return False
        return state is not None and client.master.replica == state.master

    async def _stop_following(self) -> None:
        client, self.client = self.client, None
        task, self._following = self._following, None
        if client is not None and task is not None:
            client.follow(None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def offer(self) -> None:
        """Offers the topics to clients: to producers and readers as the master, to readers as a slave that has them."""
        async with self._settling:  # of two at once the later one might win, with what the earlier one saw
            await self._offer()

    async def _offer(self) -> None:
        broker_id, replica, counts = self._registration.broker_id, self._registration.replica, self._topics.counts()
        if self.client is not None:
            readable = Counter(partition.topic for partition in self.client.readable)
            counts = {topic: number for topic, number in counts.items() if readable[topic] >= number}
        offered = self._session.generation, self.role, counts
        if offered == self._offered:
            return
        if self.role is Role.MASTER and self._mastership is not None:
            await register_slave_topics(self._session, broker_id, replica, {})
            try:
                await register_topics(self._session, self._mastership, counts)
            except Fenced:
                self.look_again()
                return
        else:
            await register_slave_topics(self._session, broker_id, replica, counts)
        self._offered = offered

    # -- promotion ----------------------------------------------------------------------------------------------------

    async def promote(self, *, accept_loss: bool) -> Mastership:
        """Makes this replica the master: the one place where that is decided, by a person or by what watches brokers.

        From a living master it takes over when it holds everything; a dead one is not waited for, nor one that hangs.
        Raises Fenced when it is not in the in-sync set, unless loss is accepted; what the living master refuses with;
        ConnectError when ZooKeeper is away.
        """
        async with self._settling:
            registration = self._registration
            if self.role is Role.MASTER:
                raise Fenced(self._what, "it is the master already")
            stored, claims = await self._read_all()
            if stored is None:
                raise Fenced(self._what, "the broker id has had no master yet: start replica 0")
            if self._topics.damage():  # nobody is to count on what it acknowledged
                self._folder.raise_incarnation("a log is damaged")
                registration = self._registration
            state, version = stored
            was_taken_back = taken_back(known(stored), [registration.claim, *claims])
            in_sync = registration.member in state.insync and not was_taken_back
            handed_over, registered = False, self._to_register()
            if not in_sync and not accept_loss and not was_taken_back:
                raise Fenced(self._what, "it is not in the in-sync set, so that messages would be lost")
            self._folder.check_writable()  # else nobody would be the master
            if in_sync:
                handed_over = await self._is_handed_over(state)
            mastership = await take_over(
                self._session, registration, state, version, claims, accept_loss=accept_loss, handed_over=handed_over
            )
            if isinstance(mastership, Refused):
                raise Fenced(self._what, "the state has changed meanwhile: look at `metamq ha status` again")
            log.warning("%s was promoted, epoch %d%s", self._what, mastership.epoch, "" if in_sync else ", with loss")
            try:
                await self._begin_term(mastership, registered)
            except SHORTAGES:
                self.look_again()  # this replica is the master, and begins its term again
                raise
            return mastership

    async def _is_handed_over(self, state: BrokerState) -> bool:
        """Asks the master to stop, if it lives; whether it has, and this replica holds everything.

        A link that is down at the moment does not tell that its master is dead, while that is registered. Raises what
        a living master refuses with, ConnectError when ZooKeeper is away.
        """
        for _ in range(2):
            client = self.client
            if client is None:
                return False
            if not client.linked:
                master = await master_of(self._session, self._registration.broker_id)
                if master is None or master.replica != state.master:
                    return False
                client.follow(master)
                await client.attempts.outcome(LINK_UP_S)
                if not client.linked:
                    return False
            try:
                await client.hand_over(HAND_OVER_MS)
                return True
            except Timeout as error:  # it hangs
                log.warning("%s: the master does not hand over: %s", self._what, error)
                return False
            except ConnectError as error:  # it died just now, or the link did
                log.warning("%s: the link broke before the master had handed over: %s", self._what, error)
        return False

    # -- what the parts ask for ---------------------------------------------------------------------------------------

    def _may_believe(self) -> bool:
        """Whether nobody can have become master meanwhile, as far as clocks tell; true where there was never anybody
        else."""
        return not self._has_others or self._lease.valid()

    async def _is_my_term(self) -> bool:
        """Whether the state is that of a master's own term, and not an older one. That its session lives does not say
        so: a promotion does not wait for the end of that."""
        epoch, version = self.epoch, self._folder.state_version
        if self.role is not Role.MASTER:
            return True
        with contextlib.suppress(CorruptData):
            stored = await read_state(self._session, self._registration.broker_id)
            if stored is not None and stored[0].epoch == epoch and stored[1] >= version:
                return True
        self.look_again()
        return False

    def _refuse_writes(self, error: Fenced | None) -> None:
        self._processors.fenced = error

    async def _change(self, change: Change) -> int | None:
        held = self._mastership
        if held is None or held.version != change.version:
            return None
        outcome = await change_insync(self._session, held, change.members)
        if isinstance(outcome, Unknown):
            raise ConnectError("ZooKeeper", outcome.reason, outcome="unknown")
        if isinstance(outcome, Refused):
            return None
        self._know(outcome.held)
        return outcome.held.version

    async def _read(self) -> tuple[BrokerState, int]:
        stored = await read_state(self._session, self._registration.broker_id)
        if stored is None:
            raise ConnectError("ZooKeeper", f"the state of broker {self._registration.broker_id} is gone")
        self._hold(*stored)
        return stored

    def _hold(self, state: BrokerState, version: int) -> None:
        """The term as it stands in ZooKeeper, if it is this one's still."""
        if state.epoch == self.epoch and version >= self._folder.state_version:
            self._know(Mastership(self._registration.broker_id, state, version))

    def _know(self, held: Mastership) -> None:
        """The term as it stands is durable here before anything relies on it, see metamq.zk.cluster.epochs."""
        try:
            self._folder.know_epoch(held.epoch, held.version)
        except StorageError as error:
            if not isinstance(error, SHORTAGES):  # else it is asked for again, and not held until it is known here
                self._failed(error)
            raise
        self._mastership = held

    def _log_failed(self, partition: Partition, error: MetamqError) -> None:
        if isinstance(error, CorruptData):
            self._topics.is_damaged(partition, error)
        elif isinstance(error, SHORTAGES):  # whoever asked asks again
            log.warning("%s", error)
        else:
            self._failed(error)

    def _opened(self, partition: Partition) -> None:
        if self.ha is not None:
            self.ha.opened(partition)
        elif self.client is not None:
            partition.freeze()
            self.client.opened(partition)

    def _damaged(self) -> None:
        if self.ha is not None:
            self.ha.damaged()
        self.look_again()

    def _closing(self, partition: Partition) -> None:
        if self.ha is not None:
            self.ha.closed_partition(partition)
        elif self.client is not None:
            self.client.closed(partition)

    def _flush_changed(self, partition: Partition) -> None:
        if self.ha is not None:
            self.ha.flush_changed(partition)
        elif self.client is not None and partition.flushes_before_ack:
            self.client.flushes_now(partition)

    @property
    def followed_epoch(self) -> int:
        """The term of the master that this replica is, or follows."""
        return max(self.epoch, self.client.epoch) if self.client is not None else self.epoch

    def preferred_replica(self, partition: Partition, position: int) -> int:
        """The replica that a reader at this byte of a partition had better ask next, -1: this one.

        What is far behind the end is not in the page cache any more: a slave's disk will do as well. Half of the way
        lies between going there and coming back, so that no reader goes to and fro.
        """
        far_bytes = self._config.far_behind_bytes
        behind_bytes = partition.log.stable_position - position
        if self.ha is not None:
            is_far = 0 < far_bytes < behind_bytes
            return self.ha.slave_beyond(partition, position + far_bytes // 2) if is_far else -1
        master = self.client.master if self.client is not None else None
        return master.replica if master is not None and behind_bytes <= far_bytes // 2 else -1

    def readiness(self) -> str:
        """Why clients are not served as they should be; empty when they are."""
        if self._registered[0] != self._session.generation:
            return "not registered in ZooKeeper"
        if self.role is Role.WAITING:
            return self.reason
        if self.client is not None and not self.client.linked:
            return "not linked to its master"
        over_s = self._lease.over_s()
        if over_s is None:
            return ""
        refuses = self.role is Role.MASTER and not self._may_believe()
        means = "writes are refused" if refuses else "whether this replica is registered is not known"
        return f"ZooKeeper does not answer, and the lease ended {over_s:.0f} s ago: {means}"

    def say_goodbye(self) -> None:
        """The broker is going to end."""
        if self.client is not None:
            self.client.say_goodbye()

    async def close(self) -> None:
        """The broker ends."""
        self._end_term("it is stopping")
        await self._stop_following()
        await self._lease.close()

    def statistics(self) -> dict[str, Any]:
        """For `ha status`, STATS and metrics. Any thread."""
        found: dict[str, Any] = {
            "replica": self._registration.replica,
            "role": self.role.value,
            "reason": self.reason,
            "epoch": self.followed_epoch,
            "known_epoch": self._folder.epoch,
        }
        if self.ha is not None:
            found |= self.ha.statistics()
        elif self.client is not None:
            found["link"] = self.client.state.value
            found["received_bytes"] = self.client.received_bytes
        return found
