"""What is amiss with a broker id's replicas, and the command that mends it: for `metamq ha status` and the doctor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from metamq.cli.show.output import listed
from metamq.client.admin.admin_model import BrokerReplicas, ReplicaDescription


class Amiss(NamedTuple):
    """One thing, and what to do about it. A "problem" keeps clients from being served."""

    status: Literal["warning", "problem"]
    what: str
    detail: str
    hint: str


def amiss(broker: BrokerReplicas) -> list[Amiss]:
    """All that is to be done about a broker id, its master first."""
    refused = [
        Amiss("warning", f"broker {broker.broker_id}", each, "") for one in broker.replicas for each in one.refused
    ]
    return [*_of_master(broker), *(found for one in broker.replicas for found in _of_slave(broker, one)), *refused]


def damage(broker: BrokerReplicas) -> list[Amiss]:
    """Damaged logs at the master, and what makes them sound again."""
    found = []
    for one in broker.replicas:
        if one.damaged_count:
            what = f"broker {broker.broker_id}"
            more = one.damaged_count - len(one.damaged)
            told = "; ".join((*one.damaged, *([f"and {more:,} more"] if more > 0 else [])))
            logs = f"{one.damaged_count:,} log{'s' * (one.damaged_count != 1)}"
            detail = f"replica {one.replica}, its master, has damage in {logs}: {told}"
            found.append(Amiss("problem", what, detail, _sound_again(broker, one)))
    return found


def _sound_again(broker: BrokerReplicas, damaged: ReplicaDescription) -> str:
    others = [one for one in broker.replicas if one is not damaged]
    ready = [one.replica for one in others if one.holds_all]
    down = [one.replica for one in others if one.in_sync and one.address is None]
    promote = f"metamq ha promote --broker {broker.broker_id} --slave"
    if not ready and down:
        return f"{in_sync_and_down(down)} Then promote it: `{promote} {down[0]}`."
    if ready:
        return (
            f"`{promote} {ready[0]}` makes replica {ready[0]} the master, which is in sync; replica {damaged.replica} "
            "then sets the damaged logs aside and copies them again."
        )
    return (
        "No other replica is in sync. `metamq log verify` on the data folder shows every damaged place. Restore the "
        "partition's folder from a copy, and take it with `metamq log accept`; or seek to an offset behind the damage; "
        "or stop the broker and give the whole log up, with `metamq log forget`."
    )


def _of_master(broker: BrokerReplicas) -> Iterator[Amiss]:
    what = f"broker {broker.broker_id}"
    master = next(one for one in broker.replicas if one.role != "slave")
    if broker.taken_back:
        yield Amiss("problem", what, broker.taken_back, _next_master(broker))
    elif master.role == "waiting":
        yield Amiss("problem", what, f"replica {master.replica} {master.problem}", _next_master(broker))
    elif master.address is None:
        seen = f"not registered, last seen in epoch {broker.epoch}: replica {master.replica}, its master, is down"
        yield Amiss("problem", what, seen, _next_master(broker))
    elif master.problem:
        detail = f"replica {master.replica}, its master, is registered and does not answer: {master.problem}"
        slow = "It may be slow only: look again with `metamq ha status`. If it stays silent:"
        yield Amiss("problem", what, detail, f"{slow} {_next_master(broker)}")


def _next_master(broker: BrokerReplicas) -> str:
    """What gives a broker id a master again, the way without loss first."""
    master = next(one for one in broker.replicas if one.role != "slave")
    is_waiting = master.role == "waiting" or bool(broker.taken_back)
    promote = f"metamq ha promote --broker {broker.broker_id} --slave"
    slaves = [one for one in broker.replicas if one is not master and not one.learner]
    ready = [one.replica for one in slaves if one.in_sync and one.address is not None and not one.problem]
    if ready:
        again = "" if is_waiting else f", unless replica {master.replica} comes back soon"
        return f"`{promote} {ready[0]}` makes replica {ready[0]}, which is in sync, the master{again}."
    down = [one.replica for one in slaves if one.in_sync and one.address is None]
    if down and is_waiting:
        return in_sync_and_down(down)
    if down:
        return f"Start replica {master.replica}; or replica {down[0]}, which is in sync, too, and promote that."
    running = [one.replica for one in slaves if one.address is not None]
    if is_waiting:
        losing = f"`{promote} {min([master.replica, *running])} --accept-loss`"
        return f"No replica is in sync. Start all of them; {losing} then says what the others have more, and asks."
    if running:
        losing = f"`{promote} {running[0]} --accept-loss` says what would be lost, and asks"
        return f"Start replica {master.replica}: no other one is in sync. If it is gone for good, {losing}."
    return "Start it, or see its log for why it has ended."


def in_sync_and_down(replicas: Sequence[object]) -> str:
    """What to do before a promotion that would lose something."""
    names = listed([str(replica) for replica in replicas])
    if len(replicas) == 1:
        return f"Replica {names} is in sync and down: start it first, its folder holds what was acknowledged."
    return f"Replicas {names} are in sync and down: start them first, their folders hold what was acknowledged."


def _of_slave(broker: BrokerReplicas, one: ReplicaDescription) -> Iterator[Amiss]:
    if one.role != "slave":
        return
    what = f"broker {broker.broker_id}, replica {one.replica}"
    if one.address is None:
        yield Amiss("warning", what, "in sync when it was last seen, and down", "Start it.")
    elif one.problem:
        yield Amiss("warning", what, f"no link to its master: {one.problem}", "")
    elif not one.in_sync and not one.stage and _has_master(broker):
        yield Amiss("warning", what, "no link to its master", "Its log says why, unless it has only just begun.")


def _has_master(broker: BrokerReplicas) -> bool:
    return any(one.role == "master" and one.address is not None and not one.problem for one in broker.replicas)
