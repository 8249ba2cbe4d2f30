"""A topic's settings in its folder: stored with the data, they survive the loss of ZooKeeper.

    topics/<topic>@<id>/settings.json     the content of the topic's node in ZooKeeper, the time since when this replica
                                          knows it, and the version of a list of topics that has the topic

ZooKeeper is the only source of settings while it exists. `metamq cluster restore` reads them here when ZooKeeper is
lost. A broker reads only the version: it rises with each topic that is created or deleted. So if a list with the
same version, or a lower one, lacks the topic, the topic was not deleted: ZooKeeper was restored from an older copy. The
topic's folder then stays, even if the list reaches higher versions later: `KEPT` is above all versions. Without the
file, or with a damaged one, nothing of this is known. The broker continues if it cannot write the file.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from metamq.errors import ConfigError, MetamqError
from metamq.private_files import opener
from metamq.zk.cluster.topics import TopicConfig, from_json, to_json

log = logging.getLogger("metamq.broker")

FILE_NAME = "settings.json"
KEPT = 1 << 62
_RESTORE = (
    "If ZooKeeper was restored from a copy, export it, and run `metamq cluster restore` on an empty one. "
    "If the topic was deleted, stop the broker, and remove the folder"
)


class KnownSettings(NamedTuple):
    """A topic's settings, and when the replica first knew them, in milliseconds since 1970 by its own clock."""

    config: TopicConfig
    since_ms: int
    listed: int = 0
    """The version of a list of topics with this one; KEPT if an older list lacked it; 0 if none is known."""


def load(folder: Path, topic: str) -> KnownSettings | None:
    """The settings in a topic's folder; None if there are no usable ones."""
    try:
        document = json.loads((folder / FILE_NAME).read_bytes())
        config = from_json(topic, document["topic"].encode())
        return KnownSettings(config, int(document["since_ms"]), int(document.get("listed", 0)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, MetamqError) as error:
        if not isinstance(error, FileNotFoundError):
            log.debug("%s: %s", folder / FILE_NAME, error)
        return None


def save(folder: Path, config: TopicConfig, listed: int = 0) -> None:
    """Writes the settings, durably, if they have changed, or if `listed` is below the known version or the first known
    one. Any thread, but one at a time per topic."""
    known = load(folder, config.topic)
    if known is not None and known.listed and (known.listed <= listed or not listed):
        listed = known.listed
    if known is not None and known.config == config:
        if known.listed != listed:
            _write(folder, known._replace(listed=listed))
        return
    _write(folder, KnownSettings(config, time.time_ns() // 1_000_000, listed))


def why_kept(folder: Path, topic: str, topic_id: str, listed: int) -> ConfigError | None:
    """Returns the error of a topic that a list of this version lacks although it was not deleted. None if it was
    deleted, or if nothing is known."""
    known = load(folder, topic)
    if known is None or not known.listed or listed > known.listed:
        return None
    if known.listed != KEPT:
        _write(folder, known._replace(listed=KEPT))
    problem = f"ZooKeeper does not list topic {topic!r} with id {topic_id}, which it listed before"
    return ConfigError(problem, hint=f"{_RESTORE}: {folder}.")


def _write(folder: Path, known: KnownSettings) -> None:
    document = {"since_ms": known.since_ms, "topic": to_json(known.config).decode(), "listed": known.listed}
    temporary = folder / f"{FILE_NAME}.tmp"
    try:
        with open(temporary, "w", opener=opener) as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / FILE_NAME)
    except OSError as error:
        log.warning("%s was not written; only a restore of ZooKeeper would need it: %s", folder / FILE_NAME, error)
