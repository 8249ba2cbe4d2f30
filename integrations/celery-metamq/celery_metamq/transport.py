"""The transport: a queue of Celery is a topic, and its workers are the members of a group.

Theory of operation
-------------------
Celery acknowledges each task by itself, in any order. metamq commits one offset for each partition. So the offset of a
partition is committed up to the oldest task that is not acknowledged yet: at most once in `commit_interval_s`, before
another worker takes the partition over, and at the end. After a crash, the tasks from there on run again, also those
that were acknowledged after it.

The worker's thread reads and commits. Tasks are acknowledged in any thread, as that of a pool of processes.

The consumer's loop would count a message as done as soon as it asks for the next one. So `auto_commit` is off. A worker
that stops leaves its unacknowledged tasks where they are, uncommitted: another worker gets them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Any, NamedTuple

from kombu.transport import virtual
from kombu.utils.json import dumps, loads

from metamq import Admin, Consumer, Message, Producer, TopicPartition
from metamq.errors import MetamqError, OwnershipLost, TopicExists

log = logging.getLogger("celery_metamq")

PARTITIONS = 16
COMMIT_INTERVAL_S = 1.0
IDLE_S = 0.1
"""Seconds that one look at a queue waits for a task."""


class Unfinished:
    """The delivered tasks of one partition that are not acknowledged. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offsets: dict[int, None] = {}  # in the order of delivery, which is that of offsets
        self._end = self._committed = 0

    def begin(self, offset: int) -> None:
        """Notes a delivered task."""
        with self._lock:
            if not self._end:
                self._committed = offset
            self._offsets[offset] = None
            self._end = offset + 1

    def finish(self, offset: int) -> None:
        """Notes an acknowledged task."""
        with self._lock:
            self._offsets.pop(offset, None)

    def to_commit(self) -> int | None:
        """Returns the offset to commit, or None if there is nothing new."""
        with self._lock:
            end = next(iter(self._offsets), self._end)
            return end if end > self._committed else None

    def note_commit(self, end: int) -> None:
        """Notes a commit that has succeeded."""
        with self._lock:
            self._committed = max(self._committed, end)


class Queue:
    """One queue that this process reads: its consumer and its unfinished tasks."""

    def __init__(self, zookeeper: str | None, name: str, settings: dict[str, Any], commit_interval_s: float) -> None:
        self._interval_s = commit_interval_s
        self._commit_s = 0.0
        self._unfinished: dict[TopicPartition, Unfinished] = {}
        """Changed by the worker's thread, and by the consumer's thread for a partition that another worker takes."""
        self.consumer: Consumer[bytes] = Consumer(
            zookeeper,
            topics=name,
            group=name,
            auto_commit=False,
            idle_timeout_s=IDLE_S,
            on_revoked=self._give_up,
            **settings,
        )
        self._messages: Iterator[Message[bytes]] = iter(self.consumer)

    def get(self) -> tuple[Message[bytes], Unfinished]:
        """Returns the next task. Raises Empty if there is none now."""
        self.commit()
        message = next(self._messages, None)
        if message is None:
            self._messages = iter(self.consumer)
            raise Empty
        unfinished = self._unfinished.setdefault(TopicPartition(message.topic, message.partition), Unfinished())
        unfinished.begin(message.offset)
        return message, unfinished

    def commit(self, *, at_once: bool = False) -> None:
        """Commits what is finished, if the interval is over. An error is logged; the next commit repeats it."""
        if not at_once and time.monotonic() - self._commit_s < self._interval_s:
            return
        self._commit_s = time.monotonic()
        for partition in list(self._unfinished):
            self._commit_one(partition)

    def _commit_one(self, partition: TopicPartition) -> None:
        unfinished = self._unfinished.get(partition)
        end = unfinished.to_commit() if unfinished is not None else None
        if unfinished is None or end is None:
            return
        try:
            self.consumer.commit({partition: end})
            unfinished.note_commit(end)
        except OwnershipLost:
            self._unfinished.pop(partition, None)  # another worker has the partition, and runs the tasks again
        except MetamqError as error:
            log.warning("finished tasks of %s are not committed now: %s", partition, error)

    def _give_up(self, revoked: list[TopicPartition]) -> None:
        for partition in revoked:
            self._commit_one(partition)
            self._unfinished.pop(partition, None)

    def close(self) -> None:
        """Commits what is finished, and leaves the group."""
        try:
            self.commit(at_once=True)
        finally:
            self.consumer.close()


class Place(NamedTuple):
    """The place of a delivered task."""

    queue: str
    unfinished: Unfinished
    """The tasks of its partition."""
    offset: int


class QoS(virtual.QoS):
    """Knows the place of each unacknowledged task."""

    restore_at_shutdown = False  # unacknowledged tasks are in the topic, uncommitted

    def ack(self, delivery_tag: str) -> None:
        """Acknowledges a task."""
        message = self._delivered.get(delivery_tag)
        if message is not None:
            self.channel.finish(message)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Acknowledges a task. `requeue`: stores it again, at the end of its queue, before that."""
        message = self._delivered.get(delivery_tag)
        if message is not None:
            if requeue:
                self.channel.send_again(message)
            self.channel.finish(message)
        super().ack(delivery_tag)


class Channel(virtual.Channel):
    """The queues of one connection. Raises metamq's errors.

    transport_options:
        partitions         of a queue's new topic; 16 by default. As many workers of a queue have work.
        commit_interval_s  1 by default
        producer, consumer more settings of metamq's clients
    """

    QoS = QoS
    do_restore = False
    supports_fanout = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        info = self.connection.client
        self._zookeeper = f"{info.hostname}:{info.port or 2181}" if info.hostname else None
        self._options: dict[str, Any] = dict(info.transport_options or {})
        self._queues: dict[str, Queue] = {}
        self._producer: Producer[bytes] | None = None
        self._places: dict[str, Place] = {}
        """By delivery tag."""

    def _topic(self, queue: str) -> str:
        """Returns the name of the queue's topic. A name with other characters than those of topics gets "-" for them,
        and a checksum, so that two queues are two topics."""
        topic = "".join(one if one.isascii() and (one.isalnum() or one in "._-") else "-" for one in queue)
        return topic if topic == queue else f"{topic}-{zlib.crc32(queue.encode()):08x}"

    def _admin(self) -> Admin:
        return Admin(self._zookeeper)

    def _has_queue(self, queue: str, **_options: Any) -> bool:
        with self._admin() as admin:
            return self._topic(queue) in admin.topics()

    def _new_queue(self, queue: str, **_options: Any) -> None:
        topic = self._topic(queue)
        with self._admin() as admin:
            if topic not in admin.topics():
                with contextlib.suppress(TopicExists):  # another worker was faster
                    admin.create_topic(topic, self._options.get("partitions", PARTITIONS))

    def _put(self, queue: str, message: dict[str, Any], **_options: Any) -> None:
        """Stores a task, and returns when it is stored."""
        if self._producer is None:
            self._producer = Producer(self._zookeeper, **self._options.get("producer", {}))
        self._producer.send(self._topic(queue), dumps(message).encode()).result()

    def _opened(self, queue: str) -> Queue:
        interval_s = self._options.get("commit_interval_s", COMMIT_INTERVAL_S)
        return Queue(self._zookeeper, self._topic(queue), self._options.get("consumer", {}), interval_s)

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        """Returns the next task. Raises Empty if there is none now."""
        if queue not in self._queues:
            self._queues[queue] = self._opened(queue)
        while True:
            message, unfinished = self._queues[queue].get()
            try:
                task: dict[str, Any] = loads(message.value.decode())
                tag = task["properties"]["delivery_tag"] = self._next_delivery_tag()
            except Exception as error:  # another program has sent it
                where = f"{message.topic}/{message.partition} at offset {message.offset}"
                log.error("the message in %s is no task, and is passed over: %r", where, error)
                unfinished.finish(message.offset)
                continue
            self._places[tag] = Place(queue, unfinished, message.offset)
            return task

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        """Returns the next message of a queue, or None."""
        message = super().basic_get(queue, no_ack=no_ack, **options)
        if message is not None and no_ack:
            self.finish(message)
        return message

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **options: Any
    ) -> Any:
        """Begins the consumption of a queue. With `no_ack` a message is finished before `callback` gets it."""

        def finish_first(message: Any) -> Any:
            self.finish(message)
            return callback(message)

        return super().basic_consume(queue, no_ack, finish_first if no_ack else callback, consumer_tag, **options)

    def finish(self, message: Any) -> None:
        """Notes an acknowledged task."""
        place = self._places.pop(message.delivery_tag, None)
        if place is not None:
            place.unfinished.finish(place.offset)

    def send_again(self, message: Any) -> None:
        """Stores a delivered task again."""
        place = self._places.get(message.delivery_tag)
        if place is not None:
            task = message.serializable()
            task["redelivered"] = True
            self._put(place.queue, task)

    def _size(self, queue: str) -> int:
        """Returns the number of tasks behind the commits of this process; 0 if it does not read the queue."""
        reading = self._queues.get(queue)
        return 0 if reading is None else sum(reading.consumer.lag().values())

    def _purge(self, queue: str) -> int:
        """Passes over all stored tasks. Raises metamq's error while workers read the queue."""
        topic = self._topic(queue)
        with self._admin() as admin:
            if topic not in admin.groups():
                self._opened(queue).close()  # makes the group
            resets = admin.reset_offsets(topic, topic, "latest")
        return sum(max(reset.after - (reset.before or 0), 0) for reset in resets)

    def _delete(self, queue: str, *_arguments: Any, **_options: Any) -> None:
        reading = self._queues.pop(queue, None)
        if reading is not None:
            reading.close()
        with self._admin() as admin:
            admin.delete(self._topic(queue))

    def basic_cancel(self, consumer_tag: str) -> Any:
        """Ends the consumption of a queue; tasks that are not acknowledged stay in it."""
        queue = self._tag_to_queue.get(consumer_tag)
        result = super().basic_cancel(consumer_tag)
        if queue is not None and queue not in self._active_queues and queue in self._queues:
            self._queues.pop(queue).close()
        return result

    def close(self) -> None:
        """Commits what is finished, leaves the groups, and closes the clients."""
        with contextlib.ExitStack() as stack:  # all of it, also after an error
            if self._producer is not None:
                stack.callback(self._producer.close)
                self._producer = None
            while self._queues:
                stack.callback(self._queues.popitem()[1].close)
            super().close()


class Transport(virtual.Transport):
    """metamq as a transport of kombu. The URL is `metamq://HOST:PORT`, that of ZooKeeper; `metamq://` alone means
    $METAMQ_ZOOKEEPER, which may name several servers."""

    Channel = Channel
    driver_type = driver_name = "metamq"
    default_port = 2181
    polling_interval = 0.0  # each look at a queue waits
    connection_errors = (*virtual.Transport.connection_errors, MetamqError)
    implements = virtual.Transport.implements.extend(
        asynchronous=False, exchange_type=frozenset(["direct", "topic"]), heartbeats=False
    )

    def driver_version(self) -> str:
        """Returns metamq's version."""
        import metamq

        return metamq.__version__
