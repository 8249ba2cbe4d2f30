"""Decisions about a message whose listener failed: another attempt after a pause, or the dead-letter topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metamq.client.checks import check_seconds, check_whole
from metamq.errors import ConfigError
from metamq.zk.names import DEAD_LETTER_SUFFIX

if TYPE_CHECKING:
    from metamq.client.model import Message

RETRY_DELAY_MAX_S = 30.0
ROLLBACK_DELAY_S = 0.1


class Rollback(Exception):
    """Raised by a listener to receive the message again after `delay_s` seconds, without counting an attempt."""

    def __init__(self, delay_s: float = ROLLBACK_DELAY_S) -> None:
        check_seconds("delay_s", delay_s, optional=False)
        super().__init__(f"rolled back, delivered again in {delay_s:g} s")
        self.delay_s = delay_s


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts per message, and the pauses between them."""

    max_attempts: int
    retry_delay_s: float

    def __post_init__(self) -> None:
        check_whole("max_attempts", self.max_attempts, 1)
        check_seconds("retry_delay_s", self.retry_delay_s, optional=False)

    def pause_after(self, error: Exception, failed_attempts: int) -> float | None:
        """Returns the seconds until the next attempt, or None to give up. `failed_attempts` includes a counted one."""
        if isinstance(error, Rollback):
            return error.delay_s
        if failed_attempts >= self.max_attempts:
            return None
        return min(self.retry_delay_s * 2.0 ** (failed_attempts - 1), RETRY_DELAY_MAX_S)


def dead_letter_topic(group: str | None) -> str:
    """Returns the topic for messages that a group gave up. Raises ConfigError without a group."""
    if group is None:
        raise ConfigError("a dead-letter topic belongs to a group", hint="Give group=, or dead_letter=False.")
    return group + DEAD_LETTER_SUFFIX


def dead_letter_headers(message: Message[Any], error: Exception, attempts: int) -> dict[str, bytes]:
    """Returns the message's own headers, plus its origin and the error."""
    return {
        **message.headers,
        "metamq-topic": message.topic.encode(),
        "metamq-partition": message.partition.encode(),
        "metamq-offset": str(message.offset).encode(),
        "metamq-timestamp": str(message.timestamp).encode(),
        "metamq-attempts": str(attempts).encode(),
        "metamq-error": f"{type(error).__name__}: {error}"[:1000].encode(errors="replace"),
    }
