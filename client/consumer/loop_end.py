"""The end of a loop with `idle_timeout_s`: the end of the data, never an outage.

A loop to which nothing came for its idle time ends only when all of this holds:

    ZooKeeper   answers: the lease holds, and an answer after the idle time brings no news
    the plan    is known, all that it gives to this consumer is consumed, and the other members live
    brokers     answer, and say after the idle time that nothing is stored behind what was read

What is missing of it is an obstacle. No idle time passes while there is one, and one that lasts longer than its
patience is raised. `decide` is the whole rule; `LoopEnd` collects what it is given.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from metamq.client.fetch.inbox import Inbox, PartitionState
from metamq.client.fetch.start_offsets import OffsetFinder
from metamq.client.group.assignment import Assignment, Obstacle
from metamq.client.net import outages
from metamq.client.net.outages import Outages
from metamq.errors import ConnectError, MetamqError, Timeout
from metamq.words import count
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.lease import Lease

log = logging.getLogger("metamq.client")

LOOK_S = 0.1
"""How often is looked whether an obstacle is gone."""
ASK_AGAIN_S = 0.25
"""The pause between two questions for the end."""
AT_ONCE_S = 2.0
"""A question asked later than this after that pause is not about the same doubt."""

HANDLED = Timeout("another thread's message", inf)
"""Takes as long as it likes; never raised."""


class LoopStep(enum.Enum):
    """What a loop that got nothing does."""

    WAIT = "wait, then look again"
    ASK = "ask ZooKeeper and the brokers whether this is the end"
    RAISE = "end with the obstacle's error"


class LoopDecision(NamedTuple):
    """The step; how long to wait; since when the loop is idle, as the next look is to be told."""

    step: LoopStep
    wait_s: float
    idle_since: float


def is_over(obstacle: Obstacle, now: float) -> bool:
    """Whether its patience is over."""
    return now - obstacle.since >= obstacle.patience_s


def decide(
    now: float,
    idle_timeout_s: float,
    idle_since: float,
    obstacle: Obstacle | None,
    doubt: Obstacle | None,
    ask_from: float,
) -> LoopDecision:
    """What a loop does. `doubt`: what the last question for the end left open; the next is asked from `ask_from` on.

    obstacle   doubt   patience over   idle time over   step
    any of the two     yes             -                RAISE
    yes        -       no              -                WAIT, and the idle time begins anew
    no         -       no              no               WAIT for the rest of it
    no         -       no              yes              ASK, after a pause where a doubt was left
    """
    if any(each is not None and is_over(each, now) for each in (obstacle, doubt)):
        return LoopDecision(LoopStep.RAISE, 0.0, idle_since)
    if obstacle is not None:
        return LoopDecision(LoopStep.WAIT, LOOK_S, now)
    wait_s = max(idle_since + idle_timeout_s, ask_from) - now
    return LoopDecision(LoopStep.WAIT if wait_s > 0 else LoopStep.ASK, wait_s, idle_since)


class LoopEnd:
    """A consumer's. `confirm` and `tell` are the loop's, the rest is for any thread."""

    def __init__(
        self,
        servers: str,
        lease: Lease,
        inbox: Inbox,
        assignment: Assignment,
        outages: Outages,
        finder: OffsetFinder,
        *,
        pauses: bool,
    ) -> None:
        """`pauses`: the consumer hands out nothing without the lease, and says so itself."""
        self._servers = servers
        self._lease = lease
        self._inbox = inbox
        self._assignment = assignment
        self._outages = outages
        self._finder = finder
        self._pauses = pauses
        self._placing: dict[PartitionState, None] = {}
        self._placed_at = time.monotonic()
        self._turn = asyncio.Lock()
        self._doubt: Obstacle | None = None
        self._doubted_at: Mapping[TopicPartition, int] | None = {}
        self._asked_at = 0.0
        self._ask_from = 0.0
        self._is_told = False

    # What the consumer notes

    def is_placing(self, state: PartitionState) -> None:
        """Where to begin with the partition is to be found."""
        self._placing[state] = None
        self._placed_at = time.monotonic()

    def placed(self, state: PartitionState) -> None:
        """It is found, or the partition is given up."""
        self._placing.pop(state, None)
        self._placed_at = time.monotonic()

    def tell(self) -> None:
        """Warns of what lasts; outages of brokers and a pause are told elsewhere."""
        found = self._assignment.unsettled() or (None if self._pauses else self._zookeeper_away())
        if found is None and time.monotonic() - self._ask_from < AT_ONCE_S:  # a loop waits for it
            found = self._doubt if self._doubt is not None and self._doubt.error is not HANDLED else None
        if found is None and self._is_told:
            log.info("all that is to be read can be read again")
            self._is_told = False
        elif found is not None and not self._is_told and time.monotonic() - found.since >= outages.WARN_AFTER_S:
            what = found.error.what if isinstance(found.error, Timeout) else found.error.problem
            log.warning("not all that is to be read can be read at present: %s", what)
            self._is_told = True

    # What keeps a loop from ending

    def obstacle(self) -> Obstacle | None:
        """Why it is not known at present what there is to read.

        Of several, when the patience of the first one ends; with the error of what is rather the cause of the others.
        """
        all_of_them = (self._zookeeper_away(), self._outage(), self._assignment.unsettled(), self._not_placed())
        found = [each for each in all_of_them if each is not None]
        if not found:
            return None
        return min(found, key=lambda each: each.since + each.patience_s)._replace(error=found[0].error)

    def _zookeeper_away(self) -> Obstacle | None:
        over_s = self._lease.over_s()
        if over_s is None:
            return None
        error = ConnectError(
            f"ZooKeeper at {self._servers}",
            f"it has not answered for {max(over_s, 0.0):.0f} s, and whether there is more to read is not known",
            hint="Is it running? What is not committed comes again.",
        )
        return Obstacle(error, time.monotonic() - over_s, outages.PATIENCE_S)

    def _not_placed(self) -> Obstacle | None:
        waiting = [state for state in list(self._placing) if not state.starting]
        if not self._placing:
            return None
        patience_s = outages.PATIENCE_S if waiting else inf  # on_assigned may take its time
        some = next(iter(waiting or self._placing), None)
        what = f"finding where to begin in {count(len(waiting), 'partition')}" + (f", {some.tp} first" if some else "")
        return Obstacle(Timeout(what, patience_s), self._placed_at, patience_s)

    def _outage(self) -> Obstacle | None:
        since = self._outages.began_at()
        if since is None:
            return None
        try:
            error = self._outages.error()
        except ValueError:  # it ended at this moment
            return None
        return Obstacle(error, since, outages.PATIENCE_S)

    # Asking for the end

    def look(self, idle_timeout_s: float, idle_since: float) -> LoopDecision:
        """What a loop does that got nothing. Raises the obstacle's error when its patience is over."""
        now, obstacle = time.monotonic(), self.obstacle()
        doubt = self._doubt if self._asked_at >= idle_since else None  # else something has come since
        decision = decide(now, idle_timeout_s, idle_since, obstacle, doubt, self._ask_from)
        if decision.step is LoopStep.RAISE:
            raise next(each.error for each in (obstacle, doubt) if each and is_over(each, now))
        return decision

    def check_patience(self) -> None:
        """Raises the obstacle's error when its patience is over."""
        obstacle = self.obstacle()
        if obstacle is not None and is_over(obstacle, time.monotonic()):
            raise obstacle.error

    async def confirm(self) -> bool:
        """Asks ZooKeeper and the brokers: whether what was read is all there is. What is open stays as a doubt."""
        async with self._turn:
            asked_at, positions = time.monotonic(), self._doubted_at
            doubt: Obstacle | None
            try:
                doubt = await self._assignment.confirm()
                if doubt is None:  # all partitions are there, so these are all positions
                    positions = self._positions()
                    doubt = await self._ask_brokers(positions)
            except MetamqError as error:
                doubt = Obstacle(error, asked_at, outages.PATIENCE_S)
            lasts = positions == self._doubted_at and asked_at - self._ask_from < AT_ONCE_S
            if doubt is not None and self._doubt is not None and lasts and doubt.patience_s == self._doubt.patience_s:
                doubt = doubt._replace(since=min(doubt.since, self._doubt.since))
            self._doubt, self._doubted_at, self._asked_at = doubt, positions, asked_at
            self._ask_from = time.monotonic() + ASK_AGAIN_S if doubt is not None else 0.0
            return doubt is None

    async def has_all_partitions(self) -> bool:
        """Whether the consumer has every partition that is its own; asks ZooKeeper, as confirm() does."""
        try:
            return self.obstacle() is None and await self._assignment.confirm() is None
        except MetamqError:
            return False

    def _positions(self) -> dict[TopicPartition, int] | None:
        """Up to where each partition was read; None while something that was fetched is not handled."""
        with self._inbox.lock:
            states = [state for state in self._inbox.states.values() if not state.paused and not state.closing]
            if any(state.hand is not None or state.buffered for state in states):
                return None
            return {state.tp: state.next_offset for state in states}

    async def _ask_brokers(self, positions: Mapping[TopicPartition, int] | None) -> Obstacle | None:
        asked_at = time.monotonic()
        if positions is None:
            return Obstacle(HANDLED, asked_at, inf)
        by_broker: dict[int, dict[TopicPartition, str]] = defaultdict(dict)
        for tp in positions:
            state = self._inbox.states.get(tp)
            if state is not None and state.claim is not None:
                by_broker[parse_partition(tp.partition)[0]][tp] = state.claim.topic_id
        for broker_id, topic_ids in by_broker.items():
            try:
                ends = await self._finder.ends(topic_ids, master_only=True)
            except MetamqError as error:
                reason = error.reason if isinstance(error, ConnectError) else error.problem
                away = ConnectError(
                    self._outages.name_of(broker_id),
                    f"whether {count(len(topic_ids), 'partition')} had more to read could not be asked: {reason}",
                    hint="Is the broker running? What is done is committed: start again when it is back.",
                )
                return Obstacle(away, asked_at, outages.PATIENCE_S)
            for tp, end in ends.items():
                if positions[tp] < end:
                    what = f"reading {tp} from {positions[tp]} to its end at {end}"
                    late = Timeout(what, outages.PATIENCE_S, hint="`metamq doctor` looks at every part.")
                    return Obstacle(late, asked_at, outages.PATIENCE_S)
        return None
