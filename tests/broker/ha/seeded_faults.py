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
from metamq.broker.roles import decide_role, keeper
from metamq.broker.roles.decide_role import RoleDecision, RoleKind
from metamq.broker.roles.decide_role import decide_role as decide_properly
from metamq.testing import BrokerProcess
from metamq.zk.cluster import brokers, replicas
from metamq.zk.cluster.replicas import Confirmed, change_insync
from metamq.zk.nodes import ANY_VERSION

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


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        acknowledged_early,
        seen_early,
        cut_at_the_wrong_place,
        stale_epoch_accepted,
        zookeeper_of_yesterday_believed,
    )
}


class FaultyBroker(BrokerProcess):
    """A broker process that has the fault that METAMQ_SEEDED_FAULT names, or none."""

    command = (sys.executable, __file__)


if __name__ == "__main__":
    if fault := os.environ.pop(SETTING, ""):
        FAULTS[fault]()
    sys.exit(broker.main())
