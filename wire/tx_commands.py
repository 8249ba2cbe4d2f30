"""The headers of the transaction commands. docs/wire-protocol.md has the tables."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from metamq.wire.commands import Entries
from metamq.wire.limits import FOLLOWERS_MAX, VERBS_MAX, AtMost


class Tx(NamedTuple):
    """Verbs of one branch, carried out in this order up to the first that fails. The answer is a TxReply."""

    xid: Annotated[list[Any], AtMost(3)]
    """[format id, gtrid, bqual]."""
    epoch: int
    """The use of the id, as START answered it; 0: the existing branch, or one that these verbs begin."""
    session: str
    """The session: a name that the client chooses, at most 64 characters. It outlives a connection by some seconds."""
    verbs: Annotated[list[int], AtMost(VERBS_MAX)]
    """metamq.wire.xa.Verb."""
    timeout_ms: int
    """START: milliseconds after which an unprepared branch is rolled back; 0: the broker's default."""
    messages: int
    """PREPARE, COMMIT_ONE_PHASE: number of messages that the session has sent in the branch; -1: unknown."""
    first: int
    """SEND: number of batches that the session has sent in the branch before these."""
    entries: Annotated[list[Any], Entries]
    """SEND: a PutEntry for each batch in the body."""
    follows: Annotated[list[int], AtMost(3)] = []  # noqa: RUF012
    """PREPARE: the decider of the branch, [broker id, its generation, epoch]: the branch with the same id at another
    broker, with the epoch that START returned there. Empty: the transaction manager decides."""
    followers: Annotated[list[int], AtMost(FOLLOWERS_MAX)] = []  # noqa: RUF012
    """DECIDE: pairs of broker id and epoch, of the branches with the same id that follow."""


class TxReply(NamedTuple):
    """The results of a Tx."""

    history: str
    """Broker id and generation, as "0:1". If it has changed, acknowledged messages may be gone."""
    results: Annotated[list[Any], AtMost(VERBS_MAX)]
    """A TxResult for each verb that was carried out, including the first that failed."""


class TxResult(NamedTuple):
    """The result of one verb."""

    status: int
    code: int
    """metamq.wire.xa.XACode."""
    epoch: int
    error: Any


class Branches(NamedTuple):
    """Asks for the branches of a broker, in the order of their epochs, after this one."""

    after_epoch: int
    all: bool
    """True: also branches that are not prepared."""


class BranchInfo(NamedTuple):
    """One branch."""

    xid: Annotated[list[Any], AtMost(3)]
    epoch: int
    state: str
    owner: str
    messages: int
    bytes: int
    prepared_us: int
    """Time of its prepare (microseconds since 1970) or of its decision; 0 before."""
    follows: Annotated[list[int], AtMost(3)] = []  # noqa: RUF012
    """The decider, like in Tx."""
    followers: Annotated[list[int], AtMost(FOLLOWERS_MAX)] = []  # noqa: RUF012
    """The followers, like in Tx."""


class BranchesReply(NamedTuple):
    """A page of branches."""

    history: str
    branches: Annotated[list[Any], Entries]
    more: bool
