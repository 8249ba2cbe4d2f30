"""A topic's settings in its folder: stored with the data, so that they survive the loss of ZooKeeper.

    topics/<topic>@<id>/settings.json     the content of the topic's node in ZooKeeper, and the time since when this
                                          replica knows it

ZooKeeper is the only source while it exists, and brokers never read this file. `metamq cluster restore` reads it when
ZooKeeper is lost. So a missing, old or damaged file does no harm, and the broker continues if it cannot write the file.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from metamq.errors import MetamqError
from metamq.private_files import opener
from metamq.zk.cluster.topics import TopicConfig, from_json, to_json

log = logging.getLogger("metamq.broker")

FILE_NAME = "settings.json"


class KnownSettings(NamedTuple):
    """A topic's settings, and when the replica first knew them, in milliseconds since 1970 by its own clock."""

    config: TopicConfig
    since_ms: int


def load(folder: Path, topic: str) -> KnownSettings | None:
    """The settings in a topic's folder; None if there are no usable ones."""
    try:
        document = json.loads((folder / FILE_NAME).read_bytes())
        return KnownSettings(from_json(topic, document["topic"].encode()), int(document["since_ms"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, MetamqError) as error:
        if not isinstance(error, FileNotFoundError):
            log.debug("%s: %s", folder / FILE_NAME, error)
        return None


def save(folder: Path, config: TopicConfig) -> None:
    """Writes the settings, durably, if they have changed. Any thread, but one at a time per topic."""
    known = load(folder, config.topic)
    if known is not None and known.config == config:
        return
    temporary = folder / f"{FILE_NAME}.tmp"
    try:
        with open(temporary, "w", opener=opener) as file:
            json.dump({"since_ms": time.time_ns() // 1_000_000, "topic": to_json(config).decode()}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / FILE_NAME)
    except OSError as error:
        log.warning("%s was not written; only a restore of ZooKeeper would need it: %s", folder / FILE_NAME, error)
