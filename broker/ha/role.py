"""Which role a replica plays, decided from what stands in ZooKeeper. Pure: no I/O.

    state node                            this replica is                          role
    older than what a replica knows       any                                      WAITING for a person: ZooKeeper was
                                                                                   taken back
    none yet                              replica 0                                MASTER, of epoch 1
    none yet                              any other, or a learner                  WAITING for a first master
    names this replica as master          in the in-sync set, or alone             MASTER, of the next epoch
    names this replica as master          back as a new incarnation while others   WAITING for one of them to be
                                          are in sync                              promoted: it may lack what they hold
    names this replica as master          back with an empty folder, or an older   WAITING for a person
                                          copy of it, while nobody is in sync
    names another replica as master       any                                      SLAVE of it

A role is played for an epoch. A master that finds a higher epoch in the state node is deposed at once, whoever it is.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from metamq.errors import Fenced
from metamq.zk.cluster.brokers import Registration, StateAt, known, next_term
from metamq.zk.cluster.epochs import KnownState, taken_back


class Role(enum.Enum):
    """What a replica does at present."""

    STARTING = "starting"
    MASTER = "master"
    SLAVE = "slave"
    WAITING = "waiting"


class Cast(NamedTuple):
    """A role, and why, for people."""

    role: Role
    reason: str


def cast(
    stored: StateAt | None,
    registration: Registration,
    claims: Sequence[KnownState] = (),
    *,
    learner: bool,
    playing: Role,
    epoch: int,
) -> Cast:
    """The role that a replica is to play, now that it plays `playing` under `epoch`. `claims`: what others know."""
    if reason := taken_back(known(stored), [registration.claim, *claims]):
        return Cast(Role.WAITING, reason)
    if stored is None:
        if registration.replica == 0 and not learner:
            return Cast(Role.MASTER, "the broker id has no master yet")
        return Cast(Role.WAITING, "the broker id has had no master yet: start replica 0")
    state = stored[0]
    if state.master != registration.replica:
        return Cast(Role.SLAVE, f"replica {state.master} is the master, since epoch {state.epoch}")
    if playing is Role.MASTER and state.epoch == epoch:
        return Cast(Role.MASTER, f"it is, since epoch {epoch}")
    try:
        next_term(stored, registration, claims)
    except Fenced as error:
        return Cast(Role.WAITING, error.reason)
    return Cast(Role.MASTER, f"it was, in epoch {state.epoch}")
