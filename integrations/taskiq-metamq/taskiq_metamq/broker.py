"""The broker: kick() sends a task to the topic, listen() reads the topic as a member of a group.

Theory of operation
-------------------
taskiq acknowledges each task by itself, in any order, and runs several at once. metamq commits one offset for each
partition. So the offset of a partition is committed up to the oldest task that is not acknowledged yet. After a crash,
the tasks from there on run again, also those that were acknowledged after it.

The consumer's loop would count a message as done as soon as it asks for the next one. So `auto_commit` is off. A task
of the broker commits what is acknowledged every `commit_interval_s`, before another worker takes a partition over, and
in shutdown(). A task that is not acknowledged when another worker takes its partition over runs again there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from taskiq import AckableMessage, AsyncBroker, AsyncResultBackend, BrokerMessage

from metamq.aio import Consumer, Producer, TopicPartition
from metamq.errors import ConfigError, MetamqError, OwnershipLost

log = logging.getLogger("taskiq_metamq")

COMMIT_INTERVAL_S = 1.0
DELAY = "delay"
"""The label that delays a task, in seconds."""


class Unfinished:
    """The delivered tasks of one partition that are not acknowledged, from its assignment on."""

    def __init__(self, first: int) -> None:
        self._offsets: dict[int, None] = {}  # in the order of delivery, which is that of offsets
        self._end = self.committed = first

    def begin(self, offset: int) -> None:
        """Notes a delivered task."""
        self._offsets[offset] = None
        self._end = offset + 1

    def finish(self, offset: int) -> None:
        """Notes an acknowledged task."""
        self._offsets.pop(offset, None)

    def to_commit(self) -> int | None:
        """Returns the offset to commit, or None if there is nothing new."""
        end = next(iter(self._offsets), self._end)
        return end if end > self.committed else None


class MetamqBroker(AsyncBroker):
    """Keeps tasks in a topic, which must exist. Workers with the same `group` share its partitions.

    zookeeper: the cluster's ZooKeeper; the default is $METAMQ_ZOOKEEPER.
    commit_interval_s: the time between two commits of acknowledged tasks. After a crash, those since then run again.
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
        commit_interval_s: float = COMMIT_INTERVAL_S,
        producer: dict[str, Any] | None = None,
        consumer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(result_backend, task_id_generator)
        self._topic = topic
        self._producer: Producer[Any] = Producer(zookeeper, **(producer or {}))
        settings = {
            "topics": topic, "group": group, "auto_commit": False, "on_revoked": self._give_up, **(consumer or {}),
        }  # fmt: skip
        self._consumer: Consumer[bytes] = Consumer(zookeeper, **settings)
        self._unfinished: dict[TopicPartition, Unfinished] = {}
        self._interval_s = commit_interval_s
        self._committing: asyncio.Task[None] | None = None

    async def startup(self) -> None:
        """Opens the producer, and in a worker the consumer. Raises metamq's ConnectError, TopicNotFound."""
        await super().startup()
        await self._producer.open()
        if self.is_worker_process:
            await self._consumer.open()
            self._committing = asyncio.create_task(self._keep_committing())

    async def shutdown(self) -> None:
        """Commits what is acknowledged, sends what the producer still has, leaves the group, and closes."""
        await super().shutdown()
        if self._committing is not None:
            self._committing.cancel()
            await asyncio.wait([self._committing])
        if self.is_worker_process:
            await self._commit()
            await self._consumer.close()
        await self._producer.close()

    async def kick(self, message: BrokerMessage) -> None:
        """Sends a task, and waits until it is stored. Raises ConfigError for a wrong delay."""
        delay = message.labels.get(DELAY)
        try:
            delay_s = None if delay is None else float(delay)
        except (TypeError, ValueError):
            raise ConfigError(f"the task {message.task_name} has the label {DELAY!r} with {delay!r}") from None
        await self._producer.send(self._topic, message.message, delay_s=delay_s)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yields tasks. An acknowledged task is committed as soon as those before it are acknowledged, too."""
        async for message in self._consumer:
            partition = TopicPartition(message.topic, message.partition)
            unfinished = self._unfinished.setdefault(partition, Unfinished(message.offset))
            unfinished.begin(message.offset)
            yield AckableMessage(data=message.value, ack=partial(unfinished.finish, message.offset))

    async def _give_up(self, revoked: list[TopicPartition]) -> None:
        await self._commit()
        for partition in revoked:
            self._unfinished.pop(partition, None)

    async def _keep_committing(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._commit()

    async def _commit(self) -> None:
        for partition, unfinished in list(self._unfinished.items()):
            end = unfinished.to_commit()
            if end is None:
                continue
            try:
                await self._consumer.commit({partition: end})
                unfinished.committed = end
            except OwnershipLost:
                self._unfinished.pop(partition, None)  # another worker has the partition, and runs the tasks again
            except MetamqError as error:  # the next commit repeats it
                log.warning("tasks of %s are not committed now: %s", partition, error)
