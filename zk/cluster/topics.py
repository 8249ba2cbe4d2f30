"""Topic configuration: one persistent node per topic. Administrators write it; all other processes follow it.

The configuration says which partitions a topic has, not the present offers of brokers. Key hashes and plans use it, so
that the restart of a broker moves no key and no partition.

Every change is a compare-and-set on the node's version. Where ZooKeeper lets only brokers write, a broker does it for
clients that have the right. A topic has a new id each time it is created. Folders, fetches and committed offsets
include the id, so that data of a deleted topic never counts as its successor's.
"""

from __future__ import annotations

import difflib
import heapq
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from metamq.errors import ConfigError, CorruptData, MetamqError, NotAuthorized, TopicExists, TopicNotFound
from metamq.zk.cluster.schemas import NO_SCHEMAS, TopicSchemas, schemas_of
from metamq.zk.cluster.trims import NO_TRIMS, Trims, check_trims, check_trims_follow, trims_of
from metamq.zk.documents import broker_number, fields, read_document, shown
from metamq.zk.errors import BadVersion, ConnectionLost, NodeExists, NoNode
from metamq.zk.names import check_node, check_topic
from metamq.zk.nodes import Listing
from metamq.zk.partitions import TopicPartition, configured_partitions
from metamq.zk.session.presence import missing_cluster

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.zk")

FORMAT = 1
DAY_MS = 24 * 60 * 60 * 1000

PARTITIONS_MAX = 10_000
"""Partitions of one topic. A plan names all partitions of a group in one node, and a node holds less than 1 MiB."""

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
"""The protocol's limit, `metamq.wire.limits.MESSAGE_BYTES_MAX`; `zk` and `wire` do not import each other."""

SEGMENT_BYTES_MIN = 1024
SEGMENT_BYTES_MAX = 1 << 40

Watcher = Callable[[], None]
NEW = -1
"""The version of a node that does not exist yet."""
VERSION_MAX = 2**31 - 1
Write = Callable[[str, bytes, int], Awaitable[bool]]
"""As TopicStore.write(): topic, document, version."""


@dataclass(frozen=True, slots=True)
class FlushEvery:
    """Flushes to disk after this many messages or milliseconds, whichever comes first; None: no limit."""

    messages: int | None = None
    ms: int | None = 1000


Flush = Literal["ack"] | FlushEvery


def new_topic_id() -> str:
    """Makes an id of 16 random hexadecimal digits."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The configuration of one topic.

    `partitions`: broker id -> number of partitions there. `flush`: "ack" flushes before a write is acknowledged.
    `retention_ms`, `retention_bytes` (per partition): None keeps the data without limit. `cleanup`: the treatment of
    segments past retention. `min_insync`: replicas that must be in sync for a write to be accepted. `replication`:
    "sync" answers a write when every in-sync replica has it.
    """

    topic: str
    partitions: Mapping[int, int]
    id: str = field(default_factory=new_topic_id)
    flush: Flush = FlushEvery()
    retention_ms: int | None = 7 * DAY_MS
    retention_bytes: int | None = None
    cleanup: Literal["delete", "archive"] = "delete"
    segment_bytes: int = 256 * 1024 * 1024
    max_message_bytes: int = 1024 * 1024
    min_insync: int = 1
    replication: Literal["async", "sync"] = "async"
    schemas: TopicSchemas = NO_SCHEMAS
    trims: Trims = field(default_factory=dict)
    """The messages that were deleted by Admin.trim(), by partition."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a newer metamq in the node; an alteration keeps them unchanged."""

    @property
    def partition_names(self) -> list[str]:
        """The names of all partitions, in numeric order: 0-0, 0-1, ..., 0-10, 1-0."""
        return configured_partitions(self.partitions)

    @property
    def topic_partitions(self) -> list[TopicPartition]:
        """All partitions, in the order of `partition_names`."""
        return [TopicPartition(self.topic, name) for name in self.partition_names]

    def validate(self) -> None:
        """Raises ConfigError, with the setting and its limits, unless every setting is within them."""
        check_topic(self.topic)
        if not isinstance(self.id, str) or not re.fullmatch(r"[0-9a-f]{16}", self.id):
            raise self._wrong("id", self.id, "16 hexadecimal digits")
        self._check_partitions()
        self._check_flush()
        self._check_range("retention_ms", self.retention_ms, 1, optional=True)
        self._check_range("retention_bytes", self.retention_bytes, 1, optional=True)
        self._check_choice("cleanup", self.cleanup, ("delete", "archive"))
        self._check_range("segment_bytes", self.segment_bytes, SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
        self._check_range("max_message_bytes", self.max_message_bytes, 1, MESSAGE_BYTES_MAX)
        self._check_range("min_insync", self.min_insync, 1, 16)
        self._check_choice("replication", self.replication, ("async", "sync"))
        self.schemas.validate(self.topic)
        check_trims(self.topic, self.trims)

    def _check_partitions(self) -> None:
        for broker_id, count in self.partitions.items():
            self._check_range("partitions: broker id", broker_id, 0)
            self._check_range(f"partitions of broker {broker_id}", count, 1, PARTITIONS_MAX)
        total = sum(self.partitions.values())
        if not 1 <= total <= PARTITIONS_MAX:
            raise self._wrong("partitions", total, f"1 to {PARTITIONS_MAX:,} in all")

    def _check_flush(self) -> None:
        if isinstance(self.flush, FlushEvery):
            self._check_range("flush.messages", self.flush.messages, 1, optional=True)
            self._check_range("flush.ms", self.flush.ms, 1, optional=True)
        elif self.flush != "ack":
            raise self._wrong("flush", self.flush, '"ack" or FlushEvery(messages, ms)')

    def _check_range(
        self, name: str, value: object, low: int, high: int | None = None, *, optional: bool = False
    ) -> None:
        if value is None and optional:
            return
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
            limits = f"{low:,} or more" if high is None else f"{low:,} to {high:,}"
            raise self._wrong(name, value, f"a whole number, {limits}" + (", or None" if optional else ""))

    def _check_choice(self, name: str, value: object, choices: tuple[str, ...]) -> None:
        if value not in choices:
            raise self._wrong(name, value, " or ".join(repr(choice) for choice in choices))

    def _wrong(self, name: str, value: object, limits: str) -> ConfigError:
        return ConfigError(f"topic {self.topic!r}: {name} is {value!r}", hint=f"It has to be {limits}.")


_PLAIN_SETTINGS = (
    "id",
    "retention_ms",
    "retention_bytes",
    "cleanup",
    "segment_bytes",
    "max_message_bytes",
    "min_insync",
    "replication",
)


def to_json(config: TopicConfig) -> bytes:
    """The content of the topic's node."""
    flush = config.flush
    document: dict[str, Any] = dict(config.unknown)
    document["format"] = FORMAT
    document.update((name, getattr(config, name)) for name in _PLAIN_SETTINGS)
    document["partitions"] = {str(broker_id): config.partitions[broker_id] for broker_id in sorted(config.partitions)}
    if config.schemas != NO_SCHEMAS:
        document["schemas"] = config.schemas.to_document()
    if config.trims:
        document["trims"] = {name: [*config.trims[name]] for name in sorted(config.trims)}
    document["flush"] = {"messages": flush.messages, "ms": flush.ms} if isinstance(flush, FlushEvery) else flush
    return json.dumps(document, indent=1).encode()


def from_json(topic: str, data: bytes) -> TopicConfig:
    """Reads the content of a topic's node. Settings that this version does not know are kept in `unknown`.

    Raises CorruptData if it is not such a document; ConfigError if a setting is out of its limits, or if the document
    has a newer format, whose known settings may mean something else.
    """

    def read(document: dict[str, Any]) -> TopicConfig:
        written_format = document.pop("format")
        if written_format != FORMAT:
            raise ConfigError(
                f"the configuration of topic {topic!r} has format {shown(written_format)}, this metamq reads {FORMAT}",
                hint="Upgrade metamq here.",
            )
        settings = {name: document.pop(name) for name in _PLAIN_SETTINGS}
        partitions = {broker_number(name): count for name, count in fields(document.pop("partitions")).items()}
        flush = document.pop("flush")
        if isinstance(flush, dict):
            flush = FlushEvery(**flush)
        schemas = schemas_of(fields(document.pop("schemas"))) if "schemas" in document else NO_SCHEMAS
        trims = trims_of(document.pop("trims")) if "trims" in document else NO_TRIMS
        config = TopicConfig(topic, partitions, flush=flush, schemas=schemas, trims=trims, unknown=document, **settings)
        config.validate()
        return config

    hint = f"`metamq topic delete {topic}` removes the topic."
    return read_document(f"the configuration of topic {topic!r} in ZooKeeper", data, read, hint=hint)


def spread_partitions(
    count: int, broker_ids: Iterable[int], present: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Spreads `count` partitions in total over brokers, as evenly as possible without removing any of `present`.

    Ties go to the lower broker id. Raises ConfigError if there is no broker, or if `count` is below the present number.
    """
    spread = dict(present or {})
    missing = count - sum(spread.values())
    load = [(spread.get(broker_id, 0), broker_id) for broker_id in set(broker_ids)]
    if not load:
        raise ConfigError("there is no broker to put partitions on", hint="Start one with `metamq broker`.")
    if missing < 0:
        raise ConfigError(
            f"the number of partitions is {count - missing}, and cannot be reduced to {count}",
            hint="Make a new topic with fewer partitions.",
        )
    heapq.heapify(load)
    for _ in range(missing):
        held, broker_id = load[0]
        spread[broker_id] = held + 1
        heapq.heapreplace(load, (held + 1, broker_id))
    return dict(sorted(spread.items()))


def check_alteration(before: TopicConfig, after: TopicConfig) -> None:
    """Raises ConfigError unless `after` may follow `before`: valid, the same topic, no partition fewer."""
    after.validate()
    if (after.topic, after.id) != (before.topic, before.id):
        raise ConfigError(f"topic {before.topic!r} keeps its name and its id {before.id}", hint="Make a new topic.")
    before.schemas.check_successor(before.topic, after.schemas)
    check_trims_follow(before.topic, before.trims, after.trims)
    for broker_id, count in before.partitions.items():
        if after.partitions.get(broker_id, 0) < count:
            raise ConfigError(
                f"the number of partitions of topic {before.topic!r} on broker {broker_id} is {count}, and cannot be "
                f"reduced to {after.partitions.get(broker_id, 0)}",
                hint="Partitions can only be added; make a new topic with fewer.",
            )


class TopicStore:
    """Reads and changes topic configurations. All methods raise ConnectionLost if ZooKeeper is not available.

    They also raise it if another ZooKeeper has replaced the first one: the absence of a topic counts only in the
    cluster in which topics were found before.
    """

    def __init__(self, session: Session, ask: Write | None = None) -> None:
        """`ask` makes a change for a client that may not write to ZooKeeper."""
        self._session = session
        self._ask = ask
        self._cluster = b""

    async def create(self, config: TopicConfig) -> TopicConfig:
        """Creates a topic. Raises ConfigError for a wrong setting, TopicExists.

        After ConnectionLost the topic may exist: repeat the call.
        """
        config.validate()
        while not await self.write(config.topic, to_json(config), NEW):
            there = await self.get_or_none(config.topic)
            if there is not None and there.id == config.id:  # an answer was lost
                break
            if there is not None:
                raise TopicExists(config.topic)
        return config

    async def write(self, topic: str, document: bytes, version: int) -> bool:
        """Replaces the content of a topic's node that has this version: NEW creates it, an empty document deletes it.

        Returns False if the node has another version. Raises NotAuthorized, and with `ask` its errors.
        """
        path = self._path(topic)
        try:
            if version == NEW:
                await self._session.create(path, document, makepath=True)
            elif document:
                await self._session.set(path, document, version)
            else:
                await self._session.delete(path, version)
        except (NodeExists, BadVersion, NoNode):
            return False
        except NotAuthorized:
            if self._ask is None:
                raise
            return await self._ask(topic, document, version)
        return True

    async def write_for_client(self, topic: str, document: bytes, version: int) -> bool:
        """Does write() with a client's document. Raises also ConfigError for a wrong one, CorruptData."""
        check_topic(topic)
        if not NEW <= version <= VERSION_MAX or (not document and version == NEW):
            raise ConfigError(
                f"a request to change topic {topic!r} has the version {version}", hint="Upgrade the client."
            )
        if not document:
            return await self.write(topic, document, version)
        after = from_json(topic, document)
        unknown: Mapping[str, Any] = {}
        if version != NEW:
            node = await self._session.get_or_none(self._path(topic))
            if node is None or node.version != version:
                return False
            before = from_json(topic, node.data)
            check_alteration(before, after)
            unknown = before.unknown
        if after.unknown != unknown:
            names = ", ".join(sorted({*after.unknown, *unknown})[:5])
            raise ConfigError(
                f"this broker does not know the settings {names[:200]}", hint="Upgrade the brokers first."
            )
        return await self.write(topic, to_json(after), version)

    async def get(self, topic: str, watch: Watcher | None = None) -> TopicConfig:
        """The topic's configuration; `watch` is called once if it changes or disappears. Raises TopicNotFound."""
        config = await self.get_or_none(topic, watch)
        if config is None:
            raise await self._not_found(topic)
        return config

    async def get_or_none(self, topic: str, watch: Watcher | None = None) -> TopicConfig | None:
        """Returns the result of `get`, or None if the topic does not exist; `watch` is then called when it exists."""
        check_node("topic", topic)
        node = await self._session.get_or_none(self._path(topic), watch=watch)
        if node is None or not self._cluster:
            await self._check_cluster(is_found=node is not None)
        return None if node is None else from_json(topic, node.data)

    async def get_all(self, topics: Collection[str]) -> dict[str, TopicConfig | MetamqError | None]:
        """Returns the result of `get_or_none` for each topic, or its ConfigError or CorruptData, with few requests."""
        found = {topic: _outcome(check_node, "topic", topic) for topic in topics}
        valid = [topic for topic, problem in found.items() if not isinstance(problem, MetamqError)]
        nodes = await self._session.nodes([self._path(topic) for topic in valid])
        if None in nodes or not self._cluster:
            await self._check_cluster(is_found=None not in nodes and bool(nodes))
        read = {
            topic: None if node is None else _outcome(from_json, topic, node.data)
            for topic, node in zip(valid, nodes, strict=True)
        }
        return {topic: read.get(topic, problem) for topic, problem in found.items()}

    async def _check_cluster(self, *, is_found: bool) -> None:
        """Remembers the cluster that has a topic; raises ConnectionLost if there is now another one, or none."""
        node = await self._session.get_or_none(self._session.paths.cluster())
        present = b"" if node is None else node.data
        if is_found:
            self._cluster = present
        elif self._cluster not in (b"", present):
            known, found = (data.decode(errors="replace") for data in (self._cluster, present))
            there = f"cluster {found}" if found else "no cluster"
            reason = f"another ZooKeeper answers there: it has {there}, but this client's is {known}"
            raise ConnectionLost(self._session.servers, reason, outcome="not_done")

    async def names(self, watch: Watcher | None = None) -> list[str]:
        """The names of all topics, sorted; `watch` is called once if a topic is created or deleted."""
        return (await self.listing(watch)).names

    async def listing(self, watch: Watcher | None = None) -> Listing:
        """The result of `names`, with the version of the list."""
        found = await self._session.listing_or_none(self._session.paths.topic_configs(), watch)
        names, version = found or Listing([], 0)
        if not names:
            await self._check_cluster(is_found=False)
        return Listing(sorted(names), version)

    async def alter(self, topic: str, change: Callable[[TopicConfig], TopicConfig]) -> TopicConfig:
        """Replaces the configuration by `change` of it. If another client changes it first, `change` is called again.

        Raises TopicNotFound, ConfigError (a wrong setting, fewer partitions). After ConnectionLost it may be done;
        repeating it is harmless as long as `change` depends only on its argument.
        """
        check_topic(topic)
        path = self._path(topic)
        while True:
            node = await self._session.get_or_none(path)
            if node is None:
                raise await self._not_found(topic)
            before = from_json(topic, node.data)
            after = replace(change(before), unknown=before.unknown)
            check_alteration(before, after)
            if await self.write(topic, to_json(after), node.version):
                return after

    async def delete(self, topic: str) -> TopicConfig | None:
        """Deletes the topic; brokers remove its data. Returns the deleted configuration, None if it cannot be read.

        Raises TopicNotFound.
        """
        check_node("topic", topic)
        path = self._path(topic)
        while True:
            node = await self._session.get_or_none(path)
            if node is None:
                raise await self._not_found(topic)
            try:
                config = from_json(topic, node.data)
            except (ConfigError, CorruptData) as error:
                log.info("deleting a topic with an unusable configuration: %s", error)
                config = None
            if await self.write(topic, b"", node.version):
                return config

    async def _not_found(self, topic: str) -> TopicNotFound:
        try:
            names = await self.names()
            missing = await missing_cluster(self._session) if not names else None
        except ConnectionLost:
            names, missing = [], None
        if missing is not None:
            return TopicNotFound(topic, hint=f"{missing.problem[0].upper()}{missing.problem[1:]}. {missing.hint}")
        near = difflib.get_close_matches(topic, names)
        return TopicNotFound(topic, hint=f"Did you mean {' or '.join(map(repr, near))}?" if near else None)

    def _path(self, topic: str) -> str:
        return self._session.paths.topic_config(topic)


def _outcome(work: Callable[..., Any], *given: Any) -> Any:
    """Returns the result, or the error of metamq."""
    try:
        return work(*given)
    except MetamqError as error:
        return error
