"""What tests of delayed messages send, read and check."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from metamq import Message
from metamq.client.delayed import due_us
from metamq.testing import Cluster
from tests.parts import read_to_end, statistics, wait_until


class Sent(NamedTuple):
    """A delayed message, and the earliest time at which it may be readable, in microseconds since 1970."""

    value: bytes
    key: bytes | None
    earliest_us: int


class Wrong(AssertionError):
    """Messages that are missing, there twice, or early."""


def send_delayed(running: Cluster, topic: str, count: int, longest_s: float, seed: int = 0) -> list[Sent]:
    """Sends messages with different delays, a third of them without a key."""
    chance = random.Random(seed)
    sent = list[Sent]()
    with running.producer() as producer:
        for number in range(count):
            key = b"%d" % (number % 7) if number % 3 else None
            delay_s = chance.uniform(0.01, longest_s)
            sent.append(Sent(b"%d" % number, key, due_us(delay_s, None)[0]))
            producer.send(topic, sent[-1].value, key, {"n": b"%d" % number}, delay_s=delay_s)
    return sent


def send_in_order(running: Cluster, topic: str, count: int, delays_s: Sequence[float]) -> None:
    """Sends messages with a number as their value; each of seven keys has messages with each of the delays."""
    with running.producer() as producer:
        for number in range(count):
            key = b"%d" % (number // len(delays_s) % 7)
            delay_s = delays_s[number % len(delays_s)]
            producer.send(topic, b"%d" % number, key, {"delay": b"%g" % delay_s}, delay_s=delay_s)


def check_order(found: Iterable[Message[Any]]) -> None:
    """Raises Wrong unless messages of a key that have the same delay are in the order in which they were sent."""
    last = dict[object, int]()
    for message in found:
        way = message.key, message.headers["delay"]
        if int(message.value) <= last.get(way, -1):
            raise Wrong(f"{message.value!r} comes after {last[way]} of {way}")
        last[way] = int(message.value)


def delayed(running: Cluster) -> Counter[str]:
    """The figures of all masters together."""
    found = Counter[str]()
    for broker in running.processes:
        found.update(statistics(broker)["delayed"])
    return found


def read_all(running: Cluster, topic: str, count: int, waiting: Callable[[], int] | None = None) -> list[Message[Any]]:
    """Reads so many different messages. Then, when nothing waits any more, reads what came twice."""
    found = list[Message[Any]]()
    with running.consumer(topics=topic, start="earliest", idle_timeout_s=0.2) as consumer:

        def has_all() -> bool:
            found.extend(consumer)
            return len({message.value for message in found}) >= count

        wait_until(has_all, what=f"the delivery of {count} messages to {topic}")
        wait_until(lambda: not (waiting() if waiting else delayed(running)["waiting"]), what="the last move")
        found += read_to_end(consumer)
    return found


def check(sent: Iterable[Sent], found: Iterable[Message[Any]]) -> None:
    """Raises Wrong unless each message is there once, with its key and header, and none is early."""
    sent, found = list(sent), list(found)
    counts = Counter(message.value for message in found)
    if wrong := {one.value: counts[one.value] for one in sent if counts[one.value] != 1}:
        raise Wrong(f"not once: {wrong}")
    by_value = {message.value: message for message in found}
    for one in sent:
        message = by_value[one.value]
        if message.timestamp < one.earliest_us:
            raise Wrong(f"{one.value!r} is {one.earliest_us - message.timestamp} us early")
        if (message.key, message.headers) != (one.key, {"n": one.value}):
            raise Wrong(f"another key or header: {message}")
