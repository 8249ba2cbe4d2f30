"""One branch as its broker knows it. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from metamq.tx.store.records import BodyPlace, BranchKey
from metamq.tx.store.table import BranchPhase
from metamq.wire.xa import Xid


class Body(NamedTuple):
    """Where a batch of the branch lies in the journal, and where it is to go."""

    position: int
    """The byte of the journal at which its entry begins."""
    number: int
    """Which of the entry's values it is, from 1 on."""
    place: BodyPlace
    size_bytes: int


@dataclass(slots=True)
class Association:
    """A session that works in a branch, or has suspended its work."""

    suspended: bool = False
    sent: int = 0
    """Bodies that came from it."""


@dataclass(slots=True)
class BranchState:
    """A branch that is not finished, or was finished by an operator."""

    xid: Xid
    epoch: int
    """Which use of the id this is: higher than any before it in this broker id."""
    state: BranchPhase
    owner: str = ""
    """For people: the client that began it."""
    bodies: list[Body] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    """Of its bodies, as long as it has them."""
    first_lsn: int = -1
    """Where its oldest record stands in the journal; -1 while it has none."""
    sessions: dict[str, Association] = field(default_factory=dict)
    batches_of: dict[str, int] = field(default_factory=dict)
    """What each session has sent, also before it ended its work and joined again: it counts on."""
    messages_of: dict[str, int] = field(default_factory=dict)
    """What came from each session."""
    timeout_s: float = 0.0
    deadline_s: float | None = None
    """When it is rolled back unless it is prepared before; None: never."""
    busy: bool = False
    """Whether a record of it is being made durable: nothing else happens to it meanwhile."""
    prepared_us: int = 0
    session_lost: bool = False
    """Whether the connection of somebody who worked in it was lost."""
    rolled_back_code: int = 0
    """Why it can be rolled back only (XA_RB*)."""
    rolled_back_reason: str = ""
    follows: tuple[int, ...] = ()
    """Of a prepared one: (broker id, generation, epoch) of the branch whose decision it follows."""
    followers: tuple[int, ...] = ()
    """Of a decided one: (broker id, epoch, ...) of those that follow it."""
    heuristic_commit: bool = False
    """What the operator decided, once `state` says that one did."""

    @property
    def key(self) -> BranchKey:
        """What its records begin with."""
        return BranchKey(self.xid, self.epoch)

    @property
    def associated(self) -> bool:
        """Whether somebody works in it at present."""
        return any(not association.suspended for association in self.sessions.values())

    @property
    def suspended(self) -> bool:
        """Whether somebody's work in it is suspended."""
        return any(association.suspended for association in self.sessions.values())

    def is_of(self, session: str) -> bool:
        """Whether a session has begun it, works in it, or did."""
        return session == self.owner or session in self.sessions or session in self.batches_of

    def becomes_rollback_only(self, code: int, reason: str) -> None:
        """What was sent is given up."""
        self.state = BranchPhase.ROLLBACK_ONLY
        self.rolled_back_code, self.rolled_back_reason = code, reason
        self.gives_up_bodies()
        self.first_lsn = -1
        self.deadline_s = None

    def gives_up_bodies(self) -> None:
        """They are given up, or a commit's from here on."""
        self.bodies, self.bytes = [], 0
