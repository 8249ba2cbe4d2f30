"""A group member at work: it joins, agrees on a plan with the other members, and follows the plan.

One task does all checks and decisions. Watches, state changes and finished work only request another check. One check
serves all requests that came before it. A round agrees on the plan (`group_plan`), then takes the steps from this
member's partitions to those that the plan gives it (`holdings`):

    revoke    the handler finishes its in-flight messages; in the background, so one slow message delays nothing else
    release   commit the last offsets, delete the owner nodes
    claim     create the owner nodes; if another member is still the owner, wait until its node is gone, never steal
    start     read the offsets from the storage, pass the partitions to the handler; in the background

An error ends a round, not the task: it tries again without a limit, after a pause that grows up to 5 s. While the
connection is down the member keeps its partitions; the consumer continues until its lease ends. A lost session ends all
holdings: the handler is notified at once, and the member joins again in the next session.
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
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from metamq import __version__
from metamq.client.group.assignment import AssignedPartition, AssignmentHandler, Obstacle, RebalanceHealth
from metamq.client.group.beats import Beats, News, write_news
from metamq.client.group.group_plan import CannotStay, GroupPlan
from metamq.client.group.holdings import Holdings, Lack
from metamq.client.group.rebalance_decisions import Phase, has_no_topic, hint_for_idle, why_idle
from metamq.client.group.strategies import check_strategy
from metamq.client.net import outages
from metamq.client.net.missing_topics import MissingTopics
from metamq.client.net.peers import EXPIRY_MARGIN_MS, Peers
from metamq.client.signal import Signal
from metamq.errors import ClosedError, ConfigError, MetamqError, Timeout
from metamq.words import count
from metamq.zk.cluster.topics import TopicStore
from metamq.zk.errors import NoNode
from metamq.zk.groups import members
from metamq.zk.groups.members import Member
from metamq.zk.groups.ownership import KeptElsewhere
from metamq.zk.names import check_consumer, check_group, is_pattern
from metamq.zk.session.session import SessionState

if TYPE_CHECKING:
    from metamq.client.offsets.offsets import CommitRequest, OffsetStorage
    from metamq.zk.groups.plans import Plan
    from metamq.zk.partitions import TopicPartition
    from metamq.zk.session.lease import Lease
    from metamq.zk.session.session import Session

__all__ = ["AssignedPartition", "AssignmentHandler", "RebalanceHealth", "ZKLoadRebalanceListener"]

log = logging.getLogger("metamq.client")

BEAT_S = 10.0
"""Seconds between two updates of a member's node, if its state has changed."""

RETRY_MS_MIN = 50
RETRY_MS_MAX = 5_000


class ZKLoadRebalanceListener:
    """Keeps one consumer's share of a group's partitions. Not thread-safe: for the loop in which it is started.

    `topics` are the subscribed topics, by name or pattern. `storage` keeps the offsets. The caller closes `storage`,
    `session` and `lease`. The lease is only reported here; the code that delivers messages checks it. Raises
    ConfigError for a wrong group, consumer id or strategy.
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
        self._log = logging.LoggerAdapter(log, {"group": group, "consumer": consumer_id})
        self._topics = tuple(sorted(set(topics)))
        self._names = [topic for topic in self._topics if not is_pattern(topic)]
        self._strategy = check_strategy(strategy)
        self._handler = handler
        self._lease = lease
        self._look = Signal()
        self._group_plan = GroupPlan(session, group, consumer_id, self._topics, strategy, self._look.set)
        self._holdings = Holdings(
            session, group, consumer_id, storage, handler, changed=self._look.set, failed=self._try_again_later
        )
        self._plan: Plan | None = None
        self._peers = Peers(session, group, consumer_id, self._topics)
        self._unsettled_since: float | None = time.monotonic()
        self._lack: Lack | None = None
        self._missing = MissingTopics(f"{consumer_id} of group {group}", self._names)
        self._joined_in = 0
        self._written: Member | None = None
        self._signed = 0
        """The group generation at the last update of the member's node."""
        self._since_ms = self._progress_ms = _now_ms()
        self._failures = 0
        self._last_error = ""
        self._idle_reason = ""
        self._is_failed = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._remove_state_listener: Callable[[], None]
        self._end_beats: Callable[[], None]

    # Starting and stopping

    async def start(self) -> None:
        """Joins the group. From then on the handler receives partitions.

        If another process has this consumer id, waits for as long as that process's session may last. Raises
        TopicNotFound; ConfigError if the group uses another strategy or the consumer id is in use; ConnectionLost.
        After an error nothing is left in ZooKeeper.
        """
        topic_store = TopicStore(self._session)
        for topic in self._names:
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
        self._end_beats = Beats.begin(self._session, self._news, BEAT_S)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Leaves the group: waits for in-flight messages, commits, releases everything. May be repeated.

        `timeout_s` limits the writes to ZooKeeper and the storage, in seconds, but not the handler. Close the session
        afterwards. Then, when ZooKeeper answers, partitions whose last offset was not written in time go to the next
        owner, uncommitted.
        """
        if self._task is None:
            return
        self._stopping = True
        self._end_beats()
        self._look.set()
        await self._task
        self._task = None
        # First of all: the others can then plan while this member drains. They wait for each partition in any case.
        leaving = asyncio.create_task(self._within(timeout_s, self._leave))
        await self._holdings.drain()
        await leaving
        await self._within(timeout_s, self._holdings.release_all)
        self._remove_state_listener()
        self._holdings.lose_all()

    async def _leave(self) -> None:
        await members.leave(self._session, self._group, self._id)

    async def _within(self, timeout_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Repeats `work` until it is done or the time is over."""
        error: MetamqError | None = None
        failures = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not isinstance(error, ClosedError):
                    try:
                        return await work()
                    except MetamqError as failure:
                        error = failure
                    failures += 1
                    await asyncio.sleep(_pause_s(failures))
        reason = error or "no answer in time"
        self._log.warning(
            "group %s: the others see %s leave only when its client is closed and ZooKeeper answers, or when its "
            "session ends: %s", self._group, self._id, reason,
        )  # fmt: skip

    # Called by the consumer

    def partition_names(self, topic: str) -> Sequence[str] | None:
        """See `Assignment.partition_names`."""
        if self._plan is None:
            return None
        given = self._plan.inputs.topics.get(topic)
        return given.partition_names if given is not None else ()

    async def commit(self, requests: Sequence[CommitRequest]) -> dict[TopicPartition, MetamqError]:
        """Commits. Returns what was refused: OwnershipLost, or an error after which the commit can be repeated.

        The claims in the requests may be the assigned ones. One request per partition. Safe to cancel: a commit without
        an answer may be done.
        """
        return await self._holdings.commit(requests)

    def unsettled(self) -> Obstacle | None:
        """See `Assignment.unsettled`. Waits for partitions of a possibly crashed member until its session ends."""
        now, since = time.monotonic(), self._unsettled_since
        is_joined = self._joined_in == self._session.generation and not self._look.is_set()
        if self._is_failed or (since is None and is_joined):
            return None
        patience_s = outages.PATIENCE_S + max(
            (member.session_timeout_ms / 1000 for member in self._group_plan.present.values()),
            default=self._session.negotiated_timeout_ms / 1000,
        )
        what, lack = f"joining group {self._group!r}", self._lack
        if lack is not None:
            owner = f", which {lack.owner!r} still owns," if lack.owner else ""
            what = f"getting {count(lack.partitions, 'partition')} of group {self._group!r}, {lack.first} first{owner}"
            if lack.with_application:
                patience_s = inf
        if self._last_error:
            what += f" ({self._last_error})"
        hint = f"`metamq group describe {self._group}` shows its members, and the owner of each partition."
        return Obstacle(Timeout(what, patience_s, hint=hint), max(since or now, self._holdings.moved_at), patience_s)

    async def confirm(self) -> Obstacle | None:
        """See `Assignment.confirm`."""
        requested_at = time.monotonic()
        await self._session.sync()  # watches fire before the answer
        if self._plan is None or (found := self.unsettled()) is not None:
            return found or Obstacle(Timeout("making a plan", outages.PATIENCE_S), requested_at, outages.PATIENCE_S)
        unproven = await self._peers.unproven(self._plan, await self._group_plan.read_present())
        if unproven is None:
            return None
        name = unproven if isinstance(unproven, str) else unproven.consumer_id
        # At the latest when its session would expire, the member has proved that it is alive, or its node is gone.
        return Obstacle(Timeout(f"waiting for a sign of life of {name!r}", inf), requested_at, inf)

    async def publish(self, done: Mapping[TopicPartition, int]) -> None:
        """See `Assignment.publish`."""
        try:
            await self._holdings.publish(done)
        except MetamqError as error:
            log.debug("group %s: the progress of %s is not published: %s", self._group, self._id, error)

    def note_progress(self) -> None:
        """Notes the time of progress for other processes: a message is done, or there is no message to process."""
        self._progress_ms = _now_ms()

    def health(self) -> RebalanceHealth:
        """Returns the state of this member in its group."""
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
        try:
            while not self._stopping:
                await self._look.wait()
                self._look.clear()
                if not self._stopping and self._session.state is SessionState.CONNECTED:
                    self._unsettled_since = self._unsettled_since or time.monotonic()
                    await self._try_round()
                if self._owes_sign() and (news := self._news()) is not None:
                    await write_news(self._session, [news])
        except CannotStay as verdict:
            await self._fail(verdict.error)

    async def _try_round(self) -> None:
        try:
            is_settled = await self._round()
        except CannotStay:
            raise
        except KeptElsewhere as error:
            raise CannotStay(error) from None
        except Exception as error:
            self._try_again_later(error)
        else:
            self._failures = 0
            self._last_error = ""
            if is_settled:
                self._unsettled_since = None

    async def _round(self) -> bool:
        """Returns True if this member has all that the plan for the present members gives it."""
        generation = self._session.generation
        if self._joined_in != generation:
            self._holdings.lose_all()
            await self._join()
            self._joined_in = generation
        self._plan, is_final = await self._group_plan.agree(generation)
        if self._plan is None:
            return False
        self._missing.look(self._plan.inputs.topics)
        await self._holdings.follow(self._plan)
        self._lack = self._holdings.lack(self._plan)
        self._warn_if_idle(self._plan)
        return is_final and self._lack is None

    def _try_again_later(self, error: Exception) -> None:
        self._failures += 1
        if str(error) != self._last_error:
            trace = None if isinstance(error, MetamqError) else error
            self._log.warning("group %s: %s continues after: %s", self._group, self._id, error, exc_info=trace)
        self._last_error = str(error)
        asyncio.get_running_loop().call_later(_pause_s(self._failures), self._look.set)

    def _on_state(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._holdings.lose_all()
        if state is SessionState.CONNECTED:
            self._peers.restart_wait()
        self._look.set()

    async def _fail(self, error: MetamqError) -> None:
        self._log.info("group %s: %s stops: %s", self._group, self._id, error)  # the handler gets the error
        self._is_failed = True
        self._end_beats()
        self._last_error = str(error)
        try:
            await self._holdings.drop_all()
            await members.leave(self._session, self._group, self._id)
        except MetamqError as late:
            self._log.warning(
                "group %s: %s keeps its nodes until its client is closed and ZooKeeper answers: %s",
                self._group, self._id, late,
            )  # fmt: skip
        self._handler.failed(error)

    def _warn_if_idle(self, plan: Plan) -> None:
        """Warns once when the member becomes idle. The numbers may change often, and health() has them."""
        reason = "" if self._holdings else why_idle(self._id, plan)
        is_known = bool(self._names) and has_no_topic(self._id, plan)  # each was deleted, which was a warning
        if reason and not self._idle_reason and not is_known:
            hint = hint_for_idle(self._id, plan)
            self._log.warning("group %s: %s has no partition: %s. %s", self._group, self._id, reason, hint)
        self._idle_reason = reason

    # Joining

    async def _join_patiently(self) -> None:
        deadline: float | None = None
        left = asyncio.Event()
        while (other := await self._try_to_join(left.set)) is not None:
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
        other = await self._try_to_join(self._look.set)
        if other is not None:
            raise self._in_use(other)

    async def _try_to_join(self, left: Callable[[], None]) -> Member | None:
        self._written = self._myself()
        other = await members.join(self._session, self._group, self._written, left=left)
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
        """Returns True if members that joined later may not know that this one is alive; see
        metamq.client.net.peers."""
        return self._plan is not None and self._plan.generation != self._signed and len(self._plan.inputs.members) > 1

    def _news(self) -> News | None:
        """Returns the content for this member's node, if it has changed. After an error the next beat repeats it."""
        myself = self._myself()
        if (myself == self._written and not self._owes_sign()) or self._joined_in != self._session.generation:
            return None
        generation = self._plan.generation if self._plan else 0
        return News(self._group, myself, partial(self._beaten, myself, generation))

    def _beaten(self, myself: Member, generation: int, error: MetamqError | None) -> None:
        if error is None:
            self._written = myself
            self._signed = generation
        elif isinstance(error, NoNode):
            self._group_plan.forget()
            self._look.set()
        else:
            log.debug("group %s: the node of %s is not updated: %s", self._group, self._id, error)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _pause_s(failures: int) -> float:
    """Returns the seconds to wait after this number of consecutive failures: doubled, limited, and random."""
    ceiling_ms = min(RETRY_MS_MIN << min(failures, 10), RETRY_MS_MAX)
    return random.uniform(0.5, 1.0) * ceiling_ms / 1000
