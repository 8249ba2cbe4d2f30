"""What becomes of the branches of a sink that is exactly once: rules by value, without I/O.

Each task attempt writes into branches of its own, one at each broker that its rows go to, and prepares them. Which
attempts win is one decision a batch, made by the driver and recorded before anything is committed:

    a branch of a batch with a decision that lists it         is committed, by whoever finds it
    one of a batch with a decision that does not              is rolled back
    one of a batch below the newest decision, without any     is rolled back: nobody can decide about it any more
    one of a later batch                                      is left alone: its driver may be about to decide

A sink's node has the number of its newest decision, its *floor*: no batch below it is decided about any more. So old
decisions can be removed, and a driver that was paused for long finds the floor above its batch, and commits nothing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from metamq.errors import CorruptData
from metamq.wire.xa import FORMAT_ID, Xid

PREFIX = b"spark:"
JOB = "job-"
"""What the names of batch writes begin with: each is a sink of its own, with one batch."""
NAME_CHARS_MAX = 36


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

    def has(self, attempt: str) -> bool:
        """Whether it is to be committed."""
        return attempt in self.winners

    def to_json(self) -> bytes:
        """For its node."""
        winners = {attempt: {str(one): history for one, history in at.items()} for attempt, at in self.winners.items()}
        return json.dumps({"winners": winners}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Decision:
        """Raises CorruptData."""
        try:
            winners: dict[str, dict[str, str]] = json.loads(data)["winners"]
            return cls({attempt: {int(one): text for one, text in at.items()} for attempt, at in winners.items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptData("a decision of a Spark sink in ZooKeeper", f"{data[:100]!r}: {error!r}") from None


@dataclass(frozen=True, slots=True)
class SinkState:
    """A sink's own node. `identity`: the query that it is of, by its checkpoint's id."""

    identity: str
    floor: int

    def to_json(self) -> bytes:
        """For its node."""
        return json.dumps({"query": self.identity, "floor": self.floor}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> SinkState:
        """Raises CorruptData."""
        try:
            fields: dict[str, Any] = json.loads(data)
            return cls(str(fields["query"]), int(fields["floor"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptData("the node of a Spark sink in ZooKeeper", f"{data[:100]!r}: {error!r}") from None


class Ends(NamedTuple):
    """What is to be done with branches that were found prepared."""

    commit: list[tuple[Xid, int]]
    """(Xid, broker id)"""
    rollback: list[tuple[Xid, int]]


def ends(sink: str, newest: int, decisions: Mapping[int, Decision], prepared: Iterable[tuple[Xid, int]]) -> Ends:
    """Of the branches of a sink at all brokers, given its newest decision's batch id and all decisions there are."""
    found = Ends([], [])
    for xid, broker_id in prepared:
        name = name_of(xid)
        if name is None or name.sink != sink or name.batch_id > newest:
            continue
        decision = decisions.get(name.batch_id)
        (found.commit if decision is not None and decision.has(name.attempt) else found.rollback).append(
            (xid, broker_id)
        )
    return found
