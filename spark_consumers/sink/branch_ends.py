"""Ends a sink's branches: winners must be committed; the others are rolled back if that is possible.

A broker's address is read after a round trip to ZooKeeper: a former master might not know a branch that its successor
has prepared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from metamq.client.net.branches import Branch, TxClient, new_session
from metamq.errors import BranchNotKnown, ConnectError, HeuristicOutcome, MetamqError, NotAuthorized, OutcomeUnknown
from metamq.spark_consumers.sink.decisions import BranchName, Ends
from metamq.wire.xa import Verb, XACode, Xid

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient

log = logging.getLogger("metamq.spark")

T = TypeVar("T", tuple[Xid, int], tuple[str, int, str])
"""A tuple with the id of a broker in second place."""

AT_ONCE = 32
"""Branches of one broker that are ended at the same time: it writes their records together."""
LIST_S = 3.0
"""Seconds to wait for a broker's list of branches."""
ROLL_BACK_S = 5.0
SILENT_S = 60.0
"""Seconds for which a silent broker is not asked again. Otherwise each batch waits for it."""


class CommitLost(MetamqError):
    """Decided messages may be lost by a promotion with an accepted loss, or are lost by an operator's command."""

    hint = "Compare the topics with the source. To continue, give the option failOnDataLoss=false."


class BranchEnds:
    """Ends branches. For one loop. A process has one object, with its connections."""

    def __init__(self, cluster: ClusterClient) -> None:
        self.cluster = cluster
        self._silent_until_s: dict[int, float] = {}

    async def commit(
        self,
        sink: str,
        batch_id: int,
        winners: Mapping[str, Mapping[int, str]],
        *,
        answer_s: float,
        accepts_loss: bool = False,
    ) -> None:
        """Returns once all of them are committed. Raises CommitLost, unless that is accepted; OutcomeUnknown or
        ConnectError if a broker has not answered for `answer_s`: then call again."""
        client = TxClient(self.cluster)
        lost: Counter[str] = Counter()
        away: dict[int, MetamqError] = {}
        """Brokers that did not answer, with the error: a request for another branch there would time out as well."""

        async def commit(one: tuple[str, int, str]) -> None:
            attempt, broker_id, history = one
            if broker_id in away:
                raise away[broker_id]
            branch = Branch(BranchName(sink, batch_id, attempt).at(broker_id), broker_id, new_session())
            try:
                await client.ask(branch, [Verb.COMMIT], timeout_s=answer_s)
            except BranchNotKnown as error:  # only a commit ends a prepared branch: it is committed
                if not error.finished and branch.history != history:
                    lost[f"unknown to broker {broker_id}, where a promotion has accepted a loss since"] += 1
            except HeuristicOutcome as error:
                if error.code == XACode.HEURCOM:
                    await client.ask(branch, [Verb.FORGET], timeout_s=answer_s)
                else:
                    lost[f"not committed by an operator at broker {broker_id}"] += 1
            except (OutcomeUnknown, ConnectError) as error:
                away[broker_id] = error
                raise

        await self.cluster.look_again()
        await _each([(attempt, *one) for attempt, at in winners.items() for one in at.items()], commit)
        if lost:
            what = "; ".join(f"{count} of its branches are {why}" for why, count in sorted(lost.items()))
            error = CommitLost(f"batch {batch_id} of the sink {sink} is decided, but may not be complete: {what}")
            if not accepts_loss:
                raise error
            log.error("%s", error.problem)

    async def prepared(self) -> list[tuple[Xid, int]]:
        """Returns (Xid, broker id) of the prepared branches, from the brokers that answer."""
        client = TxClient(self.cluster)
        now_s = time.monotonic()

        async def of(broker_id: int) -> list[tuple[Xid, int]]:
            try:
                async with asyncio.timeout(LIST_S):
                    branches = await client.branches(broker_id)
            except (TimeoutError, MetamqError) as error:
                if isinstance(error, TimeoutError):
                    self._silent_until_s[broker_id] = now_s + SILENT_S
                log.warning("broker %d does not list its remaining branches: %r", broker_id, error)
                return []
            return [(one.xid, broker_id) for one in branches if one.state == "prepared"]

        queried = [one for one in self.cluster.brokers if self._silent_until_s.get(one, 0.0) <= now_s]
        return [one for found in await asyncio.gather(*map(of, queried)) for one in found]

    async def end(self, found: Ends) -> None:
        """Ends the branches that can be ended now."""
        await self._try(found.commit, Verb.COMMIT)
        await self._try(found.rollback, Verb.ROLLBACK)

    async def roll_back(self, branches: Iterable[tuple[Xid, int]]) -> None:
        """Rolls back the branches that can be rolled back now. They have no decision, and will have none."""
        await self._try(list(branches), Verb.ROLLBACK)

    async def _try(self, branches: Collection[tuple[Xid, int]], verb: Verb) -> None:
        client = TxClient(self.cluster)
        failed: dict[int, MetamqError] = {}

        async def end(one: tuple[Xid, int]) -> None:
            xid, broker_id = one
            if broker_id in failed:
                return
            try:
                await client.ask(Branch(xid, broker_id, new_session()), [verb], timeout_s=ROLL_BACK_S)
            except BranchNotKnown:
                pass  # another process has ended it
            except NotAuthorized as error:
                log.warning("branch %s stays open at broker %d: %s", xid, broker_id, error)
            except MetamqError as error:
                failed[broker_id] = error

        await _each([one for one in branches if one[1] in self.cluster.brokers], end)
        for broker_id, error in failed.items():
            log.warning("broker %d: branches stay open there: %s", broker_id, error)


async def _each(things: Collection[T], end: Callable[[T], Awaitable[None]]) -> None:
    """Calls `end` for all items concurrently, with a limit per broker: an unreachable broker delays no other broker.
    Raises the first error, after all have ended."""
    at_once: defaultdict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

    async def one(thing: T) -> None:
        async with at_once[thing[1]]:
            await end(thing)

    results: Iterable[BaseException | None] = await asyncio.gather(*map(one, things), return_exceptions=True)
    for error in results:
        if error is not None:
            raise error
