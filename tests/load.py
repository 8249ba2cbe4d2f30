"""Producers under load while their broker goes away, and the check of what they were told against what is stored."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from metamq import Producer
from metamq.client.producer.outgoing import Delivery, ManyDelivery
from metamq.errors import MetamqError
from tests.parts import Stored

KEYS = [f"key-{n}".encode() for n in range(12)]


@dataclass
class Told:
    """What one producer was told, in the order in which it sent."""

    acknowledged: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    """value -> (partition, offset)."""
    failed: dict[bytes, MetamqError] = field(default_factory=dict)
    sent: list[tuple[bytes | None, bytes]] = field(default_factory=list)
    """(key, value)."""


def check(told: list[Told], stored: dict[str, list[Stored]]) -> None:
    """What a topic with flush="ack" promises to its producers."""
    counts = Counter(message.value for messages in stored.values() for message in messages)
    twice = [value for value, count in counts.items() if count > 1]
    assert not twice, f"stored more than once: {twice[:10]}"
    places = {message.value: (name, message.offset) for name, messages in stored.items() for message in messages}
    for name, messages in stored.items():
        assert [message.offset for message in messages] == list(range(len(messages))), f"holes in the offsets of {name}"
    known = {value for one in told for _, value in one.sent}
    assert counts.keys() <= known, "something is stored that nobody sent"
    for one in told:
        for value, place in one.acknowledged.items():
            assert places.get(value) == place, f"{value!r} was acknowledged at {place}, it is at {places.get(value)}"
        for value, error in one.failed.items():
            assert error.outcome == "unknown" or value not in places, f"{value!r} failed for certain, and is stored"
        for key in {key for key, _ in one.sent if key is not None}:
            of_key = [value for k, value in one.sent if k == key and value in places]
            assert len({places[value][0] for value in of_key}) <= 1, f"{key!r} is in several partitions"
            ours = set(of_key)
            there = [m.value for messages in stored.values() for m in messages if m.value in ours]
            assert there == of_key, f"the messages of {key!r} are out of order"


class Load:
    """One producer's stream of messages, until told to stop; `told` is complete after join()."""

    def __init__(self, number: int, seed: int, run: Callable[[Load], None]) -> None:
        self.number = number
        self.random = random.Random(f"{seed}-{number}")
        self.told = Told()
        self.ending = threading.Event()
        self.problem: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._guarded)
        self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run(self)
        except BaseException as error:
            self.problem = error

    def next_message(self, *, keyed: bool) -> tuple[bytes | None, bytes]:
        """The next (key, value), noted as sent."""
        # Keys are a producer's own: the order of a key's messages is promised to one producer.
        key = b"%d/" % self.number + self.random.choice(KEYS) if keyed else None
        message = key, b"%d-%d" % (self.number, len(self.told.sent))
        self.told.sent.append(message)
        return message

    def note(self, values: list[bytes], delivery: Delivery | ManyDelivery, timeout_s: float) -> None:
        """Notes what a delivery says of its messages."""
        try:
            if isinstance(delivery, Delivery):
                receipt = delivery.result(timeout_s)
                self.told.acknowledged[values[0]] = receipt.partition, receipt.offset
                return
            ranges = delivery.result(timeout_s)
        except MetamqError as error:
            self.told.failed.update((value, error) for value in values)
            return
        places = [(r.partition, r.offset + i) for r in ranges for i in range(r.count)]
        assert len(places) == len(values)
        self.told.acknowledged.update(zip(values, places, strict=True))

    def join(self) -> Told:
        """Ends the stream; raises what went wrong in it."""
        self.ending.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self.problem is not None:
            raise self.problem
        return self.told


def blocking(zookeeper: str, *, keyed: bool, topic: str = "t", **settings: Any) -> Callable[[Load], None]:
    """send(), many deliveries open at once."""

    def run(load: Load) -> None:
        with Producer[bytes](zookeeper, delivery_timeout_s=60, **settings) as producer:
            pending: list[tuple[bytes, Delivery]] = []
            while not load.ending.is_set():
                for _ in range(load.random.randint(1, 40)):
                    key, value = load.next_message(keyed=keyed)
                    pending.append((value, producer.send(topic, value, key)))
                load.ending.wait(load.random.random() * 0.01)
                while len(pending) > 2000:
                    value, delivery = pending.pop(0)
                    load.note([value], delivery, 70)
            for value, delivery in pending:
                load.note([value], delivery, 70)

    return run
