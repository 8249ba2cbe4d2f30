"""The end of a loop with `idle_timeout_s`: the end of the data, never an outage.

A loop that received no message for its idle time ends only when all of these conditions hold:

    ZooKeeper   answers: the lease holds, and an answer after the idle time brings no change.
    the plan    is known, all partitions that it gives to this consumer are consumed, and the other members are alive.
    brokers     answer, and report after the idle time that no message is stored after the last one that was read.

A condition that does not hold is an obstacle. While there is an obstacle, the idle time does not run. An obstacle that
lasts longer than its patience is raised. `decide` is the whole rule; `LoopEnd` collects the arguments of `decide`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from metamq.client.group.assignment import Assignment, Obstacle
from metamq.client.net import outages
from metamq.errors import ConnectError, MetamqError, NotAuthorized, Timeout
from metamq.words import count
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.client.fetch.inbox import Inbox, PartitionState
    from metamq.client.fetch.start_offsets import OffsetFinder
    from metamq.client.net.outages import Outages
    from metamq.client.net.transport import Connections
    from metamq.zk.partitions import TopicPartition
    from metamq.zk.session.lease import Lease

log = logging.getLogger("metamq.client")

LOOK_S = 0.1
"""Seconds between two checks of an obstacle."""
ASK_AGAIN_S = 0.25
"""Seconds between two questions for the end of the data."""
AT_ONCE_S = 2.0
"""Seconds after that pause in which a question counts as a repetition. A later question is about a new doubt."""

HANDLED = Timeout("another thread's message", inf)
"""The obstacle while another thread processes a message. Its patience has no limit, so it is never raised."""


class LoopStep(enum.Enum):
    """The next step of a loop that received no message."""

    WAIT = "wait, then look again"
    ASK = "ask ZooKeeper and the brokers for the end of the data"
    RAISE = "end with the obstacle's error"


class LoopDecision(NamedTuple):
    """The step, the seconds to wait, and the start of the idle time, which is an argument of the next decision."""

    step: LoopStep
    wait_s: float
    idle_since: float


def is_over(obstacle: Obstacle, now: float) -> bool:
    """Returns True if the obstacle has lasted longer than its patience."""
    return now - obstacle.since >= obstacle.patience_s


def decide(
    now: float,
    idle_timeout_s: float,
    idle_since: float,
    obstacle: Obstacle | None,
    doubt: Obstacle | None,
    ask_from: float,
) -> LoopDecision:
    """Decides the next step of a loop. `doubt`: the obstacle of the last question; `ask_from`: the time of the next
    one.

        obstacle   doubt   patience over   idle time over   step
        either of the two  yes             -                RAISE.
        yes        -       no              -                WAIT, and the idle time starts again.
        no         -       no              no               WAIT for the rest of it.
        no         -       no              yes              ASK, after a pause if there is a doubt.
    """
    if any(each is not None and is_over(each, now) for each in (obstacle, doubt)):
        return LoopDecision(LoopStep.RAISE, 0.0, idle_since)
    if obstacle is not None:
        return LoopDecision(LoopStep.WAIT, LOOK_S, now)
    wait_s = max(idle_since + idle_timeout_s, ask_from) - now
    return LoopDecision(LoopStep.WAIT if wait_s > 0 else LoopStep.ASK, wait_s, idle_since)


@dataclass(eq=False)
class LoopEnd:
    """The end of one consumer's loops. `confirm` and `warn` are for the event loop; the others are thread-safe."""

    servers: str
    lease: Lease
    inbox: Inbox
    assignment: Assignment
    outages: Outages
    finder: OffsetFinder
    connections: Connections
    _: KW_ONLY
    pauses: bool
    """True if the consumer delivers nothing without the lease, and logs that itself."""
    _placing: dict[PartitionState, None] = field(default_factory=dict, init=False)
    _placed_at: float = field(default_factory=time.monotonic, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _doubt: Obstacle | None = field(default=None, init=False)
    _doubted_at: Mapping[TopicPartition, int] | None = field(default_factory=dict, init=False)
    _requested_at: float = field(default=0.0, init=False)
    _ask_from: float = field(default=0.0, init=False)
    _has_warned: bool = field(default=False, init=False)

    # Called by the consumer

    def is_placing(self, state: PartitionState) -> None:
        """Notes that the start offset of a partition is being searched."""
        self._placing[state] = None
        self._placed_at = time.monotonic()

    def placed(self, state: PartitionState) -> None:
        """Notes that the start offset is found, or the partition is released."""
        self._placing.pop(state, None)
        self._placed_at = time.monotonic()

    def warn(self) -> None:
        """Warns of lasting obstacles. Outages of brokers and pauses are logged elsewhere."""
        found = self.assignment.unsettled() or (None if self.pauses else self._zookeeper_away())
        if found is None and time.monotonic() - self._ask_from < AT_ONCE_S:  # a loop waits for it
            found = self._doubt if self._doubt is not None and self._doubt.error is not HANDLED else None
        if found is None and self._has_warned:
            log.info("all messages can be read again")
            self._has_warned = False
        elif found is not None and not self._has_warned and time.monotonic() - found.since >= outages.WARN_AFTER_S:
            what = found.error.what if isinstance(found.error, Timeout) else found.error.problem
            log.warning("not all messages can be read at present: %s", what)
            self._has_warned = True

    # Obstacles to the end of a loop

    def obstacle(self) -> Obstacle | None:
        """Returns the reason that the end of the data is not known now, or None.

        Of several obstacles, the one whose patience ends first counts, with the error of the most probable cause.
        """
        all_of_them = (self._zookeeper_away(), self._outage(), self.assignment.unsettled(), self._not_placed())
        found = [each for each in all_of_them if each is not None]
        if not found:
            return None
        return min(found, key=lambda each: each.since + each.patience_s)._replace(error=found[0].error)

    def _zookeeper_away(self) -> Obstacle | None:
        over_s = self.lease.over_s()
        if over_s is None:
            return None
        error = ConnectError(
            f"ZooKeeper at {self.servers}",
            f"it has not answered for {max(over_s, 0.0):.0f} s, so there may be more to read",
            hint="Check that it runs. Messages that are not committed are delivered again.",
        )
        return Obstacle(error, time.monotonic() - over_s, outages.PATIENCE_S)

    def _not_placed(self) -> Obstacle | None:
        if self.connections.delayed_s:  # above its quota: the brokers are alive
            self._placed_at = time.monotonic()
        waiting = [state for state in list(self._placing) if not state.starting]
        if not self._placing:
            return None
        patience_s = outages.PATIENCE_S if waiting else inf  # on_assigned may take any time
        some = next(iter(waiting or self._placing), None)
        what = f"finding the start of {count(len(waiting), 'partition')}" + (f", {some.tp} first" if some else "")
        return Obstacle(Timeout(what, patience_s), self._placed_at, patience_s)

    def _outage(self) -> Obstacle | None:
        since = self.outages.began_at()
        if since is None:
            return None
        try:
            error = self.outages.error()
        except ValueError:  # the outage has just ended
            return None
        return Obstacle(error, since, _patience_s(error))

    # The question for the end

    def look(self, idle_timeout_s: float, idle_since: float) -> LoopDecision:
        """Returns the next step of a loop without a message. Raises the obstacle's error when its patience is over."""
        now, obstacle = time.monotonic(), self.obstacle()
        doubt = self._doubt if self._requested_at >= idle_since else None  # otherwise a message has come since
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
        """Asks ZooKeeper and the brokers. Returns True at the end of the data; otherwise keeps a doubt."""
        async with self._turn:
            requested_at, positions = time.monotonic(), self._doubted_at
            doubt: Obstacle | None
            try:
                doubt = await self.assignment.confirm()
                if doubt is None:  # all partitions are assigned, so these are all positions
                    positions = self._positions()
                    doubt = await self._ask_brokers(positions)
            except MetamqError as error:
                doubt = Obstacle(error, requested_at, _patience_s(error))
            lasts = positions == self._doubted_at and requested_at - self._ask_from < AT_ONCE_S
            if doubt is not None and self._doubt is not None and lasts and doubt.patience_s == self._doubt.patience_s:
                doubt = doubt._replace(since=min(doubt.since, self._doubt.since))
            self._doubt, self._doubted_at, self._requested_at = doubt, positions, requested_at
            self._ask_from = time.monotonic() + ASK_AGAIN_S if doubt is not None else 0.0
            return doubt is None

    async def has_all_partitions(self) -> bool:
        """Returns True if the consumer has all its partitions. Asks ZooKeeper, like confirm()."""
        try:
            return self.obstacle() is None and await self.assignment.confirm() is None
        except MetamqError:
            return False

    def _positions(self) -> dict[TopicPartition, int] | None:
        """Returns the read position of each partition, or None while fetched messages are not done."""
        with self.inbox.lock:
            states = [state for state in self.inbox.states.values() if not state.paused and not state.closing]
            if any(state.in_flight is not None or state.buffered for state in states):
                return None
            return {state.tp: state.next_offset for state in states}

    async def _ask_brokers(self, positions: Mapping[TopicPartition, int] | None) -> Obstacle | None:
        requested_at = time.monotonic()
        if positions is None:
            return Obstacle(HANDLED, requested_at, inf)
        by_broker: dict[int, dict[TopicPartition, str]] = defaultdict(dict)
        for tp in positions:
            state = self.inbox.states.get(tp)
            if state is not None and state.claim is not None:
                by_broker[parse_partition(tp.partition)[0]][tp] = state.claim.topic_id
        for broker_id, topic_ids in by_broker.items():
            try:
                ends = await self.finder.ends(topic_ids, master_only=True)
            except NotAuthorized as error:
                return Obstacle(error, requested_at, _patience_s(error))
            except MetamqError as error:
                reason = error.reason if isinstance(error, ConnectError) else error.problem
                away = ConnectError(
                    self.outages.name_of(broker_id),
                    f"it did not report if {count(len(topic_ids), 'partition')} had more to read: {reason}",
                    hint="Start again when the broker is back. The processed messages are committed.",
                )
                return Obstacle(away, requested_at, outages.PATIENCE_S)
            for tp, end in ends.items():
                if positions[tp] < end:
                    what = f"reading {tp} from {positions[tp]} to its end at {end}"
                    late = Timeout(what, outages.PATIENCE_S, hint="`metamq doctor` checks every part.")
                    return Obstacle(late, requested_at, outages.PATIENCE_S)
        return None


def _patience_s(error: MetamqError) -> float:
    """Returns the seconds that a loop waits for the end of the error. A missing right does not come by itself."""
    return 0.0 if isinstance(error, NotAuthorized) else outages.PATIENCE_S
