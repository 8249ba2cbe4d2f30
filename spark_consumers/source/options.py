"""The options of a query that reads: their names, which are those of Spark's Kafka source, and their meaning.

Spark passes texts, with names in any case. The driver checks all of them before it does anything. The error for a wrong
or unknown option names the option and the right value.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from metamq.client.settings import ClusterAccess, cluster_access, unknown
from metamq.errors import ConfigError
from metamq.security.delegation import LIFETIME_MAX_S
from metamq.spark_consumers.source import boundaries
from metamq.wire.commands import EARLIEST, LATEST
from metamq.zk.names import check_group, check_topic

if TYPE_CHECKING:
    from metamq.zk.partitions import TopicPartition

SUBSCRIPTIONS = ("subscribe", "subscribePattern", "assign")
BOTH = (
    *SUBSCRIPTIONS,
    "zookeeper",
    "root",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "decode",
    "readFrom",
    "readFiles",
    "pollTimeoutMs",
    "delegation",
    "tokenLifetime",
)
BATCH = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "pushdown")
STREAM = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "groupId")
SPARKS_OWN = {"path", "serialization.format", "checkpointlocation", "queryname", "__ispatternrecursive"}
"""Options that Spark adds to those of a table or a query, in lower case."""

_OF_KAFKA = {
    "fetchoffset.numretries": "Brokers are asked again until `pollTimeoutMs` is over: give that.",
    "fetchoffset.retryintervalms": "Brokers are asked again until `pollTimeoutMs` is over: give that.",
    "kafkaconsumer.polltimeoutms": "Give `pollTimeoutMs`.",
    "groupidprefix": "A query joins no group. `groupId` names the one whose offsets show its progress.",
}
"""Options of Kafka's source that have other names here, in lower case."""
_ASSIGN_EXAMPLE = '{"flights": ["0-0", "0-1"]}'
_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_COUNT_MAX = 2**63 - 1
TOKEN_LEAST_S = 60.0
BATCH_TOKEN_S = 86_400.0
"""Nothing of metamq runs in the driver while a batch query runs, so nothing renews its token."""
STREAM_TOKEN_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Subscription:
    """The topics of a query: by name, by a pattern that the whole name matches, or as partitions."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    partitions: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The checked options."""

    access: ClusterAccess
    subscription: Subscription
    starting: boundaries.Boundary
    ending: boundaries.Boundary
    if_no_offset_at_time: Literal["error", "latest"]
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    include_headers: bool
    decoded: str | None
    """The topic whose values become structs."""
    read_from: Literal["master", "any"]
    read_files: bool
    poll_timeout_s: float
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_s: float
    group: str | None
    token_lifetime_s: float
    """The least time for which the tasks' token is valid; 0: tasks use the same files as the driver."""


def parse_options(given: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Parses the options of a batch or streaming query. Raises ConfigError with the option's name and the next step."""
    allowed = (*BOTH, *(STREAM if streaming else BATCH))
    texts = Texts(given, allowed, streaming)
    check_path(given, "subscribe")
    _refuse_pushdown(texts)
    strategy = texts.choice("startingOffsetsByTimestampStrategy", ("error", "latest"), "error")
    default, refused = (LATEST, None) if streaming else (EARLIEST, LATEST)
    subscription = _subscription(texts)
    options = SourceOptions(
        access=cluster_access(texts.get("zookeeper"), texts.get("root"), None, None),
        subscription=subscription,
        starting=_boundary(texts, "starting", default, refused),
        ending=_boundary(texts, "ending", LATEST, EARLIEST),
        if_no_offset_at_time="latest" if strategy == "latest" else "error",
        min_partitions=texts.whole("minPartitions"),
        max_records_per_partition=texts.whole("maxRecordsPerPartition"),
        fail_on_data_loss=texts.flag("failOnDataLoss", True),
        include_headers=texts.flag("includeHeaders", False),
        decoded=_decoded(texts, subscription),
        read_from="any" if texts.choice("readFrom", ("any", "master"), "any") == "any" else "master",
        read_files=texts.flag("readFiles", True),
        poll_timeout_s=(texts.whole("pollTimeoutMs") or 120_000) / 1000,
        max_offsets_per_trigger=texts.whole("maxOffsetsPerTrigger"),
        min_offsets_per_trigger=_min_offsets(texts),
        max_trigger_delay_s=texts.seconds("maxTriggerDelay", 900.0),
        group=_group(texts),
        token_lifetime_s=token_lifetime_s(texts, STREAM_TOKEN_S if streaming else BATCH_TOKEN_S),
    )
    _check_company(texts)
    boundaries.check_order(options.starting, options.ending)
    return options


def check_path(given: Mapping[str, str], topic_option: str) -> None:
    """Refuses a path given to load(), save() or start(). A table's folder, which Spark makes up, is a URL."""
    path = next((text for name, text in given.items() if name.lower() == "path"), None)
    if path is not None and ":/" not in path:
        raise ConfigError(
            f"a topic has no path, but the path {path!r} is given", hint=f"Name the topic: option {topic_option!r}."
        )


def _refuse_pushdown(texts: Texts) -> None:
    """Refuses filter pushdown. Spark up to 4.3 keeps a scan's filters in the data source, which all scans of one load()
    share: a second scan of the same data frame or table would lose rows to the filters of the first."""
    if texts.flag("pushdown", False):
        raise ConfigError(
            "option 'pushdown' is 'true', but Spark mixes up the filters of a data frame's scans, so rows are missing",
            hint="Remove it: Spark filters the rows. To read less, give startingOffsets, endingOffsets, "
            "startingTimestamp or endingTimestamp, or assign.",
        )


def _check_company(texts: Texts) -> None:
    """Refuses options that have no effect without another one."""
    times = ("startingTimestamp", "startingOffsetsByTimestamp")
    for name, others in (("maxTriggerDelay", ("minOffsetsPerTrigger",)), (times[1] + "Strategy", times)):
        if texts.get(name) is not None and not texts.present(others):
            needed = " or ".join(map(repr, others))
            raise ConfigError(f"option {name!r} does nothing without {needed}", hint="Remove it, or add the other.")


def check_options(given: Mapping[str, str]) -> SourceOptions:
    """Returns the options of a query whose kind is not known yet. Raises ConfigError if both kinds refuse them."""
    is_for_stream = any(name.lower() in map(str.lower, STREAM) for name in given)
    try:
        return parse_options(given, streaming=is_for_stream)
    except ConfigError:
        with contextlib.suppress(ConfigError):
            return parse_options(given, streaming=not is_for_stream)
        raise


class Texts:
    """The options as texts, by their proper names."""

    def __init__(
        self,
        given: Mapping[str, str],
        allowed: tuple[str, ...],
        streaming: bool,
        known: tuple[str, ...] = (*BOTH, *BATCH, *STREAM),
    ) -> None:
        names = {name.lower(): name for name in known}
        self._texts: dict[str, str] = {}
        for key, text in given.items():
            name = names.get(key.lower())
            if name is None:
                if key.lower() in SPARKS_OWN:
                    continue
                if key.lower() in _OF_KAFKA:
                    raise ConfigError(f"unknown option {key!r}: it is Kafka's", hint=_OF_KAFKA[key.lower()])
                if key.lower().startswith("kafka."):
                    hint = "Brokers are found through ZooKeeper: give `zookeeper`, as in 'zk1:2181,zk2:2181'."
                    raise ConfigError(f"unknown option {key!r}: it is Kafka's", hint=hint)
                error = unknown(key, list(allowed), "the options of the query")
                raise ConfigError(error.problem.replace("setting", "option"), hint=error.hint)
            if name not in allowed:
                kind, other = ("streaming", "batch") if streaming else ("batch", "streaming")
                raise ConfigError(f"option {name!r} is for {other} queries, this is a {kind} query", hint="Remove it.")
            self._texts[name] = str(text)

    def get(self, name: str) -> str | None:
        """Returns the option's text; None if it was not given."""
        return self._texts.get(name)

    def present(self, names: tuple[str, ...]) -> list[str]:
        """Returns those that were given."""
        return [name for name in names if name in self._texts]

    def whole(self, name: str) -> int | None:
        """Returns a whole number, 1 or more. Raises ConfigError, as the next methods do."""
        text = self._texts.get(name)
        if text is None:
            return None
        if not text.strip().isdecimal() or not 0 < int(text) <= _COUNT_MAX:
            raise ConfigError(f"option {name!r} is {text!r}", hint="It has to be a whole number, 1 or more.")
        return int(text)

    def flag(self, name: str, default: bool) -> bool:
        """Returns True for "true", False for "false"."""
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """Returns one of the choices, in lower case."""
        text = self._texts.get(name, default)
        if text.strip().lower() not in choices:
            raise ConfigError(f"option {name!r} is {text!r}", hint=f"Choose {' or '.join(map(repr, choices))}.")
        return text.strip().lower()

    def seconds(self, name: str, default: float) -> float:
        """Returns a time with its unit, in seconds."""
        text = self._texts.get(name)
        if text is None:
            return default
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
        if match is None or match.group(2) not in _UNITS_S:
            raise ConfigError(f"option {name!r} is {text!r}, not a time", hint="Write it like '90s' or '15m'.")
        return float(match.group(1)) * _UNITS_S[match.group(2)]


def _subscription(texts: Texts) -> Subscription:
    present = texts.present(SUBSCRIPTIONS)
    if len(present) != 1:
        what = f"the options {' and '.join(map(repr, present))} are given" if present else "nothing is subscribed to"
        raise ConfigError(what, hint="Give one of: subscribe, subscribePattern, assign.")
    name = present[0]
    text = texts.get(name) or ""
    if name == "subscribe":
        topics = tuple(dict.fromkeys(one.strip() for one in text.split(",") if one.strip()))
        if not topics:
            raise ConfigError("option 'subscribe' names no topic", hint="Give topics, separated by commas.")
        for topic in topics:
            boundaries.checked(name, check_topic, topic)
        return Subscription(topics=topics)
    if name == "subscribePattern":
        if not text.strip():
            raise ConfigError("option 'subscribePattern' is empty: it matches no topic", hint="As in 'flights-.*'.")
        try:
            re.compile(text)
        except re.error as error:
            hint = "Write it in the syntax of Python's `re`; the pattern must match the whole name."
            raise ConfigError(f"option 'subscribePattern' is {text!r}: {error}", hint=hint) from None
        return Subscription(pattern=text)
    partitions = []
    for topic, names in boundaries.json_map("assign", text, _ASSIGN_EXAMPLE).items():
        if not isinstance(names, list) or not names:
            raise ConfigError(f"option 'assign': {topic!r} has no list of partitions", hint=f"As in {_ASSIGN_EXAMPLE}.")
        partitions += [boundaries.checked_partition("assign", topic, one) for one in names]
    return Subscription(partitions=tuple(dict.fromkeys(partitions)))


def _decoded(texts: Texts, subscription: Subscription) -> str | None:
    if texts.get("decode") is None:
        return None
    texts.choice("decode", ("schema",), "")
    topics = subscription.topics or tuple({tp.topic for tp in subscription.partitions})
    if len(topics) != 1:
        hint = "Each topic has its own schema: name one in `subscribe` or `assign`."
        raise ConfigError("option 'decode' is for a query of one topic", hint=hint)
    return topics[0]


def _boundary(
    texts: Texts, edge: Literal["starting", "ending"], default: int, refused: int | None
) -> boundaries.Boundary:
    """Returns the start or the end of the query. `refused`: the mark that makes no sense there."""
    by_time, by_times, by_offsets = f"{edge}Timestamp", f"{edge}OffsetsByTimestamp", f"{edge}Offsets"
    if (text := texts.get(by_time)) is not None:
        return boundaries.time_boundary(by_time, text)
    if (text := texts.get(by_times)) is not None:
        return boundaries.times_boundary(by_times, text)
    if (text := texts.get(by_offsets)) is not None:
        return boundaries.offsets_boundary(by_offsets, text, refused=refused)
    return boundaries.Boundary(by_offsets, default)


def _min_offsets(texts: Texts) -> int | None:
    least, most = texts.whole("minOffsetsPerTrigger"), texts.whole("maxOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        problem = f"option 'minOffsetsPerTrigger' is {least:,}, more than 'maxOffsetsPerTrigger', {most:,}"
        raise ConfigError(problem, hint="Lower the one or raise the other.")
    return least


def token_lifetime_s(texts: Texts, default_s: float) -> float:
    """Returns the option `tokenLifetime`, or 0 without delegation. Raises ConfigError."""
    if not texts.flag("delegation", True):
        return 0.0
    lifetime_s = texts.seconds("tokenLifetime", default_s)
    if not TOKEN_LEAST_S <= lifetime_s <= LIFETIME_MAX_S:
        raise ConfigError(
            f"option 'tokenLifetime' is {texts.get('tokenLifetime')!r}", hint="It has to be a minute to seven days."
        )
    return lifetime_s


def _group(texts: Texts) -> str | None:
    name = texts.get("groupId")
    if name is not None:
        boundaries.checked("groupId", check_group, name)
    return name
