"""The state of one branch in its broker. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from metamq.tx.store.records import BodyPlace, BranchKey
from metamq.tx.store.table import BranchPhase

if TYPE_CHECKING:
    from metamq.wire.xa import Xid


class Body(NamedTuple):
    """The place of one batch of the branch in the journal, and the partition that it is for."""

    position: int
    """The byte of the journal at which the batch's entry begins."""
    number: int
    """The number of the batch among the values of the entry, from 1 on."""
    place: BodyPlace
    size_bytes: int


@dataclass(slots=True)
class Association:
    """A session that works in a branch, or has suspended its work."""

    suspended: bool = False
    sent: int = 0
    """Number of bodies that the session has sent."""


@dataclass(slots=True)
class BranchState:
    """A branch that is not finished, or was finished by an operator."""

    xid: Xid
    epoch: int
    """Identifies one use of the id: higher than the epoch of any earlier use in this broker id."""
    state: BranchPhase
    owner: str = ""
    """The session that began the branch, for people to read."""
    principal: str = ""
    """The user or the certificate of that session; empty: security was off."""
    bodies: list[Body] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    """Bytes of `bodies`."""
    first_lsn: int = -1
    """LSN of the branch's oldest record in the journal; -1 if there is no record."""
    sessions: dict[str, Association] = field(default_factory=dict)
    batches_of: dict[str, int] = field(default_factory=dict)
    """Batches that each session has sent. The count continues when a session ends its work and joins again."""
    messages_of: dict[str, int] = field(default_factory=dict)
    """Messages that each session has sent."""
    timeout_s: float = 0.0
    deadline_s: float | None = None
    """The broker rolls the branch back at this time unless it is prepared before; None: never."""
    busy: bool = False
    """True while one of the branch's records is being made durable. Until then no other verb changes the branch."""
    prepared_us: int = 0
    session_lost: bool = False
    """True if the connection of a session that worked in the branch was lost."""
    rolled_back_code: int = 0
    """The reason why the branch can only be rolled back (XA_RB*)."""
    rolled_back_reason: str = ""
    follows: tuple[int, ...] = ()
    """(broker id, decider generation, epoch) of the branch whose decision a prepared branch follows."""
    followers: tuple[int, ...] = ()
    """(broker id, epoch, ...) of the branches that follow a decided branch."""
    heuristic_commit: bool = False
    """The operator's decision. Valid if `state` is HEURISTIC."""

    @property
    def key(self) -> BranchKey:
        """The key that the branch's records begin with."""
        return BranchKey(self.xid, self.epoch)

    @property
    def associated(self) -> bool:
        """True if a session works in the branch now."""
        return any(not association.suspended for association in self.sessions.values())

    @property
    def suspended(self) -> bool:
        """True if a session has suspended its work in the branch."""
        return any(association.suspended for association in self.sessions.values())

    def is_of(self, session: str) -> bool:
        """True if the session began the branch, works in it, or did so before."""
        return session == self.owner or session in self.sessions or session in self.batches_of

    def becomes_rollback_only(self, code: int, reason: str) -> None:
        """Drops the sent messages: from now on the branch can only be rolled back."""
        self.state = BranchPhase.ROLLBACK_ONLY
        self.rolled_back_code, self.rolled_back_reason = code, reason
        self.drop_bodies()
        self.first_lsn = -1
        self.deadline_s = None

    def drop_bodies(self) -> None:
        """Drops the bodies: they are rolled back, or a CommittedBranch has them."""
        self.bodies, self.bytes = [], 0
