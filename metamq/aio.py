"""The asyncio API: the same names as `metamq`, on any asyncio loop."""

from metamq.client.admin.aio_admin import Admin
from metamq.client.consumer.aio_consumer import Consumer
from metamq.client.consumer.health import ConsumerHealth
from metamq.client.fetch.message_batch import MessageBatch
from metamq.client.handling.current import LogFilter
from metamq.client.handling.retry_policy import GiveUp, RetryLater, Rollback, attempt
from metamq.client.model import Message, Receipt, ReceiptRange
from metamq.client.offsets.aio_offsets_table import create_offsets_table
from metamq.client.offsets.offsets import OffsetStorage
from metamq.client.offsets.offsets_database import DatabaseOffsets
from metamq.client.offsets.offsets_file import FileOffsets
from metamq.client.producer.outgoing import Delivery, ManyDelivery
from metamq.client.producer.producer_health import ProducerHealth
from metamq.client.schemas.topic import Topic
from metamq.security.config import SecurityConfig
from metamq.tx.app.aio_dead_letters import DeadLetter, DeadLetterQueue, LetterFilter
from metamq.tx.app.aio_producer import Producer
from metamq.zk.cluster.schemas import Schema
from metamq.zk.cluster.topics import FlushEvery
from metamq.zk.partitions import TopicPartition

__all__ = [
    "Admin",
    "Consumer",
    "ConsumerHealth",
    "DatabaseOffsets",
    "DeadLetter",
    "DeadLetterQueue",
    "Delivery",
    "FileOffsets",
    "FlushEvery",
    "GiveUp",
    "LetterFilter",
    "LogFilter",
    "ManyDelivery",
    "Message",
    "MessageBatch",
    "OffsetStorage",
    "Producer",
    "ProducerHealth",
    "Receipt",
    "ReceiptRange",
    "RetryLater",
    "Rollback",
    "Schema",
    "SecurityConfig",
    "Topic",
    "TopicPartition",
    "attempt",
    "create_offsets_table",
]
