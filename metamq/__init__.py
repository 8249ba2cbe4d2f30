"""metamq: a pull-style message queue for Python and Spark.

The public names are in this module and are imported on first use (PEP 562): `import metamq` stays fast.
The asyncio versions of `Producer`, `Consumer` and `Admin` are in `metamq.aio`. The types of other results are in
`metamq.types`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout the packages are beside this folder, not in it. This lets a Python started there find them too.
if not (Path(__path__[0]) / "client").is_dir():
    __path__.append(str(Path(__path__[0]).parent))

if TYPE_CHECKING:
    from metamq import aio as aio
    from metamq import errors as errors
    from metamq import types as types
    from metamq.client.admin.admin import Admin as Admin
    from metamq.client.consumer.consumer import Consumer as Consumer
    from metamq.client.consumer.health import ConsumerHealth as ConsumerHealth
    from metamq.client.fetch.message_batch import MessageBatch as MessageBatch
    from metamq.client.handling.current import LogFilter as LogFilter
    from metamq.client.handling.retry_policy import GiveUp as GiveUp
    from metamq.client.handling.retry_policy import RetryLater as RetryLater
    from metamq.client.handling.retry_policy import Rollback as Rollback
    from metamq.client.handling.retry_policy import attempt as attempt
    from metamq.client.model import Message as Message
    from metamq.client.model import Receipt as Receipt
    from metamq.client.model import ReceiptRange as ReceiptRange
    from metamq.client.offsets.offsets import OffsetStorage as OffsetStorage
    from metamq.client.offsets.offsets_database import DatabaseOffsets as DatabaseOffsets
    from metamq.client.offsets.offsets_database import create_offsets_table as create_offsets_table
    from metamq.client.offsets.offsets_file import FileOffsets as FileOffsets
    from metamq.client.producer.outgoing import Delivery as Delivery
    from metamq.client.producer.outgoing import ManyDelivery as ManyDelivery
    from metamq.client.producer.producer_health import ProducerHealth as ProducerHealth
    from metamq.client.scan.scan import Scan as Scan
    from metamq.client.scan.scan import scan as scan
    from metamq.client.schemas.topic import Topic as Topic
    from metamq.security.config import SecurityConfig as SecurityConfig
    from metamq.tx.app.aio_dead_letters import DeadLetter as DeadLetter
    from metamq.tx.app.aio_dead_letters import LetterFilter as LetterFilter
    from metamq.tx.app.dead_letters import DeadLetterQueue as DeadLetterQueue
    from metamq.tx.app.producer import Producer as Producer
    from metamq.zk.cluster.schemas import Schema as Schema
    from metamq.zk.cluster.topics import FlushEvery as FlushEvery
    from metamq.zk.partitions import TopicPartition as TopicPartition

_HOME = {
    "Admin": "metamq.client.admin.admin",
    "Consumer": "metamq.client.consumer.consumer",
    "ConsumerHealth": "metamq.client.consumer.health",
    "DatabaseOffsets": "metamq.client.offsets.offsets_database",
    "DeadLetter": "metamq.tx.app.aio_dead_letters",
    "DeadLetterQueue": "metamq.tx.app.dead_letters",
    "Delivery": "metamq.client.producer.outgoing",
    "FileOffsets": "metamq.client.offsets.offsets_file",
    "FlushEvery": "metamq.zk.cluster.topics",
    "GiveUp": "metamq.client.handling.retry_policy",
    "LetterFilter": "metamq.tx.app.aio_dead_letters",
    "LogFilter": "metamq.client.handling.current",
    "ManyDelivery": "metamq.client.producer.outgoing",
    "Message": "metamq.client.model",
    "MessageBatch": "metamq.client.fetch.message_batch",
    "OffsetStorage": "metamq.client.offsets.offsets",
    "Producer": "metamq.tx.app.producer",
    "ProducerHealth": "metamq.client.producer.producer_health",
    "Receipt": "metamq.client.model",
    "ReceiptRange": "metamq.client.model",
    "RetryLater": "metamq.client.handling.retry_policy",
    "Rollback": "metamq.client.handling.retry_policy",
    "Scan": "metamq.client.scan.scan",
    "Schema": "metamq.zk.cluster.schemas",
    "SecurityConfig": "metamq.security.config",
    "Topic": "metamq.client.schemas.topic",
    "TopicPartition": "metamq.zk.partitions",
    "attempt": "metamq.client.handling.retry_policy",
    "create_offsets_table": "metamq.client.offsets.offsets_database",
    "scan": "metamq.client.scan.scan",
}

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
    "Scan",
    "Schema",
    "SecurityConfig",
    "Topic",
    "TopicPartition",
    "__version__",
    "aio",
    "attempt",
    "create_offsets_table",
    "errors",
    "scan",
    "types",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in ("aio", "errors", "types"):
        return importlib.import_module(f"metamq.{name}")
    raise AttributeError(f"module 'metamq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
