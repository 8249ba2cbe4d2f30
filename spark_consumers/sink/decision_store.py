"""Decisions in ZooKeeper: each is created once, in one transaction with the sink's own node, and never overwritten.

A request without an answer may still be carried out. So the next caller reads again, and always writes the sink's node.
A request that still runs then finds another version, and fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from metamq.spark_consumers.sink.decisions import JOB, Decision, NotOurs, SinkState, check_batch
from metamq.zk.errors import BadVersion, NodeExists, NoNode, NotEmpty
from metamq.zk.nodes import ANY_VERSION, Create, Delete, SetData

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

KEPT = 8
"""The number of older decisions of a query that stay. They are needed if a broker has lost the commit of a branch, by a
promotion with an accepted loss, and still has the branch prepared."""


class SinkOwner(NamedTuple):
    """The process that decides about a sink."""

    identity: str
    """The id of the query, from its checkpoint; for a batch write its name."""
    run: str = ""
    """The id of the query's run; empty if Spark does not give it."""


class Sink(NamedTuple):
    """The content of a sink's node."""

    state: SinkState
    version: int
    changed_ms: int
    """Time of the last change, by ZooKeeper's clock."""


class DecisionStore:
    """The store. For one loop. All methods raise ConnectError; a repeated call finds the effect of the first."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._paths = session.paths

    async def begin(self, sink: str, identity: str) -> Sink:
        """Creates the node of a new sink. Raises CorruptData."""
        await self._session.ensure(self._paths.sinks())
        while True:
            with contextlib.suppress(NodeExists):
                await self._session.create(self._paths.sink(sink), SinkState(identity, 0).to_json())
            known = await self.sink(sink)
            if known is not None:
                return known

    async def sink(self, sink: str) -> Sink | None:
        """Returns the sink's node. Raises CorruptData."""
        node = await self._session.get_or_none(self._paths.sink(sink))
        return None if node is None else Sink(SinkState.from_json(node.data), node.version, node.mtime_ms)

    async def decision(self, sink: str, batch_id: int) -> Decision | None:
        """Returns the decision about one batch. Raises CorruptData."""
        node = await self._session.get_or_none(self._paths.sink_decision(sink, batch_id))
        return None if node is None else Decision.from_json(node.data)

    async def claim(self, sink: str, owner: SinkOwner) -> None:
        """Claims the sink for a run, before the run writes: from now on former runs decide nothing. Raises NotOurs."""
        while True:
            known = await self._checked(sink, owner.identity)
            joined = known.state.joined(sink, owner.run)
            if joined == known.state or await self._written(sink, joined, known.version):
                return

    async def touch(self, job: str) -> None:
        """Reports that a batch write is alive. Raises NotOurs if it was given up."""
        known = await self._checked(job, job)
        await self._written(job, known.state, known.version)  # False: another task has reported it

    async def decide(self, sink: str, owner: SinkOwner, batch_id: int, decision: Decision) -> Decision:
        """Returns the decision about a batch: this one, unless there is one. Raises NotOurs; MessageTooLarge."""
        while True:
            known = await self._checked(sink, owner.identity)
            standing = await self.decision(sink, batch_id)
            check_batch(sink, known.state, owner.run, batch_id, decision, standing)
            if standing is not None:
                return standing
            raised = replace(known.state, floor=batch_id).to_json()
            create = Create(self._paths.sink_decision(sink, batch_id), decision.to_json())
            try:
                await self._session.multi([SetData(self._paths.sink(sink), raised, known.version), create])
            except (BadVersion, NodeExists, NoNode):
                continue
            return decision

    async def fence(self, sink: str, owner: SinkOwner, batch_id: int, attempts: Iterable[str]) -> Decision | None:
        """Returns the decision about a batch. None: there is none, and no later request can decide for these attempts.
        This includes a commit that still runs.

        Raises NotOurs.
        """
        aborted = min(attempts, default="")
        while True:
            known = await self._checked(sink, owner.identity)
            standing = await self.decision(sink, batch_id)
            fenced = replace(known.state, aborted=aborted or known.state.aborted)
            if standing is not None or await self._written(sink, fenced, known.version):
                return standing

    async def _written(self, sink: str, state: SinkState, version: int) -> bool:
        """Returns False if the node has changed since it was read."""
        try:
            await self._session.set(self._paths.sink(sink), state.to_json(), version)
        except (BadVersion, NoNode):
            return False
        return True

    async def _checked(self, sink: str, identity: str) -> Sink:
        known = await self.sink(sink)
        if known is None and not sink.startswith(JOB):
            known = await self.begin(sink, identity)
        if known is None:
            raise NotOurs(
                f"the batch write {sink} was given up: none of its tasks has begun for two days",
                hint="Check if its rows are there, and write it again if they are not.",
            )
        if known.state.identity != identity:
            raise NotOurs(
                f"the sink {sink!r} belongs to the query {known.state.identity}, and this one is {identity}: was its "
                "checkpoint deleted? It would write its messages a second time",
                hint="Continue with the old checkpoint, or give another sinkId.",
            )
        return known

    async def trim(self, sink: str, newest: int) -> None:
        """Removes the decisions of a query except the newest, and some before."""
        names = await self._session.children_or_none(self._paths.sink(sink)) or []
        numbers = sorted(int(name) for name in names if name.isdecimal() and int(name) < newest)
        for number in numbers[:-KEPT]:
            with contextlib.suppress(NoNode):
                await self._session.delete(self._paths.sink_decision(sink, number), ANY_VERSION)

    async def jobs(self) -> list[str]:
        """Returns the batch writes that have nodes now."""
        await self._session.sync()
        names = await self._session.children_or_none(self._paths.sinks()) or []
        return [name for name in names if name.startswith(JOB)]

    async def mark_finished(self, job: str, known: Sink) -> None:
        """Records that the batch write is finished. Its node stays: its driver may still ask for the decision."""
        await self._written(job, replace(known.state, finished=True), known.version)

    async def give_up(self, job: str, known: Sink) -> bool:
        """Removes an undecided batch write, which then cannot be decided; False if it has changed."""
        try:
            await self._session.delete(self._paths.sink(job), known.version)
        except (BadVersion, NotEmpty):
            return False
        except NoNode:
            pass
        return True

    async def remove_job(self, job: str, *, decided: bool) -> None:
        """Removes a batch write that is over: its decision is carried out, or it cannot be decided any more."""
        operations = [Delete(self._paths.sink_decision(job, 0), ANY_VERSION)] if decided else []
        with contextlib.suppress(NoNode, NotEmpty):
            await self._session.multi([*operations, Delete(self._paths.sink(job), ANY_VERSION)])
