"""Brokers end transactions whose client is gone: those of its principal, and never what a client only names."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from metamq.errors import NotAuthorized
from metamq.security.certificates import Authority
from metamq.testing import Cluster
from metamq.tx import Vote, XAResource, Xid
from metamq.wire.commands import Command, PutEntry, Tx, TxReply
from metamq.wire.xa import Verb, XACode
from tests.broker.front_door.conftest import batch_of
from tests.one_zookeeper import cluster
from tests.parts import read_to_end, wait_until
from tests.security.certificate_folder import secured
from tests.security.raw_client import RawClient, of

GRACE_MS = 500
WORK = [Verb.START, Verb.SEND, Verb.END]


@pytest.fixture(scope="module")
def two(authority: Authority) -> Iterator[Cluster]:
    """Two broker ids. `victim` and `attacker` may write to a topic each, with a partition at each broker."""
    security = secured(authority.folder, zookeeper_tls=False)
    with cluster(brokers=2, security=security, branch_grace_ms=GRACE_MS) as running, running.admin() as admin:
        for name in ("victim", "attacker"):
            authority.issue(name)
            running.create_topic(f"of-{name}", partitions=2)
            admin.add_rules("allow", name, "write", f"topic:of-{name}")
        yield running


class Session:
    """The requests of a principal to one of the brokers, for one transaction."""

    def __init__(self, two: Cluster, authority: Authority, name: str, broker_id: int, xid: Xid) -> None:
        self._topic, self._xid = f"of-{name}", xid
        with two.admin() as admin:
            self._topic_id = admin.topics()[self._topic].id
        running = cast(Cluster, SimpleNamespace(broker=two.brokers[broker_id]))
        self._client = RawClient(running, authority, name)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.__exit__(*error)

    def begin(self) -> int:
        """Begins a branch with a message; returns its epoch."""
        batch = bytes(batch_of([b"message"]))
        entry = PutEntry(self._topic, self._topic_id, 0, len(batch))
        return int(self.ask(WORK, [entry], batch)[-1][2])

    def ask(self, verbs: list[Verb], entries: list[PutEntry], body: bytes = b"", **more: Any) -> list[Any]:
        header = Tx([*self._xid], 0, "s", [*verbs], 0, -1, 0, [*entries], **more)
        results = TxReply(*self._client.ask(Command.TX, header, body)).results
        assert [result[1] for result in results] == [XACode.OK] * len(verbs)
        return results


def values(two: Cluster, topic: str) -> list[bytes]:
    with two.consumer(topics=[topic], idle_timeout_s=1) as consumer:
        return [message.value for message in read_to_end(consumer)]


@pytest.mark.slow
def test_what_a_client_names_is_not_committed_by_a_broker(two: Cluster, authority: Authority) -> None:
    """The attack: a branch of the same id, whose decision the prepared branch of another client seems to follow."""
    xid = Xid.random(b"bank")
    with XAResource(1, two.zookeeper, security=of(authority, "victim")) as mq:
        wait_until(lambda: may_begin(mq), what="the rule")
        mq.start(xid)
        mq.send("of-victim", b"undecided")
        mq.end(xid)
        assert mq.prepare(xid) is Vote.OK
        (epoch,) = [one.epoch for one in mq.recover() if one.xid == xid]
        with Session(two, authority, "attacker", 0, xid) as attacker:
            attacker.begin()
            attacker.ask([Verb.DECIDE], [], followers=[1, epoch])
        refused = f"branch {xid} waits: 'brokers' may not end or change this transaction"
        wait_until(lambda: refused in two.brokers[0].log_path.read_text(), what=refused)
        mq.rollback(xid)
    assert values(two, "of-victim") == []


@pytest.mark.slow
def test_brokers_end_a_transaction_whose_client_is_gone(two: Cluster, authority: Authority) -> None:
    xid, before = Xid.random(b"gone"), len(values(two, "of-attacker"))
    with (
        Session(two, authority, "attacker", 0, xid) as decider,
        Session(two, authority, "attacker", 1, xid) as follower,
    ):
        epochs = [decider.begin(), follower.begin()]
        follower.ask([Verb.PREPARE], [], follows=[0, 1, epochs[0]])
        decider.ask([Verb.DECIDE], [], followers=[1, epochs[1]])
    wait_until(lambda: len(values(two, "of-attacker")) == before + 2, what="the messages of both")
    with two.admin() as admin:
        wait_until(lambda: xid not in [one.xid for one in admin.transactions().branches], what="the end of both")


def may_begin(mq: XAResource) -> bool:
    xid = Xid.random(b"first")
    try:
        mq.start(xid)
        mq.send("of-victim", b"x")
        mq.end(xid)
    except NotAuthorized:
        return False
    mq.rollback(xid)
    return True
