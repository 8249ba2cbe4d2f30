"""ZooKeeper and brokers that stop, hang and come back under consumers: who goes on, until when, and what is lost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, pairwise
from typing import Any

import pytest

from metamq import Consumer, Producer, TopicPartition
from metamq.client.fetch import fetch_runner
from metamq.client.net import cluster as client_cluster
from metamq.client.net import outages
from metamq.errors import ConnectError, MetamqError
from metamq.testing import Cluster, cluster
from metamq.zk.cluster.registrations import BrokerAddress
from metamq.zk.session.session import Session
from tests.client.idle import IdleTime

GROUP = "etl"
LOOK_EVERY = 256
"""So many messages are handed out between two looks at the lease."""


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    """A cluster to be broken; each test mends what it broke."""
    with cluster(session_timeout_ms=2_000) as running:
        yield running


_numbers = iter(range(1_000_000))


def new_topic(parts: Cluster, partitions: int = 1) -> str:
    name = f"t{next(_numbers)}"
    parts.create_topic(name, partitions)
    return name


def until(condition: Callable[[], object], limit_s: float = 60.0) -> float:
    """Seconds until the condition held; fails after the limit."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, f"not within {limit_s} s"
        time.sleep(0.005)
    return time.monotonic() - start


class Reading:
    """A consumer that is iterated in a thread, and what it was told and given."""

    def __init__(self, parts: Cluster, topic: str, group: str | None, **settings: Any) -> None:
        self.events: list[str] = []
        self.values: list[int] = []
        self.error: BaseException | None = None
        self.consumer: Consumer[Any] = parts.consumer(
            topics=topic,
            group=group,
            commit_interval_ms=100,
            on_assigned=lambda partitions: self.events.append(f"assigned {len(partitions)}"),
            on_revoked=lambda partitions: self.events.append(f"revoked {len(partitions)}"),
            **settings,
        )
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            for message in self.consumer:
                self.values.append(int(message.value))
        except BaseException as error:
            self.error = error

    def has(self, number: int) -> bool:
        assert self.error is None, self.error
        return number in self.values


@contextmanager
def reading(parts: Cluster, topic: str, group: str | None, **settings: Any) -> Iterator[Reading]:
    reader = Reading(parts, topic, group, **settings)
    try:
        yield reader
    finally:
        reader.consumer.close()
        reader.thread.join(60)
    assert reader.error is None


def committed(parts: Cluster, group: str, topic: str) -> int | None:
    with parts.admin() as admin:
        return next(each.committed for each in admin.describe_group(group).partitions if each.topic == topic)


def everybody_is_registered(parts: Cluster, group: str, members: int) -> bool:
    try:
        with parts.admin() as admin:
            live = [broker.live for broker in admin.brokers().values()]
            present = admin.describe_group(group).members
            return live == [True] and len(present) == members and all(member.partitions for member in present)
    except MetamqError:
        return False


@contextmanager
def sending(parts: Cluster, topic: str) -> Iterator[Callable[[int], None]]:
    """`send(number)` stores a number, as soon as it can be."""
    with parts.producer(delivery_timeout_s=60) as producer:
        keep: Producer[bytes] = producer
        yield lambda number: keep.send(topic, b"%d" % number, partition="0-0").result(60) and None


# ZooKeeper


@pytest.mark.slow
def test_zookeeper_away_for_less_than_the_session_changes_nothing(parts: Cluster) -> None:
    topic = new_topic(parts)
    with sending(parts, topic) as send, reading(parts, topic, GROUP, session_timeout_ms=60_000) as reader:
        send(0)
        until(lambda: reader.has(0))
        parts.zookeeper_server.kill()
        try:
            until(lambda: "cut off" in str(reader.consumer.health().group))
            send(1)
            until(lambda: reader.has(1), 30.0)
            assert reader.consumer.health().delivering
        finally:
            parts.zookeeper_server.restart()
        until(lambda: everybody_is_registered(parts, GROUP, 1))
        send(2)
        until(lambda: reader.has(2))
        until(lambda: committed(parts, GROUP, topic) == 3)
        assert reader.events == ["assigned 1"]
        assert reader.values == [0, 1, 2]


@pytest.mark.slow
def test_a_client_asks_a_zookeeper_that_is_away_now_and_then_only(
    parts: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_s: list[float] = []
    live_brokers = client_cluster.live_brokers

    async def timed(session: Session, watch: Callable[[], None] | None = None) -> dict[int, BrokerAddress]:
        asked_s.append(time.monotonic())
        return await live_brokers(session, watch)

    monkeypatch.setattr(client_cluster, "live_brokers", timed)
    topic = new_topic(parts)
    with sending(parts, topic) as send:
        send(0)
        asked_s.clear()
        parts.zookeeper_server.kill()
        try:
            until(lambda: len(asked_s) > 3)
        finally:
            parts.zookeeper_server.restart()
        pauses_s = [after - before for before, after in pairwise(asked_s)]
        assert min(pauses_s[:3]) > 0.9 * client_cluster.RETRY_S
        send(1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_zookeeper_away_for_longer_than_the_session_pauses_the_group_and_then_it_goes_on(
    parts: Cluster, how: str
) -> None:
    topic, group = new_topic(parts, 2), f"{GROUP}-{how}"
    server = parts.zookeeper_server
    with (
        sending(parts, topic) as send,
        reading(parts, topic, group, session_timeout_ms=1_500) as one,
        reading(parts, topic, group, session_timeout_ms=1_500) as two,
        reading(parts, topic, None) as alone,
    ):
        until(lambda: len(one.consumer.assignment) == len(two.consumer.assignment) == 1)
        send(0)
        until(lambda: one.has(0) or two.has(0))
        reader = one if one.has(0) else two
        cut = time.monotonic()
        server.kill() if how == "killed" else server.freeze()
        try:
            until(lambda: not one.consumer.health().delivering and not two.consumer.health().delivering)
            until(lambda: time.monotonic() - cut > 2.5)
            assert not one.consumer.health().delivering
            until(lambda: alone.has(0))
        finally:
            server.restart() if how == "killed" else server.thaw()
        until(lambda: everybody_is_registered(parts, group, 2))
        send(1)
        until(lambda: one.has(1) or two.has(1))
        until(lambda: alone.has(1))
        until(lambda: committed(parts, group, topic) == 2)
        # Nobody read what another one had done: it was committed before, or comes again to whoever has it now.
        assert sorted(set(one.values + two.values)) == [0, 1]
        assert alone.values == [0, 1]
        assert alone.events == ["assigned 2"]
        session = reader.consumer._core._session
        assert session is not None
        # A server that starts anew gives every session its whole time again; on a slow machine that may be too short.
        if how == "killed" and session.generation == 1:
            assert reader.values == [0, 1]


@pytest.mark.slow
def test_nothing_is_handed_out_after_the_lease(parts: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "PATIENCE_S", 1.0)
    topic = new_topic(parts)
    with parts.producer() as producer:
        producer.send_many(topic, [b"%d" % number for number in range(100_000)]).result(60)
    with parts.consumer(topics=topic, group="lease", session_timeout_ms=1_000, idle_timeout_s=2.0) as consumer:
        count = 0
        for _ in range(20):
            until(lambda: next(iter(consumer), None))
            count += 1
            handed_out: list[float] = []
            parts.zookeeper_server.freeze()
            try:
                cut = time.monotonic()
                # Of a large batch in hand, slowly; the loop ends by an error, since there is more.
                with contextlib.suppress(ConnectError):
                    for _ in consumer:
                        handed_out.append(time.monotonic() - cut)
                        time.sleep(0.002)
                        assert sum(after_s > 0.7 for after_s in handed_out) <= LOOK_EVERY + 1, "the lease has ended"
                    raise AssertionError("the loop ended by itself")
            finally:
                parts.zookeeper_server.thaw()
            count += len(handed_out)
            until(lambda: consumer.health().delivering)
            if handed_out and handed_out[-1] > 0.3:  # else the machine was slow, and the lease near its end
                break
        assert handed_out[-1] > 0.3, "until the lease ends"
        # What was not handed out comes, perhaps after what another owner would have got again.
        following: list[Any] = []
        until(lambda: following.extend(islice(consumer, 1)) or following)
        assert int(following[0].value) <= count


# Brokers


def test_a_broker_that_is_killed_and_comes_back(parts: Cluster) -> None:
    topic = new_topic(parts)
    broker = parts.broker
    with sending(parts, topic) as send, reading(parts, topic, f"{GROUP}-broker") as reader:
        for number in range(3):
            send(number)
            until(partial(reader.has, number))
            broker.kill()
            until(lambda: reader.consumer.health().partitions[TopicPartition(topic, "0-0")].last_error)
            if number == 1:
                broker.port = 0  # on another port
            broker.start()
        send(3)
        until(lambda: reader.has(3))
        assert reader.values == [0, 1, 2, 3]
        assert reader.events == ["assigned 1"]
        until(lambda: reader.consumer.health().partitions[TopicPartition(topic, "0-0")].last_error == "")


def test_a_broker_that_stops_in_order_and_comes_back(parts: Cluster) -> None:
    topic = new_topic(parts)
    with sending(parts, topic) as send, reading(parts, topic, None) as reader:
        for number in range(3):
            send(number)
            until(partial(reader.has, number))
            parts.broker.restart()
        assert reader.values == [0, 1, 2]


def test_a_broker_that_hangs_is_left_and_found_again(parts: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fetches that time out recover: of the connection nothing is heard, not even its end.
    monkeypatch.setattr(fetch_runner, "ANSWER_LATE_S", 0.5)
    topic = new_topic(parts)
    with sending(parts, topic) as send, reading(parts, topic, f"{GROUP}-hang", fetch_wait_ms=200) as reader:
        send(0)
        until(lambda: reader.has(0))
        parts.broker.freeze()
        try:
            until(lambda: reader.consumer.health().partitions[TopicPartition(topic, "0-0")].last_error)
        finally:
            parts.broker.thaw()
        send(1)
        until(lambda: reader.has(1))
        assert reader.values == [0, 1]


@pytest.mark.slow
def test_an_outage_is_told_once_and_does_not_count_as_idle(parts: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="metamq.client")
    topic = new_topic(parts, 2)
    address = f"broker 0 at 127.0.0.1:{parts.broker.port}: "
    warning, well = address + "2 partitions cannot be fetched at present", address + "all partitions can be fetched"
    with sending(parts, topic) as send, reading(parts, topic, None, idle_timeout_s=60.0) as reader:
        idle_time = IdleTime(reader.consumer)  # short only while it matters: any message may take longer
        send(0)
        until(lambda: reader.has(0))
        parts.broker.kill()
        try:
            until(lambda: warning in caplog.text)
            idle_time.set(1.5)
            told = time.monotonic()
            until(lambda: time.monotonic() - told > 2.5)
            assert reader.thread.is_alive(), "the end of the data is not known"
            idle_time.set(60.0)
        finally:
            parts.broker.start()
        send(1)
        until(lambda: reader.has(1))
        idle_time.set(1.5)
        until(lambda: well in caplog.text)
        until(lambda: not reader.thread.is_alive())
    assert caplog.text.count("cannot be fetched at present") == 1
    assert {record.levelname for record in caplog.records if warning in record.message} == {"WARNING"}


@pytest.mark.slow
@pytest.mark.parametrize("from_the_start", [False, True])
def test_an_outage_that_lasts_is_an_error_where_a_loop_would_end_by_itself(
    parts: Cluster, monkeypatch: pytest.MonkeyPatch, from_the_start: bool
) -> None:
    monkeypatch.setattr(outages, "PATIENCE_S", 1.5)
    topic = new_topic(parts)
    with sending(parts, topic) as send:
        send(0)
    if from_the_start:
        parts.broker.kill()
    try:
        with parts.consumer(topics=topic, idle_timeout_s=0.5) as consumer:
            messages = iter(consumer)
            if not from_the_start:
                until(lambda: consumer.health().buffered_bytes)
                assert next(messages).offset == 0
                parts.broker.kill()
            until(lambda: any(each.last_error for each in consumer.health().partitions.values()))
            with pytest.raises(ConnectError, match=r"broker 0.*t\d+/0-0 could not be fetched for 1\.5 s"):
                next(messages)
    finally:
        parts.broker.start()


def test_a_hung_broker_does_not_keep_a_close_waiting(parts: Cluster) -> None:
    topic = new_topic(parts)
    with sending(parts, topic) as send, reading(parts, topic, f"{GROUP}-close") as reader:
        send(0)
        until(lambda: reader.has(0))
        parts.broker.freeze()
        try:
            start = time.monotonic()
            reader.consumer.close()
            assert time.monotonic() - start < 12
        finally:
            parts.broker.thaw()
    assert committed(parts, f"{GROUP}-close", topic) == 1


def test_a_group_is_not_rearranged_when_a_broker_restarts(parts: Cluster) -> None:
    topic = new_topic(parts, 4)
    group = f"{GROUP}-still"
    with reading(parts, topic, group) as one, reading(parts, topic, group) as two:
        until(lambda: len(one.consumer.assignment) == len(two.consumer.assignment) == 2)
        with parts.admin() as admin:
            before = admin.explain_group(group)
            parts.broker.kill()
            parts.broker.start()
            after = admin.explain_group(group)
        assert (after.generation, after.owners) == (before.generation, before.owners)
        with sending(parts, topic) as send:
            send(0)
            until(lambda: one.has(0) or two.has(0))


@pytest.mark.slow
def test_everything_at_once(parts: Cluster) -> None:
    topic, group = new_topic(parts), f"{GROUP}-all"
    with sending(parts, topic) as send, reading(parts, topic, group, session_timeout_ms=1_500) as reader:
        send(0)
        until(lambda: reader.has(0) and committed(parts, group, topic) == 1)
        parts.zookeeper_server.kill()
        parts.broker.kill()
        until(lambda: not reader.consumer.health().delivering)
        parts.zookeeper_server.restart()
        parts.broker.start()
        send(1)
        until(lambda: reader.has(1))
        until(lambda: everybody_is_registered(parts, group, 1))
        # What was committed does not come again; the other one may, if so short a session ends once more.
        assert reader.values == [0] + [1] * (len(reader.values) - 1)
