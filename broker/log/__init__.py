"""The partition log: segments, indexes, producer states, recovery. Synchronous; only slow steps use other threads."""

from metamq.broker.log.config import FlushPolicy, LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.disk.producers import Duplicate, New
from metamq.broker.log.disk.segments import SegmentStats
from metamq.broker.log.disk.times import Search
from metamq.broker.log.flush import FlushTicket
from metamq.broker.log.fresh import set_aside
from metamq.broker.log.partition_log import PartitionLog
from metamq.broker.log.steps import FLUSH, Steps
from metamq.broker.log.store import BatchRun, FilePart

if __name__ != "metamq.broker.log":
    raise ImportError(
        f"import metamq.broker.log, not {__name__}: a bare import makes a silent second copy of every class"
    )

__all__ = [
    "FLUSH",
    "BatchRun",
    "Duplicate",
    "FileCache",
    "FilePart",
    "FlushPolicy",
    "FlushTicket",
    "LogConfig",
    "New",
    "PartitionLog",
    "Search",
    "SegmentStats",
    "Steps",
    "set_aside",
]
