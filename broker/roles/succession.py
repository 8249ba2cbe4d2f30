"""Decides if this slave takes over from a master that is gone. Pure: no I/O, no clock.

Theory of operation
-------------------
There is no controller. Every in-sync slave sees the same nodes in ZooKeeper, and decides by the same function. The
function decides only *when the slave tries*: the take-over itself is the compare-and-set of a promotion without loss
(metamq.zk.cluster.replicas). So two slaves that decide at once, or by stale reads, do no harm: one of them succeeds,
and the other one finds a newer state.

A master is gone if one of two things is known:

- Its node is gone. The node lives as long as the master's session, and the master's lease ends before that.
- No process listens at its address, and its link has ended. The kernel of the master's machine says so (it refuses the
  connection), and a master listens until its process ends. So after a kill -9 no slave waits for the end of the
  session. An address that does not answer proves nothing: the master may be frozen, or the network cut. Then only the
  session counts. A refusal counts only in the epoch of the last link: it says nothing about a later master, nor about
  the same replica after a restart.

In the first case each candidate publishes the size of its logs in its node. All in-sync slaves have every message that
was acknowledged on `sync` topics. On `async` topics the one with the most bytes gives up least, so it comes first; then
the preferred replica; then the lowest number. The others skip a candidate that publishes nothing for a moment. A
candidate that does not take over loses its turn to the next one.

    the situation                                              the decision
    failover is manual, or paused                              STAY
    the master is there, and this replica has been the         TAKE_OVER, by a hand-over
    preferred one, and in sync, for `return_ms`
    the master is there                                        STAY
    this replica is not in the in-sync set                     STAY
    this replica has an obstacle                               WAIT if the master is gone, else STAY
    several automatic switches happened a short time ago       WAIT, longer with each of them
    no other candidate is registered                           TAKE_OVER
    it has not published its logs' size                        PUBLISH
    another candidate may still publish                        WAIT
    another candidate comes first, and has its turn            WAIT
    else                                                       TAKE_OVER
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from metamq.zk.cluster.brokers import BrokerState
    from metamq.zk.cluster.failover import Failover
    from metamq.zk.cluster.registrations import Member

PUBLISH_MS = 300
"""Milliseconds in which candidates publish the size of their logs."""
TURN_MS = 1000
"""Milliseconds that a candidate has for its take-over before the next one tries."""
OBSTACLE_MS = 1000
"""Milliseconds between two checks of an obstacle: no event reports its end."""
FREE_SWITCHES = 3
"""Automatic switches within FLAPPING_MS that need no pause."""
FLAPPING_MS = 600_000
PAUSE_FIRST_MS = 2_000

SESSION_ENDED = "the session of the master ended"
NO_PROCESS = "no process listens at the master's address"
PREFERRED = "it is the preferred replica"


class Step(enum.Enum):
    """The next step of a slave."""

    STAY = "stay"
    WAIT = "wait"
    PUBLISH = "publish"
    TAKE_OVER = "take over"


class Candidate(NamedTuple):
    """A registered slave of the in-sync set. `log_bytes`: the size of its logs; None: it has not published it."""

    replica: int
    log_bytes: int | None


class Situation(NamedTuple):
    """Everything that the decision depends on."""

    failover: Failover
    state: BrokerState
    me: Member
    obstacle: str
    """The reason why this replica could not serve as the master; empty: none."""
    gone: str
    """The reason to believe that the master is gone; empty: it is there."""
    gone_ms: int
    """Milliseconds since this replica has seen that."""
    candidates: Sequence[Candidate]
    """Every registered slave of the in-sync set."""
    in_sync_ms: int = 0
    """Milliseconds since this replica has been in sync with a master that is there."""
    switches_ago_ms: Sequence[int] = ()
    """The age of each automatic switch that is listed."""
    pause_max_ms: int = 120_000
    """The longest pause against flapping."""
    return_ms: int = 120_000
    """The preferred replica becomes the master again after it has been in sync for this time."""


class Noticed(NamedTuple):
    """The observation on which a slave takes over by itself."""

    since: float
    """The loop's time at which it noticed the cause."""
    is_gone: bool
    """True if this master is gone. Otherwise it must hand over."""


class StepDecision(NamedTuple):
    """A step, its reason in words, and the milliseconds after which to decide again, unless something changes."""

    step: Step
    reason: str
    again_ms: int | None = None


def why_gone(epoch: int, has_node: bool, link_epoch: int, is_refused: bool) -> str:
    """Returns the reason to believe that the master of `epoch` is gone; empty: it is there.

    `link_epoch`: the epoch of the last link to a master. `is_refused`: its address has refused connections since then.
    """
    if not has_node:
        return SESSION_ENDED
    return NO_PROCESS if is_refused and link_epoch == epoch else ""


def decide(now: Situation) -> StepDecision:
    """Decides the next step of this replica."""
    if reason := off_reason(now.failover):
        return StepDecision(Step.STAY, reason)
    if now.me not in now.state.insync:
        return StepDecision(Step.STAY, "it is not in the in-sync set, and messages would be lost")
    if now.obstacle:
        again_ms = OBSTACLE_MS if now.gone else None
        return StepDecision(Step.WAIT if now.gone else Step.STAY, now.obstacle, again_ms)
    if not now.gone and now.me[0] != now.failover.preferred:
        return StepDecision(Step.STAY, "the master is there")
    if not now.gone and now.in_sync_ms < now.return_ms:
        return StepDecision(Step.WAIT, "the preferred replica returns later", now.return_ms - now.in_sync_ms)
    if (left_ms := pause_ms(now.switches_ago_ms, now.pause_max_ms)) > 0:
        count = len(_recent(now.switches_ago_ms))
        return StepDecision(Step.WAIT, f"a pause against flapping, after {count} automatic switches", left_ms)
    return _in_turn(now) if now.gone else StepDecision(Step.TAKE_OVER, PREFERRED)


def off_reason(failover: Failover) -> str:
    """The reason why no slave takes over by itself; empty: one may."""
    if failover.mode == "manual":
        return "failover is manual: an operator promotes"
    return "failover is paused by an operator" if failover.paused else ""


def _in_turn(now: Situation) -> StepDecision:
    me = now.me[0]
    if all(one.replica == me for one in now.candidates):
        return StepDecision(Step.TAKE_OVER, now.gone)
    ranked = ranking(now.candidates, now.failover.preferred)
    if me not in ranked:
        return StepDecision(Step.PUBLISH, "it publishes the size of its logs")
    silent = [one.replica for one in now.candidates if one.log_bytes is None]
    if silent and now.gone_ms < PUBLISH_MS:
        return StepDecision(Step.WAIT, f"replica {silent[0]} may have more", PUBLISH_MS - now.gone_ms)
    turn_ms = ranked.index(me) * TURN_MS
    if ranked[0] != me and now.gone_ms < PUBLISH_MS + turn_ms:
        return StepDecision(Step.WAIT, f"replica {ranked[0]} comes first", PUBLISH_MS + turn_ms - now.gone_ms)
    return StepDecision(Step.TAKE_OVER, now.gone)


def ranking(candidates: Sequence[Candidate], preferred: int | None) -> list[int]:
    """The candidates that have published, the best one first."""
    published = [(one.log_bytes, one.replica) for one in candidates if one.log_bytes is not None]
    ranked = sorted(published, key=lambda one: (-one[0], one[1] != preferred, one[1]))
    return [replica for _, replica in ranked]


def pause_ms(switches_ago_ms: Sequence[int], pause_max_ms: int) -> int:
    """The milliseconds until the next automatic switch. The pause doubles with each switch of the last ten minutes."""
    recent = _recent(switches_ago_ms)
    excess = len(recent) - FREE_SWITCHES
    if excess < 0:
        return 0
    return max(min(PAUSE_FIRST_MS << excess, pause_max_ms) - min(recent), 0)


def _recent(switches_ago_ms: Sequence[int]) -> list[int]:
    return [ago_ms for ago_ms in switches_ago_ms if ago_ms < FLAPPING_MS]


def taken_over_in(former: BrokerState, state: BrokerState) -> int:
    """The epoch in which the master of `state` took over from that of `former`; 0 if another one did in between."""
    reigns = [reign for reign in state.reigns if reign[0] > former.epoch]
    if not reigns:  # it replaced itself
        return state.epoch if former.master == state.master else 0
    epoch, master = reigns[-1]
    return epoch if len(reigns) == 1 and master == state.master else 0
