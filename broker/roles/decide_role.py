"""Decides the role of a replica from the state in ZooKeeper. Pure: no I/O.

    state node                            this replica is                          role
    older than a state that a replica     any                                      WAITING for an operator: ZooKeeper
    knows                                                                          was taken back
    none yet                              replica 0                                MASTER of epoch 1
    none yet                              any other replica, or a learner          WAITING for a first master
    names this replica as master          in the in-sync set, or alone             MASTER of the next epoch
    names this replica as master          a new incarnation, and other replicas    WAITING for the promotion of one of
                                          are in sync                              them, which may have more messages
    names this replica as master          back with an empty or an older data      WAITING for an operator
                                          folder, and no replica is in sync
    names another replica as master       any                                      SLAVE of that replica

A replica has a role for one epoch. A master that finds a higher epoch in the state node is deposed at once, even if the
node names it as the master.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from metamq.errors import Fenced
from metamq.zk.cluster.brokers import StateAt, known, next_term
from metamq.zk.cluster.epochs import KnownState, taken_back

if TYPE_CHECKING:
    from metamq.zk.cluster.registrations import Registration


class RoleKind(enum.Enum):
    """The name of a role, as statistics and metrics report it."""

    STARTING = "starting"
    MASTER = "master"
    SLAVE = "slave"
    WAITING = "waiting"


class RoleDecision(NamedTuple):
    """A role, and its reason in words."""

    kind: RoleKind
    reason: str


def decide_role(
    stored: StateAt | None,
    registration: Registration,
    claims: Sequence[KnownState] = (),
    *,
    learner: bool,
    current: RoleKind,
    epoch: int,
) -> RoleDecision:
    """Decides the next role of a replica that has the role `current`, and was the master in `epoch` last.

    `claims` are the states that other replicas know.
    """
    if reason := taken_back(known(stored), [registration.claim, *claims]):
        return RoleDecision(RoleKind.WAITING, reason)
    if stored is None:
        if registration.replica == 0 and not learner:
            return RoleDecision(RoleKind.MASTER, "the broker id has no master yet")
        return RoleDecision(RoleKind.WAITING, "the broker id has had no master yet: start replica 0")
    state = stored[0]
    if state.master != registration.replica:
        return RoleDecision(RoleKind.SLAVE, f"replica {state.master} is the master, since epoch {state.epoch}")
    if current is RoleKind.MASTER and state.epoch == epoch:
        return RoleDecision(RoleKind.MASTER, f"it is the master, since epoch {epoch}")
    try:
        next_term(stored, registration, claims)
    except Fenced as error:
        return RoleDecision(RoleKind.WAITING, error.reason)
    return RoleDecision(RoleKind.MASTER, f"it was the master, in epoch {state.epoch}")
