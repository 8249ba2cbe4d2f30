"""Transactions of programs that may only write to their topics, and what other programs can do with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from metamq import Producer, SecurityConfig
from metamq.cli.app import run
from metamq.client.background import at_once
from metamq.client.offsets.connections import database_of
from metamq.errors import NotAuthorized
from metamq.security.certificates import Authority
from metamq.testing import Cluster
from metamq.tx import Recovered, Recoverer, Vote, XAResource, Xid, create_outcome_table, dbtx
from tests.parts import SLOW_S, read_to_end, wait_until
from tests.security.raw_client import of

TOPIC = "orders"


@pytest.fixture(scope="module")
def topic(secure: Cluster) -> str:
    secure.create_topic(TOPIC, partitions=2)
    return TOPIC


@pytest.fixture
def own(secure: Cluster, authority: Authority, topic: str, name: str) -> SecurityConfig:
    """A principal that may write to the topic, and nothing else."""
    return allowed(secure, authority, topic, name)


@pytest.fixture
def others(secure: Cluster, authority: Authority, topic: str, name: str) -> SecurityConfig:
    """Another one with the same right."""
    authority.issue(f"other-{name}")
    return allowed(secure, authority, topic, f"other-{name}")


def allowed(secure: Cluster, authority: Authority, topic: str, name: str) -> SecurityConfig:
    security = of(authority, name)
    with secure.admin() as admin, Producer(secure.zookeeper, security=security, linger_ms=0) as producer:
        admin.add_rules("allow", name, "write", f"topic:{topic}")

        def is_allowed() -> bool:
            try:
                producer.send(topic, b"first").result(SLOW_S)
            except NotAuthorized:
                return False
            return True

        wait_until(is_allowed, what="the rule")
    return security


@pytest.fixture
def producer(secure: Cluster, own: SecurityConfig) -> Iterator[Producer[Any]]:
    with Producer(secure.zookeeper, security=own) as made:
        yield made


def messages(secure: Cluster, topic: str, prefix: bytes) -> list[bytes]:
    with secure.consumer(topics=[topic], idle_timeout_s=1) as consumer:
        return sorted(one.value for one in read_to_end(consumer) if one.value.startswith(prefix))


def test_each_kind_of_transaction_needs_only_the_right_to_write(
    secure: Cluster, topic: str, own: SecurityConfig, producer: Producer[Any], name: str, tmp_path: Path
) -> None:
    mark = name.encode()
    with producer.transaction():
        producer.send(topic, mark + b"0")
    database = sqlite3.connect(tmp_path / "database")
    create_outcome_table(database)
    with dbtx(database, producer) as tx:
        tx.send(topic, mark + b"1")
    database.close()
    with Recoverer(
        lambda: sqlite3.connect(tmp_path / "database"), secure.zookeeper, grace_s=0, security=own
    ) as recoverer:
        assert recoverer.run_once() == Recovered(0, 0, 0)
    xid = Xid.random(mark)
    with XAResource(0, secure.zookeeper, security=own) as mq:
        mq.start(xid)
        mq.send(topic, mark + b"2")
        mq.end(xid)
        assert mq.prepare(xid) is Vote.OK
        assert xid in [one.xid for one in mq.recover()]
    producer.tpc_commit(next(found for found in producer.tpc_recover() if found == xid))
    assert messages(secure, topic, mark) == [mark + b"%d" % number for number in range(3)]


def test_another_program_sees_an_id_and_cannot_end_it(
    secure: Cluster, topic: str, others: SecurityConfig, producer: Producer[Any], name: str
) -> None:
    mark = name.encode()
    xid = Xid.random(mark)
    producer.tpc_begin(xid)
    producer.send(topic, mark)
    assert producer.tpc_prepare()
    with Producer(secure.zookeeper, security=others) as other:
        assert xid in other.tpc_recover()
        for end in (other.tpc_commit, other.tpc_rollback):
            with pytest.raises(
                NotAuthorized,
                match="may not end or change this transaction: another user",
            ):
                end(xid)
    with secure.admin() as admin:
        (branch,) = [one for one in admin.transactions().branches if one.xid == xid]
        assert (branch.state, branch.messages) == ("prepared", 1)
    producer.tpc_commit()
    assert messages(secure, topic, mark) == [mark]


@pytest.fixture
def left(tmp_path: Path, topic: str, producer: Producer[Any], name: str) -> Path:
    """The database of an application that died after its decision: its messages are prepared, not committed."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        create_outcome_table(database)
        tx = dbtx(database, producer).__enter__()
        tx.send(topic, name.encode())
        assert tx._work is not None
        producer._background.run(tx._work.prepare())
        at_once(tx._outcomes.commit(database_of(database), tx._work.gtrid))
        database.commit()
    return tmp_path / "shop.db"


def test_a_recoverer_names_the_branches_of_others_and_ends_them_by_its_right(
    secure: Cluster, topic: str, others: SecurityConfig, authority: Authority, name: str, left: Path
) -> None:
    with Recoverer(lambda: sqlite3.connect(left), secure.zookeeper, security=others) as young:
        assert young.run_once() == Recovered(0, 0, 1)
    with Recoverer(lambda: sqlite3.connect(left), secure.zookeeper, grace_s=0, security=others) as recoverer:
        done = recoverer.run_once()
        assert done[:3] == (0, 0, 0)
        (problem,) = done.problems
        assert (problem.broker_id, len(problem.xids)) == (0, 1)
        assert str(problem) == (
            f"branch {problem.xids[0]} at broker 0: another user or certificate began it. "
            "Recover as that one, or with the right `recover cluster`."
        )
        with secure.admin() as admin:
            admin.add_rules("allow", f"other-{name}", "recover", "cluster")
        wait_until(lambda: recoverer.run_once().committed == 1, what="the right")
    assert messages(secure, topic, name.encode()) == [name.encode()]


def test_a_recoverer_that_may_do_nothing_is_refused_by_each_broker(
    secure: Cluster, authority: Authority, left: Path, name: str
) -> None:
    """It does not see the branch, and forgets no decision."""
    authority.issue(f"guest-{name}")
    security = of(authority, f"guest-{name}")
    with (
        closing(sqlite3.connect(left)) as database,
        Recoverer(lambda: sqlite3.connect(left), secure.zookeeper, grace_s=0, security=security) as recoverer,
    ):
        database.execute("UPDATE metamq_outcomes SET at = 0")
        database.commit()
        (problem,) = recoverer.run_once().problems
        assert database.execute("SELECT outcome FROM metamq_outcomes WHERE gtrid <> '@id'").fetchall() == [("commit",)]
    assert str(problem).startswith(
        f"broker 0 does not list its prepared branches: 'guest-{name}' may not recover cluster. `metamq acl explain "
    )


def test_the_command_says_whose_branches_wait(
    secure: Cluster,
    others: SecurityConfig,
    left: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("METAMQ_ZOOKEEPER", secure.zookeeper)
    for setting in ("ca", "certificate", "key"):
        monkeypatch.setenv(f"METAMQ_SECURITY_{setting.upper()}", getattr(others, setting))
    monkeypatch.setenv("METAMQ_SECURITY_ZOOKEEPER_TLS", "false")
    assert run(["tx", "recover", "--database", f"sqlite:///{left}", "--grace", "0s"]) == 1
    first, second = capfd.readouterr().err.splitlines()
    assert first == "0 committed, 0 rolled back, 0 left."
    assert second.startswith("Branch ")
    assert second.endswith(
        "another user or certificate began it. Recover as that one, or with the right `recover cluster`."
    )
