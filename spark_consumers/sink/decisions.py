"""What becomes of the branches of a sink that is exactly once: rules by value, without I/O.

Each task attempt writes into branches of its own, one at each broker that its rows go to, and prepares them. Which
attempts win is one decision a batch, made by the driver and recorded before anything is committed:

    a branch of a batch with a decision that lists it         is committed, by whoever finds it
    one of a batch with a decision that does not              is rolled back
    one of a batch below the newest decision, without any     is rolled back: nobody can decide about it any more
    one of a later batch                                      is left alone: its driver may be about to decide

A sink's node has the number of its newest decision, its *floor*: no batch below it is decided about any more. So old
decisions can be removed, and a driver that was paused for long finds the floor above its batch, and is told.

A batch write is a sink of its own. Its node is there before its first task, and until all that it decided is committed:
a branch without one is nobody's, and is rolled back by whoever finds it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from metamq.errors import ConfigError
from metamq.wire.xa import FORMAT_ID, Xid
from metamq.zk.documents import read_document
from metamq.zk.session.session import MAX_DATA_BYTES

PREFIX = b"spark:"
JOB = "job-"
"""What the names of batch writes begin with: each is a sink of its own, with one batch."""
NAME_CHARS_MAX = 36
RUNS = 16
"""Runs of a query that its sink knows. One that was followed by more is refused by the batches it is behind."""


class NotOurs(ConfigError):
    """The sink is another query's, or run's, or given up: this one decides about nothing there."""


def new_job() -> str:
    """The name of one batch write."""
    return JOB + secrets.token_hex(16)


class BranchName(NamedTuple):
    """Whose a branch is, as its Xid has it: "spark:<sink>:<batch>" and "<task attempt>.<broker id>"."""

    sink: str
    batch_id: int
    attempt: str

    def at(self, broker_id: int) -> Xid:
        """Its Xid at a broker."""
        return Xid(FORMAT_ID, self.whole, f"{self.attempt}.{broker_id}".encode()).check()

    @property
    def whole(self) -> bytes:
        """Of all branches of the batch."""
        return PREFIX + f"{self.sink}:{self.batch_id}".encode()


def new_attempt(partition: int, number: int) -> str:
    """A task attempt's, which no other ever has."""
    return f"{partition}.{number}.{secrets.token_hex(8)}"


def name_of(xid: Xid) -> BranchName | None:
    """Whose a branch is; None when it is no sink's."""
    try:
        prefix, sink, batch_id = xid.gtrid.decode("ascii").split(":")
        attempt, _, _broker_id = xid.bqual.decode("ascii").rpartition(".")
        if xid.format_id == FORMAT_ID and prefix == PREFIX[:-1].decode() and attempt:
            return BranchName(sink, int(batch_id), attempt)
    except ValueError:  # of decoding, too
        pass
    return None


@dataclass(frozen=True, slots=True)
class Decision:
    """The attempts that win a batch: for each the brokers where it has a branch, with their histories then."""

    winners: Mapping[str, Mapping[int, str]]
    content: str = ""
    """A digest of what the batch was made from; empty where that is not known."""

    def has(self, attempt: str) -> bool:
        """Whether it is to be committed."""
        return attempt in self.winners

    @property
    def brokers(self) -> set[int]:
        """Where it has branches."""
        return {broker_id for at in self.winners.values() for broker_id in at}

    def to_json(self) -> bytes:
        """For its node. Each place, a broker with its history, stands there once. Raises ConfigError."""
        places = sorted({place for at in self.winners.values() for place in at.items()})
        number = {place: index for index, place in enumerate(places)}
        winners = {attempt: [number[place] for place in at.items()] for attempt, at in self.winners.items()}
        fields = {"content": self.content, "places": places, "winners": winners}
        data = json.dumps(fields, separators=(",", ":")).encode()
        if len(data) > MAX_DATA_BYTES:
            raise ConfigError(
                f"what is to be recorded of {len(winners):,} tasks with rows at {len(places):,} brokers has "
                f"{len(data):,} bytes, and a node of ZooKeeper's {MAX_DATA_BYTES:,} at most",
                hint="Write in fewer tasks: coalesce(n) before the write.",
            )
        return data

    @classmethod
    def from_json(cls, data: bytes) -> Decision:
        """Raises CorruptData."""

        def read(fields: dict[str, Any]) -> Decision:
            places = [(int(one), str(history)) for one, history in fields["places"]]
            winners: dict[str, list[int]] = fields["winners"]
            return cls(
                {attempt: dict(places[number] for number in at) for attempt, at in winners.items()},
                str(fields["content"]),
            )

        return read_document("a decision of a Spark sink in ZooKeeper", data, read)


@dataclass(frozen=True, slots=True)
class SinkState:
    """A sink's own node. `identity`: the query that it is of, by its checkpoint's id."""

    identity: str
    floor: int
    runs: tuple[str, ...] = ()
    """The query's, each start one, in the order in which they began to write; the last one decides."""
    finished: bool = False
    """Of a batch write: all it decided is committed."""

    def to_json(self) -> bytes:
        """For its node."""
        fields = {"query": self.identity, "floor": self.floor, "runs": self.runs, "finished": self.finished}
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, data: bytes) -> SinkState:
        """Raises CorruptData."""

        def read(fields: dict[str, Any]) -> SinkState:
            runs = tuple(str(run) for run in fields.get("runs", ()))
            return cls(str(fields["query"]), int(fields["floor"]), runs, bool(fields.get("finished", False)))

        return read_document("the node of a Spark sink in ZooKeeper", data, read)

    def joined(self, sink: str, run: str) -> SinkState:
        """With a run that is about to write. Raises NotOurs when another one has followed it."""
        if not run or self.runs[-1:] == (run,):
            return self
        if run in self.runs:
            raise taken_over(sink, self.runs[-1])
        return replace(self, runs=(*self.runs, run)[-RUNS:])


def taken_over(sink: str, by: str) -> NotOurs:
    """What a run is told that another one has followed."""
    return NotOurs(
        f"the sink {sink} was taken over by the run {by} of its query, which began to write later than this one",
        hint="Only one driver may run a query, and only one a copy of its checkpoint: end the other one, or this.",
    )


def check_batch(
    sink: str, state: SinkState, run: str, batch_id: int, decision: Decision, standing: Decision | None
) -> None:
    """Whether a batch may be decided about, or be taken for the one that `standing` has decided. Raises NotOurs.

    The driver that a query really has runs again the newest batch at most, made from the same as before.
    """
    if standing is not None and standing.winners == decision.winners:
        return  # its own, whose answer was lost
    if run and state.runs and state.runs[-1] != run:
        raise taken_over(sink, state.runs[-1])
    if batch_id < state.floor:
        raise NotOurs(
            f"batch {batch_id} of the sink {sink} comes again, though batch {state.floor} is decided: its checkpoint "
            "is older than what it has written, as one from a backup is, or another driver has gone on with the query",
            hint="Go on with the newest checkpoint. With a new one the query writes again what it reads again.",
        )
    if standing is not None and standing.content and decision.content and standing.content != decision.content:
        raise NotOurs(
            f"batch {batch_id} of the sink {sink} is decided, and was made from other offsets of its sources than this "
            "one: its checkpoint is a copy, or from a backup, or another driver has gone on with the query",
            hint="Go on with the newest checkpoint. With a new one the query writes again what it reads again.",
        )


class Ends(NamedTuple):
    """What is to be done with branches that were found prepared."""

    commit: list[tuple[Xid, int]]
    """(Xid, broker id)"""
    rollback: list[tuple[Xid, int]]

    def add(self, one: tuple[Xid, int], *, wins: bool) -> None:
        """Takes in a branch."""
        (self.commit if wins else self.rollback).append(one)


def batches_of(sink: str, newest: int, prepared: Iterable[tuple[Xid, int]]) -> set[int]:
    """Those up to a decided one that a sink's branches are of: their decisions have to be known to end them."""
    names = [name_of(xid) for xid, _broker_id in prepared]
    return {name.batch_id for name in names if name is not None and name.sink == sink and name.batch_id <= newest}


def ends(sink: str, newest: int, decisions: Mapping[int, Decision], prepared: Iterable[tuple[Xid, int]]) -> Ends:
    """Of the branches of a sink at all brokers, given its newest decision's batch id and the decisions of `batches_of`
    that there are."""
    found = Ends([], [])
    for one in prepared:
        name = name_of(one[0])
        if name is not None and name.sink == sink and name.batch_id <= newest:
            decision = decisions.get(name.batch_id)
            found.add(one, wins=decision is not None and decision.has(name.attempt))
    return found


def ends_of_jobs(jobs: Mapping[str, Decision | None], prepared: Iterable[tuple[Xid, int]]) -> Ends:
    """Of the branches of batch writes, given those writes that have nodes, read after the branches. One that has a
    node and no decision may be about to decide."""
    found = Ends([], [])
    for one in prepared:
        name = name_of(one[0])
        if name is None or not name.sink.startswith(JOB):
            continue
        decision = jobs.get(name.sink)
        if decision is not None or name.sink not in jobs:
            found.add(one, wins=decision is not None and decision.has(name.attempt))
    return found
