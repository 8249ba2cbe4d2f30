"""`metamq topic`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from metamq.testing import Cluster
from metamq.zk.session.session import Session

Metamq = Callable[..., Any]


def test_create_describe_alter_delete(metamq: Metamq) -> None:
    created = metamq(
        "topic", "create", "orders", "-p", 2, "--flush", "100/1s", "--retention", "12h", "--retention-bytes", "1GiB",
        "--cleanup", "archive", "--segment-bytes", "64MiB", "--max-message-bytes", "2MiB", "--broker", 0,
    )  # fmt: skip
    assert (created.status, created.data) == (0, b"")
    assert created.talk == "Topic orders has 2 partitions (2 on broker 0).\n"
    (found,) = metamq("topic", "describe", "orders", "-o", "json").json
    assert [partition["partition"] for partition in found["partitions"]] == ["0-0", "0-1"]
    assert all(partition["live"] for partition in found["partitions"])
    config = found["config"]
    assert config.pop("id")
    assert config == {
        "topic": "orders",
        "partitions": {"0": 2},
        "flush": {"messages": 100, "ms": 1000},
        "retention_ms": 43_200_000,
        "retention_bytes": 1 << 30,
        "cleanup": "archive",
        "segment_bytes": 64 << 20,
        "max_message_bytes": 2 << 20,
        "min_insync": 1,
        "replication": "async",
    }
    assert "orders" in [one["topic"] for one in metamq("topic", "list", "-o", "json").json]
    assert metamq("topic", "alter", "orders", "--retention", "forever", "--flush", "ack", "-p", 3).status == 0
    described = metamq("topic", "describe", "orders").text
    assert described.startswith("orders: 3 partitions, 0 messages, id ")
    assert "\nflush ack, retention 1GiB, cleanup archive, replication async, min in sync 1\n" in described
    assert "\nsegments of 64MiB, messages up to 2MiB\n" in described
    assert metamq("topic", "create", "orders").status == 1
    assert metamq("topic", "delete", "orders", "--yes").status == 0
    assert "orders" not in metamq("topic", "list").text


def test_defaults_of_the_cluster(metamq: Metamq) -> None:
    assert metamq("topic", "defaults").text.startswith("The cluster has no defaults of its own")
    try:
        changed = metamq("topic", "defaults", "--replication", "sync", "--flush", "100/1s")
        assert changed.text.startswith("New topics have flush 100/1s, replication sync, unless")
        more = metamq("topic", "defaults", "--retention", "1d", "--retention-bytes", "unlimited").text
        assert more.startswith(
            "New topics have flush 100/1s, replication sync, retention_bytes unlimited, retention_ms 1d, unless"
        )
        assert metamq("topic", "create", "by-default", "-p", 1).status == 0
        (found,) = metamq("topic", "describe", "by-default", "-o", "json").json
        assert (found["config"]["replication"], found["config"]["flush"]) == ("sync", {"messages": 100, "ms": 1000})
        refused = metamq("topic", "defaults", "--min-insync", 17)
        assert (refused.status, "min_insync is 17" in refused.talk) == (1, True)
        assert metamq("topic", "defaults", "--reset", "--min-insync", 1).status == 2
    finally:
        assert metamq("topic", "defaults", "--reset", "-o", "json").json == {}


def test_a_setting_that_is_refused_is_named_as_it_was_given(metamq: Metamq, topic: str) -> None:
    for option, text in (("--segment-bytes", "1k"), ("--max-message-bytes", "1GiB"), ("--retention", "0s")):
        for name, command in (("never-made", "create"), (topic, "alter")):
            ended = metamq("topic", command, name, option, text, *(["--yes"] if command == "alter" else []))
            assert ended.status == 1
            assert f"metamq: topic {name!r}: {option} is {text}\n  It has to be " in ended.talk
    assert "never-made" not in metamq("topic", "list").text


def test_more_replicas_in_sync_than_there_are_are_warned_of(metamq: Metamq, topic: str) -> None:
    created = metamq("topic", "create", "safe", "--broker", 0, "--min-insync", 3)
    assert created.status == 0
    warning = "Broker 0 has 1 replica, and --min-insync is {}: until {} are in sync, it refuses writes to {}.\n"
    assert created.talk == warning.format(3, 3, "safe") + "Topic safe has 4 partitions (4 on broker 0).\n"
    altered = metamq("topic", "alter", topic, "--min-insync", 2)
    assert altered.status == 0
    assert warning.format(2, 2, topic) in altered.talk
    assert "refuses" not in metamq("topic", "alter", topic, "--min-insync", 1).talk
    assert metamq("topic", "delete", "safe", "--yes").status == 0


def test_changes_as_json(metamq: Metamq) -> None:
    created = metamq("topic", "create", "parcels", "-p", 2, "-o", "json")
    assert (created.status, created.talk) == (0, "")
    (listed,) = [one for one in metamq("topic", "list", "-o", "json").json if one["topic"] == "parcels"]
    assert created.json == listed
    altered = metamq("topic", "alter", "parcels", "--retention", "30d", "-o", "json")
    assert (altered.talk, altered.json) == ("", {**listed, "retention_ms": 30 * 86_400_000})
    deleted = metamq("topic", "delete", "parcels", "--yes", "-o", "json")
    assert deleted.json == [altered.json]


def test_a_table_lines_up(metamq: Metamq, topic: str) -> None:
    lines = metamq("topic", "list").text.splitlines()
    assert lines[0].split() == ["TOPIC", "PARTITIONS", "BROKERS", "FLUSH", "RETENTION", "CLEANUP"]
    mine = next(line for line in lines if line.startswith(f"{topic} "))
    column = lines[0].index("BROKERS")
    assert mine[column] == "0"
    assert not any(line.endswith(" ") for line in lines)


def test_what_loses_messages_is_shown_first_and_wants_yes(
    metamq: Metamq, topic: str, until: Callable[..., None]
) -> None:
    metamq("produce", topic, "a", "b")
    metamq("consume", topic, "-g", "readers", "-e")
    shown = metamq("topic", "delete", topic)
    assert (shown.status, shown.data) == (1, b"")
    assert shown.talk.splitlines() == [
        f"Delete topic {topic}: 1 partition, 2 messages.",
        "  Group readers reads it.",
        "Nothing was done. Give --yes to do it.",
    ]
    before = metamq("delayed", "-o", "json").json[0]["waiting"]  # other tests have some, too
    metamq("produce", topic, "--delay", "1d", "later")
    until(lambda: metamq("delayed", "-o", "json").json[0]["waiting"] == before + 1)
    plan = metamq("topic", "delete", topic).talk.splitlines()
    waiting = (
        "1 delayed message of all topics waits" if before == 0 else f"{before + 1} delayed messages of all topics wait"
    )
    assert plan[2] == f"  Delayed messages for it are dropped when they are due. {waiting} now."
    shown = metamq("topic", "alter", topic, "--retention", "1h")
    assert shown.status == 1
    assert f"Topic {topic}: retention_ms from 7d to 1h, messages past it will be removed." in shown.talk
    found = metamq("topic", "describe", topic, "-o", "json").json[0]
    assert (found["messages"], found["config"]["retention_ms"]) == (2, 7 * 86_400_000)
    assert metamq("topic", "alter", topic, "--retention", "30d").status == 0


@pytest.mark.slow
def test_what_nobody_can_read_is_listed_and_deleted(metamq: Metamq, running: Cluster) -> None:
    async def spoil() -> None:
        async with await Session.open(running.zookeeper) as session:
            await session.create(session.paths.topic_config(".dot"), b"junk", makepath=True)
            await session.create(session.paths.members(".dots"), b"", makepath=True)

    asyncio.run(spoil())
    assert metamq("topic", "list").status == 0
    assert ".dots" in metamq("group", "list").text
    assert metamq("group", "describe", ".dots").text.startswith(".dots: 0 members")
    assert metamq("group", "delete", ".dots", "--yes").status == 0
    shown = metamq("topic", "delete", ".dot")
    assert (shown.status, shown.data) == (1, b"")
    assert shown.talk.startswith("Delete topic .dot: the configuration of topic '.dot' in ZooKeeper is damaged: JSON")
    assert metamq("topic", "delete", ".dot", "--yes", "-o", "json").json == [None]
    assert metamq("topic", "delete", ".dot", "--yes").talk.startswith("metamq: topic '.dot' does not exist\n")


def test_an_existing_topic_may_stay(metamq: Metamq, topic: str) -> None:
    stays = metamq("topic", "create", topic, "-p", 4, "--exist-ok")
    assert (stays.status, stays.talk) == (0, f"Topic {topic} has 1 partition (1 on broker 0).\n")


def test_patterns_and_topics_of_delayed_messages(metamq: Metamq, topic: str) -> None:
    for name in (f"{topic}-a", f"{topic}-b"):
        assert metamq("topic", "create", name, "-p", 1).status == 0
    assert metamq("produce", f"{topic}-a", "--delay", "1h", "later").status == 0

    def listed(*words: object) -> list[str]:
        return [one["topic"] for one in metamq("topic", "list", *words, "-o", "json").json]

    assert listed(f"{topic}-*") == [f"{topic}-a", f"{topic}-b"]
    assert listed("--all", f"{topic}-*") == [f"{topic}-a", f"{topic}-a.delayed", f"{topic}-b"]
    described = metamq("topic", "describe", f"{topic}-?", "-o", "json").json
    assert [one["topic"] for one in described] == [f"{topic}-a", f"{topic}-b"]
    none = metamq("topic", "describe", f"{topic}-none*")
    assert none.status == 1
    assert f"no topic matches '{topic}-none*'" in none.talk
    plan = metamq("topic", "delete", f"{topic}-*").talk
    assert f"Delete topic {topic}-a: " in plan
    assert f"Delete topic {topic}-b: " in plan
    assert metamq("topic", "delete", f"{topic}-*", "--yes").status == 0
    assert listed("--all", f"{topic}-*") == []


def test_the_groups_that_read_a_topic(metamq: Metamq, topic: str) -> None:
    assert "\nno group reads it\n" in metamq("topic", "describe", topic).text
    metamq("produce", topic, "a")
    metamq("consume", topic, "-g", f"{topic}-readers", "-e")
    assert f"\nread by {topic}-readers\n" in metamq("topic", "describe", topic).text
    assert metamq("topic", "describe", topic, "-o", "json").json[0]["groups"] == [f"{topic}-readers"]


def test_offsets_at_a_place(metamq: Metamq, topic: str) -> None:
    for second in (1_000, 2_000, 3_000):
        record = json.dumps({"value": "x", "timestamp_us": second * 1_000_000}).encode()
        assert metamq("produce", topic, "--json", stdin=record).status == 0

    def at(place: str) -> list[dict[str, Any]]:
        return metamq("topic", "offsets", topic, "--at", place, "-o", "json").json

    place = {"topic": topic, "partition": "0-0"}
    assert at("earliest") == [{**place, "offset": 0}]
    assert at("latest") == [{**place, "offset": 3}]
    assert at("@1970-01-01T00:33:20Z") == [{**place, "offset": 1}]
    assert at("@-1h") == [{**place, "offset": 3}]
    assert metamq("topic", "offsets", topic).text.split() == ["PARTITION", "OFFSET", "0-0", "3"]
    assert metamq("topic", "offsets", topic, "--at", "-3").status == 2
