"""How far a query is and goes next, by value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.client.admin_brokers import Found
from metamq.errors import ConnectError, CorruptData, MetamqError
from metamq.spark_consumers.admission import admit, is_enough
from metamq.spark_consumers.progress import Limits, Step, begin, lost_partitions, step
from metamq.spark_consumers.stream_offsets import (
    START,
    StreamOffset,
    StreamPlace,
    first_places,
    from_json,
    to_json,
)
from metamq.wire.commands import OffsetsResult
from metamq.zk.partitions import TopicPartition

A0, A1, A10 = TopicPartition("a", "0-0"), TopicPartition("a", "0-1"), TopicPartition("a", "0-10")
AWAY = ConnectError("broker 0", "gone")


def place(offset: int, epoch: int = 1, topic_id: str = "x") -> StreamPlace:
    return StreamPlace(topic_id, offset, epoch)


def answer(stable: int, start: int = 0, epoch: int = 1) -> OffsetsResult:
    return OffsetsResult(0, stable, -1, start, stable, epoch, None)


def test_an_offset_reads_as_it_was_written_and_is_one_text_in_whatever_order() -> None:
    one = StreamOffset({A1: place(1), A0: place(2)}, {A10: place(9), A1: place(3), A0: place(4, -1)})
    other = StreamOffset({A0: place(2), A1: place(1)}, {A0: place(4, -1), A10: place(9), A1: place(3)})
    text = json.dumps(to_json(one))
    assert text == json.dumps(to_json(other))
    assert from_json(json.loads(text)) == one
    assert json.dumps(to_json(from_json(json.loads(text)) or one)) == text
    assert text.index("0-1") < text.index("0-10")
    assert from_json(json.loads(json.dumps(START))) is None


@pytest.mark.parametrize("document", [{}, {"v": 2}, {"v": 1, "from": 3, "to": 4}, {"v": 1, "from": {"a": 1}, "to": {}}])
def test_what_is_no_offset_of_ours_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(CorruptData, match="checkpoint"):
        from_json(document)


def test_a_batch_begins_where_the_last_ended_and_with_what_is_new_where_its_end_says() -> None:
    end = StreamOffset({A0: place(7), A1: place(3)}, {A0: place(9), A1: place(5)})
    assert first_places(None, end) == end.begun
    before = StreamOffset({}, {A0: place(4)})
    assert first_places(before, end) == {A0: place(4), A1: place(3)}
    made_anew = StreamOffset({}, {A0: place(4, topic_id="old")})
    assert first_places(made_anew, end) == end.begun


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 50), st.integers(-5, 50)), min_size=1),
    st.none() | st.integers(1, 100),
)
def test_shares_are_in_proportion(partitions: dict[int, tuple[int, int]], most: int | None) -> None:
    begun = {tp: first for tp, (first, _size) in partitions.items()}
    ends = {tp: first + size for tp, (first, size) in partitions.items()}
    reached = admit(begun, ends, most)
    taken = {tp: reached[tp] - begun[tp] for tp in begun}
    assert all(0 <= taken[tp] <= max(partitions[tp][1], 0) for tp in taken)
    assert all(taken[tp] > 0 for tp, (_first, size) in partitions.items() if size > 0)
    total = sum(max(size, 0) for _first, size in partitions.values())
    if most is None or total <= most:
        assert sum(taken.values()) == total
    else:
        assert sum(taken.values()) <= most + len(partitions)


def test_a_few_messages_wait_for_others() -> None:
    assert [is_enough(found, 10, 1.0, 5.0) for found in (0, 9, 10)] == [False, False, True]
    assert [is_enough(found, 10, 5.0, 5.0) for found in (0, 1)] == [False, True]
    assert [is_enough(found, None, 0.0, 5.0) for found in (0, 1)] == [False, True]


def stepped(before: dict[TopicPartition, StreamPlace], answers: dict[TopicPartition, Found], **limits: object) -> Step:
    begun = begin(before, dict.fromkeys(answers, "x"), answers)
    return step(before, begun, answers, Limits(**limits))  # type: ignore[arg-type]


def test_nothing_new_is_no_batch() -> None:
    assert stepped({A0: place(5)}, {A0: answer(5)}).offset is None
    assert stepped({A0: place(5)}, {A0: AWAY}).offset is None
    assert stepped({A0: place(5)}, {A0: answer(3)}).offset is None  # a new master does not show all of it yet


def test_a_broker_that_is_away_has_nothing_new() -> None:
    found = stepped({A0: place(5), A1: place(5)}, {A0: AWAY, A1: answer(8, epoch=2)}).offset
    assert found == StreamOffset({A0: place(5), A1: place(5)}, {A0: place(5), A1: place(8, 2)})


def test_a_new_partition_is_read_from_its_start_once_that_is_known() -> None:
    before = {A0: place(5)}
    assert stepped(before, {A0: answer(5), A1: AWAY}).offset is None
    found = stepped(before, {A0: answer(5), A1: answer(9, start=4)}).offset
    assert found == StreamOffset({A0: place(5), A1: place(4, -1)}, {A0: place(5), A1: place(9)})


def test_a_bounded_batch_knows_the_epoch_only_at_the_end_of_the_log() -> None:
    found = stepped({A0: place(0), A1: place(0)}, {A0: answer(90), A1: answer(10)}, most=10).offset
    assert found is not None
    assert found.reached == {A0: place(9, -1), A1: place(1, -1)}


def test_what_came_after_the_start_of_available_now_is_left() -> None:
    target = {A0: place(7)}
    found = stepped({A0: place(5)}, {A0: answer(9), A1: answer(4)}, target=target).offset
    assert found == StreamOffset({A0: place(5)}, {A0: place(7)})
    assert stepped({A0: place(7)}, {A0: answer(9), A1: answer(4)}, target=target).offset is None
    assert stepped({A0: place(8)}, {A0: answer(9)}, target=target).offset is None


def test_losses_are_told() -> None:
    gone = stepped({A0: place(5)}, {A0: answer(9, start=6)})
    assert [str(loss) for loss in gone.losses if "6 to 9, not 5" in str(loss)]
    assert lost_partitions({A0: place(5)}, {A0: "x"}) == []
    told = [*lost_partitions({A0: place(5), A1: place(1)}, {A0: "y"})]
    assert all(isinstance(loss, MetamqError) for loss in told)
    assert "deleted and made anew" in str(told[0])
    assert "no partition '0-1'" in str(told[1])
    assert "topic 'a' does not exist" in str(lost_partitions({A0: place(5)}, {})[0])
