"""The asyncio API: the same names as `metamq`, on any asyncio loop."""

from metamq.client.aio_admin import Admin
from metamq.client.aio_consumer import Consumer
from metamq.client.message_batch import MessageBatch
from metamq.client.model import Message, Receipt, ReceiptRange, TopicPartition
from metamq.client.offsets_database import DatabaseOffsets
from metamq.client.offsets_file import FileOffsets
from metamq.client.retrying import Rollback
from metamq.tx.app.aio_producer import Producer
from metamq.zk.topics import FlushEvery

__all__ = [
    "Admin",
    "Consumer",
    "DatabaseOffsets",
    "FileOffsets",
    "FlushEvery",
    "Message",
    "MessageBatch",
    "Producer",
    "Receipt",
    "ReceiptRange",
    "Rollback",
    "TopicPartition",
]
