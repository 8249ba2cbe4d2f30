"""What is handed out and what is done, at every point at which a handler or the loop may step in.

Cases by value; any sequence of steps against a model is in test_inbox_model.py.
"""

from __future__ import annotations

import threading

import pytest

from metamq.client.fetch.inbox import SLICE_MESSAGES, Inbox, InFlightBatch, PartitionState
from metamq.errors import ConfigError, ForkedError
from tests.client.inbox_parts import OTHER, TP, batch, inbox_with, nothing_to_take, offset_of, take


class One:
    """An inbox with one partition, and batches of five in it."""

    def __init__(self, *, batches: int = 2) -> None:
        self.state = PartitionState(TP, None, 0)
        self.inbox = inbox_with(self.state)
        self.inbox.put(self.state, [batch(TP, 5 * number, 5) for number in range(batches)])


# Done, point by point


def test_nothing_is_done_before_the_first_message() -> None:
    one = One()
    assert one.state.done_offset() == 0
    hand = take(one.inbox)
    assert one.state.done_offset() == 0
    hand.iterate()
    assert one.state.done_offset() == 0
    assert one.state.done_offset(last_done=True) == 0


def test_a_message_is_done_when_the_next_one_is_asked_for() -> None:
    one = One()
    fields = take(one.inbox).iterate()
    for offset in range(5):
        assert offset_of(next(fields)) == offset
        assert one.state.done_offset() == offset
        assert one.state.done_offset(last_done=True) == offset + 1
    assert next(fields, None) is None
    assert one.state.done_offset(last_done=True) == 5


def test_at_the_end_of_a_batch_the_next_one_follows() -> None:
    one = One()
    for start in (0, 5):
        hand = take(one.inbox)
        assert [offset_of(fields) for fields in hand.iterate()] == list(range(start, start + 5))
        assert one.inbox.finish(hand) is False
        assert one.state.done_offset() == start + 5
    assert nothing_to_take(one.inbox)
    assert one.inbox.buffered_bytes == one.state.buffered_bytes == 0


def test_a_whole_batch_is_done_as_a_whole() -> None:
    one = One()
    hand = take(one.inbox, whole=True)
    assert one.state.done_offset() == 0
    assert one.state.done_offset(last_done=True) == 5
    assert one.inbox.finish(hand) is False
    assert one.state.done_offset() == 5


def test_a_whole_batch_that_failed_comes_again() -> None:
    one = One()
    assert one.inbox.finish(take(one.inbox, whole=True), last_done=False) is True
    assert one.state.done_offset() == 0
    assert nothing_to_take(one.inbox), "what is buffered behind it must not come first"
    assert one.inbox.rewind(one.state) == 0


@pytest.mark.parametrize("last_done", [True, False])
def test_a_batch_that_is_let_go_in_the_middle_goes_on_there(last_done: bool) -> None:
    one = One()
    hand = take(one.inbox)
    fields = hand.iterate()
    next(fields)
    next(fields)
    assert one.inbox.finish(hand, last_done=last_done) is True
    goes_on_at = 2 if last_done else 1
    assert one.state.done_offset() == goes_on_at
    assert nothing_to_take(one.inbox)
    one.inbox.put(one.state, [batch(TP, 10, 5)])  # was under way: not what comes next
    assert nothing_to_take(one.inbox)
    assert one.inbox.rewind(one.state) == goes_on_at
    one.inbox.put(one.state, [batch(TP, goes_on_at, 3)])
    assert take(one.inbox).batch.offset == goes_on_at


def test_an_exception_at_the_first_message_makes_nothing_done() -> None:
    one = One()
    hand = take(one.inbox)
    next(hand.iterate())
    assert one.inbox.finish(hand, last_done=False) is True
    assert one.state.done_offset() == 0
    assert one.state.epoch == -1, "no message is done: no master's term wrote the last one"


def test_the_epoch_is_that_of_the_last_message_that_is_done() -> None:
    state = PartitionState(TP, None, 0)
    inbox = inbox_with(state)
    inbox.put(state, [batch(TP, 0, 2, epoch=4), batch(TP, 2, 2, epoch=7)])
    inbox.finish(take(inbox, whole=True))
    assert state.epoch == 4
    hand = take(inbox)
    next(hand.iterate())
    inbox.finish(hand, last_done=False)
    assert (state.next_offset, state.epoch) == (2, 4)


# Taking back


def test_a_batch_taken_back_in_the_middle_ends_there_and_the_message_in_hand_counts() -> None:
    one = One()
    hand = take(one.inbox)
    fields = hand.iterate()
    next(fields)
    next(fields)
    assert one.inbox.rewind(one.state) == 2
    assert next(fields, None) is None
    assert one.inbox.finish(hand) is False
    assert one.state.done_offset() == 2


def test_what_is_taken_back_before_it_is_iterated_is_not_handed_out() -> None:
    # A pause and a resume between take() and iterate(): fetching goes on at the batch's start, not at its end.
    one = One()
    hand = take(one.inbox)
    assert one.inbox.rewind(one.state) == 0
    assert list(hand.iterate()) == []
    assert one.inbox.finish(hand) is False
    assert one.state.done_offset() == 0


def test_a_message_that_failed_after_its_batch_was_taken_back_comes_again() -> None:
    # A listener's message waits for its next attempt, the partition is paused and resumed, the attempt is given up.
    one = One()
    hand = take(one.inbox)
    fields = hand.iterate()
    next(fields)
    next(fields)
    assert one.inbox.rewind(one.state) == 2, "what is fetched meanwhile is behind the one in hand"
    one.inbox.put(one.state, [batch(TP, 2, 3)])
    assert one.inbox.finish(hand, last_done=False) is True
    assert nothing_to_take(one.inbox)
    assert one.inbox.rewind(one.state) == 1


def test_a_partition_is_released_when_its_message_in_hand_is_done() -> None:
    one = One()
    hand = take(one.inbox)
    next(hand.iterate())
    one.inbox.rewind(one.state)
    released: list[int] = []
    one.inbox.when_released(one.state, lambda: released.append(one.state.done_offset()))
    assert released == []
    one.inbox.finish(hand)
    assert released == [1]


def test_a_partition_without_anything_in_hand_is_released_at_once() -> None:
    one = One()
    one.inbox.rewind(one.state)
    released: list[bool] = []
    one.inbox.when_released(one.state, lambda: released.append(True))
    assert released == [True]


def test_a_lost_partition_is_released_and_what_was_in_hand_does_not_count() -> None:
    one = One()
    hand = take(one.inbox)
    fields = hand.iterate()
    next(fields)
    next(fields)
    released: list[bool] = []
    one.inbox.when_released(one.state, lambda: released.append(True))
    one.inbox.remove(one.state)
    assert released == [True]
    assert next(fields, None) is None
    assert one.inbox.finish(hand) is False
    assert one.state.done_offset() == 0
    assert one.inbox.buffered_bytes == 0


def test_a_partition_that_comes_back_waits_for_its_former_handler() -> None:
    one = One()
    busy = take(one.inbox)
    next(busy.iterate())
    one.inbox.remove(one.state)
    again = PartitionState(TP, None, 0)
    one.inbox.add(again)
    one.inbox.put(again, [batch(TP, 0, 5)])
    assert nothing_to_take(one.inbox), "two handlers would have the first message"
    released: list[bool] = []
    one.inbox.when_released(again, lambda: released.append(True))
    assert released == [], "nor may another member have it yet"
    one.inbox.finish(busy)
    assert released == [True]
    assert take(one.inbox).state is again


# Seeking


def test_a_seek_counts_at_once_and_the_message_in_hand_no_more() -> None:
    one = One()
    hand = take(one.inbox)
    fields = hand.iterate()
    next(fields)
    next(fields)
    assert one.inbox.rewind(one.state, 100) == 100
    assert one.state.done_offset() == 100
    assert next(fields, None) is None
    one.inbox.put(one.state, [batch(TP, 100, 5)])
    assert nothing_to_take(one.inbox), "the handler is still busy with a message of it"
    assert one.inbox.finish(hand) is False
    assert one.state.done_offset() == 100
    assert take(one.inbox).batch.offset == 100


def test_what_was_fetched_is_still_good_when_what_comes_next_is_gone() -> None:
    one = One()
    hand = take(one.inbox)
    one.inbox.skip_to(one.state, 50)
    assert list(map(offset_of, hand.iterate())) == [0, 1, 2, 3, 4]
    assert one.inbox.finish(hand) is False
    one.inbox.skip_to(one.state, 50)
    assert take(one.inbox).batch.offset == 5
    empty = One(batches=0)
    empty.inbox.skip_to(empty.state, 50)
    assert empty.state.done_offset() == 50


# Turns, limits, ends


def test_partitions_take_turns_and_one_batch_of_each_is_in_hand() -> None:
    states = [PartitionState(tp, None, 0) for tp in (TP, OTHER)]
    inbox = inbox_with(*states)
    for state in states:
        inbox.put(state, [batch(state.tp, 5 * number, 5) for number in range(3)])
    order = []
    for _ in range(6):
        hand = take(inbox)
        order.append(hand.state.tp)
        list(hand.iterate())
        inbox.finish(hand)
    assert order == [TP, OTHER] * 3
    for state in states:
        inbox.put(state, [batch(state.tp, 15, 5), batch(state.tp, 20, 5)])
    take(inbox)
    take(inbox)
    assert nothing_to_take(inbox)


def test_nothing_is_handed_out_while_the_lease_is_over() -> None:
    valid = False
    state = PartitionState(TP, None, 0)
    inbox = Inbox(lambda: valid)
    inbox.add(state)
    inbox.put(state, [batch(TP, 0, 5)])
    assert nothing_to_take(inbox)
    valid = True
    assert take(inbox).batch.offset == 0


def test_a_lease_that_ends_while_a_batch_is_in_hand_ends_it_at_its_slice() -> None:
    # As in a process that was frozen: its loop is late to take the batch back.
    valid = True
    state = PartitionState(TP, None, 0)
    inbox = Inbox(lambda: valid)
    inbox.add(state)
    inbox.put(state, [batch(TP, 0, 10 * SLICE_MESSAGES)])
    hand = take(inbox)
    fields = hand.iterate()
    assert offset_of(next(fields)) == 0
    valid = False
    assert [offset_of(each) for each in fields] == list(range(1, SLICE_MESSAGES))
    assert inbox.finish(hand) is True, "the rest is to come again"
    assert inbox.rewind(state) == SLICE_MESSAGES


def test_bytes_are_counted_until_the_handler_lets_go() -> None:
    one = One()
    size = one.inbox.buffered_bytes
    assert size == one.state.buffered_bytes > 0
    hand = take(one.inbox)
    assert one.inbox.buffered_bytes == size
    list(hand.iterate())
    one.inbox.finish(hand)
    assert one.inbox.buffered_bytes == size // 2
    one.inbox.rewind(one.state)
    assert one.inbox.buffered_bytes == one.state.buffered_bytes == 0


@pytest.mark.parametrize(("last_done", "done"), [(True, 2), (False, 1)])
def test_close_waits_for_nobody(last_done: bool, done: int) -> None:
    one = One()
    hand = take(one.inbox)
    fields = hand.iterate()
    next(fields)
    next(fields)
    one.inbox.close(last_done=last_done)
    assert one.state.done_offset() == done
    released: list[bool] = []
    one.inbox.when_released(one.state, lambda: released.append(True))
    assert released == [True]
    assert next(fields, None) is None
    assert one.inbox.finish(hand) is False
    assert one.state.done_offset() == done


def test_close_ends_a_revocation_that_waits_for_a_handler() -> None:
    one = One()
    next(take(one.inbox).iterate())
    released: list[bool] = []
    one.inbox.when_released(one.state, lambda: released.append(True))
    one.inbox.close(last_done=False)
    assert released == [True]


def test_handlers_get_the_error_that_ended_it() -> None:
    one = One()
    one.inbox.fail(ConfigError("no"))
    with one.inbox.lock, pytest.raises(ConfigError):
        one.inbox.take(whole=False)


def test_in_a_forks_child_the_batch_in_hand_ends() -> None:
    one = One()
    fields = take(one.inbox).iterate()
    next(fields)
    one.inbox.lock.acquire()  # as by a thread that the child does not have
    one.inbox.forked(ForkedError("consumer"))
    assert next(fields, None) is None
    with one.inbox.lock, pytest.raises(ForkedError):
        one.inbox.take(whole=False)


def test_a_waiting_handler_is_woken() -> None:
    one = One(batches=0)
    taken: list[InFlightBatch | None] = []

    def wait() -> None:
        with one.inbox.lock:
            while (hand := one.inbox.take(whole=False)) is None:
                one.inbox.filled.wait(60)
            taken.append(hand)

    thread = threading.Thread(target=wait)
    thread.start()
    one.inbox.put(one.state, [batch(TP, 0, 1)])
    thread.join(60)
    assert len(taken) == 1
