"""The slaves of a broker id, the in-sync set, and the promotion of a slave to master.

All changes go through the one `state` node. If a master removes a slave from the in-sync set while that slave takes
over, both write the same node by compare-and-set on the same version, so only one succeeds. With epoch and set in two
nodes, both would succeed: the master would continue alone, and the slave would begin without the messages that the
master acknowledged meanwhile.

A lost answer decides nothing. A process that lost an answer reads the state first. If it repeats a change with the old
version, the change can succeed at most once, and the state then shows whose change it is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from metamq.errors import Fenced
from metamq.zk.cluster.brokers import (
    BrokerState,
    Mastership,
    StateAt,
    Watcher,
    become_master,
    known,
    read_state,
    state_json,
)
from metamq.zk.cluster.epochs import KnownState, highest_epoch, next_epoch, taken_back, with_reign
from metamq.zk.cluster.registrations import (
    BrokerAddress,
    Member,
    Registration,
    address_of,
    is_ours,
    replica_json,
    until_gone,
    without_slave_node,
)
from metamq.zk.documents import broker_numbers, skip_unreadable
from metamq.zk.errors import BadVersion, ConnectionLost, NodeExists, NoNode
from metamq.zk.nodes import Create, Delete, Op, SetData

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

_SLAVE = re.compile(r"slave([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The change was made; `held` is the new state of the epoch."""

    held: Mastership


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was done: the state had already changed to this one."""

    state: BrokerState
    version: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer came: the change was made, was not made, or may still be made. Read the state first."""

    reason: str


async def register_slave(session: Session, registration: Registration) -> None:
    """Registers as a slave, and no longer as the master. Call it again after every lost session.

    If the node already exists and is correct, it stays: a new node would wake all watchers, including this process.

    Waits for the session of another process with the same number unless that one has certainly ended. Raises
    ConfigError if that process is still there after its session time-out; ConnectionLost: then call it again.
    """
    paths = session.paths
    path, master_path = paths.slave(registration.broker_id, registration.replica), paths.master(registration.broker_id)
    while True:
        there = await session.get_or_none(path)
        if there is not None and not is_ours(there, session, registration, "slave"):
            await until_gone(session, registration, path, there, "slave")
            continue
        master = await session.get_or_none(master_path)
        operations: list[Op] = []
        if master is not None and is_ours(master, session, registration):
            operations.append(Delete(master_path, master.version))
        elif master is not None and address_of(registration.broker_id, master).replica == registration.replica:
            await until_gone(session, registration, master_path, master, "master")
            continue
        data = replica_json(session, registration)
        if there is None or there.ephemeral_owner != session.session_id or there.data != data:
            if there is not None:
                operations.append(Delete(path, there.version))
            operations.append(Create(path, data, ephemeral=True))
        if not operations:
            return
        await session.ensure(paths.had_slaves(registration.broker_id))  # before a client can ask to promote this one
        try:
            await session.multi(operations)
        except (BadVersion, NodeExists, NoNode):
            continue
        return


async def had_slaves(session: Session, broker_id: int) -> bool:
    """True if a slave was ever registered: a slave that is down may come back and be promoted."""
    return await session.exists(session.paths.had_slaves(broker_id)) is not None


async def slaves_of(session: Session, broker_id: int, watch: Watcher | None = None) -> list[BrokerAddress]:
    """The registered slaves of a broker id, by number. `watch` is called once if any of them changes."""
    folder = session.paths.broker(broker_id)
    names = await session.children_or_none(folder, watch) or []
    numbers = sorted(int(match[1]) for match in map(_SLAVE.fullmatch, names) if match)
    nodes = await asyncio.gather(*(session.get_or_none(session.paths.slave(broker_id, number)) for number in numbers))
    found: list[BrokerAddress] = []
    for node in nodes:
        with skip_unreadable(f"a slave of broker {broker_id} is skipped"):
            if node is not None:
                found.append(address_of(broker_id, node, "slave"))
    return found


async def live_slaves(session: Session, watch: Watcher | None = None) -> dict[int, dict[int, BrokerAddress]]:
    """The registered slaves of every broker id, by broker id and replica. `watch` is as in `slaves_of`."""
    names = await session.children_or_none(session.paths.broker_ids(), watch) or []  # none before the first broker
    broker_ids = broker_numbers(names)
    found = await asyncio.gather(*(slaves_of(session, broker_id, watch) for broker_id in broker_ids))
    return {
        broker_id: {slave.replica: slave for slave in slaves}
        for broker_id, slaves in zip(broker_ids, found, strict=True)
    }


async def change_insync(session: Session, held: Mastership, insync: Iterable[Member]) -> Confirmed | Refused | Unknown:
    """Makes `insync` the in-sync set if the master's state is still the current one. Sends one request, without retry.

    Raises Fenced if the state no longer exists.
    """
    state = replace(held.state, insync=tuple(sorted(insync)))
    try:
        node = await session.set(session.paths.broker_state(held.broker_id), state_json(state), held.version)
    except (BadVersion, NoNode):
        return await _refused(session, held.broker_id)
    except ConnectionLost as error:
        return Unknown(str(error))
    return Confirmed(Mastership(held.broker_id, state, node.version))


async def _refused(session: Session, broker_id: int) -> Refused | Unknown:
    try:
        stored = await read_state(session, broker_id)
    except ConnectionLost as error:
        return Unknown(str(error))
    if stored is None:
        raise Fenced(f"broker {broker_id}", "its state in ZooKeeper was deleted")
    return Refused(*stored)


def promoted(
    stored: StateAt,
    registration: Registration,
    claims: Iterable[KnownState] = (),
    *,
    accept_loss: bool = False,
    handed_over: bool = False,
) -> BrokerState:
    """The state under which this replica takes over from the master of `state`.

    Members in sync stay in sync, since each has every acknowledged message. The former master does not stay, since the
    new master would wait for it, unless it has handed over and follows. Raises Fenced if this replica is not in sync,
    or if ZooKeeper was taken back so that the in-sync set is unknown. With `accept_loss` no other member stays instead,
    and the generation says that messages were given up. `claims`: the knowledge of other replicas.
    """
    me, claims = registration.member, [registration.claim, *claims]
    state, is_taken_back = stored[0], taken_back(known(stored), claims)
    epoch = next_epoch(highest_epoch(state.epoch, claims), registration.replica)
    if me in state.insync and not is_taken_back:
        kept = [m for m in state.insync if m[0] not in (state.master, me[0]) or (handed_over and m[0] != me[0])]
        reigns = with_reign(state.reigns, epoch, me[0])
        return BrokerState(epoch, me[0], tuple(sorted([*kept, me])), state.generation, reigns)
    if is_taken_back and not accept_loss:
        error = Fenced(str(registration), is_taken_back)
        error.hint = "Start all replicas, the last master first, and promote that one, with --accept-loss."
        raise error
    if not accept_loss:
        others = ", ".join(str(replica) for replica, _ in state.insync)
        error = Fenced(str(registration), f"it is not in sync, as replica {others} is since epoch {state.epoch}")
        error.hint = f"Promote replica {others}, or accept the loss of the messages that this one lacks."
        raise error
    generation = max([state.generation, *(claim.generation for claim in claims)]) + 1
    return BrokerState(epoch, me[0], (me,), generation, with_reign((), epoch, me[0]))  # the loss is accepted


async def take_over(
    session: Session,
    registration: Registration,
    state: BrokerState,
    version: int,
    claims: Iterable[KnownState] = (),
    *,
    accept_loss: bool = False,
    handed_over: bool = False,
) -> Mastership | Refused:
    """Becomes the master in place of another, if the state is still the one on which this decision was made.

    One transaction sets the state of `promoted`, deletes the former master's node, even if that master runs, and
    creates ours. Returns Refused if the state has changed: then decide again. Raises Fenced (see `promoted`);
    ConnectionLost if the outcome is unknown: a second call finds it out, and takes over if the first one did not.
    """
    paths = session.paths
    state_path, master_path = paths.broker_state(registration.broker_id), paths.master(registration.broker_id)
    claims = list(claims)
    wanted = promoted((state, version), registration, claims, accept_loss=accept_loss, handed_over=handed_over)
    while True:
        operations: list[Op] = [SetData(state_path, state_json(wanted), version)]
        there = await session.get_or_none(master_path)
        if there is not None:
            operations.append(Delete(master_path, there.version))
        operations += await without_slave_node(session, registration)
        operations.append(Create(master_path, replica_json(session, registration), ephemeral=True))
        try:
            await session.multi(operations)
        except (BadVersion, NodeExists, NoNode):
            found = await _refused(session, registration.broker_id)
            if isinstance(found, Unknown):
                raise ConnectionLost(session.servers, found.reason) from None
            if found.version == version:  # one of the other nodes had changed
                continue
            if found == Refused(wanted, version + 1):
                held = Mastership(registration.broker_id, wanted, version + 1)
                return await _taken_over(session, registration, held, claims)
            return found
        return Mastership(registration.broker_id, wanted, version + 1)


async def _taken_over(
    session: Session, registration: Registration, held: Mastership, claims: Iterable[KnownState]
) -> Mastership:
    """Handles a take-over whose answer was lost: with the old session the master's node may be gone."""
    there = await session.get_or_none(session.paths.master(registration.broker_id))
    if there is not None and there.ephemeral_owner == session.session_id:
        return held
    return await become_master(session, registration, claims)
