"""The common base of the blocking and the asyncio Producer: checks arguments, passes messages to the accumulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypedDict, TypeVar, overload

from metamq.client import telemetry
from metamq.client.checks import not_picklable, wrong_type
from metamq.client.delayed import delayed
from metamq.client.model import timestamp_us
from metamq.client.producer.outgoing import AnyMessage, CheckedMessage, Delivery, Headers, ManyDelivery, ManyHeaders
from metamq.client.producer.partitioner import Partitioner
from metamq.client.schemas.topic import Topic
from metamq.client.typevars import T
from metamq.errors import ConfigError, WrongType
from metamq.words import count
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.client.producer.producer_core import ProducerCore
    from metamq.client.producer.producer_health import ProducerHealth

Key = bytes | str | None
V = TypeVar("V")


class ArrowTable(Protocol):
    """Any table that Arrow can read, by the Arrow PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


class ProducerSettings(TypedDict, total=False):
    """The keyword arguments of a Producer; ProducerOptions describes them."""

    linger_ms: float
    batch_bytes: int
    buffer_bytes: int
    max_message_bytes: int
    compression: str | None
    partitioner: str | Partitioner
    delivery_timeout_s: float
    request_timeout_s: float


class ProducerApi(Generic[T]):
    """The methods `send` and `send_many`, which never wait for the network."""

    _core: ProducerCore
    _encode: Callable[[T], bytes] | None
    _has_transactions: bool
    """True if any thread or task is in a transaction of this producer, see metamq.tx.app.transactional. The method
    `send` itself is never replaced: wrappers and subclasses see every message."""
    _diverts: bool
    """True if `send` has more to do, for a transaction or for telemetry. The hot path makes only this check."""

    def _set_transactions(self, any: bool) -> None:
        self._has_transactions = any
        self._diverts = any or telemetry.current is not None

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self)

    def _check_usable(self) -> None:
        """Raises ClosedError after close(), ForkedError in a fork's child."""
        self._core.accumulator.check_open()

    def health(self) -> ProducerHealth:
        """Returns what waits, since when, and why. Makes no request. Thread-safe.

        May also be called after close().
        """
        return self._core.health()

    @overload
    def send(
        self,
        topic: str,
        value: T,
        key: Key = None,
        headers: Mapping[str, bytes] | None = None,
        *,
        partition: str | None = None,
        timestamp: datetime | int | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> Delivery: ...

    @overload
    def send(
        self,
        topic: Topic[V],
        value: V,
        key: Key = None,
        headers: Mapping[str, bytes] | None = None,
        *,
        partition: str | None = None,
        timestamp: datetime | int | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> Delivery: ...

    def send(
        self,
        topic: str | Topic[Any],
        value: Any,
        key: Key = None,
        headers: Mapping[str, bytes] | None = None,
        *,
        partition: str | None = None,
        timestamp: datetime | int | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> Delivery:
        """Accepts a message and returns at once. The Delivery reports where the message is stored.

        `topic`: a name, or a Topic, which encodes the value and raises WrongType for a value of another type.
        `key`: messages of one key go to one partition, in order. `partition`: "0-3", overrides the key. `timestamp`: an
        aware datetime or microseconds since 1970; the default is now. `delay_s`, or `deliver_at` (an aware datetime):
        the message becomes readable then, or a moment later. Thread-safe. A signal handler, a `__del__` or a
        partitioner may also send while its thread is in `send`: such a message is accepted a moment later.

        Raises MessageTooLarge, ConfigError (a wrong name or type), BufferFull (see the class), ClosedError. If the
        topic does not exist, the Delivery fails with TopicNotFound.
        """
        if type(topic) is not str and isinstance(topic, Topic):  # the first check takes a third of the second
            value, topic = self._untyped(topic).encode(value), topic.name
        if delay_s or deliver_at is not None:
            topic, headers, partition = delayed(topic, headers, partition, timestamp, delay_s, deliver_at)
        if self._diverts:
            headers = telemetry.traced(headers)
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
            parse_partition(partition)  # checks the name here; the topic's partitions may not be known yet
        return accumulator.send_full(
            topic, plain, key_bytes(key), checked_headers(headers), partition, timestamp_us(timestamp)
        )

    @overload
    def send_many(
        self,
        topic: str,
        values: Sequence[T],
        keys: Sequence[Key] | None = None,
        *,
        partition: str | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> ManyDelivery: ...

    @overload
    def send_many(
        self,
        topic: Topic[V],
        values: Sequence[V],
        keys: Sequence[Key] | None = None,
        *,
        partition: str | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> ManyDelivery: ...

    def send_many(
        self,
        topic: str | Topic[Any],
        values: Sequence[Any],
        keys: Sequence[Key] | None = None,
        *,
        partition: str | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> ManyDelivery:
        """Accepts many messages at once. This is the fast path: one Delivery, and no object per message. Thread-safe.

        `keys` has one entry per value; None means no key. `partition`: "0-3", for all of them, overrides the keys.
        `delay_s`, `deliver_at`: as `send` has them, for all of them.

        Messages with a key or a partition keep their order within their partition; delayed ones only those with a key.
        Messages with neither go to any partition, a batch at a time, whatever their place in the list. Either all are
        accepted, or none and the call raises as `send`. The buffer's capacity is checked once, and the list may exceed
        it. If the Delivery fails, some of the messages may be stored.
        """
        if isinstance(topic, Topic):
            values, topic = self._untyped(topic).encode_many(values), topic.name
        plain, packed = self._checked(values, keys, partition)
        name, headers, place = delayed(topic, None, partition, None, delay_s, deliver_at)
        if self._has_transactions:
            sent: ManyDelivery | None = self._send_many_in(name, lambda: messages_of(plain, packed, place, headers))
            if sent is not None:
                return sent
        both = ManyHeaders(telemetry.traced(headers), headers)
        return self._core.accumulator.send_many(name, plain, packed, place, both)

    def _untyped(self, topic: Topic[Any]) -> Topic[Any]:
        """Returns the topic. Raises ConfigError if the producer encodes values, too."""
        if self._encode is not None:
            hint = "Leave `encode=` out, or send to the topic's name."
            raise ConfigError(f"{topic!r} encodes its values, and the producer has `encode=`", hint=hint)
        return topic

    def _checked(
        self, values: Iterable[T], keys: Iterable[Key] | None, partition: str | None
    ) -> tuple[list[bytes], list[bytes | None] | None]:
        """Returns values and keys as they are stored. Raises WrongType, ConfigError."""
        if isinstance(values, bytes | str) or not isinstance(values, Iterable):
            raise wrong_type("`values`", "a list of values", values)
        plain: list[Any] = list(values) if self._encode is None else [self._encode(value) for value in values]
        if set(map(type, plain)) - {bytes}:
            plain = [as_bytes(value, "value") for value in plain]
        if keys is not None and (isinstance(keys, bytes | str) or not isinstance(keys, Iterable)):
            raise wrong_type("`keys`", "a list with a key, or None, for each value", keys)
        packed = None if keys is None else [key_bytes(key) for key in keys]
        if packed is not None and len(packed) != len(plain):
            problem = f"send_many() got {count(len(packed), 'key')} for {count(len(plain), 'value')}"
            raise ConfigError(problem, hint="Give one key for each value; None means no key.")
        if partition is not None:
            parse_partition(partition)
        return plain, packed

    def _message(
        self,
        value: T,
        key: Key,
        headers: Mapping[str, bytes] | None,
        partition: str | None,
        timestamp: datetime | int | None,
    ) -> AnyMessage:
        """Returns a message for a transaction. Raises as `send`."""
        plain: Any = value if self._encode is None else self._encode(value)
        headers = telemetry.traced(headers)
        if key is None and headers is None and partition is None and timestamp is None:
            return as_bytes(plain, "value")
        return checked_message(plain, key, headers, partition, timestamp)

    def _messages(
        self,
        values: Iterable[T],
        keys: Iterable[Key] | None,
        partition: str | None = None,
        headers: Headers | None = None,
    ) -> list[AnyMessage]:
        """Returns messages for a transaction. Raises as `send_many`."""
        return messages_of(*self._checked(values, keys, partition), partition, headers)

    def _send_in(
        self,
        topic: str,
        value: T,
        key: Key,
        headers: Mapping[str, bytes] | None,
        partition: str | None,
        timestamp: datetime | int | None,
    ) -> Delivery | None:
        """Sends with the caller's transaction. Returns None if the caller is in no transaction."""
        return None

    def _send_many_in(self, topic: str, messages: Callable[[], list[AnyMessage]]) -> ManyDelivery | None:
        """Sends checked messages with the caller's transaction. Returns None if the caller is in no transaction."""
        return None


def table_tools() -> ModuleType:
    """Returns the module for send_table(). Raises ConfigError without pyarrow."""
    try:
        from metamq.client.producer import tables
    except ImportError:
        hint = "Install it with: pip install 'metamq[arrow]'"
        raise ConfigError("send_table() needs pyarrow", hint=hint) from None
    return tables


def checked_message(
    value: Any, key: Key, headers: Mapping[str, bytes] | None, partition: str | None, timestamp: datetime | int | None
) -> CheckedMessage:
    """Returns a message as it is stored. Raises WrongType, ConfigError."""
    if partition is not None:
        parse_partition(partition)
    return CheckedMessage(
        as_bytes(value, "value"), key_bytes(key), checked_headers(headers), partition, timestamp_us(timestamp)
    )


def messages_of(
    values: list[bytes], keys: list[bytes | None] | None, partition: str | None, headers: Headers | None
) -> list[AnyMessage]:
    """Returns a message for each value. `keys`, if given, has a key or None for each of them."""
    if partition is not None or headers:
        messages: list[AnyMessage] = [
            CheckedMessage(v, key, headers, partition) for v, key in zip(values, keys or repeat(None), strict=False)
        ]
    elif keys is not None:
        messages = [v if key is None else CheckedMessage(v, key) for v, key in zip(values, keys, strict=True)]
    else:
        messages = [*values]
    if messages and (trace := telemetry.traced(headers)):
        messages[0] = CheckedMessage(values[0], None if keys is None else keys[0], trace, partition)
    return messages


def as_bytes(value: Any, what: str) -> bytes:
    """Returns the bytes of a bytes-like object. Raises WrongType, a TypeError, with a hint for other objects."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    problem = f"a message's {what} must be bytes, not {type(value).__name__}"
    raise WrongType(problem, hint="Encode it, or give Producer(encode=...).")


def key_bytes(key: Key) -> bytes | None:
    """Returns a key as it is stored. A str is encoded in UTF-8."""
    if key is None or type(key) is bytes:
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytearray | memoryview):
        return bytes(key)
    raise WrongType(f"a message's key must be str or bytes, not {type(key).__name__}")


def checked_headers(headers: Mapping[str, bytes] | None) -> dict[str, bytes] | None:
    """Returns a copy of the headers. Raises WrongType unless they map str to bytes."""
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise wrong_type("`headers`", "a mapping of str to bytes", headers)
    for name, text in headers.items():
        if not isinstance(name, str) or not isinstance(text, bytes):
            raise wrong_type("`headers`", "a mapping of str to bytes", {name: text})
    return dict(headers)
