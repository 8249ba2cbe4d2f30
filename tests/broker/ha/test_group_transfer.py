"""When a PUT is taken and acknowledged: by the in-sync set, `min_insync` before and after, and the lease; by value."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from metamq.broker.data.partition import Partition
from metamq.broker.ha.group_transfer import GroupTransferService
from metamq.errors import Fenced, MetamqError, NotEnoughReplicas
from tests.broker.ha.test_service import TOPIC, Master, a_master

SYNC = replace(TOPIC, replication="sync")


@dataclass
class Term:
    """The master's term, as it is at the moment."""

    insync_count: int = 2
    alone: bool = False
    lease: bool = True


class Case(NamedTuple):
    """What becomes of the term between the append and the moment at which every in-sync replica holds the batch."""

    name: str
    replication: str
    min_insync: int
    then: Term
    error: type[MetamqError] | None


CASES = [
    Case("sync, all is well", "sync", 2, Term(), None),
    Case("sync needs no clock while others count", "sync", 1, Term(lease=False), None),
    Case("sync, the set has shrunk to less than the topic needs", "sync", 2, Term(1, alone=True), NotEnoughReplicas),
    Case("sync, the set has shrunk to what the topic needs", "sync", 1, Term(1, alone=True), None),
    Case("sync, alone and cut off from ZooKeeper", "sync", 1, Term(1, alone=True, lease=False), Fenced),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_looked_at_again_before_the_answer(tmp_path: Path, case: Case) -> None:
    async def scenario(master: Master) -> None:
        partition = master.partition
        assert isinstance(partition, Partition)
        partition.bound(0, 0)  # a slave counts, and has nothing
        term = Term()
        transfer = GroupTransferService(0, cast(Any, term), lambda: term.lease)
        config = replace(SYNC, min_insync=case.min_insync)
        transfer.admit(config)
        answers: list[MetamqError | None] = []
        master.append()
        transfer.when_acknowledged(partition, config, 1, answers.append)
        assert answers == []
        term.__dict__.update(case.then.__dict__)
        partition.bound(1, partition.log.end_position)
        (answer,) = answers
        assert (answer if case.error is None else type(answer)) == case.error
        assert answer is None or answer.outcome == "unknown", "it is stored here"

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(_with(make, scenario))


async def _with(make: object, scenario: object) -> None:
    await scenario(await make())  # type: ignore[operator]


def test_async_is_acknowledged_at_once_while_the_lease_lasts(tmp_path: Path) -> None:
    async def scenario(master: Master) -> None:
        partition = master.partition
        assert isinstance(partition, Partition)
        partition.bound(0, 0)
        term = Term()
        transfer = GroupTransferService(0, cast(Any, term), lambda: term.lease)
        answers: list[MetamqError | None] = []
        master.append()
        transfer.when_acknowledged(partition, TOPIC, 1, answers.append)
        assert answers == [None]
        term.lease = False
        master.append()
        transfer.when_acknowledged(partition, TOPIC, 2, answers.append)
        assert isinstance(answers[1], Fenced)
        assert answers[1].outcome == "unknown"

    with a_master(tmp_path) as (_topics, make):
        asyncio.run(_with(make, scenario))


@pytest.mark.parametrize(
    ("term", "error"), [(Term(1), NotEnoughReplicas), (Term(lease=False), Fenced)], ids=["too few", "no lease"]
)
def test_what_is_refused_before_the_append_stores_nothing(term: Term, error: type[MetamqError]) -> None:
    transfer = GroupTransferService(0, cast(Any, term), lambda: term.lease)
    with pytest.raises(error) as caught:
        transfer.admit(replace(SYNC, min_insync=2))
    assert caught.value.outcome == "not_done"
