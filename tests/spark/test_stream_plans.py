"""How far a query is and goes next, by value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.client.admin.admin_brokers import Found
from metamq.errors import ConnectError, CorruptData, MetamqError, OffsetDiverged, TopicNotFound
from metamq.spark_consumers.driver.progress import (
    BatchLimits,
    QueryStep,
    admit,
    begin,
    is_enough,
    lost_partitions,
    reachable,
    step,
)
from metamq.spark_consumers.driver.publishing import Publisher
from metamq.spark_consumers.driver.stream_offsets import (
    START,
    Places,
    StreamOffset,
    StreamPlace,
    first_places,
    from_json,
    to_json,
)
from metamq.spark_consumers.driver.stream_planner import WARN_AFTER_S, Unanswered
from metamq.wire.commands import OffsetsResult
from metamq.zk.partitions import TopicPartition

A0, A1, A10 = TopicPartition("a", "0-0"), TopicPartition("a", "0-1"), TopicPartition("a", "0-10")
AWAY = ConnectError("broker 0", "gone")


def place(offset: int, epoch: int = 1, topic_id: str = "x") -> StreamPlace:
    return StreamPlace(topic_id, offset, epoch)


def answer(stable: int, start: int = 0, epoch: int = 1, epochs: Sequence[tuple[int, int]] = ()) -> OffsetsResult:
    return OffsetsResult(0, stable, -1, start, stable, epoch, None, list(epochs))


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
    after_a_gap = StreamOffset({A0: place(7, -1), A1: place(3)}, end.reached)
    assert first_places(before, after_a_gap) == {A0: place(7, -1), A1: place(3)}
    on_a_log_that_parted = StreamOffset({A0: place(2, 1), A1: place(3)}, {A0: place(9, 2), A1: place(5)})
    assert first_places(before, on_a_log_that_parted) == {A0: place(2, 1), A1: place(3)}


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


def stepped(
    before: dict[TopicPartition, StreamPlace], answers: dict[TopicPartition, Found], **limits: object
) -> QueryStep:
    begun = begin(before, dict.fromkeys(answers, "x"), answers)
    return step(before, begun, answers, BatchLimits(**limits))  # type: ignore[arg-type]


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


def test_a_bounded_batch_knows_the_epoch_at_its_end() -> None:
    """Else nobody would notice that what it read was given up by a promotion."""

    def cut(before: StreamPlace, told: OffsetsResult, most: int) -> StreamPlace:
        found = stepped({A0: before}, {A0: told}, most=most).offset
        assert found is not None
        return found.reached[A0]

    assert cut(place(0, -1), answer(90, epoch=4, epochs=[(2, 20), (4, 90)]), 10) == place(10, 2)
    assert cut(place(0, -1), answer(90, epoch=4, epochs=[(2, 20), (4, 90)]), 20) == place(20, 2)
    assert cut(place(0, -1), answer(90, epoch=4, epochs=[(2, 20), (4, 90)]), 21) == place(21, 4)
    assert cut(place(15, 2), answer(90, epoch=4, epochs=[(2, 20), (4, 90)]), 50) == place(65, 4)
    assert cut(place(5, 3), answer(90, epoch=3), 10) == place(15, 3), "between two messages of an epoch is no other"
    # More epochs than are told: as far as they are.
    assert cut(place(0, -1), answer(90, epoch=40, epochs=[(2, 20), (4, 30)]), 50) == place(30, 4)
    assert cut(place(0, -1), answer(90, epoch=4), 10) == place(10, -1), "an older broker tells none"


def test_shares_of_two_partitions() -> None:
    found = stepped({A0: place(0), A1: place(0)}, {A0: answer(90), A1: answer(10)}, most=10).offset
    assert found is not None
    assert found.reached == {A0: place(9), A1: place(1)}


def test_what_was_read_and_given_up_is_a_loss_and_what_is_there_now_is_read() -> None:
    """At 3000 when a promotion takes the log back to 2500, and it grows to 6000 again."""
    parted = OffsetDiverged("a/0-0", 3000, 0, 6000, 2500, 1)
    found = stepped({A0: place(3000)}, {A0: parted})
    assert found.losses == [parted]
    assert found.offset == StreamOffset({A0: place(2500)}, {A0: place(2500)})
    further = stepped({A0: place(2500)}, {A0: answer(6000, epoch=2, epochs=[(2, 6000)])}, most=1000).offset
    assert further == StreamOffset({A0: place(2500)}, {A0: place(3500, 2)})
    # A query that ends with what there was at its start ends there.
    before, answers = {A0: place(3000)}, {A0: parted, A1: AWAY}
    assert reachable({A0: place(5000), A1: place(7)}, before, answers) == {A0: place(2500), A1: place(7)}
    assert reachable({A0: place(5000, 2)}, before, answers) == {A0: place(5000, 2)}, "fixed in the new log"


@pytest.mark.parametrize("first", [place(1000, 0), place(1000, -1), place(2000, 1)])
def test_a_target_that_was_given_up_before_the_query_came_there_is_where_the_logs_part(first: StreamPlace) -> None:
    """Else its last batch is planned over messages of the new log, which its tasks take for a loss, and read twice."""
    history = [(0, 1500), (1, 2400), (2, 6000)]
    at, target = {A0: first}, {A0: place(5000, 1)}
    ends = []
    while True:
        told = [(epoch, until) for epoch, until in history if until > at[A0].offset]
        answers: dict[TopicPartition, Found] = {A0: answer(6000, epoch=2, epochs=told)}
        target = reachable(target, at, answers)
        found = stepped(at, answers, most=1200, target=target)
        assert not found.losses
        if found.offset is None:
            break
        at = dict(found.offset.reached)
        ends.append(at[A0])
    assert ends == [place(2200, 1), place(2400, 1)][first.offset == 2000 :]


def test_a_target_is_kept_where_the_logs_have_not_parted_before_it() -> None:
    at, target = {A0: place(1000)}, {A0: place(5000)}

    def kept(*epochs: tuple[int, int], known: Places = at, wanted: Places = target) -> bool:
        return reachable(wanted, known, {A0: answer(6000, epochs=epochs)}) == wanted

    assert kept((1, 5000), (2, 6000)), "a promotion without a loss"
    assert not kept((1, 4999), (2, 6000))
    assert kept((1, 3000)), "a new master that does not show all of it yet"
    assert kept(), "an older broker tells none"
    assert kept((2, 6000), known={A0: place(5000)})
    assert kept((2, 6000), wanted={A0: place(5000, -1)}), "not known"
    # All that there is from where the query is on is newer: nothing is left to be read.
    assert reachable(target, at, {A0: answer(6000, epochs=[(2, 6000)])}) == at
    assert reachable(target, {}, {A0: answer(6000, epochs=[(1, 20), (2, 6000)])}) == {A0: place(20)}


def test_a_gap_is_passed_over_at_once() -> None:
    found = stepped({A0: place(5)}, {A0: answer(10**9 + 50, start=10**9)}, most=10)
    assert [str(loss) for loss in found.losses if "not 5" in str(loss)]
    assert found.offset == StreamOffset({A0: place(10**9, -1)}, {A0: place(10**9 + 10, -1)})


def test_what_came_after_the_start_of_available_now_is_left() -> None:
    target = {A0: place(7)}
    found = stepped({A0: place(5)}, {A0: answer(9), A1: answer(4)}, target=target).offset
    assert found == StreamOffset({A0: place(5)}, {A0: place(7)})
    assert stepped({A0: place(7)}, {A0: answer(9), A1: answer(4)}, target=target).offset is None
    assert stepped({A0: place(8)}, {A0: answer(9)}, target=target).offset is None


def test_available_now_goes_to_its_target_also_where_a_broker_is_away() -> None:
    """Or "nothing new" would end the query as if it had read all."""
    found = stepped({A0: place(5)}, {A0: AWAY}, target={A0: place(9)}).offset
    assert found == StreamOffset({A0: place(5)}, {A0: place(9)})
    found = stepped({A0: place(5)}, {A0: AWAY}, target={A0: place(90)}, most=10).offset
    assert found == StreamOffset({A0: place(5)}, {A0: place(15)})
    assert stepped({A0: place(9)}, {A0: AWAY}, target={A0: place(9)}).offset is None


def test_a_topic_that_is_made_anew_is_not_in_an_older_target() -> None:
    before, target = {A0: place(5, topic_id="old")}, {A0: place(9, topic_id="old")}
    found = stepped(before, {A0: answer(3), A1: answer(4)}, target=target).offset
    assert found is not None
    assert found == StreamOffset({}, {})
    assert to_json(found)["to"] == {}
    assert stepped({}, {A0: answer(3), A1: answer(4)}, target=target).offset is None


def test_a_broker_that_does_not_answer_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    unanswered = Unanswered(patience_s=100)
    away = {A0: AWAY, A1: AWAY, A10: answer(5)}

    def warned(found: dict[TopicPartition, Found], now_s: float) -> list[str]:
        caplog.clear()
        unanswered.note(found, now_s)
        return [record.getMessage() for record in caplog.records]

    assert warned(away, 1000) == warned(away, 1000 + WARN_AFTER_S - 1) == []
    (message,) = warned(away, 1000 + WARN_AFTER_S)
    assert message.startswith(
        "the new messages of a/0-0 and 1 other partition have been unknown for 30 s: no connection"
    )
    assert warned(away, 9000) == []
    assert warned({A0: answer(5)}, 9001) == warned({A0: AWAY}, 9002) == []
    assert len(warned({A0: AWAY}, 9002 + WARN_AFTER_S)) == 1


def test_what_fails_for_good_ends_the_query() -> None:
    unanswered = Unanswered(patience_s=100)
    with pytest.raises(CorruptData):
        unanswered.note({A0: CorruptData("a/0-0", "broken")}, 0)
    # One that is new may not be known to its broker yet.
    unanswered.note({A1: TopicNotFound("a")}, 0)
    unanswered.note({A1: TopicNotFound("a")}, 100)
    with pytest.raises(TopicNotFound):
        unanswered.note({A1: TopicNotFound("a")}, 101)


class Slow:
    """In the place of a QueryView: what is published, and when it is done."""

    def __init__(self) -> None:
        self.published: list[Places] = []
        self.under_way: list[Future[None]] = []

    def publish_soon(self, places: Places) -> Future[None]:
        self.published.append(places)
        self.under_way.append(Future())
        return self.under_way[-1]


def test_only_what_changed_is_published_and_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    view = Slow()
    publisher = Publisher(view.publish_soon)
    publisher.offer({A0: place(1), A1: place(1)})
    publisher.offer({A0: place(2), A1: place(1)})
    assert view.published == [{A0: place(1), A1: place(1)}]
    view.under_way[-1].set_result(None)
    publisher.offer({A0: place(3), A1: place(1)})
    assert view.published[1:] == [{A0: place(3)}]
    for _ in range(2):
        view.under_way[-1].set_exception(AWAY)
        publisher.offer({A0: place(3), A1: place(1)})
        assert view.published[-1] == {A0: place(3)}
    assert len(caplog.records) == 1
    view.under_way[-1].set_result(None)
    publisher.offer({A0: place(3), A1: place(1)})
    assert len(view.published) == 4


@pytest.mark.parametrize("error", [TimeoutError("of the coroutine's own"), ValueError("unforeseen")])
def test_publishing_may_fail_by_anything(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing depends on it: neither does the query end, nor is that taken for an attempt that is under way still."""
    view = Slow()
    publisher = Publisher(view.publish_soon)
    publisher.offer({A0: place(1)})
    view.under_way[-1].set_exception(error)
    publisher.offer({A0: place(1)})
    assert [record.getMessage() for record in caplog.records] == [f"the query's progress is not published: {error}"]
    view.under_way[-1].cancel()
    publisher.finish({A0: place(2)}, 0.01)
    assert view.published == [{A0: place(1)}, {A0: place(1)}, {A0: place(2)}]


def test_losses_are_told() -> None:
    gone = stepped({A0: place(5)}, {A0: answer(9, start=6)})
    assert [str(loss) for loss in gone.losses if "6 to 9, not 5" in str(loss)]
    assert lost_partitions({A0: place(5)}, {A0: "x"}) == []
    told = [*lost_partitions({A0: place(5), A1: place(1)}, {A0: "y"})]
    assert all(isinstance(loss, MetamqError) for loss in told)
    assert "deleted and created again" in str(told[0])
    assert "a/0-1, which the query has read, is no longer among its partitions" in str(told[1])
    assert "topic 'a', which the query has read, is no longer" in str(lost_partitions({A0: place(5)}, {})[0])
