"""The blocking Consumer."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import chain
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

from metamq.client.background import background
from metamq.client.checks import check_callables, check_seconds, check_whole, not_picklable, partition_of
from metamq.client.consumer.consumer_core import ConsumerCore, RebalanceCallback
from metamq.client.consumer.consumer_face import ConsumerFace, Position, partitions_of
from metamq.client.consumer.hands import ThreadHands
from metamq.client.consumer.listener import DeadLetters, Listener, ListenerPool
from metamq.client.fetch.consumer_options import ConsumerOptions, ConsumerSettings, DataLoss, Start, consumer_plan
from metamq.client.fetch.inbox import Hand
from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.model import Message, message_of
from metamq.client.net.retrying import RetryPolicy
from metamq.client.offsets.dbapi import NOT_GIVEN, DatabaseConnection, at_once, blocking_database_of
from metamq.client.offsets.offsets import OffsetStorage
from metamq.client.one_loop import OneLoop
from metamq.client.settings import load, zookeeper_root, zookeeper_servers
from metamq.client.typevars import T
from metamq.errors import ClosedError, ConfigError, ForkedError
from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")

R = TypeVar("R")


class Consumer(ConsumerFace[T]):
    """Reads topics, alone or sharing their partitions with the other members of a group.

    zookeeper:   "host:port,host:port/chroot"; None takes $METAMQ_ZOOKEEPER, the TOML file, then 127.0.0.1:2181.
    root:        the znode that all is kept below; None takes $METAMQ_ROOT, the TOML file, then /meta.
    topics:      names of topics.
    group:       members of a group share its topics' partitions, and the group's offsets are kept. Without a group the
                 consumer reads every partition and keeps nothing.
    start:       where to begin with a partition the group has no offset for: "earliest", "latest", an aware datetime.
    decode:      makes a value of bytes; without it values are bytes. What it rejects raises DecodeError from the loop,
                 and is not done: it comes again. run() treats it as it does what its listener rejects.
    filter:      messages for which `filter(message)` is false are skipped when iterating and in run().
    auto_commit: commit what is done every `commit_interval_ms`; with False call commit().
    idle_timeout_s: iteration ends when nothing came for so long, and ZooKeeper and the brokers then say that nothing is
                 left to read. The time that joining takes, or an outage, does not count; after 30 s of an outage the
                 loop raises ConnectError or Timeout. None waits for ever.
    on_assigned, on_revoked: called with a list of TopicPartitions, in a thread of their own; a revoked partition is
                 given away after the callback has returned.
    on_data_loss: when retention was faster than the group: go on at "earliest" or "latest", with a warning and a count
                 in health(), or "fail" with OffsetOutOfRange. Also for what a promotion with an accepted loss took
                 back: "fail" with OffsetDiverged, else on from where the logs agree.
    strategy:    "range", "round_robin", "consistent_hash" or "sticky"; one for a group.
    offsets:     where the group's offsets are kept; None is ZooKeeper. See DatabaseOffsets, FileOffsets.
    broadcast:   every member reads every message; needs offsets=FileOffsets(path).
    settings:    commit_interval_ms, fetch_wait_ms, fetch_min_bytes, fetch_max_bytes, partition_fetch_max_bytes,
                 prefetch_bytes, session_timeout_ms, read_from; see metamq.client.fetch.consumer_options.

    A message, or batch, is done when the next one is asked for, or when the `with` block ends without an exception.
    Membership is the ZooKeeper session: a handler may take as long as it likes without losing its partitions.
    One thread iterates, and a second one gets ConfigError; commit, seek, pause, resume, lag and health may be called
    from any. After close() a loop that is running ends, and everything but health() raises ClosedError.
    Raises ConnectError, TopicNotFound, ConfigError.
    """

    _asks_for_the_end = True
    """Whether a loop that is idle ends only at the end of the data; else `idle_timeout_s` is a pause between looks."""

    def __init__(
        self,
        zookeeper: str | None = None,
        *,
        topics: Collection[str] | str,
        group: str | None = None,
        start: Start = "earliest",
        decode: Callable[[bytes], T] | None = None,
        filter: Callable[[Message[T]], bool] | None = None,
        auto_commit: bool = True,
        idle_timeout_s: float | None = None,
        on_assigned: Callable[[list[TopicPartition]], object] | None = None,
        on_revoked: Callable[[list[TopicPartition]], object] | None = None,
        on_data_loss: DataLoss = "earliest",
        strategy: str = "range",
        offsets: OffsetStorage | None = None,
        broadcast: bool = False,
        consumer_id: str | None = None,
        config: str | None = None,
        root: str | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        check_callables(decode=decode, filter=filter, on_assigned=on_assigned, on_revoked=on_revoked)
        check_seconds("idle_timeout_s", idle_timeout_s)
        plan = consumer_plan(
            topics,
            group,
            consumer_id=consumer_id,
            start=start,
            strategy=strategy,
            auto_commit=auto_commit,
            on_data_loss=on_data_loss,
            broadcast=broadcast,
            offsets=offsets,
            decode=decode,
        )
        options = load(ConsumerOptions, "consumer", file=config, arguments=settings, others=type(self))
        self._filter = filter
        self._hand: Hand | None = None
        self._slices: Iterator[Iterator[tuple[Any, ...]]] | None = None
        self._one_loop = OneLoop()
        self._closed = True
        self._close_ended = threading.Event()
        self._background = background()
        self._core = ConsumerCore(
            plan,
            options,
            self._background.loop,
            on_assigned=_in_thread(on_assigned),
            on_revoked=_in_thread(on_revoked),
        )
        self._hands = ThreadHands(self._core, self._background, idle_timeout_s, asks=self._asks_for_the_end)
        self._servers = zookeeper_servers(zookeeper, config)
        self._root = zookeeper_root(root, config)
        self._background.run(self._core.open(self._servers, self._root))
        self._closed = False

    def __iter__(self) -> Iterator[Message[T]]:
        """Messages, until close(), `idle_timeout_s`, or the loop is left; a new loop goes on where it was left."""
        self._core.check_loop_may_begin()
        return chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[Iterator[Message[T]]]:
        """The messages of one slice of a batch after the other; no Python runs between two messages of a slice."""
        with self._one_loop.begun(threading.current_thread) as goes_on:
            while True:
                goes_on()
                if self._slices is None and not self._take_slices():
                    return
                assert self._slices is not None
                for fields in self._slices:
                    messages: Iterator[Message[T]] = map(message_of, fields)
                    yield messages if self._filter is None else filter(self._filter, messages)
                    goes_on()
                self._finish()

    def _take_slices(self) -> bool:
        """Waits for a batch; False at the end."""
        self._finish()
        hand = self._hands.take()
        if hand is None:
            return False
        self._hand = hand  # before anything is called, where a Ctrl-C may come
        try:
            self._slices = hand.slices()
        except BaseException:
            self._finish()
            raise
        return True

    def batches(self, max_messages: int | None = None) -> Iterator[MessageBatch[T]]:
        """Batches as they are stored, without an object per message; ends as iteration does.

        `max_messages`: joins what was fetched of a partition, up to so many messages: fewer and larger batches where
        producers' are small. It does not wait for more to come, and splits no stored batch.
        """
        if max_messages is not None:
            check_whole("max_messages", max_messages, 1)
        if self._filter is not None:
            raise ConfigError("batches() does not filter", hint="Leave `filter=` out, and filter the batch's columns.")
        self._core.check_loop_may_begin()
        with self._one_loop.begun(threading.current_thread) as goes_on:
            goes_on()
            self._finish()
            while True:
                hand = self._hands.take(whole=True, max_messages=max_messages or 0)
                if hand is None:
                    return
                self._hand = hand
                yield hand.batch
                goes_on()
                self._finish(is_handled=True)

    def _finish(self, *, is_handled: bool = False) -> None:
        """What is in hand is done, as the next is asked for; not a batch that its loop was left for."""
        self._slices = None
        if self._hand is not None:
            self._hands.release(self._hand, in_hand=is_handled or not self._hand.is_rejected)
            self._hand = None  # afterwards: a Ctrl-C in release() leaves it to the next call

    def commit(self, position: Position = None, *, connection: DatabaseConnection | None = NOT_GIVEN) -> None:
        """Commits: all that is done, or up to and with a message or batch, or {TopicPartition: next offset}.

        connection: with offsets=DatabaseOffsets(...), writes the offsets into the transaction that this DB-API
        connection is in, and leaves committing it to you: results and offsets are stored together or not at all, so
        each message counts exactly once. Needs auto_commit=False. Give a position, or everything that is done counts,
        without what is in hand. When the database's answer to its commit was lost, leave the block, seek back to the
        first message of the transaction, or do the same message or batch again: if it was stored, the commit says so.

        Raises OwnershipLost when a partition has another owner now, or these messages are counted already: roll back,
        and go on with what comes next. OffsetOutOfRange for a given offset beyond the end; nothing is committed then.
        Other errors may be retried.
        """
        self._core.check_usable()
        self._check_not_none(connection)
        if isinstance(position, Mapping):
            self._wait_for(self._check_given(position))
        if connection is not None and connection is not NOT_GIVEN:
            storage = self._storage_for_commit_in()
            hint = "Take metamq.aio.Consumer and await its commit(), or give a blocking connection."
            database = blocking_database_of(connection, storage._paramstyle, hint)
            at_once(self._commit_in(storage, position, database))
            return
        refused = self._wait_for(self._core.commits.commit(self._requests(position)))
        for error in refused.values():
            raise error

    def seek(self, partition: tuple[str, str], where: int | Start) -> None:
        """The next message of a TopicPartition is the one at an offset, "earliest", "latest", or first at a time.

        Raises OffsetOutOfRange for an offset beyond the end, where Kafka's consumer would go by its reset policy at the
        next poll. An offset that retention has removed goes by `on_data_loss`; so does any offset while its broker does
        not answer. PartitionNotFound, ConfigError for what is none, OwnershipLost for another member's partition.
        """
        self._core.check_usable()
        self._wait_for(self._core.seek_to(partition_of(partition), where))

    def _seek_now(self, tp: TopicPartition, offset: int) -> None:
        self._wait_for(self._core.seek_to(tp, offset))

    def pause(self, *partitions: tuple[str, str]) -> None:
        """Hands out nothing of these partitions, or of all assigned ones, until resume(); they stay assigned."""
        self._in_loop(self._core.pause, partitions)

    def resume(self, *partitions: tuple[str, str]) -> None:
        """Goes on with paused partitions."""
        self._in_loop(self._core.resume, partitions)

    def _in_loop(
        self, call: Callable[[Iterable[TopicPartition]], None], partitions: tuple[tuple[str, str], ...]
    ) -> None:
        self._core.check_usable()

        async def run() -> None:
            call(partitions_of(partitions) or self._core.assignment())

        self._wait_for(run())

    def lag(self) -> dict[TopicPartition, int]:
        """Messages that are stored and not done, per assigned partition, as the brokers know now."""
        self._core.check_usable()
        return self._wait_for(self._core.lag())

    def run(
        self,
        listener: Listener[T],
        *,
        concurrency: int = 4,
        max_attempts: int = 5,
        retry_delay_s: float = 0.1,
        dead_letter: bool = True,
    ) -> None:
        """Calls `listener(message)` for each message, until close(), `idle_timeout_s` or an error.

        Partitions are handled side by side by `concurrency` threads, a partition's messages one after the other. A
        message whose listener raises is given to it again after `retry_delay_s`, doubled each time; after
        `max_attempts` it goes to the group's dead-letter topic, or with dead_letter=False the error ends run().
        A listener that raises metamq.Rollback gets the message again, as often as it likes.

        Raises WrongType for a coroutine function, and when the listener returns something to be awaited: nobody would,
        and the message is not done. metamq.aio.Consumer awaits its listener.
        """
        self._core.check_loop_may_begin()
        dead_letters = DeadLetters(self._servers, self._root, self._core.plan.group) if dead_letter else None
        policy = RetryPolicy(max_attempts, retry_delay_s)
        pool = ListenerPool(self._hands, listener, self._filter, dead_letters, policy, concurrency)
        with self._one_loop.begun(threading.current_thread) as goes_on:
            goes_on()
            self._finish()
            pool.run()

    def close(self) -> None:
        """Commits what is done, gives the partitions back, disconnects. Any thread; further calls do nothing.

        What is in hand is not done. The loop over the consumer ends. In a signal handler that interrupts that loop it
        may return before all of this is done; leaving the `with` block waits for it.
        """
        self._close(in_hand_done=False)

    def _close(self, *, in_hand_done: bool) -> None:
        if not self._closed:
            self._closed = True
            if isinstance(self._core.inbox.error, ForkedError):
                raise self._core.inbox.error
            closing = self._core.close(in_hand_done=in_hand_done)
            if self._core.inbox.is_inside():
                asyncio.run_coroutine_threadsafe(closing, self._background.loop).add_done_callback(self._has_closed)
                return
            try:
                self._background.run(closing)
            finally:
                self._close_ended.set()

    def _has_closed(self, closing: Future[None]) -> None:
        if (error := closing.exception()) is not None:
            log.error("a consumer was closed by a signal handler: %s", error, exc_info=error)
        self._close_ended.set()

    def _wait_for(self, work: Coroutine[Any, Any, R]) -> R:
        """Has the loop do it. Raises ConfigError where waiting would be for ever."""
        if self._core.inbox.is_inside():
            work.close()
            raise ConfigError(
                "the call waits, and it interrupts the loop over this consumer in the same thread, as a signal handler "
                "does: that would never go on",
                hint="Set a flag or raise an exception in the handler. close() may be called there.",
            )
        return self._background.run(work)

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self)

    def __enter__(self) -> Self:
        self._core.check_loop_may_begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(self._core.inbox.error, ForkedError):  # else a child leaves its parent's block
            self._close(in_hand_done=kind is None)
            self._close_ended.wait()  # another thread may be at it: the process may end after the block

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is None or self._closed or isinstance(core.inbox.error, ForkedError | ClosedError):
            return
        warnings.warn("a Consumer was not closed: use `with` or close()", ResourceWarning, source=self, stacklevel=2)
        loop = self._background.loop
        loop.call_soon_threadsafe(_close_abandoned, core)


_closing: set[asyncio.Task[None]] = set()


def _close_abandoned(core: ConsumerCore) -> None:
    task = asyncio.ensure_future(core.close(in_hand_done=False))
    _closing.add(task)  # the loop itself keeps tasks by weak references only
    task.add_done_callback(_closing.discard)


async def _call_in_thread(callback: Callable[[list[TopicPartition]], object], partitions: list[TopicPartition]) -> None:
    """In a thread of its own: one of a pool might wait for a commit that needs a thread of the same pool."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_exception(error) if error is not None else ended.set_result(None)

    def call() -> None:
        try:
            callback(partitions)
        except BaseException as error:
            loop.call_soon_threadsafe(settle, error)
        else:
            loop.call_soon_threadsafe(settle, None)

    threading.Thread(target=call, name="metamq-rebalance", daemon=True).start()
    await ended


def _in_thread(callback: Callable[[list[TopicPartition]], object] | None) -> RebalanceCallback:
    async def call(partitions: list[TopicPartition]) -> None:
        if callback is not None and partitions:
            await _call_in_thread(callback, partitions)

    return call
