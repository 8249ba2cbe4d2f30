"""A fork in a transaction: the child is refused at once, whatever it calls, and the parent goes on."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Producer
from metamq.tx import XAResource, Xid, create_outcome_table, dbtx
from tests.parts import wait_until

if TYPE_CHECKING:
    from tests.tx.conftest import Shop

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def producer(shop: Shop) -> Iterator[Producer[bytes]]:
    with Producer(shop.cluster.zookeeper) as made:
        yield made


@pytest.fixture
def topic(shop: Shop) -> str:
    return shop.topic()


def of_the_child(call: Callable[[], object]) -> str:
    """What became of a call in a fork's child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            os.write(writing, b"done")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, 60, "the end of the child")
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read().decode()


def test_in_producers_transaction(shop: Shop, producer: Producer[bytes], topic: str) -> None:
    block = producer.transaction()
    with block:
        for call in (
            lambda: producer.send(topic, b"the child's"),
            lambda: producer.send_many(topic, [b"the child's"]),
            lambda: block.__exit__(None, None, None),
        ):
            assert of_the_child(call) == "ForkedError"
        producer.send(topic, b"1")
        assert of_the_child(lambda: producer.send(topic, b"the child's")) == "ForkedError"
        assert of_the_child(lambda: block.__exit__(KeyError, KeyError(), None)) == "done"
    assert shop.seen(topic) == [b"1"]


def test_in_two_phases(shop: Shop, producer: Producer[bytes], topic: str) -> None:
    producer.tpc_begin(producer.xid(1, f"forked-{time.monotonic_ns()}"))
    producer.send(topic, b"1")
    for call in (
        lambda: producer.send(topic, b"the child's"), producer.tpc_prepare, producer.tpc_commit, producer.tpc_rollback,
        producer.tpc_recover,
    ):  # fmt: skip
        assert of_the_child(call) == "ForkedError"
    producer.tpc_commit()
    assert shop.seen(topic) == [b"1"]


@pytest.mark.parametrize("sent", [True, False])
def test_in_dbtx(shop: Shop, producer: Producer[bytes], topic: str, tmp_path: Path, sent: bool) -> None:
    """The child does nothing with the connection either: it is the parent's, whose transaction it would end."""

    class Watched(sqlite3.Connection):
        ended = False

        def commit(self) -> None:
            self.ended = True
            super().commit()

        def rollback(self) -> None:
            self.ended = True
            super().rollback()

    database = sqlite3.connect(tmp_path / "own.db", factory=Watched)
    create_outcome_table(database)
    database.ended = False

    def leaving(*raised: Any) -> Callable[[], None]:
        def leave() -> None:
            try:
                tx.__exit__(*raised)
            finally:
                assert not database.ended

        return leave

    with dbtx(database, producer) as tx:
        if sent:
            tx.send(topic, b"1")
        assert of_the_child(lambda: tx.send(topic, b"the child's")) == "ForkedError"
        assert of_the_child(lambda: tx.send_many(topic, [b"the child's"])) == "ForkedError"
        assert of_the_child(lambda: producer.send(topic, b"the child's")) in ("ForkedError", "BranchMisuse")
        assert of_the_child(leaving(None, None, None)) == "ForkedError"
        assert of_the_child(leaving(KeyError, KeyError(), None)) == "done"
        if not sent:
            tx.send(topic, b"1")
    assert shop.seen(topic) == [b"1"]
    database.close()


def test_in_a_branch(shop: Shop, topic: str) -> None:
    with XAResource(0, shop.cluster.zookeeper) as mq:
        xid = Xid.random()
        mq.start(xid)
        for call in (
            lambda: mq.send(topic, b"the child's"), lambda: mq.end(xid), lambda: mq.rollback(xid), lambda: mq.recover(),
        ):  # fmt: skip
            assert of_the_child(call) == "ForkedError"
        assert of_the_child(mq.close) == "done"
        mq.send(topic, b"1", partition="0-0")
        mq.end(xid)
        mq.commit(xid, one_phase=True)
    assert shop.seen(topic) == [b"1"]
