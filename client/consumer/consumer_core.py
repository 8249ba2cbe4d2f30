"""The implementation of the consumer: owns partitions, fetches, tracks done messages, commits. Runs in one loop.

Handlers take batches from its inbox, in any thread; metamq.client.fetch.inbox describes the interface between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any

from metamq.client.consumer.health import PUBLISH_LIMIT_S, ConsumerHealth, ProgressWatch, done_offsets, health_of
from metamq.client.consumer.loop_end import LoopEnd
from metamq.client.consumer.unshared import UnsharedAssignment
from metamq.client.fetch.commits import OffsetCommits
from metamq.client.fetch.consumer_options import ConsumerOptions, ConsumerPlan, check_place
from metamq.client.fetch.damage import report_damage, report_of
from metamq.client.fetch.fetch_queue import DELAY_FIRST_S, FetchRequest, FetchRequestQueue
from metamq.client.fetch.fetch_runner import FetchBudget, FetchRunner
from metamq.client.fetch.inbox import Inbox, PartitionState
from metamq.client.fetch.message_batch import MessageBatch, own_part
from metamq.client.fetch.sources import Sources
from metamq.client.fetch.start_offsets import FirstOffset, OffsetFinder
from metamq.client.forks import register_for_forks
from metamq.client.group.assignment import AssignedPartition, not_assigned, room_of_owners
from metamq.client.group.rebalance import ZKLoadRebalanceListener
from metamq.client.handling.handler_figures import HandlerFigures
from metamq.client.handling.retry_topic import create_retry_topic
from metamq.client.net.cluster import MASTER, ClusterClient
from metamq.client.net.first_contact import open_client_session
from metamq.client.net.outages import Outages
from metamq.client.offsets.offsets import CommitRequest, OffsetStorage, ZooKeeperOffsets
from metamq.client.repeated import Repeated
from metamq.errors import (
    CorruptData,
    ForkedError,
    MetamqError,
    OffsetDiverged,
    OffsetOutOfRange,
    OwnershipLost,
    closed_client,
)
from metamq.wire.batch import walk
from metamq.words import count
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.common_lease import CommonLease

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess
    from metamq.wire.commands import GetResult
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.client")

RebalanceCallback = Callable[[list[TopicPartition]], Awaitable[None]]


class ConsumerCore:
    """The core of one consumer: AssignmentHandler and FetchSink. Only thread-safe methods work outside its loop."""

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
        self.handlers = HandlerFigures()
        self._budget = FetchBudget(options, self.inbox)
        self.inbox.may_grow = self._budget.allows_more
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._queue = FetchRequestQueue(lambda source: self._sources.runner(source).wake())
        self._requests: dict[TopicPartition, FetchRequest] = {}
        self._stalled: dict[FetchRequest, None] = {}
        self.outages = Outages(lambda broker_id: self.cluster.broker_name(broker_id), self._is_substituted)
        self._stuck: dict[TopicPartition, MetamqError] = {}
        self._lost_messages = 0
        self._delivering = True
        self._closing = False
        self._callback_error: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._repeated: list[Repeated] = []
        self._session: Session | None = None
        register_for_forks(self)

    async def open(self, access: ClusterAccess) -> None:
        """Connects, joins the group, starts. Raises ConnectError, TopicNotFound, ConfigError."""
        options = self.options
        owned = room_of_owners(self.plan.group, self.plan.topics) if self.plan.group and self._needs_lease else None
        session = self._session = await open_client_session(access, options.session_timeout_ms, count_room=owned)
        self._lease = CommonLease.of(session)
        reads_slaves = options.read_from == "any"
        self.cluster = ClusterClient(session, self._cluster_changed, with_slaves=reads_slaves)
        self._sources = Sources(
            self.cluster,
            reads_slaves=reads_slaves,
            requests=self._requests.values,
            make_runner=lambda source: FetchRunner(source, self._queue, self.cluster, self, self._budget.limits),
            spawn=self.spawn,
            ask_again=self._ask_again,
        )
        self._finder = OffsetFinder(self.cluster, self.plan.start, self.plan.retry_topic)
        try:
            await self._lease.join(self._lease_changed)
            self._storage: OffsetStorage = self.plan.offsets or ZooKeeperOffsets(session)
            await self._storage.check()
            self._assignment = self._make_assignment(session)
            self.commits = OffsetCommits(self.plan, options, self.inbox, self._assignment, self.outages.errors)
            parts = self._lease, self.inbox, self._assignment, self.outages, self._finder, self.cluster.connections
            self.end = LoopEnd(access.zookeeper, *parts, pauses=self._needs_lease)
            await create_retry_topic(self.cluster, self.plan.retry_topic)
            await self._assignment.start()
        except BaseException:
            await self._shut_down()
            raise
        progress = ProgressWatch(self.inbox, self._assignment, self.outages, self.end)
        commits = [(self.commits.begin, self.commits.pause_s)] if self.plan.auto_commit else []
        works = [(progress.check, progress.pause_s), *commits]
        self._repeated = [Repeated(*work, self.spawn, self._failed) for work in works]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = Context().run(asyncio.ensure_future, work)  # no part of the trace of the code that opened the consumer
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        log.debug("a part of the consumer ended: handlers get the error", exc_info=error)
        self.inbox.fail(error)

    def _make_assignment(self, session: Session) -> ZKLoadRebalanceListener | UnsharedAssignment:
        plan = self.plan
        if plan.group is None or plan.broadcast:
            storage = None if plan.group is None else self._storage
            return UnsharedAssignment(self.cluster, plan.group or "", plan.consumer_id, plan.topics, storage, self)
        return ZKLoadRebalanceListener(
            session, plan.group, plan.consumer_id, plan.topics, plan.strategy, self._storage, self, self._lease
        )

    # Called by the assignment

    async def assigned(self, partitions: Sequence[AssignedPartition]) -> None:
        """Takes over partitions: notifies the application, which may seek, finds the start offsets, and fetches."""
        states = [PartitionState(assigned.tp, assigned.claim, -1) for assigned in partitions]
        for state in states:
            self.end.is_placing(state)
            self.inbox.add(state)
        await self._notify(self._on_assigned, states)
        for state, assigned in zip(states, partitions, strict=True):
            state.starting = False
            self.spawn(self._start(state, assigned))

    async def _notify(self, callback: RebalanceCallback, states: Sequence[PartitionState]) -> bool:
        """Calls the application's callback. Passes its error to the handlers, and then returns False."""
        try:
            await callback([state.tp for state in states])
        except Exception as error:
            log.debug("a callback failed: handlers get the error", exc_info=error)
            self._callback_error = error
            self.inbox.fail(error)
            return False
        return True

    async def _start(self, state: PartitionState, assigned: AssignedPartition) -> None:
        """Finds the first offset, with retries until it succeeds, and begins to fetch."""
        delay_s = 0.05
        while self._is_ours(state):
            try:
                first = await self._finder.first_offset(assigned)
                if not first.is_committed and state.next_offset < 0 and self.plan.start != "earliest":
                    await self._keep_start(state, first)
            except MetamqError as error:
                if isinstance(error, OwnershipLost):
                    return
                self.outages.failed(state.tp, error)
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 5.0)
                continue
            with self.inbox.lock:
                if first.is_committed:
                    state.committed_offset = first.offset
                elif state.committed_offset is None:
                    state.start = first.offset, first.epoch
                if state.next_offset < 0:  # otherwise the application has called seek() meanwhile
                    state.begin_at(first.offset, first.epoch)
            self._fetch_from(state, state.next_offset)
            self.outages.ended(state.tp)
            self.end.placed(state)
            return

    async def _keep_start(self, state: PartitionState, first: FirstOffset) -> None:
        """Commits the group's start before any message is done. Otherwise each new owner finds another "latest"."""
        assert state.claim is not None
        request = CommitRequest(state.claim, first.offset, first.epoch)
        for error in (await self.commits.commit(lambda: [request])).values():
            raise error

    def _is_ours(self, state: PartitionState) -> bool:
        return self.inbox.states.get(state.tp) is state and not state.closing

    async def revoke(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int] | None]:
        """Releases partitions once no message is in flight. Returns the offset and epoch to commit for each."""
        states = [state for tp in partitions if (state := self.inbox.states.get(tp)) is not None]
        for state in states:
            state.closing = True
            self._stop_fetching(state)
            self.inbox.rewind(state)
        await asyncio.gather(*(self._until_released(state) for state in states))
        is_well = not states or await self._notify(self._on_revoked, states)
        auto = self.plan.auto_commit
        commits = is_well and (auto or self.plan.offsets is None)  # a database gets only the application's commits
        async with self.commits.turn:
            finals = {state.tp: state.last_commit(auto_commit=auto) if commits else None for state in states}
            for state in states:
                self._remove(state)
        return finals

    async def _until_released(self, state: PartitionState) -> None:
        released = asyncio.Event()
        self.inbox.when_released(state, lambda: self.loop.call_soon_threadsafe(released.set))
        await released.wait()

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Stops with partitions that may already belong to another consumer."""
        for tp in partitions:
            if (state := self.inbox.states.get(tp)) is not None:
                self._stop_fetching(state)
                self._remove(state)

    def _remove(self, state: PartitionState) -> None:
        self.inbox.remove(state)
        self.outages.ended(state.tp)
        self.end.placed(state)

    def failed(self, error: MetamqError) -> None:
        """Passes the error that ended the assignment permanently to the application."""
        self.inbox.fail(error)

    # Fetching

    def _fetch_from(self, state: PartitionState, offset: int, epoch: int | None = None) -> None:
        """Fetches a partition from an offset on. Replaces the earlier request."""
        self._stop_fetching(state)
        held_back = state.paused or state.starting or not self._delivering or self._closing
        if held_back or offset < 0 or not self._is_ours(state):
            return
        broker_id, index = parse_partition(state.tp.partition)
        topic_id = state.claim.topic_id if state.claim else ""
        source = self._sources.choose(state.tp, broker_id)
        epoch = state.epoch_before(offset) if epoch is None else epoch
        request = FetchRequest(state.tp, topic_id, source, index, offset, epoch)
        self._requests[state.tp] = request
        self._queue.put(request, self.loop.time())

    def _is_substituted(self, tp: TopicPartition) -> bool:
        request = self._requests.get(tp)
        return request is not None and self._sources.is_substitute(request)

    def _ask_again(self, request: FetchRequest) -> None:
        """Moves a request to the source that is right for it now."""
        if request in self._stalled and request.error is None:
            self._sources.go(request, self._sources.choose(request.tp, request.source.broker_id))
        else:
            self._fetch_from(self.inbox.states[request.tp], request.offset, request.epoch)

    def _cluster_changed(self) -> None:
        """Repeats the waiting requests at once: a broker may be back."""
        for source in self._sources.runners:
            self._queue.hurry(source, self.loop.time())
        self._sources.changed()

    def _stop_fetching(self, state: PartitionState) -> None:
        request = self._requests.pop(state.tp, None)
        if request is not None:
            self._stalled.pop(request, None)
            self._sources.runner(request.source).cancel(request)

    def fetched(self, request: FetchRequest, result: GetResult, data: memoryview) -> None:
        """Puts the data of one partition into the inbox, and the request back into the queue."""
        state = self.inbox.states[request.tp]
        state.start_offset, state.stable_offset = result.start_offset, result.stable_offset
        batches: list[MessageBatch[Any]] = []
        damage: CorruptData | None = None
        data = own_part(data)
        try:
            for position, header in walk(data):
                if header.end_offset > request.offset:
                    whole = data[position : position + header.size]
                    batches.append(MessageBatch(request.tp, header, whole, request.offset, self.plan.decode))
                    request.offset, request.epoch = header.end_offset, header.epoch
        except CorruptData as error:
            damage = error
        if batches:
            request.damaged_fetches = 0
            self.inbox.put(state, batches)
        if damage is not None:
            self._damaged(request, damage)
            return
        request.damaged_fetches = 0
        request.delay_s = 0.0
        if not self._sources.is_substitute(request):
            self.outages.ended(request.tp)
        self._sources.answered(request, result.preferred_replica)
        if self._budget.allows_more(state):
            self._queue.put(request, self.loop.time())
        else:
            self._stalled[request] = None
            self.consumed()

    def sent(self, requests: list[FetchRequest]) -> None:
        """Ends the outages of requests that a broker has received; it sends no answer for a partition without data."""
        masters = [request.tp for request in requests if not self._sources.is_substitute(request)]
        for tp in self.outages.cut_off(masters):
            self.outages.ended(tp)

    def consumed(self) -> None:
        """Continues the requests that waited until a handler freed capacity. In the loop."""
        now = self.loop.time()
        for request in [request for request in self._stalled if self._may_go_on(request)]:
            del self._stalled[request]
            if request.error is None:
                self._queue.put(request, now)
            else:
                self._fail(request.tp, request.error)

    def _may_go_on(self, request: FetchRequest) -> bool:
        state = self.inbox.states[request.tp]
        return self._budget.allows_more(state) if request.error is None else not state.buffered_bytes

    def refetch(self, state: PartitionState) -> None:
        """Fetches again the messages that a handler released and that are not done. In the loop."""
        if state.rewinding and self._is_ours(state):
            self._fetch_from(state, self.inbox.rewind(state))

    def has_stalled(self) -> bool:
        """Returns True if a request waits until a handler frees capacity. Thread-safe."""
        return bool(self._stalled)

    def fetch_failed(self, request: FetchRequest, error: MetamqError) -> None:
        """Fetches the partition again after a pause. If the offset is gone, `on_data_loss` decides."""
        if isinstance(error, OffsetOutOfRange):
            self._out_of_range(request, error)
            return
        at_once = self._sources.failed(request, error)
        if not at_once or self._sources.is_substitute(request):
            self.outages.failed(request.tp, error)
        self._queue.put(request, self.loop.time() + (0.0 if at_once else request.grow_delay()))

    def _damaged(self, request: FetchRequest, damage: CorruptData) -> None:
        """Fetches damaged data again. Raises lasting damage in the handlers, after the messages before it."""
        report = report_of(request.tp, request.topic_id, request.offset)
        self.spawn(report_damage(self.cluster, request.source, report))
        if request.source.replica != MASTER:
            self.fetch_failed(request, damage)
            return
        self.outages.failed(request.tp, damage)
        if (lasting := request.came_damaged(damage)) is None:
            self._queue.put(request, self.loop.time() + DELAY_FIRST_S)
        else:
            self._raise_after_what_is_buffered(request, lasting)

    def _raise_after_what_is_buffered(self, request: FetchRequest, error: MetamqError) -> None:
        request.error = error
        self._stalled[request] = None
        self.consumed()

    def _fail(self, tp: TopicPartition, error: MetamqError) -> None:
        """Raises the error in the handlers until a seek of this partition."""
        self.outages.errors[tp] = str(error)
        self._stuck[tp] = error
        self.inbox.fail(error)

    def _out_of_range(self, request: FetchRequest, error: OffsetOutOfRange) -> None:
        state = self.inbox.states[request.tp]
        policy, fields = self.plan.on_data_loss, {**request.tp._asdict(), "group": self.plan.group}
        if policy == "fail":
            error.topic, error.partition = request.tp
            if isinstance(error, OffsetDiverged):
                self.inbox.drop_from(state, error.agreed)
            self.outages.errors[request.tp] = str(error)
            self._raise_after_what_is_buffered(request, error)
            return
        if isinstance(error, OffsetDiverged):
            log.warning("%s: %s Continuing at %d", request.tp, error, error.agreed, extra=fields)
            place = self.inbox.take_back_to(state, error.agreed, error.epoch)
        else:
            # If the offset is above the end, the log was truncated: messages before the end were read already.
            place = error.start if policy == "earliest" and request.offset < error.start else error.end
            lost = max(place - request.offset, 0)
            self._lost_messages += lost
            text = "%s: %s Continuing at %d; lost: %s"
            log.warning(text, request.tp, error, place, count(lost, "message"), extra=fields)
            self.inbox.skip_to(state, place)
        self._fetch_from(state, place)

    # The lease

    @property
    def _needs_lease(self) -> bool:
        return self.plan.group is not None and not self.plan.broadcast

    def _may_deliver(self) -> bool:
        if not self._needs_lease or self._lease.valid():
            return True
        self._lease.call_when_valid(self.inbox.poke)  # the gap may be too short for _lease_changed
        return False

    def _lease_changed(self, valid: bool) -> None:
        """Pauses while the lease is over: takes back undelivered messages, and fetches them again afterwards."""
        if valid == self._delivering or not self._needs_lease:
            return
        self._delivering = valid
        pauses = "pauses: ZooKeeper has not answered, another member may take over"
        log.warning("consumption %s", "continues: ZooKeeper answers again" if valid else pauses)
        for state in [one for one in self.inbox.states.values() if one.next_offset >= 0]:
            offset = self.inbox.rewind(state)
            if valid:
                self._fetch_from(state, offset)
            else:
                self._stop_fetching(state)
        self.inbox.poke()

    # Called by the application

    def check_usable(self) -> None:
        """Raises ClosedError after close(), but not in callbacks during close(); ForkedError in a fork's child."""
        if isinstance(self.inbox.error, ForkedError):
            raise self.inbox.error
        if self._session is None:
            raise closed_client("consumer")

    def check_loop_may_begin(self) -> None:
        """Checks like check_usable, and raises ClosedError during close(), too. A running loop just ends then."""
        self.check_usable()
        if self.inbox.closed:
            raise closed_client("consumer")

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Makes the message at `offset` the next one to deliver."""
        state = self._state(tp)
        if state.closing:
            raise OwnershipLost(tp.topic, tp.partition, "it is being given to another consumer")
        stuck = self._stuck.pop(tp, None)
        if stuck is not None and stuck is self.inbox.error:
            self.inbox.error = next(iter(self._stuck.values()), None)
        state.sought_offset, state.assumed_offset = offset, None
        state.seeks += 1
        # Up to this offset consumer and log agree. With the epoch it notices a further accepted loss.
        epoch = stuck.epoch if isinstance(stuck, OffsetDiverged) and offset == stuck.agreed else -1
        self.inbox.rewind(state, offset, epoch)
        self._fetch_from(state, offset)

    async def seek_to(self, tp: TopicPartition, where: Any) -> None:
        """Seeks to an offset, "earliest", "latest" or a time. Raises ConfigError for any other value.

        Raises OffsetOutOfRange for an offset beyond the end. If the broker does not answer, the offset is used
        unchecked, and `on_data_loss` decides if it does not exist.
        """
        check_place(where)
        state = self._state(tp)
        if not isinstance(where, int):
            self.seek(tp, await self._finder.find(tp, self._topic_id(state), where))
            return
        await self.check_not_beyond_end({tp: where}, "Give an offset up to its end, 'earliest', 'latest' or a time.")
        self.seek(tp, where)

    async def check_not_beyond_end(self, offsets: Mapping[TopicPartition, int], hint: str) -> None:
        """Raises OffsetOutOfRange, with the hint, for the first offset that is beyond its partition's end."""
        states = {tp: self._state(tp) for tp in offsets}
        # The last fetch has shown that the other offsets exist.
        news = {tp: self._topic_id(state) for tp, state in states.items() if offsets[tp] > state.stable_offset}
        if news:
            await self._finder.check_not_beyond_end(news, offsets, hint)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Delivers no messages of these partitions until resume()."""
        for tp in partitions:
            state = self._state(tp)
            if not state.paused:
                state.paused = True
                self._stop_fetching(state)
                self.outages.ended(state.tp)
                self.inbox.rewind(state)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Continues with paused partitions."""
        for tp in partitions:
            state = self._state(tp)
            if state.paused:
                state.paused = False
                self._fetch_from(state, self.inbox.rewind(state))

    def _state(self, tp: TopicPartition) -> PartitionState:
        state = self.inbox.states.get(tp)
        if state is None:
            raise not_assigned(tp, self.plan.topics, self._assignment)
        return state

    def _topic_id(self, state: PartitionState) -> str:
        assert state.claim is not None
        return state.claim.topic_id

    def assignment(self) -> list[TopicPartition]:
        """Returns the partitions that are consumed now. Thread-safe."""
        with self.inbox.lock:
            return sorted(self.inbox.states)

    async def lag(self) -> dict[TopicPartition, int]:
        """Returns the number of stored messages that are not done, per partition. Asks the brokers."""
        states = {state.tp: state for state in list(self.inbox.states.values()) if state.next_offset >= 0}
        ends = await self._finder.ends({tp: self._topic_id(state) for tp, state in states.items()})
        return {tp: max(ends[tp] - states[tp].done_offset(), 0) for tp in states if tp in ends}

    def health(self) -> ConsumerHealth:
        """Returns the state of the consumption, without requests. Thread-safe."""
        with self.inbox.lock:
            states = list(self.inbox.states.values())
            partitions = {state.tp: health_of(state, self.outages.errors.get(state.tp, "")) for state in states}
        last = max((runner.last_answer_s for runner in self._sources.runners.values()), default=0.0)
        return ConsumerHealth(
            partitions=partitions,
            delivering=self._delivering,
            buffered_bytes=self.inbox.buffered_bytes,
            last_fetch_s=time.monotonic() - last if last else None,
            lost_messages=self._lost_messages,
            delayed_s=self.cluster.connections.delayed_s,
            group=self._assignment.health() if isinstance(self._assignment, ZKLoadRebalanceListener) else None,
            handlers=self.handlers.health(),
        )

    # The end

    def stop(self) -> None:
        """Ends the delivery after the messages that handlers have now. In the loop."""
        self._closing = True
        for state in self.inbox.states.values():
            self._stop_fetching(state)
        self.inbox.stop()

    async def close(self, *, last_done: bool) -> None:
        """Commits what is done, releases all partitions, disconnects. At the end raises the error of on_revoked.

        `last_done`: the last message is done.
        """
        if self._session is None:
            return
        self._callback_error = None
        self.stop()
        self.inbox.close(last_done=last_done)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_LIMIT_S):
                    await self._assignment.publish(done_offsets(self.inbox))
            await self._assignment.stop()
        finally:
            await self._shut_down()
        if self._callback_error is not None:
            raise self._callback_error

    async def _shut_down(self) -> None:
        session, self._session = self._session, None
        for repeated in self._repeated:
            repeated.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._finder.close()
        await self._lease.leave(self._lease_changed)
        await self.cluster.close()
        if self.plan.offsets is not None:
            await self.plan.offsets.close()
        if session is not None:
            await session.close()

    def forked(self) -> None:
        """Closes the copy in a fork's child: it cannot be used any more."""
        self.inbox.forked(ForkedError("consumer"))
        self.handlers = HandlerFigures()  # the lock of the former ones may be held
        self._session = None
