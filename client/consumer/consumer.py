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
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

from metamq.client.background import at_once, background
from metamq.client.checks import check_callables, check_seconds, not_picklable, partition_of
from metamq.client.consumer.consumer_api import ConsumerApi, Position, faults_of_the_program, partitions_of
from metamq.client.consumer.consumer_core import ConsumerCore, RebalanceCallback
from metamq.client.consumer.key_order import KeyOrderPool
from metamq.client.consumer.listener import ListenerPool
from metamq.client.consumer.receivers import PollWait, ThreadReceiver
from metamq.client.consumer.retrying import Listener, Order, check_no_time_limit, check_run
from metamq.client.consumer.schema_versions import open_with_schemas
from metamq.client.fetch.consumer_options import ConsumerOptions, ConsumerSettings, DataLoss, Start, consumer_plan
from metamq.client.handling.dead_letters import DeadLetters
from metamq.client.handling.retry_policy import RETRY_DELAY_MAX_S, Errors, RetryPolicy
from metamq.client.model import Message, message_of
from metamq.client.offsets.connections import NOT_GIVEN, BlockingConnection, blocking_database_of
from metamq.client.one_loop import OneLoop
from metamq.client.settings import cluster_access, load
from metamq.client.typevars import T
from metamq.errors import ClosedError, ConfigError, DecodeError, ForkedError

if TYPE_CHECKING:
    from metamq.client.consumer.receivers import Wait
    from metamq.client.fetch.inbox import InFlightBatch
    from metamq.client.fetch.message_batch import MessageBatch
    from metamq.client.offsets.offsets import OffsetStorage
    from metamq.client.schemas.topic import Topic
    from metamq.security.config import SecurityConfig
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")

R = TypeVar("R")


class Consumer(ConsumerApi[T]):
    """Reads topics, alone or as a member of a group. The members of a group share the partitions of their topics.

    zookeeper:   "host:port,host:port/chroot"; the default is $METAMQ_ZOOKEEPER, the TOML file, then 127.0.0.1:2181.
    root:        the root znode of metamq; the default is $METAMQ_ROOT, the TOML file, then /meta.
    topics:      names of topics, or one Topic, which decodes the values. With a group also patterns, like "orders.*":
                 the topics that match now, and those that match later. Dead-letter topics match no pattern.
    group:       the group's name. The group's offsets are kept, see `offsets`. Without a group the consumer reads every
                 partition and keeps no offsets.
    start:       the place to begin at in a partition for which the group has no offset: "earliest", "latest", or an
                 aware datetime, which means the first message at or after it. A partition that is created after this
                 consumer started begins at its first message also with "latest".
    decode:      converts bytes to a value; without it values are bytes. If it rejects a message, the loop raises
                 DecodeError, and the message is not done: it is delivered again. run() treats the error like an error
                 of its listener.
    filter:      messages for which `filter(message)` is false are skipped in iteration and in run().
    auto_commit: True commits what is done every `commit_interval_ms`. With False, you call commit(), and run()
                 commits only what it gave up.
    idle_timeout_s: seconds without a message after which iteration ends, once ZooKeeper and the brokers confirm that
                 no message is left to read. The time for joining and the time of outages do not count. After 30 s of an
                 outage the loop raises ConnectError or Timeout. None waits without limit.
    on_assigned, on_revoked: called with a list of TopicPartitions, in a thread of their own. A revoked partition is
                 released after the callback has returned.
    on_data_loss: the action if retention removed messages that the group has not read: "earliest" and "latest" continue
                 there, with a warning and a count in health(); "fail" raises OffsetOutOfRange. If a promotion with an
                 accepted loss removed messages, "fail" raises OffsetDiverged, and the others continue where the logs
                 agree.
    strategy:    "range", "round_robin", "consistent_hash" or "sticky"; the same for all members of a group.
    offsets:     the storage of the group's offsets; None is ZooKeeper. See DatabaseOffsets, FileOffsets.
    broadcast:   True delivers every message to every member; needs offsets=FileOffsets(path).
    retry_topic: True also reads the group's retry topic, GROUP.retry, which is created if it is missing. Then a
                 listener of run() may raise metamq.RetryLater. All members of a group need the same.
    consumer_id: the member's name in its group, not in use by another member; the default is a new, unique name.
    config:      a TOML file; its [consumer] section has the settings below.
    settings:    commit_interval_ms, fetch_wait_ms, fetch_min_bytes, fetch_max_bytes, partition_fetch_max_bytes,
                 prefetch_bytes, session_timeout_ms, read_from; see metamq.types.ConsumerOptions.

    A message, or batch, is done when the loop asks for the next one, or when the `with` block ends without an
    exception. Membership is the ZooKeeper session: a handler may take any time without losing its partitions.
    One thread iterates; a second one gets ConfigError. commit, seek, pause, resume, lag, health and close are
    thread-safe. After close() a running loop ends, and all methods except health() raise ClosedError.
    Raises ConnectError, TopicNotFound, ConfigError.
    """

    _asks_for_the_end = True
    """True if an idle loop ends only at the end of the data. With False, it ends after `idle_timeout_s`."""

    def __init__(
        self,
        zookeeper: str | None = None,
        *,
        topics: Collection[str] | str | Topic[T],
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
        retry_topic: bool = False,
        consumer_id: str | None = None,
        config: str | None = None,
        root: str | None = None,
        security: SecurityConfig | None = None,
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
            retry_topic=retry_topic,
        )
        options = load(ConsumerOptions, "consumer", file=config, arguments=settings, others=type(self))
        self._filter = filter
        self._in_flight: InFlightBatch | None = None
        self._slices: Iterator[Iterator[tuple[Any, ...]]] | None = None
        self._slice: Iterator[Message[T]] = iter(())  # the messages of the present slice, for poll()
        self._one_loop = OneLoop()
        self._closed = True
        self._unclosed = threading.Lock()  # held until the end of close(); a tenth of the memory of an event
        self._unclosed.acquire()
        self._background = background()
        self._core = ConsumerCore(
            plan, options, self._background.loop, on_assigned=_in_thread(on_assigned), on_revoked=_in_thread(on_revoked)
        )
        self._receiver = ThreadReceiver(self._core, self._background, idle_timeout_s, confirms=self._asks_for_the_end)
        self._access = cluster_access(zookeeper, root, config, security)
        self._background.run(open_with_schemas(self._core, self._access))
        self._closed = False

    def __iter__(self) -> Iterator[Message[T]]:
        """Iterates over messages until close() or `idle_timeout_s`. A new loop continues where the last one ended."""
        self._core.check_loop_may_begin()
        return chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[Iterator[Message[T]]]:
        """Yields the messages of one slice of a batch after another. Within a slice no Python code runs."""
        with self._one_loop.begun(threading.current_thread) as check_loop:
            while True:
                check_loop()
                if self._slices is None and not self._take_slices():
                    return
                assert self._slices is not None
                for fields in self._slices:
                    yield self._messages(fields)
                    check_loop()
                self._finish()

    def _messages(self, fields: Iterator[tuple[Any, ...]]) -> Iterator[Message[T]]:
        messages: Iterator[Message[T]] = map(message_of, fields)
        return messages if self._filter is None else filter(self._filter, messages)

    def poll(self, timeout_s: float | None = None) -> Message[T] | None:
        """Returns the next message, or None if none came within `timeout_s` seconds; None waits without limit.

        As in a loop, the call makes the message before it done. After stop() it returns None at once. It is for a loop
        that has other work to do, for example to store what it has collected. `idle_timeout_s` does not apply: an
        outage ends no poll(). One thread polls: another one gets ConfigError, until the first one has got None, or
        has ended.
        """
        check_seconds("timeout_s", timeout_s)
        self._core.check_loop_may_begin()
        self._one_loop.has_item(thread := threading.current_thread())
        wait, taken = PollWait(timeout_s), 0
        while True:
            for message in self._slice:
                return message
            if self._slices is None:
                if wait.ends_after(taken) or not self._take_slices(wait):
                    self._one_loop.has_none(thread)
                    return None
                taken += 1
            assert self._slices is not None
            if (fields := next(self._slices, None)) is None:
                self._finish()
            else:
                self._slice = self._messages(fields)

    def _take_slices(self, wait: Wait | None = None) -> bool:
        """Waits for a batch. Returns False at the end."""
        self._finish()
        in_flight = self._receiver.take(wait=wait)
        if in_flight is None:
            return False
        self._in_flight = in_flight  # before any call: a Ctrl-C may come in a call
        try:
            self._slices = in_flight.slices()
        except BaseException:
            self._finish()
            raise
        return True

    def batches(self, max_messages: int | None = None, within_s: float | None = None) -> Iterator[MessageBatch[T]]:
        """Iterates over batches as they are stored, without an object per message. Ends as iteration does.

        `max_messages` joins fetched batches of a partition, up to this number of messages: fewer and larger
        batches, if the producers' batches are small. It does not wait for more messages, and splits no stored batch.
        With `within_s` it waits: a batch comes when it is full, or so many seconds after its first message arrived
        here, or when `prefetch_bytes` hold no more. Each partition waits for itself; no idle time runs meanwhile.
        """
        self._check_batches(max_messages, within_s)
        with self._one_loop.begun(threading.current_thread) as check_loop:
            check_loop()
            self._finish()
            while True:
                in_flight = self._receiver.take(whole=True, max_messages=max_messages or 0, within_s=within_s or 0.0)
                if in_flight is None:
                    return
                self._in_flight = in_flight
                yield in_flight.batch
                check_loop()
                self._finish(is_handled=True)

    def _finish(self, *, is_handled: bool = False) -> None:
        """Marks the delivered messages as done, because the loop asks for more.

        A batch whose loop ended early is not done.
        """
        self._slices, self._slice = None, iter(())
        if self._in_flight is not None:
            self._receiver.release(self._in_flight, last_done=is_handled or not self._in_flight.is_rejected)
            self._in_flight = None  # after release(): if a Ctrl-C interrupts that, the next call repeats it

    @faults_of_the_program()
    def commit(self, position: Position = None, *, connection: BlockingConnection | None = NOT_GIVEN) -> None:
        """Commits offsets. Thread-safe.

        position:   None commits all that is done, and where nothing is done, the place where the group begins. A
                    message or a batch commits up to it, inclusive. A mapping {TopicPartition: next offset} commits the
                    given offsets.
        connection: with offsets=DatabaseOffsets(...), the offsets are written into the current transaction of this
                    connection (DB-API, SQLAlchemy's, Django's), and you commit the transaction. Results and offsets are
                    stored together or not at all, so each message counts exactly once. Needs auto_commit=False. Without
                    a position, the message that is being processed is not committed.

        If the answer to the database's commit is lost, the transaction may be stored. Then leave the `with` block of
        the consumer, seek back to the transaction's first message, or process the same message or batch again. If the
        transaction was stored, a commit of its messages raises OwnershipLost.

        Raises OwnershipLost if a partition has another owner now, or these messages are committed already: roll back,
        and continue with the next messages. Raises OffsetOutOfRange for a given offset beyond the end; then nothing is
        committed. After any other error the commit can be repeated.
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
        self._wait_for(self._commit_stored(position))

    def dead_letter(
        self, message: Message[T] | DecodeError, error: Exception | None = None, *, attempts: int = 1
    ) -> None:
        """Stores a message in the group's dead-letter topic, for a loop, a batch or poll(). Thread-safe.

        It is stored when the call returns; the message is done as usual, when the next one is asked for. After a crash
        between the two it comes again, so the letter may be there twice. A listener of run() raises metamq.GiveUp
        instead, and run() does the rest.

        message:  a message that was delivered; or the DecodeError of a message that `decode` rejected. Then a new loop
                  or poll() continues after the message, which needs no seek(). In batches(), catch it inside of the
                  loop: a new loop gets the whole batch again.
        error:    the exception that the message failed with; None for a DecodeError.
        attempts: the number of attempts, which the letter shows.

        Raises OwnershipLost if the partition has another owner now: it gets the message. Raises ConfigError without a
        group, and with `decode` for a message before the last one or the last batch: its stored value is gone. Raises
        the errors of a delivery; then the letter may be stored, and you can repeat the call.
        """
        self._wait_for(self._send_letter(message, error, attempts))

    def seek(self, partition: tuple[str, str], where: int | Start) -> None:
        """Sets the next message of a TopicPartition: an offset, "earliest", "latest", or the first at a time.
        Thread-safe.

        Raises OffsetOutOfRange for an offset beyond the end. Kafka's consumer applies its reset policy at the next poll
        instead. If retention has removed the offset, `on_data_loss` decides. While the broker does not answer, any
        offset is accepted, and `on_data_loss` decides later. Raises PartitionNotFound, ConfigError for a wrong place,
        OwnershipLost for another member's partition.
        """
        self._core.check_usable()
        self._wait_for(self._core.seek_to(partition_of(partition), where))

    def _new_letters(self) -> DeadLetters:
        return DeadLetters(self._access, self._core.plan.group, self._core.plan.retry_topic)

    def _seek_now(self, tp: TopicPartition, offset: int) -> None:
        self._wait_for(self._core.seek_to(tp, offset))

    def pause(self, *partitions: tuple[str, str]) -> None:
        """Stops the delivery of these partitions, or all assigned ones, until resume(). Thread-safe.

        The partitions stay assigned.
        """
        self._in_loop(self._core.pause, partitions)

    def resume(self, *partitions: tuple[str, str]) -> None:
        """Continues with paused partitions, or with all assigned ones. Thread-safe."""
        self._in_loop(self._core.resume, partitions)

    def _in_loop(
        self, call: Callable[[Iterable[TopicPartition]], None], partitions: tuple[tuple[str, str], ...]
    ) -> None:
        self._core.check_usable()

        async def run() -> None:
            call(partitions_of(partitions) or self._core.assignment())

        self._wait_for(run())

    def lag(self) -> dict[TopicPartition, int]:
        """Returns the number of stored messages that are not done, per assigned partition. Asks the brokers.

        Thread-safe. Raises the first error of a broker, or ConnectError.
        """
        self._core.check_usable()
        return self._wait_for(self._core.lag())

    def run(
        self,
        listener: Listener[T],
        *,
        order: Order = "partition",
        concurrency: int = 4,
        max_attempts: int = 5,
        retry_delay_s: float = 0.1,
        retry_delay_max_s: float = RETRY_DELAY_MAX_S,
        jitter: float = 0.0,
        retry_later_s: float | None = None,
        retry_on: Errors = (),
        give_up_on: Errors = (),
        dead_letter: bool = True,
        handler_timeout_s: None = None,
    ) -> None:
        """Calls `listener(message)` for each message, until close(), `idle_timeout_s` or an error.

        `concurrency` threads process partitions in parallel; the messages of one partition are processed one after
        another. With order="key" only the messages of one key are, and messages without a key have no order. A commit
        never passes an unfinished message: after a crash, close() or an error the finished ones behind it, fewer than
        16 * concurrency in each partition, are delivered again. stop() and a rebalance finish the ones before them.

        If the listener raises, it gets the message again after `retry_delay_s` seconds, doubled each time, up to
        `retry_delay_max_s`. `jitter` shortens each pause by chance, by up to this part of it: with 0.5 it is half to
        all of it, so many consumers do not try at once. metamq.attempt() is the number of the attempt. After
        `max_attempts` the message goes to the group's dead-letter topic; with dead_letter=False the error ends run().
        A listener that raises metamq.Rollback, or an error of `retry_on`, gets the message again without a limit on
        attempts: give the errors of an outage, such as `retry_on=psycopg.OperationalError`. Their pauses double, too.
        Meanwhile the messages behind it wait in order, and health() has the error.

        With Consumer(retry_topic=True), metamq.RetryLater(delay_s=60) stores the message in the group's retry topic,
        and the messages behind it go on. `retry_later_s` does the same after each failed attempt, with that delay,
        doubled each time up to an hour. Attempts count over both topics; the order of its key is given up. It is at
        least once.

        After metamq.GiveUp("why"), or an error of `give_up_on`, there is no further attempt: name the errors of the
        message itself, such as `give_up_on=(ValidationError, KeyError)`. They count also if they are of `retry_on`.

        There is no `handler_timeout_s` here, since Python cannot stop a function in a thread: ConfigError. The health()
        of a partition names the message that is `running`, and how long.

        A ConfigError of commit() in a listener ends run(): each message would fail. Nothing is given up.

        Raises WrongType for a coroutine function or a generator function, and if the listener returns an awaitable:
        run() does not await it, and the message is not done. metamq.aio.Consumer awaits its listener.
        """
        self._core.check_loop_may_begin()
        check_no_time_limit(handler_timeout_s)
        order = check_run(order, dead_letter, retry_later_s, self._core.plan)
        dead_letters = self._new_letters() if dead_letter else None
        policy = RetryPolicy(
            max_attempts,
            retry_delay_s,
            retry_on,
            give_up_on,
            retry_delay_max_s=retry_delay_max_s,
            jitter=jitter,
            retry_later_s=retry_later_s,
        )
        kind = {"partition": ListenerPool, "key": KeyOrderPool}[order]
        pool = kind(listener, self._filter, dead_letters, policy, concurrency, self._receiver, self._background)
        with self._one_loop.begun(threading.current_thread) as check_loop:
            check_loop()
            self._finish()
            pool.run()

    def stop(self) -> None:
        """Ends the loop, or run(), after the messages that are being processed now. Returns at once.

        Thread-safe. A signal handler may call it: `signal.signal(signal.SIGTERM, lambda *_: consumer.stop())`. The end
        of the `with` block, or close(), commits what is done. Further loops end at once. A message that waits for its
        next attempt is not done.
        """
        self._core.check_usable()
        self._background.call_soon(self._core.stop)

    def close(self) -> None:
        """Commits what is done, releases the partitions, disconnects. Thread-safe; further calls do nothing.

        The message that is being processed is not done. The loop over the consumer ends. In a signal handler that
        interrupts that loop, close() may return before it has finished; the end of the `with` block waits for it.
        """
        self._close(last_done=False)

    def _close(self, *, last_done: bool) -> None:
        if not self._closed:
            self._closed = True
            if isinstance(self._core.inbox.error, ForkedError):
                raise self._core.inbox.error
            closing = self._close_all(last_done=last_done)
            if self._core.inbox.is_inside():
                asyncio.run_coroutine_threadsafe(closing, self._background.loop).add_done_callback(self._has_closed)
                return
            try:
                self._background.run(closing)
            finally:
                self._unclosed.release()

    def _has_closed(self, closing: Future[None]) -> None:
        if (error := closing.exception()) is not None:
            log.error("a consumer was closed by a signal handler: %s", error, exc_info=error)
        self._unclosed.release()

    def _wait_for(self, work: Coroutine[Any, Any, R]) -> R:
        """Runs `work` in the loop. Raises ConfigError if the wait would never end."""
        if self._core.inbox.is_inside():
            work.close()
            raise ConfigError(
                "the call waits, and it interrupts the loop over this consumer in the same thread, as a signal handler "
                "does: the wait would never end",
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
        if not isinstance(self._core.inbox.error, ForkedError):  # otherwise a child process leaves its parent's block
            self._close(last_done=kind is None)
            with self._unclosed:  # another thread may be closing it: the process may end after the block
                pass

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is None or self._closed or isinstance(core.inbox.error, ForkedError | ClosedError):
            return
        warnings.warn("a Consumer was not closed: use `with` or close()", ResourceWarning, source=self, stacklevel=2)
        loop = self._background.loop
        loop.call_soon_threadsafe(_close_abandoned, core, self._letters)


_closing: set[asyncio.Task[None]] = set()


def _close_abandoned(core: ConsumerCore, letters: DeadLetters | None) -> None:
    async def close() -> None:
        try:
            await core.close(last_done=False)
        finally:
            if letters is not None:
                await letters.close()

    task = asyncio.ensure_future(close())
    _closing.add(task)  # the loop itself has only weak references to tasks
    task.add_done_callback(_closing.discard)


async def _call_in_thread(callback: Callable[[list[TopicPartition]], object], partitions: list[TopicPartition]) -> None:
    """Runs a callback in a thread of its own: in a pool it might wait for a commit that needs a thread of that pool."""
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
