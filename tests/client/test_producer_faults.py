"""Producers and what goes wrong on the way: frozen brokers, lost answers, other ports, topics that change or go."""

from __future__ import annotations

import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from metamq.client.producer.outgoing import Delivery
from metamq.errors import DeliveryTimeout, MetamqError, PartitionNotFound, TopicNotFound
from metamq.testing import BrokerProcess, Cluster
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.server.ports import free_port
from tests.parts import Line, Stored, read_topic, statistics, wait_until

BROKER_HOST = "127.0.0.2"


@pytest.fixture
def topic(parts: Cluster, request: pytest.FixtureRequest) -> TopicConfig:
    with parts.admin() as admin:
        return admin.create_topic(request.node.originalname, partitions=3, flush="ack")


@pytest.fixture(autouse=True)
def broker_log(parts: Cluster) -> Iterator[None]:
    """Shows what the broker said when a test fails."""
    start = len(parts.broker.log_path.read_text())
    yield
    print(parts.broker.log_path.read_text()[start:])


def check(sent: dict[bytes, Delivery], stored: dict[str, list[Stored]]) -> None:
    """Acknowledged: once, where it was said; nothing twice; each partition in the order of send."""
    counts = Counter(m.value for messages in stored.values() for m in messages)
    assert max(counts.values()) == 1, [value for value, count in counts.items() if count > 1][:10]
    places = {m.value: (name, m.offset) for name, messages in stored.items() for m in messages}
    for value, delivery in sent.items():
        error = delivery.exception(60)
        if error is None:
            receipt = delivery.result(0)
            assert places[value] == (receipt.partition, receipt.offset)
        else:
            assert error.outcome == "unknown" or value not in places
    order = {value: number for number, value in enumerate(sent)}
    for messages in stored.values():
        numbers = [order[m.value] for m in messages if m.key is not None]
        assert numbers == sorted(numbers)


# -- a frozen broker --------------------------------------------------------------------------------


@pytest.mark.parametrize("request_timeout_s", [0.3, 10.0])
def test_a_frozen_broker_time_outs_and_no_doubles_after_the_thaw(parts: Cluster, request_timeout_s: float) -> None:
    with parts.admin() as admin:
        config = admin.create_topic(f"frozen-{request_timeout_s}", partitions=2, flush="ack")
    sent: dict[bytes, Delivery] = {}

    def send(count: int) -> list[Delivery]:
        first = len(sent)
        for number in range(first, first + count):
            value = b"%d" % number
            sent[value] = producer.send(config.topic, value, b"key-%d" % (number % 7))
        return list(sent.values())[first:]

    def send_until_stored(count: int) -> None:
        """On a slow machine a second may be too short."""
        deadline = time.monotonic() + 60
        while {delivery.exception(60) for delivery in send(count)} != {None}:
            assert time.monotonic() < deadline

    with parts.producer(delivery_timeout_s=1, request_timeout_s=request_timeout_s, batch_bytes=50) as producer:
        send_until_stored(100)
        wait_until(lambda: not producer._core.sender._has_work.is_set())  # it is idle: its next check comes late
        parts.broker.freeze()
        begun = time.monotonic()
        try:
            late = send(40)
            errors = [delivery.exception(60) for delivery in late]
            assert time.monotonic() - begun < 9
            assert {type(error) for error in errors} == {DeliveryTimeout}
            outcomes = {error.outcome for error in errors if isinstance(error, MetamqError)}
            assert outcomes == {"unknown", "not_done"}
            assert errors[0] is not None
            assert errors[0].outcome == "unknown"
            assert "was not acknowledged within 1 s" in str(errors[0])
            hopeful = send(30)
        finally:
            parts.broker.thaw()
        for delivery in hopeful:
            delivery.exception(60)
        send_until_stored(100)
    check(sent, read_topic(parts.broker, config.topic, config.id))


# -- answers that are lost --------------------------------------------------------------------------


@pytest.fixture
def far(parts: Cluster, tmp_path: Path) -> Iterator[tuple[Line, BrokerProcess]]:
    """A broker that clients reach over a line that a test can break."""
    if sys.platform != "linux":
        pytest.skip("needs a second loopback address")
    broker_id = 10 + len(parts.brokers)
    broker = BrokerProcess(parts.zookeeper, tmp_path / "far", broker_id, host=BROKER_HOST, advertise="127.0.0.1")
    broker.port = free_port()
    with Line(broker.port, BROKER_HOST) as line:
        broker.start()
        parts.brokers.append(broker)
        yield line, broker
        broker.stop()


@pytest.mark.slow
def test_lost_answers_double_nothing(parts: Cluster, far: tuple[Line, BrokerProcess]) -> None:
    line, broker = far
    with parts.admin() as admin:
        config = admin.create_topic(f"answers-{broker.broker_id}", partitions=2, brokers=[broker.broker_id])
    sent: dict[bytes, Delivery] = {}
    with parts.producer(batch_bytes=200) as producer:
        for round_number in range(15):
            for number in range(60):
                value = b"%d-%d" % (round_number, number)
                sent[value] = producer.send(config.topic, value, b"key-%d" % (number % 5))
                if number == 20:
                    line.swallow()
            assert line.swallowed.wait(60)
            line.cut()
            list(sent.values())[-1].result(60)
    check(sent, read_topic(broker, config.topic, config.id))
    assert all(delivery.exception(0) is None for delivery in sent.values())
    assert statistics(broker)["counters"]["repeats"] >= 15


@pytest.mark.slow
def test_a_line_that_breaks_all_the_time(parts: Cluster, far: tuple[Line, BrokerProcess]) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    line, broker = far
    with parts.admin() as admin:
        config = admin.create_topic(f"breaks-{broker.broker_id}", partitions=3, brokers=[broker.broker_id], flush="ack")
    sent: dict[bytes, Delivery] = {}
    ending = threading.Event()

    def breaking() -> None:
        while not ending.wait(choice.random() * 0.1):
            if choice.random() < 0.5:
                line.swallow()
                ending.wait(choice.random() * 0.03)
            line.cut()

    breaker = threading.Thread(target=breaking)
    with parts.producer(batch_bytes=500, delivery_timeout_s=100) as producer:
        breaker.start()
        try:
            for number in range(6000):
                value = b"%d" % number
                sent[value] = producer.send(config.topic, value, b"key-%d" % (number % 9) if number % 4 else None)
                if number % 20 == 0:
                    time.sleep(0.01)  # the load lasts about as long as the breaking
        finally:
            ending.set()
            breaker.join(60)
        for delivery in sent.values():
            delivery.result(100)
    check(sent, read_topic(broker, config.topic, config.id))
    print(statistics(broker)["counters"]["repeats"], "batches came again")


# -- brokers that move, topics that change ----------------------------------------------------------


class Stream:
    """A producer's messages without end, keyed, from a thread of its own."""

    def __init__(self, parts: Cluster, topic: str) -> None:
        self._parts = parts
        self._topic = topic
        self._ending = threading.Event()
        self.sent: dict[bytes, Delivery] = {}
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._parts.producer(batch_bytes=300, delivery_timeout_s=200) as producer:
            while not self._ending.wait(0.002):
                for _ in range(10):
                    value = b"%d" % len(self.sent)
                    self.sent[value] = producer.send(self._topic, value, b"key-%d" % (len(self.sent) % 11))
            for delivery in list(self.sent.values()):
                delivery.exception(200)  # told, so that close() has nothing to raise

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(220)
        assert not self._thread.is_alive()

    def goes_on(self, limit_s: float = 60.0) -> None:
        """What is sent from now on is stored, sooner or later."""
        deadline = time.monotonic() + limit_s
        while True:
            now = len(self.sent)
            wait_until(lambda now=now: len(self.sent) > now)  # type: ignore[misc]
            delivery = list(self.sent.values())[now]
            if delivery.exception(limit_s) is None:
                return
            assert time.monotonic() < deadline


def test_a_broker_that_comes_back_on_another_port(parts: Cluster, topic: TopicConfig) -> None:
    broker = parts.broker
    with Stream(parts, topic.topic) as stream:
        for kill in (True, False):
            stream.goes_on()
            before = broker.port
            broker.kill() if kill else broker.stop()
            broker.port = 0
            broker.start()
            assert broker.port != before
        stream.goes_on()
    check(stream.sent, read_topic(broker, topic.topic, topic.id))
    assert all(delivery.exception(0) is None for delivery in stream.sent.values())


def test_a_topic_that_grows_meanwhile(parts: Cluster, topic: TopicConfig) -> None:
    with Stream(parts, topic.topic) as stream, parts.admin() as admin:
        for partitions in (5, 9):
            stream.goes_on()
            admin.alter(topic.topic, partitions=partitions)
            wait_until(lambda p=partitions: _used(parts, topic) == p, what="use of the new partitions")  # type: ignore[misc]
        stream.goes_on()
    check(stream.sent, read_topic(parts.broker, topic.topic, topic.id))
    assert all(delivery.exception(0) is None for delivery in stream.sent.values())


def _used(parts: Cluster, topic: TopicConfig) -> int:
    """Partitions with messages; each of eleven keys has gone somewhere."""
    stored = statistics(parts.broker)["partitions"]
    hit = {p["partition"] for p in stored if p["topic"] == topic.topic and p["end_offset"]}
    return len({p["partition"] for p in stored if p["topic"] == topic.topic}) if max(hit, default=0) >= 3 else len(hit)


def test_a_topic_that_is_deleted_and_made_anew_meanwhile(parts: Cluster, topic: TopicConfig) -> None:
    with Stream(parts, topic.topic) as stream, parts.admin() as admin:
        stream.goes_on()
        admin.delete(topic.topic)
        wait_until(lambda: any(_error(d) is not None for d in list(stream.sent.values())), what="the named error")
        again = admin.create_topic(topic.topic, partitions=2, flush="ack")
        stream.goes_on()
        count = len(stream.sent)
        wait_until(lambda: len(stream.sent) > count + 50)
        stream.goes_on()
    errors = [error for delivery in stream.sent.values() if (error := delivery.exception(0)) is not None]
    assert {type(error) for error in errors} == {TopicNotFound}
    assert all(topic.topic in str(error) for error in errors)
    last_error = max(n for n, delivery in enumerate(stream.sent.values()) if delivery.exception(0) is not None)
    after = dict(list(stream.sent.items())[last_error + 1 :])
    assert len(after) > 20
    stored = read_topic(parts.broker, again.topic, again.id)
    assert set(after) <= {m.value for messages in stored.values() for m in messages}
    check(after, {name: [m for m in messages if m.value in after] for name, messages in stored.items()})


def _error(delivery: Delivery) -> MetamqError | None:
    return delivery.exception(0) if delivery.done() else None


def test_a_topic_made_anew_at_once_under_a_producer_that_slept(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer() as producer, parts.admin() as admin:
        producer.send(topic.topic, b"old", b"k").result(60)
        admin.delete(topic.topic)
        again = admin.create_topic(topic.topic, partitions=1)
        deadline = time.monotonic() + 60
        while (delivery := producer.send(topic.topic, b"new", b"k")).exception(60) is not None:
            assert isinstance(delivery.exception(0), TopicNotFound)
            assert time.monotonic() < deadline
        assert delivery.result(0).offset == 0
        assert [m.value for m in read_topic(parts.broker, again.topic, again.id)["0-0"]] == [b"new"]


def test_a_partition_that_is_not_in_the_topic_made_anew(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer() as producer, parts.admin() as admin:
        producer.send(topic.topic, b"old", partition="0-2").result(60)
        admin.delete(topic.topic)
        admin.create_topic(topic.topic, partitions=1)

        def named() -> bool:
            try:
                error = producer.send(topic.topic, b"new", partition="0-2").exception(60)
            except PartitionNotFound:
                return True
            assert isinstance(error, TopicNotFound)
            return False

        wait_until(named)
        producer.send(topic.topic, b"new", partition="0-0").result(60)


def test_limits_of_a_topic_that_is_changed_meanwhile(parts: Cluster, topic: TopicConfig) -> None:
    with parts.producer() as producer, parts.admin() as admin:
        producer.send(topic.topic, b"x" * 500).result(60)
        config = admin.alter(topic.topic, max_message_bytes=600)
        assert replace(topic, max_message_bytes=600) == config
        producer.send(topic.topic, b"x" * 500).result(60)
