"""The headers of the transaction commands. docs/wire-protocol.md has the tables."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from metamq.wire.commands import Entries
from metamq.wire.limits import FOLLOWERS_MAX, VERBS_MAX, AtMost


class Tx(NamedTuple):
    """Verbs of one branch, carried out in this order up to the first that fails. Answered by a TxReply."""

    xid: Annotated[list[Any], AtMost(3)]
    """[format id, gtrid, bqual]."""
    epoch: int
    """Which use of the id is meant, as START answered it; 0: whichever there is, or one that these verbs begin."""
    session: str
    """Whose work it is: the caller's own choice, at most 64 characters. It outlives a connection by some seconds."""
    verbs: Annotated[list[int], AtMost(VERBS_MAX)]
    """metamq.wire.xa.Verb."""
    timeout_ms: int
    """START: after so long a branch that is not prepared is rolled back; 0: the broker's default."""
    messages: int
    """PREPARE, COMMIT_ONE_PHASE: how many messages the session has sent in the branch; -1: it does not say."""
    first: int
    """SEND: how many batches the session has sent in the branch before these."""
    entries: Annotated[list[Any], Entries]
    """SEND: a PutEntry for each batch in the body."""
    follows: Annotated[list[int], AtMost(3)] = []  # noqa: RUF012
    """PREPARE: whose decision the branch follows. [broker id, its generation, the epoch that START was answered with
    there] of the branch with the same id at another broker; empty: its transaction manager's."""
    followers: Annotated[list[int], AtMost(FOLLOWERS_MAX)] = []  # noqa: RUF012
    """DECIDE: broker id and epoch, and the next, of the branches with the same id that follow."""


class TxReply(NamedTuple):
    """What became of a Tx."""

    history: str
    """Broker id and generation, as "0:1": another one than before means that what was acknowledged may be gone."""
    results: Annotated[list[Any], AtMost(VERBS_MAX)]
    """A TxResult for each verb that was carried out, the first that failed included."""


class TxResult(NamedTuple):
    """What became of one verb."""

    status: int
    code: int
    """metamq.wire.xa.XACode."""
    epoch: int
    error: Any


class Branches(NamedTuple):
    """Asks for the branches of a broker, in the order of their epochs, from behind this one on."""

    after_epoch: int
    all: bool
    """Also those that are not prepared."""


class BranchInfo(NamedTuple):
    """One branch."""

    xid: Annotated[list[Any], AtMost(3)]
    epoch: int
    state: str
    owner: str
    messages: int
    bytes: int
    prepared_us: int
    """When it was prepared (microseconds since 1970), or decided; 0 while it is neither."""
    follows: Annotated[list[int], AtMost(3)] = []  # noqa: RUF012
    """As in Tx."""
    followers: Annotated[list[int], AtMost(FOLLOWERS_MAX)] = []  # noqa: RUF012
    """As in Tx."""


class BranchesReply(NamedTuple):
    """A page of branches."""

    history: str
    branches: Annotated[list[Any], Entries]
    more: bool
