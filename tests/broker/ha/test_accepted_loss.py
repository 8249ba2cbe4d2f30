"""Readers and groups after a promotion with an accepted loss: told, and led to where the logs agree."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from metamq import Consumer, DatabaseOffsets, FileOffsets
from metamq.client.offsets.offsets import OffsetStorage
from metamq.errors import OffsetDiverged
from metamq.zk.partitions import TopicPartition
from tests.broker.ha.test_replication import LAG_MS, SESSION_MS, Group, a_sync_topic, send
from tests.database_offsets import offsets_in
from tests.one_zookeeper import cluster
from tests.parts import read_to_end, until_answered, wait_until

TOPIC = "t"
AGREED = 10
"""Up to here both replicas have the same."""
GONE = 20
NEW = 40
"""So many come after the promotion: more than were lost, so that no offset is beyond the end."""


class Reader:
    """Notes what a consumer is given, in a thread, until it is closed."""

    def __init__(self, consumer: Consumer[Any]) -> None:
        self.given: list[bytes] = []
        self._consumer = consumer
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for message in self._consumer:
            self.given.append(message.value)

    def close(self) -> None:
        self._consumer.close()
        self._thread.join(60)


def values(name: bytes, count: int) -> list[bytes]:
    return [b"%s-%d" % (name, number) for number in range(count)]


def storages(folder: Path) -> dict[str, Callable[[], OffsetStorage | None]]:
    """A new one each time, by the name of the group that uses it."""

    def database() -> DatabaseOffsets:
        return offsets_in(lambda: sqlite3.connect(folder / "offsets.db"))

    return {"zookeeper": lambda: None, "file": lambda: FileOffsets(folder / "offsets.json"), "database": database}


@contextmanager
def a_loss(folder: Path) -> Iterator[tuple[Group, list[Reader]]]:
    """A master that was read to its end dies; a slave that lacks the last of it is promoted, and written to.

    A reader and a member of a group live through it.
    """
    with cluster(session_timeout_ms=SESSION_MS, insync_lag_ms=LAG_MS, folder=folder / "cluster") as running:
        group = Group(running)
        a_sync_topic(group, TOPIC, 1)
        slave = group.add_slave()
        group.wait_insync(0, 1)
        send(group, TOPIC, AGREED, b"both")
        group.wait_equal(0, 1)
        slave.kill()
        group.wait_insync(0)
        send(group, TOPIC, GONE, b"gone")
        for name, storage in storages(folder).items():
            offsets = settings_of(storage)
            with running.consumer(topics=[TOPIC], group=name, start="earliest", idle_timeout_s=1, **offsets) as one:
                assert len(read_to_end(one)) == AGREED + GONE
        readers = [Reader(running.consumer(topics=[TOPIC], start="earliest"))]
        readers.append(Reader(running.consumer(topics=[TOPIC], start="earliest", group="living")))
        try:
            for reader in readers:
                wait_until(lambda reader=reader: len(reader.given) == AGREED + GONE, what="all of it read")  # type: ignore[misc]
            group.replicas[0].kill()
            slave.start()
            group.promote(1, accept_loss=True)
            send(group, TOPIC, NEW, b"new")
            yield group, readers
        finally:
            for reader in readers:
                reader.close()
            slave.kill()


@pytest.mark.slow
def test_who_has_read_or_committed_what_was_given_up_is_told_and_misses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), a_loss(tmp_path) as (group, readers):
        for reader in readers:
            wait_until(lambda reader=reader: len(reader.given) >= AGREED + GONE + NEW, what="all of it read")  # type: ignore[misc]
            assert reader.given == values(b"both", AGREED) + values(b"gone", GONE) + values(b"new", NEW)
        with group.cluster.consumer(
            topics=[TOPIC], group="database", on_data_loss="fail", **_database(tmp_path)
        ) as one:
            with pytest.raises(OffsetDiverged, match=f"read from {AGREED} on") as caught:
                next(iter(one))
            assert (caught.value.agreed, caught.value.offset) == (AGREED, AGREED + GONE)
            one.seek(TopicPartition(TOPIC, "0-0"), AGREED)
            assert next(iter(one)).value == b"new-0"
        for name, storage in storages(tmp_path).items():
            caplog.clear()
            with group.cluster.consumer(topics=[TOPIC], group=name, idle_timeout_s=1, **settings_of(storage)) as one:
                # The group that keeps its offsets in the database has the first one already.
                assert [message.value for message in read_to_end(one)] == values(b"new", NEW)[name == "database" :]
            told = [record.getMessage() for record in caplog.records if "Continuing at" in record.getMessage()]
            if name != "database":
                (message,) = told
                assert (
                    f"not {AGREED + GONE} (a promotion with an accepted loss gave up the messages read from {AGREED} on"
                    in message
                )
            with group.cluster.consumer(topics=[TOPIC], group=name, idle_timeout_s=0.5, **settings_of(storage)) as one:
                assert read_to_end(one) == [], "it is committed at the new log's end"
        group.replicas[0].start()
        group.wait_insync(0, 1, master=1)
        group.wait_equal(0, 1)


@pytest.mark.slow
def test_who_goes_on_where_the_logs_agreed_is_told_of_the_next_loss_too(tmp_path: Path) -> None:
    """Also if that comes before anything was read there: by then nothing else tells what the reader has. What was
    fetched before, and is in the new log, is handed out first; what is not there, is not."""
    with cluster(session_timeout_ms=SESSION_MS, insync_lag_ms=LAG_MS, folder=tmp_path / "cluster") as running:
        group = Group(running)
        a_sync_topic(group, TOPIC, 1)
        first, second = group.add_slave(), group.add_slave()
        try:
            group.wait_insync(0, 1, 2)
            place = TopicPartition(TOPIC, "0-0")
            sent = send(group, TOPIC, 5, b"all")
            for slave, others, name in (second, (0, 1), b"two"), (first, (0,), b"one"):
                slave.kill()
                group.wait_insync(*others)
                sent += send(group, TOPIC, 5, name)
            with running.consumer(topics=[TOPIC], start="earliest", on_data_loss="fail") as consumer:
                messages = iter(consumer)
                assert [next(messages).value for _ in range(3)] == sent[:3]
                wait_until(lambda: consumer.health().partitions[place].lag == len(sent) - 2, what="all of it fetched")
                group.replicas[0].kill()
                first.start()
                group.promote(1, accept_loss=True)
                send(group, TOPIC, 10, b"new")
                wait_until(lambda: "gave up" in consumer.health().partitions[place].last_error, what="the loss noticed")
                messages = iter(consumer)
                assert [next(messages).value for _ in range(7)] == sent[3:10]
                with pytest.raises(OffsetDiverged) as caught:
                    next(messages)
                assert (caught.value.topic, caught.value.partition, caught.value.agreed) == (*place, 10)
                first.kill()
                second.start()
                group.promote(2, accept_loss=True)
                last = send(group, TOPIC, 20, b"last")
                consumer.seek(place, 10)
                with pytest.raises(OffsetDiverged) as caught:
                    next(iter(consumer))
                assert caught.value.agreed == 5
                consumer.seek(place, 5)
                messages = iter(consumer)
                assert [next(messages).value for _ in last] == last
            assert group.read(TOPIC) == sent[:5] + last
        finally:
            for slave in (first, second):
                slave.kill()


def settings_of(storage: Callable[[], OffsetStorage | None]) -> dict[str, Any]:
    offsets = storage()
    return {} if offsets is None else {"offsets": offsets}


def _database(folder: Path) -> dict[str, Any]:
    return settings_of(storages(folder)["database"])


@pytest.mark.slow
@pytest.mark.parametrize("on_data_loss", ["fail", "earliest"])
def test_of_a_batch_in_hand_that_is_given_up_nothing_more_is_handed_out(tmp_path: Path, on_data_loss: str) -> None:
    with cluster(session_timeout_ms=SESSION_MS, insync_lag_ms=LAG_MS, folder=tmp_path / "cluster") as running:
        group = Group(running)
        a_sync_topic(group, TOPIC, 1)
        slave, place = group.add_slave(), TopicPartition(TOPIC, "0-0")
        group.wait_insync(0, 1)
        with running.producer() as producer:
            producer.send_many(TOPIC, [b"both"] * 10).result(60)
            group.wait_equal(0, 1)
            slave.kill()
            group.wait_insync(0)
            producer.send_many(TOPIC, [b"gone"] * 1000).result(60)
        with running.consumer(topics=[TOPIC], start="earliest", on_data_loss=on_data_loss) as consumer:
            messages = iter(consumer)
            assert [next(messages).value for _ in range(15)] == [b"both"] * 10 + [b"gone"] * 5
            group.replicas[0].kill()
            slave.start()
            group.promote(1, accept_loss=True)
            last = send(group, TOPIC, 3, b"new")
            if on_data_loss == "fail":
                wait_until(lambda: "gave up" in consumer.health().partitions[place].last_error, what="the loss noticed")
                with pytest.raises(OffsetDiverged, match="gave up the messages read from 10 on"):
                    next(messages)
                consumer.seek(place, 10)
                messages = iter(consumer)
            else:
                wait_until(lambda: until_answered(consumer.lag).get(place) == len(last), what="the loss noticed")
            assert [next(messages).value for _ in last] == last
        slave.kill()
