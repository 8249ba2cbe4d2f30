"""What goes wrong beside the main path: calls from callbacks, topics that are made anew, failing messages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from metamq import aio
from metamq.errors import ConfigError, MetamqError, TopicNotFound
from metamq.testing import Cluster
from tests.one_zookeeper import cluster


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


def test_waiting_in_a_delivery_callback_is_refused_not_endless(parts: Cluster) -> None:
    parts.create_topic("called-back", partitions=1)
    told = threading.Event()
    errors: list[BaseException] = []
    with parts.producer() as producer:

        def callback(_delivery: object) -> None:
            try:
                producer.flush()
            except BaseException as error:
                errors.append(error)
            told.set()

        producer.send("called-back", b"x").add_done_callback(callback)
        assert told.wait(60)
    assert isinstance(errors[0], ConfigError)
    assert "in another thread" in str(errors[0])


def test_a_producer_goes_on_with_a_topic_that_is_made_anew(parts: Cluster) -> None:
    parts.create_topic("phoenix", partitions=1)
    with parts.producer(delivery_timeout_s=60) as producer:
        assert producer.send("phoenix", b"old").result(60).offset == 0
        with parts.admin() as admin:
            admin.delete("phoenix")
            deadline = time.monotonic() + 60
            while not isinstance(producer.send("phoenix", b"gone").exception(60), TopicNotFound):
                assert time.monotonic() < deadline
            admin.create_topic("phoenix", partitions=1)
        deadline = time.monotonic() + 60
        while True:
            try:
                receipt = producer.send("phoenix", b"new").result(60)
                break
            except MetamqError:
                assert time.monotonic() < deadline
    assert receipt.offset == 0


@pytest.mark.parametrize("fails", ["decode", "filter"])
def test_the_asyncio_listener_does_not_lose_the_message_that_fails(parts: Cluster, fails: str) -> None:
    topic = f"failing-{fails}"
    parts.create_topic(topic, partitions=1)
    with parts.producer() as producer:
        producer.send_many(topic, [b"1", b"2", b"3"]).result(60)

    def decode(value: bytes) -> int:
        if fails == "decode" and value == b"2":
            raise ValueError("two")
        return int(value)

    def keep(message: object) -> bool:
        if fails == "filter" and message.value == 2:  # type: ignore[attr-defined]
            raise ValueError("two")
        return True

    async def run() -> tuple[list[int], int | None]:
        handled: list[int] = []

        async def listener(message: object) -> None:
            handled.append(message.value)  # type: ignore[attr-defined]

        consumer = aio.Consumer(
            parts.zookeeper, topics=[topic], group=topic, decode=decode, filter=keep, idle_timeout_s=60
        )
        with pytest.raises(ValueError, match="two"):
            async with consumer:
                await consumer.run(listener, dead_letter=False)
        return handled, None

    assert asyncio.run(run())[0] == [1]
    with parts.admin() as admin:
        assert [p.committed for p in admin.describe_group(topic).partitions] == [1]
