"""Filters change no other scan of the same data frame, table or view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metamq.testing import Cluster
from tests.spark.conftest import new_topic
from tests.spark.test_batch_source import load

PUSHES = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def fifty_each(running: Cluster) -> str:
    """A topic of two partitions with fifty messages in each."""
    topic = new_topic(running, 2)
    with running.producer() as producer:
        for number in range(100):
            producer.send(topic, b"%d" % number, partition=f"0-{number % 2}")
    return topic


@pytest.fixture(params=["true", "false"], autouse=True)
def spark_offers_filters(spark: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether Spark is set to offer filters to sources."""
    spark.conf.set(PUSHES, request.param)
    yield
    spark.conf.unset(PUSHES)


def one_after_the_other(frame: Any, _spark: Any) -> list[int]:
    return [
        frame.filter("offset < 5").count(),
        frame.count(),
        frame.filter("offset >= 5").count(),
        frame.filter("offset < 7").count(),
        frame.count(),
    ]


def a_union(frame: Any, _spark: Any) -> list[int]:
    return [frame.filter("offset < 5").union(frame.filter("offset >= 5")).count()]


def a_self_join(frame: Any, _spark: Any) -> list[int]:
    parts = [frame.filter(f"partition = '0-{number}'").select("offset") for number in range(2)]
    return [parts[0].join(parts[1], "offset").count()]


def a_ratio(frame: Any, _spark: Any) -> list[int]:
    part = frame.filter("partition = '0-0'")
    return [part.count(), frame.count()]


def a_view(frame: Any, spark: Any) -> list[int]:
    frame.createOrReplaceTempView("messages_of_a_view")
    three = spark.sql(
        "SELECT (SELECT count(*) FROM messages_of_a_view WHERE partition = '0-0'),"
        " (SELECT count(*) FROM messages_of_a_view), (SELECT count(*) FROM messages_of_a_view WHERE offset < 3)"
    ).head()
    few = spark.sql("SELECT count(*) FROM messages_of_a_view WHERE offset < 3").head()
    return [*three, *few, *spark.sql("SELECT count(*) FROM messages_of_a_view").head()]


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (one_after_the_other, [10, 100, 90, 14, 100]),
        (a_union, [100]),
        (a_self_join, [50]),
        (a_ratio, [50, 100]),
        (a_view, [50, 100, 6, 6, 100]),
    ],
)
def test_two_scans_of_one_data_frame(
    spark: Any, running: Cluster, fifty_each: str, ask: Callable[[Any, Any], list[int]], expected: list[int]
) -> None:
    assert ask(load(spark, running, fifty_each), spark) == expected


@pytest.mark.parametrize("spark_offers_filters", ["false"], indirect=True)
def test_a_count_and_then_a_filter_that_rules_out_nothing(spark: Any, running: Cluster) -> None:
    """Both read what there was at the first action."""
    topic = new_topic(running, 1)
    with running.producer() as producer:
        producer.send_many(topic, [b"x"] * 21)
    frame = load(spark, running, topic)
    assert frame.count() == 21
    with running.producer() as producer:
        producer.send(topic, b"later")
    assert frame.filter("offset >= 0").count() == 21


def test_two_scans_of_one_table(spark: Any, running: Cluster, fifty_each: str) -> None:
    options = f"zookeeper '{running.zookeeper}', subscribe '{fifty_each}'"
    with pytest.raises(Exception, match="option 'pushdown' is 'true', but Spark mixes up the filters"):
        spark.sql(f"CREATE TABLE filtered USING metamq OPTIONS ({options}, pushdown 'true')")
    spark.sql(f"CREATE TABLE filtered USING metamq OPTIONS ({options})")
    try:
        few, every = "SELECT count(*) FROM filtered WHERE offset < 3", "SELECT count(*) FROM filtered"
        assert [spark.sql(one).head()[0] for one in (few, every)] == [6, 100]
        assert [*spark.sql(f"SELECT ({few}), ({every})").head()] == [6, 100]
    finally:
        spark.sql("DROP TABLE filtered")
