"""FetchRequestQueue by value: time is an argument, so nothing waits here."""

from __future__ import annotations

import itertools
import random

import pytest

from metamq.client.fetch.fetch_queue import DELAY_FIRST_S, DELAY_MAX_S, FetchRequest, FetchRequestQueue
from metamq.client.net.cluster import Source
from metamq.zk.names import partition_name
from metamq.zk.partitions import TopicPartition


def request(index: int, broker_id: int = 0) -> FetchRequest:
    return FetchRequest(TopicPartition("t", partition_name(broker_id, index)), "id", Source(broker_id), index, 0)


def queue() -> FetchRequestQueue:
    return FetchRequestQueue(lambda source: None)


def test_what_is_due_comes_in_the_order_of_its_time() -> None:
    requests = queue()
    late, soon, now = request(0), request(1), request(2)
    requests.put(late, 3.0)
    requests.put(soon, 2.0)
    requests.put(now, 1.0)
    assert requests.take(Source(0), 0.5) == []
    assert requests.take(Source(0), 2.0) == [now, soon]
    assert requests.next_due(Source(0)) == 3.0
    assert requests.take(Source(0), 3.0) == [late]
    assert requests.next_due(Source(0)) is None


def test_what_is_due_at_one_time_keeps_its_order() -> None:
    requests = queue()
    same = [request(index) for index in range(50)]
    for each in same:
        requests.put(each, 1.0)
    assert requests.take(Source(0), 1.0) == same


def test_no_more_than_asked_for_is_taken() -> None:
    requests = queue()
    same = [request(index) for index in range(5)]
    for each in same:
        requests.put(each, 1.0)
    same[1].cancelled = True
    assert requests.take(Source(0), 1.0, 2) == [same[0], same[2]]
    assert requests.next_due(Source(0)) == 1.0
    assert requests.take(Source(0), 1.0, 9) == same[3:]


def test_each_broker_has_a_queue_of_its_own() -> None:
    requests = queue()
    zero, one = request(0, broker_id=0), request(0, broker_id=1)
    requests.put(zero, 1.0)
    requests.put(one, 2.0)
    assert requests.take(Source(1), 1.5) == []
    assert requests.next_due(Source(1)) == 2.0
    assert requests.take(Source(0), 1.5) == [zero]
    assert requests.take(Source(7), 9.0) == []


def test_a_waiting_taker_is_woken_for_its_broker() -> None:
    woken: list[Source] = []
    requests = FetchRequestQueue(woken.append)
    requests.put(request(0, broker_id=3), 1.0)
    requests.put(request(0, broker_id=5), 1.0)
    assert woken == [Source(3), Source(5)]


def test_a_cancelled_request_is_dropped_and_nobody_waits_for_it() -> None:
    requests = queue()
    first, second = request(0), request(1)
    requests.put(first, 1.0)
    requests.put(second, 2.0)
    first.cancelled = True
    assert requests.next_due(Source(0)) == 2.0
    second.cancelled = True
    assert requests.take(Source(0), 9.0) == []


def test_a_busy_partition_does_not_starve_its_neighbours() -> None:
    # Every taken request comes back at once, as after data: whoever waited goes before it.
    requests = queue()
    busy = [request(index) for index in range(3)]
    for each in busy:
        requests.put(each, 0.0)
    quiet = request(9)
    requests.put(quiet, 5.0)
    turns: list[FetchRequest] = []
    for tick in range(10):
        for each in requests.take(Source(0), float(tick)):
            turns.append(each)
            requests.put(each, float(tick) + 1.0)
    assert [turns.count(each) for each in busy] == [10, 10, 10]
    assert turns.count(quiet) == 5


def test_delays_double_up_to_a_limit_and_are_spread() -> None:
    grown = request(0)
    delays = [grown.grow_delay() for _ in range(12)]
    wanted = [min(DELAY_FIRST_S * 2**step, DELAY_MAX_S) for step in range(12)]
    for delay, middle in zip(delays, wanted, strict=True):
        assert 0.8 * middle <= delay <= 1.2 * middle
    assert wanted[-1] == DELAY_MAX_S
    # A thousand consumers that lost one broker do not come back as one.
    spread = {request(0).grow_delay() for _ in range(100)}
    assert len(spread) > 90


def test_after_data_the_delay_begins_anew() -> None:
    grown = request(0)
    for _ in range(8):
        grown.grow_delay()
    grown.delay_s = 0.0
    assert grown.grow_delay() <= 1.2 * DELAY_FIRST_S


def test_a_broker_that_is_back_is_asked_at_once() -> None:
    woken: list[Source] = []
    requests = FetchRequestQueue(woken.append)
    far, gone, other = request(0), request(1), request(0, broker_id=1)
    for each in (far, gone, other):
        requests.put(each, 100.0)
    gone.cancelled = True
    woken.clear()
    requests.hurry(Source(0), 1.0)
    assert woken == [Source(0)]
    assert requests.take(Source(0), 1.0) == [far]
    assert requests.next_due(Source(1)) == 100.0


def test_hurrying_keeps_the_order_and_delays_nothing() -> None:
    requests = queue()
    overdue, later = request(0), request(1)
    requests.put(later, 9.0)
    requests.put(overdue, 1.0)
    requests.hurry(Source(0), 5.0)
    assert requests.take(Source(0), 5.0) == [overdue, later]


@pytest.mark.parametrize("seed", [random.randrange(2**32)], ids=["random"])
def test_random_puts_cancels_and_takes_agree_with_a_sorted_list(seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    requests = queue()
    model: list[tuple[float, int, FetchRequest]] = []
    numbers = itertools.count()
    now = 0.0
    for _ in range(3_000):
        step = chance.random()
        if step < 0.5:
            due = now + chance.choice([0.0, 0.5, 1.0, 3.0])
            each = request(0)
            requests.put(each, due)
            model.append((due, next(numbers), each))
        elif step < 0.6 and model:
            chance.choice(model)[2].cancelled = True
        elif step < 0.65:
            requests.hurry(Source(0), now)
            model = [(min(due, now), number, each) for due, number, each in model]
        else:
            now += chance.random()
            model.sort(key=lambda entry: entry[:2])
            wanted = [each for due, _, each in model if due <= now and not each.cancelled]
            model = [entry for entry in model if entry[0] > now]
            assert requests.take(Source(0), now) == wanted
        live = [due for due, _, each in model if not each.cancelled]
        assert requests.next_due(Source(0)) == (min(live) if live else None)
