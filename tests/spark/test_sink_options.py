"""What is wrong with a query that writes is told in the driver, with its name and the next step."""

from __future__ import annotations

import pytest

from metamq.errors import ConfigError
from metamq.spark_consumers.sink.sink_options import HEADERS, check_sink_columns, parse_sink_options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"subscribe": "t"}, "unknown option 'subscribe'"),
        ({"topc": "t"}, "unknown option 'topc'.*topic"),
        ({"topic": "a b"}, "option 'topic'"),
        ({"delivery": "exactly-once"}, "option 'delivery' is 'exactly-once'.*at_least_once"),
        ({"compression": "gzip"}, "option 'compression' is 'gzip'"),
        ({"deliveryTimeoutMs": "0"}, "option 'deliveryTimeoutMs' is '0'"),
        ({"topic": "t", "path": "t"}, "a topic has no path.*option 'topic'"),
        ({"topic": "t", "transactionTimeoutMs": "1000"}, "'transactionTimeoutMs' is only for delivery=exactly_once"),
        ({"topic": "t", "failOnDataLoss": "false"}, "'failOnDataLoss' is only for delivery=exactly_once"),
        ({"topic": "t", "sinkId": "mine"}, "'sinkId' is only for .*exactly_once"),
        ({"kafka.bootstrap.servers": "x"}, "it is Kafka's"),
    ],
)
def test_a_wrong_option(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_sink_options(given, streaming=True)


@pytest.mark.parametrize(
    ("columns", "topic", "said"),
    [
        ([("key", "binary")], "t", "no column 'value'"),
        ([("value", "bigint")], "t", r"'value' is of type bigint. .*cast\(value as string\)"),
        ([("value", "string"), ("partition", "int")], "t", "'partition' is of type int. .*'0-3'"),
        ([("value", "string"), ("headers", "map<string,binary>")], "t", "'headers' is of type map"),
        ([("value", "string"), ("Key", "string")], "t", "a column 'Key'. Call it 'key'"),
        ([("value", "string"), ("value", "string")], "t", "the column 'value' twice"),
        ([("value", "string")], None, "the rows have no topic"),
    ],
)
def test_a_wrong_column(columns: list[tuple[str, str]], topic: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_sink_columns(columns, topic)


def test_right_ones() -> None:
    check_sink_columns([("value", "string")], "t")
    every = [("key", "binary"), ("value", "binary"), ("topic", "string"), ("partition", "string"), ("headers", HEADERS)]
    check_sink_columns(every, None)
    check_sink_columns(
        [*every, ("offset", "bigint"), ("timestamp", "timestamp_ntz"), ("id", "int"), ("id", "int")], None
    )
    sparks = {"checkpointlocation": "x", "path": "file:/warehouse/t", "queryname": "z"}  # of writeStream.queryName("z")
    options = parse_sink_options({"Topic": "t", **sparks}, streaming=True)
    assert (options.topic, options.delivery) == ("t", "at_least_once")
