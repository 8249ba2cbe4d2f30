"""A broker with a seeded fault, for the chaos tests' checker to find: `python seeded_faults.py --with-parent`.

METAMQ_SEEDED_FAULT names it. The product knows nothing of this: its parts are replaced here, before they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from metamq.broker import __main__ as broker
from metamq.broker.data.partition import Partition
from metamq.broker.ha import handshake
from metamq.broker.ha.group_transfer import GroupTransferService
from metamq.broker.ha.handshake import Side, SyncDecision, SyncVerdict, decide
from metamq.broker.ha.service import HAService
from metamq.broker.roles import decide_role, keeper, successor
from metamq.broker.roles.decide_role import RoleDecision, RoleKind
from metamq.broker.roles.decide_role import decide_role as decide_properly
from metamq.broker.roles.role import SlaveRole
from metamq.broker.roles.succession import SESSION_ENDED, Situation, StepDecision
from metamq.testing import BrokerProcess
from metamq.zk.cluster import brokers, replicas
from metamq.zk.cluster.brokers import BrokerState
from metamq.zk.cluster.registrations import Member
from metamq.zk.cluster.replicas import Confirmed, change_insync
from metamq.zk.errors import ConnectionLost
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.session.session import Session

SETTING = "METAMQ_SEEDED_FAULT"


def acknowledged_early() -> None:
    """The master answers once it has a message itself, on `sync` topics too."""
    proper = GroupTransferService.when_acknowledged

    def early(self: Any, partition: Any, config: Any, end_offset: int, done: Any) -> None:
        proper(self, partition, replace(config, replication="async"), end_offset, done)

    GroupTransferService.when_acknowledged = early  # type: ignore[method-assign]


def seen_early() -> None:
    """Readers are shown what the slaves do not have yet."""

    def bound(self: Partition, offset: int, position: int) -> None:
        self.unbound()

    Partition.bound = bound  # type: ignore[method-assign]


def cut_at_the_wrong_place() -> None:
    """A former master keeps what only it has, if the new log has a batch that ends in the same place. And it serves its
    log all the same when a slave in sync has something else."""

    def wrong(master: Side | None, slave: Side) -> SyncVerdict:
        verdict = decide(master, slave)
        if master is not None and verdict.decision is SyncDecision.FROM and slave.end.position <= master.end.position:
            return verdict._replace(offset=slave.end.offset, position=slave.end.position)
        return verdict

    handshake.decide = wrong
    HAService._lacks = lambda *_: None  # type: ignore[method-assign]


def stale_epoch_accepted() -> None:
    """A former master's word counts: in ZooKeeper, and to itself, whatever epoch stands there."""
    if os.environ["METAMQ_BROKER_REPLICA"] != "0":
        return

    def stays(
        stored: Any, registration: Any, claims: Any, *, learner: bool, current: RoleKind, epoch: int
    ) -> RoleDecision:
        if current is RoleKind.MASTER:
            return RoleDecision(RoleKind.MASTER, "it does not look")
        return decide_properly(stored, registration, claims, learner=learner, current=current, epoch=epoch)

    async def change(self: Any, change: Any) -> int:
        held = replace(self._mastership, version=ANY_VERSION)
        outcome = await change_insync(self._session, held, change.members)
        assert isinstance(outcome, Confirmed)
        self._mastership = outcome.held
        self._registered = (-1, -1)  # and so it does for the node that clients look for
        self.look_again()
        return outcome.held.version

    def state_read(self: HAService, state: Any, version: int) -> None:
        self.membership.read(state.insync, version)

    keeper.decide_role = stays  # type: ignore[attr-defined]
    keeper.RoleKeeper._change = change  # type: ignore[method-assign]
    HAService.state_read = state_read  # type: ignore[method-assign]


def zookeeper_of_yesterday_believed() -> None:
    """What ZooKeeper says counts, though replicas know of later terms."""
    for module in (keeper, decide_role, brokers, replicas):
        module.taken_back = lambda *_: ""  # type: ignore[attr-defined]


def elects_outside_the_in_sync_set() -> None:
    """A slave takes over although it is not in the in-sync set, and says that nothing is lost."""
    read_properly, decide_step_properly = keeper.RoleKeeper._read_all, successor.decide

    async def read_all(self: keeper.RoleKeeper) -> Any:
        stored, claims = await read_properly(self)
        if stored is not None and stored[0].master != self._registration().replica:
            stored = with_member(stored[0], self._registration().member), stored[1]
        return stored, claims

    def decide_step(now: Situation) -> StepDecision:
        return decide_step_properly(now._replace(state=with_member(now.state, now.me)))

    keeper.RoleKeeper._read_all = read_all  # type: ignore[method-assign]
    successor.decide = decide_step


def with_member(state: BrokerState, member: Member) -> BrokerState:
    return state if member in state.insync else replace(state, insync=(*state.insync, member))


def takes_over_too_early() -> None:
    """A slave takes over as soon as its link has ended: the master's lease is not over."""
    step_properly = successor.Successor.step
    is_linked = True

    def why_gone(_epoch: int, _has_node: bool, _link_epoch: int, _is_refused: bool) -> str:
        return "" if is_linked else SESSION_ENDED

    async def step(self: successor.Successor) -> float | None:
        nonlocal is_linked
        role = self._status.role
        is_linked = not isinstance(role, SlaveRole) or role.link.linked
        await step_properly(self)
        return 0.2

    successor.why_gone = why_gone
    successor.Successor.step = step  # type: ignore[method-assign]


def answer_of_a_take_over_lost() -> None:
    """The first take-over succeeds, and its answer is lost."""
    proper, done = keeper.take_over, list[Any]()

    async def take_over(session: Session, *args: Any, **settings: Any) -> Any:
        done.append(await proper(session, *args, **settings))
        if len(done) == 1:
            raise ConnectionLost(session.servers, "the answer is lost")
        return done[-1]

    keeper.take_over = take_over  # type: ignore[attr-defined]


HARMLESS = {"answer_of_a_take_over_lost": answer_of_a_take_over_lost}
"""What may happen to a broker without a fault of its own."""
FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        acknowledged_early,
        seen_early,
        cut_at_the_wrong_place,
        stale_epoch_accepted,
        zookeeper_of_yesterday_believed,
        elects_outside_the_in_sync_set,
        takes_over_too_early,
    )
}


class FaultyBroker(BrokerProcess):
    """A broker process that has the fault that METAMQ_SEEDED_FAULT names, or none."""

    command = (sys.executable, __file__)


if __name__ == "__main__":
    if fault := os.environ.pop(SETTING, ""):
        {**FAULTS, **HARMLESS}[fault]()
    sys.exit(broker.main())
