"""The partitions that a group member holds, and the steps from there to the partitions in its plan.

Each partition that the member owns in ZooKeeper has a holding, with its phase (`rebalance_decisions`) and its claim
after the member's last write. When the session is lost, the holding is forgotten at once. Work that runs for it notices
that by identity: a partition that comes back has another holding.

A claim whose answer was lost may exist. It is a doubt. Before the next step the member settles it: it deletes the owner
node if the node is its own. Otherwise a partition that the plan gives to another member would never become free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from metamq.client.group.assignment import AssignedPartition, AssignmentHandler
from metamq.client.group.rebalance_decisions import (
    HANDLER_HAS_IT,
    TRANSITIONS,
    Held,
    Phase,
    RebalanceDecision,
    decide,
    mine_in,
)
from metamq.client.offsets.offsets import CommitRequest, OffsetStorage, Ownership
from metamq.errors import CorruptData, MetamqError, OwnershipLost
from metamq.zk.errors import ConnectionLost
from metamq.zk.groups import ownership
from metamq.zk.groups.ownership import NotYet
from metamq.zk.groups.together import claim_all, release_all
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition, partition_order

if TYPE_CHECKING:
    from metamq.zk.groups.plans import Plan, TopicInput
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.client")


@dataclass(slots=True, eq=False)
class _Holding:
    """A partition whose owner node belongs to this member. `final` is the position to commit with the release."""

    claim: Ownership
    phase: Phase = Phase.CLAIMED
    final: tuple[int, int] | None = None

    def enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], (self.claim.tp, self.phase, phase)
        self.phase = phase


_Some = dict[TopicPartition, _Holding]
CLAIMS_AT_ONCE = 500

APPLICATIONS = frozenset({Phase.STARTING, Phase.REVOKING})
"""The phases in which the application's callbacks, or its handler, may take any time."""


class Lack(NamedTuple):
    """The partitions that the plan gives to a member and that it does not consume yet."""

    partitions: int
    first: TopicPartition
    owner: str
    """The member that still owns one of them, or ""."""
    with_application: bool
    """True if they wait for the application, which may take any time."""


class Holdings:
    """The holdings of one member. `changed` requests another `follow`. `failed` requests a later one, after a
    background error.

    Only one `follow` or `drop_all` runs at a time. The other methods may be called meanwhile, in the same
    loop.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        consumer_id: str,
        storage: OffsetStorage,
        handler: AssignmentHandler,
        *,
        changed: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._session = session
        self._group = group
        self._id = consumer_id
        self._storage = storage
        self._kept_by = "" if storage.in_claim_node else type(storage).__name__
        self._handler = handler
        self._changed = changed
        self._failed = failed
        self._held: _Some = {}
        self._first_topics: dict[str, TopicInput] | None = None
        """The topics of the first plan with this member in it, by topic id."""
        self._doubts: set[TopicPartition] = set()
        self._prepared: set[str] = set()
        self._commit_turn = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._reading: set[asyncio.Task[None]] = set()
        self.waiting: dict[TopicPartition, str] = {}
        """The partitions of this member in the plan -> the member that still owns them, "" until it is known."""
        self._published: dict[TopicPartition, tuple[int, int]] = {}
        """The claim generation, and the offset that was published with it."""
        self.moved_at = 0.0
        """The time (time.monotonic) at which a partition was last claimed, or changed its phase."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def in_phase(self, *phases: Phase) -> tuple[TopicPartition, ...]:
        """Returns the partitions in one of `phases`, in numeric order."""
        return tuple(sorted((tp for tp, held in self._held.items() if held.phase in phases), key=partition_order))

    def lack(self, plan: Plan) -> Lack | None:
        """Returns the partitions that the plan gives to this member and that it does not consume, or None."""
        mine = mine_in(self._id, plan)
        consumed = {tp for tp, held in self._held.items() if held.phase is Phase.CONSUMING}
        missing = sorted(mine.keys() - consumed, key=partition_order)
        if not missing:
            return None
        phases = {held.phase for tp in missing if (held := self._held.get(tp)) is not None}
        is_held = all(tp in self._held for tp in missing)
        owner = next((self.waiting[tp] for tp in missing if tp in self.waiting), "")
        return Lack(len(missing), missing[0], owner, with_application=is_held and phases <= APPLICATIONS)

    # Following a plan

    async def follow(self, plan: Plan) -> None:
        """Takes every step towards `plan` that is possible now. A step that ends later calls `changed`. Raises
        MetamqError."""
        await self._settle_doubts()
        mine = mine_in(self._id, plan)
        if self._first_topics is None and self._id in plan.inputs.members:
            self._first_topics = {given.id: given for given in plan.inputs.topics.values()}
        for tp in self.waiting.keys() - mine.keys():
            del self.waiting[tp]
        decision = self._decide(plan)
        if decision.revoke:
            self._spawn(self._revoke(self._enter(decision.revoke, Phase.REVOKING)))
        damage: CorruptData | None = None
        if decision.claim:
            try:
                await self._claim(decision.claim, mine)
            except CorruptData as error:  # of one partition: the others continue
                damage = error
            decision = self._decide(plan)
        if decision.start:
            self._spawn(self._start(self._enter(decision.start, Phase.READING)))
        if decision.release:
            await self._release(decision.release)
            self._changed()
        if damage is not None:
            raise damage

    def _decide(self, plan: Plan) -> RebalanceDecision:
        held = {tp: Held(holding.phase, holding.claim.topic_id) for tp, holding in self._held.items()}
        return decide(self._id, plan, held, self.waiting)

    def _is_new(self, claim: Ownership) -> bool:
        if self._first_topics is None:
            return False
        broker_id, index = parse_partition(claim.tp.partition)
        first = self._first_topics.get(claim.topic_id)
        return first is None or index >= first.partitions.get(broker_id, 0)

    def _enter(self, partitions: Sequence[TopicPartition], phase: Phase) -> _Some:
        some = {tp: self._held[tp] for tp in partitions}
        for holding in some.values():
            holding.enter(phase)
        self.moved_at = time.monotonic()
        return some

    def _still(self, some: _Some, phase: Phase) -> _Some:
        """Returns the holdings that still exist and are still in this phase."""
        return {tp: held for tp, held in some.items() if self._held.get(tp) is held and held.phase is phase}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._look_after(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _look_after(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._failed(error)
        else:
            self._changed()

    # Claiming

    async def _claim(self, partitions: Sequence[TopicPartition], topic_ids: Mapping[TopicPartition, str]) -> None:
        generation = self._session.generation
        for topic in sorted({tp.topic for tp in partitions} - self._prepared):
            await ownership.prepare(self._session, self._group, topic)
            self._prepared.add(topic)
        outcomes: list[Ownership | NotYet | MetamqError] = []
        for first in range(0, len(partitions), CLAIMS_AT_ONCE):
            some = partitions[first : first + CLAIMS_AT_ONCE]
            outcomes += await self._claim_some([(tp, topic_ids[tp]) for tp in some])
        claimed = [outcome for outcome in outcomes if isinstance(outcome, Ownership)]
        if self._session.generation != generation:
            self._doubts.update(claim.tp for claim in claimed)
            raise ConnectionLost(self._session.servers, "the session expired while partitions were claimed")
        self._held.update((claim.tp, _Holding(claim)) for claim in claimed)
        _raise_first(outcomes)

    async def _claim_some(self, wanted: Sequence[tuple[TopicPartition, str]]) -> list[Ownership | NotYet | MetamqError]:
        self.waiting.update((tp, "") for tp, _ in wanted)
        outcomes: Sequence[Ownership | NotYet | MetamqError | None] = [None] * len(wanted)
        try:
            outcomes = found = await claim_all(
                self._session, self._group, wanted, self._id, freed=self._freed, kept_by=self._kept_by
            )
        finally:
            for (tp, _), outcome in zip(wanted, outcomes, strict=True):
                if isinstance(outcome, NotYet) and tp in self.waiting:  # otherwise it was freed before the answer
                    self.waiting[tp] = outcome.owner
                elif not isinstance(outcome, NotYet):
                    self.waiting.pop(tp, None)
                if not isinstance(outcome, Ownership | NotYet):
                    self._doubts.add(tp)
        self.moved_at = time.monotonic()
        return found

    def _freed(self, tp: TopicPartition) -> None:
        self.waiting.pop(tp, None)
        self._changed()

    async def _settle_doubts(self) -> None:
        doubtful = sorted(self._doubts - self._held.keys())
        if doubtful:
            await self._session.sync()  # a server that lags behind may not know the claims yet
        for tp in doubtful:
            await ownership.drop_owner(self._session, self._group, tp, self._id)
        self._doubts.clear()

    # Starting and revoking, in the background

    async def _start(self, some: _Some) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            outcomes = await self._storage.claimed([held.claim for held in some.values()])
        except BaseException:
            for held in self._still(some, Phase.READING).values():
                held.enter(Phase.CLAIMED)
            raise
        finally:
            self._reading.discard(task)
        refused = []
        ready: _Some = {}
        for tp, held in self._still(some, Phase.READING).items():
            outcome = outcomes[tp]
            if isinstance(outcome, MetamqError):
                held.enter(Phase.CLAIMED)
                refused.append(outcome)
            else:
                held.claim = replace(held.claim, committed=outcome)
                held.enter(Phase.STARTING)
                ready[tp] = held
        if ready:
            try:
                await self._handler.assigned(
                    [AssignedPartition(held.claim, self._is_new(held.claim)) for held in ready.values()]
                )
            finally:
                # Even if it failed: the handler may have taken some of them, and `revoke` takes them back.
                for held in self._still(ready, Phase.STARTING).values():
                    held.enter(Phase.CONSUMING)
        _raise_first(refused)

    async def _revoke(self, some: _Some) -> None:
        finals: Mapping[TopicPartition, tuple[int, int] | None] = {}
        try:
            finals = await self._handler.revoke(list(some))
        finally:
            for tp, held in self._still(some, Phase.REVOKING).items():
                held.final = finals.get(tp)
                held.enter(Phase.RELEASING)

    # Releasing

    async def _release(self, partitions: Collection[TopicPartition]) -> None:
        """Commits the last offsets and deletes the owner nodes, of all partitions. Raises the first error
        afterwards."""
        async with self._commit_turn:
            some = {tp: self._held[tp] for tp in partitions if tp in self._held}
            if not self._storage.in_claim_node:
                await self._commit_finals(some)
            outcomes = await release_all(self._session, [(held.claim, held.final) for held in some.values()])
            for (tp, held), outcome in zip(some.items(), outcomes, strict=True):
                if isinstance(outcome, OwnershipLost):
                    log.warning("group %s: %s releases %s uncommitted: %s", self._group, self._id, tp, outcome)
                elif outcome is None:
                    self._forget(tp, held)
            for (tp, held), outcome in zip(some.items(), outcomes, strict=True):
                if isinstance(outcome, OwnershipLost):
                    # The offset was set by another process, or the group's offsets were deleted: our owner node may
                    # still exist.
                    await ownership.drop_owner(self._session, self._group, tp, self._id)
                    self._forget(tp, held)
            _raise_first([outcome for outcome in outcomes if not isinstance(outcome, OwnershipLost)])

    def _forget(self, tp: TopicPartition, held: _Holding) -> None:
        if self._held.get(tp) is held:
            del self._held[tp]

    async def _commit_finals(self, some: _Some) -> None:
        requests = [CommitRequest(held.claim, *held.final) for held in some.values() if held.final is not None]
        refused = await self._commit(requests)
        for request in requests:
            error = refused.get(request.claim.tp)
            if error is None or isinstance(error, OwnershipLost):
                some[request.claim.tp].final = None
        _raise_first([error for error in refused.values() if not isinstance(error, OwnershipLost)])

    # Committing

    async def commit(self, requests: Sequence[CommitRequest]) -> dict[TopicPartition, MetamqError]:
        """See `ZKLoadRebalanceListener.commit`."""
        refused: dict[TopicPartition, MetamqError] = {}
        async with self._commit_turn:
            present: list[CommitRequest] = []
            for request in requests:
                held = self._held.get(request.claim.tp)
                if held is None or held.claim.generation != request.claim.generation:
                    refused[request.claim.tp] = OwnershipLost(*request.claim.tp, reason="it was released before")
                else:
                    present.append(replace(request, claim=held.claim))
            refused.update(await self._commit(present))
        return refused

    async def publish(self, done: Mapping[TopicPartition, int]) -> None:
        """Publishes this member's progress, if other processes cannot read the storage. Raises the first error."""
        news = {
            tp: (held.claim, offset)
            for tp, offset in done.items()
            if (held := self._held.get(tp)) is not None and self._published.get(tp) != (held.claim.generation, offset)
        }
        if self._storage.in_claim_node or not news:
            return
        outcomes = await asyncio.gather(
            *(ownership.publish(self._session, *item) for item in news.values()), return_exceptions=True
        )
        for (tp, (claim, offset)), outcome in zip(news.items(), outcomes, strict=True):
            if outcome is None:
                self._published[tp] = claim.generation, offset
        _raise_first(outcomes)

    async def _commit(self, requests: Sequence[CommitRequest]) -> dict[TopicPartition, MetamqError]:
        """Commits with the current claims, and keeps the new claims. The caller holds `_commit_turn`."""
        refused: dict[TopicPartition, MetamqError] = {}
        outcomes = await self._storage.commit(requests) if requests else {}
        for tp, outcome in outcomes.items():
            held = self._held.get(tp)
            if isinstance(outcome, MetamqError):
                refused[tp] = outcome
                if isinstance(outcome, OwnershipLost) and held is not None and held.phase is not Phase.RELEASING:
                    self._fenced(tp, held)
            elif held is not None and held.claim.generation == outcome.generation:
                held.claim = outcome
        return refused

    def _fenced(self, tp: TopicPartition, held: _Holding) -> None:
        """Releases a partition after a permanent refusal of a commit. If the plan says so, it is claimed again."""
        handler_has_it = held.phase in HANDLER_HAS_IT
        held.enter(Phase.RELEASING)
        if handler_has_it:
            self._handler.lost([tp])
        self._changed()

    # Ends

    def lose_all(self) -> list[TopicPartition]:
        """Forgets every claim, because the session is over. Notifies the handler. Returns the former partitions."""
        handler_had = self.in_phase(*HANDLER_HAS_IT)
        held, self._held = list(self._held), {}
        self.waiting.clear()
        if handler_had:
            self._handler.lost(handler_had)
        return held

    async def drop_all(self) -> None:
        """Stops at once, without waiting for in-flight messages. Raises MetamqError."""
        self._doubts.update(self.lose_all())
        await self._settle_doubts()

    async def drain(self) -> None:
        """Waits until the handler has no in-flight messages. Do not call `follow` afterwards."""
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        consuming = self.in_phase(Phase.CONSUMING)
        if consuming:
            await self._look_after(self._revoke(self._enter(consuming, Phase.REVOKING)))

    async def release_all(self) -> None:
        """Commits and releases all drained partitions. Raises MetamqError; may be repeated."""
        await self._settle_doubts()
        await self._release(list(self._held))


def _raise_first(outcomes: Sequence[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
