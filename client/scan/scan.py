"""`metamq.scan()`: the messages of topics between fixed places, as a table for every library that reads Arrow.

A scan fixes its ranges once, when it is made: the offsets at which each partition begins and ends. After that it has no
connection and no thread. Each use of it reads the same ranges, up to their ends. If a broker is away, the scan waits
for it, and in the end raises its error. The absence of messages never ends a scan.

Only masters say where a range ends: a slave may have less, and the scan would end too early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from metamq.client.checks import check_seconds, is_whole, partition_of, wrong_type
from metamq.client.model import requested_time_us
from metamq.client.scan.cluster_view import ClusterView, Topics, ask_until_answered, offset_inside
from metamq.client.scan.fetch import FetchTask
from metamq.client.scan.ranges import OffsetRange
from metamq.client.schemas.topic import Topic
from metamq.client.settings import cluster_access
from metamq.errors import ConfigError, PartitionNotFound
from metamq.wire.commands import EARLIEST, LATEST
from metamq.zk.names import check_topic

if TYPE_CHECKING:
    import pyarrow as pa

    from metamq.client.scan.typed_values import TypedValues
    from metamq.client.settings import ClusterAccess
    from metamq.security.config import SecurityConfig
    from metamq.wire.commands import OffsetsResult
    from metamq.zk.cluster.topics import TopicConfig
    from metamq.zk.partitions import TopicPartition

Bound = Literal["earliest", "latest"] | datetime | Mapping["TopicPartition", int]
"""The start or the end of a scan: an end of the log, the first message at or after an aware time, or an offset for each
of some partitions."""
Place = str | datetime | int
"""A bound for one partition."""

TIMEOUT_S = 30.0
SKIP = "on_data_loss='earliest'"


def scan(
    topics: str | Collection[str] | Topic[Any],
    *,
    start: Bound = "earliest",
    end: Bound = "latest",
    columns: Collection[str] | None = None,
    decode: Literal["schema"] | None = None,
    on_data_loss: Literal["fail", "earliest"] = "fail",
    read_from: Literal["any", "master"] = "any",
    timeout_s: float = TIMEOUT_S,
    zookeeper: str | None = None,
    root: str | None = None,
    security: SecurityConfig | None = None,
    config: str | None = None,
) -> Scan:
    """Returns the messages of one or several topics as a table, which Arrow's libraries read.

        flights = metamq.scan("flights")
        duckdb.sql("SELECT key, count(*) FROM flights GROUP BY key")
        polars.DataFrame(flights)
        pyarrow.table(flights).to_pandas()

    start, end:   the first message, and the first one after the table: "earliest", "latest", the first message at or
                  after an aware datetime, or {TopicPartition: offset}. A partition that the mapping leaves out is read
                  from "earliest", or up to "latest". All of it is fixed when this function returns.
    columns:      some of topic, partition, offset, key, value, headers, timestamp. No other is decoded. Default: all.
    decode:       "schema" makes `value` a struct with the fields of the newest registered schema, of JSON, Avro or
                  Arrow. A Topic instead of a name makes it a struct with the fields of its type. A field that a message
                  lacks is null; with Avro it has its default. Each row of an Arrow message is a row. A value that does
                  not decode raises DecodeError.
    on_data_loss: the action if retention removed messages of the table: "fail" raises OffsetOutOfRange, "earliest"
                  continues with the first message that is left, with a warning. After an unclean failover it leaves out
                  the rest of that partition: messages that took the place of lost ones are newer than the scan.
    read_from:    the replicas to read, as in a Consumer. The end always comes from masters.
    timeout_s:    seconds for which the scan waits for a broker that does not answer. Then it raises the broker's error.

    The rows of a partition come in the order of their offsets; those of several partitions are mixed. The other
    arguments are those of a Consumer. Raises TopicNotFound, PartitionNotFound, ConnectError, OffsetOutOfRange,
    ConfigError (a wrong argument, or no pyarrow).
    """
    schema = _schema(columns)
    typed = topics if isinstance(topics, Topic) else None
    names = _topic_names(topics.name if isinstance(topics, Topic) else topics)
    _check_decode(decode, names, typed)
    _check_bound("start", start)
    _check_bound("end", end)
    _check_choice("on_data_loss", on_data_loss, ("fail", "earliest"))
    _check_choice("read_from", read_from, ("any", "master"))
    check_seconds("timeout_s", timeout_s, optional=False)
    access = cluster_access(zookeeper, root, config, security)
    values_of = None if typed is None and decode is None else partial(_typed_values, typed, names[0])
    may_skip, with_slaves = on_data_loss == "earliest", read_from == "any"
    tasks, values = _planned(
        access, names, start, end, values_of, may_skip=may_skip, with_slaves=with_slaves, timeout_s=timeout_s
    )
    return Scan(tasks, schema, values)


def _planned(
    access: ClusterAccess,
    names: Collection[str],
    start: Bound,
    end: Bound,
    values_of: Callable[[TopicConfig], TypedValues] | None,
    *,
    may_skip: bool,
    with_slaves: bool,
    timeout_s: float,
) -> tuple[list[FetchTask], TypedValues | None]:
    """Returns a task for each partition, and the reader of typed values."""
    deadline = time.monotonic() + timeout_s
    values = None
    with ClusterView(access) as view:
        partitions: Topics = {}
        for name in names:
            found = view.topic(name)
            partitions |= dict.fromkeys(found.topic_partitions, found.id)
            if values_of is not None:
                values = values_of(found)
        starts = _offsets(view, partitions, "start", start, "earliest", deadline, may_skip=may_skip)
        ends = _offsets(view, partitions, "end", end, "latest", deadline, may_skip=may_skip)
        replicas = view.replicas(partitions, with_slaves=with_slaves)
    tasks = [
        FetchTask(
            wanted=_range(tp, topic_id, starts[tp][0], ends[tp][0], _place(end, tp, "latest")),
            replicas=replicas.get(tp, ()),
            access=access,
            epoch=starts[tp][1],
            last_epoch=ends[tp][1],
            fail_on_data_loss=not may_skip,
            with_slaves=with_slaves,
            poll_timeout_s=timeout_s,
            in_place=True,
            loss_setting=SKIP,
        )
        for tp, topic_id in partitions.items()
    ]
    return tasks, values


class Scan:
    """The table that scan() returns: an object with `__arrow_c_stream__`, the Arrow PyCapsule interface. Thread-safe.

    Each use reads the topics again, between the same offsets. The caller's library gets the error of a scan as its own
    kind of error; iteration raises metamq's.
    """

    def __init__(self, tasks: list[FetchTask], schema: pa.Schema, values: TypedValues | None = None) -> None:
        self._tasks = tasks
        self._plain = schema
        self._values = values if "value" in schema.names else None
        if self._values is not None:
            at = schema.get_field_index("value")
            schema = schema.set(at, schema.field(at).with_type(self._values.type).with_nullable(True))
        self.schema: Any = schema
        """The pyarrow.Schema of the columns."""

    @property
    def start(self) -> dict[TopicPartition, int]:
        """The offset of the first message, by partition."""
        return {task.wanted.tp: task.wanted.start for task in self._tasks}

    @property
    def end(self) -> dict[TopicPartition, int]:
        """The offset after the last message, by partition: the `start` of a later scan that continues this one."""
        return {task.wanted.tp: task.wanted.end for task in self._tasks}

    def __iter__(self) -> Iterator[Any]:
        """Yields pyarrow.RecordBatches. Raises OffsetOutOfRange, CorruptData, ConnectError and so on."""
        from metamq.client.scan.side_by_side import record_batches

        tasks = [task for task in self._tasks if task.wanted.size]
        if self._values is None:
            return record_batches(tasks, self._plain)
        from metamq.client.scan.typed_values import place_and

        return self._values.typed_batches(record_batches(tasks, place_and(self.schema)), self.schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow as pa

        return pa.RecordBatchReader.from_batches(self.schema, iter(self)).__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        topics = ", ".join(dict.fromkeys(task.wanted.tp.topic for task in self._tasks))
        messages = sum(task.wanted.size for task in self._tasks)
        return f"<Scan of {topics}: {messages:,} messages, columns {', '.join(self.schema.names)}>"


def _check_decode(decode: str | None, names: Collection[str], typed: Topic[Any] | None) -> None:
    if decode not in (None, "schema") or (decode is not None and (len(names) != 1 or typed is not None)):
        hint = "Give decode='schema' with the name of one topic, or a Topic alone."
        raise ConfigError(f"`decode` is {decode!r}", hint=hint)


def _typed_values(typed: Topic[Any] | None, name: str, config: TopicConfig) -> TypedValues:
    """Returns the maker of the typed column. Raises ConfigError."""
    from metamq.client.scan.typed_values import TypedValues, newest_schema

    if typed is None:
        return newest_schema(name, config.schemas).reader()
    if typed.schema.format not in ("avro", "arrow"):
        return TypedValues(name, typed.schema, None, is_framed=typed.has_versions)
    typed.learn(config.schemas.by_version)
    return TypedValues(name, typed.schema, typed.decode)


def _schema(columns: Collection[str] | None) -> pa.Schema:
    """Returns the schema of the columns. Raises ConfigError."""
    try:
        import pyarrow as pa

        from metamq.client.fetch.arrow import SCHEMA
    except ImportError:
        raise ConfigError("scan() needs pyarrow", hint="Install it with: pip install 'metamq[arrow]'") from None
    if columns is None:
        return SCHEMA
    if isinstance(columns, str) or not isinstance(columns, Collection):
        raise wrong_type("`columns`", "a list of names", columns)
    names = list(columns)
    for name in names:
        if name not in SCHEMA.names:
            raise ConfigError(f"`columns` names {name!r}", hint=f"There are: {', '.join(SCHEMA.names)}.")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"`columns` is {names!r}", hint="Name one column or more, each once.")
    return pa.schema([SCHEMA.field(name) for name in names])


def _topic_names(topics: str | Collection[str]) -> list[str]:
    if not isinstance(topics, str | Collection) or isinstance(topics, bytes | bytearray):
        raise wrong_type("`topics`", "a name or a list of names", topics)
    names = [topics] if isinstance(topics, str) else list(dict.fromkeys(topics))
    if not names:
        raise ConfigError("a scan needs a topic", hint='As in scan("flights").')
    for name in names:
        check_topic(name)
    return names


def _check_bound(name: str, bound: object) -> None:
    if isinstance(bound, Mapping):
        for key, offset in bound.items():
            if not is_whole(offset) or offset < 0:
                raise wrong_type(f"`{name}` of {partition_of(key)}", "an offset, 0 or more", offset)
    elif not (bound.tzinfo is not None if isinstance(bound, datetime) else bound in ("earliest", "latest")):
        hint = "Give 'earliest', 'latest', an aware datetime, or {TopicPartition: offset}."
        raise ConfigError(f"`{name}` is {bound!r}", hint=hint)


def _check_choice(name: str, choice: object, allowed: tuple[str, str]) -> None:
    if choice not in allowed:
        raise ConfigError(f"`{name}` is {choice!r}", hint=f"Choose {' or '.join(map(repr, allowed))}.")


def _offsets(
    view: ClusterView,
    partitions: Topics,
    name: str,
    bound: Bound,
    default: Literal["earliest", "latest"],
    deadline: float,
    *,
    may_skip: bool,
) -> dict[TopicPartition, tuple[int, int]]:
    """Returns the offset of a bound and the epoch of the message before it (-1: unknown), by partition."""
    if isinstance(bound, Mapping):
        for tp in map(partition_of, bound):
            if tp not in partitions:
                known = tuple(one.partition for one in partitions if one.topic == tp.topic)
                raise PartitionNotFound(tp.topic, tp.partition, known)
    places = {tp: _place(bound, tp, default) for tp in partitions}
    questions = {tp: (partitions[tp], _question(places[tp])) for tp in partitions}
    answers = ask_until_answered(view, questions, max(deadline - time.monotonic(), 0.0))
    hint = None if may_skip else f"Correct `{name}`; with {SKIP} the nearest offset is used."
    found = {tp: _found(tp, places[tp], answers[tp], hint) for tp in partitions}
    if name == "start":  # above the end: perhaps a new master does not show all of its log yet
        found |= {tp: (place, -1) for tp, place in places.items() if isinstance(place, int) and place > found[tp][0]}
    return found


def _place(bound: Bound, tp: TopicPartition, default: str) -> Place:
    return bound.get(tp, default) if isinstance(bound, Mapping) else bound


def _question(place: Place) -> int:
    if isinstance(place, datetime):
        return requested_time_us(place)
    return EARLIEST if place == "earliest" else LATEST


def _found(tp: TopicPartition, place: Place, answer: OffsetsResult, hint: str | None) -> tuple[int, int]:
    offset = offset_inside(tp, place, answer, hint) if isinstance(place, int) else answer.offset
    return offset, answer.epoch if offset == answer.offset else -1


def _range(tp: TopicPartition, topic_id: str, start: int, end: int, wanted_end: Place) -> OffsetRange:
    """Returns the range. Raises ConfigError if the caller wants an end before the start."""
    if end < start and wanted_end != "latest":  # a new master does not show all of its log yet
        problem = f"`start` begins {tp} at offset {start}, and `end` ends it at {end}"
        raise ConfigError(problem, hint="Give a later end, or an earlier start.")
    return OffsetRange(tp, topic_id, start, max(start, end))
