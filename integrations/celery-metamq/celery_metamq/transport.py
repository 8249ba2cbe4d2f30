"""The transport: a queue of Celery is a topic, and its workers are the members of a group.

Theory of operation
-------------------
Celery acknowledges each task by itself, in any order. metamq commits one offset for each partition. So the offset of a
partition is committed up to the oldest task that is not acknowledged yet, at most once in `commit_interval_s`. After a
crash, the tasks from there on run again, also those that were acknowledged after it.

The consumer's loop would count a message as done as soon as it asks for the next one. So `auto_commit` is off. A worker
that stops leaves its unacknowledged tasks where they are, uncommitted: another worker gets them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from queue import Empty
from typing import Any

from kombu.transport import virtual
from kombu.utils.json import dumps, loads

from metamq import Admin, Consumer, Message, Producer, TopicPartition
from metamq.errors import MetamqError, OwnershipLost, TopicExists

PARTITIONS = 16
COMMIT_INTERVAL_S = 1.0
IDLE_S = 0.1
"""Seconds that one look at a queue waits for a task."""
PLACE = "metamq"
"""The property of a delivered task that has its place."""


class Unfinished:
    """The delivered tasks of one partition that are not acknowledged."""

    def __init__(self) -> None:
        self._offsets: dict[int, None] = {}  # in the order of delivery, which is that of offsets
        self._end = self.committed = 0

    def begin(self, offset: int) -> None:
        """Notes a delivered task."""
        if not self._end:
            self.committed = offset
        self._offsets[offset] = None
        self._end = offset + 1

    def finish(self, offset: int) -> None:
        """Notes an acknowledged task."""
        self._offsets.pop(offset, None)

    def to_commit(self) -> int | None:
        """Returns the offset to commit, or None if there is nothing new."""
        end = next(iter(self._offsets), self._end)
        return end if end > self.committed else None


class Queue:
    """One queue that this process reads: its consumer and its unfinished tasks. For one thread."""

    def __init__(self, zookeeper: str | None, name: str, settings: dict[str, Any], commit_interval_s: float) -> None:
        self._interval_s = commit_interval_s
        self._commit_s = 0.0
        self._unfinished: dict[TopicPartition, Unfinished] = {}
        self._revoked: list[TopicPartition] = []
        """Filled by a thread of the consumer."""
        self.consumer: Consumer[bytes] = Consumer(
            zookeeper,
            topics=name,
            group=name,
            auto_commit=False,
            idle_timeout_s=IDLE_S,
            on_revoked=self._revoked.extend,
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
        self._forget_revoked()
        unfinished = self._unfinished.setdefault(TopicPartition(message.topic, message.partition), Unfinished())
        unfinished.begin(message.offset)
        return message, unfinished

    def _forget_revoked(self) -> None:
        while self._revoked:
            self._unfinished.pop(self._revoked.pop(), None)

    def commit(self, *, at_once: bool = False) -> None:
        """Commits what is finished, if the interval is over."""
        if not at_once and time.monotonic() - self._commit_s < self._interval_s:
            return
        self._commit_s = time.monotonic()
        self._forget_revoked()
        for partition, unfinished in list(self._unfinished.items()):
            end = unfinished.to_commit()
            if end is None:
                continue
            try:
                self.consumer.commit({partition: end})
                unfinished.committed = end
            except OwnershipLost:
                self._unfinished.pop(partition, None)  # another worker has the partition, and runs the tasks again

    def close(self) -> None:
        """Commits what is finished, and leaves the group."""
        try:
            self.commit(at_once=True)
        finally:
            self.consumer.close()


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
        self._places: dict[str, tuple[Unfinished, int]] = {}
        """The unfinished tasks of the partition, and the offset, by delivery tag."""

    def _topic(self, queue: str) -> str:
        """Returns the name of the queue's topic: other characters than those of topics become "-"."""
        return "".join(one if one.isascii() and (one.isalnum() or one in "._-") else "-" for one in queue)

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
        message, unfinished = self._queues[queue].get()
        task: dict[str, Any] = loads(message.value.decode())
        tag = self._next_delivery_tag()
        task["properties"]["delivery_tag"] = tag
        self._places[tag] = unfinished, message.offset
        return task

    def finish(self, message: Any) -> None:
        """Notes an acknowledged task."""
        place = self._places.pop(message.delivery_tag, None)
        if place is not None:
            unfinished, offset = place
            unfinished.finish(offset)

    def send_again(self, message: Any) -> None:
        """Stores a delivered task again."""
        task = message.serializable()
        task["redelivered"] = True
        self._put(message.delivery_info["routing_key"], task)

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
        super().close()
        while self._queues:
            self._queues.popitem()[1].close()
        if self._producer is not None:
            self._producer.close()
            self._producer = None


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
