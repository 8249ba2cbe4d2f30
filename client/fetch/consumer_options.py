"""A consumer's settings, and its plan: the validated arguments."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from metamq.client.checks import check_ranges, is_whole, wrong_type
from metamq.client.delayed import delayed_topic
from metamq.client.group.strategies import check_strategy
from metamq.client.schemas.topic import Topic
from metamq.client.subscriptions import check_subscription
from metamq.errors import ConfigError
from metamq.wire.limits import BATCH_BYTES_MAX, FRAME_BYTES_MAX
from metamq.zk.names import RETRY_SUFFIX, check_consumer, check_group, is_pattern

if TYPE_CHECKING:
    from metamq.client.offsets.offsets import OffsetStorage

Start = Literal["earliest", "latest"] | datetime
DataLoss = Literal["earliest", "latest", "fail"]


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """A consumer's settings. The constructor validates them."""

    commit_interval_ms: int = 1000
    """Milliseconds between two commits of done messages."""
    fetch_wait_ms: int = 5000
    """The most milliseconds that a broker waits for messages in a long poll. New messages end the wait at once."""
    fetch_min_bytes: int = 1
    """The bytes that a broker collects before it answers, within `fetch_wait_ms`."""
    fetch_max_bytes: int = 1024 * 1024
    """The most bytes of one answer. In measurements larger answers exceed the processor's cache, and then broker and
    consumer work one after another instead of in parallel."""
    partition_fetch_max_bytes: int = 1024 * 1024
    """The most bytes of one partition in one answer. A larger batch is still sent whole."""
    prefetch_bytes: int = 16 * 1024 * 1024
    """The limit for the bytes of fetched messages that are not done. Above it the consumer fetches no more."""
    session_timeout_ms: int = 10_000
    """Milliseconds after a consumer's death until its partitions go to other members."""
    read_from: str = "master"
    """The replicas to read: "master", or "any". "any" also reads slaves, if a master cannot be reached, or if it
    prefers a slave because the reader is far behind."""

    def __post_init__(self) -> None:
        limits = {
            "commit_interval_ms": (1, 3_600_000),
            "fetch_wait_ms": (0, 300_000),
            "fetch_min_bytes": (1, BATCH_BYTES_MAX),
            "fetch_max_bytes": (1, FRAME_BYTES_MAX // 2),
            "partition_fetch_max_bytes": (1, FRAME_BYTES_MAX // 2),
            "prefetch_bytes": (1, 1 << 40),
            "session_timeout_ms": (1000, 600_000),
        }
        check_ranges("consumer", self, limits)
        if self.read_from not in ("master", "any"):
            raise ConfigError(f"consumer: `read_from` is {self.read_from!r}", hint="Choose 'master' or 'any'.")


class ConsumerSettings(TypedDict, total=False):
    """The keyword arguments of a Consumer; ConsumerOptions describes them."""

    commit_interval_ms: int
    fetch_wait_ms: int
    fetch_min_bytes: int
    fetch_max_bytes: int
    partition_fetch_max_bytes: int
    prefetch_bytes: int
    session_timeout_ms: int
    read_from: Literal["master", "any"]


@dataclass(frozen=True, slots=True)
class ConsumerPlan:
    """The validated arguments of a Consumer."""

    topics: tuple[str, ...]
    group: str | None
    consumer_id: str
    start: Start
    strategy: str
    auto_commit: bool
    on_data_loss: DataLoss
    broadcast: bool
    offsets: OffsetStorage | None
    decode: Callable[[bytes], Any] | None
    typed: Topic[Any] | None = None
    """The Topic that decodes the values."""
    retry_topic: str | None = None
    """The retry topic of the group, which is one of `topics`, if the consumer reads it."""


def consumer_plan(
    topics: Collection[str] | str | Topic[Any],
    group: str | None,
    *,
    consumer_id: str | None,
    start: Start,
    strategy: str,
    auto_commit: bool,
    on_data_loss: DataLoss,
    broadcast: bool,
    offsets: OffsetStorage | None,
    decode: Callable[[bytes], Any] | None,
    retry_topic: bool,
) -> ConsumerPlan:
    """Checks a Consumer's arguments. Raises ConfigError."""
    typed = topics if isinstance(topics, Topic) else None
    if isinstance(topics, Topic):
        if decode is not None:
            raise ConfigError(f"{topics!r} decodes its values, and there is `decode=`", hint="Leave `decode=` out.")
        decode, topics = topics.decode, topics.name
    for name, flag in (("auto_commit", auto_commit), ("broadcast", broadcast), ("retry_topic", retry_topic)):
        if not isinstance(flag, bool):
            raise wrong_type(f"`{name}`", "True or False", flag)
    if offsets is not None and not hasattr(offsets, "claimed"):
        raise wrong_type("`offsets`", "a DatabaseOffsets(connect) or FileOffsets(path)", offsets)
    names = _topic_names(topics, is_member=group is not None and not broadcast)
    if group is not None:
        check_group(group)
    retry = _retry_topic(group, broadcast=broadcast) if retry_topic else None
    if not is_start(start):
        raise ConfigError(f"`start` is {start!r}", hint="Give 'earliest', 'latest' or an aware datetime.")
    if on_data_loss not in ("earliest", "latest", "fail"):
        raise ConfigError(f"`on_data_loss` is {on_data_loss!r}", hint="Choose 'earliest', 'latest' or 'fail'.")
    _check_offsets(group, broadcast, offsets)
    return ConsumerPlan(
        topics=names if retry is None else tuple(dict.fromkeys((*names, retry))),
        group=group,
        consumer_id=check_consumer(consumer_id or _new_consumer_id(group or "reader")),
        start=start,
        strategy=check_strategy(strategy),
        auto_commit=auto_commit and group is not None,
        on_data_loss=on_data_loss,
        broadcast=broadcast,
        offsets=offsets,
        decode=decode,
        typed=typed,
        retry_topic=retry,
    )


def _topic_names(topics: Collection[str] | str, *, is_member: bool) -> tuple[str, ...]:
    """Returns the names and patterns. Raises ConfigError."""
    if not isinstance(topics, str | Collection):
        raise wrong_type("`topics`", "a name or a list of names", topics)
    if mixed := next((one for one in topics if isinstance(one, Topic)), None):
        raise ConfigError(
            f"`topics` is a list with {mixed!r}, and a Topic decodes the values of one topic only",
            hint="Give topics=<the Topic>. Or give names, and decode message.value yourself, by the Topic's decode().",
        )
    names = (topics,) if isinstance(topics, str) else tuple(dict.fromkeys(topics))
    if not names:
        raise ConfigError("a consumer needs a topic", hint='Give topics=["name"].')
    patterns = [name for name in names if is_pattern(check_subscription(name))]
    if patterns and not is_member:
        raise ConfigError(
            f"topic {patterns[0]!r} is a pattern, and this consumer is no member of a group",
            hint="Give group=, without broadcast=True. `Admin.topics()` has the topics that exist.",
        )
    return names


def _check_offsets(group: str | None, broadcast: bool, offsets: OffsetStorage | None) -> None:
    if broadcast and (group is None or offsets is None):
        raise ConfigError(
            "a broadcast consumer keeps its own offsets",
            hint="Give group= and offsets=FileOffsets(path) with a path of its own for each consumer.",
        )
    if offsets is not None and group is None:
        raise ConfigError("`offsets` are kept for a group", hint="Give group=, or leave offsets= out.")


def _retry_topic(group: str | None, *, broadcast: bool) -> str:
    """Returns the name of the retry topic. Raises ConfigError."""
    if group is None or broadcast:
        raise ConfigError("the retry topic belongs to a group whose members share the work", hint="Give group=.")
    topic = group + RETRY_SUFFIX
    delayed_topic(topic)
    return topic


def is_start(where: object) -> bool:
    """Returns True for "earliest", "latest" or an aware datetime."""
    if isinstance(where, datetime):
        return where.tzinfo is not None
    return where in ("earliest", "latest")


def check_place(where: object) -> None:
    """Raises ConfigError unless a consumer can seek to the place."""
    if where < 0 if is_whole(where) else not is_start(where):  # type: ignore[operator]
        raise ConfigError(
            f"seek to {where!r}", hint="Give an offset, 0 or more, 'earliest', 'latest' or an aware datetime."
        )


def _new_consumer_id(prefix: str) -> str:
    host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())
    return f"{prefix[:80]}_{host[:60]}-{os.getpid()}-{secrets.token_hex(4)}"
