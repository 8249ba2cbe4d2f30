"""What a broker id's replicas are advised, by how they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metamq.cli.show.replica_view import damage_faults, failover_faults, replica_faults, state_in_words
from metamq.client.admin.admin_model import BrokerReplicas, ReplicaDescription


def replica(number: int, role: str, how: str, problem: str = "") -> ReplicaDescription:
    """`how`: in sync, learner, apart, or its stage at the master; "down, " comes before it if it is not registered."""
    is_down, how = how.startswith("down, "), how.removeprefix("down, ")
    stage = "" if how in ("in sync", "learner", "apart") else how
    address = None if is_down else f"host:{number}"
    return ReplicaDescription(
        0, number, role, address, how == "in sync", None, stage, None, None, None, None, problem, how == "learner"
    )


MASTER = replica(0, "master", "in sync")
DEAD = replica(0, "master", "down, in sync")
HANGS = replica(0, "master", "in sync", "no answer")
WAITS = replica(0, "waiting", "apart", "waits")
READY = replica(1, "slave", "in sync")
BEHIND = replica(1, "slave", "catching up")
GONE = replica(1, "slave", "down, in sync")
APART = replica(1, "slave", "apart")
FULL = replica(1, "slave", "apart", "no room")
LEARNER = replica(1, "slave", "learner")
PROMOTE = "`metamq ha promote --broker 0 --slave 1` makes replica 1, which is in sync, the master"
LOOK_AGAIN = "It may only be slow: run `metamq ha status` again. If it stays silent:"
START_IT = "Start it. Its log has the reason for its end."


@pytest.mark.parametrize(
    ("master", "slave", "hints"),
    [
        (MASTER, READY, []),
        (MASTER, BEHIND, []),
        (MASTER, GONE, ["Start it."]),
        (MASTER, APART, ["If it has not just started, its log has the reason."]),
        (MASTER, FULL, [""]),
        (DEAD, READY, [f"{PROMOTE}, unless replica 0 comes back soon."]),
        (HANGS, READY, [f"{LOOK_AGAIN} {PROMOTE}, unless replica 0 comes back soon."]),
        (
            DEAD,
            APART,
            [
                "Start replica 0: no other one is in sync. If it is lost permanently, "
                "`metamq ha promote --broker 0 --slave 1 --accept-loss` shows the loss, and asks."
            ],
        ),
        (DEAD, GONE, ["Start replica 0; or start replica 1, which is also in sync, and promote it.", "Start it."]),
        (DEAD, LEARNER, [START_IT]),
        (WAITS, READY, [f"{PROMOTE}."]),
        (
            WAITS,
            GONE,
            ["Replica 1 is in sync and down. Start it first: its folder has the acknowledged messages.", "Start it."],
        ),
        (
            WAITS,
            APART,
            [
                "No replica is in sync. Start all of them; `metamq ha promote --broker 0 --slave 0 --accept-loss` then "
                "shows the loss, and asks."
            ],
        ),
    ],
)
def test_advice(master: ReplicaDescription, slave: ReplicaDescription, hints: list[str]) -> None:
    found = replica_faults(BrokerReplicas(0, 3, 1, (master, slave)))
    assert [one.hint for one in found] == hints
    assert [one.what for one in found if one.status == "problem"] == ([] if master is MASTER else ["broker 0"])


@pytest.mark.parametrize(
    ("slave", "hint"),
    [
        (
            replace(READY, copying=0),
            "`metamq ha promote --broker 0 --slave 1` makes replica 1, which is in sync, the master",
        ),
        (
            GONE,
            "its folder has the acknowledged messages. Then promote replica 1: `metamq ha promote --broker 0",
        ),
        (BEHIND, "accept it with `metamq log accept`"),
    ],
)
def test_a_damaged_master_is_replaced_by_a_slave_that_is_in_sync_and_down_too(
    slave: ReplicaDescription, hint: str
) -> None:
    (found,) = damage_faults(BrokerReplicas(0, 3, 1, (replace(MASTER, damaged=("t/0-0",), damaged_count=1), slave)))
    assert hint in found.hint


@pytest.mark.parametrize(("copying", "holds_all"), [(None, False), (2, False), (0, True)])
def test_who_is_in_sync_and_has_not_shown_yet_that_its_logs_are_whole_is_waited_for(
    copying: int | None, holds_all: bool
) -> None:
    assert replace(READY, copying=copying).holds_all is holds_all
    assert MASTER.holds_all


def test_a_slave_that_copies_data_is_catching_up() -> None:
    copies = replace(READY, in_sync=False, copying=3)
    assert (copies.state, state_in_words(copies)) == ("catching up", "catching up")
    assert state_in_words(replace(copies, catch_up_s=40.4)) == "catching up, 40s or more left"
    assert state_in_words(replace(copies, copying=0)) == "up"
    assert state_in_words(replace(HANGS, silent_s=6.1)) == "silent for 6s"
    assert state_in_words(HANGS) == "silent"


@pytest.mark.parametrize(
    ("one", "state"), [(MASTER, "up"), (HANGS, "silent"), (DEAD, "down"), (READY, "up"), (GONE, "down"), (FULL, "up")]
)
def test_the_state_tells_a_dead_replica_that_is_in_sync(one: ReplicaDescription, state: str) -> None:
    assert one.state == state


@pytest.mark.parametrize(
    ("master", "slave", "failover", "recent", "said"),
    [
        (MASTER, READY, "auto", 2, []),
        (MASTER, APART, "manual", 0, []),
        (MASTER, APART, "auto", 0, ["no slave would take over: no other replica is in sync"]),
        (DEAD, APART, "auto", 0, []),  # its own finding
        (MASTER, READY, "paused", 0, ["automatic failover is paused"]),
        (MASTER, READY, "unknown", 0, ["the mode of failover cannot be read: damaged"]),
        (MASTER, READY, "auto", 3, ["its master has changed by itself 3 times in 10 minutes"]),
    ],
)
def test_faults_of_automatic_failover(
    master: ReplicaDescription, slave: ReplicaDescription, failover: str, recent: int, said: list[str]
) -> None:
    reason = "damaged" if failover == "unknown" else "no other replica is in sync"
    successor = 1 if slave is READY and failover == "auto" else None
    broker = BrokerReplicas(0, 3, 1, (master, slave), "", failover, successor, "" if successor else reason)
    found = failover_faults(broker, recent)
    assert [one.detail for one in found] == said
    assert all(one.hint for one in found)
