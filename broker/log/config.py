"""The settings of a partition log, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from metamq.errors import ConfigError
from metamq.wire.limits import BATCH_BYTES_MAX

_DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """The rule for when to fsync a log. The log itself never starts a flush: its owner calls `due()`."""

    before_ack: bool = False
    """Writes are acknowledged and become readable only when they are on the disk."""
    every_messages: int | None = None
    every_ms: int | None = 1000

    def due(self, unflushed_messages: int, since_ms: float) -> bool:
        """True if the log must be flushed now. `since_ms`: age of the oldest unflushed message."""
        if unflushed_messages <= 0:
            return False
        if self.before_ack:
            return True
        if self.every_messages is not None and unflushed_messages >= self.every_messages:
            return True
        return self.every_ms is not None and since_ms >= self.every_ms


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The settings of one partition log. Raises ConfigError if they contradict each other."""

    segment_bytes: int = 256 * 1024 * 1024
    """A segment is closed before it would exceed this size. A larger batch gets a segment of its own."""
    index_interval_bytes: int = 4096
    flush: FlushPolicy = FlushPolicy()
    retention_ms: int | None = None
    """A segment is removed when its last append is older than this. None: segments never expire."""
    retention_bytes: int | None = None
    """Maximum size of the log. Retention removes whole segments, but never the active one."""
    cleanup: Literal["delete", "archive"] = "delete"
    archive_dir: Path | None = None
    producer_expiry_ms: int = 7 * _DAY_MS
    """The log forgets an idempotent producer that stored nothing for this time."""
    batch_bytes_max: int = BATCH_BYTES_MAX

    def __post_init__(self) -> None:
        if self.segment_bytes <= 0 or self.index_interval_bytes <= 0:
            raise ConfigError("segment_bytes and index_interval_bytes must be more than 0")
        if not 0 < self.batch_bytes_max <= BATCH_BYTES_MAX:
            raise ConfigError(f"batch_bytes_max must be in 1..{BATCH_BYTES_MAX}, not {self.batch_bytes_max}")
        if self.cleanup == "archive" and self.archive_dir is None:
            raise ConfigError(
                "cleanup = 'archive' needs a folder", hint="Set archive_dir, or choose cleanup = 'delete'."
            )
