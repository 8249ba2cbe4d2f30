"""Transactions when a broker id gets another master: PostgreSQL's own scenarios of two-phase commit and stand-bys,
translated, and masters that die in the middle of whatever was asked of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from metamq.errors import BranchMisuse, BranchNotKnown, ConnectError, Fenced, MetamqError, TransactionError
from metamq.testing import BrokerProcess
from metamq.tx import BranchDescription, XAResource, Xid
from tests.broker.ha.test_replication import Group, metrics, replica_group
from tests.parts import SLOW_S, wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def group() -> Iterator[Group]:
    """A master and a slave that is in sync."""
    with replica_group() as made:
        made.add_slave()
        made.wait_insync(0, 1)
        yield made


@pytest.fixture
def mq(group: Group) -> Iterator[XAResource]:
    with XAResource(0, group.cluster.zookeeper) as resource:
        yield resource


def a_topic(group: Group, replication: str = "async") -> str:
    name = f"orders-{time.monotonic_ns()}"
    group.cluster.create_topic(name, partitions=2, replication=replication)
    return name


def work(mq: XAResource, topic: str, *values: bytes, xid: Xid | None = None) -> Xid:
    xid = xid or Xid.random()
    mq.start(xid)
    for value in values:
        mq.send(topic, value, key=value)
    mq.end(xid)
    return xid


def prepared(mq: XAResource, topic: str, *values: bytes) -> Xid:
    xid = work(mq, topic, *values)
    mq.prepare(xid)
    return xid


def in_doubt(mq: XAResource, limit_s: float = SLOW_S) -> dict[Xid, BranchDescription]:
    """As soon as the client knows who is the master."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return {branch.xid: branch for branch in mq.recover()}
        except (ConnectError, Fenced):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def journal(broker: BrokerProcess) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((broker.data / "topics").glob("~*/0/*.log")))


def wait_same_journals(group: Group) -> None:
    wait_until(lambda: journal(group.replicas[0]) == journal(group.replicas[1]), what="the same journals")


def test_what_was_prepared_is_ended_at_the_promoted_slave_and_nothing_is_left(group: Group, mq: XAResource) -> None:
    """Commit and rollback on the promoted stand-by; then the same on both nodes, none left."""
    topic = a_topic(group)
    committed, rolled_back = prepared(mq, topic, b"1", b"2"), prepared(mq, topic, b"never")
    idle = work(mq, topic, b"idle")
    wait_until(lambda: metrics(group.replicas[0])["metamq_transactions_prepared", ""] == 2, what="the metric")
    group.lose_master(group.cluster.broker.kill, 1)
    group.promote(1)
    assert {xid: one.messages for xid, one in in_doubt(mq).items()} == {committed: 2, rolled_back: 1}
    mq.commit(committed)
    mq.commit(committed)
    mq.rollback(rolled_back)
    with pytest.raises(BranchNotKnown):
        mq.prepare(idle)
    assert sorted(group.read(topic)) == [b"1", b"2"]
    group.replicas[0].start()
    group.wait_insync(0, 1, master=1)
    group.wait_equal(0, 1)
    wait_same_journals(group)
    assert in_doubt(mq) == {}


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_slave_that_is_restarted_while_its_master_is_down(group: Group, mq: XAResource, how: str) -> None:
    """Soft and hard restart of the stand-by, then its promotion; the same id is prepared a second time."""
    topic = a_topic(group, "sync")
    xid = prepared(mq, topic, b"first use")
    mq.rollback(xid)
    work(mq, topic, b"1", b"2", xid=xid)
    mq.prepare(xid)
    done = prepared(mq, topic, b"3")
    mq.commit(done)
    group.lose_master(group.cluster.broker.kill, 1)
    getattr(group.replicas[1], how)()
    group.replicas[1].start()
    group.promote(1)
    assert list(in_doubt(mq)) == [xid]
    mq.commit(xid)
    assert sorted(group.read(topic)) == [b"1", b"2", b"3"]
    with pytest.raises(BranchMisuse):
        mq.start(done)


def test_a_master_that_comes_back_raises_nothing_from_the_dead(group: Group, mq: XAResource) -> None:
    """What was ended in its absence was prepared when it died: stale two-phase files, put back by hand."""
    topic = a_topic(group)
    committed, rolled_back, open_still = (prepared(mq, topic, value) for value in (b"1", b"2", b"3"))
    group.lose_master(group.cluster.broker.kill, 1)
    group.promote(1)
    mq.commit(committed)
    mq.rollback(rolled_back)
    group.replicas[0].start()
    group.wait_insync(0, 1, master=1)
    group.promote(0)  # from a living master
    assert list(in_doubt(mq)) == [open_still]
    mq.commit(committed)
    with pytest.raises(TransactionError):
        mq.commit(rolled_back)
    mq.commit(open_still)
    assert sorted(group.read(topic)) == [b"1", b"3"]


def test_plain_messages_do_not_wait_for_what_is_prepared(group: Group, mq: XAResource) -> None:
    """Locks of a prepared transaction hold up nobody, there being none; not on the promoted slave either."""
    topic = a_topic(group, "sync")
    xid = prepared(mq, topic, b"prepared")
    with group.cluster.producer() as producer:
        producer.send(topic, b"before").result(SLOW_S)
        group.lose_master(group.cluster.broker.kill, 1)
        group.promote(1)
        producer.send(topic, b"after").result(SLOW_S)
    assert sorted(group.read(topic)) == [b"after", b"before"]
    mq.commit(xid)
    assert sorted(group.read(topic)) == [b"after", b"before", b"prepared"]


def test_after_an_accepted_loss_the_history_is_another_one(group: Group, mq: XAResource) -> None:
    """Whoever coordinates can tell that what it does not find may have been lost."""
    topic = a_topic(group)
    both = prepared(mq, topic, b"both")
    before = in_doubt(mq)[both].history
    group.replicas[1].kill()
    group.wait_insync(0)
    lost = prepared(mq, topic, b"lost")
    group.cluster.broker.kill()
    group.replicas[1].start()
    group.promote(1, accept_loss=True)
    found = in_doubt(mq)
    assert list(found) == [both]
    assert found[both].history != before
    with pytest.raises(BranchNotKnown):
        mq.commit(lost)
    mq.commit(both)
    assert group.read(topic) == [b"both"]


def damage_journal(broker: BrokerProcess) -> None:
    """Changes a byte of its first entry."""
    path = min((broker.data / "topics").glob("~*/0/*.log"))
    data = bytearray(path.read_bytes())
    data[100] ^= 0x10
    path.write_bytes(data)


def test_a_damaged_journal_of_a_master_is_replaced_by_its_slaves(group: Group, mq: XAResource) -> None:
    topic = a_topic(group)
    xid = prepared(mq, topic, b"1")
    master = group.cluster.broker
    master.kill()
    damage_journal(master)
    master.start()
    with group.cluster.producer() as producer:
        producer.send(topic, b"plain").result(SLOW_S)  # which needs no journal
    with XAResource(0, group.cluster.zookeeper, request_timeout_s=3) as impatient, pytest.raises(MetamqError):
        impatient.recover()
    group.wait_insync(0, 1)
    group.promote(1)
    assert list(in_doubt(mq)) == [xid]
    mq.commit(xid)
    assert sorted(group.read(topic)) == [b"1", b"plain"]
    group.wait_insync(0, 1, master=1)
    wait_same_journals(group)


def test_a_damaged_journal_of_a_slave_is_copied_anew(group: Group, mq: XAResource) -> None:
    topic = a_topic(group)
    xid = prepared(mq, topic, b"1")
    slave = group.replicas[1]
    slave.kill()
    damage_journal(slave)
    slave.start()
    wait_until(lambda: list((slave.data / "topics").glob("~*/0.damaged-*")), what="the journal aside")
    group.wait_insync(0, 1)
    wait_same_journals(group)
    group.lose_master(group.cluster.broker.kill, 1)
    group.promote(1)
    mq.commit(xid)
    assert group.read(topic) == [b"1"]


class Client(threading.Thread):
    """Prepares and commits, one after the other, and notes what it was told."""

    def __init__(self, group: Group, topic: str, number: int) -> None:
        super().__init__(daemon=True)
        self.promised: set[Xid] = set()
        self.decided: dict[Xid, list[bytes]] = {}
        self.unknown: dict[Xid, list[bytes]] = {}
        self.stopping = threading.Event()
        self._group, self._topic, self._number = group, topic, number

    def run(self) -> None:
        with XAResource(0, self._group.cluster.zookeeper) as mq:
            for count in range(1_000_000):
                if self.stopping.is_set():
                    return
                xid = Xid.random()
                values = [b"%d-%d-%d" % (self._number, count, n) for n in range(3)]
                try:
                    self._one(mq, xid, values, two_phases=count % 3 > 0)
                except MetamqError:
                    time.sleep(0.05)

    def _one(self, mq: XAResource, xid: Xid, values: list[bytes], *, two_phases: bool) -> None:
        work(mq, self._topic, *values, xid=xid)
        if not two_phases:
            self.unknown[xid] = values
            mq.commit(xid, one_phase=True)
            self.decided[xid] = self.unknown.pop(xid)
            return
        mq.prepare(xid)
        self.promised.add(xid)
        self.decided[xid] = values
        mq.commit(xid)


@pytest.mark.slow
def test_scenario_25_the_master_dies_at_any_point_of_prepare_and_commit_and_its_slave_is_promoted(group: Group) -> None:
    """Every acknowledged prepare is in recover, every acknowledged commit is there once."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    topic = a_topic(group)
    clients = [Client(group, topic, number) for number in range(3)]
    for client in clients:
        client.start()
    master = 0
    for _ in range(3):
        busy = sum(len(client.decided) for client in clients)
        wait_until(lambda before=busy: sum(len(c.decided) for c in clients) > before + 20, 60, "some transactions")
        time.sleep(chance.random() * 0.2)
        group.lose_master(group.replicas[master].kill, 1 - master, master=master)
        former, master = master, 1 - master
        group.promote(master)
        group.replicas[former].start()
        group.wait_insync(0, 1, master=master, limit_s=60)
    for client in clients:
        client.stopping.set()
    for client in clients:
        client.join(120)
        assert not client.is_alive()
    with XAResource(0, group.cluster.zookeeper) as mq:
        left = set(in_doubt(mq))
        for client in clients:
            for xid in client.decided:
                mq.commit(xid)  # it was prepared, or committed: never forgotten
        for xid in left - {xid for client in clients for xid in client.decided}:
            mq.rollback(xid)
    found = group.read(topic)
    assert len(found) == len(set(found)), "nothing comes twice"
    for client in clients:
        for values in client.decided.values():
            assert set(values) <= set(found)
        for values in client.unknown.values():
            assert len(set(values) & set(found)) in (0, len(values)), "all or nothing"
    known = {
        value
        for client in clients
        for values in [*client.decided.values(), *client.unknown.values()]
        for value in values
    }
    assert set(found) <= known
    group.wait_equal(0, 1)
