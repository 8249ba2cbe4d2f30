"""Faults of the original that have no other place: damage on the way, noise, counts below zero, a second life."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from metamq import TopicPartition
from metamq.client.fetch import fetch_runner
from metamq.errors import CorruptData
from metamq.testing import BrokerProcess, Cluster
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.server.ports import free_port
from metamq.zk.session.session import Session
from tests.one_zookeeper import cluster
from tests.parts import Line, wait_until

if TYPE_CHECKING:
    from tests.client.conftest import Shop

BROKER_HOST = "127.0.0.2"
MARK = b"flip this"


def tp(topic: str, index: int = 0) -> TopicPartition:
    return TopicPartition(topic, f"0-{index}")


class DamagingLine(Line):
    """Flips a bit of the first few answers that have MARK in them, where it stands last."""

    left = 0

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if answers and self._swallowing.is_set():
                    self.swallowed.set()
                    continue
                if answers and self.left > 0 and (place := data.rfind(MARK)) >= 0:
                    self.left -= 1
                    data[place] ^= 1
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def parts() -> Iterator[Cluster]:
    """A ZooKeeper without brokers, of each test's own: a broker id that had topics waits in a new folder."""
    with cluster(brokers=0) as running:
        yield running


@pytest.fixture
def far(parts: Cluster, tmp_path: Path) -> Iterator[tuple[DamagingLine, BrokerProcess]]:
    """A broker behind a line that can be broken, and that damages what it carries."""
    broker = BrokerProcess(parts.zookeeper, tmp_path / "far", 0, host=BROKER_HOST, advertise="127.0.0.1")
    broker.port = free_port()
    with DamagingLine(broker.port, BROKER_HOST) as line:
        broker.start()
        yield line, broker
        broker.stop()


Far = tuple[DamagingLine, BrokerProcess]


def test_damage_on_the_way_is_asked_for_again_and_nothing_comes_twice(parts: Cluster, far: Far) -> None:
    line, _ = far
    parts.create_topic("damaged", 1)
    with parts.producer() as producer:
        for number in range(5):
            producer.send_many("damaged", [b"%d" % number, MARK, b"."]).result(60)
    line.left = 4
    with parts.consumer(topics="damaged", group="damaged") as consumer:
        messages = list(islice(consumer, 15))
        assert line.left == 0
        assert [message.offset for message in messages] == list(range(15))
        assert {message.value for message in messages[1::3]} == {MARK}


def test_damage_on_the_brokers_disk_is_raised_after_what_is_before_it_and_a_seek_leads_past_it(
    parts: Cluster, far: Far
) -> None:
    _, broker = far
    parts.create_topic("rotten", 1)
    with parts.producer() as producer:
        for value in (b"before", MARK, b"behind"):
            producer.send("rotten", value).result(60)
    assert broker.stop() == 0
    (segment,) = (broker.data / "topics").glob("rotten@*/0/*.log")
    stored = segment.read_bytes()
    segment.write_bytes(stored.replace(MARK, MARK.upper()))
    assert segment.read_bytes() != stored
    broker.start()
    with parts.consumer(topics="rotten", group="rotten", idle_timeout_s=60) as consumer:
        messages = iter(consumer)
        assert next(messages).value == b"before"
        with pytest.raises(CorruptData, match="rotten/0-0 at offset 1 is damaged") as caught:
            next(messages)
        assert "`metamq ha status`" in str(caught.value)
        assert "seek to a later offset" in str(caught.value)
        assert "rotten/0-0 at offset 1" in consumer.health().partitions[tp("rotten")].last_error
        consumer.seek(tp("rotten"), 2)
        assert next(iter(consumer)).value == b"behind"


def test_fetches_without_an_answer_recover(
    parts: Cluster, far: Far, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The line is dead in one direction and nothing says so; later it is well again, and nothing says that either.
    monkeypatch.setattr(fetch_runner, "ANSWER_LATE_S", 0.3)
    line, _ = far
    parts.create_topic("silent", 1)
    with parts.producer() as producer, parts.consumer(topics="silent", group="silent", fetch_wait_ms=100) as consumer:
        messages = iter(consumer)
        producer.send("silent", b"0").result(60)
        assert next(messages).offset == 0
        line.swallow()
        wait_until(lambda: "did not answer a long poll: reconnecting" in caplog.text)
        line.cut()
        producer.send("silent", b"1").result(60)
        assert next(messages).offset == 1


# On the shared cluster


def test_a_small_batch_does_not_keep_the_answer_it_came_in_and_a_large_one_is_not_copied(shop: Shop) -> None:
    topic = shop.topic(2)
    shop.send(topic, [b"small"], "0-0")
    shop.send(topic, [b"x" * 300_000], "0-1")
    with shop.consumer(topic, idle_timeout_s=60) as consumer:
        shop.until(lambda: len(consumer.health().partitions) == 2 and consumer.health().buffered_bytes > 300_000)
        consumer.pause()
        consumer.resume()  # now both are asked for at once
        kept = {}
        for batch in islice(consumer.batches(), 2):
            kept[batch.partition] = len(memoryview(batch._data.obj)) - batch.size_bytes
    assert kept["0-0"] == 0
    assert kept["0-1"] > 0, "the answer's own memory, with its header"


def test_a_consumer_at_the_end_of_a_log_is_silent(shop: Shop, group: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="metamq.client")
    topic = shop.topic(flush="ack")
    with shop.consumer(topic, group, fetch_wait_ms=10) as consumer:
        messages = iter(consumer)
        for number in range(5):
            shop.numbers(topic, 1, start=number)
            assert next(messages).offset == number
        before = shop.admin.statistics(0).fetches
        shop.until(lambda: shop.admin.statistics(0).fetches > before + 5)
        assert consumer.health().partitions[tp(topic)].last_error == ""
    assert [record.message for record in caplog.records if topic in record.message] == []


def test_what_is_pending_is_never_below_zero(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    with shop.consumer(topic, group, auto_commit=False) as consumer:
        shop.until(lambda: consumer.lag() == {tp(topic): 5})
        consumer.commit({tp(topic): 5})

    async def put_beyond_the_end() -> None:  # as a power cut that took the log's end leaves it
        async with await Session.open(shop.cluster.zookeeper) as session:
            path = session.paths.offset(group, *tp(topic))
            stored = json.loads((await session.get(path)).data) | {"next": 1_000}
            await session.set(path, json.dumps(stored).encode(), ANY_VERSION)

    asyncio.run(put_beyond_the_end())
    with shop.consumer(topic, group, auto_commit=False) as consumer:
        shop.until(lambda: consumer.lag() == {tp(topic): 0})
        assert consumer.health().partitions[tp(topic)].lag in (None, 0)
        assert [each.lag for each in shop.admin.describe_group(group).partitions] == [0]


def test_a_closed_consumer_is_followed_by_another_of_its_name(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    for number in range(5):
        shop.numbers(topic, 1, start=number)
        with shop.consumer(topic, group, consumer_id="same") as consumer:
            assert int(next(iter(consumer)).value) == number


@pytest.mark.slow
def test_a_thousand_partitions_of_which_one_is_busy(shop: Shop) -> None:
    # A poll that is parked for the others takes on what becomes due, and a busy partition keeps nobody waiting.
    topic = shop.topic(1_000)
    with shop.consumer(topic, fetch_wait_ms=60_000, idle_timeout_s=60) as consumer:
        messages = iter(consumer)
        shop.send(topic, [b"."] * 50, "0-7")
        assert [next(messages).partition for _ in range(50)] == ["0-7"] * 50
        start = time.monotonic()
        for index in (0, 7, 999):
            shop.send(topic, [b"."], f"0-{index}")
            assert next(messages).partition == f"0-{index}"
        assert time.monotonic() - start < 30, "somebody waited for the long poll to end"
        shop.producer.send_many(topic, [b"." * 100] * 20_000).result(60)
        for index in range(0, 1_000, 100):
            shop.producer.send(topic, b"rare", partition=f"0-{index}")
        shop.producer.flush()
        got = list(islice(messages, 20_010))
        assert sum(message.value == b"rare" for message in got) == 10
    shop.admin.delete(topic)  # it would be a load on the broker for as long as that runs
