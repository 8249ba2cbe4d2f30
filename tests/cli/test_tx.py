"""`metamq tx`, on branches in every state."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator

import pytest

from metamq import Admin, aio
from metamq.cli.app import run
from metamq.errors import BranchMisuse, BranchNotKnown, ConfigError, HeuristicOutcome
from metamq.testing import Cluster
from metamq.tx import XAResource, Xid
from metamq.wire.xa import Verb
from tests.one_zookeeper import cluster
from tests.parts import read_to_end


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(brokers=2) as made:
        yield made


@pytest.fixture(autouse=True)
def _here(running: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)


@pytest.fixture(scope="module")
def topic(running: Cluster) -> str:
    running.create_topic("orders", partitions=2)
    return "orders"


@pytest.fixture
def mq(running: Cluster) -> Iterator[XAResource]:
    with XAResource(0, running.zookeeper) as made:
        yield made


def branch(mq: XAResource, topic: str, *, prepared: bool = True, gtrid: bytes | None = None) -> Xid:
    xid = Xid(7, gtrid) if gtrid is not None else Xid.random(b"order-")
    mq.start(xid)
    mq.send(topic, b"value")
    mq.end(xid)
    if prepared:
        mq.prepare(xid)
    return xid


def seen(running: Cluster) -> int:
    with running.consumer(topics=["orders"], idle_timeout_s=0.3) as consumer:
        return len(read_to_end(consumer))


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["tx", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_list_and_show(running: Cluster, mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    prepared, idle = branch(mq, topic), branch(mq, topic, prepared=False)
    status, out, _err = command(capsys, "list")
    assert status == 0
    assert out.splitlines()[0].split() == ["XID", "BROKER", "STATE", "AGE", "MESSAGES", "BYTES", "OWNER"]
    (line,) = [line for line in out.splitlines() if str(prepared) in line]
    assert " prepared " in line
    status, out, _err = command(capsys, "list", "-o", "json")
    found = {one["xid"]: one for one in json.loads(out)}
    assert found[str(prepared)]["messages"] == 1
    assert found[str(prepared)]["age_s"] < 60
    assert found[str(prepared)]["bytes"] > 0
    assert ":" in found[str(prepared)]["owner"]
    assert (found[str(idle)]["state"], found[str(idle)]["age_s"]) == ("idle", None)
    _status, out, _err = command(capsys, "list", "--state", "prepared", "-o", "json")
    assert {one["state"] for one in json.loads(out)} == {"prepared"}
    status, out, err = command(capsys, "show", str(prepared)[:-3])
    assert status == 0
    assert "prepared, for" in out
    assert "its transaction manager" in out
    assert "metamq tx commit" in err
    status, out, err = command(capsys, "show", str(idle))
    assert "at its time-out" in err
    _status, out, _err = command(capsys, "show", str(idle), "-o", "json")
    assert [one["xid"] for one in json.loads(out)] == [str(idle)]
    for xid in (prepared, idle):
        mq.rollback(xid)


@pytest.mark.parametrize(
    ("gtrid", "who", "step"),
    [
        (b"db:0123456789abcdef:x", "outcome table is 0123456789abcdef", "Recoverer"),
        (b"co-0123456789ab-x", "whose log is 0123456789ab", "Coordinator"),
        (b"spark:nightly:17", "batch 17 of the streaming query, or sink, nightly", "Start that query again"),
        (b"spark:job-0123:0", "the batch write job-0123", "The next exactly-once batch write"),
    ],
)
def test_show_says_who_is_to_decide(
    mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str], gtrid: bytes, who: str, step: str
) -> None:
    xid = branch(mq, topic, gtrid=gtrid)
    _status, out, err = command(capsys, "show", str(xid))
    assert who in out
    assert step in err
    mq.rollback(xid)


@pytest.mark.parametrize("what", ["commit", "rollback"])
def test_an_operator_decides(
    running: Cluster, mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    xid, before = branch(mq, topic), seen(running)
    status, _out, err = command(capsys, what, str(xid))
    assert status == 1
    assert "one part of the transaction is committed and another is rolled back" in err
    assert "Give --yes" in err
    status, out, err = command(capsys, what, str(xid), "--yes", "-o", "json")
    assert status == 0
    done = "committed" if what == "commit" else "rolled back"
    assert json.loads(out) == [{"xid": str(xid), "broker_id": 0, "outcome": done}]
    assert seen(running) == before + (what == "commit")
    with pytest.raises(HeuristicOutcome):
        mq.commit(xid)
    status, _out, err = command(capsys, what, str(xid), "--yes")
    assert status == 1
    assert "heuristically completed at broker 0" in err
    _status, _out, err = command(capsys, "show", str(xid))
    assert "metamq tx forget" in err
    assert command(capsys, "forget", str(xid), "--yes")[0] == 0
    status, _out, err = command(capsys, "forget", str(xid), "--yes")
    assert status == 1
    assert "`metamq tx list` shows the open branches" in err


def test_what_is_not_prepared_is_rolled_back_and_never_committed(
    mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    xid = branch(mq, topic, prepared=False)
    status, _out, err = command(capsys, "commit", str(xid), "--yes")
    assert status == 1
    assert "idle at broker 0" in err
    assert command(capsys, "rollback", str(xid), "--yes")[0] == 0
    with pytest.raises(BranchNotKnown):
        mq.prepare(xid)
    active = Xid.random()
    mq.start(active)
    assert command(capsys, "rollback", str(active), "--yes")[0] == 0


@pytest.mark.slow
def test_ids_that_are_none_or_not_the_only_ones(mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = branch(mq, topic), branch(mq, topic)
    status, _out, err = command(capsys, "show", "19793_")
    assert status == 1
    assert "transactions begin with" in err
    status, _out, err = command(capsys, "rollback", str(Xid.random()), "--yes")
    assert status == 1
    assert "not open at any broker" in err
    status, _out, err = command(capsys, "rollback", str(first), "--yes", "--broker", "1")
    assert "not open at broker 1" in err
    assert "It is open at broker 0: give `--broker 0`." in err
    for what in ("commit", "rollback", "forget"):
        status, _out, err = command(capsys, what, str(first), "--yes", "--broker", "9")
        assert (status, err.splitlines()[0]) == (1, "metamq: there is no broker 9")
    for what in ("show", "commit"):
        for text in ("foo", "7_!_", "7_a_b_c"):
            status, _out, err = command(capsys, what, text, *(["--yes"] if what == "commit" else []))
            assert (status, err.splitlines()[0]) == (1, f"metamq: {text!r} is not a transaction id")
    for xid in (first, second):
        assert command(capsys, "rollback", str(xid), "--yes", "--broker", "0")[0] == 0
        mq.forget(xid)


@pytest.mark.parametrize("form", ["whole", "hex", "text", "beginning"])
def test_a_transaction_over_two_brokers_is_one(
    running: Cluster, mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """As errors name it, and as it is in a database's outcome table."""
    gtrid = b"both-" + secrets.token_hex(8).encode()
    with XAResource(1, running.zookeeper) as other:
        for at, resource in enumerate((mq, other)):
            xid = Xid(19793, gtrid, b"%d" % at)
            resource.start(xid)
            resource.send(topic, b"value", partition=f"{at}-0")
            resource.end(xid)
            resource.prepare(xid)
    whole = Xid(19793, gtrid).whole
    text = {"whole": whole, "hex": gtrid.hex(), "text": gtrid.decode(), "beginning": whole[:-2]}[form]
    status, out, _err = command(capsys, "show", text)
    assert status == 0
    assert out.splitlines()[0] == whole
    assert "broker 0, branch 0: prepared" in out
    assert "broker 1, branch 1: prepared" in out
    status, out, _err = command(capsys, "show", str(Xid(19793, gtrid, b"1")))
    assert "broker 1: prepared" in out
    assert "broker 0" not in out
    if form == "beginning":  # will do to look at it, and no more
        status, _out, err = command(capsys, "rollback", text, "--yes")
        assert status == 1
        assert "not open at any broker" in err
        assert f"{whole} begins with it" in err
        text = whole
    status, out, _err = command(capsys, "rollback", text, "--yes", "-o", "json")
    assert (status, [one["broker_id"] for one in json.loads(out)]) == (0, [0, 1])
    assert command(capsys, "forget", text, "--yes")[0] == 0


@pytest.mark.parametrize("what", ["show", "commit", "rollback", "forget"])
def test_an_empty_id_is_no_transaction(
    mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """As "$XID" is where that is not set: it must not be the only one that there is."""
    xid = branch(mq, topic)
    status, _out, err = command(capsys, what, "", *(["--yes"] if what != "show" else []))
    assert status == 1
    assert "no transaction id was given" in err
    mq.rollback(xid)


def test_a_decision_that_a_broker_may_miss_is_refused(
    running: Cluster, mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    xid = branch(mq, topic)
    running.brokers[1].stop()
    try:
        status, _out, err = command(capsys, "rollback", str(xid), "--yes")
        assert status == 3
        assert "broker 1" in err
        assert "it may have" in err
        assert "It is open at broker 0: give `--broker 0` to choose that branch, or try again later." in err
        status, _out, err = command(capsys, "rollback", str(xid), "--yes", "--broker", "1")
        assert status == 3
        assert "It is open at broker 0: give `--broker 0`" in err
        status, _out, err = command(capsys, "show", "foo")
        assert (status, "Broker 1 cannot be asked" in err) == (1, True)
        assert "'foo' is not a transaction id" in err
        status, out, err = command(capsys, "show", str(xid))
        assert (status, "prepared" in out) == (0, True)
        assert "Broker 1 cannot be asked" in err
        status, _out, err = command(capsys, "rollback", str(Xid.random()), "--yes", "--broker", "0")
        assert status == 1
        assert "not open at broker 0" in err
        assert command(capsys, "rollback", str(xid), "--yes", "--broker", "0")[0] == 0
        mq.forget(xid)
    finally:
        running.brokers[1].start()


def test_a_broker_that_does_not_answer_is_named(
    running: Cluster, mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    xid = branch(mq, topic)
    running.brokers[1].stop()
    try:
        status, out, err = command(capsys, "list")
        assert status == 1
        assert str(xid) in out
        assert "The branches at broker 1 are unknown" in err
        assert command(capsys, "show", str(xid))[0] == 0
        status, _out, err = command(capsys, "show", str(Xid.random()))
        assert status == 3
        assert "it may have" in err
    finally:
        running.brokers[1].start()
    mq.rollback(xid)


def test_admin(running: Cluster, mq: XAResource, topic: str) -> None:
    xid, other = branch(mq, topic), branch(mq, topic)
    with running.admin() as admin:
        found = admin.transactions()
        assert found.problems == {}
        assert {(one.xid, one.state, one.broker_id) for one in found.branches} == {
            (xid, "prepared", 0), (other, "prepared", 0),
        }  # fmt: skip
        admin.commit_branch(xid, 0)
        with pytest.raises(BranchMisuse, match="heuristically completed"):
            admin.commit_branch(xid, 0)
        with pytest.raises(HeuristicOutcome):
            admin.rollback_branch(xid, 0)
        admin.forget_branch(xid, 0)
        with pytest.raises(BranchNotKnown):
            admin.forget_branch(xid, 0)
        with pytest.raises(ConfigError, match="no broker 9"):
            admin.rollback_branch(xid, 9)
    assert isinstance(admin, Admin)

    async def main() -> None:
        async with aio.Admin(running.zookeeper) as admin:
            await admin.rollback_branch(other, 0)
            assert [one.state for one in (await admin.transactions()).branches] == ["heuristically completed"]
            with pytest.raises(BranchMisuse):
                await admin.commit_branch(other, 0)
            await admin.forget_branch(other, 0)
            assert (await admin.transactions()).branches == ()

    asyncio.run(main())


def test_a_decision_that_others_follow_is_not_dropped_without_a_word(
    running: Cluster, mq: XAResource, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    xid = branch(mq, topic, prepared=False)
    core = mq._core
    mq._background.run(core._client.ask(core._branch_of(xid), [Verb.DECIDE], followers=[1, 7]))
    _status, out, err = command(capsys, "show", str(xid))
    assert "broker 1 follows" in out
    assert "Do nothing" in err
    status, _out, err = command(capsys, "forget", str(xid))
    assert status == 1
    assert "committed at broker 1" in err
    status, _out, err = command(capsys, "rollback", str(xid), "--yes")
    assert status == 1
    assert "decided at broker 0" in err
    assert command(capsys, "forget", str(xid), "--yes")[0] == 0
