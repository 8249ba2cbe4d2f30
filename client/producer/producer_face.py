"""What the blocking and the asyncio Producer have in common: arguments in, messages into the accumulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, NoReturn, TypedDict

from metamq.client.checks import not_picklable, wrong_type
from metamq.client.model import EPOCH
from metamq.client.producer.outgoing import Delivery, ManyDelivery
from metamq.client.producer.partitioner import Partitioner
from metamq.client.producer.producer_core import ProducerCore
from metamq.client.typevars import T
from metamq.errors import ConfigError, WrongType
from metamq.words import count
from metamq.zk.names import parse_partition

Key = bytes | str | None

TIMESTAMP_US_MIN = 978_307_200_000_000
"""The begin of 2001; seconds and milliseconds of our days are numbers far below."""
TIMESTAMP_US_MAX = 253_402_300_799_999_999
"""The end of the year 9999, the last that a datetime has; nanoseconds of our days are far above."""


class ProducerSettings(TypedDict, total=False):
    """The keyword arguments of a Producer; ProducerOptions in producer_core says what each means."""

    linger_ms: float
    batch_bytes: int
    buffer_bytes: int
    max_message_bytes: int
    compression: str | None
    partitioner: str | Partitioner
    delivery_timeout_s: float
    request_timeout_s: float


class ProducerFace(Generic[T]):
    """`send` and `send_many`, which never wait for the network."""

    _core: ProducerCore
    _encode: Callable[[T], bytes] | None
    _has_transactions: bool
    """Whether any thread or task works in a transaction of this producer, see metamq.tx.app.transactional. `send` asks
    this one attribute, and is never replaced: wrappers and subclasses see every message."""

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self)

    def _check_usable(self) -> None:
        """Raises ClosedError after close(), ForkedError in a fork's child."""
        self._core.accumulator.check_open()

    def send(
        self,
        topic: str,
        value: T,
        key: Key = None,
        headers: Mapping[str, bytes] | None = None,
        *,
        partition: str | None = None,
        timestamp: datetime | int | None = None,
    ) -> Delivery:
        """Accepts a message and returns at once; the Delivery tells where it was stored.

        `key`: messages of a key go to one partition, in order. `partition`: "0-3", overrides it. `timestamp`: an aware
        datetime or microseconds since 1970; the default is now. Thread-safe. A signal handler, a `__del__` or a
        partitioner may send, too, while its thread is in `send`: such a message is accepted a moment later.

        Raises MessageTooLarge, ConfigError (a wrong name or type), BufferFull (see the class), ClosedError. A topic
        that does not exist fails the Delivery with TopicNotFound.
        """
        if self._has_transactions:
            sent: Delivery | None = self._send_in(topic, value, key, headers, partition, timestamp)
            if sent is not None:
                return sent
        plain: Any = value if self._encode is None else self._encode(value)
        if type(plain) is not bytes:
            plain = as_bytes(plain, "value")
        accumulator = self._core.accumulator
        if key is None and headers is None and partition is None and timestamp is None:
            return accumulator.send(topic, plain)
        if partition is not None:
            parse_partition(partition)  # here, for the caller to be told; what the topic has may not be known yet
        return accumulator.send_full(
            topic, plain, key_bytes(key), checked_headers(headers), partition, timestamp_us(timestamp)
        )

    def send_many(self, topic: str, values: Sequence[T], keys: Sequence[Key] | None = None) -> ManyDelivery:
        """Accepts many messages at once: the fast path, with one Delivery and no object per message.

        `keys` has one entry a value, None for no key. Messages with a key keep their order within their partition;
        those without go to any partition, a batch at a time, whatever stands before and after them in the list. All
        are accepted or, when it raises as `send` does, none; the buffer's room is looked at once, and the list may
        exceed it. With an error in the Delivery some of the messages may be stored.
        """
        if isinstance(values, bytes | str) or not isinstance(values, Iterable):
            raise wrong_type("`values`", "a list of values", values)
        if self._has_transactions:
            sent: ManyDelivery | None = self._send_many_in(topic, values, keys)
            if sent is not None:
                return sent
        plain: list[Any] = list(values) if self._encode is None else [self._encode(value) for value in values]
        if set(map(type, plain)) - {bytes}:
            plain = [as_bytes(value, "value") for value in plain]
        if keys is not None and (isinstance(keys, bytes | str) or not isinstance(keys, Iterable)):
            raise wrong_type("`keys`", "a list with a key, or None, for each value", keys)
        packed = None if keys is None else [key_bytes(key) for key in keys]
        if packed is not None and len(packed) != len(plain):
            problem = f"send_many() got {count(len(packed), 'key')} for {count(len(plain), 'value')}"
            raise ConfigError(problem, hint="Give one for each; None is no key.")
        return self._core.accumulator.send_many(topic, plain, packed)

    def _send_in(
        self,
        topic: str,
        value: T,
        key: Key,
        headers: Mapping[str, bytes] | None,
        partition: str | None,
        timestamp: datetime | int | None,
    ) -> Delivery | None:
        """Sends with the caller's transaction; None where it works in none."""
        return None

    def _send_many_in(self, topic: str, values: Sequence[T], keys: Sequence[Key] | None) -> ManyDelivery | None:
        """The same, of many."""
        return None


def as_bytes(value: Any, what: str) -> bytes:
    """bytes of a bytes-like object; TypeError says what to do with anything else."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    problem = f"a message's {what} must be bytes, not {type(value).__name__}"
    raise WrongType(problem, hint="Encode it, or give Producer(encode=...).")


def key_bytes(key: Key) -> bytes | None:
    """A key as it is stored; a str is encoded in UTF-8."""
    if key is None or type(key) is bytes:
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytearray | memoryview):
        return bytes(key)
    raise WrongType(f"a message's key must be str or bytes, not {type(key).__name__}")


def checked_headers(headers: Mapping[str, bytes] | None) -> dict[str, bytes] | None:
    """A copy of the headers. Raises TypeError unless they map str to bytes."""
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise wrong_type("`headers`", "a mapping of str to bytes", headers)
    for name, text in headers.items():
        if not isinstance(name, str) or not isinstance(text, bytes):
            raise wrong_type("`headers`", "a mapping of str to bytes", {name: text})
    return dict(headers)


def timestamp_us(timestamp: datetime | int | None) -> int | None:
    """Microseconds since 1970. Raises ConfigError for a naive datetime, and for seconds or milliseconds."""
    if timestamp is None:
        return None
    if isinstance(timestamp, int):
        if timestamp < TIMESTAMP_US_MIN:
            raise ConfigError(
                f"`timestamp` {timestamp} would be before 2001: a number is microseconds since 1970",
                hint="Multiply seconds by 1,000,000, or give an aware datetime, which may be any from 1970 on.",
            )
        if timestamp > TIMESTAMP_US_MAX:
            raise ConfigError(
                f"`timestamp` {timestamp} would be after the year 9999: a number is microseconds since 1970",
                hint="Divide nanoseconds by 1,000, or give an aware datetime.",
            )
        return timestamp
    if not isinstance(timestamp, datetime):
        raise wrong_type("`timestamp`", "an aware datetime or microseconds since 1970", timestamp)
    if timestamp.tzinfo is None:
        raise ConfigError(
            f"`timestamp` {timestamp} has no time zone", hint="Give an aware datetime, as datetime.now(timezone.utc)."
        )
    if timestamp < EPOCH:
        hint = "A message's time is from 1970 to 9999. Put an earlier one into the value, or a header."
        raise ConfigError(f"`timestamp` {timestamp} is before 1970", hint=hint)
    return (timestamp - EPOCH) // timedelta(microseconds=1)


def asked_time_us(time: datetime) -> int:
    """As timestamp_us, for a time that a reader asks for: a time before 1970 is before every message."""
    is_before_all = time.tzinfo is not None and time < EPOCH
    return 0 if is_before_all else timestamp_us(time) or 0
