"""The commits of a consumer: periodic ones of all that is done, and those of the application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from metamq.client import telemetry
from metamq.client.fetch.commit_in import commit_given_up
from metamq.client.group.assignment import Assignment, not_assigned
from metamq.client.offsets.offsets import CommitRequest
from metamq.client.offsets.offsets_database import DatabaseOffsets
from metamq.errors import ConfigError, MetamqError, OwnershipLost

if TYPE_CHECKING:
    from metamq.client.fetch.consumer_options import ConsumerOptions, ConsumerPlan
    from metamq.client.fetch.inbox import Inbox, InFlightBatch
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")

COMMIT_PAUSE_S_MAX = 10.0
DATABASE_PATIENCE_S = 5.0


@dataclass(eq=False)
class OffsetCommits:
    """The commits of one consumer. `errors` has each partition's last error, for health()."""

    plan: ConsumerPlan
    options: ConsumerOptions
    inbox: Inbox
    assignment: Assignment
    errors: dict[TopicPartition, str]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a commit."""
    _took_s: float = field(default=0.0, init=False)
    """The time that the last periodic commit took."""

    def begin(self) -> Coroutine[Any, Any, None] | None:
        """Returns the commit of the done messages; None if there are none. Called in the loop, every `pause_s`."""
        return self._commit_due() if self.due() else None

    def pause_s(self) -> float:
        """Returns the seconds until the next commit.

        If commits take long, the interval grows: they take at most a tenth of the time, up to COMMIT_PAUSE_S_MAX.
        """
        return max(self.options.commit_interval_ms / 1000, min(9 * self._took_s, COMMIT_PAUSE_S_MAX))

    async def _commit_due(self) -> None:
        began = time.monotonic()
        try:
            refused = await self.commit(self.due)
        except MetamqError as failure:
            log.warning("nothing can be committed at present: %s", failure)
            return
        finally:
            self._took_s = time.monotonic() - began
        for tp, error in refused.items():
            if isinstance(error, OwnershipLost):
                log.info("%s", error)
            else:
                self.errors[tp] = str(error)

    def due(self) -> list[CommitRequest]:
        """Returns the offsets that are done and not committed. Thread-safe."""
        requests = []
        for state in list(self.inbox.states.values()):
            with self.inbox.lock:
                due = state.due_commit()
            if state.claim is not None and due is not None:
                requests.append(CommitRequest(state.claim, *due))
        return requests

    def requests(self, offsets: Mapping[TopicPartition, int] | None, *, delivered: bool = False) -> list[CommitRequest]:
        """Returns the requests of a commit(): the given offsets, or all that is done. Thread-safe.

        `delivered`: the offsets are those of messages, which must have been delivered since the partition was
        assigned. Raises OwnershipLost; PartitionNotFound; ConfigError without a group or for a topic that is not
        subscribed.
        """
        if self.plan.group is None:
            raise ConfigError("a consumer without a group has nothing to commit to", hint="Give Consumer(group=...).")
        if offsets is None:
            return self.due()
        return [self._request(tp, offset, delivered) for tp, offset in offsets.items()]

    def _request(self, tp: TopicPartition, offset: int, delivered: bool) -> CommitRequest:
        if not isinstance(offset, int) or offset < 0:
            raise ConfigError(f"{tp}: {offset!r} is not an offset", hint="An offset is a whole number, 0 or more.")
        state = self.inbox.states.get(tp)
        if state is None or state.claim is None:
            if delivered:  # it was assigned when the message was delivered, even if its topic is deleted now
                raise OwnershipLost(*tp, reason="it is not assigned to this consumer")
            raise not_assigned(tp, self.plan.topics, self.assignment)
        with self.inbox.lock:
            first_unfinished = None if state.in_flight is None else state.in_flight.first_unfinished
            if first_unfinished is not None and (delivered or offset > first_unfinished):
                raise ConfigError(
                    f"{tp}: a commit up to offset {offset} could include unfinished messages: their order is by key",
                    hint="Leave `position` out: the consumer commits what is finished. Or use run(order='partition').",
                )
            if delivered and not state.has_delivered(offset):
                raise OwnershipLost(*tp, reason=f"another owner, or a seek, came after offset {offset - 1}")
            epoch = state.in_flight.batch.epoch if state.in_flight is not None else state.epoch
        return CommitRequest(state.claim, offset, epoch)

    def run_begins(self) -> None:
        """Counts what loops have read until now as processed: see stored_elsewhere(). Thread-safe."""
        with self.inbox.lock:
            for state in self.inbox.states.values():
                if (done := state.done_offset()) > state.lowest_offset:
                    state.handled_offset = max(state.handled_offset, done)

    async def stored_elsewhere(self, in_flight: InFlightBatch, offset: int) -> None:
        """Commits a message that is stored as a dead letter, or in the retry topic, if the application commits the
        others itself.

        It commits nothing beyond a message that a listener has processed and not committed. A failure is no error: the
        next commit of the partition includes the message.
        """
        if self.plan.auto_commit:
            return
        storage, state = self.plan.offsets, in_flight.state
        try:
            if isinstance(storage, DatabaseOffsets):
                for request in self._after(in_flight, offset):
                    async with asyncio.timeout(DATABASE_PATIENCE_S):  # the application may have locked the row
                        await commit_given_up(storage, state, request)
                return
            refused = await self.commit(lambda: self._after(in_flight, offset, state.committed_offset or 0))
            for error in refused.values():
                raise error
        except (MetamqError, TimeoutError) as error:
            reason = str(error) or f"the database did not do it within {DATABASE_PATIENCE_S:g} s"
            log.warning("%s offset %d is stored in another topic, and is not committed: %s", state.tp, offset, reason)

    def _after(self, in_flight: InFlightBatch, offset: int, committed: int | None = None) -> list[CommitRequest]:
        state = in_flight.state
        with self.inbox.lock:
            is_current = self.inbox.states.get(state.tp) is state and state.in_flight is in_flight
            if not is_current or in_flight.first_unfinished is not None or state.claim is None:
                return []
        request = CommitRequest(state.claim, offset + 1, in_flight.batch.epoch)
        return [request] if committed is None or state.handled_offset <= committed <= offset else []

    async def commit(self, find_requests: Callable[[], list[CommitRequest]]) -> Mapping[TopicPartition, MetamqError]:
        """Commits. Returns what was refused.

        It looks for the requests after the commits that are on their way: a partition that is released meanwhile gets
        no second last commit, and what is done sets no earlier commit back.
        """
        async with self.turn:
            requests = find_requests()
            if not requests:
                return {}
            states = self.inbox.states
            asked = [(one, state, state.seeks) for one in requests if (state := states.get(one.claim.tp)) is not None]
            for _, state, _ in asked:
                state.commit_tried = True
            with telemetry.operation("commit"):
                refused = await self.assignment.commit(requests)
            for request, state, seeks in asked:
                if request.claim.tp not in refused:
                    state.committed_offset = request.offset
                    state.floor_offset = request.offset if state.seeks == seeks else 0
            return refused
