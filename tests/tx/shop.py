"""A shop that is to hold together: rows in PostgreSQL, messages at brokers, applications that write both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from metamq.client.net.branches import BranchDescription, TxClient
from metamq.client.net.cluster import ClusterClient as Known
from metamq.errors import MetamqError
from metamq.testing import Cluster, cluster
from metamq.tx import Recovered, Recoverer, create_outcome_table
from metamq.zk.session.session import Session
from tests.parts import until_answered, wait_until
from tests.postgres import Postgres, running_postgres

GIVEN_UP = "rollback-only"
"""Kept for a while for its owner, who may ask why."""
APPLICATION = Path(__file__).with_name("application.py")


class Program:
    """application.py, as a process."""

    def __init__(self, folder: Path, **order: Any) -> None:
        self.name = str(order["name"])
        self._output = folder / f"{self.name}.out"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", APPLICATION, json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[str]:
        """What it has said so far."""
        return self._output.read_text().splitlines()

    def done(self) -> int:
        """How many transactions it knows to be committed."""
        return sum(line.startswith("done") for line in self.lines())

    def is_stopped(self) -> bool:
        """Whether it is, by a SIGSTOP."""
        return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def signal(self, number: signal.Signals) -> None:
        """Sends it one."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """With -9."""
        self._process.kill()
        self.wait()

    def wait(self, timeout_s: float = 240) -> int:
        """Until it has ended; its status."""
        status = self._process.wait(timeout_s)
        assert self._process.stdin is not None
        self._process.stdin.close()
        return status

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None


class Shop:
    """The parts, and what is asked of them."""

    def __init__(self, running: Cluster, postgres: Postgres, topics: list[str]) -> None:
        self.cluster = running
        self.postgres = postgres
        self.topics = topics

    def order(self, **more: Any) -> dict[str, Any]:
        """What a program needs to know."""
        return {"dsn": self.postgres.dsn, "zookeeper": self.cluster.zookeeper, "topics": self.topics} | more

    def connect(self) -> psycopg.Connection[Any]:
        """A connection to the database."""
        return psycopg.connect(self.postgres.dsn)

    def rows(self) -> Counter[bytes]:
        """What the database has."""
        with self.connect() as connection:
            return Counter(bytes(body) for (body,) in connection.execute("SELECT body FROM orders"))

    def messages(self, topic: str) -> Counter[bytes]:
        """What readers of a topic find."""
        with self.cluster.admin() as admin:
            wait_until(lambda: all(p.messages is not None for p in admin.describe_topic(topic).partitions), what="it")
            total = admin.describe_topic(topic).messages or 0
        found: list[bytes] = []
        with self.cluster.consumer(topics=[topic], idle_timeout_s=60) as consumer:
            batches = consumer.batches()
            while len(found) < total:
                found += next(batches).values
        return Counter(found)

    def branches(self) -> list[BranchDescription]:
        """All that may still be committed anywhere."""

        async def ask() -> list[BranchDescription]:
            async with await Session.open(self.cluster.zookeeper) as session:
                known = Known(session)
                try:
                    found = [
                        await TxClient(known).branches(broker.broker_id, all_of_them=True)
                        for broker in self.cluster.brokers
                    ]
                finally:
                    await known.close()
            return [branch for of_broker in found for branch in of_broker if branch.state != GIVEN_UP]

        return asyncio.run(ask())

    def until_branches(self) -> list[BranchDescription]:
        """The same, of brokers that may have been started just now."""
        return until_answered(self.branches)

    def wait_settled(self, limit_s: float = 120) -> None:
        """Until no branch is open at any broker: whoever is to finish them, does."""

        def settled() -> bool:
            try:
                return not self.branches()
            except MetamqError:  # a broker that was just started
                return False

        wait_until(settled, limit_s, "the end of every branch")

    def differences(self) -> list[str]:
        """What is in the database and not in a topic, or the other way, or twice."""
        rows = self.rows()
        found = [f"{body!r} is {count} rows" for body, count in rows.items() if count > 1]
        for topic in self.topics:
            messages = self.messages(topic)
            found += [f"{body!r} lacks {count} messages in {topic}" for body, count in (rows - messages).items()]
            found += [f"{body!r} is {count} messages too many in {topic}" for body, count in (messages - rows).items()]
        return found


def recovered(recoverer: Recoverer) -> Recovered:
    """What it has done, once every broker was asked: of one that was just started it may not know yet."""
    done = [recoverer.run_once()]

    def all_were_asked() -> bool:
        if done[-1].problems:
            done.append(recoverer.run_once())
        return not done[-1].problems

    wait_until(all_were_asked, what="an answer of every broker")
    return Recovered(sum(one.committed for one in done), sum(one.rolled_back for one in done), done[-1].left)


@contextmanager
def open_shop(brokers: int = 1, **settings: Any) -> Iterator[Shop]:
    """A shop with a topic at each broker."""
    with running_postgres() as postgres, cluster(brokers=brokers, **settings) as running:
        topics = [f"orders-{broker}" for broker in range(brokers)]
        with running.admin() as admin:
            for number, topic in enumerate(topics):
                admin.create_topic(topic, partitions=2, brokers=[number])
        shop = Shop(running, postgres, topics)
        with shop.connect() as connection:
            connection.execute("CREATE TABLE orders (body BYTEA)")
            create_outcome_table(connection)
        yield shop
