"""The values that users receive, a message and the receipt of `send`, and their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Generic, NamedTuple

from metamq.client.checks import wrong_type
from metamq.client.typevars import T
from metamq.errors import ConfigError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIMESTAMP_US_MIN = 978_307_200_000_000
"""The start of 2001. Present times in seconds or milliseconds are much smaller numbers."""
TIMESTAMP_US_MAX = 253_402_300_799_999_999
"""The end of the year 9999, the last of a datetime. Present times in nanoseconds are much larger numbers."""


def time_of(timestamp: int) -> datetime:
    """Returns the aware datetime (UTC) of a timestamp in microseconds since 1970."""
    return EPOCH + timedelta(microseconds=timestamp)


def timestamp_us(timestamp: datetime | int | None, name: str = "timestamp") -> int | None:
    """Returns microseconds since 1970. Raises ConfigError for a naive datetime, and for seconds or milliseconds."""
    if timestamp is None:
        return None
    if isinstance(timestamp, int):
        if timestamp < TIMESTAMP_US_MIN:
            raise ConfigError(
                f"`{name}` {timestamp} would be before 2001: a number is microseconds since 1970",
                hint="Multiply seconds by 1,000,000, or give an aware datetime, which may be any from 1970 on.",
            )
        if timestamp > TIMESTAMP_US_MAX:
            raise ConfigError(
                f"`{name}` {timestamp} would be after the year 9999: a number is microseconds since 1970",
                hint="Divide nanoseconds by 1,000, or give an aware datetime.",
            )
        return timestamp
    if not isinstance(timestamp, datetime):
        raise wrong_type(f"`{name}`", "an aware datetime or microseconds since 1970", timestamp)
    if timestamp.tzinfo is None:
        raise ConfigError(
            f"`{name}` {timestamp} has no time zone", hint="Give an aware datetime, as datetime.now(timezone.utc)."
        )
    if timestamp < EPOCH:
        hint = "A message's time is from 1970 to 9999. Put an earlier one into the value, or a header."
        raise ConfigError(f"`{name}` {timestamp} is before 1970", hint=hint)
    return (timestamp - EPOCH) // timedelta(microseconds=1)


def requested_time_us(time: datetime) -> int:
    """Converts like timestamp_us, for a time that a reader starts at: a time before 1970 is before every message."""
    is_before_all = time.tzinfo is not None and time < EPOCH
    return 0 if is_before_all else timestamp_us(time) or 0


class Receipt(NamedTuple):
    """The place where one message is stored. `timestamp` is in microseconds since 1970, UTC."""

    topic: str
    partition: str
    offset: int
    timestamp: int

    @property
    def time(self) -> datetime:
        """The `timestamp` as an aware datetime, UTC."""
        return time_of(self.timestamp)


# Not a NamedTuple: a field `count` would hide tuple.count.
@dataclass(frozen=True, slots=True)
class ReceiptRange:
    """The place of `count` messages of one `send_many`: they have the offsets `offset`, `offset + 1`, and so on."""

    topic: str
    partition: str
    offset: int
    count: int


class Message(NamedTuple, Generic[T]):
    """One message that a consumer receives. `T` is `bytes`, or the type that `decode=` returns.

    `offset` counts the messages of the partition from 0. `timestamp` is in microseconds since 1970, UTC.
    """

    topic: str
    partition: str
    offset: int
    key: bytes | None
    value: T
    headers: Mapping[str, bytes]
    timestamp: int

    @property
    def time(self) -> datetime:
        """The `timestamp` as an aware datetime, UTC."""
        return time_of(self.timestamp)


message_of: Callable[[Iterable[Any]], Message[Any]] = partial(tuple.__new__, Message)
"""Makes a message from its fields, like `Message._make` but at C speed."""
