"""The consumer without a face: owns partitions, fetches, keeps what is done, commits. Runs in one loop.

Handlers take from its inbox, in whatever thread; see metamq.client.inbox for what passes between the two.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from metamq.client.assignment import AssignedPartition
from metamq.client.cluster import Cluster
from metamq.client.consumer_options import ConsumerOptions, ConsumerPlan
from metamq.client.fetch_queue import FetchRequest, FetchRequestQueue
from metamq.client.fetch_runner import FetchRunner
from metamq.client.health import ConsumerHealth, PartitionHealth
from metamq.client.inbox import Inbox, PartitionState
from metamq.client.message_batch import MessageBatch
from metamq.client.offsets import CommitRequest, OffsetStorage, ZooKeeperOffsets
from metamq.client.rebalance import ZKLoadRebalanceListener
from metamq.client.start_offsets import OffsetFinder
from metamq.client.unshared import UnsharedAssignment
from metamq.errors import CorruptData, MetamqError, OffsetOutOfRange, OwnershipLost
from metamq.wire.batch import walk
from metamq.wire.commands import GetResult
from metamq.zk.lease import Lease
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition
from metamq.zk.session import Session

log = logging.getLogger("metamq.client")

LEASE_CHECK_S = 0.1

RebalanceCallback = Callable[[list[TopicPartition]], Awaitable[None]]


class ConsumerCore:
    """One consumer's engine: an AssignmentHandler and a FetchSink. Its methods are the loop's, but for the inbox."""

    def __init__(
        self,
        plan: ConsumerPlan,
        options: ConsumerOptions,
        loop: asyncio.AbstractEventLoop,
        *,
        on_assigned: RebalanceCallback,
        on_revoked: RebalanceCallback,
    ) -> None:
        self.plan = plan
        self.options = options
        self.loop = loop
        self.inbox = Inbox(self._may_deliver)
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._queue = FetchRequestQueue(self._wake_runner)
        self._runners: dict[int, tuple[FetchRunner, asyncio.Task[None]]] = {}
        self._requests: dict[TopicPartition, FetchRequest] = {}
        self._stalled: dict[FetchRequest, None] = {}
        self._errors: dict[TopicPartition, str] = {}
        self._lost_messages = 0
        self._delivering = True
        self._tasks: list[asyncio.Task[None]] = []
        self._session: Session | None = None

    async def open(self, servers: str, root: str) -> None:
        """Connects, joins the group, starts. Raises ConnectError, TopicNotFound, ConfigError."""
        options = self.options
        self._session = await Session.open(servers, timeout_ms=options.session_timeout_ms, root=root)
        self._lease = Lease(self._session)
        self.cluster = Cluster(self._session)
        self._finder = OffsetFinder(self.cluster, self.plan.start)
        try:
            await self._lease.start()
            self._storage: OffsetStorage = self.plan.offsets or ZooKeeperOffsets(self._session)
            self._assignment = self._make_assignment(self._session)
            await self._assignment.start()
        except BaseException:
            await self._shut_down()
            raise
        jobs = [self._commit_often() if self.plan.auto_commit else None, self._watch_lease()]
        self._tasks = [asyncio.ensure_future(job) for job in jobs if job is not None]

    def _make_assignment(self, session: Session) -> ZKLoadRebalanceListener | UnsharedAssignment:
        plan = self.plan
        if plan.group is None or plan.broadcast:
            storage = self._storage if plan.group is not None else None
            return UnsharedAssignment(self.cluster, plan.group or "", plan.consumer_id, plan.topics, storage, self)
        return ZKLoadRebalanceListener(
            session, plan.group, plan.consumer_id, plan.topics, plan.strategy, self._storage, self, self._lease
        )

    # What the assignment calls

    async def assigned(self, partitions: Sequence[AssignedPartition]) -> None:
        """These partitions are ours: find where to start, and fetch."""
        for assigned in partitions:
            self._start_soon(assigned)
        await self._on_assigned([assigned.tp for assigned in partitions])

    def _start_soon(self, assigned: AssignedPartition) -> None:
        state = PartitionState(assigned.tp, assigned.claim, -1)
        self.inbox.add(state)
        task = asyncio.ensure_future(self._start(state, assigned))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    async def _start(self, state: PartitionState, assigned: AssignedPartition) -> None:
        """Finds the first offset, as often as it takes, and begins to fetch."""
        delay_s = 0.05
        while self.inbox.states.get(state.tp) is state:
            try:
                offset = await self._finder.first_offset(assigned)
            except MetamqError as error:
                if not error.retriable and not isinstance(error, OffsetOutOfRange):
                    log.warning("%s cannot be consumed at present: %s", state.tp, error)
                self._errors[state.tp] = str(error)
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 5.0)
                continue
            self._errors.pop(state.tp, None)
            with self.inbox.lock:
                if state.next_offset >= 0:  # the application was faster with a seek
                    return
                state.next_offset = offset
                state.committed_offset = self._finder.committed_offset(assigned)
            self._fetch_from(state, offset)
            return

    async def revoke(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int] | None]:
        """Gives partitions away once nothing of them is in hand; says what is to be committed."""
        states = [state for tp in partitions if (state := self.inbox.states.get(tp)) is not None]
        for state in states:
            self._stop_fetching(state)
            self.inbox.rewind(state)
        await asyncio.gather(*(self._until_released(state) for state in states))
        if states:
            await self._on_revoked([state.tp for state in states])
        finals = {state.tp: self._final(state) for state in states}
        for state in states:
            self.inbox.remove(state)
        return finals

    def _final(self, state: PartitionState) -> tuple[int, int] | None:
        done = state.done_offset()
        if not self.plan.auto_commit or done < 0 or done == state.committed_offset or not state.epoch:
            return None
        return done, state.epoch

    async def _until_released(self, state: PartitionState) -> None:
        released: asyncio.Future[None] = self.loop.create_future()

        def settle() -> None:
            if not released.done():
                released.set_result(None)

        def tell() -> None:
            self.loop.call_soon_threadsafe(settle)

        self.inbox.when_released(state, tell)
        await released

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """They may be somebody else's already."""
        for tp in partitions:
            state = self.inbox.states.get(tp)
            if state is not None:
                self._stop_fetching(state)
                self.inbox.remove(state)

    def failed(self, error: MetamqError) -> None:
        """The assignment has ended for good: the application gets the error."""
        self.inbox.fail(error)

    # Fetching

    def _fetch_from(self, state: PartitionState, offset: int) -> None:
        """Fetches a partition from an offset on, in place of whatever was under way."""
        self._stop_fetching(state)
        if state.paused or not self._delivering:
            return
        broker_id, index = parse_partition(state.tp.partition)
        topic_id = state.claim.topic_id if state.claim else ""
        request = FetchRequest(state.tp, topic_id, broker_id, index, offset)
        self._requests[state.tp] = request
        if broker_id not in self._runners:
            runner = FetchRunner(
                broker_id,
                self._queue,
                self.cluster,
                self,
                wait_ms=self.options.fetch_wait_ms,
                min_bytes=self.options.fetch_min_bytes,
                max_bytes=self.options.fetch_max_bytes,
                partition_max_bytes=self.options.partition_fetch_max_bytes,
            )
            self._runners[broker_id] = runner, asyncio.ensure_future(runner.run())
        self._queue.put(request, self.loop.time())

    def _stop_fetching(self, state: PartitionState) -> None:
        request = self._requests.pop(state.tp, None)
        if request is not None:
            self._stalled.pop(request, None)
            self._runners[request.broker_id][0].cancel(request)

    def _wake_runner(self, broker_id: int) -> None:
        self._runners[broker_id][0].wake()

    def fetched(self, request: FetchRequest, result: GetResult, data: memoryview) -> None:
        """Data of one partition: into the inbox, and the request back into the queue."""
        state = self.inbox.states[request.tp]
        state.start_offset, state.stable_offset = result.start_offset, result.stable_offset
        batches: list[MessageBatch[Any]] = []
        try:
            for position, header in walk(data):
                if header.end_offset > request.offset:
                    whole = data[position : position + header.size]
                    batches.append(MessageBatch(request.tp, header, whole, request.offset, self.plan.decode))
                    request.offset = header.end_offset
        except CorruptData as error:
            self.fetch_failed(request, error)
            return
        request.delay_s = 0.0
        self._errors.pop(request.tp, None)
        if batches:
            self.inbox.put(state, batches)
        if self.inbox.buffered_bytes < self.options.prefetch_bytes:
            self._queue.put(request, self.loop.time())
        else:
            self._stalled[request] = None
            self.consumed()

    def consumed(self) -> None:
        """A handler made room: fetch on for those that waited for it. In the loop."""
        if self._stalled and self.inbox.buffered_bytes < self.options.prefetch_bytes:
            stalled, self._stalled = self._stalled, {}
            now = self.loop.time()
            for request in stalled:
                self._queue.put(request, now)

    def wants_room(self) -> bool:
        """Whether somebody waits for a handler to make room. Any thread."""
        return bool(self._stalled)

    def fetch_failed(self, request: FetchRequest, error: MetamqError) -> None:
        """The partition is asked for again after a pause; an offset that is gone is replaced by policy."""
        if isinstance(error, OffsetOutOfRange):
            self._out_of_range(request, error)
            return
        text = str(error)
        if self._errors.get(request.tp) != text:
            log.log(logging.INFO if error.retriable else logging.WARNING, "%s: %s", request.tp, text)
        self._errors[request.tp] = text
        self._queue.put(request, self.loop.time() + request.grow_delay())

    def _out_of_range(self, request: FetchRequest, error: OffsetOutOfRange) -> None:
        state = self.inbox.states[request.tp]
        policy = self.plan.on_data_loss
        if policy == "fail":
            self.inbox.fail(error)
            return
        place = error.start if policy == "earliest" else error.end
        lost = max(place - request.offset, 0)
        self._lost_messages += lost
        log.warning("%s: %s Going on at %d; %d messages are lost to this group.", request.tp, error, place, lost)
        self.inbox.rewind(state, place)
        self._fetch_from(state, place)

    # The lease

    def _may_deliver(self) -> bool:
        return self.plan.group is None or self.plan.broadcast or self._lease.valid()

    async def _watch_lease(self) -> None:
        """Stops handing out when the lease is over, takes back what is not handed out, goes on when it is valid."""
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            valid = self._may_deliver()
            if valid == self._delivering:
                continue
            self._delivering = valid
            log.warning("consumption %s: %s", "goes on" if valid else "pauses", self._lease_reason(valid))
            for state in list(self.inbox.states.values()):
                if state.next_offset < 0:
                    continue
                offset = self.inbox.rewind(state)
                if valid:
                    self._fetch_from(state, offset)
                else:
                    self._stop_fetching(state)
            self.inbox.poke()

    def _lease_reason(self, valid: bool) -> str:
        return "ZooKeeper answers again" if valid else "ZooKeeper has not answered, another member may take over"

    # Committing

    async def _commit_often(self) -> None:
        while True:
            await asyncio.sleep(self.options.commit_interval_ms / 1000)
            refused = await self.commit(self._due_commits())
            for tp, error in refused.items():
                if isinstance(error, OwnershipLost):
                    log.info("%s", error)
                else:
                    self._errors[tp] = str(error)

    def _due_commits(self, *, in_hand: bool = False) -> list[CommitRequest]:
        requests = []
        for state in list(self.inbox.states.values()):
            with self.inbox.lock:
                done, epoch = state.done_offset(in_hand=in_hand), state.epoch
                if state.hand is not None:
                    epoch = state.hand.batch.epoch
            if state.claim is not None and done >= 0 and done != state.committed_offset and epoch:
                requests.append(CommitRequest(state.claim, done, epoch))
        return requests

    def commit_requests(self, offsets: Mapping[TopicPartition, int] | None) -> list[CommitRequest]:
        """What a commit() is to write: the given offsets, or all that is done. Raises OwnershipLost. Any thread."""
        if offsets is None:
            return self._due_commits()
        requests = []
        for tp, offset in offsets.items():
            state = self.inbox.states.get(tp)
            if state is None or state.claim is None:
                raise OwnershipLost(tp.topic, tp.partition, "it is not assigned to this consumer")
            hand = state.hand
            epoch = hand.batch.epoch if hand is not None else state.epoch
            requests.append(CommitRequest(state.claim, offset, epoch))
        return requests

    async def commit(self, requests: list[CommitRequest]) -> dict[TopicPartition, MetamqError]:
        """Commits; returns what was refused."""
        if not requests or self.plan.group is None:
            return {}
        refused = await self._assignment.commit(requests)
        for request in requests:
            state = self.inbox.states.get(request.claim.tp)
            if state is not None and request.claim.tp not in refused:
                state.committed_offset = request.offset
        self._assignment.note_progress()
        return refused

    # What the application asks for

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """The next message handed out is the one at `offset`."""
        state = self._state(tp)
        self.inbox.rewind(state, offset)
        self._fetch_from(state, offset)

    async def seek_to(self, tp: TopicPartition, where: Any) -> None:
        """Seeks to an offset, "earliest", "latest" or a time."""
        state = self._state(tp)
        offset = where if isinstance(where, int) else await self._finder.find(tp, self._topic_id(state), where)
        self.seek(tp, offset)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hands out nothing of these partitions until resume()."""
        for tp in partitions:
            state = self._state(tp)
            if not state.paused:
                state.paused = True
                self._stop_fetching(state)
                self.inbox.rewind(state)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Goes on with paused partitions."""
        for tp in partitions:
            state = self._state(tp)
            if state.paused:
                state.paused = False
                self._fetch_from(state, self.inbox.rewind(state))

    def _state(self, tp: TopicPartition) -> PartitionState:
        state = self.inbox.states.get(tp)
        if state is None:
            raise OwnershipLost(tp.topic, tp.partition, "it is not assigned to this consumer")
        return state

    def _topic_id(self, state: PartitionState) -> str:
        assert state.claim is not None
        return state.claim.topic_id

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are consumed now. Any thread."""
        with self.inbox.lock:
            return sorted(self.inbox.states)

    async def lag(self) -> dict[TopicPartition, int]:
        """Messages stored and not done, per partition, asked of the brokers."""
        states = {state.tp: state for state in list(self.inbox.states.values()) if state.next_offset >= 0}
        ends = await self._finder.ends({tp: self._topic_id(state) for tp, state in states.items()})
        return {tp: max(ends[tp] - states[tp].done_offset(), 0) for tp in states if tp in ends}

    def health(self) -> ConsumerHealth:
        """How consumption goes, without asking anybody."""
        with self.inbox.lock:
            states = list(self.inbox.states.values())
            partitions = {
                state.tp: PartitionHealth(
                    next_offset=state.next_offset,
                    done_offset=state.done_offset(),
                    committed_offset=state.committed_offset,
                    lag=state.lag(),
                    in_hand=state.hand is not None,
                    paused=state.paused,
                    last_error=self._errors.get(state.tp, ""),
                )
                for state in states
            }
        last = max((runner.last_answer_s for runner, _task in self._runners.values()), default=0.0)
        return ConsumerHealth(
            partitions=partitions,
            delivering=self._delivering,
            buffered_bytes=self.inbox.buffered_bytes,
            last_fetch_s=time.monotonic() - last if last else None,
            lost_messages=self._lost_messages,
            group=self._assignment.health() if isinstance(self._assignment, ZKLoadRebalanceListener) else None,
        )

    # The end

    async def close(self, *, in_hand_done: bool) -> None:
        """Commits what is done, gives everything back, disconnects. What is in hand counts as `in_hand_done` says."""
        if self._session is None:
            return
        for state in list(self.inbox.states.values()):
            self._stop_fetching(state)
            self.inbox.rewind(state)
            if state.hand is not None:
                self.inbox.finish(state.hand, in_hand=in_hand_done)
        self.inbox.close()
        try:
            await self._assignment.stop()
        finally:
            await self._shut_down()

    async def _shut_down(self) -> None:
        session, self._session = self._session, None
        tasks = [*self._tasks, *(task for _runner, task in self._runners.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._lease.close()
        await self.cluster.close()
        if self.plan.offsets is not None:
            await self.plan.offsets.close()
        if session is not None:
            await session.close()

    def forked(self, error: MetamqError) -> None:
        """In a fork's child: nothing works any more."""
        self.inbox = Inbox(lambda: False)
        self.inbox.error = error
        self._session = None
