"""Options, boundaries, ranges and columns, by value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.client.scan.ranges import OffsetRange, split
from metamq.errors import ConfigError, OffsetOutOfRange
from metamq.spark_consumers.driver.planning import check_direction, chosen_offset, question
from metamq.spark_consumers.source.boundaries import Boundary
from metamq.spark_consumers.source.columns import check_columns, full_schema
from metamq.spark_consumers.source.options import SourceOptions, Subscription, check_options, parse_options
from metamq.wire.commands import EARLIEST, LATEST, OffsetsResult
from metamq.zk.partitions import TopicPartition

A0, A1, B0 = TopicPartition("a", "0-0"), TopicPartition("a", "0-1"), TopicPartition("b", "0-0")


def parsed(streaming: bool = False, /, **given: str) -> SourceOptions:
    return parse_options({"zookeeper": "zk:1", "subscribe": "a", **given}, streaming=streaming)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"subscribe": "a, b,a"}, Subscription(topics=("a", "b"))),
        ({"SUBSCRIBEPATTERN": "a.*"}, Subscription(pattern="a.*")),
        ({"assign": '{"a": ["0-1", "0-0"]}'}, Subscription(partitions=(A1, A0))),
    ],
)
def test_subscriptions(given: dict[str, str], expected: Subscription) -> None:
    assert parse_options({"zookeeper": "zk:1", **given}, streaming=False).subscription == expected


def test_defaults_are_those_of_kafkas_source() -> None:
    batch, stream = parsed(), parsed(True)
    assert (batch.starting.everywhere, batch.ending.everywhere, stream.starting.everywhere) == (
        EARLIEST,
        LATEST,
        LATEST,
    )
    assert batch.fail_on_data_loss
    assert stream.max_trigger_delay_s == 900


@pytest.mark.parametrize(
    "given",
    [
        {"startingOffsets": "latest"},
        {"endingOffsets": "latest"},
        {"pushdown": "false"},
        {"MAXOFFSETSPERTRIGGER": "5"},
        {"groupId": "g", "startingOffsets": "latest"},
    ],
)
def test_what_one_kind_of_query_takes_passes_before_the_kind_is_known(given: dict[str, str]) -> None:
    check_options({"subscribe": "a", **given})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "nothing is subscribed to"),
        ({"subscribe": "a", "maxTriggerDelay": "soon"}, "option 'maxTriggerDelay' is 'soon', not a time"),
        ({"subscribe": "a", "endingOffsets": "soon"}, "option 'endingOffsets' is not JSON"),
    ],
)
def test_what_neither_takes_is_told_in_the_words_of_the_kind_that_it_looks_like(
    given: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_options(given)


def test_a_time_outranks_times_by_partition_and_these_outrank_offsets() -> None:
    each = {"startingOffsetsByTimestamp": '{"a": {"0-0": 5}}'}
    offsets = {"startingOffsets": '{"a": {"0-0": 7}}'}
    assert parsed(**offsets).starting == Boundary("startingOffsets", None, {A0: 7})
    assert parsed(**offsets, **each).starting.each == {A0: 5000}
    both = parsed(**offsets, **each, startingTimestamp="6").starting
    assert (both.everywhere, both.is_time) == (6000, True)


@pytest.mark.parametrize(
    "given",
    [
        {"startingOffsets": '{"a": {"0-0": 5, "0-1": 0}}', "endingOffsets": '{"a": {"0-0": 5, "0-1": -1}}'},
        {"startingTimestamp": "5", "endingTimestamp": "5"},
        {"startingTimestamp": "1735689600000", "endingOffsets": '{"a": {"0-0": 5}}'},
        {"startingOffsets": '{"a": {"0-0": 5}}', "endingTimestamp": "1"},
        {"startingOffsets": '{"a": {"0-0": -2}}', "endingOffsets": '{"a": {"0-0": 0}}'},
    ],
)
def test_a_query_that_may_read_nothing_passes(given: dict[str, str]) -> None:
    check_options({"subscribe": "a", **given})


@pytest.mark.parametrize(
    ("given", "is_doubted"),
    [
        ({"startingTimestamp": "1735689600"}, True),
        ({"startingTimestamp": "1735689600000"}, False),
        ({"startingTimestamp": "0"}, False),
        ({"startingOffsetsByTimestamp": '{"a": {"0-0": 1735689600000, "0-1": 1735689600}}'}, True),
        ({"startingOffsets": '{"a": {"0-0": 1735689600000000}}'}, False),
    ],
)
def test_a_time_that_is_likely_in_seconds_is_doubted(given: dict[str, str], is_doubted: bool) -> None:
    doubt = parsed(**given).starting.doubt()
    assert (doubt is not None) == is_doubted
    assert not doubt or f"'{next(iter(given))}' has the time 1735689600, in 1970" in doubt


@pytest.mark.parametrize(
    ("given", "streaming", "words"),
    [
        ({"subscribePattern": "x"}, False, "'subscribe' and 'subscribePattern' are given"),
        ({"startingOffset": "earliest"}, False, "unknown option 'startingOffset'.* Did you mean 'startingOffsets'"),
        ({"kafka.bootstrap.servers": "x:1"}, False, "is Kafka's. Brokers are found through ZooKeeper"),
        ({"endingOffsets": "latest"}, True, "'endingOffsets' is for batch queries"),
        ({"maxOffsetsPerTrigger": "5"}, False, "'maxOffsetsPerTrigger' is for streaming queries"),
        ({"startingOffsets": "latest"}, False, "'startingOffsets' is 'latest'. Choose 'earliest'"),
        ({"endingOffsets": "earliest"}, False, "'endingOffsets' is 'earliest'. Choose 'latest'"),
        ({"startingOffsets": "soon"}, False, "'startingOffsets' is not JSON"),
        ({"startingOffsets": '{"a": {"0-0": -1}}'}, False, "has the offset -1 for a/0-0.*-2: earliest"),
        ({"startingOffsets": '{"a": {"0-0": 1.5}}'}, False, "1.5 for a/0-0, not a whole number"),
        ({"startingOffsets": '{"a": {"0": 1}}'}, False, "'startingOffsets': partition '0' is not"),
        ({"startingOffsets": '{"a": [1]}'}, False, "'a' has no map of partitions"),
        (
            {"startingOffsets": '{"a": {"0-0": -2, "0-1": 5}}', "endingOffsets": '{"a": {"0-0": 3, "0-1": 4}}'},
            False,
            "'endingOffsets' ends for a/0-1 before 'startingOffsets' begins",
        ),
        (
            {"startingTimestamp": "6", "endingTimestamp": "5"},
            False,
            "'endingTimestamp' ends before 'startingTimestamp'",
        ),
        (
            {"startingTimestamp": "6", "endingOffsetsByTimestamp": '{"a": {"0-0": 7, "0-1": 5}}'},
            False,
            "'endingOffsetsByTimestamp' ends for a/0-1 before 'startingTimestamp' begins",
        ),
        ({"endingOffsets": '{"a": "earliest"}'}, False, r"has 'earliest' for topic 'a'. For a whole topic: .*latest"),
        ({"startingOffsets": '{"a": 5}'}, False, "'startingOffsets' has 5 for topic 'a'"),
        ({"startingOffsetsByTimestamp": '{"a": "earliest"}'}, False, "has the time 'earliest' for topic 'a'"),
        ({"startingTimestamp": "yesterday"}, False, "'startingTimestamp' is 'yesterday', not a time"),
        ({"startingTimestamp": "1735689600000000"}, False, "not a time. Give the milliseconds"),
        ({"startingTimestamp": "9" * 30}, False, "not a time. Give the milliseconds"),
        ({"startingOffsetsByTimestamp": '{"a": {"0-0": 1735689600000000}}'}, False, "has the time 1735689600000000"),
        ({"startingOffsetsByTimestampStrategy": "latest"}, False, "does nothing without 'startingTimestamp' or"),
        ({"maxTriggerDelay": "5m"}, True, "'maxTriggerDelay' does nothing without 'minOffsetsPerTrigger'"),
        (
            {"pushdown": "true"},
            False,
            "'pushdown' is 'true', but Spark mixes up .* give startingOffsets, endingOffsets",
        ),
        ({"includeHeaders": "some"}, False, "'includeHeaders' is 'some'"),
        (
            {"path": "flights"},
            False,
            "a topic has no path, but the path 'flights' is given. Name the topic: option 'subscribe'",
        ),
        ({"fetchOffset.numRetries": "3"}, True, "is Kafka's. Brokers are asked again until `pollTimeoutMs`"),
        ({"fetchOffset.retryIntervalMs": "10"}, True, "is Kafka's. Brokers are asked again until `pollTimeoutMs`"),
        ({"kafkaConsumer.pollTimeoutMs": "10"}, False, "is Kafka's. Give `pollTimeoutMs`"),
        ({"groupIdPrefix": "g"}, True, "is Kafka's. A query joins no group. `groupId` names"),
        ({"minPartitions": "0"}, False, "'minPartitions' is '0'"),
        ({"maxTriggerDelay": "5 fortnights"}, True, "'maxTriggerDelay' is '5 fortnights', not a time"),
        ({"failOnDataLoss": "perhaps"}, False, "'failOnDataLoss' is 'perhaps'. Choose 'true' or 'false'"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"}, True, "'minOffsetsPerTrigger' is 9, more than"),
        ({"groupId": "a/b"}, True, "'groupId': group 'a/b' has '/'"),
        ({"subscribe": "a/b"}, False, "'subscribe': topic 'a/b' has '/'"),
        ({"subscribe": " ,"}, False, "'subscribe' names no topic"),
        ({"decode": "json"}, False, "'decode' is 'json'. Choose 'schema'"),
        ({"decode": "schema", "subscribe": "a,b"}, True, "'decode' is for a query of one topic"),
    ],
)
def test_a_wrong_option_is_named_with_the_next_step(given: dict[str, str], streaming: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as failure:
        parsed(streaming, **given)
    assert failure.value.hint


def test_a_pattern_has_no_schema() -> None:
    with pytest.raises(ConfigError, match="'decode' is for a query of one topic"):
        check_options({"decode": "schema", "subscribePattern": "a.*"})
    assert check_options({"decode": "schema", "assign": '{"a": ["0-0", "0-1"]}'}).decoded == "a"


@pytest.mark.parametrize(
    "given", [{"subscribePattern": "("}, {"subscribePattern": " "}, {"assign": "[]"}, {"assign": '{"a": "0-0"}'}, {}]
)
def test_a_wrong_subscription_is_named(given: dict[str, str]) -> None:
    name = next(iter(given), "subscribe")
    with pytest.raises(ConfigError, match=name):
        parse_options({"zookeeper": "zk:1", **given}, streaming=False)


def test_offsets_have_to_name_each_partition_that_is_read_and_no_other() -> None:
    boundary = parsed(startingOffsets=json.dumps({"a": {"0-0": 7, "0-1": -2}})).starting
    assert boundary.questions([A1, A0]) == {A0: 7, A1: EARLIEST}
    with pytest.raises(ConfigError, match="'startingOffsets' lacks b/0-0"):
        boundary.questions([A0, A1, B0])
    with pytest.raises(ConfigError, match="'startingOffsets' names a/0-1, which is not read"):
        boundary.questions([A0])


def answer(offset: int, timestamp_us: int = -1) -> OffsetsResult:
    return OffsetsResult(0, offset, timestamp_us, 10, 20, 1, None, [])


def test_a_word_or_a_time_stands_for_all_partitions_of_a_topic() -> None:
    starting = parsed(startingOffsets='{"a": "earliest", "b": {"0-0": 5}}').starting
    assert starting.questions([A0, A1, B0]) == {A0: EARLIEST, A1: EARLIEST, B0: 5}
    assert parsed(endingOffsets='{"a": "Latest"}').ending.questions([A0, A1]) == {A0: LATEST, A1: LATEST}
    assert parsed(True, startingOffsets='{"a": -1}').starting.questions([A1]) == {A1: LATEST}
    times = parsed(startingOffsetsByTimestamp='{"a": 1735689600000}').starting
    assert times.questions([A0]) == {A0: 1735689600000000}
    with pytest.raises(ConfigError, match="'startingOffsets' lacks b/0-0"):
        parsed(startingOffsets='{"a": "earliest"}').starting.questions([A0, B0])
    with pytest.raises(ConfigError, match="'startingOffsets' names topic 'b', which is not read"):
        parsed(startingOffsets='{"a": "earliest", "b": "earliest"}').starting.questions([A0])


def test_javas_largest_number_is_after_every_message() -> None:
    far = 2**63 - 1
    assert parsed(endingOffsetsByTimestamp=f'{{"a": {{"0-0": {far}}}}}').ending.questions([A0]) == {A0: far}
    assert parsed(endingTimestamp=str(far)).ending.questions([A0]) == {A0: far}


@pytest.mark.parametrize(
    ("ending", "wanted", "end", "is_refused"),
    [
        (Boundary("endingTimestamp", 5, is_time=True), 5, 9, True),
        (Boundary("endingOffsets", None, {A0: 9}), 9, 9, True),
        (Boundary("endingOffsets", LATEST), LATEST, 9, False),  # a new master, which does not show all of it yet
        (Boundary("endingTimestamp", 5, is_time=True), 5, 10, False),
    ],
)
def test_a_query_that_would_begin_behind_its_end_is_refused(
    ending: Boundary, wanted: int, end: int, is_refused: bool
) -> None:
    starting = Boundary("startingOffsets", None, {A0: 10})
    if not is_refused:
        check_direction(starting, ending, wanted, A0, 10, end)
        return
    with pytest.raises(
        ConfigError, match=f"'startingOffsets' begins a/0-0 at offset 10, .*'{ending.option}' ends it at 9"
    ):
        check_direction(starting, ending, wanted, A0, 10, end)


def started(boundary: Boundary, wanted: int, found: OffsetsResult, **how: Any) -> int:
    defaults = {"if_none_at_time": "error", "fail_on_data_loss": True}
    return chosen_offset(boundary, wanted, A0, found, **{**defaults, **how})


def test_offsets_are_looked_up_and_checked() -> None:
    offsets, times = Boundary("startingOffsets", None, {A0: 5}), Boundary("startingTimestamp", 5, is_time=True)
    assert [question(offsets, wanted) for wanted in (EARLIEST, LATEST, 5)] == [EARLIEST, LATEST, LATEST]
    assert question(times, 5) == 5
    assert started(offsets, 15, answer(20)) == 15
    assert started(offsets, LATEST, answer(20)) == 20
    with pytest.raises(OffsetOutOfRange, match=r"10 to 20, not 5.*'startingOffsets'"):
        started(offsets, 5, answer(20))
    assert started(offsets, 5, answer(20), fail_on_data_loss=False) == 10
    assert started(offsets, 25, answer(20), fail_on_data_loss=False) == 20
    assert started(times, 5, answer(13, 5)) == 13
    with pytest.raises(ConfigError, match="a/0-0 has no message at or after the time"):
        started(times, 5, answer(20))
    assert started(times, 5, answer(20), if_none_at_time="latest") == 20
    assert chosen_offset(Boundary("endingTimestamp", 5, is_time=True), 5, A0, answer(20), fail_on_data_loss=True) == 20


def covered(ranges: list[OffsetRange]) -> dict[TopicPartition, list[int]]:
    found: dict[TopicPartition, list[int]] = {}
    for one in ranges:
        found.setdefault(one.tp, []).extend(range(one.start, one.end))
    return found


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    at_least=st.none() | st.integers(1, 40),
    most=st.none() | st.integers(1, 20),
)
def test_pieces_are_the_ranges(sizes: list[int], at_least: int | None, most: int | None) -> None:
    ranges = [OffsetRange(TopicPartition("a", f"0-{n}"), "id", 7, 7 + size) for n, size in enumerate(sizes)]
    pieces = split(ranges, at_least, most)
    assert covered(pieces) == {tp: offsets for tp, offsets in covered(ranges).items() if offsets}
    assert all(piece.size > 0 for piece in pieces)
    assert all(most is None or piece.size <= most for piece in pieces)
    if at_least is not None:
        assert len(pieces) >= min(at_least, sum(sizes))


def test_larger_ranges_get_more_pieces() -> None:
    pieces = split([OffsetRange(A0, "id", 0, 900), OffsetRange(A1, "id", 0, 100)], 10, None)
    assert [(piece.tp, piece.size) for piece in pieces] == [(A0, 100)] * 9 + [(A1, 100)]


def test_a_schema_is_some_of_the_columns() -> None:
    assert [field["name"] for field in full_schema(True)["fields"]][-1] == "headers"
    assert "headers" not in [field["name"] for field in full_schema(False)["fields"]]
    assert check_columns([("offset", "bigint"), ("key", "binary")]) == ("offset", "key")
    assert check_columns([("headers", "array<struct<key: string, value: binary>>")]) == ("headers",)
    for wrong, words in [
        ([("payload", "binary")], "a column 'payload'"),
        ([("value", "string")], "the type string for 'value'. It has to be binary"),
        ([("timestamp", "timestamp_ntz")], "the type timestamp_ntz for 'timestamp'. Write `timestamp timestamp_ltz`"),
        ([("key", "binary"), ("key", "binary")], "twice"),
        ([], "no columns"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_columns(wrong)
