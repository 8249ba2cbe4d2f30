"""`metamq ha` against a real master and its slave."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest

from metamq import aio
from metamq.cli.context import Globals
from metamq.cli.show.units import show_bytes
from metamq.client.admin.admin_model import PromotionPlan, ReplicaDescription
from metamq.errors import Fenced
from metamq.testing import BrokerProcess, Cluster, cluster
from metamq.zk.cluster.epochs import next_epoch
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.ports import free_port
from tests.broker.ha.test_replication import Group
from tests.cli.conftest import Metamq
from tests.parts import another_boot, wait_until

Pair = tuple[Cluster, BrokerProcess]
Start = Callable[..., "subprocess.Popen[bytes]"]
UNKNOWN = "The loss is unknown: why."


@pytest.fixture(scope="module")
def started() -> Iterator[Pair]:
    settings: dict[str, Any] = {"session_timeout_ms": 3000, "insync_lag_ms": 1000}
    with cluster(**settings) as running:
        slave = BrokerProcess(running.zookeeper, running.folder / "replica-1", 0, replica=1, **settings)
        slave.start()
        running.create_topic("t", partitions=1, replication="sync")
        yield running, slave
        if slave.running:
            slave.kill()


@pytest.fixture
def pair(started: Pair) -> Pair:
    """A master and its slave, both in sync: a test before may have left one of them killed."""
    running, slave = started
    for broker in (running.broker, slave):
        if not broker.running:
            broker.start()
    with running.admin() as admin:
        wait_until(lambda: [one.holds_all for one in admin.replicas()[0].replicas] == [True, True], what="both in sync")
    return started


@pytest.fixture
def ha(offline: Metamq, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Metamq:
    monkeypatch.setenv("METAMQ_ZOOKEEPER", pair[0].zookeeper)
    return lambda *arguments, **more: offline("ha", *arguments, **more)


def check_waits(ha: Metamq) -> None:
    # On a slow machine the slave may leave the set for a moment.
    assert ha("wait", "--in-sync", 2).talk.endswith("2 replicas of broker 0 are in sync.\n")
    why = "broker 0 has 2 of 3 replicas in sync (replica 0, 1)"
    told = f"Waiting: {why}.\nmetamq: waiting for 3 replicas in sync ({why}) took longer than 0.1 s"

    def is_late() -> bool:
        late = ha("wait", "--in-sync", 3, "--limit", "100ms")
        assert late.status == 1
        return bool(late.talk.startswith(told))

    wait_until(is_late, what=told)
    late = ha("wait", "--broker", 7, "--limit", "100ms")
    assert "waiting for 2 replicas in sync (broker 7 was never started) took longer than 0.1 s" in late.talk


@pytest.mark.slow
def test_status_promotion_and_what_it_would_lose(ha: Metamq, pair: Pair) -> None:
    running, slave = pair
    with running.producer() as producer:
        producer.send("t", b"both").result(60)
    shown = ha("status", "--broker", 0)
    assert (shown.status, shown.talk) == (0, "")
    lines = [line.split() for line in shown.text.splitlines()]
    with running.admin() as admin:
        before = admin.replicas()[0].epoch
    assert lines[0][:3] == ["BROKER", "REPLICA", "ROLE"]
    assert [line[:3] for line in lines[1:]] == [["0", "0", "master"], ["0", "1", "slave"]]

    check_waits(ha)
    refused = ha("promote", "--slave", 7, "--yes")
    assert refused.status == 1
    assert "broker 0 has no slave 7" in refused.talk
    assert "Its slaves are: 1." in refused.talk
    assert ha("wait", "--in-sync", 2).status == 0
    unconfirmed = ha("promote", "--slave", 1)
    assert unconfirmed.status == 1
    assert "in place of replica 0, which runs and hands over" in unconfirmed.talk
    assert "It is in sync: nothing is lost.\n" in unconfirmed.talk
    assert "Give --yes to do it" in unconfirmed.talk

    promoted = ha("promote", "--slave", 1, "--yes", "-o", "json")
    epoch = promoted.json["epoch"]
    assert promoted.json == {"broker_id": 0, "master": 1, "epoch": epoch}
    assert epoch > before
    with running.admin() as admin:
        wait_until(lambda: all(one.in_sync for one in admin.replicas()[0].replicas), what="the former master in sync")

        # Now replica 0 is away while something is written, and comes back after the master is gone.
        running.broker.kill()
        with running.producer() as producer:
            producer.send("t", b"one").result(60)
            producer.send("t", b"two").result(60)
        slave.kill()
        running.broker.start()
        wait_until(
            lambda: [one.address is None for one in admin.replicas()[0].replicas] == [False, True],
            what="replica 0 registered, and replica 1 gone",
        )
    looked = ha("status", "-o", "json")
    assert looked.status == 1
    assert "Start replica 1: no other one is in sync." in looked.talk
    status = {one["replica"]: one for one in looked.json[0]["replicas"]}
    assert (status[1]["role"], status[1]["address"], status[0]["in_sync"]) == ("master", None, False)
    refused = ha("promote", "--slave", 0, "--yes")
    assert refused.status == 1
    assert "It is not in sync: without --accept-loss the promotion is refused." in refused.talk
    assert "Replica 1 is in sync and down. Start it first: its folder has the acknowledged messages." in refused.talk
    assert "replica 1 of broker 0 is down" in ha("promote", "--slave", 1).talk
    accepted = ha("promote", "--slave", 0, "--accept-loss", "--yes")
    assert accepted.status == 0
    assert re.search("loss is unknown: replica 1 has .*\nStart replica 1. If it runs, promote it", accepted.talk)
    (said,) = re.findall(r"Replica 0 is the master of broker 0, epoch (\d+)\.", accepted.talk)
    assert int(said) > epoch


def test_when_all_hosts_went_down_the_master_of_then_waits_and_may_be_promoted(ha: Metamq, pair: Pair) -> None:
    running, slave = pair
    with running.admin() as admin:
        replicas = lambda: admin.replicas()[0].replicas  # noqa: E731
        master = next(one.replica for one in replicas() if one.role == "master")
        for broker in (running.broker, slave):
            broker.kill()
            another_boot(broker)
        for broker in (running.broker, slave):
            broker.start()
        wait_until(lambda: any(one.role == "waiting" for one in replicas()), what="one that waits")
    shown = ha("status")
    assert f"broker 0: replica {master} waits: it may lack messages that it acknowledged" in shown.talk
    assert "No replica is in sync. Start all of them" in shown.talk
    assert [line.split()[5] for line in shown.text.splitlines()[1:]] == ["no", "no"]
    refused = ha("promote", "--slave", master, "--yes")
    assert refused.status == 1
    assert f"Replica {master} will be the master of broker 0 again." in refused.talk
    assert "It is not in sync" in refused.talk
    accepted = ha("promote", "--slave", master, "--accept-loss", "--yes")
    assert accepted.status == 0, accepted.talk
    assert "LOST" not in accepted.talk


@pytest.mark.slow
def test_with_the_master_dead_it_is_said_what_is_missing(ha: Metamq, offline: Metamq, pair: Pair) -> None:
    running, slave = pair
    with running.admin() as admin:
        replicas = lambda: admin.replicas()[0].replicas  # noqa: E731
        master = next(one.replica for one in replicas() if one.role == "master")
        (running.broker, slave)[master].kill()
        wait_until(lambda: replicas()[master].address is None, what="the end of the master's session")
        assert admin.create_topic("t", exist_ok=True, timeout_s=60).topic == "t"
    late = ha("wait", "--limit", "100ms")
    missing = f"broker 0 has 1 of 2 replicas in sync (replica {1 - master}), replica {master} (the master) is down"
    assert f"Waiting: {missing}.\n" in late.talk
    refused = offline("topic", "create", "other")
    assert refused.status == 1
    assert f"`metamq ha promote --broker 0 --slave {1 - master}`" in refused.talk


@pytest.mark.slow
def test_wait_waits_for_the_first_zookeeper_and_broker_too(process: Start, tmp_path: Path) -> None:
    port = free_port()
    waiting = process("ha", "wait", "--in-sync", 1, "--zookeeper", f"127.0.0.1:{port}")
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith(b"Waiting: ")
    with EmbeddedZooKeeper(tmp_path / "zookeeper", port) as zookeeper:
        lines = iter(waiting.stderr.readline, b"")
        assert any(b"no broker has ever been there" in line for line in lines)
        broker = BrokerProcess(zookeeper.address, tmp_path / "broker")
        broker.start()
        assert b"1 replica of broker 0 is in sync." in waiting.communicate(timeout=90)[1]
        assert waiting.returncode == 0
        assert broker.stop() == 0


@pytest.mark.slow
def test_wait_outlives_an_outage_of_zookeeper(process: Start) -> None:
    with cluster(session_timeout_ms=3000, insync_lag_ms=1000) as running:
        waiting = process("ha", "wait", "--in-sync", 2, "--zookeeper", running.zookeeper)
        assert waiting.stderr is not None
        lines = iter(waiting.stderr.readline, b"")
        assert any(b"broker 0 has 1 of 2 replicas in sync" in line for line in lines)
        running.zookeeper_server.kill()
        assert any(b"Waiting: " in line and b"ZooKeeper at" in line for line in lines)
        running.zookeeper_server.restart()
        slave = BrokerProcess(running.zookeeper, running.folder / "replica-1", 0, replica=1)
        slave.start()
        assert b"2 replicas of broker 0 are in sync." in waiting.communicate(timeout=90)[1]
        assert waiting.returncode == 0
        slave.stop()


SLOW_BYTES_S = 1000
LARGE_BYTES = 200_000
"""As fast as the link may be, it has to pause for minutes after this."""
LACKED = {"one": 7, "two": 3}


class Behind(NamedTuple):
    """A slave that lives, is linked and out of the set, and exactly how far it is behind."""

    group: Group
    lag_bytes: int
    since: tuple[float, float]
    """Between these the first of what it lacks was appended, on the clock of time.monotonic()."""

    def lag_s(self, found: float, before: float, rounding: float = 0.0005) -> bool:
        """Whether that is how long it was behind, asked for between `before` and now."""
        at_least, at_most = before - self.since[1], time.monotonic() - self.since[0]
        return at_least - rounding <= found <= at_most + rounding


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Behind]:
    settings: dict[str, Any] = {"session_timeout_ms": 3000, "insync_lag_ms": 1000}
    with cluster(**settings, replication_bytes_per_s=SLOW_BYTES_S) as running:
        monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
        group = Group(running)
        for topic in LACKED:
            running.create_topic(topic, partitions=1, replication="sync")
        slave = group.add_slave()
        try:
            group.wait_insync(0, 1)
            with running.producer(compression=None, linger_ms=0) as producer:
                producer.send("one", bytes(LARGE_BYTES)).result(60)
                both = sum(size for _end, size in group.ends(0).values())
                began = time.monotonic()
                first = producer.send("one", b"0")
                wait_until(lambda: group.ends(0)["one", 0][0] == 2, what="the first that it lacks")
                since = began, time.monotonic()
                first.result(60)  # once it has left the set
                for topic, count in LACKED.items():
                    for number in range(count - (topic == "one")):
                        producer.send(topic, b"%d" % number).result(60)
            yield Behind(group, sum(size for _end, size in group.ends(0).values()) - both, since)
        finally:
            slave.kill()


def test_status_shows_how_far_a_slave_is_behind(offline: Metamq, behind: Behind) -> None:
    with behind.group.cluster.admin() as admin:
        before = time.monotonic()
        master, slave = admin.replicas()[0].replicas
        assert (slave.in_sync, slave.lag_messages, slave.lag_bytes) == (False, sum(LACKED.values()), behind.lag_bytes)
        assert slave.lag_ms is not None
        assert behind.lag_s(slave.lag_ms / 1000, before)
        assert (master.in_sync, master.lag_messages, master.lag_bytes, master.lag_ms) == (True, None, None, None)
    before = time.monotonic()
    row = re.sub(r"catching up(, \w+ or more left)?", "catching-up", offline("ha", "status").text.splitlines()[2])
    columns = row.split()
    assert columns[5:8] == ["catching-up", str(sum(LACKED.values())), show_bytes(behind.lag_bytes)]
    assert behind.lag_s(float(columns[8]), before, rounding=0.0505)
    before = time.monotonic()
    status = offline("ha", "status", "-o", "json").json[0]["replicas"][1]
    assert (status["lag_messages"], status["lag_bytes"]) == (sum(LACKED.values()), behind.lag_bytes)
    assert behind.lag_s(status["lag_ms"] / 1000, before)


def test_what_a_promotion_loses_is_said_first_and_then_lost(offline: Metamq, behind: Behind) -> None:
    running = behind.group.cluster
    plan = PromotionPlan(
        broker_id=0, replica=1, master=0, master_lives=True, in_sync=False, lost=LACKED, learner=False,
        in_sync_and_down=(),
    )  # fmt: skip
    with running.admin() as admin:
        assert admin.plan_promotion(0, 1) == plan
        epoch = admin.replicas()[0].epoch

    async def by_the_asyncio_admin() -> None:
        async with aio.Admin(running.zookeeper) as admin:
            assert await admin.plan_promotion(0, 1) == plan
            with pytest.raises(Fenced, match="not in the in-sync set"):
                await admin.promote(0, 1)

    asyncio.run(by_the_asyncio_admin())

    refused = offline("ha", "promote", "--slave", 1, "--yes")
    assert refused.status == 1
    assert refused.talk.splitlines()[:4] == [
        "Replica 1 will be the master of broker 0 in place of replica 0, which runs and does not hand over.",
        "It is not in sync: without --accept-loss the promotion is refused.",
        "It would lose: 7 messages of topic one.",
        "It would lose: 3 messages of topic two.",
    ]
    assert "not in the in-sync set" in refused.talk
    unconfirmed = offline("ha", "promote", "--slave", 1, "--accept-loss")
    assert unconfirmed.status == 1
    with running.admin() as admin:
        assert admin.replicas()[0].epoch == epoch, "nothing was done"

    accepted = offline("ha", "promote", "--slave", 1, "--accept-loss", "--yes")
    assert accepted.status == 0, accepted.talk
    assert accepted.talk.splitlines() == [
        "Replica 1 will be the master of broker 0 in place of replica 0, which runs and does not hand over.",
        "It is not in sync.",
        "LOST: 7 messages of topic one.",
        "LOST: 3 messages of topic two.",
        f"Replica 1 is the master of broker 0, epoch {next_epoch(epoch, 1)}.",
    ]
    assert [behind.group.ends(1)[topic, 0][0] for topic in LACKED] == [1, 0]
    behind.group.wait_insync(0, 1, master=1)
    behind.group.wait_equal(0, 1)


@pytest.mark.parametrize(
    ("master_lives", "lost", "instead", "said"),
    [
        (False, {"t": 2}, None, ["LOST: 2 messages of topic t."]),
        (True, {}, None, ["At present it has all messages of the replicas that answer."]),
        (False, None, None, [UNKNOWN]),
        (False, None, 0, [UNKNOWN, "Start replica 0. If it runs, promote it instead."]),
        (True, None, 2, [UNKNOWN, "Start replica 2. If it runs, promote it instead."]),
        (True, None, 0, [UNKNOWN, "Replica 0 is the master and runs: wait until replica 1 is in sync."]),
    ],
)
def test_each_thing_that_the_plan_knows_of_a_loss_is_said_before_the_question(
    offline: Metamq,
    monkeypatch: pytest.MonkeyPatch,
    master_lives: bool,
    lost: dict[str, int] | None,
    instead: int | None,
    said: list[str],
) -> None:
    why = "" if lost is not None else "why"
    plan = PromotionPlan(0, 1, 0, master_lives, False, lost, False, (), why, instead)
    admin = MagicMock()
    admin.__enter__.return_value.plan_promotion.return_value = plan
    monkeypatch.setattr(Globals, "admin", lambda _self: admin)
    asked = offline("ha", "promote", "--slave", 1, "--accept-loss")
    assert asked.status == 1
    assert asked.talk.splitlines()[1:] == ["It is not in sync.", *said, "Nothing was done. Give --yes to do it."]
    admin.__enter__.return_value.promote.assert_not_called()


def test_the_asyncio_admin_promotes(pair: Pair) -> None:
    running, _slave = pair

    async def scenario() -> None:
        async with aio.Admin(running.zookeeper) as admin:
            before = (await admin.replicas())[0]
            (other,) = [one.replica for one in before.replicas if one.role == "slave"]
            plan = await admin.plan_promotion(0, other)
            assert (plan.in_sync, plan.master_lives, plan.lost) == (True, True, {})
            assert await admin.promote(0, other) == next_epoch(before.epoch, other)
            assert {one.replica: one.role for one in (await admin.replicas())[0].replicas}[other] == "master"

    asyncio.run(scenario())


@pytest.mark.slow
def test_failover_is_set_paused_and_shown_and_each_switch_is_in_the_history(ha: Metamq, pair: Pair) -> None:
    (before,) = ha("failover", "-o", "json").json
    assert (before["mode"], before["successor"], before["no_successor"]) == ("manual", None, "failover is manual")
    assert "no replica takes over: failover is manual" in ha("status").text
    (auto,) = ha("failover", "--broker", 0, "auto", "--preferred", 1, "-o", "json").json
    assert (auto["mode"], auto["paused"], auto["preferred"], auto["no_successor"]) == ("auto", False, 1, "")
    assert auto["successor"] is not None
    assert [line.endswith("takes over") for line in ha("status").text.splitlines()[1:]].count(True) == 1
    assert "paused" in ha("pause").text
    assert ha("failover", "-o", "json").json[0]["no_successor"] == "failover is paused"
    assert "auto" in ha("resume").text
    refused = ha("failover", "--preferred", 1)
    assert (refused.status, "--preferred needs --broker" in refused.talk) == (2, True)

    with pair[0].admin() as admin:
        master = next(one.replica for one in admin.replicas()[0].replicas if one.role == "master")
    listed = len(ha("history", "-o", "json").json)
    assert ha("promote", "--broker", 0, "--slave", 1 - master, "--yes").status == 0
    wait_until(lambda: len(ha("history", "-o", "json").json) > listed, what="the switch in the history")
    last = ha("history", "--broker", 0, "-o", "json").json[-1]
    assert (last["was"], last["now"], last["cause"]) == (master, 1 - master, "an operator's command")
    assert "an operator's command" in ha("history").text
    ha("failover", "--broker", 0, "manual", "--preferred", -1)


@pytest.mark.slow
def test_balance_spreads_masters_over_hosts_and_prefers_them(offline: Metamq) -> None:
    settings: dict[str, Any] = {"host": "127.0.0.11", "session_timeout_ms": 3000, "failover": "auto"}
    with cluster(brokers=2, **settings) as running, running.admin() as admin:
        for broker_id in (0, 1):
            running.add_slave(broker_id, host="127.0.0.12")

        def replicas() -> list[ReplicaDescription]:
            return [one for broker in admin.replicas().values() for one in broker.replicas]

        wait_until(lambda: [one.holds_all for one in replicas()] == [True] * 4, what="all in sync")
        here = ("--zookeeper", running.zookeeper)
        asked = offline("ha", "balance", *here)
        assert asked.status == 1
        moves = "Broker 0: the master moves from replica 0 at 127.0.0.11 to replica 1 at 127.0.0.12, which becomes"
        assert moves in asked.talk
        assert "Broker 1: replica 0 at 127.0.0.11, its master, becomes preferred." in asked.talk
        assert "Masters now: 2 at 127.0.0.11. Then: 1 at 127.0.0.11, 1 at 127.0.0.12." in asked.talk
        assert "Nothing was done." in asked.talk
        places = offline("ha", "balance", "--yes", "-o", "json", *here).json
        assert [(one["broker_id"], one["replica"]) for one in places] == [(0, 1), (1, 0)]
        assert [one.replica for one in replicas() if one.role == "master"] == [1, 0]
        assert [admin.failover(broker_id).preferred for broker_id in (0, 1)] == [1, 0]
        again = offline("ha", "balance", *here)
        assert (again.status, again.talk) == (0, "Masters: 1 at 127.0.0.11, 1 at 127.0.0.12.\n")


@pytest.mark.slow
def test_status_estimates_when_a_slave_has_caught_up(offline: Metamq, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(replication_bytes_per_s=1 << 20) as running:
        running.create_topic("t", partitions=1)
        with running.producer() as producer:
            producer.send_many("t", [bytes([number % 256]) * 1000 for number in range(20_000)])
        monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
        running.add_slave()
        shown = r"1 +slave +catching up, \d+s or more left"
        wait_until(lambda: re.search(shown, offline("ha", "status").text), what="an estimate")
