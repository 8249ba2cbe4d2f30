"""The agreement on a group's plan: this member's view of the inputs, the stored plan, and a new one if they differ.

Each member compares the stored plan with what it knows: the members' names and the topics. If they differ, the members
take turns, so that a change costs a large group as many reads as it has members, and not the square of that. The first
turn is that of the first member in the plan. If there is no new plan after TURN_S, it is the next one's turn. Turns
only save reads: two members that make a plan at the same time do no harm, since one of them is refused.

A member in its turn reads all inputs, after the plan that it replaces. So they are at least as new as those of the
plan's author, and a plan is never replaced by an older one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from metamq.client.group import rebalance_decisions
from metamq.client.subscriptions import selected
from metamq.errors import ConfigError, CorruptData, MetamqError, closed_client
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.documents import warn_once
from metamq.zk.errors import ConnectionLost
from metamq.zk.groups.members import Member, member_names, read_members
from metamq.zk.groups.plans import Plan, PlanInputs, PlanTooLarge, StoredPlan, read_plan, store_plan
from metamq.zk.names import is_pattern

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

log = logging.getLogger("metamq.client")

T = TypeVar("T")

TURN_S = 0.5
"""Seconds that one member has for a new plan before the next one makes it."""


class Watched(Generic[T]):
    """A value in ZooKeeper: the result of `read`, read again after its watch has fired or `forget` was called.

    `read` receives the watch to set, or None if the previous watch is still set. `changed` is called when the watch
    fires. Not for concurrent use: one task at a time.
    """

    __slots__ = ("_armed", "_changed", "_fresh", "_read", "_value")

    def __init__(self, read: Callable[[Callable[[], None] | None], Awaitable[T]], changed: Callable[[], None]) -> None:
        self._read = read
        self._changed = changed
        self._armed = False
        self._fresh = False
        self._value: T

    async def get(self) -> T:
        """Returns the value. Raises the errors of `read`."""
        if not self._fresh:
            # One watch at a time: ZooKeeper would call each of them. The watch may fire before the answer is here.
            was_armed = self._armed
            self._fresh = self._armed = True
            try:
                self._value = await self._read(None if was_armed else self._fired)
            except BaseException:
                self._fresh, self._armed = False, was_armed and self._armed
                raise
        return self._value

    def forget(self) -> None:
        """Makes the next `get` read the value again, even if it has not changed."""
        self._fresh = False

    def _fired(self) -> None:
        self._fresh = self._armed = False
        self._changed()


class CannotStay(Exception):
    """Carries the error that ends a membership out of a round. `error` is for the user."""

    def __init__(self, error: MetamqError) -> None:
        super().__init__(error)
        self.error = error


class Agreement(NamedTuple):
    """The plan to follow now; None if there is none. `is_final`: it is for the present members and topics."""

    plan: Plan | None
    is_final: bool


class GroupPlan:
    """A group's plan from the view of one member. `changed` is called when the result of `agree` may have changed."""

    def __init__(
        self,
        session: Session,
        group: str,
        consumer_id: str,
        topics: Sequence[str],
        strategy: str,
        changed: Callable[[], None],
    ) -> None:
        self._session = session
        self._group = group
        self._id = consumer_id
        self._topics = tuple(sorted(set(topics)))
        self._strategy = strategy
        self._changed = changed
        self._topic_store = TopicStore(session)
        self._stored = Watched(lambda watch: read_plan(session, group, watch), changed)
        self._names = Watched(lambda watch: member_names(session, group, watch), changed)
        self._members = Watched(lambda watch: read_members(session, group, watch), changed)
        self._existing = Watched(self._topic_store.names, changed)
        self._configs: dict[str, Watched[TopicConfig | None]] = {}
        self._subscribed: frozenset[str] = frozenset()
        """The names and patterns whose configurations were read last."""
        self._final: tuple[object, ...] = ()
        """The view in which the stored plan was found to be final, after all inputs were read."""
        self._behind: tuple[object, float] | None = None
        """The plan's version and the members for which a new plan is awaited, and since when (time.monotonic)."""
        self._turn: asyncio.TimerHandle | None = None
        self.present: Mapping[str, Member] = {}
        """The members when this one last read them."""

    async def agree(self, joined_in: int) -> Agreement:
        """Returns the plan for the current inputs. If the stored plan has other inputs, makes and stores a new one in
        this member's turn. Before its turn it returns the stored plan, and calls `changed` later.

        `joined_in` is the session generation in which this member has joined. If a plan for all inputs is too large for
        ZooKeeper, the next one leaves out the additions: live members keep their partitions, and get those of members
        that are gone. Raises PlanTooLarge if this member is new or even that plan is too large; CannotStay if this
        member was evicted or the group uses another strategy; ConfigError if the plan is of a newer metamq;
        ConnectionLost.
        """
        while True:
            stored = await self._stored.get()
            names = await self._names.get()
            if self._id not in names:
                await self._check_evicted(joined_in)
                continue
            if stored is not None:
                stored.check_format(self._group)
            before = stored.plan if stored is not None else None
            if stored is not None and before is not None and await self._fits(before, stored.version, names):
                self._behind = None
                self._call_later(0)
                return Agreement(before, is_final=True)
            if not self._is_my_turn(stored, names):
                return Agreement(before, is_final=False)
            if (plan := await self._replaced(stored)) is not None:
                return Agreement(plan, is_final=True)

    async def _fits(self, plan: Plan, version: int, names: frozenset[str]) -> bool:
        """Returns True if the plan is for these members and the present topics, as far as this member knows."""
        members = plan.inputs.members
        if plan.strategy != self._strategy or members.get(self._id, self._topics) != self._topics:
            return False
        if self._final[:2] == (version, names) and self._final[2:] == await self._read_configs(self._subscribed):
            return True
        if members.keys() != names:
            return False
        configs = await self._read_configs({one for subscribed in members.values() for one in subscribed})
        return rebalance_decisions.topic_inputs(*configs, plan) == plan.inputs.topics

    def _is_my_turn(self, stored: StoredPlan | None, names: frozenset[str]) -> bool:
        """Returns True if this member makes the next plan now. Otherwise calls `changed` when its turn comes."""
        view = stored.version if stored is not None else None, names
        now = time.monotonic()
        if self._behind is None or self._behind[0] != view:
            self._behind = view, now
        plan = stored.plan if stored is not None else None
        turn = rebalance_decisions.turn(self._id, self._topics, self._strategy, names, plan)
        wait_s = self._behind[1] + turn * TURN_S - now
        self._call_later(wait_s)
        return wait_s <= 0

    def _call_later(self, wait_s: float) -> None:
        """Calls `changed` after this time, instead of the time of before; not at all without a time to wait."""
        if self._turn is not None:
            self._turn.cancel()
        self._turn = asyncio.get_running_loop().call_later(wait_s, self._changed) if wait_s > 0 else None

    async def _replaced(self, stored: StoredPlan | None) -> Plan | None:
        """Reads all inputs. Returns the stored plan if it is for them; otherwise stores a new one, and returns None."""
        self.forget()
        names = await self._names.get()
        present = await self._members.get()
        if self._id not in present:
            return None
        self._check_strategy(present, stored)
        before = stored.plan if stored is not None else None
        configs = await self._read_configs({one for member in present.values() for one in member.topics})
        topics = rebalance_decisions.topic_inputs(*configs, before)
        inputs = rebalance_decisions.plan_inputs(self._strategy, present, topics)
        self.present = present
        if before is None or (before.inputs, before.strategy) != (inputs, self._strategy):
            try:
                await self._store(inputs, stored)
                return None
            except PlanTooLarge as error:
                smaller = rebalance_decisions.without_growth(before.inputs, inputs) if before is not None else None
                if before is None or smaller is None or self._id not in smaller.members:
                    raise
                warn_once(f"group {self._group} continues without the additions to it: {error}")
            if (before.inputs, before.strategy) != (smaller, self._strategy):
                await self._store(smaller, stored)
                return None
        assert stored is not None
        self._final = (stored.version, names, *configs)
        return before

    async def _store(self, inputs: PlanInputs, stored: StoredPlan | None) -> None:
        """Stores the plan for these inputs, unless another member was faster. Raises as `store_plan`."""
        plan = rebalance_decisions.next_plan(stored.plan if stored is not None else None, self._strategy, inputs)
        if stored is not None:  # an unreadable plan had a generation, too
            plan = replace(plan, generation=max(plan.generation, stored.version + 2))
        if await store_plan(self._session, self._group, plan, stored):
            log.info("group %s: %s stored plan %d", self._group, self._id, plan.generation)
        self._stored.forget()

    async def check(self) -> None:
        """Raises CannotStay if the group uses another strategy, and ConfigError for a plan of a newer metamq."""
        stored = await self._stored.get()
        if stored is not None:
            stored.check_format(self._group)
        if stored is None or stored.plan is None or stored.plan.strategy != self._strategy:
            self._check_strategy(await self._members.get(), stored)

    async def read_present(self) -> Mapping[str, Member]:
        """Returns the members, by consumer id. Raises ConnectionLost."""
        self.present = await self._members.get()
        return self.present

    def forget(self) -> None:
        """Makes the next `agree` read members and topics again."""
        self._names.forget()
        self._members.forget()
        self._existing.forget()
        for config in self._configs.values():
            config.forget()

    async def _check_evicted(self, joined_in: int) -> None:
        """Raises CannotStay, unless the members were read before we joined, or in an expired session."""
        there = await self._session.exists(self._session.paths.member(self._group, self._id))
        if self._session.generation != joined_in:
            raise ConnectionLost(self._session.servers, "the session expired", outcome="not_done")
        if there is None:
            raise CannotStay(closed_client("consumer", f"{self._id!r} was evicted from group {self._group!r}"))
        self._names.forget()

    def _check_strategy(self, present: Mapping[str, Member], stored: StoredPlan | None) -> None:
        strategy = rebalance_decisions.group_strategy(stored.plan if stored else None, present)
        if strategy != self._strategy:
            raise CannotStay(
                ConfigError(
                    f"group {self._group!r} uses strategy {strategy!r}, consumer {self._id!r} asks for "
                    f"{self._strategy!r}",
                    hint="All members of a group use one strategy; to change it, stop them all first.",
                )
            )

    async def _read_configs(self, subscribed: Collection[str]) -> tuple[list[TopicConfig | None], list[str]]:
        """Returns the configurations, and the topics whose configuration is unreadable: the plan keeps these as they
        are."""
        self._subscribed = frozenset(subscribed)
        existing = await self._existing.get() if any(map(is_pattern, subscribed)) else ()
        topics = selected(subscribed, existing)
        self._configs = {topic: self._configs.get(topic) or self._watch_config(topic) for topic in sorted(topics)}
        found = await asyncio.gather(*(config.get() for config in self._configs.values()), return_exceptions=True)
        configs: list[TopicConfig | None] = []
        unreadable = []
        for topic, config in zip(self._configs, found, strict=True):
            if isinstance(config, CorruptData | ConfigError):
                warn_once(f"group {self._group}: topic {topic} stays unchanged in the plan: {config}")
                unreadable.append(topic)
            elif isinstance(config, BaseException):
                raise config
            else:
                configs.append(config)
        return configs, unreadable

    def _watch_config(self, topic: str) -> Watched[TopicConfig | None]:
        return Watched(lambda watch: self._topic_store.get_or_none(topic, watch), self._changed)
