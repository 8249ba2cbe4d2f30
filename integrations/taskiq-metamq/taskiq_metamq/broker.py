"""The broker: kick() sends a task to the topic, listen() reads the topic as a member of a group.

Theory of operation
-------------------
taskiq acknowledges each task by itself, in any order, and runs several at once. metamq commits one offset for each
partition. So the offset of a partition is committed up to the oldest task that is not acknowledged yet. After a crash,
the tasks from there on run again, also those that were acknowledged after it.

The consumer's loop would count a message as done as soon as it asks for the next one. So `auto_commit` is off, and each
acknowledgement commits.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from taskiq import AckableMessage, AsyncBroker, AsyncResultBackend, BrokerMessage

from metamq.aio import Consumer, Producer, TopicPartition
from metamq.errors import ConfigError, OwnershipLost

DELAY = "delay"
"""The label by which other brokers of taskiq delay a task. metamq has no delayed messages."""


class Unfinished:
    """The delivered tasks of one partition that are not acknowledged."""

    def __init__(self) -> None:
        self._offsets: dict[int, None] = {}  # in the order of delivery, which is that of offsets
        self._end = 0

    def begin(self, offset: int) -> None:
        """Notes a delivered task. An offset below the last one begins the partition again."""
        if offset < self._end:
            self._offsets.clear()
        self._offsets[offset] = None
        self._end = offset + 1

    def finish(self, offset: int) -> int:
        """Notes an acknowledged task. Returns the offset to commit."""
        self._offsets.pop(offset, None)
        return next(iter(self._offsets), self._end)


class MetamqBroker(AsyncBroker):
    """Keeps tasks in a topic, which must exist. Workers with the same `group` share its partitions.

    zookeeper: the cluster's ZooKeeper; the default is $METAMQ_ZOOKEEPER.
    producer, consumer: more settings of metamq's asyncio clients.
    """

    def __init__(
        self,
        zookeeper: str | None = None,
        *,
        topic: str = "taskiq",
        group: str = "taskiq",
        result_backend: AsyncResultBackend[Any] | None = None,
        task_id_generator: Callable[[], str] | None = None,
        producer: dict[str, Any] | None = None,
        consumer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(result_backend, task_id_generator)
        self._topic = topic
        self._producer: Producer[Any] = Producer(zookeeper, **(producer or {}))
        settings = {"topics": topic, "group": group, "auto_commit": False, **(consumer or {})}
        self._consumer: Consumer[bytes] = Consumer(zookeeper, **settings)
        self._unfinished: dict[TopicPartition, Unfinished] = {}

    async def startup(self) -> None:
        """Opens the producer, and in a worker the consumer. Raises metamq's ConnectError, TopicNotFound."""
        await super().startup()
        await self._producer.open()
        if self.is_worker_process:
            await self._consumer.open()

    async def shutdown(self) -> None:
        """Sends what the producer still has, leaves the group, and closes."""
        await super().shutdown()
        if self.is_worker_process:
            await self._consumer.close()
        await self._producer.close()

    async def kick(self, message: BrokerMessage) -> None:
        """Sends a task, and waits until it is stored. Raises ConfigError for a task with a delay."""
        if DELAY in message.labels:
            raise ConfigError(
                f"the task {message.task_name} has the label {DELAY!r}, but metamq has no delayed messages",
                hint="Schedule it with TaskiqScheduler, for example by `schedule_by_time`.",
            )
        await self._producer.send(self._topic, message.message)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yields tasks. The acknowledgement of a task commits what is finished of its partition."""
        async for message in self._consumer:
            partition = TopicPartition(message.topic, message.partition)
            unfinished = self._unfinished.setdefault(partition, Unfinished())
            unfinished.begin(message.offset)
            yield AckableMessage(data=message.value, ack=self._ack(partition, unfinished, message.offset))

    def _ack(self, partition: TopicPartition, unfinished: Unfinished, offset: int) -> Callable[[], Any]:
        async def ack() -> None:
            end = unfinished.finish(offset)
            try:
                await self._consumer.commit({partition: end})
            except OwnershipLost:
                self._unfinished.pop(partition, None)  # another worker has the partition, and runs the task again

        return ack
