"""The rules for the branches of an exactly-once sink: by value, without I/O.

Each task attempt writes into branches of its own, one at each broker that its rows go to, and prepares them. The driver
makes one decision per batch, which attempts win, and records it before anything is committed:

    a branch of a batch with a decision that lists it         is committed, by any process that finds it.
    a branch of a batch with a decision that does not         is rolled back.
    a branch of a batch below the newest decision, without    is rolled back: it cannot get a decision any more.
    a branch of a later batch                                 is left alone: its driver may be about to decide.

A sink's node has the number of its newest decision, its *floor*: no batch below it gets a decision any more. So old
decisions can be removed. A driver that was paused for long finds that the floor is above its batch, and fails.

A batch write is a sink of its own. Its node exists from before its first task until its decision is carried out. A
branch without such a node has no owner, and any process that finds it rolls it back.
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
"""The prefix of the names of batch writes: each is a sink of its own, with one batch."""
NAME_CHARS_MAX = 36
RUNS = 16
"""The number of a query's runs that its sink remembers. An older run is refused because its batches are behind."""
NEWEST = "Continue with the newest checkpoint. With a new one the query writes its messages a second time."


class NotOurs(ConfigError):
    """The sink belongs to another query or run, or was given up: this one cannot decide about it."""


def new_job() -> str:
    """Returns the name of a new batch write."""
    return JOB + secrets.token_hex(16)


class BranchName(NamedTuple):
    """The owner of a branch, as in its Xid: "spark:<sink>:<batch>" and "<task attempt>.<broker id>"."""

    sink: str
    batch_id: int
    attempt: str

    def at(self, broker_id: int) -> Xid:
        """Returns the branch's Xid at a broker."""
        return Xid(FORMAT_ID, self.whole, f"{self.attempt}.{broker_id}".encode()).check()

    @property
    def whole(self) -> bytes:
        """The common part of the names of all branches of the batch."""
        return PREFIX + f"{self.sink}:{self.batch_id}".encode()


def new_attempt(partition: int, number: int) -> str:
    """Returns the name of a task attempt, which no other attempt has."""
    return f"{partition}.{number}.{secrets.token_hex(8)}"


def name_of(xid: Xid) -> BranchName | None:
    """Returns the owner of a branch; None if it is not a sink's."""
    try:
        prefix, sink, batch_id = xid.gtrid.decode("ascii").split(":")
        attempt, _, _broker_id = xid.bqual.decode("ascii").rpartition(".")
        if xid.format_id == FORMAT_ID and prefix == PREFIX[:-1].decode() and attempt:
            return BranchName(sink, int(batch_id), attempt)
    except ValueError:  # decoding raises it, too
        pass
    return None


@dataclass(frozen=True, slots=True)
class Decision:
    """The attempts that win a batch: for each the brokers that have a branch of it, with their histories then."""

    winners: Mapping[str, Mapping[int, str]]
    content: str = ""
    """A digest of what the batch reads; empty if unknown."""

    def has(self, attempt: str) -> bool:
        """True if the attempt must be committed."""
        return attempt in self.winners

    @property
    def brokers(self) -> set[int]:
        """The brokers that have branches of the winners."""
        return {broker_id for at in self.winners.values() for broker_id in at}

    def to_json(self) -> bytes:
        """Returns the node's data. Each place, a broker with its history, is in it once. Raises ConfigError."""
        places = sorted({place for at in self.winners.values() for place in at.items()})
        number = {place: index for index, place in enumerate(places)}
        winners = {attempt: [number[place] for place in at.items()] for attempt, at in self.winners.items()}
        fields = {"content": self.content, "places": places, "winners": winners}
        data = json.dumps(fields, separators=(",", ":")).encode()
        if len(data) > MAX_DATA_BYTES:
            raise ConfigError(
                f"the decision about {len(winners):,} tasks with rows at {len(places):,} brokers has {len(data):,} "
                f"bytes, and a node of ZooKeeper {MAX_DATA_BYTES:,} at most",
                hint="Write in fewer tasks: coalesce(n) before the write.",
            )
        return data

    @classmethod
    def from_json(cls, data: bytes) -> Decision:
        """Parses a node's data. Raises CorruptData."""

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
    """A sink's own node. `identity`: the id of the query, from its checkpoint."""

    identity: str
    floor: int
    runs: tuple[str, ...] = ()
    """The query's runs, one for each start, in the order in which they began to write; the last one decides."""
    finished: bool = False
    """True if a batch write's decision is carried out."""
    aborted: str = ""
    """One of the attempts that the last abort rolled back. No decision may list it."""

    def to_json(self) -> bytes:
        """Returns the node's data."""
        fields = {"query": self.identity, "floor": self.floor, "runs": self.runs, "finished": self.finished}
        return json.dumps({**fields, "aborted": self.aborted}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> SinkState:
        """Parses a node's data. Raises CorruptData."""

        def read(fields: dict[str, Any]) -> SinkState:
            runs = tuple(str(run) for run in fields.get("runs", ()))
            finished, aborted = bool(fields.get("finished", False)), str(fields.get("aborted", ""))
            return cls(str(fields["query"]), int(fields["floor"]), runs, finished, aborted)

        return read_document("the node of a Spark sink in ZooKeeper", data, read)

    def joined(self, sink: str, run: str) -> SinkState:
        """Returns the state with a run that will write. Raises NotOurs if another run has followed it."""
        if not run or self.runs[-1:] == (run,):
            return self
        if run in self.runs:
            raise taken_over(sink, self.runs[-1])
        return replace(self, runs=(*self.runs, run)[-RUNS:])


def taken_over(sink: str, by: str) -> NotOurs:
    """Returns the error for a run that another run has followed."""
    return NotOurs(
        f"the sink {sink} was taken over by the run {by} of its query, which began to write later than this one",
        hint="Only one driver may run a query, and only one a copy of its checkpoint: end the other one, or this one.",
    )


def check_batch(
    sink: str, state: SinkState, run: str, batch_id: int, decision: Decision, standing: Decision | None
) -> None:
    """Checks that a batch may be decided, or is the one that `standing` has decided. Raises NotOurs.

    A query's only driver runs again at most the newest batch, with the same content.
    """
    if standing is not None and standing.winners == decision.winners:
        return  # this driver's own decision, whose answer was lost
    if run and state.runs and state.runs[-1] != run:
        raise taken_over(sink, state.runs[-1])
    if state.aborted and decision.has(state.aborted):
        raise NotOurs(
            f"batch {batch_id} of the sink {sink} was aborted, and its rows were rolled back: it cannot be committed",
            hint="Start the query again: the batch runs again.",
        )
    if batch_id < state.floor:
        raise NotOurs(
            f"batch {batch_id} of the sink {sink} runs again, but batch {state.floor} is decided: the checkpoint is "
            "older than the sink, for example from a backup, or another driver has continued the query",
            hint=NEWEST,
        )
    if standing is not None and standing.content and decision.content and standing.content != decision.content:
        raise NotOurs(
            f"batch {batch_id} of the sink {sink} was decided with other offsets of its sources: the checkpoint is a "
            "copy, or from a backup, or another driver has continued the query",
            hint=NEWEST,
        )


class Ends(NamedTuple):
    """The branches to commit, and those to roll back, of the prepared branches that were found."""

    commit: list[tuple[Xid, int]]
    """(Xid, broker id)"""
    rollback: list[tuple[Xid, int]]

    def add(self, one: tuple[Xid, int], *, wins: bool) -> None:
        """Adds a branch."""
        (self.commit if wins else self.rollback).append(one)


def batches_of(sink: str, newest: int, prepared: Iterable[tuple[Xid, int]]) -> set[int]:
    """Returns the batches up to a decided one that have branches: to end these, their decisions must be known."""
    names = [name_of(xid) for xid, _broker_id in prepared]
    return {name.batch_id for name in names if name is not None and name.sink == sink and name.batch_id <= newest}


def ends(sink: str, newest: int, decisions: Mapping[int, Decision], prepared: Iterable[tuple[Xid, int]]) -> Ends:
    """Returns the ends of a sink's branches at all brokers. `newest`: the batch id of its newest decision; `decisions`:
    those that exist for `batches_of`."""
    found = Ends([], [])
    for one in prepared:
        name = name_of(one[0])
        if name is not None and name.sink == sink and name.batch_id <= newest:
            decision = decisions.get(name.batch_id)
            found.add(one, wins=decision is not None and decision.has(name.attempt))
    return found


def ends_of_jobs(jobs: Mapping[str, Decision | None], prepared: Iterable[tuple[Xid, int]]) -> Ends:
    """Returns the ends of batch writes' branches. `jobs`: the batch writes that have nodes, read after the branches. A
    write with a node and no decision may be about to decide."""
    found = Ends([], [])
    for one in prepared:
        name = name_of(one[0])
        if name is None or not name.sink.startswith(JOB):
            continue
        decision = jobs.get(name.sink)
        if decision is not None or name.sink not in jobs:
            found.add(one, wins=decision is not None and decision.has(name.attempt))
    return found
