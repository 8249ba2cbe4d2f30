"""The options and columns of a query that writes, checked in the driver before any task starts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from metamq.client.settings import ClusterAccess, cluster_access
from metamq.errors import ConfigError
from metamq.spark_consumers.sink.decisions import JOB, NAME_CHARS_MAX
from metamq.spark_consumers.source.boundaries import checked
from metamq.spark_consumers.source.options import BATCH_TOKEN_S, Texts, check_path, token_lifetime_s
from metamq.wire.compression import Codec, codec_named
from metamq.zk.names import check_topic

TIMEOUT_MAX_S = 24 * 3600
OPTIONS = (
    "topic",
    "delivery",
    "sinkId",
    "zookeeper",
    "root",
    "compression",
    "deliveryTimeoutMs",
    "transactionTimeoutMs",
    "failOnDataLoss",
    "delegation",
    "tokenLifetime",
)
TEXT_OR_BYTES = ("string", "binary")
HEADERS = "array<struct<key:string,value:binary>>"
TYPES: dict[str, tuple[str, ...]] = {
    "value": TEXT_OR_BYTES,
    "key": TEXT_OR_BYTES,
    "headers": (HEADERS,),
    "topic": ("string",),
    "partition": ("string",),
}
"""Spark's types that each column may have."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The checked options."""

    access: ClusterAccess
    topic: str | None
    """None: the column `topic` has it."""
    delivery: Literal["at_least_once", "exactly_once"]
    sink_id: str | None
    """None: the query's own id is the sink's name."""
    codec: Codec
    delivery_timeout_s: float
    transaction_timeout_s: float
    """Seconds after which brokers roll back a task's messages that are not prepared."""
    fail_on_data_loss: bool
    """True if it is an error that a broker has lost prepared messages of a decided batch."""
    token_lifetime_s: float
    """The time for which the tasks' token is valid; 0: tasks use the same files as the driver."""


def parse_sink_options(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Parses the options of a query that writes. Raises ConfigError with the option's name and the next step."""
    texts = Texts(given, OPTIONS, streaming, OPTIONS)
    check_path(given, "topic")
    exactly = texts.choice("delivery", ("at_least_once", "exactly_once"), "at_least_once") == "exactly_once"
    return SinkOptions(
        access=cluster_access(texts.get("zookeeper"), texts.get("root"), None, None),
        topic=_topic(texts),
        delivery="exactly_once" if exactly else "at_least_once",
        sink_id=_sink_id(texts, streaming and exactly),
        codec=_codec(texts),
        delivery_timeout_s=(texts.whole("deliveryTimeoutMs") or 120_000) / 1000,
        transaction_timeout_s=_transaction_timeout_s(texts, exactly),
        fail_on_data_loss=_fail_on_data_loss(texts, exactly),
        token_lifetime_s=_token_lifetime_s(texts, exactly),
    )


def _topic(texts: Texts) -> str | None:
    topic = texts.get("topic")
    if topic is not None:
        checked("topic", check_topic, topic)
    return topic


def _sink_id(texts: Texts, is_allowed: bool) -> str | None:
    name = texts.get("sinkId")
    if name is None:
        return None
    if not is_allowed:
        problem = "option 'sinkId' is only for a streaming query with delivery=exactly_once"
        raise ConfigError(problem, hint="Remove it.")
    if not re.fullmatch(f"[A-Za-z0-9_-]{{1,{NAME_CHARS_MAX}}}", name) or name.startswith(JOB):
        hint = f"It has to be 1 to {NAME_CHARS_MAX} letters, digits, '-' and '_', and does not begin with {JOB!r}."
        raise ConfigError(f"option 'sinkId' is {name!r}", hint=hint)
    return name


def _transaction_timeout_s(texts: Texts, is_allowed: bool) -> float:
    if texts.get("transactionTimeoutMs") is not None and not is_allowed:
        problem = "option 'transactionTimeoutMs' is only for delivery=exactly_once"
        raise ConfigError(problem, hint="Remove it; 'deliveryTimeoutMs' limits how long a task tries.")
    timeout_s = (texts.whole("transactionTimeoutMs") or 3_600_000) / 1000
    if timeout_s > TIMEOUT_MAX_S:
        raise ConfigError(f"option 'transactionTimeoutMs' is {timeout_s:g} s", hint="Give 86400000 at most.")
    return timeout_s


def _fail_on_data_loss(texts: Texts, is_allowed: bool) -> bool:
    if texts.get("failOnDataLoss") is not None and not is_allowed:
        raise ConfigError("option 'failOnDataLoss' is only for delivery=exactly_once", hint="Remove it.")
    return texts.flag("failOnDataLoss", True)


def _token_lifetime_s(texts: Texts, is_exactly_once: bool) -> float:
    """Tasks that write exactly once change nodes in ZooKeeper, which knows certificates only."""
    if is_exactly_once and texts.present(("delegation", "tokenLifetime")):
        raise ConfigError(
            "options 'delegation' and 'tokenLifetime' are for delivery=at_least_once",
            hint="Remove them: tasks that write exactly once use the same files as the driver.",
        )
    return 0.0 if is_exactly_once else token_lifetime_s(texts, BATCH_TOKEN_S)


def _codec(texts: Texts) -> Codec:
    name = texts.choice("compression", ("none", "lz4", "zstd"), "none")
    return checked("compression", codec_named, None if name == "none" else name)


def check_sink_columns(columns: Sequence[tuple[str, str]], topic: str | None) -> None:
    """Checks columns, given (name, type) of each. Raises ConfigError with the column's name and the next step."""
    names = [name for name, _kind in columns]
    for name, kind in columns:
        allowed = TYPES.get(name)
        if allowed is None and name.lower() in TYPES:
            raise ConfigError(f"the query has a column {name!r}", hint=f"Call it {name.lower()!r}.")
        if allowed is None:  # ignored, as by Kafka's sink: rows from a source have more columns than a message
            continue
        if kind.replace(" ", "").lower() not in allowed:
            raise ConfigError(f"the column {name!r} is of type {kind}", hint=_type_hint(name, allowed))
    for name in TYPES:
        if names.count(name) > 1:
            raise ConfigError(f"the query has the column {name!r} twice", hint="Name each once.")
    if "value" not in names:
        hint = "Give the column to write this name, as with select(to_json(struct('*')).alias('value'))."
        raise ConfigError("the query has no column 'value'", hint=hint)
    if topic is None and "topic" not in names:
        raise ConfigError(
            "the rows have no topic", hint="Give the option 'topic', or a column 'topic' with one for each row."
        )


def _type_hint(name: str, allowed: tuple[str, ...]) -> str:
    if name == "partition":
        return "It has to be a string, as in '0-3': broker id and index, as everywhere in metamq."
    if len(allowed) == 1:
        return f"It has to be {allowed[0]}."
    return f"It has to be {' or '.join(allowed)}: use cast({name} as string), or to_json(…)."
