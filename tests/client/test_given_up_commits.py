"""auto_commit=False: run() commits a message that it gave up, if its listener has left nothing uncommitted before."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metamq import DatabaseOffsets, FileOffsets, GiveUp, Message, TopicPartition
from metamq.client.fetch import commits
from tests.database_offsets import offsets_in

if TYPE_CHECKING:
    from tests.client.conftest import Shop

Run = Callable[..., None]
Commit = Callable[[], None]


@pytest.fixture(params=["threads", "tasks"])
def run(request: pytest.FixtureRequest, shop: Shop) -> Run:
    """Calls `listener(message, commit)` for `count` messages of a topic, by `run()` of one API, without auto_commit.
    The listener is a coroutine function in both, as its commits are."""

    def in_threads(listener: Any, topic: str, group: str, count: int, **settings: Any) -> None:
        order = settings.pop("order", "partition")
        with shop.consumer(topic, group, auto_commit=False, **settings) as consumer:

            def listen(message: Message[Any]) -> None:
                async def commit() -> None:
                    consumer.commit(message)

                if message.offset == count:
                    consumer.stop()
                else:
                    asyncio.run(listener(message, commit))

            consumer.run(listen, order=order, retry_delay_s=0.001)

    async def in_tasks(listener: Any, topic: str, group: str, count: int, **settings: Any) -> None:
        order = settings.pop("order", "partition")
        async with shop.cluster.aio_consumer(topics=topic, group=group, auto_commit=False, **settings) as consumer:

            async def listen(message: Message[Any]) -> None:
                if message.offset == count:
                    consumer.stop()
                else:
                    await listener(message, lambda: consumer.commit(message))

            await consumer.run(listen, order=order, retry_delay_s=0.001)

    return in_threads if request.param == "threads" else lambda *args, **named: asyncio.run(in_tasks(*args, **named))


@pytest.fixture
def topic(shop: Shop) -> str:
    """A topic with seven messages: the last one only ends `run`."""
    name = shop.topic()
    shop.numbers(name, 7)
    return name


async def commits_even_ones(message: Message[Any], commit: Any) -> None:
    """Gives the others up: 1, then 3 and 5 after a commit."""
    if message.offset % 2 or message.offset == 2:
        raise GiveUp
    await commit()


def test_it_is_committed_when_its_letter_is_stored(shop: Shop, topic: str, group: str, run: Run) -> None:
    run(commits_even_ones, topic, group, 6)
    assert shop.committed(group) == {TopicPartition(topic, "0-0"): 6}


def test_also_in_a_file(shop: Shop, topic: str, group: str, run: Run, tmp_path: Path) -> None:
    again: list[int] = []

    async def note(message: Message[Any], commit: Any) -> None:
        again.append(message.offset)

    run(commits_even_ones, topic, group, 6, offsets=FileOffsets(tmp_path / "offsets"))
    run(note, topic, group, 6, offsets=FileOffsets(tmp_path / "offsets"))
    assert again == []


def test_never_beyond_a_message_that_its_listener_did_not_commit(shop: Shop, topic: str, group: str, run: Run) -> None:
    async def every_third(message: Message[Any], commit: Any) -> None:
        if message.offset in (1, 4, 5):
            raise GiveUp
        if message.offset == 3:
            await commit()
            assert shop.committed(group) == {TopicPartition(topic, "0-0"): 4}
        if message.offset == 2:
            assert shop.committed(group)[TopicPartition(topic, "0-0")] == 0, "message 0 is not committed"

    run(every_third, topic, group, 6)
    assert shop.committed(group) == {TopicPartition(topic, "0-0"): 6}


def test_never_beyond_what_a_loop_has_read_before(shop: Shop, topic: str, group: str) -> None:
    with shop.consumer(topic, group, auto_commit=False) as consumer:
        for message in consumer:
            if message.offset == 2:
                break

        def listen(message: Message[Any]) -> None:
            consumer.stop()
            raise GiveUp

        consumer.run(listen)
    assert (shop.committed(group)[TopicPartition(topic, "0-0")] or 0) == 0


def test_a_filtered_message_is_in_no_way(shop: Shop, topic: str, group: str, run: Run) -> None:
    run(commits_even_ones, topic, group, 6, filter=lambda message: message.offset not in (0, 4))
    assert shop.committed(group) == {TopicPartition(topic, "0-0"): 6}


def test_in_the_order_of_keys_nothing_is_committed(shop: Shop, topic: str, group: str, run: Run) -> None:
    async def give_up(message: Message[Any], commit: Any) -> None:
        raise GiveUp

    run(give_up, topic, group, 6, order="key")
    assert shop.committed(group) == {TopicPartition(topic, "0-0"): 0}


# In a database


@pytest.fixture
def database(tmp_path: Path) -> Callable[[], sqlite3.Connection]:
    return lambda: sqlite3.connect(tmp_path / "results.db", timeout=30, check_same_thread=False)


def counted(storage: DatabaseOffsets, group: str, topic: str) -> int:
    tp = TopicPartition(topic, "0-0")
    held = asyncio.run(storage.read(group, [tp]))[tp]
    return -1 if held is None else held.offset


def test_a_transaction_that_was_rolled_back_counts_nothing(
    shop: Shop, topic: str, group: str, database: Callable[[], sqlite3.Connection]
) -> None:
    storage, rows = offsets_in(database), []
    with shop.consumer(topic, group, auto_commit=False, offsets=storage) as consumer:

        def listen(message: Message[Any]) -> None:
            rows.append(counted(storage, group, topic))
            if message.offset == 6:
                consumer.stop()
                return
            with closing(database()) as connection, connection:
                consumer.commit(message, connection=connection)
                if message.offset in (1, 2, 5):
                    raise GiveUp

        consumer.run(listen)
    assert rows == [-1, 1, 2, 3, 4, 5, 6]


def test_what_is_counted_already_is_not_set_back(
    shop: Shop, topic: str, group: str, database: Callable[[], sqlite3.Connection]
) -> None:
    storage, tp, rows = offsets_in(database), TopicPartition(topic, "0-0"), []
    with shop.consumer(topic, group, auto_commit=False, offsets=storage) as consumer:
        with closing(database()) as connection, connection:
            for message in consumer:
                if message.offset == 3:
                    break
            consumer.commit(message, connection=connection)
        consumer.seek(tp, 1)

        def listen(message: Message[Any]) -> None:
            rows.append((message.offset, counted(storage, group, topic)))
            if message.offset < 5:
                raise GiveUp
            if message.offset == 6:
                consumer.stop()

        consumer.run(listen)
    assert rows == [(1, 4), (2, 4), (3, 4), (4, 4), (5, 5), (6, 5)]


def test_an_open_transaction_of_the_listener_ends_nothing(
    shop: Shop, topic: str, group: str, database: Callable[[], sqlite3.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "DATABASE_PATIENCE_S", 0.2)
    storage, rows = offsets_in(database), []
    with (
        closing(database()) as connection,
        shop.consumer(topic, group, auto_commit=False, offsets=storage) as consumer,
    ):

        def listen(message: Message[Any]) -> None:
            connection.rollback()
            rows.append(counted(storage, group, topic))
            if message.offset == 6:
                consumer.stop()
                return
            consumer.commit(message, connection=connection)
            if message.offset == 1:
                raise GiveUp
            connection.commit()

        consumer.run(listen)
    assert rows == [-1, 1, 1, 3, 4, 5, 6]
