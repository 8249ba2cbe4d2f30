"""Any sequence of steps on an inbox, against a model that knows nothing but the next offset."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from metamq.client.fetch.inbox import Inbox, InFlightBatch, PartitionState
from metamq.zk.partitions import TopicPartition
from tests.client.inbox_parts import OTHER, TP, batch, offset_of, take


@dataclass(eq=False)
class Handler:
    """Has at most one batch; `in_hand` is the offset of its last message, None before the first and of a whole one."""

    hand: InFlightBatch | None = None
    fields: Iterator[tuple[Any, ...]] | None = None
    in_hand: int | None = None


@dataclass(eq=False)
class Partition:
    """One partition as the model sees it: what is done, and what has to come next."""

    state: PartitionState
    done: int = 0
    expected: int = 0
    fetch_offset: int = 0
    paused: bool = False
    released: list[bool] = field(default_factory=list)


class InboxModel:
    """The loop and three handlers, over logs in which offset n holds message n."""

    def __init__(self) -> None:
        self.inbox = Inbox(lambda: True)
        self.handlers = [Handler() for _ in range(3)]
        self.partitions = {tp: Partition(PartitionState(tp, None, 0)) for tp in (TP, OTHER)}
        for partition in self.partitions.values():
            self.inbox.add(partition.state)

    def is_current(self, handler: Handler) -> bool:
        assert handler.hand is not None
        return self.partitions[handler.hand.state.tp].state.in_flight is handler.hand

    # The loop

    def fetched(self, tp: TopicPartition, count: int, batches: int) -> None:
        partition = self.partitions[tp]
        if not partition.paused and not partition.state.closing:
            news = []
            for _ in range(batches):
                news.append(batch(tp, partition.fetch_offset, count))
                partition.fetch_offset += count
            self.inbox.put(partition.state, news)

    def refetch(self, tp: TopicPartition) -> None:
        partition = self.partitions[tp]
        if partition.state.rewinding:
            partition.fetch_offset = self.inbox.rewind(partition.state)

    def pause(self, tp: TopicPartition) -> None:
        partition = self.partitions[tp]
        partition.paused = True
        self.inbox.rewind(partition.state)

    def resume(self, tp: TopicPartition) -> None:
        partition = self.partitions[tp]
        if partition.paused:
            partition.paused = False
            partition.fetch_offset = self.inbox.rewind(partition.state)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        partition = self.partitions[tp]
        if not partition.state.closing:
            partition.fetch_offset = self.inbox.rewind(partition.state, offset)
            partition.done = partition.expected = offset

    def begin_to_revoke(self, tp: TopicPartition) -> None:
        partition = self.partitions[tp]
        if not partition.state.closing:
            partition.state.closing = True
            self.inbox.rewind(partition.state)
            self.inbox.when_released(partition.state, lambda: partition.released.append(True))

    def end_to_revoke(self, tp: TopicPartition) -> None:
        partition = self.partitions[tp]
        if partition.released:
            assert not any(handler.hand is not None and handler.hand.state.tp == tp for handler in self.handlers), (
                "given away with a message in hand"
            )
            assert partition.state.done_offset() == partition.done
            self.inbox.remove(partition.state)
            self.comes_back(tp)

    def lose(self, tp: TopicPartition) -> None:
        self.inbox.remove(self.partitions[tp].state)
        self.comes_back(tp)

    def comes_back(self, tp: TopicPartition) -> None:
        done = self.partitions[tp].done
        self.partitions[tp] = Partition(PartitionState(tp, None, done), done, done, done)
        self.inbox.add(self.partitions[tp].state)

    # The handlers

    def busy_one(self, number: int) -> Handler | None:
        busy = [handler for handler in self.handlers if handler.hand is not None]
        return busy[number % len(busy)] if busy else None

    def take(self, whole: bool) -> None:
        handler = next((handler for handler in self.handlers if handler.hand is None), None)
        if handler is None:
            return
        with self.inbox.lock:
            hand = self.inbox.take(whole=whole)
        if hand is None:
            return
        tp = hand.state.tp
        others = [other for other in self.handlers if other.hand is not None and other.hand.state.tp == tp]
        assert others == [], "two handlers have the same partition"
        partition = self.partitions[tp]
        assert hand.state is partition.state
        assert not partition.paused
        assert not partition.state.closing
        assert hand.batch.offset == partition.expected
        handler.hand = hand
        if whole:
            partition.expected = hand.batch.end_offset

    def next_messages(self, number: int, count: int) -> None:
        handler = self.busy_one(number)
        for _ in range(count):
            if handler is not None and handler.hand is not None and not handler.hand.whole:
                self.next_message(handler)

    def next_message(self, handler: Handler) -> None:
        assert handler.hand is not None
        partition = self.partitions[handler.hand.state.tp]
        current = self.is_current(handler)
        if handler.fields is None:
            handler.fields = handler.hand.iterate()
        fields = next(handler.fields, None)
        if fields is None:
            self.let_go(handler, in_hand=True)
            return
        assert current, "a message of a partition that is not ours any more, or after a seek"
        assert not partition.paused
        assert offset_of(fields) == partition.expected
        handler.in_hand = partition.done = partition.expected
        partition.expected += 1

    def stop_in_the_middle(self, number: int, in_hand: bool) -> None:
        handler = self.busy_one(number)
        if handler is not None:
            self.let_go(handler, in_hand=in_hand)

    def let_go(self, handler: Handler, *, in_hand: bool) -> None:
        hand = handler.hand
        assert hand is not None
        partition = self.partitions[hand.state.tp]
        if self.is_current(handler):
            if in_hand:
                partition.done = partition.expected
            elif hand.whole:
                partition.expected = hand.batch.offset
            elif handler.in_hand is not None:
                partition.expected = handler.in_hand
        self.inbox.finish(hand, last_done=in_hand)
        handler.hand = handler.fields = handler.in_hand = None

    def check_what_is_done(self) -> None:
        for tp, partition in self.partitions.items():
            assert partition.state.done_offset() == partition.done, tp
        assert self.inbox.buffered_bytes == sum(state.buffered_bytes for state in self.inbox.states.values())
        in_hand = [state.in_flight.batch.size_bytes for state in self.inbox.states.values() if state.in_flight]
        buffered = [each.size_bytes for state in self.inbox.states.values() for each in state.buffered]
        assert self.inbox.buffered_bytes == sum(in_hand) + sum(buffered)

    def drain(self) -> None:
        """Whatever came before, nothing is stuck: every partition gives what comes next."""
        for handler in self.handlers:
            if handler.hand is not None:
                self.let_go(handler, in_hand=True)
        for tp in self.partitions:
            if self.partitions[tp].state.closing:
                self.end_to_revoke(tp)
            self.resume(tp)
            self.refetch(tp)
            self.fetched(tp, 1, 1)
        while self.inbox.buffered_bytes:
            hand = take(self.inbox)
            partition = self.partitions[hand.state.tp]
            offsets = list(map(offset_of, hand.iterate()))
            assert offsets == list(range(partition.expected, partition.expected + len(offsets)))
            partition.expected += len(offsets)
            self.inbox.finish(hand)
        for partition in self.partitions.values():
            assert partition.state.done_offset() == partition.fetch_offset

    def step(self, chance: random.Random) -> str:
        """One step at random; returns what was done."""
        tp = chance.choice([TP, OTHER])
        name = chance.choice(STEPS)
        arguments: dict[str, Any] = {
            "fetched": (tp, chance.randint(1, 4), chance.randint(1, 2)),
            "seek": (tp, chance.randint(0, 30)),
            "take": (chance.random() < 0.3,),
            "next_messages": (chance.randrange(3), chance.randint(1, 5)),
            "stop_in_the_middle": (chance.randrange(3), chance.random() < 0.5),
        }
        getattr(self, name)(*arguments.get(name, (tp,)))
        return f"{name}{arguments.get(name, (tp,))}"


STEPS = [
    *["fetched", "take", "next_messages"] * 4,
    *["refetch", "stop_in_the_middle", "end_to_revoke"] * 2,
    *["pause", "resume", "seek", "begin_to_revoke", "lose"],
]


def test_any_sequence_of_steps_hands_out_what_comes_next() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(500):
        model = InboxModel()
        steps = []
        try:
            for _ in range(60):
                steps.append(model.step(chance))
                model.check_what_is_done()
            model.drain()
        except BaseException:
            print("steps", *steps, sep="\n")
            raise
