"""How far a query is behind, by value."""

from __future__ import annotations

import json

import pytest

from metamq.spark_consumers.driver.lag import QueryLag, messages_behind
from metamq.spark_consumers.driver.stream_offsets import START, StreamOffset, StreamPlace, to_json
from metamq.zk.partitions import TopicPartition

A0, A1, B0 = TopicPartition("a", "0-0"), TopicPartition("a", "0-1"), TopicPartition("b", "0-0")


def read_to(**offsets: int) -> str:
    names = {"a0": A0, "a1": A1, "b0": B0}
    places = {names[name]: StreamPlace("id", offset) for name, offset in offsets.items()}
    return json.dumps(to_json(StreamOffset(places, places)))


def ends(**topics: dict[str, int]) -> str:
    return json.dumps(topics)


def test_the_lag_is_what_is_between_the_query_and_the_end_of_each_log() -> None:
    sources = [(read_to(a0=5, a1=9), ends(a={"0-0": 8, "0-1": 9})), (read_to(b0=1), ends(b={"0-0": 3}))]
    assert messages_behind(sources) == {A0: 3, A1: 0, B0: 2}
    assert QueryLag("q", "r", None, 7, messages_behind(sources)).messages == 5


def test_a_partition_that_several_sources_read_is_as_far_behind_as_the_last_of_them() -> None:
    end = ends(a={"0-0": 8})
    assert messages_behind([(read_to(a0=5), end), (read_to(a0=2), end), (read_to(a0=7), end)]) == {A0: 6}


def test_the_end_of_a_master_that_shows_less_is_no_lag() -> None:
    assert messages_behind([(read_to(a0=5), ends(a={"0-0": 3}))]) == {A0: 0}


def test_what_was_never_asked_for_its_end_is_left_out() -> None:
    assert messages_behind([(read_to(a0=5, b0=1), ends(a={"0-1": 3}))]) == {}


@pytest.mark.parametrize(
    ("end", "latest"),
    [
        (None, None),
        ("None", "None"),
        ("", ""),
        ("7", "9"),
        ('{"logOffset": 3}', "null"),
        ('{"flights": {"0": 5}}', '{"flights": {"0": 9}}'),
        (json.dumps(START), '{"a": {"0-0": 3}}'),
        (read_to(a0=1), "null"),
    ],
)
def test_other_sources_and_what_is_not_known_yet_are_passed_over(end: str | None, latest: str | None) -> None:
    assert messages_behind([(end, latest)]) == {}
