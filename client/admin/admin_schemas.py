"""The administration of the schemas of typed topics; they are kept in the topic's configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from metamq.client.checks import wrong_type
from metamq.client.net.first_contact import until_connected
from metamq.client.schemas.compatibility import check_compatible, without_layout
from metamq.client.schemas.topic import Topic
from metamq.zk.cluster.schemas import Schema
from metamq.zk.errors import ConnectionLost

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.zk.cluster.schemas import Compatibility, TopicSchemas
    from metamq.zk.cluster.topics import TopicConfig


async def register_schema(
    cluster: ClusterClient, topic: str | Topic[Any], schema: Schema | None, compatibility: Compatibility | None
) -> int:
    """Adds a schema as the topic's next version. See Admin.register_schema."""
    name, new = _named_schema(topic, schema)

    def change(before: TopicConfig) -> TopicConfig:
        schemas = before.schemas if compatibility is None else replace(before.schemas, compatibility=compatibility)
        schemas.validate(name)
        if new not in schemas.versions:
            check_compatible(name, schemas, new)
            schemas = replace(schemas, versions=(*schemas.versions, new))
        return replace(before, schemas=schemas)

    while True:
        try:
            config = await cluster.topics.alter(name, change)
            break
        except ConnectionLost:  # perhaps it is registered: then the repetition finds it
            await until_connected(cluster.session)
    if isinstance(topic, Topic):
        topic.learn(config.schemas.by_version)
    return config.schemas.versions.index(new) + 1


async def check_schema(cluster: ClusterClient, topic: str | Topic[Any], schema: Schema | None) -> None:
    """Checks a schema, and changes nothing. See Admin.check_schema."""
    name, new = _named_schema(topic, schema)
    config = await cluster.topics.get(name)
    if new not in config.schemas.versions:
        check_compatible(name, config.schemas, new)


async def load_schemas(cluster: ClusterClient, topic: str | Topic[Any]) -> TopicSchemas:
    """Returns the topic's schemas. See Admin.load_schemas."""
    schemas = (await cluster.topics.get(topic if isinstance(topic, str) else topic.name)).schemas
    if isinstance(topic, Topic):
        topic.learn(schemas.by_version)
    return schemas


def _named_schema(topic: str | Topic[Any], schema: Schema | None) -> tuple[str, Schema]:
    if isinstance(topic, Topic):
        return topic.name, without_layout(topic.name, topic.schema if schema is None else schema)
    if not isinstance(schema, Schema):
        raise wrong_type("`schema`", "a Schema, if `topic` is a name", schema)
    return topic, without_layout(topic, schema)
