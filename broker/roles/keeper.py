"""RoleKeeper: follows the state in ZooKeeper and gives this replica its role: master, slave, or waiting.

    any  ──▶ MASTER    raises the epoch, binds logs by the in-sync set, takes PUTs and slaves
    any  ──▶ SLAVE     answers waiting PUTs as unknown, refuses others, links to the master, serves readers
    any  ──▶ WAITING   as SLAVE, without a master to link to

All events that may change a role end in settle(), one at a time: a watch on the state or on the master's node, a lost
session, a promotion. settle() reads the state in ZooKeeper, and metamq.broker.roles.decide_role decides. So a missed or
repeated event does no harm. No other code exchanges the role (metamq.broker.roles.role).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from metamq.broker.ha.client import HAClient
from metamq.broker.ha.group_transfer import GroupTransferService
from metamq.broker.ha.service import TICK_S, HAService, HASettings
from metamq.broker.log.disk.files import SHORTAGES
from metamq.broker.log_once import LogOnce
from metamq.broker.roles.decide_role import RoleDecision, RoleKind, decide_role
from metamq.broker.roles.role import BetweenRoles, MasterRole, ReplicaStatus, Role, SlaveRole, WaitingRole
from metamq.broker.roles.successor import Attempt, Successor
from metamq.broker.transactions.term import TransactionTerm
from metamq.errors import ConnectError, CorruptData, Fenced, MetamqError, StorageError, Timeout
from metamq.zk.cluster.brokers import BrokerState, Mastership, StateAt, become_master, known, master_of, read_state
from metamq.zk.cluster.epochs import KnownState, taken_back
from metamq.zk.cluster.offers import Offers
from metamq.zk.cluster.replicas import Refused, Unknown, change_insync, had_slaves, register_slave, slaves_of, take_over
from metamq.zk.session.lease import Lease
from metamq.zk.session.session import SessionState
from metamq.zk.session.watches import OneWatch

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.broker.data.data_folder import DataFolder
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.partition import BatchIds, Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.ha.insync import Change
    from metamq.broker.roles.succession import Noticed
    from metamq.broker.transactions.processor import TransactionalCommandProcessor
    from metamq.wire.commands import Promote
    from metamq.zk.cluster.registrations import Registration
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

RETRY_S = 0.5
HAND_OVER_MS = 3000
LINK_UP_S = 1.0
"""Seconds that a promotion waits for a link to a registered master. It stops at once if its address refuses."""


class RoleKeeper:
    """Keeps the role of one replica. Used by the broker's loop only."""

    def __init__(
        self,
        config: BrokerConfig,
        folder: DataFolder,
        session: Session,
        topics: Topics,
        flusher: Flusher,
        ids: BatchIds,
        status: ReplicaStatus,
        transactions: TransactionalCommandProcessor,
        registration: Callable[[], Registration],
        *,
        check: Callable[[], Awaitable[None]],
        failed: Callable[[MetamqError], None],
    ) -> None:
        """`check` runs in each new session before any registration. It raises if this is the wrong ZooKeeper."""
        self._config = config
        self._folder = folder
        self._session = session
        self._topics = topics
        self._flusher = flusher
        self._ids = ids
        self._status = status
        self._transactions = transactions
        self._register_as = registration
        self._check = check
        self._failed = failed
        self._what = f"replica {folder.replica} of broker {folder.broker_id}"
        self._changed = asyncio.Event()
        self._settling = asyncio.Lock()
        self._registered = (-1, -1)
        """The session generation and the incarnation with which this replica is registered."""
        self._taken: tuple[tuple[int, int], int] | None = None
        """The next `_registered`, and the epoch, if this replica has an epoch in ZooKeeper that it has not begun."""
        self._lease = Lease(session, self._is_own_epoch, self.look_again)
        self._has_others = False
        """True if there may be another replica to promote, running or not."""
        self._mastership: Mastership | None = None
        self._state: BrokerState | None = None
        """The state that this slave read last."""
        self.offers = Offers(session)
        self._following: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._state_watch, self._slaves_watch, self._master_watch = (OneWatch(self.look_again) for _ in range(3))
        self.successor = Successor(config, session, topics, status, registration, self.promote, self.look_again)
        topics.opened = lambda partition: status.role.opened(partition)
        topics.closing = lambda partition: status.role.closing(partition)
        topics.flush_changed = lambda partition: status.role.flush_changed(partition)
        topics.damaged = self._damaged

    def _registration(self) -> Registration:
        """The present registration of this replica."""
        log_epoch, log_bytes = self.successor.published
        return replace(self._register_as(), log_epoch=log_epoch, log_bytes=log_bytes)

    # -- following ----------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Takes the first role. Raises ConfigError, Fenced, ConnectError."""
        await self._lease.start()
        await self.settle()

    async def run(self) -> None:
        """Settles the role after each event, until cancelled."""
        log_once, again_s = LogOnce(), None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._session.connected()
                await self.settle()
                again_s = await self.successor.step()
                log_once.worked("the role is followed again")
            except (ConnectError, CorruptData, *SHORTAGES) as error:
                log_once.failed("the role is not followed at present", error)
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def tick(self) -> None:
        """Calls tick() of the master's service and of transactions, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            role = self._status.role
            if isinstance(role, MasterRole):
                role.service.tick(loop.time())
            self._transactions.tick(time.monotonic())

    def look_again(self) -> None:
        """Notes that something may have changed: run() settles the role again."""
        self._changed.set()

    async def settle(self) -> None:
        """Gives this replica the role that follows from ZooKeeper. Raises ConnectError: the caller calls again then."""
        async with self._settling:
            registration = self._registration()
            if self._registered[0] != self._session.generation:
                await self._check()
            stored, claims = await self._read_all()
            state = stored[0] if stored is not None else None
            others = bool(claims) or (state is not None and len(state.insync) > 1)
            self._has_others = self._has_others or others or await had_slaves(self._session, registration.broker_id)
            if state is not None and registration.member in state.insync:
                self._folder.has_caught_up()
            role = self._status.role
            decision = decide_role(
                stored, registration, claims, learner=self._config.learner, current=role.kind, epoch=role.epoch
            )
            if decision.kind is not RoleKind.MASTER:
                self._state = state
                await self._be_slave(decision)
            elif stored is not None and self._taken == (self._to_register(), stored[0].epoch):
                await self._begin_epoch(Mastership(registration.broker_id, *stored), self._to_register())
            elif role.kind is RoleKind.MASTER and state is not None and state.epoch != role.epoch:
                self._lose_epoch(state)
                await self._be_master(claims)
            elif role.kind is not RoleKind.MASTER or self._registered != self._to_register():
                await self._be_master(claims)
            elif isinstance(role, MasterRole) and stored is not None:
                self._hold(*stored)
                role.service.state_read(*stored)

    async def _read_all(self) -> tuple[StateAt | None, list[KnownState]]:
        """Returns the state, and the states that registered slaves know. Reads the slaves first.

        If a slave knows a newer state, ZooKeeper was taken back, or this server is behind: reads again after a sync.
        """
        registration = self._registration()
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
        return self._session.generation, self._registration().incarnation

    # -- the roles ----------------------------------------------------------------------------------------------------

    def _exchange(self, role: Role, refusal: Fenced) -> Role:
        """Exchanges the role, ends the work of a former master, returns the former role. The role changes only here.

        The caller stops the link of a former slave: see _stop_following().
        """
        former = self._status.exchange(role)
        if isinstance(former, MasterRole):
            if isinstance(former.transactions, TransactionTerm):
                self._transactions.end_term(former.transactions, refusal)
            former.service.close(refusal.reason)
            unknown = refusal.with_unknown_outcome()
            for partition in self._topics.partitions():
                partition.fail_waiting(unknown)
                partition.freeze()
        return former

    def _leave_role(self, refusal: Fenced) -> Role:
        """Ends the work of the role, keeps its kind, and returns the former role."""
        role = self._status.role
        return self._exchange(BetweenRoles(role.kind, role.epoch, role.reason, refusal), refusal)

    def _lose_epoch(self, state: BrokerState) -> None:
        """Ends the epoch of a master after another process has begun a new one as this replica.

        Call it before become_master(), which waits for the other process while that may run.
        """
        refusal = Fenced(self._what, f"epoch {state.epoch} has begun")
        log.warning("%s: %s", self._what, refusal.reason)
        epoch = self._status.role.epoch
        self._exchange(BetweenRoles(RoleKind.WAITING, epoch, refusal.reason, refusal), refusal)

    async def _be_master(self, claims: list[KnownState]) -> None:
        registered = self._to_register()
        self._folder.check_writable()  # without space to note the epoch, each attempt would use up an epoch
        self._folder.incarnation_known()  # from here on, even if the answer is lost
        try:
            mastership = await become_master(self._session, self._registration(), claims)
        except Fenced:
            self.look_again()  # another replica was faster
            return
        await self._begin_epoch(mastership, registered)

    async def _begin_epoch(self, mastership: Mastership, registered: tuple[int, int]) -> None:
        """Begins an epoch that this replica has in ZooKeeper.

        `registered` is the session and the incarnation of its registration. If they have changed since, the replica
        registers again. Raises SHORTAGES: settle() then begins the same epoch again: retries use up no epochs.
        """
        refusal = Fenced(self._what, "a new epoch begins")
        self._registered = -1, -1  # until the epoch has begun: the replica is not ready
        former = self._leave_role(refusal)
        self._taken = registered, mastership.epoch
        await self._stop_following(former)
        self._folder.know_epoch(mastership.epoch, mastership.version)  # before the first write in it
        self._folder.has_caught_up()  # as the master it has all messages that count from now on
        self._exchange(BetweenRoles(RoleKind.MASTER, mastership.epoch, "", refusal), refusal)
        await self._lease.begin_again()  # the lease of this epoch: the steps before may have taken long
        if self._ids.epoch != mastership.epoch:
            self._ids.start_epoch(mastership.epoch)
        registration, generation = self._registration(), mastership.state.generation
        settings = self._settings(registration, mastership)
        self._folder.follow_generation(generation)
        # Durable commits of a former master are in the partitions before a client reads them, or a slave copies them.
        transactions = await self._transactions.begin_term(mastership.epoch, generation)
        service = HAService(
            settings,
            self._topics,
            (mastership.state, mastership.version),
            change=self._change,
            read=self._read,
            may_ask=self._zookeeper_answers,
            deposed=self._lease.refute,
            failed=self._log_failed,
        )
        self._taken = None  # from here on the replica may answer clients in this epoch
        transfer = GroupTransferService(registration.broker_id, service, self._may_believe)
        self._exchange(MasterRole(mastership.epoch, service, transfer, transactions), refusal)
        if isinstance(transactions, TransactionTerm):
            self._transactions.serve(transactions)
        self.successor.begun(mastership.state)
        log.info("%s is the master, epoch %d", self._what, mastership.epoch)
        self._mastership = mastership
        await self._offer()
        self._registered = registered

    def _settings(self, registration: Registration, mastership: Mastership) -> HASettings:
        return HASettings(
            broker_id=registration.broker_id,
            member=registration.member,
            epoch=mastership.epoch,
            generation=mastership.state.generation,
            heartbeat_ms=max(min(self._session.negotiated_timeout_ms // 6, 1000), 50),
            insync_lag_ms=self._config.insync_lag_ms,
            link_bytes_per_s=self._config.replication_bytes_per_s,
        )

    async def _be_slave(self, decision: RoleDecision) -> None:
        role, reason = self._status.role, decision.reason
        if role.kind is not decision.kind or role.reason != reason:
            level = logging.WARNING if decision.kind is RoleKind.WAITING else logging.INFO
            log.log(level, "%s: %s", self._what, reason)
        link = role.link if isinstance(role, SlaveRole | WaitingRole) else None
        client = link or self._new_client()
        refusal = Fenced(self._what, reason)
        linked = SlaveRole if decision.kind is RoleKind.SLAVE else WaitingRole
        self._exchange(linked(role.epoch, reason, refusal, client), refusal)
        if link is None:
            for partition in self._topics.partitions():
                partition.freeze()  # later each new link does it: a master does not repeat a stable mark
            self._following = asyncio.ensure_future(client.run())
        what = self._session, self._registration().broker_id
        master = await self._master_watch.leave(partial(master_of, *what))
        if decision.kind is not RoleKind.SLAVE:
            master = None
        if master is not None and self._topics.damage():  # without a master the damaged log may be the best copy
            client.follow(None)  # some messages that were acknowledged on this link are lost here
            await self._topics.set_damaged_aside()
        self._folder.incarnation_known()
        registered = self._to_register()
        await register_slave(self._session, self._registration())
        await self._offer()
        if not (master is None and decision.kind is RoleKind.SLAVE and self._is_linked_to_master(client)):
            client.follow(master)
        self._registered = registered

    def _new_client(self) -> HAClient:
        client = HAClient(
            self._registration,
            self._topics,
            self._flusher,
            learner=self._config.learner,
            security=self._session.security.brokers,
            generation=lambda: self._folder.generation,
            known_epoch=lambda: self._folder.epoch,
            begun=self._folder.know_epoch,
            followed=self._folder.follow_generation,
            gave_up=self.successor.gave_up,
            full=lambda: self._status.disk_full,
            changed=self.look_again,
            failed=self._failed,
        )
        if self._is_leaving:
            client.say_goodbye()
        return client

    def _is_linked_to_master(self, client: HAClient) -> bool:
        """Returns True if the link goes to the master of the state.

        A master that is cut off from ZooKeeper only is not registered. It still serves its slaves, and can hand over.
        """
        state = self._state
        if client.master is None or not client.linked:
            return False
        return state is not None and client.master.replica == state.master

    async def _stop_following(self, former: Role) -> None:
        task, self._following = self._following, None
        if isinstance(former, SlaveRole | WaitingRole) and task is not None:
            former.link.follow(None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def offer(self) -> None:
        """Offers the topics to clients: a master to producers and readers, a slave with all messages to readers."""
        async with self._settling:  # of two at once, the one with older counts could write last
            await self._offer()

    async def _offer(self) -> None:
        broker_id, replica, counts = self._registration().broker_id, self._registration().replica, self._topics.counts()
        role = self._status.role
        if isinstance(role, SlaveRole | WaitingRole):
            readable = Counter(partition.topic for partition in role.link.readable)
            counts = {topic: number for topic, number in counts.items() if readable[topic] >= number}
        held = self._mastership if role.kind is RoleKind.MASTER else None
        try:
            await self.offers.make(broker_id, replica, role.kind, counts, held)
        except Fenced:
            self.look_again()

    # -- promotion ----------------------------------------------------------------------------------------------------

    async def promote(self, asked: Promote, noticed: Noticed | None = None) -> Mastership:
        """Makes this replica the master: an operator, a master that stops, or this replica's Successor asks for it.

        It waits for all messages of a live master, but not for a master that has crashed or hangs. `noticed`: set if it
        decided by itself. Raises Fenced (not in sync, without `accept_loss`), ConnectError, and the refusal of a live
        master.
        """
        since = asyncio.get_running_loop().time() if noticed is None else noticed.since
        async with self._settling:
            registration = self._registration()
            if self._status.role.kind is RoleKind.MASTER:
                raise Fenced(self._what, "it is the master already")
            stored, claims = await self._read_all()
            if stored is None:
                raise Fenced(self._what, "the broker id has had no master yet: start replica 0")
            if self._topics.damage():  # its former acknowledgements must not count any more
                self._folder.raise_incarnation("a log is damaged")
                registration = self._registration()
            state, version = stored
            if asked.epoch not in (0, state.epoch):
                raise Fenced(self._what, f"epoch {state.epoch} has begun meanwhile")
            was_taken_back = taken_back(known(stored), [registration.claim, *claims])
            in_sync = registration.member in state.insync and not was_taken_back
            handed_over, registered = False, self._to_register()
            if not in_sync and not asked.accept_loss and not was_taken_back:
                raise Fenced(self._what, "it is not in the in-sync set, and messages would be lost")
            self._folder.check_writable()  # otherwise no replica would be the master
            if in_sync:
                handed_over = await self._is_handed_over(state)
            if noticed is not None and not noticed.is_gone and not handed_over:
                raise Fenced(self._what, "the master did not hand over")
            self.successor.attempt = Attempt(state, asked, noticed, since, has_lost=not in_sync)
            mastership = await take_over(
                self._session, registration, state, version, claims,
                accept_loss=asked.accept_loss, handed_over=handed_over and not asked.master_stops,
            )  # fmt: skip
            if isinstance(mastership, Refused):
                raise Fenced(self._what, "the state has changed meanwhile: run `metamq ha status` again")
            try:
                await self._begin_epoch(mastership, registered)
            except SHORTAGES:
                self.look_again()  # this replica is the master, and begins its epoch again
                raise
            return mastership

    async def _is_handed_over(self, state: BrokerState) -> bool:
        """Asks a live master to hand over. Returns True if it stopped writing and this replica holds all messages.

        A link that is down does not show that the master has crashed, while the master is registered. Raises the
        refusal of a live master, and ConnectError if ZooKeeper does not answer.
        """
        for _ in range(2):
            role = self._status.role
            if not isinstance(role, SlaveRole | WaitingRole):
                return False
            client = role.link
            if not client.linked:
                master = await master_of(self._session, self._registration().broker_id)
                if master is None or master.replica != state.master:
                    return False
                client.follow(master)
                await client.attempts.outcome(LINK_UP_S)
            if not client.linked or client.epoch != state.epoch:  # a later master must not stop its writes for this
                return False
            try:
                await client.hand_over(HAND_OVER_MS)
                return True
            except Timeout as error:  # the master hangs
                log.warning("%s: the master does not hand over: %s", self._what, error)
                return False
            except ConnectError as error:  # the master has just crashed, or the link broke
                log.warning("%s: the link broke before the master had handed over: %s", self._what, error)
        return False

    # -- callbacks of the parts ---------------------------------------------------------------------------------------

    def _may_believe(self) -> bool:
        """Returns True if no other replica can be the master, by the clocks; or only by an accepted loss."""
        return not self._has_others or self._lease.valid(self._longer_s())

    def _longer_s(self) -> float:
        role = self._status.role
        is_alone = isinstance(role, MasterRole) and role.service.nobody_can_take_over
        return self._config.alone_lease_s if is_alone else 0.0

    def _zookeeper_answers(self) -> bool:
        return self._session.state is SessionState.CONNECTED and self._lease.valid()

    async def _is_own_epoch(self) -> bool:
        """Returns False if this master does not find its epoch in the state, or finds an older state than it knows."""
        role, version = self._status.role, self._folder.state_version
        if role.kind is not RoleKind.MASTER:
            return True
        with contextlib.suppress(CorruptData):
            stored = await read_state(self._session, self._registration().broker_id)
            if stored is not None and stored[0].epoch == role.epoch and stored[1] >= version:
                return True
        return False

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
        stored = await read_state(self._session, self._registration().broker_id)
        if stored is None:
            raise ConnectError("ZooKeeper", f"the state of broker {self._registration().broker_id} is gone")
        self._hold(*stored)
        return stored

    def _hold(self, state: BrokerState, version: int) -> None:
        """Notes the state in ZooKeeper if it still has this master's epoch."""
        if state.epoch == self._status.role.epoch and version >= self._folder.state_version:
            self._know(Mastership(self._registration().broker_id, state, version))

    def _know(self, held: Mastership) -> None:
        """Stores a newer state of the own epoch durably before any use of it, see metamq.zk.cluster.epochs."""
        try:
            self._folder.know_epoch(held.epoch, held.version)
        except StorageError as error:
            if not isinstance(error, SHORTAGES):  # after a shortage the caller asks again
                self._failed(error)
            raise
        self._mastership = held

    def _log_failed(self, partition: Partition, error: MetamqError) -> None:
        if isinstance(error, CorruptData):
            self._topics.is_damaged(partition, error)
        elif isinstance(error, SHORTAGES):  # after a shortage the slave asks again
            log.warning("%s", error)
        else:
            self._failed(error)

    def _damaged(self) -> None:
        self._status.role.damaged()
        self.look_again()

    def readiness(self) -> str:
        """Returns the reason why clients are not fully served; empty: they are."""
        if self._registered[0] != self._session.generation:
            return "not registered in ZooKeeper"
        role = self._status.role
        if role.kind is RoleKind.WAITING:
            return role.reason
        if isinstance(role, SlaveRole) and not role.link.linked:
            return "not linked to its master"
        over_s = self._lease.over_s()
        if over_s is None:
            return ""
        means = "whether this replica is registered is not known"
        if role.kind is RoleKind.MASTER and self._has_others:
            left_s = self._longer_s() - over_s
            means = f"writes are taken for {left_s:.0f} s more" if self._may_believe() else "writes are refused"
        return f"ZooKeeper does not answer, and the lease ended {over_s:.0f} s ago: {means}"

    def say_goodbye(self) -> None:
        """Informs the master that this broker is going to stop. This replica begins no other link."""
        self._is_leaving = True
        role = self._status.role
        if isinstance(role, SlaveRole | WaitingRole):
            role.link.say_goodbye()

    async def close(self) -> None:
        """Waits for a running promotion, which ends soon after the session is closed, and ends the role's work."""
        async with self._settling:
            await self._stop_following(self._leave_role(Fenced(self._what, "it is stopping")))
        await self.successor.close()
        await self._lease.close()

    def statistics(self) -> dict[str, Any]:
        """Returns figures for `ha status`, STATS and metrics. Any thread."""
        role = self._status.role
        return {
            "replica": self._registration().replica,
            "role": role.kind.value,
            "reason": role.reason,
            "epoch": role.followed_epoch,
            "known_epoch": self._folder.epoch,
            **self.successor.statistics(),
            **role.statistics(),
        }
