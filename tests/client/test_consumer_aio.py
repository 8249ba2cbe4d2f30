"""The asyncio Consumer: the same promises, kept in the application's own loop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import metamq
from metamq import DatabaseOffsets, Message, Rollback, TopicPartition, aio
from metamq.client.net.cluster import MASTER
from metamq.errors import (
    ClosedError,
    ConfigError,
    ConnectError,
    ForkedError,
    OffsetOutOfRange,
    PartitionNotFound,
    TopicNotFound,
)
from tests.client.idle import LIMIT_S, all_of_aio
from tests.database_offsets import offsets_in

if TYPE_CHECKING:
    from tests.client.conftest import Shop


def tp(topic: str, index: int = 0) -> TopicPartition:
    return TopicPartition(topic, f"0-{index}")


@asynccontextmanager
async def consuming(shop: Shop, topic: str, group: str | None = None, **settings: Any) -> AsyncIterator[Any]:
    async with aio.Consumer(shop.cluster.zookeeper, topics=topic, group=group, **settings) as consumer:
        yield consumer


async def first(consumer: aio.Consumer[Any], count: int) -> list[Message[Any]]:
    messages: list[Message[Any]] = []
    async with asyncio.timeout(LIMIT_S):
        while True:  # a short idle time-out may end a loop on a slow machine
            async with aclosing(aiter(consumer)) as coming:
                async for message in coming:
                    messages.append(message)
                    if len(messages) == count:
                        return messages


async def until(condition: Callable[[], object | Awaitable[object]], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            outcome = condition()
            if await outcome if inspect.isawaitable(outcome) else outcome:
                return
            await asyncio.sleep(0.01)


def values(messages: list[Message[Any]]) -> list[int]:
    return [int(message.value) for message in messages]


def test_both_faces_offer_the_same() -> None:
    blocking_only = {"scan", "Scan"}  # libraries read Arrow's streams by calls that block: a thread does that
    assert set(aio.__all__) == set(metamq.__all__) - {"__version__", "aio", "errors", "types"} - blocking_only

    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    consumer = {"assignment", "batches", "close", "commit", "health", "lag", "pause", "poll", "resume", "run", "seek"}
    consumer |= {"dead_letter", "stop", "stopped"}
    assert public(metamq.Consumer) == public(aio.Consumer) - {"open"} == consumer
    producer = {"close", "flush", "health", "send", "send_many", "send_table", "transaction"}
    pep_249 = {"tpc_begin", "tpc_commit", "tpc_prepare", "tpc_recover", "tpc_rollback", "xid"}
    errors = {name for name in public(metamq.Producer) if name[0].isupper()}
    assert public(metamq.Producer) == public(aio.Producer) - {"open", "drain"} == producer | pep_249 | errors
    assert public(metamq.Admin) == public(aio.Admin) - {"open"}
    assert inspect.signature(metamq.Consumer) == inspect.signature(aio.Consumer)
    assert list(inspect.signature(metamq.Consumer.run).parameters) == list(
        inspect.signature(aio.Consumer.run).parameters
    )


def test_messages_batches_and_what_is_done(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(30)]).result(60)

    async def scenario() -> None:
        async with consuming(shop, topic, group) as consumer:
            assert values(await first(consumer, 10)) == list(range(10))
            assert values(await first(consumer, 5)) == list(range(10, 15))
            async with aclosing(consumer.batches()) as batches:
                assert (await anext(batches)).offsets == range(15, 30)
        assert shop.committed(group)[tp(topic)] == 30

    asyncio.run(scenario())


def test_after_an_exception_the_message_in_hand_comes_again(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with consuming(shop, topic, group) as consumer:
                await first(consumer, 4)
                raise ZeroDivisionError
        assert shop.committed(group)[tp(topic)] == 3
        async with consuming(shop, topic, group) as consumer:
            assert values(await first(consumer, 1)) == [3]

    asyncio.run(scenario())


def test_a_cancelled_task_leaves_its_message_to_come_again(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)

    async def scenario() -> None:
        handled: list[int] = []

        async def work() -> None:
            async with consuming(shop, topic, group) as consumer:
                async for message in consumer:
                    handled.append(message.offset)
                    if message.offset == 5:
                        await asyncio.sleep(300)

        task = asyncio.create_task(work())
        await until(lambda: 5 in handled)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert shop.committed(group)[tp(topic)] == 5

    asyncio.run(scenario())


def test_cancelling_a_wait_loses_nothing(shop: Shop) -> None:
    topic = shop.topic()

    async def scenario() -> None:
        async with consuming(shop, topic) as consumer:
            for number in range(20):
                waiting = asyncio.create_task(first(consumer, 1))
                await asyncio.sleep(0)
                await asyncio.to_thread(shop.numbers, topic, 1, number)
                waiting.cancel()
                got = await asyncio.gather(waiting, return_exceptions=True)
                if isinstance(got[0], asyncio.CancelledError):
                    assert values(await first(consumer, 1)) == [number]
                else:
                    assert values(got[0]) == [number]  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_commit_seek_pause_resume_lag_health(shop: Shop, group: str) -> None:
    topic = shop.topic()
    for number in range(20):
        shop.producer.send(topic, b"%d" % number, timestamp=datetime.fromtimestamp(100 + number, UTC))
    shop.producer.flush()

    async def scenario() -> None:
        async with consuming(shop, topic, group, auto_commit=False, idle_timeout_s=0.3) as consumer:
            messages = await first(consumer, 5)
            await consumer.commit(messages[2])
            assert shop.committed(group)[tp(topic)] == 3
            await consumer.commit()
            assert shop.committed(group)[tp(topic)] == 4
            await consumer.seek(tp(topic), datetime.fromtimestamp(110, UTC))
            assert values(await first(consumer, 1)) == [10]
            await consumer.seek(tp(topic), "earliest")
            assert values(await first(consumer, 1)) == [0]
            with pytest.raises(ConfigError):
                await consumer.seek(tp(topic), -3)
            consumer.pause()
            assert [message async for message in consumer] == []
            assert consumer.assignment == [tp(topic)]
            consumer.resume(tp(topic))
            assert values(await first(consumer, 2)) == [1, 2]
            assert await consumer.lag() == {tp(topic): 18}
            assert consumer.health().partitions[tp(topic)].in_hand
            with pytest.raises(ConfigError, match="does not read topic"):
                await consumer.commit({TopicPartition("other", "0-0"): 1})

    asyncio.run(scenario())


def test_callbacks_may_be_coroutines_and_are_waited_for(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)
    events: list[str] = []

    async def scenario() -> None:
        consumers: list[aio.Consumer[Any]] = []

        async def revoked(partitions: list[TopicPartition]) -> None:
            await asyncio.sleep(0.05)
            await consumers[0].commit()
            events.append("revoked")

        consumer: aio.Consumer[Any] = aio.Consumer(
            shop.cluster.zookeeper, topics=topic, group=group, auto_commit=False,
            on_assigned=lambda partitions: events.append("assigned"), on_revoked=revoked,
        )  # fmt: skip
        consumers.append(consumer)
        async with consumer:
            assert values(await first(consumer, 3)) == [0, 1, 2]
        assert events == ["assigned", "revoked"]
        assert shop.committed(group)[tp(topic)] == 3

        async def fail(partitions: list[TopicPartition]) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            async with consuming(shop, topic, group, on_assigned=fail) as broken:
                await first(broken, 1)

    asyncio.run(scenario())


def test_offsets_in_a_transaction(shop: Shop, group: str, tmp_path: Path) -> None:
    topic = shop.topic()
    shop.numbers(topic, 10)

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "db")

    async def scenario() -> None:
        offsets_in(connect)
        with closing(connect()) as database:
            database.execute("CREATE TABLE seen (value INTEGER)")
            for _ in range(2):
                async with consuming(
                    shop, topic, group, auto_commit=False, offsets=DatabaseOffsets(connect)
                ) as consumer:
                    for number in range(5):
                        [message] = await first(consumer, 1)
                        with database:
                            database.execute("INSERT INTO seen VALUES (?)", (int(message.value),))
                            await consumer.commit(message, connection=database)
                        assert number < 5
            assert [value for (value,) in database.execute("SELECT value FROM seen")] == list(range(10))

    asyncio.run(scenario())


def test_run_retries_rolls_back_and_gives_up(shop: Shop, group: str) -> None:
    topic = shop.topic(3)
    for index in range(3):
        shop.send(topic, [b"%d" % number for number in range(index, 30, 3)], f"0-{index}")
    counts: Counter[int] = Counter()
    busy: Counter[str] = Counter()

    async def listener(message: Message[Any]) -> None:
        number = int(message.value)
        counts[number] += 1
        busy[message.partition] += 1
        assert busy[message.partition] == 1
        try:
            await asyncio.sleep(0)
            if number == 7 and counts[7] < 3:
                raise ValueError
            if number == 8 and counts[8] < 4:
                raise Rollback(0.001)
            if number == 9:
                raise RuntimeError("never")
        finally:
            busy[message.partition] -= 1

    async def scenario() -> None:
        async with consuming(shop, topic, group, idle_timeout_s=0.5) as consumer:
            while len(counts) < 30 or counts[9] < 3:
                await consumer.run(listener, max_attempts=3, retry_delay_s=0.001, concurrency=2)
        async with consuming(shop, f"{group}.dead-letter", idle_timeout_s=0.3) as letters:
            assert values(await all_of_aio(letters, 1)) == [9]

    asyncio.run(scenario())
    assert counts == Counter(range(30)) + Counter({7: 2, 8: 3, 9: 2})
    assert sum(offset or 0 for offset in shop.committed(group).values()) == 30


def test_a_plain_function_will_do_as_a_listener(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    handled: list[int] = []

    async def scenario() -> None:
        async with consuming(shop, topic, group, idle_timeout_s=1) as consumer:
            while len(handled) < 5:
                await consumer.run(lambda message: handled.append(int(message.value)))
        assert shop.committed(group)[tp(topic)] == 5

    asyncio.run(scenario())
    assert handled == list(range(5))


def test_dead_letters_share_one_session(shop: Shop, group: str, caplog: pytest.LogCaptureFixture) -> None:
    topic = shop.topic(3)
    for index in range(3):
        shop.send(topic, [b"%d" % index] * 5, f"0-{index}")

    failed: list[int] = []

    async def fail(message: Message[Any]) -> None:
        failed.append(message.offset)
        raise RuntimeError(message.value)

    def sessions() -> int:
        return sum("connected, session" in record.getMessage() for record in caplog.records)

    async def scenario() -> None:
        async with consuming(shop, topic, group, idle_timeout_s=0.5) as consumer:
            caplog.set_level(logging.INFO, logger="metamq.zk")
            while len(failed) < 15:
                await consumer.run(fail, max_attempts=1)
            assert sessions() == 0  # they have that of the consumer
        async with consuming(shop, f"{group}.dead-letter", idle_timeout_s=0.3) as letters:
            assert sorted(values(await all_of_aio(letters, 15))) == [0] * 5 + [1] * 5 + [2] * 5

    asyncio.run(scenario())


def test_run_without_dead_letters_ends_with_the_error_and_goes_on_with_the_message(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(10)]).result(60)
    handled: list[int] = []

    async def listener(message: Message[Any]) -> None:
        handled.append(message.offset)
        if handled.count(3) == 1 and message.offset == 3:
            raise RuntimeError

    async def scenario() -> None:
        async with consuming(shop, topic, group, idle_timeout_s=0.3) as consumer:
            with pytest.raises(RuntimeError):  # noqa: PT012
                while 3 not in handled:
                    await consumer.run(listener, max_attempts=1, dead_letter=False)
            while 9 not in handled:
                await consumer.run(listener, dead_letter=False)
        assert handled == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9]

    asyncio.run(scenario())


def test_a_revoked_partition_is_not_kept_by_rollbacks(shop: Shop, group: str) -> None:
    topic = shop.topic(2)
    shop.send(topic, [b"0"], "0-0")
    shop.send(topic, [b"0"], "0-1")

    async def scenario() -> None:
        failed: set[str] = set()

        async def fail(message: Message[Any]) -> None:
            failed.add(message.partition)
            raise Rollback(0.01 if message.partition == "0-0" else 60)

        async with consuming(shop, topic, group, consumer_id="a") as consumer:
            running = asyncio.create_task(consumer.run(fail))
            await until(lambda: len(failed) == 2)
            async with consuming(shop, topic, group, consumer_id="b") as other:
                assert (await first(other, 1))[0].offset == 0
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_close_ends_loops_and_waits_for_nobody(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)

    async def scenario() -> None:
        consumer = await aio.Consumer[bytes](shop.cluster.zookeeper, topics=topic, group=group).open()
        got: list[int] = []

        async def read() -> None:
            async for message in consumer:
                got.append(message.offset)  # noqa: PERF401

        reading = asyncio.create_task(read())
        await until(lambda: len(got) == 5)
        await consumer.close()
        await consumer.close()
        await reading
        assert shop.committed(group)[tp(topic)] == 5
        await every_use_is_refused(consumer, topic, ClosedError, r"this consumer is closed\. Make a new one")
        assert consumer.health().partitions == {}

    asyncio.run(scenario())


async def every_use_is_refused(consumer: aio.Consumer[Any], topic: str, error: type[Exception], match: str) -> None:
    async def nothing(message: Message[Any]) -> None:
        raise AssertionError(message)

    uses: list[Callable[[], Any]] = [
        lambda: anext(aiter(consumer)),
        lambda: anext(consumer.batches()),
        lambda: consumer.run(nothing),
        lambda: consumer.commit(),
        lambda: consumer.commit(connection=sqlite3.connect(":memory:")),
        lambda: consumer.seek(tp(topic), 0),
        lambda: consumer.pause(),
        lambda: consumer.resume(tp(topic)),
        lambda: consumer.lag(),
        lambda: consumer.assignment,
    ]
    for use in uses:
        with pytest.raises(error, match=match):  # noqa: PT012
            outcome = use()
            await outcome


def test_before_open_every_use_says_so_and_it_is_opened_once(shop: Shop, group: str) -> None:
    topic = shop.topic()

    async def scenario() -> None:
        consumer = aio.Consumer[bytes](shop.cluster.zookeeper, topics=topic, group=group)
        await every_use_is_refused(consumer, topic, ConfigError, "this Consumer is not open. Use `async with Consumer")
        await consumer.close()
        async with consumer:
            with pytest.raises(ConfigError, match="was opened before"):
                await consumer.open()
        with pytest.raises(ConfigError, match="was opened before"):
            await consumer.open()

    asyncio.run(scenario())


def test_a_second_task_that_iterates_is_refused_while_the_first_is_at_it(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 3)

    async def scenario() -> None:
        async with consuming(shop, topic, group) as consumer:
            async with aclosing(aiter(consumer)) as messages:
                assert (await anext(messages)).offset == 0
                for use in (first(consumer, 1), anext(consumer.batches()), consumer.run(print)):
                    with pytest.raises(ConfigError, match=r"task '.*' iterates this consumer already"):
                        await asyncio.ensure_future(use)
                one = asyncio.create_task(anext(messages))  # handed on
                assert (await one).offset == 1
            one = asyncio.create_task(first(consumer, 1))
            assert values(await one) == [2]

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forks_child_consumer_and_admin_say_so_and_new_ones_work(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 2)
    read, write = os.pipe()

    async def in_the_child(consumer: Any, admin: aio.Admin, messages: Any) -> bytes:
        for use in (anext(messages), first(consumer, 1), consumer.commit(), consumer.close(), admin.topics()):
            with pytest.raises(ForkedError, match="in the child"):
                async with asyncio.timeout(60):
                    await use
        await admin.close()
        async with consuming(shop, topic) as mine:
            return b"well" if values(await first(mine, 1)) == [0] else b"wrong message"

    async def scenario() -> None:
        async with aio.Admin(shop.cluster.zookeeper) as admin, consuming(shop, topic, group) as consumer:
            messages = aiter(consumer)
            assert (await anext(messages)).offset == 0
            child = os.fork()
            if child == 0:
                try:
                    os.write(write, asyncio.run(in_the_child(consumer, admin, messages)))
                except BaseException as error:
                    os.write(write, repr(error).encode())
                finally:
                    os._exit(0)
            await asyncio.to_thread(os.waitpid, child, 0)
            assert os.read(read, 1000) == b"well"
            assert (await anext(messages)).offset == 1
            assert topic in await admin.topics()

    try:
        asyncio.run(scenario())
    finally:
        os.close(read)
        os.close(write)


def test_errors_come_as_they_do_in_the_blocking_one(shop: Shop, group: str) -> None:
    topic = shop.topic()

    async def scenario() -> None:
        with pytest.raises(TopicNotFound):
            async with consuming(shop, "no-such-topic", group):
                pass
        with pytest.raises(ConfigError, match="needs a topic"):
            aio.Consumer(topics=[])
        async with consuming(shop, topic, group, on_data_loss="fail") as consumer:
            await until(lambda: consumer.assignment)
            with pytest.raises(OffsetOutOfRange, match="0 to 0, not 50"):
                await consumer.seek(tp(topic), 50)
            with pytest.raises(OffsetOutOfRange, match="0 to 0, not 50"):
                await consumer.commit({tp(topic): 50})
            with pytest.raises(PartitionNotFound):
                await consumer.seek((topic, "0-9"), 0)
        async with consuming(shop, topic) as consumer:
            with pytest.raises(ConfigError, match="without a group"):
                await consumer.commit()
            with pytest.raises(ConfigError, match="belongs to a group"):
                await consumer.run(lambda message: asyncio.sleep(0))
            with pytest.raises(ConfigError, match="concurrency"):
                await consumer.run(lambda message: asyncio.sleep(0), concurrency=0, dead_letter=False)

    asyncio.run(scenario())


def test_close_ends_the_question_where_to_begin_and_no_connection_is_opened_after_it(shop: Shop) -> None:
    topic = shop.topic()

    async def scenario() -> None:
        consumer = await aio.Consumer[bytes](shop.cluster.zookeeper, topics=topic).open()
        core = consumer._core
        for _ in range(100_000):
            if core._finder._asking:
                break
            await asyncio.sleep(0)
        assert core._finder._asking
        await core.cluster.refresh_brokers()
        address = core.cluster._address(shop.cluster.broker.broker_id, MASTER)
        assert address is not None
        await consumer.close()
        assert not core._finder._asking
        with pytest.raises(ConnectError, match="the client is closed"):
            await core.cluster.connections.get(address)

    asyncio.run(scenario())


def test_an_unclosed_consumer_warns(shop: Shop) -> None:
    topic = shop.topic()

    async def scenario() -> None:
        consumers = [await aio.Consumer[bytes](shop.cluster.zookeeper, topics=topic).open()]
        core = consumers[0]._core
        with pytest.warns(ResourceWarning, match="a Consumer was not closed"):
            consumers.clear()
        gc.collect()
        await core.close(last_done=False)

    asyncio.run(scenario())


@pytest.mark.parametrize("order", ["partition", "key"])
def test_stop_finishes_the_messages_in_hand(shop: Shop, group: str, order: Any) -> None:
    topic = shop.topic()
    values = [b"%d" % number for number in range(50)]
    shop.producer.send_many(topic, values, [b"k"] * 50).result(60)
    begun: list[int] = []

    async def scenario() -> None:
        async with consuming(shop, topic, group) as consumer:
            go_on = asyncio.Event()

            async def slow(message: Message[int]) -> None:
                begun.append(message.offset)
                if message.offset == 9:
                    consumer.stop()
                    asyncio.get_running_loop().call_later(0.01, go_on.set)
                    await go_on.wait()

            await consumer.run(slow, order=order)
            assert [message async for message in consumer] == []

    asyncio.run(scenario())
    assert begun == list(range(10))
    assert shop.committed(group)[tp(topic)] == 10
