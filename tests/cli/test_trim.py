"""`metamq topic trim`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.one_zookeeper import cluster

Metamq = Callable[..., Any]


def filled(metamq: Metamq, topic: str, first: int = 0, end: int = 20) -> None:
    for number in range(first, end):
        assert metamq("produce", topic, stdin=b"message %d\n" % number).status == 0


def test_trim_plans_asks_deletes_and_says_where_the_partition_begins(metamq: Metamq, topic: str) -> None:
    filled(metamq, topic)
    plan = metamq("topic", "trim", f"{topic}/0-0", "--before-offset", 12, "--dry-run")
    assert plan.status == 0
    assert plan.talk.startswith(f"Topic {topic}: 12 messages, about ")
    refused = metamq("topic", "trim", f"{topic}/0-0", "--before-offset", 12)
    assert (refused.status, refused.data) == (1, b"")
    assert refused.talk.endswith("Nothing was done. Give --yes to do it.\n")
    (before,) = metamq("topic", "describe", topic, "-o", "json").json
    assert before["partitions"][0]["start_offset"] == 0
    done = metamq("topic", "trim", f"{topic}/0-0", "--before-offset", 12, "--yes")
    assert done.status == 0
    assert done.talk.endswith(f"{topic}/0-0 begins at 12 now.\n")
    (one,) = metamq("topic", "trim", topic, "--to-end", "--yes", "-o", "json").json
    assert (one["begin_before"], one["begin"], one["messages"], one["kept_on_disk"]) == (12, 20, 8, 0)
    filled(metamq, topic, 20, 22)
    read = metamq("consume", topic, "-e")
    assert read.text == "message 20\nmessage 21\n"
    (none,) = metamq("topic", "trim", topic, "--before-time", "-1h", "--yes", "-o", "json").json
    assert none["messages"] == 0


def test_trim_refuses_wrong_arguments(metamq: Metamq, topic: str) -> None:
    assert metamq("topic", "trim", topic).status == 2
    assert metamq("topic", "trim", topic, "--to-end", "--before-offset", 1).status == 2
    assert metamq("topic", "trim", f"{topic}/0-7", "--to-end", "--yes").status == 1
    beyond = metamq("topic", "trim", topic, "--before-offset", 9, "--yes")
    assert beyond.status == 1
    assert "Give an offset up to 0" in beyond.talk


@pytest.mark.slow
def test_trim_of_one_partition_asks_only_its_broker(offline: Metamq, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(brokers=2) as two:
        monkeypatch.setenv("METAMQ_ZOOKEEPER", two.zookeeper)
        two.create_topic("orders", partitions=2)
        filled(offline, "orders", 0, 4)
        two.brokers[1].stop()
        for place in (["--before-time", "-1h"], ["--to-end"]):
            done = offline("topic", "trim", "orders/0-0", *place, "--yes")
            assert done.status == 0, done.talk
            assert "orders/0-0 begins at" in done.talk
        assert "broker 1" in offline("topic", "trim", "orders", "--to-end", "--yes").talk
        assert "broker 1" in offline("topic", "trim", "orders/1-0", "--to-end", "--yes").talk
