"""The time limits of the producer hold for dbtx: a broker that does not answer delays no block longer."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import metamq.tx.aio
from metamq import aio
from metamq.errors import MetamqError
from metamq.testing import Cluster
from metamq.tx import create_outcome_table, dbtx
from tests.tx.both_faces import FACES
from tests.tx.databases import messages

LIMIT_S = 8.0
"""Less than the time that a producer of default settings would wait."""


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"delivery_timeout_s": 1.0}, {"request_timeout_s": 1.0}], ids=str)
@pytest.mark.parametrize("face", FACES)
def test_a_silent_broker(running: Cluster, topic: str, tmp_path: Path, face: str, settings: dict[str, Any]) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "results.db", check_same_thread=False)

    with closing(connect()) as database:
        create_outcome_table(database)
    errors: list[BaseException] = []

    def run(block: Callable[[], object]) -> None:
        with closing(connect()), pytest.raises(MetamqError) as raised:
            block()
        errors.append(raised.value)

    def blocking() -> None:
        with running.producer(**settings) as producer, closing(connect()) as database:
            producer.send(topic, b"before").result()
            running.broker.freeze()
            with dbtx(database, producer) as tx:
                tx.send(topic, b"in the block")

    async def in_asyncio() -> None:
        async with aio.Producer(running.zookeeper, **settings) as producer:
            await producer.send(topic, b"before")
            running.broker.freeze()
            with closing(connect()) as database:
                async with metamq.tx.aio.dbtx(database, producer) as tx:
                    await tx.send(topic, b"in the block")

    work = threading.Thread(target=run, args=(blocking if face == "blocking" else lambda: asyncio.run(in_asyncio()),))
    work.start()
    work.join(LIMIT_S)
    is_late = work.is_alive()
    running.broker.thaw()
    work.join()
    assert not is_late
    assert len(errors) == 1
    assert messages(running, topic) == [b"before"]
