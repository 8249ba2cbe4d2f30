"""Faults of a broker id's replicas, and the command that repairs each: for `metamq ha status` and the doctor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from metamq.cli.show.output import listed
from metamq.cli.show.units import show_age

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import BrokerReplicas, ReplicaDescription

RECENT_MS = 600_000
FLAPPING = 3
"""This number of automatic switches within RECENT_MS is a fault."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and the repair of a fault. The status is "problem" if clients are not served."""

    what: str
    status: Literal["ok", "warning", "problem"]
    detail: str
    hint: str = ""


def state_in_words(replica: ReplicaDescription) -> str:
    """Returns the state of a replica for a table, with its time."""
    if replica.state == "silent" and replica.silent_s is not None:
        return f"silent for {show_age(round(replica.silent_s * 1000))}"
    if replica.state == "catching up" and replica.catch_up_s is not None:
        return f"catching up, {show_age(round(replica.catch_up_s * 1000))} or more left"
    return replica.state


def replica_faults(broker: BrokerReplicas) -> list[Finding]:
    """Returns the faults of a broker id's replicas, the master's first."""
    refused = [
        Finding(f"broker {broker.broker_id}", "warning", each) for one in broker.replicas for each in one.refused
    ]
    return [*_of_master(broker), *(found for one in broker.replicas for found in _of_slave(broker, one)), *refused]


def failover_faults(broker: BrokerReplicas, recent_switches: int) -> list[Finding]:
    """Returns the reasons why no slave would take over although an operator expects it, and signs of flapping.

    `recent_switches`: automatic switches of the last RECENT_MS.
    """
    what, found = f"broker {broker.broker_id}", []
    if broker.failover == "auto" and broker.successor is None and _has_master(broker):
        hint = "Start a slave, or wait until it is in sync: `metamq ha status` shows the replicas."
        found.append(Finding(what, "warning", f"no slave would take over: {broker.no_successor}", hint))
    if broker.failover == "paused":
        hint = f"After the maintenance: `metamq ha resume --broker {broker.broker_id}`."
        found.append(Finding(what, "warning", "automatic failover is paused", hint))
    if broker.failover == "unknown":
        hint = "Delete this node with ZooKeeper's own client. Then set the mode again: "
        hint += f"`metamq ha failover --broker {broker.broker_id} auto`."
        found.append(Finding(what, "problem", f"the mode of failover cannot be read: {broker.no_successor}", hint))
    if recent_switches >= FLAPPING:
        detail = f"its master has changed by itself {recent_switches} times in {RECENT_MS // 60_000} minutes"
        hint = f"`metamq ha history --broker {broker.broker_id}` shows the causes. Repair the replica that fails."
        found.append(Finding(what, "warning", detail, hint))
    return found


def damage_faults(broker: BrokerReplicas) -> list[Finding]:
    """Returns the damaged logs of the master, and their repair."""
    found = []
    for one in broker.replicas:
        if one.damaged_count:
            what = f"broker {broker.broker_id}"
            more = one.damaged_count - len(one.damaged)
            places = "; ".join((*one.damaged, *([f"and {more:,} more"] if more > 0 else [])))
            logs = f"{one.damaged_count:,} log{'s' * (one.damaged_count != 1)}"
            detail = f"replica {one.replica}, its master, has damage in {logs}: {places}"
            found.append(Finding(what, "problem", detail, _repair(broker, one)))
    return found


def _repair(broker: BrokerReplicas, damaged: ReplicaDescription) -> str:
    others = [one for one in broker.replicas if one is not damaged]
    ready = [one.replica for one in others if one.holds_all]
    down = [one.replica for one in others if one.in_sync and one.address is None]
    promote = f"metamq ha promote --broker {broker.broker_id} --slave"
    if not ready and down:
        return f"{in_sync_and_down(down)} Then promote replica {down[0]}: `{promote} {down[0]}`."
    if ready:
        return (
            f"`{promote} {ready[0]}` makes replica {ready[0]}, which is in sync, the master. Replica {damaged.replica} "
            "then moves the damaged logs aside and copies them again."
        )
    return (
        "No other replica is in sync. `metamq log verify` on the data folder shows every damaged place. Restore the "
        "partition's folder from a copy, and accept it with `metamq log accept`; or seek to an offset after the "
        "damage; or stop the broker, and give up the whole log, if it is no journal, with `metamq log forget`."
    )


def _of_master(broker: BrokerReplicas) -> Iterator[Finding]:
    what = f"broker {broker.broker_id}"
    master = next(one for one in broker.replicas if one.role != "slave")
    if broker.taken_back:
        yield Finding(what, "problem", broker.taken_back, _next_master(broker))
    elif master.role == "waiting":
        yield Finding(what, "problem", f"replica {master.replica} {master.problem}", _next_master(broker))
    elif master.address is None:
        seen = f"not registered, last seen in epoch {broker.epoch}: replica {master.replica}, its master, is down"
        yield Finding(what, "problem", seen, _next_master(broker))
    elif master.problem:
        detail = f"replica {master.replica}, its master, is registered but does not answer: {master.problem}"
        slow = "It may only be slow: run `metamq ha status` again. If it stays silent:"
        yield Finding(what, "problem", detail, f"{slow} {_next_master(broker)}")


def _next_master(broker: BrokerReplicas) -> str:
    """Returns the step that gives a broker id a master again; without loss if that is possible."""
    master = next(one for one in broker.replicas if one.role != "slave")
    is_waiting = master.role == "waiting" or bool(broker.taken_back)
    promote = f"metamq ha promote --broker {broker.broker_id} --slave"
    slaves = [one for one in broker.replicas if one is not master and not one.learner]
    ready = [one.replica for one in slaves if one.in_sync and one.address is not None and not one.problem]
    if broker.successor in ready:
        when = f"later: {broker.successor_waits}" if broker.successor_waits else "soon"
        return f"Replica {broker.successor} takes over by itself {when}. To do it now: `{promote} {broker.successor}`."
    if ready:
        again = "" if is_waiting else f", unless replica {master.replica} comes back soon"
        return f"`{promote} {ready[0]}` makes replica {ready[0]}, which is in sync, the master{again}."
    down = [one.replica for one in slaves if one.in_sync and one.address is None]
    if down and is_waiting:
        return in_sync_and_down(down)
    if down:
        return f"Start replica {master.replica}; or start replica {down[0]}, which is also in sync, and promote it."
    running = [one.replica for one in slaves if one.address is not None]
    if is_waiting:
        losing = f"`{promote} {min([master.replica, *running])} --accept-loss`"
        return f"No replica is in sync. Start all of them; {losing} then shows the loss, and asks."
    if running:
        losing = f"`{promote} {running[0]} --accept-loss` shows the loss, and asks"
        return f"Start replica {master.replica}: no other one is in sync. If it is lost permanently, {losing}."
    return "Start it. Its log has the reason for its end."


def in_sync_and_down(replicas: Sequence[object]) -> str:
    """Returns the step before a promotion that would lose messages."""
    names = listed([str(replica) for replica in replicas])
    if len(replicas) == 1:
        return f"Replica {names} is in sync and down. Start it first: its folder has the acknowledged messages."
    return f"Replicas {names} are in sync and down. Start them first: their folders have the acknowledged messages."


def _of_slave(broker: BrokerReplicas, one: ReplicaDescription) -> Iterator[Finding]:
    if one.role != "slave":
        return
    what = f"broker {broker.broker_id}, replica {one.replica}"
    if one.address is None:
        yield Finding(what, "warning", "down; it was in sync when it was last seen", "Start it.")
    elif one.problem:
        yield Finding(what, "warning", f"no link to its master: {one.problem}")
    elif not one.in_sync and not one.stage and _has_master(broker):
        yield Finding(what, "warning", "no link to its master", "If it has not just started, its log has the reason.")


def _has_master(broker: BrokerReplicas) -> bool:
    return any(one.role == "master" and one.address is not None and not one.problem for one in broker.replicas)
