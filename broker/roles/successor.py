"""Successor: this replica's part in automatic failover.

As a slave it notices that the master is gone, publishes the size of its logs in its node, and takes over in its turn.
metamq.broker.roles.succession decides; RoleKeeper.promote, which operators use as well, carries it out. As a master
that is going to stop, it asks a slave to take over first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from metamq.broker.roles.role import MasterRole, SlaveRole
from metamq.broker.roles.succession import (
    Candidate,
    Noticed,
    Situation,
    Step,
    StepDecision,
    decide,
    off_reason,
    taken_over_in,
    why_gone,
)
from metamq.client.net.transport import BrokerConnection
from metamq.errors import ConnectError, CorruptData, MetamqError, StorageError
from metamq.wire.commands import Command, Promote
from metamq.zk.cluster.brokers import BrokerState, master_of, read_state
from metamq.zk.cluster.failover import (
    Failover,
    Mode,
    Switch,
    begin_failover,
    change_failover,
    check_mode,
    read_failover,
    with_loss,
    with_switch,
)
from metamq.zk.cluster.replicas import slaves_of
from metamq.zk.session.watches import OneWatch

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.broker.data.topics import Topics
    from metamq.broker.ha.client import GivenUp
    from metamq.broker.roles.role import ReplicaStatus
    from metamq.zk.cluster.registrations import BrokerAddress, Registration
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.broker")

RETRY_S = 0.5
RECORD_ATTEMPTS = 20
UNPUBLISHED = 0, -1
CLOCK_SKEW_S_MAX = 60.0
"""A switch that is listed further in the future than this does not count for the pause."""
CAUSE_CHARS_MAX, GIVEN_UP_CHARS_MAX = 200, 500
HAND_OVER_AGAIN_S = 60.0
"""Seconds until the preferred replica asks again for a hand-over that has failed: each attempt stops the writes."""
RESIGN_S = 5.0
"""Seconds that a master that stops spends on its successor."""
ASK_S = 2.0
"""Seconds that a slave has for an answer, before the master asks the next one."""


class Attempt(NamedTuple):
    """A take-over that this replica attempts. If its answer is lost, it may have succeeded."""

    state: BrokerState
    """The state that it replaces."""
    asked: Promote
    noticed: Noticed | None
    """None: an operator, or a master that stops, asked for it."""
    since: float
    """The loop's time at which the cause was noticed."""
    has_lost: bool
    """True if this replica was not in sync."""


class Successor:
    """The automatic failover of one replica. Used by the broker's loop only. RoleKeeper calls step() after settle()."""

    def __init__(
        self,
        config: BrokerConfig,
        session: Session,
        topics: Topics,
        status: ReplicaStatus,
        registration: Callable[[], Registration],
        promote: Callable[[Promote, Noticed], Awaitable[object]],
        changed: Callable[[], None],
    ) -> None:
        """`promote` is RoleKeeper's. `changed` lets it settle the role again, and so register `published`."""
        self._session = session
        self._topics = topics
        self._status = status
        self._registration = registration
        self._promote = promote
        self._changed = changed
        self._config = config
        self._watch = OneWatch(changed)
        self._failover = Failover()
        self._gone_since: float | None = None
        self._gone_epoch = 0
        """The epoch of the master that is gone since then."""
        self._in_sync_since: float | None = None
        self._seen: dict[int, float] | None = None
        """The epochs of automatic switches, and the loop's time of each; None: not read yet."""
        self.published = UNPUBLISHED
        """The epoch whose master is gone, and the size of the logs here in bytes."""
        self.attempt: Attempt | None = None
        """The last attempt of a take-over, until an epoch has begun here. It may have failed."""
        self._recording: set[asyncio.Task[None]] = set()
        self.decision: StepDecision | None = None
        """The last decision, for `ha status`; None at a master."""
        self.given_up_messages = 0
        """The messages that this process has reported to gave_up()."""
        self.promotions = {"itself": 0, "asked": 0}
        """Counts: this process became the master by itself, or on request of an operator or of a master that stops."""

    @property
    def is_on(self) -> bool:
        """True if failover is automatic, and not paused, as far as this replica knows."""
        return self._failover.is_on

    @property
    def says(self) -> str:
        """The last decision, in words. Any thread."""
        decision = self.decision
        return off_reason(self._failover) if decision is None else decision.reason

    @property
    def waits(self) -> str:
        """The reason why this slave does not take over yet, although the master is gone; empty: it does not wait. Any
        thread."""
        decision = self.decision
        is_waiting = decision is not None and decision.step is Step.WAIT and self._gone_since is not None
        return decision.reason if decision is not None and is_waiting else ""

    def statistics(self) -> dict[str, Any]:
        """Returns figures for `ha status` and metrics. Any thread."""
        return {
            "failover": self.says,
            "failover_waits": self.waits,
            "failover_is_on": self.is_on,
            "promotions": self.promotions,
            "given_up_messages": self.given_up_messages,
        }

    async def step(self) -> float | None:
        """Takes the next step. Returns the seconds after which to call it again, even if nothing changes; or None.

        Raises ConnectError, CorruptData.
        """
        role, now = self._status.role, asyncio.get_running_loop().time()
        registration = self._registration()
        broker_id = registration.broker_id
        failover = self._failover = await self._watch.leave(partial(read_failover, self._session, broker_id))
        self._see(failover, now)
        if not isinstance(role, SlaveRole) or not failover.is_on:
            self._gone_since = self._in_sync_since = self.decision = None
            return await self._leave_damage(role) if isinstance(role, MasterRole) else None
        stored = await read_state(self._session, broker_id)
        if stored is None:
            return None
        epoch = stored[0].epoch
        # Read after the state. If it is of a later master, the decision ends in a refused compare-and-set.
        has_node = await master_of(self._session, broker_id) is not None
        gone = why_gone(epoch, has_node, role.link.epoch, role.link.is_refused)
        if not gone or epoch != self._gone_epoch:
            self._gone_since, self.published = None, UNPUBLISHED
        if gone and self._gone_since is None:
            self._gone_since, self._gone_epoch = now, epoch
        is_in_sync = not gone and registration.member in stored[0].insync
        self._in_sync_since = (self._in_sync_since or now) if is_in_sync else None
        before = self.decision
        self.decision = decide(await self._situation(failover, stored[0], registration, gone, now))
        if gone and (before is None or before.reason != self.decision.reason):
            log.info("%s: %s: %s: %s", registration, gone, self.decision.step.value, self.decision.reason)
        return await self._carry_out(self.decision, stored[0])

    async def _situation(
        self, failover: Failover, state: BrokerState, registration: Registration, gone: str, now: float
    ) -> Situation:
        slaves = await slaves_of(self._session, registration.broker_id) if gone else []
        ago_ms = [round((now - at) * 1000) for at in (self._seen or {}).values()]
        gone_ms = 0 if self._gone_since is None else round((now - self._gone_since) * 1000)
        in_sync_ms = 0 if self._in_sync_since is None else round((now - self._in_sync_since) * 1000)
        candidates = [_candidate(slave, state) for slave in slaves if _member(slave) in state.insync]
        return Situation(
            failover, state, registration.member, self._obstacle(), gone, gone_ms, candidates, in_sync_ms, ago_ms,
            self._config.failover_pause_max_ms, self._config.failover_return_ms,
        )  # fmt: skip

    def _obstacle(self) -> str:
        if self._topics.damage():
            return "a log is damaged here"
        refused = self._status.writes_refused
        return "" if refused is None else refused.problem

    async def _carry_out(self, decision: StepDecision, state: BrokerState) -> float | None:
        if decision.step is Step.PUBLISH:
            self.published = state.epoch, sum(partition.log.end_position for partition in self._topics.partitions())
            self._changed()
        if decision.step is not Step.TAKE_OVER:
            return None if decision.again_ms is None else decision.again_ms / 1000
        try:
            since = self._gone_since or asyncio.get_running_loop().time()
            is_gone = self._gone_since is not None
            await self._promote(Promote(False, decision.reason, epoch=state.epoch), Noticed(since, is_gone))
        except (ConnectError, CorruptData, StorageError):  # RoleKeeper.run() handles them
            raise
        except MetamqError as error:
            log.warning("%s does not take over: %s", self._registration(), error)
            self._in_sync_since = asyncio.get_running_loop().time() + HAND_OVER_AGAIN_S
            return RETRY_S
        return None

    def _see(self, failover: Failover, now: float) -> None:
        """Notes the time of new automatic switches. The list has the times of those before this process began."""
        seen = {}
        for one in failover.switches:
            ago_s = 0.0 if self._seen is not None else time.time() - one.at_ms / 1000
            if one.is_automatic and ago_s > -CLOCK_SKEW_S_MAX:
                seen[one.epoch] = (self._seen or {}).get(one.epoch, now - max(ago_s, 0.0))
        self._seen = seen

    # -- a new master -------------------------------------------------------------------------------------------------

    def begun(self, state: BrokerState) -> None:
        """Notes that this replica has begun an epoch as the master. Lists the take-over that led to it, and gives a
        broker id without a mode of failover the configured one; both in the background."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None and (epoch := taken_over_in(attempt.state, state)):
            self._taken_over(attempt, epoch)
        if self._config.failover:
            self._in_background(self._begin_mode(check_mode(self._config.failover)))

    async def _begin_mode(self, mode: Mode) -> None:
        with contextlib.suppress(ConnectError):  # the next epoch tries again
            await begin_failover(self._session, self._registration().broker_id, mode)

    def _taken_over(self, attempt: Attempt, epoch: int) -> None:
        registration, former = self._registration(), attempt.state.master
        cause = (attempt.asked.cause or "an operator's command")[:CAUSE_CHARS_MAX]
        took_ms = round((asyncio.get_running_loop().time() - attempt.since) * 1000)
        is_automatic = attempt.noticed is not None
        self.promotions["itself" if is_automatic else "asked"] += 1
        lost = "an operator accepted a loss" if attempt.has_lost else ""
        at_ms = round(time.time() * 1000)
        switch = Switch(epoch, cause, former, registration.replica, at_ms, took_ms, is_automatic, lost)
        what = f"{registration} is the master instead of replica {former}, after {took_ms} ms: {cause}"
        log.log(logging.WARNING if is_automatic else logging.INFO, "%s", what)
        self._in_background(self._change_list(partial(with_switch, switch=switch), f"the switch to epoch {epoch}"))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)

    async def _change_list(self, change: Callable[[Failover], Failover], what: str) -> None:
        missing, reason = Failover(check_mode(self._config.failover or "manual")), ""
        for _ in range(RECORD_ATTEMPTS):
            try:
                await change_failover(self._session, self._registration().broker_id, change, missing)
                return
            except (ConnectError, CorruptData, LookupError) as error:
                reason = str(error)
                await asyncio.sleep(RETRY_S)
        log.warning("%s is not in the history: %s", what, reason)

    async def close(self) -> None:
        """Ends the background work."""
        tasks = list(self._recording)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- a former master ----------------------------------------------------------------------------------------------

    def gave_up(self, given_up: GivenUp) -> None:
        """Reports the messages that this former master may have acknowledged, and gave up: in the log, in a metric, and
        in the background in the list of switches."""
        count = sum(given_up.messages.values())
        self.given_up_messages += count
        topics = ", ".join(f"{topic}: {number:,}" for topic, number in sorted(given_up.messages.items()))
        lost = f"{count:,} messages of async topics ({topics})"
        registration = self._registration()
        log.warning("%s gave up messages that it may have acknowledged as the master: %s", registration, lost)
        change = partial(with_loss, was=registration.replica, epoch=given_up.epoch, lost=lost[:GIVEN_UP_CHARS_MAX])
        self._in_background(self._change_list(change, f"the loss of {lost}"))

    # -- a master that leaves its place --------------------------------------------------------------------------------

    async def resign(self) -> None:
        """Asks an in-sync slave to take over from this master, which stops. Returns when one has, or none will."""
        role, registration = self._status.role, self._registration()
        if not isinstance(role, MasterRole) or role.service.alone or not self._failover.is_on:
            return
        asked = Promote(False, f"replica {registration.replica} stops", master_stops=True, epoch=role.epoch)
        try:
            async with asyncio.timeout(RESIGN_S):
                await self._ask_slaves(role, asked)
        except (TimeoutError, MetamqError) as error:  # the broker stops in any case
            log.warning("%s stops without a successor: %s", registration, error or "no slave answered in time")

    async def _leave_damage(self, role: MasterRole) -> float | None:
        """Asks an in-sync slave to take over if a log is damaged here: only a slave repairs its logs.

        Returns the seconds after which to ask again.
        """
        if not self._failover.is_on or role.service.alone or not self._topics.damage():
            return None
        asked = Promote(False, f"a log is damaged at replica {self._registration().replica}", epoch=role.epoch)
        return None if await self._ask_slaves(role, asked) else HAND_OVER_AGAIN_S

    async def _ask_slaves(self, role: MasterRole, asked: Promote) -> bool:
        """Asks the in-sync slaves one after the other, the preferred one first. Returns True if one has taken over."""
        slaves = await slaves_of(self._session, self._registration().broker_id)
        ready = [slave for slave in slaves if _member(slave) in role.service.membership.insync]
        for slave in sorted(ready, key=lambda one: (one.replica != self._failover.preferred, one.replica)):
            if await self._asked(slave, asked):
                return True
        return False

    async def _asked(self, slave: BrokerAddress, asked: Promote) -> bool:
        try:
            security = self._session.security.brokers
            connection = await BrokerConnection.open(slave.host, slave.port, security=security, timeout_s=ASK_S)
            try:
                await connection.request(Command.PROMOTE, asked, timeout_s=ASK_S)
            finally:
                await connection.close()
        except MetamqError as error:
            log.warning("replica %d does not take over: %s", slave.replica, error)
            return False
        return True


def _member(slave: BrokerAddress) -> tuple[int, int]:
    return slave.replica, slave.incarnation


def _candidate(slave: BrokerAddress, state: BrokerState) -> Candidate:
    return Candidate(slave.replica, slave.log_bytes if slave.log_epoch == state.epoch else None)
