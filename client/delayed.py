"""Delayed messages on their way to a broker: the topic that takes them, and their headers.

A message for `orders` goes to the topic `orders.delayed`, with the time at which it is due as a header. The master of
its partition there moves it to `orders` when it is due (metamq.broker.delays).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime

from metamq.client.checks import check_seconds, wrong_type
from metamq.client.model import timestamp_us
from metamq.errors import ConfigError
from metamq.security.rights import DELAYED_SUFFIX, LEVEL_PREFIX
from metamq.zk.names import check_topic, parse_partition

DUE = "metamq-due"
"""The header with the time at which a message is due: microseconds since 1970."""
LEFT = "metamq-left"
"""The header with what is left of its delay: microseconds. It decides which way a message takes in its broker."""
PARTITION = "metamq-partition"
"""The header with the partition that `send` names."""
DELAY_MAX_S = 366 * 86_400


def holds_delayed(topic: str) -> bool:
    """Returns True if this is a topic in which delayed messages of other topics wait."""
    return topic.endswith(DELAYED_SUFFIX) or topic.startswith(LEVEL_PREFIX)


def delayed_topic(topic: str) -> str:
    """Returns the topic that takes the delayed messages of a topic. Raises ConfigError if it cannot have one."""
    if holds_delayed(topic):
        raise ConfigError(f"{topic!r} has delayed messages of other topics", hint="Send to the topic itself.")
    check_topic(topic)
    return check_topic(topic + DELAYED_SUFFIX)


def due_us(delay_s: float | None, deliver_at: datetime | None) -> tuple[int, int]:
    """Returns the time at which a message is due, in microseconds since 1970, and its delay in microseconds.

    Raises ConfigError, WrongType.
    """
    now_us = time.time_ns() // 1000
    if deliver_at is not None:
        if delay_s is not None:
            raise ConfigError("`delay_s` and `deliver_at` are both given", hint="Give one of them.")
        if not isinstance(deliver_at, datetime):
            raise wrong_type("`deliver_at`", "an aware datetime", deliver_at)
        found = timestamp_us(deliver_at, "deliver_at") or 0
    else:
        check_seconds("delay_s", delay_s, optional=False)
        found = now_us + round((delay_s or 0.0) * 1e6)
    if found - now_us > DELAY_MAX_S * 1_000_000:
        raise ConfigError("a message cannot be delayed by more than 366 days")
    return found, max(0, found - now_us)


def delayed(
    topic: str,
    headers: Mapping[str, bytes] | None,
    partition: str | None,
    timestamp: object,
    delay_s: float | None,
    deliver_at: datetime | None,
) -> tuple[str, Mapping[str, bytes] | None, str | None]:
    """Returns the topic, the headers and the partition with which a message is sent, and waits if it is delayed.

    It refuses a `timestamp`: a delayed message has the time of its delivery. Raises ConfigError, WrongType.
    """
    if not delay_s and deliver_at is None:
        return topic, headers, partition
    due, left = due_us(delay_s, deliver_at)
    if timestamp is not None:
        raise ConfigError("a delayed message has no `timestamp`: it gets the time of its delivery")
    if headers is not None and not (isinstance(headers, Mapping) and headers.keys().isdisjoint((DUE, LEFT, PARTITION))):
        hint = f"{DUE!r}, {LEFT!r} and {PARTITION!r} are names of headers of metamq."
        raise ConfigError(f"a delayed message cannot have the headers {headers!r}", hint=hint)
    if partition is not None:
        parse_partition(partition)
    named = {} if partition is None else {PARTITION: partition.encode()}
    return delayed_topic(topic), {**(headers or {}), DUE: b"%d" % due, LEFT: b"%d" % left, **named}, None
