"""`run(order="key")` without a cluster: any sequence of steps on windows, against a model of what is finished."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from metamq.client.consumer.key_order import Free, KeyWindows
from metamq.client.fetch import key_window
from metamq.client.fetch.inbox import Inbox, InFlightBatch, PartitionState
from metamq.client.fetch.key_window import KeyWindow
from metamq.client.fetch.message_batch import MessageBatch
from metamq.errors import UndecodableBatch
from metamq.wire.batch import read_header, stamp
from metamq.wire.columns import encode
from tests.client.inbox_parts import TP
from tests.examples import examples

SPAN = 8
KEYS = [b"a", b"b", b"c", None]


def key_of(offset: int) -> bytes | None:
    return KEYS[(offset * 7 // 3) % len(KEYS)]


def batch(offset: int, count: int, *, epoch: int = 1) -> MessageBatch[Any]:
    offsets = range(offset, offset + count)
    data = encode([b"%d" % number for number in offsets], base_timestamp_us=0, keys=[key_of(each) for each in offsets])
    stamp(data, 0, epoch=epoch, base_offset=offset, batch_id=1, append_time_us=0, unflushed_bytes=0)
    return MessageBatch(TP, read_header(data), memoryview(data), offset)


class Receiver:
    """Releases windows, as the receivers of both APIs do, and notes the offset to fetch from."""

    def __init__(self) -> None:
        self.inbox = Inbox(lambda: self.lease)
        self.lease = True
        self.refetched: Callable[[], None] = lambda: None

    def release(self, in_flight: InFlightBatch, *, last_done: bool) -> None:
        if self.inbox.finish(in_flight, last_done=last_done):
            self.refetched()

    def consumed(self) -> None:
        pass


class Model:
    """One partition whose offset n has the key key_of(n), any number of handlers, and the loop."""

    def __init__(self) -> None:
        self.receiver = Receiver()
        self.inbox = self.receiver.inbox
        self.free: list[Free] = []
        self.windows = KeyWindows(self.receiver, SPAN, self.free.append, None)  # type: ignore[arg-type]
        self.running: list[Free] = []
        self.finished: set[int] = set()
        """The messages that were finished since the last seek, by this owner or an earlier one."""
        self.repeated = False
        """True if finished messages may come again: the lease ended, or a message failed."""
        self.epoch = 1
        self.epochs: dict[int, int] = {}
        """The epoch of each fetched message."""
        self.own(0)

    def own(self, offset: int) -> None:
        self.state = PartitionState(TP, None, offset, starting=False)
        self.fetch_offset = offset
        self.paused = False
        self.released = False
        self.inbox.add(self.state)
        self.receiver.refetched = self.refetch

    # The loop

    def refetch(self) -> None:
        if self.state.rewinding:
            self.fetch_offset = self.inbox.rewind(self.state)

    def fetched(self, count: int) -> None:
        if not self.paused and not self.state.closing:
            self.inbox.put(self.state, [batch(self.fetch_offset, count, epoch=self.epoch)])
            if not self.state.rewinding:
                self.epochs |= dict.fromkeys(range(self.fetch_offset, self.fetch_offset + count), self.epoch)
                self.fetch_offset += count

    def promoted(self) -> None:
        self.epoch += 1

    def pause(self) -> None:
        self.paused = True
        self.inbox.rewind(self.state)

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.fetch_offset = self.inbox.rewind(self.state)

    def seek(self, offset: int) -> None:
        if not self.state.closing:
            self.fetch_offset = self.inbox.rewind(self.state, offset)
            self.finished = set(range(offset))

    def revoke(self) -> None:
        if not self.state.closing:
            self.state.closing = True
            self.inbox.rewind(self.state)
            self.inbox.when_released(self.state, self.note_release)

    def note_release(self) -> None:
        self.released = True

    def next_owner(self) -> None:
        if self.released:
            assert not self.running, "the partition is given away while a message is running"
            done = self.state.done_offset()
            if not self.repeated:
                assert self.finished == set(range(done)), "finished messages come again"
            self.inbox.remove(self.state)
            self.finished, self.repeated = set(range(done)), False
            self.own(done)

    def lease_ends(self) -> None:
        self.receiver.lease = False
        self.repeated = True

    def lease_is_back(self) -> None:
        self.receiver.lease = True
        if not self.paused and not self.state.closing:
            self.fetch_offset = self.inbox.rewind(self.state)

    # The handlers

    def take(self) -> None:
        with self.inbox.lock:
            self.inbox.take_window(self.windows.open)

    def begin(self, number: int) -> None:
        if self.free:
            self.begin_free(self.free.pop(number % len(self.free)))

    def begin_free(self, free: Free) -> None:
        window, message = free
        done = self.state.done_offset()
        is_ours = self.state.in_flight is window
        if not self.windows.begin(window, message):
            return
        assert is_ours, "a message of a partition that is not ours any more, or after a seek"
        assert self.receiver.lease
        assert message.offset < done + SPAN
        assert message.key == key_of(message.offset)
        if message.key is not None:
            same = {each for each in range(message.offset) if key_of(each) == message.key}
            assert same <= self.finished, "an earlier message of the key is unfinished"
        assert all(message.offset != other.offset for _, other in self.running), "it is processed twice at a time"
        self.running.append(free)

    def end(self, number: int, done: bool) -> None:
        if not self.running:
            return
        window, message = self.running.pop(number % len(self.running))
        if self.state.in_flight is window:
            if done:
                self.finished.add(message.offset)
            self.repeated = self.repeated or not done
        following = self.windows.end(window, message, done=done)
        if following is not None:
            self.begin_free((window, following))

    def stop(self) -> None:
        self.repeated = True
        self.windows.stop()

    def check(self) -> None:
        done = self.state.done_offset()
        assert set(range(done)) <= self.finished, "a commit would pass an unfinished message"
        assert self.state.epoch_before(done) in (-1, self.epochs.get(done - 1)), "a commit with another epoch"
        window, buffered = self.state.in_flight, self.state.buffered
        assert self.inbox.buffered_bytes == sum(
            each.size_bytes for each in [*buffered, *([window.batch] if window else [])]
        )
        if buffered and window is not None and window.takes(buffered[0]):
            assert self.state in self.inbox._ready, "there is room, and no handler knows"
        assert self.running or not self.inbox._detached, "the partition waits for a window that is over"

    def drain(self) -> None:
        """Whatever came before, nothing is stuck: each message is processed in the end."""
        self.lease_is_back()
        while self.free or self.running:
            self.begin(0)
            self.end(0, True)
        if self.state.closing:
            self.next_owner()
        self.resume()
        self.refetch()
        self.fetched(3)
        end = self.fetch_offset
        self.finish_all()
        assert self.state.done_offset() == end
        assert self.state.in_flight is None
        assert self.inbox.buffered_bytes == 0
        assert not self.windows

    def finish_all(self) -> None:
        for _ in range(1000):
            self.take()
            self.begin(0)
            self.end(0, True)
            self.refetch()
            self.check()
            if not self.free and not self.running and not self.state.buffered and self.state.in_flight is None:
                return
        raise AssertionError("it is stuck")

    def step(self, chance: random.Random) -> str:
        name = chance.choice(STEPS)
        arguments: dict[str, Any] = {
            "fetched": (chance.randint(1, 12),),
            "seek": (chance.randint(0, 30),),
            "begin": (chance.randrange(9),),
            "end": (chance.randrange(9), chance.random() < 0.95),
        }
        getattr(self, name)(*arguments.get(name, ()))
        return f"{name}{arguments.get(name, ())}"


STEPS = [
    *["fetched", "take", "begin", "begin", "end"] * 6,
    *["refetch", "next_owner"] * 2,
    *["pause", "resume", "seek", "revoke", "promoted", "lease_ends", "lease_is_back", "stop"],
]


def test_any_sequence_of_steps_keeps_the_order_of_keys_and_commits_only_what_is_finished() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(examples(1500)):
        model = Model()
        steps = []
        try:
            for _ in range(60):
                steps.append(model.step(chance))
                model.check()
            model.drain()
        except BaseException:
            print("steps", *steps, sep="\n")
            raise


def test_a_long_message_stops_its_partition_after_the_span_and_memory_is_freed_behind_it() -> None:
    model = Model()
    model.fetched(4)
    model.take()
    slow = model.free.pop(0)
    model.begin_free(slow)
    for _ in range(20):
        model.fetched(4)
        model.take()
        while model.free:
            model.begin(0)
        model.running.remove(slow)
        while model.running:
            model.end(0, True)
        model.running.append(slow)
    assert model.state.done_offset() == 0
    assert max(model.finished) < SPAN
    assert [running.offset for running in window_of(model).running] == [0]
    model.end(0, True)
    model.finish_all()
    assert model.state.done_offset() == 84


def window_of(model: Model) -> KeyWindow:
    assert isinstance(model.state.in_flight, KeyWindow)
    return model.state.in_flight


def test_finished_batches_are_dropped_while_the_window_is_open() -> None:
    model = Model()
    for _ in range(100):
        model.fetched(4)
        model.take()
        while model.free:
            model.begin(0)
        while len(model.running) > 1:
            model.end(0, True)
        assert window_of(model).batch.size_bytes <= 4 * batch(1000, 4).size_bytes
    assert model.state.done_offset() > 380


@pytest.mark.parametrize("before", [0, 6])
def test_a_batch_that_cannot_be_decoded_is_raised_after_the_messages_before_it(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = MessageBatch.undecoded_messages

    def undecoded(one: MessageBatch[Any]) -> Any:
        if one.offset == before:
            raise UndecodableBatch(*TP, before, before + 4, "keys")
        return decode(one)

    monkeypatch.setattr(MessageBatch, "undecoded_messages", undecoded)
    model = Model()
    if before:
        model.fetched(before)
    model.fetched(4)
    with pytest.raises(UndecodableBatch):
        model.finish_all()
    assert model.finished == set(range(before))
    model.stop()
    assert model.state.done_offset() == model.fetch_offset == before


def begun_but_for(offsets: set[int], *, finished: set[int]) -> Model:
    """A model with 12 fetched messages, of which the first 8 are in the window: running, except for some."""
    model = Model()
    model.fetched(12)
    model.take()
    for window, message in [*model.free]:
        if message.offset not in offsets:
            model.free.remove((window, message))
            model.begin_free((window, message))
    while found := [free for free in model.running if free[1].offset in finished]:
        model.end(model.running.index(found[0]), True)
    return model


def test_unfinished_messages_below_an_accepted_loss_are_delivered_again() -> None:
    model = begun_but_for(set(), finished=set(range(1, 8)))
    assert model.state.done_offset() == 0
    assert model.inbox.take_back_to(model.state, 6, 1) == 0
    assert model.state.done_offset() == 0
    model.finished, model.repeated, model.fetch_offset = set(), True, 0
    model.drain()


def test_messages_below_an_accepted_loss_are_processed_before_its_error() -> None:
    model = begun_but_for({0}, finished=set(range(2, 8)))
    model.inbox.drop_from(model.state, 6)
    assert model.state.in_flight is not None, "offset 0 is not processed yet"
    while model.free or model.running:
        model.begin(0)
        model.end(0, True)
    assert model.state.in_flight is None
    assert model.finished >= set(range(6))
    assert max(model.finished) < 8
    assert model.state.done_offset() >= 6
    assert not model.state.rewinding, "the error about the lost messages stays"


def test_a_window_takes_no_more_than_a_batch_of_the_largest_size_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_window, "PLAIN_BYTES_MAX", 3 * batch(0, 1).plain_bytes)
    model = Model()
    for _ in range(6):
        model.fetched(1)
    for _ in range(6):
        model.take()
    assert window_of(model).batch.end_offset == 3
    model.finish_all()
    assert model.state.done_offset() == 6
