"""Decisions in ZooKeeper: created once, by one transaction with the sink's own node, never overwritten.

A request whose answer is lost may still be carried out. So whoever goes on looks again, and writes the sink's node in
any case: what was under way then finds another version, and fails.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from metamq.errors import ConfigError
from metamq.spark_consumers.decisions import JOB, Decision, SinkState
from metamq.zk.errors import BadVersion, NodeExists, NoNode, NotEmpty
from metamq.zk.nodes import Create, Delete, SetData
from metamq.zk.session import ANY_VERSION, Session


class NotOurs(ConfigError):
    """The sink is another query's, or given up: this one decides about nothing there."""


class Sink(NamedTuple):
    """A sink's node as it was read."""

    state: SinkState
    version: int


class DecisionStore:
    """For one loop. All methods raise ConnectError; what they did then is looked at when they are called again."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._paths = session.paths

    async def begin(self, sink: str, identity: str) -> None:
        """Makes the node of a sink that is new."""
        await self._session.ensure(self._paths.sinks())
        with contextlib.suppress(NodeExists):
            await self._session.create(self._paths.sink(sink), SinkState(identity, 0).to_json())

    async def sink(self, sink: str) -> Sink | None:
        """The sink's node. Raises CorruptData."""
        node = await self._session.get_or_none(self._paths.sink(sink))
        return None if node is None else Sink(SinkState.from_json(node.data), node.version)

    async def decision(self, sink: str, batch_id: int) -> Decision | None:
        """Of one batch. Raises CorruptData."""
        node = await self._session.get_or_none(self._paths.sink_decision(sink, batch_id))
        return None if node is None else Decision.from_json(node.data)

    async def decide(self, sink: str, identity: str, batch_id: int, decision: Decision) -> Decision | None:
        """The decision about a batch: this one, unless there is one already. None: it is over, and was removed.

        Raises NotOurs; MessageTooLarge.
        """
        while True:
            known = await self._checked(sink, identity)
            standing = await self.decision(sink, batch_id)
            if standing is not None:
                return standing
            if batch_id < known.state.floor:
                return None
            raised = SinkState(identity, batch_id).to_json()
            create = Create(self._paths.sink_decision(sink, batch_id), decision.to_json())
            try:
                await self._session.multi([SetData(self._paths.sink(sink), raised, known.version), create])
            except (BadVersion, NodeExists, NoNode):
                continue
            return decision

    async def fence(self, sink: str, identity: str, batch_id: int) -> Decision | None:
        """The decision about a batch; None: there is none, nor does one come from what was under way.

        Raises NotOurs.
        """
        while True:
            known = await self._checked(sink, identity)
            standing = await self.decision(sink, batch_id)
            if standing is not None:
                return standing
            try:
                await self._session.set(self._paths.sink(sink), known.state.to_json(), known.version)
            except (BadVersion, NoNode):
                continue
            return None

    async def _checked(self, sink: str, identity: str) -> Sink:
        known = await self.sink(sink)
        if known is None and not sink.startswith(JOB):
            await self.begin(sink, identity)
            known = await self.sink(sink)
        if known is None:
            raise NotOurs(f"the write {sink} was given up", hint="Write it again.")
        if known.state.identity != identity:
            raise NotOurs(
                f"the sink {sink!r} is of the query {known.state.identity}, and this one is {identity}: was its "
                "checkpoint deleted? Its batches are counted from 0 again, and would be taken for those of before",
                hint="Go on with the old checkpoint, or give another sinkId.",
            )
        return known

    async def decisions(self, sink: str) -> dict[int, Decision]:
        """All that are there."""
        names = await self._session.children_or_none(self._paths.sink(sink)) or []
        found = {int(name): await self.decision(sink, int(name)) for name in names if name.isdecimal()}
        return {number: decision for number, decision in found.items() if decision is not None}

    async def remove(self, sink: str, batch_id: int) -> None:
        """Of a batch of which no branch is left, and that is not the newest."""
        with contextlib.suppress(NoNode):
            await self._session.delete(self._paths.sink_decision(sink, batch_id), ANY_VERSION)

    async def jobs(self) -> list[str]:
        """The batch writes that are under way, or were when their driver died."""
        names = await self._session.children_or_none(self._paths.sinks()) or []
        return [name for name in names if name.startswith(JOB)]

    async def remove_job(self, sink: str, *, decided: bool) -> bool:
        """Of a batch write that is over; False when it is decided about, and that was not known."""
        operations = [Delete(self._paths.sink_decision(sink, 0), ANY_VERSION)] if decided else []
        try:
            await self._session.multi([*operations, Delete(self._paths.sink(sink), ANY_VERSION)])
        except NoNode:
            pass
        except NotEmpty:
            return False
        return True
