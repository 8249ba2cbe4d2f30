"""The acceptance scenarios of XA that concern databases and recovery, by their numbers and names."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq import Producer
from metamq.client.background import at_once
from metamq.client.net.branches import Branch, BranchDescription, TxClient, new_session
from metamq.client.offsets.connections import database_of
from metamq.errors import ConnectError, MetamqError, OutcomeUnknown
from metamq.testing import BrokerProcess
from metamq.tx import Recovered, Recoverer, dbtx
from metamq.wire.xa import Verb
from metamq.zk.server.ports import free_port
from tests.parts import Line, wait_until
from tests.tx.shop import Shop, open_shop, recovered

BROKER_HOST = "127.0.0.2"


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with open_shop() as opened:
        yield opened


@pytest.fixture
def far_shop(tmp_path: Path) -> Iterator[tuple[Shop, Line]]:
    """One whose topic is at a second broker, that everybody reaches over a line which a test can break."""
    if sys.platform != "linux":
        pytest.skip("needs a second loopback address")
    with open_shop() as opened:
        zookeeper = opened.cluster.zookeeper
        broker = BrokerProcess(zookeeper, tmp_path / "far", 1, host=BROKER_HOST, advertise="127.0.0.1")
        broker.port = free_port()
        with Line(broker.port, BROKER_HOST) as line:
            broker.start()
            opened.cluster.brokers.append(broker)
            with opened.cluster.admin() as admin:
                admin.create_topic("far", 2, brokers=[1])
            yield Shop(opened.cluster, opened.postgres, ["far"]), line


@pytest.fixture
def producer(shop: Shop) -> Iterator[Producer[bytes]]:
    with shop.cluster.producer() as made:
        yield made


@pytest.fixture
def recoverer(shop: Shop) -> Iterator[Recoverer]:
    with recovering(shop) as made:
        yield made


def recovering(shop: Shop) -> Recoverer:
    return Recoverer(shop.connect, shop.cluster.zookeeper, grace_s=0)


def prepared(shop: Shop) -> list[BranchDescription]:
    return [branch for branch in shop.branches() if branch.state == "prepared"]


def leave(shop: Shop, producer: Producer[bytes], name: str, *, decided: bool) -> None:
    """An application that dies when its messages are prepared, before or after the database has decided."""
    with shop.connect() as database:
        tx = dbtx(database, producer)
        tx.__enter__()
        for number in range(3):
            body = f"{name}-{number}".encode()
            database.execute("INSERT INTO orders VALUES (%s)", (body,))
            tx.send(shop.topics[0], body)
        work = tx._work
        assert work is not None
        producer._background.run(work.prepare())
        if decided:
            at_once(tx._outcomes.commit(database_of(database), work.gtrid))
        else:
            database.rollback()


def total(shop: Shop, name: str) -> int:
    """How many messages there are of one application."""
    return sum(body.startswith(name.encode()) for body in shop.messages(shop.topics[0]).elements())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["clean", "kill -9"])
def test_scenarios_15_and_16_what_is_prepared_survives_and_what_is_not_is_gone(
    shop: Shop, producer: Producer[bytes], recoverer: Recoverer, how: str
) -> None:
    leave(shop, producer, f"decided {how}", decided=True)
    leave(shop, producer, f"undecided {how}", decided=False)
    with shop.connect() as database:
        open_one = dbtx(database, producer)
        open_one.__enter__()
        open_one.send_many(shop.topics[0], [b"never"] * 200_000)  # more than a batch: its broker has a part of it
    before = [(branch.xid, branch.messages) for branch in prepared(shop)]
    assert [messages for _xid, messages in before] == [3, 3]
    if how == "clean":
        shop.cluster.broker.restart()
    else:
        shop.cluster.broker.kill()
        shop.cluster.broker.start()
    assert [(branch.xid, branch.messages) for branch in shop.until_branches()] == before
    assert recovered(recoverer) == Recovered(1, 1, 0)
    assert (total(shop, f"decided {how}"), total(shop, f"undecided {how}"), total(shop, "never")) == (3, 0, 0)
    assert shop.differences() == []


def test_scenario_17_a_commit_whose_answer_is_lost_is_repeated_and_copies_nothing(far_shop: tuple[Shop, Line]) -> None:
    """By the application itself, which asks until it is answered; and by recovery, after a restart."""
    shop, line = far_shop

    def cut_when_lost() -> threading.Thread:
        """Loses the next answer, and what comes behind it; then the line works again."""
        line.swallow()
        thread = threading.Thread(target=lambda: line.cut() if line.swallowed.wait(60) else None)
        thread.start()
        return thread

    with shop.cluster.producer() as producer, shop.connect() as database:
        with dbtx(database, producer) as tx:
            database.execute("INSERT INTO orders VALUES ('lost')")
            tx.send("far", b"lost")
            work = tx._work
            assert work is not None
            proper, cut, failures = work.commit, [], []

            async def commit() -> list[MetamqError]:
                cut.append(cut_when_lost())
                failures.extend(await proper())
                return failures

            work.commit = commit  # type: ignore[method-assign]
        cut[0].join()
        assert line.swallowed.is_set()
        assert failures == []
        assert total(shop, "lost") == 1

        leave(shop, producer, "again", decided=True)
        (branch,) = prepared(shop)
        line.swallow()
        for timeout_s in (0.5, 2, 8, 30):  # it gives up: not before its broker has answered
            with pytest.raises((OutcomeUnknown, ConnectError)) as given_up:
                producer._background.run(commit_once(producer, branch, timeout_s))
            if line.swallowed.is_set():
                break
        assert line.swallowed.is_set()
        assert given_up.value.outcome == "unknown"
        line.cut()
    shop.cluster.brokers[1].kill()
    shop.cluster.brokers[1].start()
    with shop.cluster.producer() as producer:
        producer._background.run(commit_once(producer, branch, 60))
    with recovering(shop) as recoverer:
        assert recovered(recoverer) == Recovered(0, 0, 0)
    assert total(shop, "again") == 3
    assert shop.differences() == []


async def commit_once(producer: Producer[bytes], known: BranchDescription, timeout_s: float) -> None:
    branch = Branch(known.xid, known.broker_id, new_session())
    await TxClient(producer._core.cluster).ask(branch, [Verb.COMMIT], timeout_s=timeout_s)


@pytest.mark.slow
def test_scenario_11_an_application_that_is_gone(shop: Shop, recoverer: Recoverer) -> None:
    """What it had not prepared is rolled back after a grace; what it had stays, for recovery."""
    with shop.cluster.producer() as producer, shop.connect() as database:
        leave(shop, producer, "gone", decided=True)
        tx = dbtx(database, producer)
        tx.__enter__()
        tx.send_many(shop.topics[0], [b"never"] * 200_000)
        wait_until(lambda: len(shop.branches()) == 2, what="a part of it at its broker")
    wait_until(lambda: [branch.state for branch in shop.branches()] == ["prepared"], what="the end of the grace")
    assert recovered(recoverer) == Recovered(1, 0, 0)
    assert (total(shop, "gone"), total(shop, "never")) == (3, 0)
