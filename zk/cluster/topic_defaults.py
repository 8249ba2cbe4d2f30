"""The settings of new topics whose creator does not give them: one persistent node for the whole cluster.

A change of the defaults replaces all of them, and changes no existing topic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError
from metamq.zk.cluster.topics import FlushEvery, TopicConfig
from metamq.zk.documents import read_document
from metamq.zk.errors import NodeExists, NoNode
from metamq.zk.nodes import ANY_VERSION

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

SETTINGS = (
    "flush", "retention_ms", "retention_bytes", "cleanup", "segment_bytes", "max_message_bytes", "min_insync",
    "replication",
)  # fmt: skip
"""The settings of a TopicConfig that may have a default."""


async def read_defaults(session: Session) -> dict[str, Any]:
    """The defaults by the name of the setting. Raises CorruptData, ConfigError, ConnectionLost."""
    path = session.paths.topic_defaults()
    node = await session.get_or_none(path)
    if node is None:
        return {}
    what, hint = f"the defaults of new topics in ZooKeeper ({path})", "Remove them: `metamq topic defaults --reset`."
    try:
        return read_document(what, node.data, _read, hint=hint)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error.problem}", hint=hint) from None


async def write_defaults(session: Session, settings: Mapping[str, Any]) -> None:
    """Stores the defaults in place of all former ones. Raises ConfigError for a wrong setting, ConnectionLost."""
    _check(settings)
    flush = settings.get("flush")
    document = {**settings, "flush": asdict(flush)} if isinstance(flush, FlushEvery) else settings
    data, path = json.dumps(document).encode(), session.paths.topic_defaults()
    while True:
        try:
            await session.set(path, data, ANY_VERSION)
            return
        except NoNode:
            pass
        try:
            await session.create(path, data, makepath=True)
            return
        except NodeExists:
            pass


def _read(document: dict[str, Any]) -> dict[str, Any]:
    if isinstance(document.get("flush"), dict):
        document["flush"] = FlushEvery(**document["flush"])
    _check(document)
    return document


def _check(settings: Mapping[str, Any]) -> None:
    if unknown := sorted(settings.keys() - set(SETTINGS)):
        raise ConfigError(f"{unknown[0]!r} is no setting of topics", hint=f"They are {', '.join(SETTINGS)}.")
    TopicConfig("defaults", {0: 1}, **settings).validate()
