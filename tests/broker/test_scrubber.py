"""Damage is found while a broker runs: by its scrub, and by what readers report, which it does not believe unseen."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.config import BrokerConfig
from metamq.broker.data import scrubber as scrubber_module
from metamq.broker.data.data_folder import DataFolder
from metamq.broker.data.partition import BatchIds
from metamq.broker.data.scrubber import REPORTS_MAX, REPORTS_OF_PARTITION_MAX, Scrubber
from metamq.broker.data.topics import Topics
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.disk.segments import take_inventory
from metamq.client.fetch.damage import report_of
from metamq.client.net.paged_requests import ask_offsets
from metamq.client.net.transport import BrokerConnection
from metamq.errors import ClosedError, CorruptData
from metamq.testing import BrokerProcess, Cluster
from metamq.wire.batch import read_header, walk
from metamq.wire.columns import encode
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.partitions import TopicPartition
from tests.broker.test_disk import flip
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, http_get, statistics, wait_until

QUICK = {"scrub_every_s": 0.1, "retention_check_s": 0.1}
OFF = {"scrub_bytes_per_s": 0}
MESSAGES = 40


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    with cluster(brokers=0) as running:
        yield running


def start(parts: Cluster, data: Path, broker_id: int, **settings: object) -> tuple[BrokerProcess, TopicConfig]:
    """A broker with a topic of several segments, all flushed."""
    broker = BrokerProcess(parts.zookeeper, data, broker_id, **settings)
    broker.start()
    parts.brokers.append(broker)
    with parts.admin() as admin:
        topic = admin.create_topic(
            f"rot-{broker_id}", partitions=1, brokers=[broker_id], flush="ack", segment_bytes=3000
        )
    send(parts, topic, range(MESSAGES))
    return broker, topic


def send(parts: Cluster, topic: TopicConfig, numbers: range) -> None:
    with parts.producer() as producer:
        for number in numbers:
            producer.send(topic.topic, b"%d-" % number + bytes(500)).result(SLOW_S)


def damage(broker: BrokerProcess, topic: TopicConfig, offset: int) -> None:
    """Changes a byte of the value in the batch with this offset, which only checksums notice."""
    for segment in take_inventory(str(broker.data / "topics" / f"{topic.topic}@{topic.id}" / "0")).segments:
        for at, header in walk(memoryview(Path(segment.path).read_bytes())):
            if header.base_offset == offset:
                flip(segment.path, at + header.size - 8)
                return
    raise AssertionError(f"no batch begins at {offset}")


def metric(broker: BrokerProcess, name: str) -> float:
    (value,) = re.findall(rf'^{name}{{broker="\d+"}} (\S+)$', http_get(broker.http_port, "/metrics")[1], re.MULTILINE)
    return float(value)


def values_until_damage(parts: Cluster, topic: TopicConfig) -> list[int]:
    """What a reader gets before it raises CorruptData."""
    read: list[int] = []
    with parts.consumer(topics=[topic.topic], idle_timeout_s=SLOW_S) as consumer, pytest.raises(CorruptData):
        read.extend(int(message.value.partition(b"-")[0]) for message in consumer)
    return read


def test_the_scrub_finds_damage_of_a_running_broker_which_says_so_and_serves_the_rest(
    parts: Cluster, tmp_path: Path
) -> None:
    broker, topic = start(parts, tmp_path / "broker", 1, **QUICK)
    wait_until(lambda: metric(broker, "metamq_scrub_verified_bytes_total") > MESSAGES * 500, what="a pass")
    assert http_get(broker.http_port, "/readyz")[0] == 200
    assert metric(broker, "metamq_log_damaged_partitions") == 0
    damage(broker, topic, 3)
    wait_until(lambda: metric(broker, "metamq_log_damaged_partitions") == 1, what="the damage found")
    code, text = http_get(broker.http_port, "/readyz")
    assert (code, "is damaged at byte" in text) == (503, True)
    assert broker.log_path.read_text().count("is damaged, but still served: ") == 1, "not with each pass"
    with parts.admin() as admin:
        (master,) = admin.replicas()[1].replicas
        assert master.damaged_count == 1
        assert "the producer's checksum does not match" in master.damaged[0]
        send(parts, topic, range(MESSAGES, MESSAGES + 10))
        assert values_until_damage(parts, topic) == [0, 1, 2]
        admin.alter(topic.topic, retention_bytes=10_000)
        wait_until(lambda: http_get(broker.http_port, "/readyz")[0] == 200, what="the damage removed by retention")
    assert metric(broker, "metamq_log_damaged_partitions") == 0


def test_a_scrub_begins_soon_after_a_start_and_tells_its_age(parts: Cluster, tmp_path: Path) -> None:
    broker, topic = start(parts, tmp_path / "broker", 2)
    assert broker.stop() == 0
    damage(broker, topic, 7)
    broker.start()
    wait_until(lambda: "is damaged, but still served: " in broker.log_path.read_text(), what="the damage found")
    wait_until(lambda: statistics(broker)["scrub"]["is_complete"], what="a full pass")
    assert metric(broker, "metamq_scrub_age_seconds") < SLOW_S


def test_what_comes_damaged_to_a_consumer_is_told_to_its_broker(parts: Cluster, tmp_path: Path) -> None:
    broker, topic = start(parts, tmp_path / "broker", 3, **OFF)
    damage(broker, topic, 5)
    assert values_until_damage(parts, topic) == [0, 1, 2, 3, 4]
    wait_until(lambda: http_get(broker.http_port, "/readyz")[0] == 503, what="the report believed")
    assert statistics(broker)["damaged_count"] == 1
    assert statistics(broker)["scrub"]["verified_bytes"] == 0, "nothing but the one batch"


def test_a_report_of_what_is_sound_is_not_believed(parts: Cluster, tmp_path: Path) -> None:
    broker, topic = start(parts, tmp_path / "broker", 4, **OFF)

    async def report(offset: int) -> None:
        connection = await BrokerConnection.open("127.0.0.1", broker.port)
        try:
            (answer,) = await ask_offsets(connection, [report_of(TopicPartition(topic.topic, "4-0"), topic.id, offset)])
            assert (answer.status, answer.offset) == (0, MESSAGES)
        finally:
            await connection.close()

    damage(broker, topic, 9)
    for offset in (8, 1 << 40):
        asyncio.run(report(offset))
    wait_until(lambda: "but they are intact here" in broker.log_path.read_text(), what="the report looked at")
    assert statistics(broker)["damaged_count"] == 0
    asyncio.run(report(9))
    wait_until(lambda: statistics(broker)["damaged_count"] == 1, what="the true report believed")
    assert broker.running


def test_reports_that_wait_are_bounded() -> None:
    class Place:
        """A partition, to who only remembers it."""

    async def report() -> int:
        scrubber = Scrubber(None, BrokerConfig(), lambda partition, error: None)  # type: ignore[arg-type]
        one = Place()
        for offset in range(3 * REPORTS_OF_PARTITION_MAX):
            scrubber.report(one, offset)  # type: ignore[arg-type]
        assert len(scrubber._reports) == REPORTS_OF_PARTITION_MAX
        for _ in range(3 * REPORTS_MAX):
            scrubber.report(Place(), 0)  # type: ignore[arg-type]
        scrubber.close()
        return len(scrubber._reports)

    assert asyncio.run(report()) == REPORTS_MAX


def test_without_descriptors_the_scrub_waits_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pass that left out what it could not open would call all of the logs verified."""
    partitions, lacking = 5, [20]
    opened = os.open

    def open_or_lack(path: Any, flags: int, *more: Any, **settings: Any) -> int:
        if str(path).endswith(".log") and lacking[0] > 0:
            lacking[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return opened(path, flags, *more, **settings)

    async def run() -> None:
        topics = Topics(0, DataFolder.open(tmp_path, 0), FileCache())
        await topics.apply({"t": TopicConfig("t", {0: partitions}, segment_bytes=1000)}, {})
        ids, sizes = BatchIds(1), 0
        for partition in topics.partitions():
            batch = memoryview(encode([bytes(100)], base_timestamp_us=0))
            partition.append(batch, [read_header(batch)], ids)
            partition.log._flush_now()
            sizes += len(batch)
        scrubber = Scrubber(topics, BrokerConfig(), lambda partition, error: None)
        monkeypatch.setattr("metamq.broker.log.scrub.os.open", open_or_lack)
        task = asyncio.ensure_future(scrubber.run())
        await asyncio.to_thread(wait_until, lambda: scrubber.statistics()["is_complete"])
        task.cancel()
        assert scrubber.statistics()["pass_bytes"] == sizes
        scrubber.close()
        topics.close(ClosedError("broker"))

    monkeypatch.setattr(scrubber_module, "RETRY_S", 0.001)
    with caplog.at_level(logging.INFO, "metamq.broker"):
        asyncio.run(run())
    assert lacking == [0]
    assert caplog.text.count("logs are not verified at present: verifying logs: all ") == 1
    assert caplog.text.count("logs are verified again") == 1
    assert "was not verified" not in caplog.text
