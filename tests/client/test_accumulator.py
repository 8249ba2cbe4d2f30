"""Where `send` puts messages: by value, without a loop or a network, and with threads that wait for room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.client.producer.accumulator import Accumulator
from metamq.client.producer.outgoing import MESSAGE_OVERHEAD_BYTES, Busy, Delivery, OutgoingBatch
from metamq.client.producer.partitioner import Partitioner, by_key_hash, partitioner_named
from metamq.client.producer.topic_buffer import chunk_bounds
from metamq.errors import (
    BufferFull,
    ClosedError,
    ConfigError,
    MessageTooLarge,
    PartitionNotFound,
    TopicNotFound,
)
from metamq.wire.compression import Codec
from metamq.wire.limits import BATCH_COUNT_MAX
from metamq.zk.cluster.topics import TopicConfig
from tests.parts import wait_until

NEVER_NS = 0
ALL_NS = 1 << 62


class Loopless:
    """A producer without a loop."""

    loop_thread = False

    def hurry(self) -> None:
        pass

    def in_loop(self, callback: Callable[..., object], *args: object) -> None:
        callback(*args)

    def check_not_inside(self) -> None:
        pass

    def is_loop_thread(self) -> bool:
        return self.loop_thread


def an_accumulator(
    *,
    batch_bytes: int = 1000,
    buffer_bytes: int = 10_000,
    wait_s: float | None = None,
    partitioner: Partitioner = by_key_hash,
    owner: Loopless | None = None,
) -> Accumulator:
    return Accumulator(
        batch_bytes=batch_bytes,
        buffer_bytes=buffer_bytes,
        message_bytes_max=5000,
        partitioner=partitioner,
        wake=lambda: None,
        wait_s=wait_s,
        owner=owner or Loopless(),
    )


def known(accumulator: Accumulator, partitions: dict[int, int] | None = None, **settings: int) -> TopicConfig:
    """Makes topic "t" known to the accumulator."""
    config = TopicConfig("t", partitions or {0: 4}, **settings)  # type: ignore[arg-type]
    if "t" not in accumulator.buffers:
        accumulator.send("t", b"")
        assert accumulator.resolved(config) == []
        for batch in accumulator.take(begun_before_ns=ALL_NS):
            accumulator.finished(batch)
    else:
        assert accumulator.resolved(config) == []
    return config


def take(accumulator: Accumulator) -> list[OutgoingBatch]:
    return accumulator.take(begun_before_ns=ALL_NS)


def key_for(number: int, count: int) -> bytes:
    """A key that goes to a place."""
    return next(key for n in range(10_000) if by_key_hash("t", key := b"%d" % n, count) == number)


def batch_of(delivery: Delivery) -> OutgoingBatch:
    return delivery._batch


# -- placing ----------------------------------------------------------------------------------------


def test_keyless_messages_float_together_and_keyed_ones_go_to_their_partition() -> None:
    accumulator = an_accumulator()
    known(accumulator, {0: 2, 1: 2})
    for number in range(4):
        accumulator.send("t", b"float")
        accumulator.send_full("t", b"keyed", key_for(number, 4), None, None, None)
        accumulator.send_full("t", b"named", None, None, "1-1", None)
    batches = {(batch.broker_id, batch.partition): list(batch.values) for batch in take(accumulator)}
    assert batches == {
        (-1, -1): [b"float"] * 4,
        (0, 0): [b"keyed"],
        (0, 1): [b"keyed"],
        (1, 0): [b"keyed"],
        (1, 1): [b"named"] * 3 + [b"keyed", b"named"],
    }


def test_a_named_partition_outranks_the_key() -> None:
    accumulator = an_accumulator()
    known(accumulator)
    accumulator.send_full("t", b"x", key_for(0, 4), None, "0-3", None)
    (batch,) = take(accumulator)
    assert (batch.partition, batch.keys) == (3, [key_for(0, 4)])


def test_a_batch_closes_at_its_size_and_nothing_is_taken_before_its_time() -> None:
    accumulator = an_accumulator(batch_bytes=10 * (10 + MESSAGE_OVERHEAD_BYTES))
    known(accumulator)
    for _ in range(25):
        accumulator.send("t", b"x" * 10)
    assert [len(batch.values) for batch in accumulator.take(begun_before_ns=NEVER_NS)] == [10, 10]
    assert [len(batch.values) for batch in take(accumulator)] == [5]


def test_columns_that_come_late_are_filled_up() -> None:
    accumulator = an_accumulator()
    known(accumulator, {0: 1})
    accumulator.send_full("t", b"a", b"k", None, None, None)
    accumulator.send_full("t", b"b", b"k", {"h": b"1"}, None, None)
    accumulator.send_full("t", b"c", None, None, "0-0", 7)
    (batch,) = take(accumulator)
    assert batch.keys == [b"k", b"k", None]
    assert batch.headers == [None, {"h": b"1"}, None]
    assert batch.timestamps == [batch.timestamp_us, batch.timestamp_us, 7]


def test_more_partitions_keep_messages_of_a_key_out_of_batches_for_others() -> None:
    accumulator = an_accumulator()
    config = known(accumulator, {0: 2, 1: 2})
    accumulator.send_full("t", b"old", key_for(2, 4), None, None, None)
    larger = TopicConfig("t", {0: 4, 1: 2}, id=config.id)
    assert accumulator.resolved(larger) == []
    accumulator.send_full("t", b"new", key_for(2, 6), None, None, None)
    assert [(b.broker_id, b.partition, b.values) for b in take(accumulator)] == [(1, 0, [b"old"]), (0, 2, [b"new"])]


def test_where_batches_wait_open_ones_grow() -> None:
    accumulator = an_accumulator()
    known(accumulator, {0: 2, 1: 1})
    for number in range(3):
        accumulator.send_full("t", b"x", key_for(number, 3), None, None, None)
    accumulator.send("t", b"float")

    def taken(busy: Busy) -> list[tuple[int, int]]:
        return [(b.broker_id, b.partition) for b in accumulator.take(begun_before_ns=ALL_NS, busy=busy)]

    assert taken(Busy({0, 1}, {})) == []
    assert taken(Busy({0}, {"t": {(1, 0)}, "other": {(0, 0), (0, 1)}})) == [(-1, -1)]
    accumulator.send("t", b"float")
    assert taken(Busy(set(), {"t": {(0, 0), (0, 1), (1, 0)}})) == []
    assert taken(Busy(set(), {"t": {(0, 0), (0, 1)}})) == [(-1, -1), (1, 0)]
    assert len(accumulator.take(begun_before_ns=ALL_NS, busy=Busy({0}, {}), busy_before_ns=ALL_NS)) == 2


# -- messages for a topic that is not known yet -----------------------------------------------------


def test_messages_wait_in_order_until_the_partitions_are_known() -> None:
    accumulator = an_accumulator()
    key = key_for(2, 4)
    deliveries = [accumulator.send_full("t", b"%d" % n, key, None, None, None) for n in range(3)]
    many = accumulator.send_many("t", [b"3", b"4"], [key, key_for(0, 4)])
    last = accumulator.send_full("t", b"5", key, None, None, None)
    assert accumulator.unresolved() == ["t"]
    assert take(accumulator) == []
    before = accumulator.buffered_bytes
    assert before > 0
    assert accumulator.resolved(TopicConfig("t", {0: 4})) == []
    values = {batch.partition: [] for batch in (*many._batches(), batch_of(last))}  # type: ignore[var-annotated]
    for batch in take(accumulator):
        values[batch.partition] += batch.values
        accumulator.finished(batch)
    assert values == {2: [b"0", b"1", b"2", b"3", b"5"], 0: [b"4"]}
    assert [delivery._index for delivery in deliveries] == [0, 1, 2]
    assert accumulator.buffered_bytes == 0


def test_messages_that_have_no_place_fail_alone() -> None:
    def touchy(topic: str, key: bytes, count: int) -> int:
        if key == b"bad":
            raise ZeroDivisionError("mine")
        return 0

    accumulator = an_accumulator(partitioner=touchy)
    wrong = accumulator.send_full("t", b"x", None, None, "0-7", None)
    bad = accumulator.send_full("t", b"x", b"bad", None, None, None)
    bad_many = accumulator.send_many("t", [b"x", b"y"], [b"good", b"bad"])
    good = accumulator.send_full("t", b"x", b"good", None, None, None)
    failed = accumulator.resolved(TopicConfig("t", {0: 4}))
    assert len(failed) == 3
    assert isinstance(wrong.exception(0), PartitionNotFound)
    for delivery in (bad, bad_many):
        error = delivery.exception(0)
        assert isinstance(error, ConfigError)
        assert "the partitioner failed for a message to topic 't': ZeroDivisionError('mine')" in str(error)
    assert not good.done()
    assert [batch.values for batch in take(accumulator)] == [[b"x"]]


def test_a_topic_that_does_not_exist_gives_its_room_back() -> None:
    accumulator = an_accumulator()
    accumulator.send_full("t", b"x" * 500, b"k", None, None, None)
    accumulator.send_many("t", [b"x" * 500], [b"k"])
    accumulator.send("t", b"x" * 500)
    for batch in accumulator.forget("t"):
        batch.complete(-1, TopicNotFound("t"))
        accumulator.finished(batch)
    assert accumulator.buffered_bytes == 0
    assert accumulator.outstanding == {}


def test_a_list_that_waits_for_its_topic_is_placed_however_full_the_buffer_is() -> None:
    accumulator = an_accumulator(buffer_bytes=2000)
    many = accumulator.send_many("t", [b"x" * 400] * 20, [b"%d" % n for n in range(20)])
    assert accumulator.resolved(TopicConfig("t", {0: 4})) == []
    assert sum(len(batch.values) for batch in take(accumulator)) == 20
    assert not many.done()


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gives", [-1, 4, None, "0", 0.5])
def test_a_partitioner_that_gives_nonsense(gives: object) -> None:
    accumulator = an_accumulator(partitioner=lambda *_: gives)  # type: ignore[arg-type, return-value]
    known(accumulator)
    with pytest.raises(ConfigError, match=f"the partitioner returned {gives!r} for a topic of 4 partitions"):
        accumulator.send_full("t", b"x", b"k", None, None, None)


def test_partitioners_by_name() -> None:
    assert [partitioner_named("key_hash")("t", b"carrier-%d" % n, 12) for n in range(6)] == [
        by_key_hash("t", b"carrier-%d" % n, 12) for n in range(6)
    ]
    assert by_key_hash("t", b"123456789", 1 << 32) == 0xE3069283  # the check value of CRC-32C: keys never move
    assert by_key_hash("t", b"123456789", 16) == 0xE
    in_turn = partitioner_named("round_robin")
    assert [in_turn("t", b"k", 3) for _ in range(4)] == [0, 1, 2, 0]
    assert in_turn("other", b"k", 3) == 0
    with pytest.raises(ConfigError, match="unknown partitioner 'keyhash'"):
        partitioner_named("keyhash")


@pytest.mark.parametrize("prefix", [b"", b"user-", b"carrier-", b"station/", b"0"])
@pytest.mark.parametrize("partitions", [2, 4])
def test_few_keys_that_differ_in_their_last_digit_use_all_partitions(prefix: bytes, partitions: int) -> None:
    assert {by_key_hash("t", prefix + b"%d" % n, partitions) for n in range(10)} == set(range(partitions))


def test_too_large_a_message() -> None:
    accumulator = an_accumulator()
    with pytest.raises(MessageTooLarge, match="has 5,001 bytes, the limit is 5,000"):
        accumulator.send("t", b"x" * (5001 - MESSAGE_OVERHEAD_BYTES))
    known(accumulator, max_message_bytes=100)
    for send in (
        lambda: accumulator.send("t", b"x" * 100),
        lambda: accumulator.send_full("t", b"x" * 60, b"k" * 60, None, None, None),
        lambda: accumulator.send_full("t", b"x", None, {"h": b"x" * 100}, None, None),
        lambda: accumulator.send_many("t", [b"x", b"x" * 100], None),
    ):
        with pytest.raises(MessageTooLarge, match="the limit is 100"):
            send()
    assert accumulator.outstanding.keys() == set()


def test_a_limit_that_becomes_known_later_holds_for_each_message_by_itself() -> None:
    accumulator = an_accumulator()
    headers = {"h": b"x" * 100}
    first = [accumulator.send("t", value) for value in (b"a", b"x" * 100, b"b")]
    second = accumulator.send_full("t", b"c", None, headers, None, None)
    third = accumulator.send_full("t", b"d", None, None, None, 7)
    keyed = [accumulator.send_full("t", value, b"k", None, None, None) for value in (b"e", b"x" * 100)]
    many = [accumulator.send_many("t", [b"f", b"x" * 100], keys) for keys in (None, [b"k", b"k"])]
    failed = accumulator.resolved(TopicConfig("t", {0: 1}, max_message_bytes=100))
    taken = take(accumulator)
    assert [list(batch.values) for batch in taken] == [[b"a", b"b"], [b"d"], [b"f"], [b"e"]]
    for batch in taken:
        batch.broker_id = batch.partition = 0
        batch.complete(10, None)
        accumulator.finished(batch)
    refused = (first[1], second, keyed[1], *many)
    assert len(failed) == len(refused)
    for delivery in refused:
        error = delivery.exception(0)
        assert isinstance(error, MessageTooLarge)
        assert "metamq topic alter t --max-message-bytes" in str(error)
    assert [delivery.result(0).offset for delivery in (first[0], first[2], keyed[0])] == [10, 11, 10]
    assert third.result(0).timestamp == 7
    assert accumulator.buffered_bytes == 0
    assert not accumulator.outstanding


def test_all_columns_count_for_the_size_of_a_batch() -> None:
    accumulator = an_accumulator(batch_bytes=400_000, buffer_bytes=1 << 30)
    known(accumulator, {0: 1})
    for number in range(60_000):
        accumulator.send_full("t", b"", b"", {} if number % 2 else {"": b""}, None, 1 << 50)
    for batch in take(accumulator):
        encoded = batch.encode(Codec.NONE, 1, 0)
        assert len(encoded) <= 400_000 * 1.25


def test_a_wrong_partition_and_a_wrong_topic() -> None:
    accumulator = an_accumulator()
    known(accumulator)
    with pytest.raises(PartitionNotFound, match=r"no partition '0-4'\. It has: 0-0, 0-1, 0-2, 0-3\."):
        accumulator.send_full("t", b"x", None, None, "0-4", None)
    with pytest.raises(ConfigError, match="partition 'first' is not a broker id"):
        accumulator.send_full("t", b"x", None, None, "first", None)
    with pytest.raises(ConfigError, match="topic 'a/b' has '/'"):
        accumulator.send("a/b", b"x")


# -- the bound --------------------------------------------------------------------------------------


def fill(accumulator: Accumulator) -> list[OutgoingBatch]:
    """Fills the buffer; returns what is to be finished to make room."""
    known(accumulator)
    accumulator.send_many("t", [b"x" * 900] * 12, None)
    return take(accumulator)


class Sending:
    """A `send` in a thread of its own."""

    def __init__(self, send: Callable[[], Delivery]) -> None:
        self.delivery: Delivery | None = None
        self.error: BaseException | None = None
        self._send = send
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.delivery = self._send()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()


def blocked(accumulator: Accumulator, send: Callable[[], Delivery]) -> Sending:
    sending = Sending(send)
    wait_until(lambda: len(accumulator.capacity._waiters) == 1)  # type: ignore[attr-defined]
    return sending


def test_send_raises_when_it_may_not_wait() -> None:
    accumulator = an_accumulator(wait_s=0)
    batches = fill(accumulator)
    for send in (
        lambda: accumulator.send("t", b"x"),
        lambda: accumulator.send_full("t", b"x", b"k", None, None, None),
        lambda: accumulator.send_full("unknown", b"x", b"k", None, None, None),
        lambda: accumulator.send_many("t", [b"x"], None),
    ):
        with pytest.raises(BufferFull, match=r"the producer's buffer of 10,000 bytes is full"):
            send()
    assert len(accumulator.outstanding) == len(batches)
    for batch in batches:
        accumulator.finished(batch)
    assert accumulator.buffered_bytes == 0
    accumulator.send("t", b"x")


def test_send_waits_for_a_while() -> None:
    accumulator = an_accumulator(wait_s=0.05)
    fill(accumulator)
    with pytest.raises(BufferFull):
        accumulator.send("t", b"x")


def test_send_never_waits_in_the_thread_that_makes_room() -> None:
    owner = Loopless()
    accumulator = an_accumulator(owner=owner)
    fill(accumulator)
    owner.loop_thread = True
    with pytest.raises(BufferFull):
        accumulator.send("t", b"x")


def test_send_waits_until_there_is_room() -> None:
    accumulator = an_accumulator()
    batches = fill(accumulator)
    sending = blocked(accumulator, lambda: accumulator.send("t", b"x"))
    while accumulator.buffered_bytes >= 10_000:
        assert sending.waits
        accumulator.finished(batches.pop())
    sending.end()
    assert sending.delivery is not None


def test_close_ends_the_wait() -> None:
    accumulator = an_accumulator()
    fill(accumulator)
    sending = blocked(accumulator, lambda: accumulator.send("t", b"x"))
    accumulator.close()
    sending.end()
    assert isinstance(sending.error, ClosedError)


def test_a_topic_that_becomes_known_during_the_wait() -> None:
    accumulator = an_accumulator()
    accumulator.send("late", b"first")
    batches = fill(accumulator)
    sending = blocked(accumulator, lambda: accumulator.send_full("late", b"x", key_for(2, 4), None, None, None))
    accumulator.resolved(TopicConfig("late", {0: 4}))
    for batch in batches:
        accumulator.finished(batch)
    sending.end()
    assert sending.delivery is not None
    assert [batch.partition for batch in take(accumulator) if b"x" in batch.values] == [2]


def test_a_topic_that_goes_during_the_wait() -> None:
    accumulator = an_accumulator()
    batches = fill(accumulator)
    sending = blocked(accumulator, lambda: accumulator.send_full("t", b"x", b"k", None, None, None))
    accumulator.forget("t")
    for batch in batches:
        accumulator.finished(batch)
    sending.end()
    assert accumulator.unresolved() == ["t"]
    assert accumulator.resolved(TopicConfig("t", {0: 1})) == []
    assert [batch.values for batch in take(accumulator)] == [[b"x"]]


def test_the_hot_path_and_close_at_once() -> None:
    accumulator = an_accumulator(buffer_bytes=1 << 30)
    known(accumulator)
    accepted: list[Delivery] = []

    def send_on() -> None:
        try:
            while True:
                accepted.append(accumulator.send("t", b"x"))
        except ClosedError:
            pass

    threads = [threading.Thread(target=send_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(accepted) > 2000)
    accumulator.close()
    for thread in threads:
        thread.join(60)
    assert sum(len(batch.values) for batch in take(accumulator)) == len(accepted)


# -- in a fork's child ------------------------------------------------------------------------------


def test_forked_all_that_was_accepted_fails_here() -> None:
    accumulator = an_accumulator()
    known(accumulator)
    delivery = accumulator.send("t", b"x")
    accumulator.lock.acquire()  # as another thread of the parent may have
    accumulator.forked(ConfigError("forked"))
    assert isinstance(delivery.exception(0), ConfigError)
    for _ in range(2):
        with pytest.raises(ConfigError, match="forked"):
            accumulator.send("t", b"y")


# -- chunks -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 500))
def test_chunks_are_whole_in_order_and_within_their_size(sizes: list[int], batch_bytes: int) -> None:
    bounds = chunk_bounds(sizes, batch_bytes)
    assert [i for start, end, _ in bounds for i in range(start, end)] == list(range(len(sizes)))
    for start, end, size in bounds:
        assert size == sum(sizes[start:end]) + (end - start) * MESSAGE_OVERHEAD_BYTES
        assert end - start == 1 or sum(sizes[start:end]) <= batch_bytes


def test_chunks_have_no_more_messages_than_a_batch_may() -> None:
    bounds = chunk_bounds([0] * (BATCH_COUNT_MAX + 5), 1 << 40)
    assert [(start, end) for start, end, _ in bounds] == [(0, BATCH_COUNT_MAX), (BATCH_COUNT_MAX, BATCH_COUNT_MAX + 5)]


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before
