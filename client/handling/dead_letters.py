"""The dead-letter topic of a group: it gets the messages that the group's listeners failed to process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from contextvars import Context
from typing import TYPE_CHECKING, Any

from metamq.client.admin.admin_core import WAIT_S
from metamq.client.admin.admin_model import TopicSettings
from metamq.client.admin.admin_topics import create_topic
from metamq.client.delayed import DUE, LEFT, PARTITION
from metamq.client.producer.aio_producer import BaseProducer
from metamq.errors import ClosedError, ConfigError, DecodeError, MessageTooLarge, TopicExists
from metamq.wire.limits import MESSAGE_BYTES_MAX
from metamq.words import count
from metamq.zk.names import DEAD_LETTER_SUFFIX

if TYPE_CHECKING:
    from metamq.client.model import Message
    from metamq.client.settings import ClusterAccess

log = logging.getLogger("metamq.client")

BUFFER_BYTES = 1 << 40
"""Bytes of the producer's buffer. This is no real limit: each handler waits for one message at a time."""


ORIGIN_PREFIX = "metamq-origin-"
"""Begins the headers of a message in the retry topic that name the place where it comes from."""
TRACEBACK_BYTES = 4096
"""Bytes of the end of a traceback that a dead letter keeps."""

ORIGIN_HEADERS = (
    "metamq-topic", "metamq-partition", "metamq-offset", "metamq-timestamp", "metamq-attempts", "metamq-error",
    "metamq-traceback",
)  # fmt: skip
"""The headers of dead_letter_headers()."""


def dead_letter_topic(group: str | None) -> str:
    """Returns the topic for messages that a group gave up. Raises ConfigError without a group."""
    if group is None:
        raise ConfigError("a dead-letter topic belongs to a group", hint="Give group=, or dead_letter=False.")
    return group + DEAD_LETTER_SUFFIX


def dead_letter_headers(
    message: Message[Any], error: Exception, attempts: int, *, has_origin: bool = False
) -> dict[str, bytes]:
    """Returns the message's own headers, plus its origin and the error. `has_origin`: it is from the retry topic."""
    place, own = _origin(message, has_origin=has_origin)
    trace = "".join(traceback.format_exception(error)).encode(errors="replace")[-TRACEBACK_BYTES:]
    return {
        **own,
        **{f"metamq-{name}": value for name, value in place.items()},
        **_failure(error, attempts),
        "metamq-traceback": trace,
    }


def retry_headers(
    message: Message[Any], error: Exception, attempts: int, *, has_origin: bool = False
) -> dict[str, bytes]:
    """Returns the headers of a message in the retry topic; see dead_letter_headers(). Those of delays are left out."""
    place, own = _origin(message, has_origin=has_origin)
    return {
        **{name: value for name, value in own.items() if name not in (DUE, LEFT, PARTITION)},
        **{ORIGIN_PREFIX + name: value for name, value in place.items()},
        **_failure(error, attempts),
    }


def _origin(message: Message[Any], *, has_origin: bool) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Returns the place where the message comes from, and its own headers."""
    place = {name: str(getattr(message, name)).encode() for name in ("topic", "partition", "offset", "timestamp")}
    own = dict(message.headers)
    if has_origin:
        place = {name: own.pop(ORIGIN_PREFIX + name, here) for name, here in place.items()}
    return place, own


def _failure(error: Exception, attempts: int) -> dict[str, bytes]:
    text = f"{type(error).__name__}: {error}"[:1000]
    return {"metamq-attempts": str(attempts).encode(), "metamq-error": text.encode(errors="replace")}


class DeadLetters:
    """Sends given-up messages to the group's dead-letter topic, which is created when the first message comes, and
    others to its retry topic."""

    def __init__(self, access: ClusterAccess, group: str | None, retry_topic: str | None = None) -> None:
        self.topic = dead_letter_topic(group)
        self.retry_topic = retry_topic
        """The retry topic, if the consumer reads it."""
        self._access = access
        self._producer: BaseProducer[bytes] | None = None
        self._has_topic = False
        self._opening = asyncio.Lock()
        self._is_closed = False

    async def send(self, message: Message[Any], value: bytes, error: Exception, attempts: int) -> None:
        """Sends a message and returns when it is stored. Raises the errors of a delivery."""
        self._log(message, error, attempts)
        producer = await self._open(has_letters=True)
        headers = dead_letter_headers(message, error, attempts, has_origin=message.topic == self.retry_topic)
        try:
            await producer.send(self.topic, value, message.key, headers)
        except MessageTooLarge:
            del headers["metamq-traceback"]
            await producer.send(self.topic, value, message.key, headers)

    async def send_later(
        self, message: Message[Any], value: bytes, error: Exception, attempts: int, delay_s: float
    ) -> None:
        """Sends a message to the retry topic, to be delivered after the delay, and returns when it is stored.

        Raises the errors of a delivery, and ConfigError if the consumer does not read the retry topic.
        """
        if self.retry_topic is None:
            hint = "Give Consumer(retry_topic=True), or --retry-topic to `metamq worker`."
            raise ConfigError("a RetryLater needs the retry topic, which this consumer does not read", hint=hint)
        producer = await self._open()
        headers = retry_headers(message, error, attempts, has_origin=message.topic == self.retry_topic)
        await producer.send(self.retry_topic, value, message.key, headers, delay_s=delay_s)
        fields = {"topic": message.topic, "partition": message.partition, "offset": message.offset}
        text = "%s/%s offset %d failed: %r; next attempt in %g s, from %s"
        log.info(text, *message[:3], error, delay_s, self.retry_topic, extra=fields)

    def _log(self, message: Message[Any], error: Exception, attempts: int) -> None:
        place, times = f"{message.topic}/{message.partition} offset {message.offset}", count(attempts, "attempt")
        fields = {
            **{name: getattr(message, name) for name in ("topic", "partition", "offset")},
            "key": None if message.key is None else message.key.decode(errors="backslashreplace"),
            "error": f"{type(error).__name__}: {error}",
            "dead_letter_topic": self.topic,
        }
        if isinstance(error, DecodeError):  # the value is at fault, and no code of the listener
            log.warning("given up after %s: %s", times, error.problem, extra=fields)
        else:
            log.warning("%s given up after %s: %r", place, times, error, exc_info=error, extra=fields)

    async def _open(self, *, has_letters: bool = False) -> BaseProducer[bytes]:
        async with self._opening:
            if self._producer is None:
                zookeeper, root, security = self._access
                made = BaseProducer[bytes](zookeeper, root=root, security=security, buffer_bytes=BUFFER_BYTES)
                # Without the context of this message: the producer's tasks live longer.
                self._producer = await Context().run(asyncio.ensure_future, made.open())
                if self._is_closed:
                    await self._producer.close()
                    raise ClosedError("consumer", "the message is not in the dead-letter topic")
            if has_letters and not self._has_topic:
                cluster, settings = self._producer._core.cluster, TopicSettings(max_message_bytes=MESSAGE_BYTES_MAX)
                with contextlib.suppress(TopicExists):
                    await create_topic(cluster, self.topic, 1, None, False, WAIT_S, settings)
                self._has_topic = True
            return self._producer

    async def close(self) -> None:
        """Closes the producer, also one that is being opened."""
        self._is_closed = True
        if self._producer is not None:
            await self._producer.close()
