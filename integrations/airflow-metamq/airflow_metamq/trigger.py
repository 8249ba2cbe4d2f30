"""The trigger: reads topics as a member of a group, and makes one event of each message.

Theory of operation
-------------------
A triggerer hands an event to its supervisor, which stores it in Airflow's database. In between both may die. So a
message is committed only when its event is stored: Airflow says so through its "shared streams in ack mode", which
need Airflow 3.3. `MetamqStream` is their producer. Airflow calls its advance() with messages whose events are stored,
in the order of the partition. After a crash, the messages from the last commit on make their events again.

Several triggers can share one stream, and each of them gets every message. Here each trigger has a stream of its own:
triggers of one group share the partitions, as consumers do.

A trigger of an asset makes events as long as it runs. A trigger of a task that waits makes one: Airflow ends the
trigger when it has stored the event. Messages that were read after that one stay uncommitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from airflow.sdk import BaseHook
from airflow.triggers.base import BaseEventTrigger, TriggerEvent
from airflow.triggers.shared_stream import AdvanceItem, SharedStreamProducer

from airflow_metamq.hook import settings_of
from metamq.aio import Consumer, Message, TopicPartition
from metamq.cli.show.message_format import document_of
from metamq.errors import MetamqError, OwnershipLost

log = logging.getLogger("airflow_metamq")

UNSTORED_MAX = 256
"""The limit for messages whose events are not stored. Airflow fails a trigger that has 1024 by default."""


@dataclass(eq=False, slots=True)
class Delivered:
    """A message that the trigger has received."""

    message: Message[bytes]
    is_sent: bool = False
    """True when the triggerer has the event. A trigger that ends before that looks to Airflow as if it had none."""


class MetamqStream(SharedStreamProducer):
    """The consumer of one trigger."""

    def __init__(
        self, topics: Collection[str], group: str, metamq_conn_id: str | None, consumer: dict[str, Any]
    ) -> None:
        self._arguments = {**consumer, "topics": topics, "group": group, "auto_commit": False}
        self._conn_id = metamq_conn_id
        self._consumer: Consumer[bytes] | None = None
        self._unstored = asyncio.Semaphore(UNSTORED_MAX)
        self._held: set[Hashable] = set()
        """Partitions with an event that was not stored: nothing after it is committed."""

    async def open_stream(self) -> AsyncIterator[tuple[Delivered, Delivered]]:
        """Yields messages, and waits while too many events are not stored. Raises metamq's errors."""
        connection = await BaseHook.aget_connection(self._conn_id) if self._conn_id is not None else None
        access = settings_of(connection) if connection is not None else {}
        self._consumer = await Consumer(**access, **self._arguments).open()
        async for message in self._consumer:
            await self._unstored.acquire()
            delivered = Delivered(message)
            yield delivered, delivered

    def get_advance_lane(self, broker_payload: Delivered) -> Hashable:
        """Returns the partition: its messages are committed in order."""
        return TopicPartition(broker_payload.message.topic, broker_payload.message.partition)

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Commits the messages of one partition up to the first whose event is not stored."""
        for _ in batch:
            self._unstored.release()
        lane = self.get_advance_lane(batch[0].broker_payload)
        if lane in self._held:
            return
        stored = list(takewhile(_is_stored, batch))
        if len(stored) < len(batch):
            self._held.add(lane)
        if stored:
            await self._commit(stored[-1].broker_payload.message)

    async def _commit(self, message: Message[bytes]) -> None:
        if self._consumer is None:
            return
        try:
            await self._consumer.commit(message)
        except OwnershipLost as error:  # another trigger has the partition, and makes these events again
            log.info("%s", error)
        except MetamqError as error:  # the next commit includes it
            log.warning("events of %s are stored, but not committed now: %s", message.topic, error)

    async def aclose(self) -> None:
        """Leaves the group."""
        if self._consumer is not None:
            await self._consumer.close()


def _is_stored(item: AdvanceItem) -> bool:
    return item.outcome.rejected > 0 or (item.outcome.is_clean and item.broker_payload.is_sent)


class MetamqTrigger(BaseEventTrigger):
    """Makes an event of each message: its record, as `metamq consume -o json` prints it.

    topics: one name or several. The topics must exist.
    group: the group that keeps the offsets. Give each trigger its own, unless they are to share the partitions.
    metamq_conn_id: the Connection; without one, the environment has metamq's settings.
    consumer: more settings of metamq's consumer.
    """

    def __init__(
        self,
        *,
        topics: Collection[str] | str,
        group: str,
        metamq_conn_id: str | None = None,
        consumer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.topics = [topics] if isinstance(topics, str) else list(topics)
        self.group = group
        self.metamq_conn_id = metamq_conn_id
        self.consumer = consumer or {}

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Returns the path of the class, and the arguments."""
        arguments = ("topics", "group", "metamq_conn_id", "consumer")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in arguments}

    def shared_stream_key(self) -> Hashable:
        """Returns a key of its own for each trigger."""
        return MetamqTrigger, self.trigger_id

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> MetamqStream:
        """Returns the consumer of a trigger with these arguments, not open yet."""
        return MetamqStream(**kwargs)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Delivered]) -> AsyncIterator[TriggerEvent]:
        """Yields an event for each message; for a task that waits, only for the first."""
        async for delivered in shared_stream:
            payload = self.payload_of(delivered.message)
            if payload is not None:
                yield TriggerEvent(payload)
            delivered.is_sent = True
            if payload is not None and self.task_instance is not None:
                await asyncio.Event().wait()  # Airflow cancels it

    def payload_of(self, message: Message[bytes]) -> Any:
        """Returns the payload of the event, which can be JSON. Subclasses may return None: then there is no event."""
        return document_of(message)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Raises NotImplementedError: only the triggerer runs this trigger, with filter_shared_stream()."""
        raise NotImplementedError("MetamqTrigger needs a triggerer of Airflow 3.3 or newer")
        yield
