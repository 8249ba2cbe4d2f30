"""A group member at work: it joins, agrees on a plan with the others, and follows it.

One task does all the looking and deciding. Watches, state changes and finished work do no more than ask it to look
again; however many ask meanwhile, it looks once. A round agrees on the plan (`group_plan`), then takes the steps from
what this member holds to what the plan gives it (`holdings`):

    revoke    the handler finishes what it has in hand; in the background, so one slow message holds up nothing else
    release   commit the last offsets, delete the owner nodes
    claim     create the owner nodes; where another member is still the owner, wait for its node to go, never steal
    start     ask the storage for the offsets, hand the partitions to the handler; in the background

Errors end a round, not the task: it tries again, after a pause that grows up to 5 s, for as long as it takes. While the
connection is down nothing is given up; the consumer goes on until its lease ends. A lost session is the end of all that
was held: the handler is told at once, and the member joins again in the next session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from metamq import __version__
from metamq.client.group.assignment import AssignedPartition, AssignmentHandler, Obstacle, RebalanceHealth
from metamq.client.group.group_plan import CannotStay, GroupPlan
from metamq.client.group.holdings import Holdings, Lack
from metamq.client.group.rebalance_decisions import Phase, why_idle
from metamq.client.group.strategies import check_strategy
from metamq.client.net import outages
from metamq.client.net.missing_topics import MissingTopics
from metamq.client.net.peers import EXPIRY_MARGIN_MS, Peers
from metamq.client.offsets.offsets import CommitRequest, OffsetStorage
from metamq.errors import ClosedError, ConfigError, MetamqError, Timeout
from metamq.words import count
from metamq.zk.cluster.topics import TopicStore
from metamq.zk.errors import NoNode
from metamq.zk.groups import members
from metamq.zk.groups.members import Member
from metamq.zk.groups.plans import Plan
from metamq.zk.names import check_consumer, check_group
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.session import SessionState

if TYPE_CHECKING:
    from metamq.zk.session.lease import Lease
    from metamq.zk.session.session import Session

__all__ = ["AssignedPartition", "AssignmentHandler", "RebalanceHealth", "ZKLoadRebalanceListener"]

log = logging.getLogger("metamq.client")

BEAT_S = 10.0
"""How often a member tells how it is doing, if that has changed."""

RETRY_MS_MIN = 50
RETRY_MS_MAX = 5_000


class ZKLoadRebalanceListener:
    """Keeps one consumer's share of a group's partitions. Belongs to the loop it is started in; not thread-safe.

    `topics`: names subscribed to. `storage` keeps the offsets and stays the caller's to close, as do `session` and
    `lease`; the lease is only reported on, who delivers messages checks it. Raises ConfigError for a group, consumer id
    or strategy that cannot be.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        consumer_id: str,
        topics: Collection[str],
        strategy: str,
        storage: OffsetStorage,
        handler: AssignmentHandler,
        lease: Lease,
    ) -> None:
        self._session = session
        self._group = check_group(group)
        self._id = check_consumer(consumer_id)
        self._topics = tuple(sorted(set(topics)))
        self._strategy = check_strategy(strategy)
        self._handler = handler
        self._lease = lease
        self._look = asyncio.Event()
        self._group_plan = GroupPlan(session, group, consumer_id, strategy, self._look.set)
        self._holdings = Holdings(
            session, group, consumer_id, storage, handler, changed=self._look.set, failed=self._try_again_later
        )
        self._plan: Plan | None = None
        self._peers = Peers(session, group, consumer_id, self._topics)
        self._unsettled_since: float | None = time.monotonic()
        self._lack: Lack | None = None
        self._missing = MissingTopics(f"{consumer_id} of group {group}", self._topics)
        self._joined_in = 0
        self._told: Member | None = None
        self._signed = 0
        """The plan at which it last told of itself."""
        self._since_ms = self._progress_ms = _now_ms()
        self._failures = 0
        self._last_error = ""
        self._idle_reason = ""
        self._is_failed = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._remove_state_listener: Callable[[], None]

    # Starting and stopping

    async def start(self) -> None:
        """Join the group; partitions come to the handler from then on.

        Waits while another process has this consumer id, for as long as that one's session may outlive it.
        Raises TopicNotFound; ConfigError when the group uses another strategy or the consumer id is in use;
        ConnectionLost. Nothing is left behind then.
        """
        topic_store = TopicStore(self._session)
        for topic in self._topics:
            await topic_store.get(topic)
        try:
            await self._join_patiently()
            await self._group_plan.check()
        except BaseException as error:
            with contextlib.suppress(MetamqError):
                await members.leave(self._session, self._group, self._id)
            if isinstance(error, CannotStay):
                raise error.error from None
            raise
        self._remove_state_listener = self._session.on_state(self._on_state)
        self._look.set()
        self._task = asyncio.create_task(self._run(), name=f"metamq-rebalance-{self._group}")

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Leave the group: wait for what is in hand, commit it, release everything. May be repeated.

        `timeout_s` bounds what is to be written to ZooKeeper and the storage, not the handler. What could not be
        written in time goes to the next owner, uncommitted, when the session ends: close it.
        """
        if self._task is None:
            return
        self._stopping = True
        self._look.set()
        await self._task
        self._task = None
        # First of all, so that the others plan while we drain: they wait for each partition all the same.
        leaving = asyncio.create_task(self._within(timeout_s, self._leave))
        await self._holdings.drain()
        await leaving
        await self._within(timeout_s, self._holdings.release_all)
        self._remove_state_listener()
        self._holdings.lose_all()

    async def _leave(self) -> None:
        await members.leave(self._session, self._group, self._id)

    async def _within(self, timeout_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat `work` until it is done or the time is over."""
        error: MetamqError | None = None
        failures = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not isinstance(error, ClosedError):
                    try:
                        return await work()
                    except MetamqError as trouble:
                        error = trouble
                    failures += 1
                    await asyncio.sleep(_pause_s(failures))
        reason = error or "no answer in time"
        log.warning("group %s: %s is gone for the others only when its session ends: %s", self._group, self._id, reason)

    # What the consumer calls

    def partition_names(self, topic: str) -> Sequence[str] | None:
        """See `Assignment.partition_names`."""
        if self._plan is None:
            return None
        given = self._plan.inputs.topics.get(topic)
        return given.partition_names if given is not None else ()

    async def commit(self, requests: Sequence[CommitRequest]) -> dict[TopicPartition, MetamqError]:
        """Commit, and give what was refused: OwnershipLost, or an error after which the same can be committed again.

        The claims in the requests may be those that were assigned. One request per partition. Safe to cancel: what was
        under way may be committed.
        """
        return await self._holdings.commit(requests)

    def unsettled(self) -> Obstacle | None:
        """See `Assignment.unsettled`. Partitions of a member that may be dead are waited for until its session ends."""
        now, since = time.monotonic(), self._unsettled_since
        is_joined = self._joined_in == self._session.generation and not self._look.is_set()
        if self._is_failed or (since is None and is_joined):
            return None
        patience_s = outages.PATIENCE_S + max(
            (member.session_timeout_ms / 1000 for member in self._group_plan.present.values()), default=0.0
        )
        what, lack = f"joining group {self._group!r}", self._lack
        if lack is not None:
            owner = f", which {lack.owner!r} still owns," if lack.owner not in ("", "nobody") else ""
            what = f"getting {count(lack.partitions, 'partition')} of group {self._group!r}, {lack.first} first{owner}"
            if lack.with_application:
                patience_s = inf
        if self._last_error:
            what += f" ({self._last_error})"
        hint = f"`metamq group describe {self._group}` shows its members, and who owns what."
        return Obstacle(Timeout(what, patience_s, hint=hint), max(since or now, self._holdings.moved_at), patience_s)

    async def confirm(self) -> Obstacle | None:
        """See `Assignment.confirm`."""
        asked_at = time.monotonic()
        await self._session.sync()  # watches that fire are heard of before the answer
        if self._plan is None or (found := self.unsettled()) is not None:
            return found or Obstacle(Timeout("making a plan", outages.PATIENCE_S), asked_at, outages.PATIENCE_S)
        unproven = await self._peers.unproven(self._plan, self._group_plan.present)
        if unproven is None:
            return None
        name = unproven if isinstance(unproven, str) else unproven.consumer_id
        # It is shown to live, or its node goes, when its session would be over.
        return Obstacle(Timeout(f"waiting for a sign of life of {name!r}", inf), asked_at, inf)

    async def publish(self, done: Mapping[TopicPartition, int]) -> None:
        """See `Assignment.publish`."""
        try:
            await self._holdings.publish(done)
        except MetamqError as error:
            log.debug("group %s: how far %s is is not published: %s", self._group, self._id, error)

    def note_progress(self) -> None:
        """To be called whenever a message is done or there is none: others see the time of it."""
        self._progress_ms = _now_ms()

    def health(self) -> RebalanceHealth:
        """How this member stands in its group."""
        return RebalanceHealth(
            state=self._state_name(),
            plan_generation=self._plan.generation if self._plan else None,
            strategy=self._strategy,
            assigned=self._holdings.in_phase(Phase.CONSUMING),
            revoking=self._holdings.in_phase(Phase.REVOKING, Phase.RELEASING),
            waiting=dict(self._holdings.waiting),
            idle_reason=self._idle_reason,
            last_error=self._last_error,
            lease_ms=self._lease.remaining_ms(),
        )

    def _state_name(self) -> str:
        if self._is_failed:
            return "failed"
        if self._task is None:
            return "stopped"
        if self._session.state is not SessionState.CONNECTED:
            return "cut off from ZooKeeper"
        return "member" if self._joined_in == self._session.generation else "joining"

    # The task

    async def _run(self) -> None:
        beat_due = time.monotonic() + BEAT_S
        try:
            while not self._stopping:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(beat_due - time.monotonic(), 0)):
                        await self._look.wait()
                self._look.clear()
                if not self._stopping and self._session.state is SessionState.CONNECTED:
                    self._unsettled_since = self._unsettled_since or time.monotonic()
                    await self._try_round()
                if time.monotonic() >= beat_due or self._owes_sign():
                    await self._beat()
                    beat_due = time.monotonic() + BEAT_S
        except CannotStay as verdict:
            await self._fail(verdict.error)

    async def _try_round(self) -> None:
        try:
            await self._round()
        except CannotStay:
            raise
        except Exception as error:
            self._try_again_later(error)
        else:
            self._failures = 0
            self._last_error = ""
            if self._lack is None:
                self._unsettled_since = None

    async def _round(self) -> None:
        generation = self._session.generation
        if self._joined_in != generation:
            self._holdings.lose_all()
            await self._join()
            self._joined_in = generation
        self._plan = await self._group_plan.agree(generation)
        self._missing.look(self._plan.inputs.topics)
        await self._holdings.follow(self._plan)
        self._lack = self._holdings.lack(self._plan)
        self._tell_if_idle(self._plan)

    def _try_again_later(self, error: Exception) -> None:
        self._failures += 1
        if str(error) != self._last_error:
            trace = None if isinstance(error, MetamqError) else error
            log.warning("group %s: %s goes on after: %s", self._group, self._id, error, exc_info=trace)
        self._last_error = str(error)
        asyncio.get_running_loop().call_later(_pause_s(self._failures), self._look.set)

    def _on_state(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._holdings.lose_all()
        if state is SessionState.CONNECTED:
            self._peers.restart_wait()
        self._look.set()

    async def _fail(self, error: MetamqError) -> None:
        log.info("group %s: %s stops: %s", self._group, self._id, error)  # the handler gets the error
        self._is_failed = True
        self._last_error = str(error)
        try:
            await self._holdings.drop_all()
            await members.leave(self._session, self._group, self._id)
        except MetamqError as late:
            log.warning("group %s: %s keeps its nodes until its session ends: %s", self._group, self._id, late)
        self._handler.failed(error)

    def _tell_if_idle(self, plan: Plan) -> None:
        """Once when it begins: the numbers may change often while members come and go, and health() has them."""
        reason = "" if self._holdings else why_idle(self._id, plan)
        if reason and not self._idle_reason and plan.inputs.topics.keys() & set(self._topics):  # else they were deleted
            hint = "Add partitions, or start no more members than there are partitions"
            log.warning("group %s: %s has no partition: %s. %s", self._group, self._id, reason, hint)
        self._idle_reason = reason

    # Joining

    async def _join_patiently(self) -> None:
        deadline: float | None = None
        left = asyncio.Event()
        while (other := await self._try_to_join(left)) is not None:
            patience_s = (other.session_timeout_ms + EXPIRY_MARGIN_MS) / 1000
            deadline = deadline or time.monotonic() + patience_s
            if time.monotonic() >= deadline:
                raise self._in_use(other)
            log.info("%s, waiting for the end of its session", self._in_use(other).problem)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await left.wait()
            left.clear()
        self._joined_in = self._session.generation
        self._peers.restart_wait()

    async def _join(self) -> None:
        other = await self._try_to_join(self._look)
        if other is not None:
            raise self._in_use(other)

    async def _try_to_join(self, left: asyncio.Event) -> Member | None:
        self._told = self._myself()
        other = await members.join(self._session, self._group, self._told, left=left.set)
        self._group_plan.forget()
        return other

    def _in_use(self, other: Member) -> ConfigError:
        return ConfigError(
            f"consumer id {self._id!r} in group {self._group!r} is in use by process {other.pid} on {other.host}",
            hint="Give each consumer its own id, or leave it out.",
        )

    def _myself(self) -> Member:
        return Member(
            self._id,
            topics=self._topics,
            strategy=self._strategy,
            host=socket.gethostname(),
            pid=os.getpid(),
            since_ms=self._since_ms,
            progress_ms=self._progress_ms,
            assigned=len(self._holdings.in_phase(Phase.CONSUMING)),
            version=__version__,
            session_timeout_ms=self._session.negotiated_timeout_ms,
        )

    def _owes_sign(self) -> bool:
        """Whether members that have joined since do not know yet that this one lives; see metamq.client.net.peers."""
        return self._plan is not None and self._plan.generation != self._signed and len(self._plan.inputs.members) > 1

    async def _beat(self) -> None:
        """Tell how we are doing; a beat that fails is made up for by the next one."""
        myself, owes = self._myself(), self._owes_sign()
        if (myself == self._told and not owes) or self._joined_in != self._session.generation:
            return
        try:
            await members.beat(self._session, self._group, myself)
            self._told = myself
            self._signed = self._plan.generation if self._plan else 0
        except NoNode:
            self._group_plan.forget()
            self._look.set()
        except MetamqError as error:
            log.debug("group %s: no beat of %s: %s", self._group, self._id, error)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _pause_s(failures: int) -> float:
    """How long to wait after so many failures in a row: doubling, capped, and spread so that members do not march."""
    ceiling_ms = min(RETRY_MS_MIN << min(failures, 10), RETRY_MS_MAX)
    return random.uniform(0.5, 1.0) * ceiling_ms / 1000
