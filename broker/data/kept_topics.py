"""The topics in a data folder that ZooKeeper, restored from an older copy, does not know: they are kept.

A topic is removed from the disk once ZooKeeper does not list it. An older copy of ZooKeeper's data lacks topics, and
partitions of topics, that were made later; their acknowledged messages are in the folders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metamq.broker.data import topic_settings
from metamq.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from metamq.broker.data.data_folder import TopicFolder
    from metamq.errors import MetamqError
    from metamq.zk.cluster.topics import TopicConfig
    from metamq.zk.nodes import Listing


def kept_topics(
    broker_id: int, folders: Iterable[TopicFolder], configs: Mapping[str, TopicConfig], listing: Listing
) -> dict[str, MetamqError]:
    """Returns the topics in the folder that ZooKeeper has forgotten, with the reason: they were not deleted, but it
    does not list them, or none of their partitions here. `configs` are those of the listed topics that can be read."""
    kept: dict[str, MetamqError] = {}
    for topic, topic_id, path, _partitions in folders:
        config = configs.get(topic)
        if config is not None and config.id == topic_id:
            if not config.partitions.get(broker_id):  # a running broker never loses its partitions
                kept[topic] = _fewer(broker_id, topic, "no partitions")
            continue
        is_unlisted = config is not None or topic not in listing.names
        if is_unlisted and (error := topic_settings.why_kept(path, topic, topic_id, listing.version)) is not None:
            kept[topic] = error
    return kept


def unserved_partitions(
    broker_id: int, folders: Iterable[TopicFolder], configs: Mapping[str, TopicConfig]
) -> dict[str, MetamqError]:
    """Returns the topics that have more partitions in the folder than ZooKeeper lists here, with the reason."""
    found: dict[str, MetamqError] = {}
    for topic, topic_id, _path, partitions in folders:
        config = configs.get(topic)
        listed = config.partitions.get(broker_id, 0) if config is not None and config.id == topic_id else 0
        if listed and (beyond := [index for index in partitions if index >= listed]):
            found[topic] = _fewer(broker_id, topic, f"{listed} of the {beyond[-1] + 1} partitions")
    return found


def _fewer(broker_id: int, topic: str, listed: str) -> ConfigError:
    problem = f"ZooKeeper lists {listed} of topic {topic!r} at broker {broker_id}"
    hint = "It was restored from an older copy. `metamq topic alter` adds the partitions again, with their messages."
    return ConfigError(problem, hint=hint)
