"""Offsets outside ZooKeeper: in the application's own transaction, where each message counts once, and in a file."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Consumer, DatabaseOffsets, FileOffsets, TopicPartition
from metamq.client.fetch.commit_in import counted_limit
from metamq.client.fetch.inbox import PartitionState
from metamq.client.model import Message
from metamq.errors import ConfigError, MetamqError, OffsetOutOfRange, OwnershipLost, PartitionNotFound
from tests.client.idle import all_of
from tests.database_offsets import offsets_in

if TYPE_CHECKING:
    from tests.client.conftest import Shop

Connect = Callable[[], sqlite3.Connection]


def tp(topic: str, index: int = 0) -> TopicPartition:
    return TopicPartition(topic, f"0-{index}")


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    """Connections to a database with the offsets' table, and `seen`, which refuses nothing: doubles would show."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(tmp_path / "db", timeout=100)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    offsets_in(connect)
    with closing(connect()) as connection:
        connection.execute("CREATE TABLE seen (value INTEGER, partition TEXT)")
        connection.commit()
    return connect


@pytest.fixture
def database(connect: Connect) -> Iterator[sqlite3.Connection]:
    with closing(connect()) as connection:
        yield connection


def seen(database: sqlite3.Connection) -> list[int]:
    return [value for (value,) in database.execute("SELECT value FROM seen ORDER BY value, partition")]


def store(database: sqlite3.Connection, *messages: Message[Any]) -> None:
    database.executemany("INSERT INTO seen VALUES (?, ?)", [(int(m.value), m.partition) for m in messages])


def consumer_of(shop: Shop, topic: str, group: str, connect: Connect, **settings: Any) -> Consumer[Any]:
    return shop.consumer(topic, group, auto_commit=False, offsets=DatabaseOffsets(connect), **settings)


# What may be counted, by value


@pytest.mark.parametrize(
    ("position", "offset", "assumed", "sought", "committed", "limit"),
    [
        ("message 7", 8, None, None, 5, 7),
        ("message 7", 8, 8, None, 5, 7),  # again: what the transaction before wrote may be stored
        ("map", 8, None, None, 5, 7),
        ("map", 8, 8, None, 5, 8),  # nothing new in this partition
        ("map", 8, None, 5, 5, 5),  # sought to do it again: nothing behind that place may be stored
        ("message 7", 8, None, 6, 5, 7),
        ("message 7", 8, None, 2, 5, float("inf")),  # sought far back: to be counted anew
        ("map", 8, None, 2, None, 2),
    ],
)
def test_how_far_the_row_may_be(
    position: str, offset: int, assumed: int | None, sought: int | None, committed: int | None, limit: float
) -> None:
    state = PartitionState(tp("t"), None, 0)
    state.assumed_offset, state.sought_offset, state.committed_offset = assumed, sought, committed
    given = Message("t", "0-0", 7, None, b"", {}, 0) if position == "message 7" else {tp("t"): offset}
    assert counted_limit(state, given, offset) == limit


# On a real database


def test_results_and_offsets_are_stored_together(
    shop: Shop, group: str, connect: Connect, database: sqlite3.Connection
) -> None:
    topic = shop.topic(2)
    shop.send(topic, [b"%d" % number for number in range(0, 100, 2)], "0-0")
    shop.send(topic, [b"%d" % number for number in range(1, 100, 2)], "0-1")
    for start in range(0, 100, 10):
        with consumer_of(shop, topic, group, connect) as consumer:
            for number, message in enumerate(consumer):
                with database:
                    store(database, message)
                    consumer.commit(message, connection=database)
                if number == 9:
                    break
        assert len(seen(database)) == start + 10
    assert seen(database) == list(range(100))


def test_a_rolled_back_message_is_counted_when_it_is_done_again(
    shop: Shop, group: str, connect: Connect, database: sqlite3.Connection
) -> None:
    topic = shop.topic()
    shop.numbers(topic, 50)
    chance = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    with consumer_of(shop, topic, group, connect) as consumer:
        for message in consumer:
            while True:
                store(database, message)
                consumer.commit(message, connection=database)
                if chance.random() < 0.4:
                    database.rollback()
                    continue
                database.commit()
                break
            if message.offset == 49:
                break
    assert seen(database) == list(range(50))


def test_a_transaction_of_several_commits_may_be_rolled_back(
    shop: Shop, group: str, connect: Connect, database: sqlite3.Connection
) -> None:
    topic = shop.topic()
    shop.numbers(topic, 6)
    with consumer_of(shop, topic, group, connect) as consumer:
        messages = list(islice(consumer, 6))
        for _ in range(3):
            for message in messages[:3]:
                store(database, message)
                consumer.commit(message, connection=database)
            database.rollback()
        for message in messages:
            store(database, message)
            consumer.commit(message, connection=database)
        database.commit()
    assert seen(database) == list(range(6))


@pytest.mark.parametrize("sought", [False, True])
def test_when_the_outcome_of_a_commit_was_lost_nothing_is_counted_twice(
    shop: Shop, group: str, connect: Connect, database: sqlite3.Connection, sought: bool
) -> None:
    # The database committed, the application does not know and handles the message once more.
    topic = shop.topic()
    shop.numbers(topic, 5)
    with consumer_of(shop, topic, group, connect) as consumer:
        messages = iter(consumer)
        message = next(messages)
        with database:
            store(database, message)
            consumer.commit(message, connection=database)
        if sought:
            consumer.seek(tp(topic), 0)
            message = next(messages)
            assert message.offset == 0
        store(database, message)
        with pytest.raises(OwnershipLost, match="counted up to offset 1 already"):
            consumer.commit({tp(topic): 2} if sought else message, connection=database)
        database.rollback()
        message = next(messages)
        with database:
            store(database, message)
            consumer.commit(message, connection=database)
    assert seen(database) == [0, 1]


def test_the_rest_of_a_batch_that_is_partly_counted_comes_next(
    shop: Shop, group: str, connect: Connect, database: sqlite3.Connection
) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(10)]).result(60)
    with consumer_of(shop, topic, group, connect, idle_timeout_s=0.3) as consumer:
        with database:
            messages = list(islice(consumer, 4))
            store(database, *messages)
            consumer.commit(messages[3], connection=database)
        consumer.seek(tp(topic), 0)
        refused = 0
        while len(seen(database)) < 10:  # it may be idle before, on a slow machine
            for batch in consumer.batches():
                try:
                    with database:
                        store(database, *batch)
                        consumer.commit({tp(topic): batch.end_offset}, connection=database)
                except OwnershipLost:
                    refused += 1
        assert refused == 1
    assert seen(database) == list(range(10))


def test_all_that_is_done_and_unchanged_partitions(
    shop: Shop, group: str, connect: Connect, database: sqlite3.Connection
) -> None:
    topic = shop.topic(2)
    shop.send(topic, [b"1"], "0-1")
    shop.numbers(topic, 10)
    with consumer_of(shop, topic, group, connect, idle_timeout_s=0.3) as consumer:
        store(database, *all_of(consumer, 11))
        consumer.commit(connection=database)
        database.rollback()
        consumer.commit(connection=database)
        database.commit()
        shop.numbers(topic, 5, start=10)
        assert len(all_of(consumer, 5)) == 5
        consumer.commit(connection=database)
        consumer.commit({tp(topic, 0): 15, tp(topic, 1): 1}, connection=database)
        database.commit()
    offsets = database.execute("SELECT partition_name, next_offset FROM metamq_offsets ORDER BY 1").fetchall()
    assert offsets == [("0-0", 15), ("0-1", 1)]


def test_a_seek_back_counts_anew(shop: Shop, group: str, connect: Connect, database: sqlite3.Connection) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    with consumer_of(shop, topic, group, connect, idle_timeout_s=0.3) as consumer:

        def count_all() -> None:
            while len(seen(database)) < 10:  # it may be idle before, on a slow machine
                for message in consumer:
                    with database:
                        store(database, message)
                        consumer.commit(message, connection=database)

        count_all()
        database.execute("DELETE FROM seen")
        database.commit()
        consumer.seek(tp(topic), 0)
        count_all()
    assert seen(database) == list(range(10))


def test_a_former_owner_is_refused_and_its_results_roll_back(
    shop: Shop, group: str, connect: Connect, database: sqlite3.Connection
) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    with consumer_of(shop, topic, group, connect, consumer_id="former") as former:
        message = next(iter(former))
        shop.admin.evict(group, "former")
        with consumer_of(shop, topic, group, connect) as owner:
            again = next(iter(owner))
            assert again == message
            with pytest.raises(OwnershipLost), database:  # noqa: PT012
                store(database, message)
                former.commit(message, connection=database)
            with database:
                store(database, again)
                owner.commit(again, connection=database)
        assert seen(database) == [0]
        with pytest.raises(MetamqError, match="evicted"):
            next(iter(former))


def test_wrong_uses_are_named(shop: Shop, group: str, connect: Connect, database: sqlite3.Connection) -> None:
    topic = shop.topic()
    with shop.consumer(topic, group) as consumer, pytest.raises(ConfigError, match="needs offsets in a database"):
        consumer.commit(connection=database)
    with (
        shop.consumer(topic, group + "2", offsets=DatabaseOffsets(connect)) as consumer,
        pytest.raises(ConfigError, match="auto_commit"),
    ):
        consumer.commit(connection=database)
    with consumer_of(shop, topic, group + "3", connect) as consumer:
        shop.until(lambda: consumer.assignment)
        with pytest.raises(OffsetOutOfRange, match="has the offsets 0 to 0, not 1"):
            consumer.commit({tp(topic): 1}, connection=database)
        assert not database.in_transaction
    with pytest.raises(ConfigError, match="kept for a group"):
        shop.consumer(topic, offsets=DatabaseOffsets(connect))


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_missing_table_is_named_at_the_start_and_the_next_step_helps(
    shop: Shop, group: str, tmp_path: Path, broadcast: bool
) -> None:
    # It used to be tried again and again in the background: an idle consumer ended, and nothing was consumed.
    topic = shop.topic()
    shop.numbers(topic, 3)
    connect = partial(sqlite3.connect, tmp_path / "empty.db")
    offsets = DatabaseOffsets(connect, table="offsets_of_etl")
    settings: dict[str, Any] = {"offsets": offsets, "broadcast": broadcast}
    with pytest.raises(MetamqError, match=r"offsets_of_etl could not be used.*no such table.*create_offsets_table"):
        shop.consumer(topic, group, **settings)
    assert shop.admin.groups().get(group) is None, "it joined"
    offsets_in(connect, table="offsets_of_etl")
    with shop.consumer(topic, group, **settings) as consumer:
        assert [int(message.value) for message in islice(consumer, 3)] == [0, 1, 2]
    with shop.consumer(topic, group, **settings, idle_timeout_s=0.3) as consumer:  # one storage may serve several
        assert list(consumer) == []


WORKER = """
    import random, sqlite3, sys
    from metamq import Consumer, DatabaseOffsets
    from metamq.errors import ConnectError, OwnershipLost

    servers, path, topic, group, seed = sys.argv[1:]
    chance = random.Random(int(seed))

    def connect():
        connection = sqlite3.connect(path, timeout=100)
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    def joined():
        while True:
            try:
                return Consumer(
                    servers, topics=topic, group=group, auto_commit=False, offsets=DatabaseOffsets(connect),
                    session_timeout_ms=1000,
                )
            except ConnectError:  # so short a session may end before it has joined
                pass

    database = connect()
    with joined() as consumer:
        for message in consumer:
            try:
                database.execute("INSERT INTO seen VALUES (?, ?)", (int(message.value), message.partition))
                consumer.commit(message, connection=database)
                if chance.random() < 0.1:
                    database.rollback()
                    consumer.seek((message.topic, message.partition), message.offset)
                    continue
                database.commit()
            except OwnershipLost:
                database.rollback()
"""


@pytest.mark.slow
def test_each_message_counts_once_through_kills_freezes_and_rollbacks(
    shop: Shop, group: str, connect: Connect, database: sqlite3.Connection, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    topic = shop.topic(4)
    workers: list[subprocess.Popen[bytes]] = []

    def send(numbers: range) -> None:
        for index in range(4):
            shop.send(topic, [b"%d" % number for number in numbers if number % 4 == index], f"0-{index}")

    def start() -> None:
        command = [sys.executable, "-c", textwrap.dedent(WORKER), shop.cluster.zookeeper, str(tmp_path / "db")]
        workers.append(subprocess.Popen([*command, topic, group, str(chance.randrange(2**32))]))

    def counted(least: int) -> None:
        shop.until(lambda: len(seen(database)) >= least, 60)

    def members() -> set[int]:
        return {member.pid for member in shop.admin.describe_group(group).members}

    send(range(600))
    try:
        for _ in range(3):
            start()
        for number in range(1, 4):
            counted(number * 100 + chance.randrange(50))
            victim = workers.pop(0)
            victim.kill()
            victim.wait()
            start()
        # Frozen, perhaps in its transaction, until another one has its partitions; then it goes on.
        counted(450)
        workers[0].send_signal(signal.SIGSTOP)
        shop.until(lambda: workers[0].pid not in members())
        workers[0].send_signal(signal.SIGCONT)
        send(range(600, 700))
        counted(700)
        shop.until(lambda: sum(offsets(topic, database).values()) == 700)
        assert all(worker.poll() is None for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert seen(database) == list(range(700))


def offsets(topic: str, database: sqlite3.Connection) -> dict[str, int]:
    return dict(database.execute("SELECT partition_name, next_offset FROM metamq_offsets WHERE topic = ?", (topic,)))


# In a file, for broadcast consumers


def test_every_broadcast_consumer_reads_everything_and_goes_on_from_its_own_file(
    shop: Shop, group: str, tmp_path: Path
) -> None:
    topic = shop.topic(2)
    shop.send(topic, [b"%d" % number for number in range(100)])

    def read(name: str, count: int) -> list[int]:
        offsets = FileOffsets(tmp_path / name)
        with shop.consumer(topic, group, broadcast=True, offsets=offsets) as consumer:
            assert len(consumer.assignment) == 2
            return [int(message.value) for message in islice(consumer, count)]

    assert sorted(read("a", 60) + read("a", 40)) == list(range(100))
    assert sorted(read("b", 100)) == list(range(100))
    shop.send(topic, [b"100"])
    assert read("a", 1) == read("b", 1) == [100]


def test_a_file_is_used_by_one_broadcast_consumer_at_a_time(shop: Shop, group: str, tmp_path: Path) -> None:
    topic = shop.topic()
    with shop.consumer(topic, group, broadcast=True, offsets=FileOffsets(tmp_path / "a")):
        with pytest.raises(ConfigError, match="in use"):
            FileOffsets(tmp_path / "a")
        with pytest.raises(ConfigError, match="its own offsets"):
            shop.consumer(topic, group, broadcast=True)


def test_a_broadcast_consumer_follows_its_topic(shop: Shop, group: str, tmp_path: Path) -> None:
    topic = shop.topic()
    shop.numbers(topic, 3)
    with shop.consumer(topic, group, broadcast=True, offsets=FileOffsets(tmp_path / "a")) as consumer:
        messages = iter(consumer)
        assert [int(next(messages).value) for _ in range(3)] == [0, 1, 2]
        shop.admin.alter(topic, partitions=2)

        def is_sent() -> bool:
            """Once the producer has heard of the new partition."""
            with contextlib.suppress(PartitionNotFound):
                shop.send(topic, [b"new"], "0-1")
                return True
            return False

        shop.until(is_sent)
        assert next(messages).value == b"new"
        consumer.commit()
    with shop.consumer(topic, group, broadcast=True, offsets=FileOffsets(tmp_path / "a")) as consumer:
        shop.until(lambda: consumer.lag() == {tp(topic, 0): 0, tp(topic, 1): 0})
