"""Topic configuration: limits, the node's format, changes by compare-and-set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.errors import ConfigError, CorruptData, TopicExists, TopicNotFound
from metamq.wire import limits
from metamq.zk.cluster import topics
from metamq.zk.cluster.topics import FlushEvery, TopicConfig, TopicStore, from_json, spread_partitions, to_json
from metamq.zk.session.session import Session

Until = Callable[..., Awaitable[None]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topic": "a/b"}, r"topic 'a/b' has '/'"),
        ({"partitions": {}}, r"partitions is 0.*1 to 10,000 in all"),
        ({"partitions": {0: 0}}, r"partitions of broker 0 is 0.*1 to 10,000"),
        ({"partitions": {0: 9_000, 1: 9_000}}, r"partitions is 18000.*1 to 10,000"),
        ({"partitions": {-1: 1}}, r"broker id is -1"),
        ({"partitions": {0: True}}, r"partitions of broker 0 is True"),
        ({"id": "new"}, r"id is 'new'.*16 hexadecimal digits"),
        ({"flush": "never"}, r"flush is 'never'.*\"ack\""),
        ({"flush": FlushEvery(messages=0)}, r"flush.messages is 0"),
        ({"retention_ms": 0}, r"retention_ms is 0.*or None"),
        ({"retention_bytes": -5}, r"retention_bytes is -5"),
        ({"cleanup": "compact"}, r"cleanup is 'compact'.*'delete' or 'archive'"),
        ({"segment_bytes": 10}, r"segment_bytes is 10.*1,024 to"),
        ({"max_message_bytes": 5_000_000}, r"max_message_bytes is 5000000.*1 to 4,194,304"),
        ({"min_insync": 0}, r"min_insync is 0"),
        ({"replication": "quorum"}, r"replication is 'quorum'"),
    ],
)
def test_a_setting_out_of_its_limits_is_named_with_them(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TopicConfig("flights", {0: 4}), **changes).validate()


def test_the_message_limit_is_the_protocols() -> None:
    assert topics.MESSAGE_BYTES_MAX == limits.MESSAGE_BYTES_MAX


def test_partition_names_are_in_numeric_order() -> None:
    names = TopicConfig("flights", {10: 1, 2: 11}).partition_names
    assert names == [*(f"2-{index}" for index in range(11)), "10-0"]


def test_every_topic_has_an_id_of_its_own() -> None:
    assert TopicConfig("flights", {0: 1}).id != TopicConfig("flights", {0: 1}).id


@pytest.mark.parametrize("flush", ["ack", FlushEvery(1000, 50), FlushEvery(None, None)])
def test_the_node_holds_the_whole_configuration(flush: topics.Flush) -> None:
    config = TopicConfig(
        "flights",
        {0: 2, 11: 3},
        flush=flush,
        retention_ms=None,
        retention_bytes=10**9,
        cleanup="archive",
        segment_bytes=4096,
        max_message_bytes=100,
        min_insync=2,
        replication="sync",
    )
    assert from_json("flights", to_json(config)) == config


def test_settings_of_a_newer_version_are_kept() -> None:
    document = json.loads(to_json(TopicConfig("flights", {0: 1})))
    config = from_json("flights", json.dumps(document | {"quota": 5}).encode())
    assert config.unknown == {"quota": 5}
    assert json.loads(to_json(replace(config, min_insync=2)))["quota"] == 5


def test_a_newer_format_is_refused() -> None:
    document = json.loads(to_json(TopicConfig("flights", {0: 1})))
    with pytest.raises(ConfigError, match="has format 2, this metamq reads 1"):
        from_json("flights", json.dumps(document | {"format": 2}).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": 1}', b"\xff"])
def test_a_node_with_anything_else_is_damaged(data: bytes) -> None:
    with pytest.raises(CorruptData, match="configuration of topic 'flights'"):
        from_json("flights", data)


@given(
    st.integers(1, 200),
    st.sets(st.integers(0, 20), min_size=1, max_size=8),
    st.dictionaries(st.integers(0, 20), st.integers(1, 20), max_size=5),
)
def test_partitions_spread_evenly_and_none_is_taken_away(
    missing: int, broker_ids: set[int], present: dict[int, int]
) -> None:
    count = sum(present.values()) + missing
    spread = spread_partitions(count, broker_ids, present)
    assert sum(spread.values()) == count
    assert all(spread[broker_id] >= held for broker_id, held in present.items())
    # Only who has as few as any other broker got more.
    grown = [spread[b] for b in broker_ids if spread.get(b, 0) > present.get(b, 0)]
    assert max(grown) - min(spread.get(b, 0) for b in broker_ids) <= 1


def test_a_spread_needs_brokers_and_never_reduces() -> None:
    assert spread_partitions(5, [2, 0, 1]) == {0: 2, 1: 2, 2: 1}
    with pytest.raises(ConfigError, match="no broker"):
        spread_partitions(3, [])
    with pytest.raises(ConfigError, match="number of partitions is 4, and cannot be reduced to 3"):
        spread_partitions(3, [0], {0: 4})


def test_create_get_and_delete(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            store = TopicStore(session)
            assert await store.names() == []
            created = await store.create(TopicConfig("flights", {0: 4}))
            assert await store.get("flights") == created
            with pytest.raises(TopicExists):
                await store.create(TopicConfig("flights", {0: 4}))
            assert await store.names() == ["flights"]
            with pytest.raises(TopicNotFound, match="Did you mean 'flights'"):
                await store.get("flihgts")
            assert await store.delete("flights") == created
            with pytest.raises(TopicNotFound, match=r"There is no broker below /meta .* see `metamq cluster restore`"):
                await store.get("flights")
            await session.ensure(session.paths.broker_ids())
            with pytest.raises(TopicNotFound, match="metamq topic create flights"):
                await store.delete("flights")
            assert (await store.create(TopicConfig("flights", {0: 4}))).id != created.id

    asyncio.run(scenario())


def test_concurrent_alterations_are_all_there(servers: str) -> None:
    def one_more(config: TopicConfig) -> TopicConfig:
        return replace(config, partitions={0: config.partitions[0] + 1})

    async def scenario() -> None:
        async with await Session.open(servers) as session:
            store = TopicStore(session)
            await store.create(TopicConfig("flights", {0: 1}))
            await asyncio.gather(*(store.alter("flights", one_more) for _ in range(5)))
            assert (await store.get("flights")).partitions == {0: 6}

    asyncio.run(scenario())


def test_an_alteration_never_takes_partitions_or_the_id_away(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            store = TopicStore(session)
            created = await store.create(TopicConfig("flights", {0: 4, 1: 1}))
            with pytest.raises(ConfigError, match="on broker 0 is 4, and cannot be reduced to 3"):
                await store.alter("flights", lambda config: replace(config, partitions={0: 3, 1: 1}))
            with pytest.raises(ConfigError, match="on broker 1 is 1, and cannot be reduced to 0"):
                await store.alter("flights", lambda config: replace(config, partitions={0: 9}))
            with pytest.raises(ConfigError, match="keeps its name and its id"):
                await store.alter("flights", lambda config: replace(config, id="0" * 16))
            with pytest.raises(TopicNotFound):
                await store.alter("other", lambda config: config)
            assert await store.get("flights") == created

    asyncio.run(scenario())


def test_what_a_broker_writes_for_a_client_is_checked(servers: str) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            store = TopicStore(session)
            config = TopicConfig("flights", {0: 4})
            document, more = to_json(config), to_json(replace(config, partitions={0: 5}))
            assert await store.write_for_client("flights", document, topics.NEW)
            assert not await store.write_for_client("flights", document, topics.NEW), "it is there"
            assert not await store.write_for_client("flights", more, 7), "another version"
            with pytest.raises(ConfigError, match="cannot be reduced to 3"):
                await store.write_for_client("flights", to_json(replace(config, partitions={0: 3})), 0)
            with pytest.raises(ConfigError, match="keeps its name and its id"):
                await store.write_for_client("flights", to_json(TopicConfig("flights", {0: 4})), 0)
            with pytest.raises(CorruptData):
                await store.write_for_client("flights", b"{}", 0)
            with pytest.raises(ConfigError, match="has '/'"):
                await store.write_for_client("../flights", document, topics.NEW)
            for wrong in (topics.NEW, -2, 2**31, 2**40):
                with pytest.raises(ConfigError, match="has the version"):
                    await store.write_for_client("flights", b"", wrong)
            strange = json.dumps({**json.loads(more), "tiering": 1}).encode()
            for version in (topics.NEW, 0):
                with pytest.raises(ConfigError, match="does not know the settings tiering"):
                    await store.write_for_client("flights", strange, version)
            assert await store.write_for_client("flights", more, 0)
            assert (await store.get("flights")).partitions == {0: 5}
            assert not await store.write_for_client("flights", b"", 0)
            assert await store.write_for_client("flights", b"", 1)
            assert await store.names() == []

    asyncio.run(scenario())


def test_watches_tell_of_new_changed_and_deleted_topics(servers: str, until: Until) -> None:
    async def scenario() -> None:
        async with await Session.open(servers) as session:
            store = TopicStore(session)
            seen: list[str] = []
            assert await store.names(lambda: seen.append("names")) == []
            assert await store.get_or_none("flights", lambda: seen.append("created")) is None
            await store.create(TopicConfig("flights", {0: 1}))
            await until(lambda: sorted(seen) == ["created", "names"])
            await store.get("flights", lambda: seen.append("altered"))
            await store.alter("flights", lambda config: replace(config, min_insync=2))
            await until(lambda: seen[-1] == "altered")
            await store.get("flights", lambda: seen.append("deleted"))
            await store.delete("flights")
            await until(lambda: seen[-1] == "deleted")

    asyncio.run(scenario())


def test_many_topics_are_read_at_once_each_with_its_own_problem(servers: str) -> None:
    async def main() -> None:
        async with await Session.open(servers) as session:
            store = TopicStore(session)
            made = [await store.create(TopicConfig(f"t{number}", {0: 1})) for number in range(3)]
            await session.create(session.paths.topic_config("broken"), b"{")
            found = await store.get_all(["t2", "t0", "broken", "missing", "a/b", "t1"])
            assert list(found) == ["t2", "t0", "broken", "missing", "a/b", "t1"]
            assert [found["t0"], found["t1"], found["t2"], found["missing"]] == [*made, None]
            assert (type(found["broken"]), type(found["a/b"])) == (CorruptData, ConfigError)
            assert await store.get_all([]) == {}

    asyncio.run(main())
