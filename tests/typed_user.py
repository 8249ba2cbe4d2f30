# pyright: strict
"""A user's program, never run: `./dev lint` has mypy and pyright, both strict, say what they make of the public API."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, assert_type

import aiosqlite
import psycopg
from sqlalchemy import Connection, orm
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

import metamq.tx
from metamq import (
    Admin,
    Consumer,
    DatabaseOffsets,
    Delivery,
    FileOffsets,
    FlushEvery,
    Message,
    MessageBatch,
    Producer,
    ProducerHealth,
    Receipt,
    ReceiptRange,
    Rollback,
    Topic,
    TopicPartition,
    __version__,
    aio,
    create_offsets_table,
    scan,
)
from metamq.errors import BufferFull, DeliveryTimeout, MetamqError, OwnershipLost
from metamq.testing import BrokerProcess, Cluster, cluster
from metamq.tx.aio import create_outcome_table, dbtx
from metamq.types import GroupDescription

Order = dict[str, int]


@dataclass
class Parcel:
    number: int


PARCELS = Topic("parcels", Parcel)


async def with_a_typed_topic() -> None:
    assert_type(PARCELS, Topic[Parcel])
    assert_type(PARCELS.decode(b"{}"), Parcel)
    assert_type(Topic.avro("trips", "{}"), Topic[dict[str, Any]])
    assert_type(Topic.arrow("readings", object()), Topic[Any])
    with Producer() as producer:
        producer.send_table(Topic.arrow("readings", object()), scan("readings"))
        assert_type(producer.send(PARCELS, Parcel(1), "key").result(), Receipt)
        producer.send_many(PARCELS, [Parcel(1), Parcel(2)])
        producer.send(PARCELS, b"1")  # type: ignore[misc]  # pyright: ignore[reportArgumentType, reportCallIssue]
    with Consumer(topics=PARCELS) as consumer:
        assert_type(consumer, Consumer[Parcel])
        for message in consumer:
            assert_type(message, Message[Parcel])
            assert_type(message.value.number, int)
        for batch in consumer.batches():
            assert_type(batch.values, Sequence[Parcel])
    async with aio.Consumer(topics=PARCELS, group="etl") as reader, aio.Producer() as sender:
        assert_type(reader, aio.Consumer[Parcel])
        async for message in reader:
            assert_type(message, Message[Parcel])
        assert_type(await sender.send(PARCELS, Parcel(1)), Receipt)
    with Admin() as admin:
        assert_type(admin.register_schema(PARCELS, compatibility="full"), int)


def to_json(order: Order) -> bytes:
    return json.dumps(order).encode()


def of_json(data: bytes) -> Order:
    order: Order = json.loads(data)
    return order


def produce() -> None:
    with Producer() as producer:
        assert_type(producer, Producer[bytes])
        delivery = producer.send(
            "orders", b"1", "key", {"source": b"web"}, partition="0-3", timestamp=datetime.now(UTC)
        )
        receipt = delivery.result(timeout=5)
        assert_type(receipt, Receipt)
        assert_type(receipt.time, datetime)
        assert_type(delivery.exception(), MetamqError | None)
        assert_type(delivery.as_future(), Future[Receipt])
        delivery.add_done_callback(lambda done: print(done.result().offset))
        many = producer.send_many("orders", [b"1", b"2"], keys=["a", None])
        assert_type(many.result(), list[ReceiptRange])
        assert_type(many.as_future(), Future[list[ReceiptRange]])
        producer.flush(timeout=10)
    with Producer(encode=to_json, linger_ms=5, compression="zstd", on_full="raise") as orders:
        assert_type(orders, Producer[Order])
        try:
            orders.send("orders", {"total": 12})
        except BufferFull as error:
            assert_type(error.hint, str)
        except DeliveryTimeout as error:
            print(error.outcome == "unknown", error.retriable)


def consume(results: sqlite3.Connection) -> None:
    with Consumer(topics="orders", group="billing") as consumer:
        assert_type(consumer, Consumer[bytes])
        for message in consumer:
            assert_type(message, Message[bytes])
            assert_type(message.key, bytes | None)
            assert_type(message.headers, Mapping[str, bytes])
    offsets = DatabaseOffsets(lambda: sqlite3.connect("results.sqlite3"))
    with Consumer(topics=["orders"], group="billing", decode=of_json, auto_commit=False, offsets=offsets) as orders:
        for batch in orders.batches():
            assert_type(batch, MessageBatch[Order])
            assert_type(batch.values, Sequence[Order])
            assert_type(batch.offsets, range)
            assert_type(batch.topic, str)
            assert_type(iter(batch), Iterator[Message[Order]])
            try:
                orders.commit(batch, connection=results)
            except OwnershipLost:
                results.rollback()
        orders.commit({TopicPartition("orders", "0-0"): 7})
        orders.seek(("orders", "0-0"), datetime.now(UTC))
        assert_type(orders.lag(), dict[TopicPartition, int])
        orders.run(bill, concurrency=8)
    with Consumer(topics="orders", group="all", broadcast=True, consumer_id="a", offsets=FileOffsets("offsets")):
        pass


def bill(message: Message[Order]) -> None:
    if message.value["total"] > 100:
        raise Rollback(5)


async def asynchronously() -> None:
    async with aio.Producer() as producer:
        delivery = producer.send("orders", b"1")
        assert_type(await delivery, Receipt)
        assert_type(await producer.send_many("orders", [b"1"]), list[ReceiptRange])
        await producer.drain()
    async with aio.Consumer(topics="orders", decode=of_json) as consumer:
        async for message in consumer:
            assert_type(message, Message[Order])
        async for batch in consumer.batches():
            assert_type(batch, MessageBatch[Order])
        await consumer.run(bill_later)
        await consumer.commit()
    async with aio.Admin() as admin:
        topics = await admin.topics()
        print([config.flush for config in topics.values()])


async def with_databases(
    results: psycopg.AsyncConnection[Any], local: aiosqlite.Connection, blocking: sqlite3.Connection
) -> None:
    offsets = DatabaseOffsets(lambda: psycopg.AsyncConnection[Any].connect("dbname=shop"))
    async with aio.Consumer(topics="orders", group="billing", auto_commit=False, offsets=offsets) as consumer:
        async for message in consumer:
            await consumer.commit(message, connection=results)
            await consumer.commit(message, connection=local)
            await consumer.commit(message, connection=blocking)
    async with aio.Producer() as producer:
        await create_outcome_table(local)
        await aio.create_offsets_table(results)
        async with dbtx(results, producer) as tx:
            await tx.send("orders", b"1")


def with_sqlalchemy(session: orm.Session, scoped: orm.scoped_session[orm.Session], connection: Connection) -> None:
    metamq.tx.create_outcome_table(session)
    create_offsets_table(session, "offsets_of_shop")
    with Consumer(topics="orders", offsets=DatabaseOffsets(lambda: orm.Session())) as consumer:
        consumer.commit(connection=session)
        consumer.commit(connection=scoped)
        consumer.commit(connection=connection)
    with Producer() as producer, metamq.tx.dbtx(session, producer) as tx:
        tx.send("orders", b"1")
    metamq.tx.Recoverer(lambda: orm.Session()).run_once()


async def with_async_sqlalchemy(session: AsyncSession, connection: AsyncConnection, engine: AsyncEngine) -> None:
    async with aio.Consumer(topics="orders", offsets=DatabaseOffsets(engine.connect)) as consumer:
        await consumer.commit(connection=session)
        await consumer.commit(connection=connection)
    async with aio.Producer() as producer, dbtx(session, producer) as tx:
        await tx.send("orders", b"1")
    metamq.tx.Recoverer(engine.connect).run_once()


async def bill_later(message: Message[Order]) -> None:
    bill(message)


def administer() -> None:
    with Admin("zk1:2181", root="/meta") as admin:
        config = admin.create_topic("orders", partitions=4, flush="ack", retention_ms=None)
        admin.alter(config.topic, flush=FlushEvery(messages=1000, ms=None), min_insync=2)
        assert_type(admin.describe_group("billing").partitions[0].committed, int | None)
        assert_type(admin.promote(0, 1), int)
        print(__version__, admin.replicas()[0].replicas[0].in_sync, admin.brokers())


def try_it() -> None:
    with cluster(brokers=2) as running:
        assert_type(running, Cluster)
        assert_type(running.broker, BrokerProcess)
        assert_type(running.broker.port, int)
        running.create_topic("orders", partitions=1)
        with running.producer() as producer, running.consumer(topics="orders") as consumer:
            producer.send("orders", b"1").result()
            print(next(iter(consumer)).value)


def annotated(producer: Producer[bytes], admin: Admin) -> tuple[Delivery, ProducerHealth, GroupDescription]:
    return producer.send("orders", b"1"), producer.health(), admin.describe_group("readers")
